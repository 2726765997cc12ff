"""Large files between nodes: what this node answers about its spans, and what it asks the owners.

See ``prefetch.spans`` for who copies what.

The copier claims no chunk before its owner has it, so no reader waits for a copy that waits. What
a reader wants now comes from the owner if that is known to have it, else from the source. What is
fetched ahead of a sequential reader the owner is asked to read at once. The source is read
instead of waiting where the owner is avoided, says that it is not copying, sends wrong bytes, or
has had no news for 5 s. Each block is compared with its digests, which the answer has.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from functools import partial

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.store.checksum import combine
from monarchfs.cache.store.files import part_path, replica_path
from monarchfs.core.units import Unit
from monarchfs.peers import _replicas
from monarchfs.peers.copy_service import CopyService
from monarchfs.peers.following import Following, ask, avoided
from monarchfs.peers.messages import (
    MOST_SPANS,
    HeldSpan,
    PeerError,
    WantedSpan,
    decode_held,
    encode_spans,
)
from monarchfs.peers.node_share import NodeShare
from monarchfs.prefetch.fetch import State
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.spans import (
    ASK_SECONDS,
    BLOCK_BYTES,
    DIGEST_BYTES,
    SPAN_BYTES,
    FileSpans,
)
from monarchfs.system.threads import run_sync
from monarchfs.types import Data, Lane, Replica, ReplicaState

log = logging.getLogger(__name__)

ANSWER_SECONDS = 0.8
MAX_ANSWER_BYTES = 1 << 20
ASKING_THREADS = 64
READING_THREADS = 32
FIND_SECONDS = 0.2
BRING_SECONDS = 0.5
STALLED_SECONDS = 5.0
"""A peer whose copies make no progress for this long is not waited for."""

WORTH_TIMES = 4
"""Readers pass over an owner that takes more than so many times what the source takes (_want.c)."""

EXTRA_SECONDS = 0.003
"""Which an owner may take for a unit besides, however small that is."""

TRY_SHARE = 1 / 16
"""Of readers' time, at most, in finding out whether such an owner has become faster."""

LARGE_DIGEST_BYTES = 1 << 20
"""The digests of 16 GB."""
LARGE_SECONDS = 0.2

MOST_DIGEST_BYTES = 64 << 20
"""The digests of 1 TB of replicas."""


class SpanDigests:
    """The digests of complete replicas, by name: of those that this worker copied, and of those
    that it read because peers asked. Changing: the digests used last, and the replicas to read."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._wanted: dict[bytes, Replica] = {}
        self._wakes = trio.lowlevel.ParkingLot()

    def put(self, name: bytes, digests: bytes) -> None:
        self._bytes += len(digests) - len(self._known.pop(name, b""))
        self._known[name] = digests
        while self._bytes > MOST_DIGEST_BYTES and len(self._known) > 1:
            self._bytes -= len(self._known.popitem(last=False)[1])

    def get(self, record: Replica) -> bytes | None:
        """None: the replica is still to be read. Empty: it is unreadable, or has wrong bytes."""
        if (digests := self._known.get(record.name)) is None:
            self._wanted[record.name] = record
            self._wakes.unpark_all()
        else:
            self._known.move_to_end(record.name)
        return digests

    def reads(self, name: bytes) -> bool:
        """Whether the replica is to be read, or being read."""
        return name in self._wanted

    async def run(self) -> None:
        """Read what is wanted, one replica after the other."""
        while True:
            while self._wanted:
                record = next(iter(self._wanted.values()))
                self.put(record.name, await self._read(record))
                self._wanted.pop(record.name)
            await self._wakes.park()

    async def _read(self, record: Replica) -> bytes:
        files = self._cache.tiers[record.tier].files
        try:
            digests: bytes = await run_sync(
                files.digests, record.name, record.checksum, record.size, abandon_on_cancel=True
            )
        except OSError as exc:
            log.info("a replica that peers want cannot be read: %s", exc)
            return b""
        return digests if combine(digests) == record.checksum else b""


class SpanService:
    """Answers about the spans of large files. Constant: its parts. Changing: ``_last``, the last
    record of a large part from the index, with its inode number and until when it is used."""

    def __init__(
        self,
        copies: CopyService,
        jobs: CopyJobs,
        cache: Cache,
        digests: SpanDigests,
        share: NodeShare,
    ) -> None:
        self._digests = digests
        self._copies = copies
        self._jobs = jobs
        self._cache = cache
        self._places = {tier: place for place, tier in enumerate(cache.tiers)}
        self._share = share
        self._last: tuple[int, float, Replica] | None = None

    async def answer(self, wanted: WantedSpan) -> HeldSpan:
        """What this node has of a span. If it owns the span, or stands in for the owner, it begins
        to copy the rest."""
        node = None
        with trio.move_on_after(FIND_SECONDS):
            node = await self._copies.node_of(wanted.path, wanted.name)
        if node is None:
            return HeldSpan(coming=False)
        held = self._held(node.ino, wanted)
        if not held.coming or self._digests.reads(wanted.name):
            return held
        if self._share.ownership.serves(wanted.name, wanted.span):
            if not self._share.ownership.owns(wanted.name, wanted.span):
                self._share.take_span(wanted.name, wanted.span)
            self._jobs.supply(node.ino, Priority(min(wanted.priority, Priority.SCANNED)))
            if wanted.size:
                with trio.move_on_after(BRING_SECONDS):
                    await self._bring(node.ino, wanted)
                held = self._held(node.ino, wanted)
        return held._replace(coming=held.coming and self._jobs.pending(node.ino))

    async def _bring(self, ino: int, wanted: WantedSpan) -> None:
        """Read what a reader of another node will want soon."""
        start, fetched = wanted.span * SPAN_BYTES + wanted.offset, False
        while self._jobs.pending(ino):
            fill = self._jobs.files.get(ino)
            if fill is not None and fill.copy.state is State.FILLING:
                end = min(start + wanted.size, fill.copy.size)
                first, last = (
                    fill.copy.chunks.chunk_of(start),
                    fill.copy.chunks.chunk_of(end - 1) + 1,
                )
                if start >= end or fill.copy.full or fill.copy.chunks.is_present(first, last):
                    return
                if not fetched:
                    fill.fetch_now(first, last)
                fetched = True
            await self._copies.change(ino)

    def _held(self, ino: int, wanted: WantedSpan) -> HeldSpan:
        """``coming``: this node lacks some of the span."""
        fill = self._jobs.files.get(ino)
        place = None if fill is None else fill.copy.reservation
        if fill is not None and place is not None and fill.copy.state is State.FILLING:
            if place.fd < 0 or fill.copy.ending:
                return HeldSpan(coming=True)
            first, last = _chunks(wanted.span, fill.copy.chunks.chunk_bytes)
            present = fill.copy.chunks.saved_range(first, last)
            return self._of_part(place.tier.id, present, place.digests, wanted)
        record = self._record(ino)
        if record is None or record.tier not in self._places:
            return HeldSpan(coming=True)
        if record.state is ReplicaState.PARTIAL:
            first, last = _chunks(wanted.span, record.chunk_bytes)
            return self._of_part(record.tier, record.present[first:last], record.digests, wanted)
        if (digests := self._digests.get(record)) is None:
            return HeldSpan(coming=True)
        path = f"/tier/{self._places[record.tier]}/{replica_path(record.name, record.checksum)}"
        return HeldSpan(coming=False, path=path, digests=_of_span(digests, wanted.span))

    def _record(self, ino: int) -> Replica | None:
        """The record of a large part is kept for a moment: reading that of 600 GB takes 20 ms."""
        now = trio.current_time()
        if self._last is not None and self._last[0] == ino and now < self._last[1]:
            return self._last[2]
        record = self._cache.index.replicas.part(ino)
        if record is not None and len(record.digests) > LARGE_DIGEST_BYTES:
            self._last = ino, now + LARGE_SECONDS, record
        return record

    def _of_part(self, tier: int, present: bytes, digests: Data, wanted: WantedSpan) -> HeldSpan:
        of_span = _of_span(digests, wanted.span)
        if 0 in present:
            size = -(-len(of_span) // DIGEST_BYTES // len(present)) * DIGEST_BYTES
            of_span = b"".join(
                of_span[n * size : (n + 1) * size] if there else bytes(size)
                for n, there in enumerate(present)
            )[: len(of_span)]
        path = f"/tier/{self._places[tier]}/{part_path(wanted.name)}"
        return HeldSpan(0 in present, path, of_span)


def _chunks(span: int, chunk_bytes: int) -> tuple[int, int]:
    each = SPAN_BYTES // chunk_bytes
    return span * each, (span + 1) * each


def _of_span(digests: Data, span: int) -> bytes:
    size = SPAN_BYTES // BLOCK_BYTES * DIGEST_BYTES
    return bytes(digests[span * size : (span + 1) * size])


def _mean(mean: float, new: float) -> float:
    """``mean``: 0 where it is not known. An outlier counts as four times the mean."""
    return mean + (min(new, 4 * mean) - mean) / 8 if mean else new


@dataclass(eq=False, slots=True)
class _Owner:
    """``asking``: it is being asked, in turn; ``asked``, when it was last; ``quiet_since``, since
    when it has had nothing new, or has not answered; ``mean``, what it takes for a byte;
    ``try_at``, when a reader may try it, if that is too long."""

    asking: bool = False
    asked: float | None = None
    quiet_since: float | None = None
    mean: float = 0
    try_at: float = 0


class SpanNodes:
    """As ``prefetch.spans.Nodes``: asks the owners of spans what they have, and reads it. Changing:
    the owners by number; ``_lost``, those that were avoided when ``run`` looked; ``_source_mean``,
    what the source takes for a byte."""

    def __init__(
        self, jobs: CopyJobs, digests: SpanDigests, share: NodeShare, following: Following
    ) -> None:
        self._jobs = jobs
        self.digests = digests
        self._share = share
        self._lost: frozenset[int] = frozenset()
        self._views = 0
        self._ownership = share.ownership
        self._following = following
        self._own = share.ownership.own
        self._source_mean = 0.0
        self._owners: defaultdict[int, _Owner] = defaultdict(_Owner)
        self._threads = trio.CapacityLimiter(ASKING_THREADS)
        self._reading = trio.CapacityLimiter(READING_THREADS)
        self._wakes = trio.lowlevel.ParkingLot()

    def owner(self, name: bytes, span: int) -> int | None:
        number = self._ownership.number(name, span)
        if number == self._own or self._share.has_span(name, span):
            return None
        if self._is_lost(number):
            other = self._ownership.stand_in(name, span)
            if other == self._own:
                return None
            if not self._is_lost(other):
                return other
        return number

    def _is_lost(self, number: int) -> bool:
        """Whether another node stands in for it. Asked anew each time: whoever takes a node for
        there that is avoided reads the source (``waits_for``), though the stand-in has it."""
        started = not self._following.starts(number)
        return number != self._own and started and avoided(number)

    @property
    def view(self) -> int:
        return self._views + self._share.taken

    def _look(self) -> None:
        """See which nodes are avoided."""
        lost = frozenset(filter(self._is_lost, range(len(self._following.nodes))))
        if lost != self._lost:
            self._views += 1
            self._lost = lost
            self._jobs.wakes.unpark_all()  # another request may have failed than one about spans

    def waits_for(self, owner: int) -> bool:
        now, known = trio.current_time(), self._owners[owner]
        if self._following.starts(owner):
            return True
        if avoided(owner):
            return False
        if known.asked is not None and now - known.asked > STALLED_SECONDS:
            return True  # nobody expected anything of it meanwhile
        return known.quiet_since is None or now - known.quiet_since < STALLED_SECONDS

    def is_slow(self, owner: int) -> bool:
        return 0 < WORTH_TIMES * self._source_mean < self._owners[owner].mean

    def may_wait(self, owner: int) -> bool:
        now, known = trio.current_time(), self._owners[owner]
        if not self.is_slow(owner):
            return True
        if now < known.try_at:
            return False
        known.try_at = now + STALLED_SECONDS  # one at a time
        return True

    def took(self, owner: int | None, seconds: float, size: int) -> None:
        if owner is None:
            self._source_mean = _mean(self._source_mean, seconds / size)
            return
        known = self._owners[owner]
        known.try_at = trio.current_time() + seconds / TRY_SHARE
        known.mean = _mean(known.mean, max(self._source_mean, (seconds - EXTRA_SECONDS) / size))

    def completed(self, name: bytes, digests: bytes) -> None:
        self.digests.put(name, digests)

    async def read(self, owner: int, path: str, unit: Unit, digests: bytes) -> int:
        return await run_sync(
            unit.read_elsewhere,
            _replicas.range,
            owner,
            path,
            digests,
            abandon_on_cancel=True,
            limiter=self._reading,
        )

    async def run(self) -> None:
        """Ask about the files that are being copied, for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                if self._jobs.files:
                    self._look()
                for owner, wanted in self._due().items():
                    self._owners[owner].asking = True
                    nursery.start_soon(self._ask_in_turn, owner, wanted)
                with trio.move_on_after(ASK_SECONDS):
                    await self._wakes.park()

    def _due(self) -> dict[int, list[tuple[FileSpans, int]]]:
        now = trio.current_time()
        due: defaultdict[int, list[tuple[FileSpans, int]]] = defaultdict(list)
        for fill in self._jobs.background:
            if (spans := fill.copy.remote.spans) is None or fill.own_alone:
                continue
            if self._jobs.get(fill.copy.node.ino).supplied:
                continue
            spans.priority = fill.copy.priority
            for owner, span in spans.due(now):
                if not self._owners[owner].asking and len(due[owner]) < MOST_SPANS:
                    due[owner].append((spans, span))
        return {owner: wanted for owner, wanted in due.items() if wanted}

    async def _ask_in_turn(self, owner: int, wanted: list[tuple[FileSpans, int]]) -> None:
        try:
            await self.ask(owner, wanted, lane=Lane.BACKGROUND)
        finally:
            self._owners[owner].asking = False
        self._wakes.unpark_all()

    async def ask(
        self,
        owner: int,
        wanted: list[tuple[FileSpans, int]],
        unit: Unit | None = None,
        lane: Lane = Lane.DEMAND,
    ) -> None:
        now, known = trio.current_time(), self._owners[owner]
        if known.asked is None or now - known.asked > STALLED_SECONDS:
            known.quiet_since = None  # nobody expected anything of it meanwhile
        known.asked = now
        for spans, span in wanted:
            spans.asked(owner, span, now)
        part = (0, 0) if unit is None else (unit.start % SPAN_BYTES, unit.end - unit.start)
        question = [WantedSpan(s.name, span, *part, s.priority, s.path) for s, span in wanted]
        try:
            answers = await ask(
                owner,
                "/ask/spans",
                encode_spans(question),
                ANSWER_SECONDS,
                MAX_ANSWER_BYTES,
                partial(decode_held, count=len(wanted)),
                self._threads,
                lane,
            )
        except (OSError, PeerError) as exc:
            log.debug("peer %d does not answer about spans: %s", owner, exc)
            self._look()
            news = [False]
        else:
            news = [
                spans.note(owner, span, held.path, held.digests, coming=held.coming)
                for (spans, span), held in zip(wanted, answers, strict=True)
            ]
        if any(news):
            known.quiet_since = None
        elif known.quiet_since is None:
            known.quiet_since = now
        self._jobs.wakes.unpark_all()
