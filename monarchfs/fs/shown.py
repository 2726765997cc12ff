"""What the kernel may have of directory listings in its page cache. Pure.

It keeps names and types there, not attributes. Those come along when it has to ask (readdirplus),
which is cheaper than a look-up each: so a listing is to be shown again once they are worth it.
"""

from __future__ import annotations

from collections import OrderedDict

MOST_KEPT = 100_000
"""Directories of which is remembered what was shown; others are shown again."""

BARE_SECONDS = 10.0
"""A listing is shown again after this long if there were names in it without attributes: somebody
may have asked for them meanwhile."""

_NEVER_NS = 1 << 62


class Shown:
    """Changing: by directory, which listing (by the time it was fetched) the kernel was shown, and
    until when it need not be shown again."""

    def __init__(self) -> None:
        self._shown: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def opened(self, ino: int, fetched_ns: int, now_ns: int) -> bool:
        """A directory is opened whose listing is that of ``fetched_ns``: whether what the kernel
        has of it may be used. Otherwise that is dropped, and the listing shown anew."""
        before = self._shown.get(ino)
        if before is not None and before[0] == fetched_ns and now_ns < before[1]:
            return True
        self._shown[ino] = fetched_ns, _NEVER_NS
        self._shown.move_to_end(ino)
        if len(self._shown) > MOST_KEPT:
            self._shown.popitem(last=False)
        return False

    def until(self, ino: int, until_ns: int) -> None:
        """Something of the listing is shown that is to be shown again after that time."""
        before = self._shown.get(ino)
        if before is not None and until_ns < before[1]:
            self._shown[ino] = before[0], until_ns

    def changed(self, ino: int) -> None:
        """A name in it appeared, went, or stands for something else."""
        self._shown.pop(ino, None)
