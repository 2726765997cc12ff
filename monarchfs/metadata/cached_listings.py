"""What the kernel may have of directories: listings in its page cache, and missing names. Pure. And
how it is told to forget.

A listing in the page cache has names and types, no attributes. Those come along when the kernel has
to ask (readdirplus), which is cheaper than one look-up for each. So it is shown a listing again
once that brings it attributes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple, Protocol

MOST_KEPT = 100_000
"""Directories whose shown listing is remembered; those of others are shown again."""

BARE_SECONDS = 10.0
"""A listing with names that lack attributes is shown again after this time: somebody may have asked
for the attributes meanwhile."""

LATE_NS = 1_000_000_000
"""For this long after a change, a reader may still put names into the kernel's memory that it was
given before the change."""

MISSING_NAMES_KEPT = 100
"""Missing names that are remembered for one directory."""

MOST_MISSING = 100_000
"""Missing names that are remembered for all directories, the latest ones: 40 MB."""

_NEVER_NS = 1 << 62


class _Listing(NamedTuple):
    """``fetched_ns`` identifies the listing; before ``until_ns`` it need not be shown again; what
    entered the kernel's memory before ``settled_ns`` is not trusted."""

    fetched_ns: int
    until_ns: int
    settled_ns: int


class CachedListings:
    """Changing: the listings that the kernel was shown, by directory; ``_settled_ns``, the
    ``settled_ns`` of those that are not remembered."""

    def __init__(self) -> None:
        self._shown: OrderedDict[int, _Listing] = OrderedDict()
        self._settled_ns = 0

    def take_over(self, now_ns: int) -> None:
        """Another process showed listings until now."""
        self._settled_ns = now_ns + LATE_NS

    def note_open(self, ino: int, fetched_ns: int, now_ns: int) -> bool:
        """A directory is opened whose listing was fetched at ``fetched_ns``. Whether the kernel
        may use what it has of it; otherwise the kernel drops that and is shown the listing."""
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
        """Part of the listing has to be shown again after that time."""
        before = self._shown.get(ino)
        if before is not None and until_ns < before.until_ns:
            self._shown[ino] = before._replace(until_ns=until_ns)

    def changed(self, ino: int) -> None:
        """A name in it appeared, went, or stands for something else."""
        if ino in self._shown:
            self._shown[ino] = _Listing(0, 0, 0)


class NegativeDentries:
    """Names that the kernel may remember as missing although no listing covers them.

    Changing: ``_names`` by directory (None: too many to remember; counts as one), and their
    ``_count``; ``_anywhere``, whether any directory may have others: another process answered, or
    there were too many."""

    def __init__(self) -> None:
        self._names: dict[int, set[bytes] | None] = {}
        self._count = 0
        self._anywhere = False

    def take_over(self) -> None:
        """Another process answered before."""
        self._anywhere = True

    def possible(self, ino: int) -> bool:
        """Whether the directory may have any."""
        return self._anywhere or ino in self._names

    def unknown(self, ino: int) -> bool:
        """Whether the directory may have some that are not remembered here."""
        return self._anywhere or self._names.get(ino, ()) is None

    def add(self, ino: int, name: bytes) -> None:
        names = self._names.setdefault(ino, set())
        if names is not None and name not in names:
            names.add(name)
            self._count += 1
            if len(names) > MISSING_NAMES_KEPT:
                self.pop(ino)
                self._names[ino] = None
                self._count += 1
        while self._count > MOST_MISSING:
            self.pop(next(iter(self._names)))
            self._anywhere = True

    def pop(self, ino: int) -> Collection[bytes]:
        """Those that are remembered for the directory, which is forgotten here."""
        names = self._names.pop(ino, ())
        self._count -= 1 if names is None else len(names)
        return names or ()


class Kernel(Protocol):
    """Invalidating what the kernel does not have passes."""

    def invalidate_inode(self, ino: int, *, attributes_only: bool = False) -> None:
        """Forget the attributes of an inode and, unless ``attributes_only``, its pages, mapped
        ones too. Done soon, in a thread: never blocks."""

    async def forget_attributes(self, ino: int) -> None:
        """Forget the attributes of an inode before this returns, or soon where that takes long. May
        be called by requests, because the kernel waits for nothing to do it. Raises nothing."""

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Forget what ``name`` stands for, or that it stands for nothing. Never blocks."""

    async def room(self) -> None:
        """Wait until few invalidations are left to be done. Never to be called by a request: the
        kernel may be waiting for its answer before it can invalidate."""
