"""The numbers by which the kernel knows what it has opened, and what they stand for here."""

from __future__ import annotations

import errno
from typing import Generic, Protocol, TypeVar

from monarchfs.fuse.slots import Slots


class Openable(Protocol):
    """What a number may stand for."""

    @property
    def ino(self) -> int: ...

    def release(self) -> None: ...


T = TypeVar("T", bound=Openable)


class Handles(Generic[T]):
    """Numbers are never used twice: a request may be carried out twice (FUSE_NOTIFY_RESEND).

    Constant: the table that outlives this process. Changing: what its numbers stand for.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._open: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, what: T, unique: int) -> int:
        """The number for the answer to the OPEN request ``unique``. Raises OSError ENFILE."""
        number = self.slots.add(what.ino, unique)
        if (before := self._open.get(number)) is not None:
            before.release()  # taken over from a worker that died before it answered
        self._open[number] = what
        return number

    def take_over(self, number: int, what: T) -> None:
        """``number`` was given out by an earlier worker, or without Python. Raises OSError EBADF if
        it is not open."""
        if not self.slots.own(number):
            what.release()
            raise OSError(errno.EBADF, "unknown handle")
        self._open[number] = what

    def get(self, number: int) -> T | None:
        """None for a number under which nothing is known here: see ``slots.ino``."""
        return self._open.get(number)

    def pop(self, number: int) -> T | None:
        """None for a number that is not open: a second RELEASE is not an error."""
        self.slots.end(number)
        return self._open.pop(number, None)
