"""Who copies which span of a large file from where."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.core._units import GONE, READ, WRONG
from monarchfs.core.units import Unit
from monarchfs.peers import _replicas, span_sharing
from monarchfs.peers.node_share import NodeShare
from monarchfs.peers.nodes import parse_nodes
from monarchfs.peers.ownership import Ownership
from monarchfs.peers.span_sharing import STALLED_SECONDS, SpanNodes
from monarchfs.prefetch.chunks import PRESENT, ChunkMap
from monarchfs.prefetch.passing import AHEAD_UNITS, IDLE_SECONDS, MOST_UNITS, PassingReads
from monarchfs.prefetch.passing import UNIT_BYTES as PASSED_BYTES
from monarchfs.prefetch.spans import BLOCK_BYTES, SPAN_BYTES, UNIT_BYTES, FileSpans
from monarchfs.types import SourceVersion
from tests.support.asynchronous import clock as clock
from tests.support.asynchronous import nursery as nursery

NAME = bytes(16)
CHUNK = 4 << 20
"""Few chunks make a span, so that an example is quick."""
ALL = b"digest.." * (SPAN_BYTES // BLOCK_BYTES)
NONE = bytes(len(ALL))
"""Digests of a span that its owner has, or has nothing of."""


class Job:
    """As ``Nodes`` of one node: ``owners`` of the spans, and who is worth waiting for."""

    def __init__(self, owners: list[int], own: int) -> None:
        self.owners = owners
        self.own = own
        self.view = 0
        self.down: set[int] = set()
        self.results: list[int] = []
        self.on_ask: Callable[[], object] = lambda: None

    def owner(self, name: bytes, span: int) -> int | None:
        return None if self.owners[span] == self.own else self.owners[span]

    def waits_for(self, owner: int) -> bool:
        return owner not in self.down

    may_wait = waits_for

    def is_slow(self, owner: int) -> bool:
        return owner in self.down

    def took(self, owner: int | None, seconds: float, size: int) -> None:
        pass

    async def ask(
        self, owner: int, wanted: list[tuple[FileSpans, int]], unit: Unit | None = None
    ) -> None:
        for spans, span in wanted:
            spans.asked(owner, span, trio.current_time())
        self.on_ask()

    async def read(self, owner: int, path: str, unit: Unit, digests: bytes) -> int:
        assert len(digests) == -(-(unit.end - unit.start) // BLOCK_BYTES) * 8
        return self.results.pop(0)

    def completed(self, name: bytes, digests: bytes) -> None:
        raise AssertionError


def digests_of(chunks: ChunkMap, span: int) -> bytes:
    """As its owner would tell: of the chunks that it has."""
    start, end = span * SPAN_BYTES, min((span + 1) * SPAN_BYTES, chunks.size)
    return b"".join(
        (b"digest.." if chunks.state(at // chunks.chunk_bytes) == PRESENT else bytes(8))
        for at in range(start, end, BLOCK_BYTES)
    )


@given(
    st.integers(1, 5 * SPAN_BYTES),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.integers(0, 9),
    st.integers(0, 1 << 32),
)
@settings(max_examples=100)
def test_nodes_read_each_chunk_of_the_source_once(
    size: int, owners: list[int], most: int, seed: int
) -> None:
    rng = random.Random(seed)
    jobs = [Job(owners, own) for own in range(3)]
    files = [FileSpans(NAME, b"x", size, job) for job in jobs]
    maps = [ChunkMap(size, CHUNK) for _ in jobs]
    claimed: list[tuple[int, int, int]] = []
    from_source = [0] * maps[0].count
    while not all(chunks.complete for chunks in maps):
        if claimed and rng.random() < 0.5:
            node, first, last = claimed.pop(rng.randrange(len(claimed)))
            if rng.random() < 0.1:
                maps[node].release(first, last)
            else:
                maps[node].arrive(first, last)
            continue
        node = rng.randrange(3)
        for owner, span in list(files[node].due(rng.random() * 1e9)):
            assert owner == owners[span] != node
            digests = digests_of(maps[owner], span)
            files[node].note(owner, span, "/p", digests, coming=bytes(8) in digests)
        run = files[node].next_run(maps[node], most + 1, owned_only=False)
        if run is None:
            continue
        first, last = run
        assert last - first <= max(most + 1, UNIT_BYTES // CHUNK)
        span = first * CHUNK // SPAN_BYTES
        assert (last * CHUNK - 1) // SPAN_BYTES == span
        if owners[span] == node:
            from_source[first:last] = [1] * (last - first)
        else:
            held = maps[owners[span]]
            assert all(held.state(chunk) == PRESENT for chunk in range(first, last))
        maps[node].claim(first, last)
        claimed.append((node, first, last))
    assert all(from_source)


def a_file(*owners: int) -> tuple[Job, FileSpans, ChunkMap]:
    """Whose spans have these owners, at node 0, which has nothing of it."""
    job = Job(list(owners), 0)
    size = len(owners) * SPAN_BYTES
    return job, FileSpans(NAME, b"x", size, job), ChunkMap(size, CHUNK)


@pytest.mark.parametrize("how", ["down", "refused", "cut off"])
def test_what_an_owner_will_not_have_is_read_from_the_source(how: str) -> None:
    job, spans, chunks = a_file(1)
    assert spans.next_run(chunks, 100, owned_only=False) is None
    if how == "down":
        job.down.add(1)
    else:
        spans.note(1, 0, "", NONE if how == "refused" else bytes(7), coming=False)
    assert spans.next_run(chunks, 100, owned_only=False) == (0, 16)
    assert spans.next_run(chunks, 100, owned_only=True) is None


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> SpanNodes:
    """As node 0 of 2 sees them."""
    monkeypatch.setattr(_replicas, "ask", lambda *_: (200, b"no answer about spans"))
    monkeypatch.setattr(span_sharing, "avoided", lambda _: False)
    share = NodeShare(Ownership(parse_nodes("ab", 1)))
    others: Any = SimpleNamespace(starts=lambda _: False, nodes="ab")
    jobs: Any = SimpleNamespace(wakes=trio.lowlevel.ParkingLot())
    return SpanNodes(jobs, jobs, share, others)


async def test_readers_pass_over_an_owner_that_is_much_slower_than_the_source(
    clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, nodes: SpanNodes
) -> None:
    clock.autojump_threshold = 0
    name = next(name for n in range(256) if nodes.owner(name := bytes([n]) * 16, 0))
    spans, chunks = FileSpans(name, b"x", SPAN_BYTES, nodes), ChunkMap(SPAN_BYTES, CHUNK)
    spans.note(1, 0, "/p", ALL, coming=False)
    seconds, spent = 0.5, 0.0

    async def give(_owner: int, _path: str, unit: Any, _digests: bytes) -> int:
        nonlocal spent
        await trio.sleep(seconds)
        spent += seconds
        unit.elsewhere_bytes = 1 << 20
        return READ

    async def gives(*, waited: bool = True) -> bool:
        unit: Any = SimpleNamespace(start=0, end=1 << 20, elsewhere_bytes=0)
        await spans.read(unit, waited=waited)
        await trio.sleep(0.05)
        return bool(unit.elsewhere_bytes)

    monkeypatch.setattr(nodes, "read", give)
    spans.source_took(0.001, 1 << 20)
    assert spans.next_run(chunks, 1, owned_only=False) == (0, UNIT_BYTES // CHUNK)
    while trio.current_time() < 100:
        await gives()
    assert 0 < spent < 100 / 16 + 2 * seconds
    assert not await gives()
    assert await gives(waited=False)
    assert spans.next_run(chunks, 1, owned_only=False) == (0, 1)
    seconds = 0.002  # it is fast again
    while not (await gives() and await gives()):
        assert trio.current_time() < 200


async def test_who_only_refuses_to_answer_is_not_waited_for_long(
    clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    nodes: SpanNodes,
    nursery: trio.Nursery,
) -> None:
    """And who fails about something else, not at all."""
    for seconds in range(int(STALLED_SECONDS) + 1):
        await nodes.ask(1, [])
        assert nodes.waits_for(1) == (seconds < STALLED_SECONDS)
        clock.jump(1)
    wakes = nodes._jobs.wakes
    nursery.start_soon(wakes.park)
    await trio.testing.wait_all_tasks_blocked()
    monkeypatch.setattr(span_sharing, "avoided", lambda _: True)
    nodes._look()
    assert not wakes


@pytest.mark.parametrize("result", [GONE, WRONG])
def test_a_replica_that_is_gone_or_wrong_is_not_asked_for_again(result: int) -> None:
    job, spans, chunks = a_file(1)
    job.on_ask = lambda: spans.note(1, 0, "/p", ALL, coming=False)
    job.results = [result]
    version = SourceVersion(1, 2, SPAN_BYTES, 3, 4)
    for _ in range(2):
        unit = Unit(1, 0, 1 << 20, chunk_bytes=BLOCK_BYTES, version=version, device=1)
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(partial(spans.read, unit, ahead=False), clock=clock)
    assert not job.results
    assert spans.next_run(chunks, 2, owned_only=False) == (0, 2)


# Large files that are read from their owners, and not kept

SIZE = 20 * PASSED_BYTES - 5


class FakeUnit:
    """``bytes_there``: how many the owner gives."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.bytes_there = 0
        self.finished = False

    def stop(self) -> None:
        assert not self.bytes_there

    def finish(self) -> None:
        self.finished = True

    def peek(self, offset: int, end: int) -> bytes:
        assert self.finished
        assert self.start <= offset < end <= self.end
        return bytes(max(0, min(end, self.start + self.bytes_there) - offset))


class Spans:
    """The owner gives each unit at once, ``gives`` bytes of it; ``own``: offsets from which on this
    node owns the file."""

    def __init__(self) -> None:
        self.gives = PASSED_BYTES
        self.own = SIZE
        self.read_from: list[int] = []

    def elsewhere(self, offset: int) -> bool:
        return offset < self.own

    async def read(self, unit: Any, *, ahead: bool) -> None:
        assert ahead
        self.read_from.append(unit.start // PASSED_BYTES)
        unit.bytes_there = min(self.gives, unit.end - unit.start)
        await trio.lowlevel.checkpoint()


def passing(spans: Spans, nursery: trio.Nursery) -> PassingReads:
    given: Any = spans
    copy: Any = SimpleNamespace(size=SIZE, make_unit=FakeUnit)
    return PassingReads(copy, given, nursery)


async def test_readers_at_different_places_fetch_nothing_ahead() -> None:
    spans = Spans()
    async with trio.open_nursery() as nursery:
        reads = passing(spans, nursery)
        for number in (3, 9, 6, 12):
            assert await reads.read(number * PASSED_BYTES, number * PASSED_BYTES + 10) == bytes(10)
        assert spans.read_from == [3, 9, 6, 12]
        await reads.read(13 * PASSED_BYTES, 13 * PASSED_BYTES + 10)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(spans.read_from[4:]) == [13 + n for n in range(AHEAD_UNITS + 1)]


@pytest.mark.parametrize("count", [30, 100])
async def test_little_is_kept_and_each_unit_is_read_once_however_many_files_are_read(
    count: int, clock: trio.testing.MockClock
) -> None:
    spans = Spans()
    PassingReads._units.clear()
    async with trio.open_nursery() as nursery:
        each = [passing(spans, nursery) for _ in range(count)]
        for at in range(0, 9 * PASSED_BYTES, PASSED_BYTES // 2):
            for reads in each:
                assert await reads.read(at, at + 10) == bytes(10)
            assert len(PassingReads._units) <= min(MOST_UNITS, count * (2 + AHEAD_UNITS))
        clock.jump(IDLE_SECONDS + 1)
        await each[0].read(9 * PASSED_BYTES, 9 * PASSED_BYTES + 10)
        await trio.testing.wait_all_tasks_blocked()
        assert 9 + AHEAD_UNITS in spans.read_from
    assert len(spans.read_from) <= count * (9 + AHEAD_UNITS) + AHEAD_UNITS
    for reads in each:
        reads.close()
    assert not PassingReads._units


async def test_what_the_owner_does_not_give_is_not_made_up() -> None:
    spans = Spans()
    spans.gives, spans.own = 1000, 4 * PASSED_BYTES
    async with trio.open_nursery() as nursery:
        reads = passing(spans, nursery)
        assert await reads.read(0, 5000) == bytes(1000)
        assert await reads.read(1000, 5000) is None
        assert await reads.read(4 * PASSED_BYTES, 4 * PASSED_BYTES + 10) is None
        assert await reads.read(3 * PASSED_BYTES, 3 * PASSED_BYTES + 10) == bytes(10)
        assert await reads.read(3 * PASSED_BYTES + 500, 3 * PASSED_BYTES + 510) == bytes(10)
        await trio.testing.wait_all_tasks_blocked()
    assert max(spans.read_from) == 3
