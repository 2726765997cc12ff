"""``Slots`` in C: threads of the C part (_table.c) add to the table and take from it, too."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from monarchfs.fuse.slots import Slot, Slots


class FastSlots(Slots):
    """Of one table a process, the one that was begun with last. The header is as in Python."""

    def __init__(self, hooks: ModuleType, fd: int) -> None:
        """As Slots; raises OSError, too. ``hooks`` is the C part."""
        super().__init__(fd)
        hooks.table_attach(fd)
        self._hooks = hooks

    def __len__(self) -> int:
        length: int = self._hooks.table_length()
        return length

    def __iter__(self) -> Iterator[Slot]:
        for slot in self._hooks.table_list():
            yield Slot(*slot)

    def add(self, ino: int, unique: int, backing_id: int = 0) -> int:
        number: int = self._hooks.table_add(ino, unique, backing_id)
        return number

    def end(self, number: int) -> int | None:
        ino: int | None = self._hooks.table_end(number)
        return ino

    def ino(self, number: int) -> int | None:
        ino: int | None = self._hooks.table_ino(number)
        return ino

    def own(self, number: int) -> bool:
        owned: bool = self._hooks.table_own(number)
        return owned

    def close(self) -> None:
        self._hooks.table_detach()
        super().close()
