"""A large file that several nodes copy together: each of its spans has an owner.

A node first copies the spans that it owns from the source, then the others from their owners, as
far as those have them. Readers do not wait for that: what an owner lacks is read from the source,
and what it gives much more slowly, too. But for readahead, the owner is asked to read the bytes at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import trio

from monarchfs.core._units import GONE, WRONG
from monarchfs.core.units import Unit
from monarchfs.prefetch.chunks import ChunkMap
from monarchfs.prefetch.queue import Priority

SPAN_BYTES = 64 << 20
BLOCK_BYTES = 128 << 10
"""Each block has a digest: ``cache.store.checksum``."""
DIGEST_BYTES = 8

WINDOW = 64
"""The most spans of a file that are copied at once."""

UNIT_BYTES = 8 << 20
"""At least this much is read from another node at once, if it has as much."""

SLOW_UNIT_BYTES = 1 << 20
"""At most this much from a slow one: a reader may come and wait for it."""

ASK_SECONDS = 0.2
"""An owner that lacks some of a span is asked again after this long."""

_UNKNOWN = bytes(DIGEST_BYTES)

MOST_MOVES = 4


class Nodes(Protocol):
    """The nodes of the job."""

    @property
    def view(self) -> int:
        """Another number whenever ``owner`` may answer otherwise."""
        ...

    def owner(self, name: bytes, span: int) -> int | None:
        """The number of the node that owns a span of the file whose replica has this name, or that
        stands in while the owner does not answer; None: this one."""
        ...

    def waits_for(self, owner: int) -> bool:
        """Whether it is worth waiting for what this owner is copying."""
        ...

    def is_slow(self, owner: int) -> bool:
        """Whether what this owner has takes much longer from there than from the source."""
        ...

    def may_wait(self, owner: int) -> bool:
        """Whether a reader may wait for it: it is not slow, or that is to be found out again."""
        ...

    def took(self, owner: int | None, seconds: float, size: int) -> None:
        """So many bytes took an owner so long, or the source (None)."""
        ...

    async def ask(
        self, owner: int, wanted: list[tuple[FileSpans, int]], unit: Unit | None = None
    ) -> None:
        """Ask an owner what it has of some spans. ``unit``: a part of a single span, which it is
        asked to read first. Raises nothing."""
        ...

    async def read(self, owner: int, path: str, unit: Unit, digests: bytes) -> int:
        """``Unit.read_elsewhere``."""
        ...

    def completed(self, name: bytes, digests: bytes) -> None:
        """This node has all of a file."""
        ...


@dataclass(slots=True)
class _Held:
    """What an owner has of a span: ``known`` has one byte a block, 1 where ``digests`` has one."""

    path: str
    digests: bytes
    known: bytes


class FileSpans:
    """Constant: the name of the file's replica, ``path`` below the source, its size. Changing, on
    the event loop, by owner and span: ``_held``, what the owner has; ``_asked``, when it was asked
    last; ``_refused``, what it will not have; by span: ``_left``, those that may be incomplete in
    the map ``_chunks``, this node's first (``_view``: as ``Nodes.view``); ``priority``, of the
    copy."""

    def __init__(self, name: bytes, path: bytes, size: int, nodes: Nodes) -> None:
        self.name = name
        self.path = path
        self.priority = Priority.OPENED
        self._size = size
        self._nodes = nodes
        self._held: dict[tuple[int, int], _Held] = {}
        self._asked: dict[tuple[int, int], float] = {}
        self._refused: set[tuple[int, int]] = set()
        self._left: list[int] = []
        self._chunks: ChunkMap | None = None
        self._view = nodes.view

    # -- what to copy next

    def next_run(
        self, chunks: ChunkMap, most_chunks: int, *, owned_only: bool
    ) -> tuple[int, int] | None:
        """As ``ChunkMap.next_missing``: a run that can be had now."""
        for span in self._window(chunks):
            first, last = self._chunks_of(chunks, span)
            owner = self._nodes.owner(self.name, span)
            if owner is not None and owned_only:
                return None
            if owner is None or not self._comes_from(owner, span):
                run = chunks.missing_in(first, last, most_chunks)
            else:
                most = max(most_chunks, UNIT_BYTES // chunks.chunk_bytes)
                if self._nodes.is_slow(owner):
                    most = max(1, SLOW_UNIT_BYTES // chunks.chunk_bytes)
                run = self._ready(chunks, owner, span, most)
            if run is not None:
                return run
        return None

    def owned_runs(self, chunks: ChunkMap, first: int, last: int) -> Iterator[tuple[int, int]]:
        """What of a run of chunks this node owns."""
        each = SPAN_BYTES // chunks.chunk_bytes
        for span in range(first // each, -(-last // each)):
            if self._nodes.owner(self.name, span) is None:
                yield max(first, span * each), min(last, (span + 1) * each)

    def owned_missing(self, chunks: ChunkMap) -> bool:
        """Whether there are spans that this node has yet to copy for others."""
        window = self._window(chunks)
        return bool(window) and self._nodes.owner(self.name, window[0]) is None

    def _window(self, chunks: ChunkMap) -> list[int]:
        if chunks is not self._chunks or self._view != self._nodes.view:
            count = -(-self._size // SPAN_BYTES)
            owns = [self._nodes.owner(self.name, span) is None for span in range(count)]
            left = [s for s in range(count) if not chunks.is_present(*self._chunks_of(chunks, s))]
            self._left = sorted(left, key=lambda span: not owns[span])
            self._chunks, self._view = chunks, self._nodes.view
        window = self._left[:WINDOW]
        left = [s for s in window if not chunks.is_present(*self._chunks_of(chunks, s))]
        if len(left) < len(window):
            self._left[:WINDOW] = left
            complete = set(window).difference(left)
            for key in [key for key in self._held if key[1] in complete]:
                del self._held[key]
        return left

    def _chunks_of(self, chunks: ChunkMap, span: int) -> tuple[int, int]:
        each = SPAN_BYTES // chunks.chunk_bytes
        return span * each, min((span + 1) * each, chunks.count)

    def _comes_from(self, owner: int, span: int) -> bool:
        """Whether to wait for what this owner has of it."""
        return (owner, span) not in self._refused and self._nodes.waits_for(owner)

    def _ready(
        self, chunks: ChunkMap, owner: int, span: int, most_chunks: int
    ) -> tuple[int, int] | None:
        """A run of chunks that the owner has and this node lacks."""
        held = self._held.get((owner, span))
        if held is None:
            return None
        first, last = self._chunks_of(chunks, span)
        blocks = chunks.chunk_bytes // BLOCK_BYTES
        for start, end in chunks.missing_runs(first, last):
            stop = (end - first) * blocks
            at = held.known.find(1, (start - first) * blocks, stop)
            if at < 0:
                continue
            until = held.known.find(0, at, stop)
            run = first + at // blocks
            boundary = (run // most_chunks + 1) * most_chunks
            known_end = end if until < 0 else first + until // blocks
            if known_end > run:
                return run, min(known_end, boundary)
        return None

    # -- what the owners say

    def due(self, now: float) -> Iterator[tuple[int, int]]:
        """The (owner, span) pairs about which to ask now."""
        if self._chunks is None:
            return
        for span in self._window(self._chunks):
            if (owner := self._nodes.owner(self.name, span)) is None:
                continue
            held = self._held.get((owner, span))
            if (
                (owner, span) not in self._refused
                and (held is None or 0 in held.known)
                and now - self._asked.get((owner, span), -ASK_SECONDS) >= ASK_SECONDS
            ):
                yield owner, span

    def asked(self, owner: int, span: int, now: float) -> None:
        self._asked[owner, span] = now

    def note(self, owner: int, span: int, path: str, digests: bytes, *, coming: bool) -> bool:
        """Note an owner's answer. ``digests``: zeros for each block that it lacks, or empty.
        ``coming``: it is copying what it lacks. Returns whether there is news: more than before, or
        all of it."""
        blocks = -(-(min(self._size, (span + 1) * SPAN_BYTES) - span * SPAN_BYTES) // BLOCK_BYTES)
        if len(digests) != blocks * DIGEST_BYTES:
            digests = bytes(blocks * DIGEST_BYTES)
        known = bytes(
            digests[at : at + DIGEST_BYTES] != _UNKNOWN
            for at in range(0, len(digests), DIGEST_BYTES)
        )
        before = self._held.get((owner, span))
        self._held[owner, span] = _Held(path, digests, known)
        if not coming and 0 in known:
            self._refused.add((owner, span))
            return True
        return 0 not in known or known.count(1) > (0 if before is None else before.known.count(1))

    # -- to read it

    @property
    def shared(self) -> bool:
        """Whether other nodes own some of it."""
        count = -(-self._size // SPAN_BYTES)
        return any(self._nodes.owner(self.name, span) is not None for span in range(count))

    def elsewhere(self, offset: int) -> bool:
        """Whether a byte may come from another node."""
        span = offset // SPAN_BYTES
        owner = self._nodes.owner(self.name, span)
        return owner is not None and self._comes_from(owner, span)

    async def read(self, unit: Unit, *, ahead: bool = False, waited: bool = True) -> None:
        """Read a unit from the owner of its span, as far as the owner has it. ``ahead``: if it
        lacks some, ask it to read that first. ``waited``: a reader may wait for it. Raises
        nothing."""
        span = unit.start // SPAN_BYTES
        owner = self._nodes.owner(self.name, span)
        if owner is None or not self._comes_from(owner, span):
            return
        if waited and not self._nodes.may_wait(owner):
            return
        key = owner, span
        held = self._held.get(key)
        if ahead and (held is None or self._digests(held, unit) is None):
            await self._nodes.ask(owner, [(self, span)], unit)
        elif key not in self._asked:
            await self._nodes.ask(owner, [(self, span)])
        gone = None
        for _ in range(MOST_MOVES):
            held = self._held.get(key)
            digests = None if held is None else self._digests(held, unit)
            if held is not None and digests is not None and held.path != gone:
                # Not what it takes to have the bytes: it may have to read them itself.
                began = trio.current_time()
                result = await self._nodes.read(owner, held.path, unit, digests)
                size = unit.elsewhere_bytes or unit.end - unit.start
                self._nodes.took(owner, trio.current_time() - began, size)
                if result == WRONG:
                    self._refused.add(key)
                if result != GONE:
                    return
                gone = held.path
            elif gone is None:
                return
            elif digests is not None:
                self._refused.add(key)  # somebody removed or truncated it
                return
            else:
                await trio.sleep(ASK_SECONDS / 2)  # the owner is renaming the complete file
            self._held.pop(key, None)
            await self._nodes.ask(owner, [(self, span)])

    def source_took(self, seconds: float, size: int) -> None:
        """So many bytes."""
        self._nodes.took(None, seconds, size)

    def _digests(self, held: _Held, unit: Unit) -> bytes | None:
        """The digests of a unit; None if its owner lacks some of it."""
        first = unit.start % SPAN_BYTES // BLOCK_BYTES
        last = first - (unit.start - unit.end) // BLOCK_BYTES
        if last > len(held.known) or held.known.find(0, first, last) >= 0:
            return None
        return held.digests[first * DIGEST_BYTES : last * DIGEST_BYTES]

    def completed(self, digests: bytes | bytearray) -> None:
        """This node has all of it."""
        self._nodes.completed(self.name, bytes(digests))
