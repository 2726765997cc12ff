"""Which files are open."""

from __future__ import annotations

from collections.abc import Callable, Collection


class OpenCounts:
    """Constant: its parts; ``known`` is False where the kernel does not say what it opens.
    Changing: the number of handles by inode."""

    def __init__(
        self,
        used_elsewhere: Callable[[int], bool] = lambda ino: False,
        all_elsewhere: Callable[[], Collection[int]] = tuple,
        *,
        known: bool = True,
    ) -> None:
        """Opens without a handle here: ``used_elsewhere`` says whether an inode has any,
        ``all_elsewhere`` which inodes have."""
        self.known = known
        self._used_elsewhere = used_elsewhere
        self._all_elsewhere = all_elsewhere
        self._handles: dict[int, int] = {}

    def add(self, ino: int) -> None:
        self._handles[ino] = self._handles.get(ino, 0) + 1

    def remove(self, ino: int) -> None:
        left = self._handles[ino] - 1
        if left:
            self._handles[ino] = left
        else:
            del self._handles[ino]

    def __contains__(self, ino: int) -> bool:
        """As far as that is ``known``."""
        return ino in self._handles or self._used_elsewhere(ino)

    def inodes(self) -> Collection[int]:
        """All inodes that are open."""
        return {*self._handles, *self._all_elsewhere()}
