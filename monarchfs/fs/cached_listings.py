"""What the kernel may have of directory listings in its page cache. Pure.

It keeps names and types there, not attributes. Those come along when it has to ask (readdirplus),
which is cheaper than a look-up each: so a listing is to be shown again once they are worth it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MOST_KEPT = 100_000
"""Directories of which is remembered what was shown; others are shown again."""

BARE_SECONDS = 10.0
"""A listing is shown again after this long if there were names in it without attributes: somebody
may have asked for them meanwhile."""

LATE_NS = 1_000_000_000
"""So long after a change a reader may still be putting names into the kernel's memory that it was
given before."""

_NEVER_NS = 1 << 62


class _Listing(NamedTuple):
    """By the time when it was fetched; ``until_ns`` it need not be shown again; what was put into
    the kernel's memory before ``settled_ns`` is not trusted."""

    fetched_ns: int
    until_ns: int
    settled_ns: int


class CachedListings:
    """Changing: the listings that the kernel was shown, by directory; from when on one that is not
    known was shown by nobody who could be late."""

    def __init__(self) -> None:
        self._shown: OrderedDict[int, _Listing] = OrderedDict()
        self._settled_ns = 0

    def take_over(self, now_ns: int) -> None:
        """Until now another process showed what it knew."""
        self._settled_ns = now_ns + LATE_NS

    def opened(self, ino: int, fetched_ns: int, now_ns: int) -> bool:
        """A directory is opened whose listing is that of ``fetched_ns``: whether what the kernel
        has of it may be used. Otherwise that is dropped, and the listing shown anew."""
        settled_ns = self._settled_ns
        before = self._shown.get(ino)
        if before is not None:
            if before.fetched_ns == fetched_ns:
                if now_ns < before.until_ns:
                    return True
                settled_ns = before.settled_ns
            else:
                settled_ns = now_ns + LATE_NS
        until_ns = _NEVER_NS if now_ns >= settled_ns else 0
        self._shown[ino] = _Listing(fetched_ns, until_ns, settled_ns)
        self._shown.move_to_end(ino)
        if len(self._shown) > MOST_KEPT:
            self._shown.popitem(last=False)
        return False

    def until(self, ino: int, until_ns: int) -> None:
        """Something of the listing is shown that is to be shown again after that time."""
        before = self._shown.get(ino)
        if before is not None and until_ns < before.until_ns:
            self._shown[ino] = before._replace(until_ns=until_ns)

    def changed(self, ino: int) -> None:
        """A name in it appeared, went, or stands for something else."""
        if ino in self._shown:
            self._shown[ino] = _Listing(0, 0, 0)
