"""What a node tells the others of its small replicas, and how far one of them has heard it.

A peer first asks for the whole list, page by page in the order of names, and then every second for
the changes. The server notes only the names that changed. It looks them up when somebody asks, so a
name that changed ten times is sent once. All rows are hints: their users compare the bytes with the
checksum.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from monarchfs.cache.index.replicas import Replicas
from monarchfs.peers.messages import PAGE_ROWS, Page, PageState, Row
from monarchfs.peers.ownership import Ownership
from monarchfs.types import ReplicaState

MAX_CHANGES = 1 << 16
"""The most changes that are noted. A peer that missed more lists all again."""

_BATCH = 32
"""Names that are read at once: more than a bucket's are read in vain."""


class Catalogue:
    """The small replicas that this node owns and has, for its peers.

    Constant: the numbers of the tiers in the index, in the order in which nginx serves them; who
    owns what; ``incarnation``, which tells its list of changes from that of another worker.
    Changing: ``_changes``, the names that changed last; ``_first``, the number of the first of
    them.
    """

    def __init__(
        self, replicas: Replicas, tiers: Iterable[int], ownership: Ownership, incarnation: int
    ) -> None:
        self._replicas = replicas
        self._tiers = tuple(tiers)
        self._ownership = ownership
        self._incarnation = incarnation
        self._changes: deque[bytes] = deque()
        self._first = 0

    def note(self, names: Iterable[bytes]) -> None:
        """Replicas of these names were added or removed."""
        self._changes.extend(names)
        while len(self._changes) > MAX_CHANGES:
            self._changes.popleft()
            self._first += 1

    def page(self, after: bytes) -> Page:
        """The page of the whole list after this name; b"": the first page."""
        names = self._names_after(after, PAGE_ROWS)
        rows = [row for row in self._rows(names) if row.segment]
        # If the last replica has just gone, an empty row shows where the next page begins.
        if names and (not rows or rows[-1].name != names[-1]):
            rows.append(Row(names[-1]))
        state = PageState.MORE if len(names) == PAGE_ROWS else PageState.ALL
        return Page(state, self._incarnation, self._next, rows)

    def rows(self, names: Sequence[bytes]) -> Page:
        """What is at these names now."""
        return Page(PageState.ALL, self._incarnation, self._next, self._rows(names))

    def changes(self, incarnation: int, since: int) -> Page:
        """The changes from this number on."""
        if incarnation != self._incarnation or not self._first <= since <= self._next:
            return Page(PageState.AGAIN, self._incarnation, self._next, [])
        begin = since - self._first
        names = list(islice(self._changes, begin, begin + PAGE_ROWS))
        until = since + len(names)
        rows = self._rows(list(dict.fromkeys(names)))
        state = PageState.ALL if until == self._next else PageState.MORE
        return Page(state, self._incarnation, until, rows)

    @property
    def _next(self) -> int:
        return self._first + len(self._changes)

    def _names_after(self, after: bytes, limit: int) -> list[bytes]:
        """The next names that this node owns, in order, from all tiers."""
        ordered = heapq.merge(*(self._names_in(tier, after) for tier in self._tiers))
        return list(islice(filter(self._ownership.owns, ordered), limit))

    def _names_in(self, tier: int, after: bytes) -> Iterator[bytes]:
        """The same from a tier, among others: of what other nodes own, a small part."""
        while (begin := self._ownership.own_from(after)) is not None:
            found = self._replicas.names(tier, b"", max(begin, after), _BATCH)
            yield from (name for name, _ino in found)
            if len(found) < _BATCH:
                return
            after = found[-1][0]

    def _rows(self, names: Iterable[bytes]) -> list[Row]:
        return [self.row(name) for name in names]

    def row(self, name: bytes) -> Row:
        """Where its replica lies, if this node has it in a segment."""
        for place, tier in enumerate(self._tiers):
            ino = self._replicas.owner(tier, name)
            replica = None if ino is None else self._replicas.replica(ino)
            if (
                replica is not None
                and replica.segment
                and replica.state is ReplicaState.RESIDENT
                and replica.name == name
            ):
                return Row(
                    name,
                    replica.checksum,
                    replica.size,
                    place,
                    replica.segment,
                    replica.offset,
                )
        return Row(name)


class Follower:
    """What to ask a peer next. Pure.

    Changing: ``_after``, how far the whole list was read, None at its end; ``_sequence``, the first
    change that is not known, None before the first page.
    """

    def __init__(self) -> None:
        self._after: bytes | None = b""
        self._incarnation = 0
        self._sequence: int | None = None

    def query(self) -> str:
        """The query of the next request."""
        if self._after is not None:
            return f"after={self._after.hex()}"
        return f"incarnation={self._incarnation}&since={self._sequence}"

    def take_page(self, page: Page) -> tuple[bool, bool]:
        """Take the answer to the last query. Returns whether all former rows are void, and whether
        to ask again at once."""
        if self._sequence is not None and (
            page.state is PageState.AGAIN or page.incarnation != self._incarnation
        ):
            self.__init__()  # type: ignore[misc]
            return True, True
        self._incarnation = page.incarnation
        if self._after is None:
            self._sequence = page.sequence
            return False, page.state is PageState.MORE
        first = self._sequence is None
        if first:
            self._sequence = page.sequence
        self._after = page.rows[-1].name if page.state is PageState.MORE and page.rows else None
        return first, self._after is not None
