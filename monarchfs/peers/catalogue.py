"""What a node tells the others of its small replicas: the format, and both sides' bookkeeping.

A peer first asks for the whole list, page by page in the order of names, and then every second for
the changes. The server notes only the names that changed. It looks them up when somebody asks, so a
name that changed ten times is sent once. All rows are hints: their users compare the bytes with the
checksum.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from monarchfs.peers.errors import PeerError

PAGE_ROWS = 1024
"""The most rows in an answer: a few milliseconds of the event loop's time."""

MAX_CHANGES = 1 << 16
"""The most changes that are noted. A peer that missed more lists all again."""

_MAGIC = b"mfpc"
_FORMAT = 1
_HEADER = struct.Struct("<4sHHQQI")
_ROW = struct.Struct("<16sQIIQQ")


class Row(NamedTuple):
    """A replica in a segment of a tier. ``segment`` 0: there is no such replica any more."""

    name: bytes
    checksum: int = 0
    size: int = 0
    tier: int = 0
    segment: int = 0
    offset: int = 0


class PageState(IntEnum):
    """What an answer says beside its rows."""

    MORE = 0
    """There are more rows now."""
    ALL = 1
    """These were all, until something changes."""
    AGAIN = 2
    """The changes asked for are not known any more: list all again."""


class Page(NamedTuple):
    """An answer. ``sequence``: the number of the first change that it does not contain."""

    state: PageState
    incarnation: int
    sequence: int
    rows: Sequence[Row]


class Holdings(Protocol):
    """The small replicas of this node."""

    def rows(self, names: Sequence[bytes]) -> list[Row]:
        """One for each name."""
        ...

    def names_after(self, after: bytes, limit: int) -> list[bytes]:
        """The next names after ``after``, in order."""
        ...


def encode(page: Page) -> bytes:
    """The bytes of an answer."""
    head = _HEADER.pack(
        _MAGIC, _FORMAT, page.state, page.incarnation, page.sequence, len(page.rows)
    )
    return head + b"".join([_ROW.pack(*row) for row in page.rows])


def decode(data: bytes) -> Page:
    """The answer in ``data``.

    Raises PeerError if it is malformed.
    """
    if len(data) < _HEADER.size:
        raise PeerError("the peer's catalogue is cut off")
    magic, form, state, incarnation, sequence, count = _HEADER.unpack_from(data)
    if (magic, form) != (_MAGIC, _FORMAT) or state not in tuple(PageState):
        raise PeerError("the peer's catalogue is of another release")
    if len(data) != _HEADER.size + count * _ROW.size or count > PAGE_ROWS:
        raise PeerError("the peer's catalogue has not the length that it says")
    rows = [Row(*values) for values in _ROW.iter_unpack(memoryview(data)[_HEADER.size :])]
    return Page(PageState(state), incarnation, sequence, rows)


class Publisher:
    """Answers peers. Pure except for ``holdings``.

    Changing: ``_changes``, the names that changed last; ``_first``, the number of the first of
    them.
    """

    def __init__(self, holdings: Holdings, incarnation: int) -> None:
        """``incarnation`` tells this list of changes from that of another worker."""
        self._holdings = holdings
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
        names = self._holdings.names_after(after, PAGE_ROWS)
        rows = [row for row in self._holdings.rows(names) if row.segment]
        # If the last replica has just gone, an empty row shows where the next page begins.
        if names and (not rows or rows[-1].name != names[-1]):
            rows.append(Row(names[-1]))
        state = PageState.MORE if len(names) == PAGE_ROWS else PageState.ALL
        return Page(state, self._incarnation, self._next, rows)

    def rows(self, names: Sequence[bytes]) -> Page:
        """What is at these names now."""
        return Page(PageState.ALL, self._incarnation, self._next, self._holdings.rows(names))

    def changes(self, incarnation: int, since: int) -> Page:
        """The changes from this number on."""
        if incarnation != self._incarnation or not self._first <= since <= self._next:
            return Page(PageState.AGAIN, self._incarnation, self._next, [])
        begin = since - self._first
        names = list(itertools.islice(self._changes, begin, begin + PAGE_ROWS))
        until = since + len(names)
        rows = self._holdings.rows(list(dict.fromkeys(names)))
        state = PageState.ALL if until == self._next else PageState.MORE
        return Page(state, self._incarnation, until, rows)

    @property
    def _next(self) -> int:
        return self._first + len(self._changes)


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

    def take(self, page: Page) -> tuple[bool, bool]:
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
