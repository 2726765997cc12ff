"""The numbers by which the kernel knows what it has opened."""

from __future__ import annotations

import errno
from typing import Generic, TypeVar

T = TypeVar("T")


class Handles(Generic[T]):
    """Numbers are never used twice: an answer may be carried out twice (FUSE_NOTIFY_RESEND)."""

    def __init__(self) -> None:
        self._open: dict[int, T] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, what: T) -> int:
        self._last += 1
        self._open[self._last] = what
        return self._last

    def get(self, number: int) -> T:
        """Raises OSError EBADF for a number that is not open."""
        try:
            return self._open[number]
        except KeyError:
            raise OSError(errno.EBADF, "unknown handle") from None

    def pop(self, number: int) -> T | None:
        """None for a number that is not open: a second RELEASE is not an error."""
        return self._open.pop(number, None)
