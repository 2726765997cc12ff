"""What is copied next, how many at once and together, what a file that fails or a source that hangs
holds up, and what it does not."""

import errno
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from unittest import mock

import pytest
import trio
import trio.testing

from monarchfs.prefetch import ahead, copier
from monarchfs.prefetch.ahead import Ahead
from monarchfs.prefetch.fetch import CHUNK_BYTES
from monarchfs.prefetch.jobs import RETRY_SECONDS
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.scan import CopyIdle, Scan
from monarchfs.types import FreshnessMode
from tests.support.faults import disk_is_full
from tests.support.mirror import MIB, Area, Mirror, content, until


async def order(mirror: Mirror) -> list[str]:
    """In which the source was read, by the names of the files."""
    names = {path.stat().st_ino: path.name for path in mirror.area.source.iterdir()}
    return list(dict.fromkeys(names[read.ino] for read in mirror.posix.reads))


@pytest.mark.parametrize("together", [1, 64], ids=["each alone", "together"])
async def test_room_is_given_in_the_order_of_the_queue(area: Area, together: int) -> None:
    """Also among files whose copies begin in the same moment."""
    names = [f"f{number}" for number in range(8)]
    for number, name in enumerate(names):
        area.write(name, content(4096 * (10 - number), number))
    async with area.mount([38 * 4096], copy_workers=8, copies=False) as mirror:
        mirror.copier.together.value = together
        await mirror.want_each(names)
        mirror.start_copying()
        await mirror.settled()
        states = mirror.states([await mirror.ino(name) for name in names])
        assert states == ["resident"] * 4 + ["remote"] * 4


async def test_an_opened_file_does_not_wait_for_a_large_one_that_was_scanned(area: Area) -> None:
    area.write("scanned", content(8 * MIB, 1))
    area.write("opened", content(2 * MIB, 2))
    async with area.mount(copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        await mirror.want("scanned")
        await gate.arrived()
        handle = await mirror.open("opened")
        gate.open()
        await until(lambda: mirror.residency.state(handle.ino) == "resident", "the opened file")
        handle.release()
        await mirror.settled()
        reads = mirror.posix.reads
        opened = (area.source / "opened").stat().st_ino
        last = max(number for number, read in enumerate(reads) if read.ino == opened)
        assert sum(read.size for read in reads[:last]) < 6 * MIB


async def test_a_scanned_file_that_is_opened_goes_before_one_that_is_listed(area: Area) -> None:
    for name in ("scanned", "listed"):
        area.write(name, content(6 * MIB))
    async with area.mount(copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        await mirror.want("scanned")
        await gate.arrived()
        mirror.copier.jobs.want_opened(await mirror.ino("scanned"))
        await mirror.want("listed", Priority.LISTED)
        gate.open()
        await mirror.settled()
        inos = [read.ino for read in mirror.posix.reads]
        assert inos == sorted(inos, key=[(area.source / "scanned").stat().st_ino].count)[::-1]


# A source that hangs. The clock is moved by hand, the threads are real.


async def test_a_call_that_hangs_lends_its_slot(
    area: Area, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "MAX_LENT", 4)
    names = area.write_files(8)
    async with area.mount(copy_workers=2) as mirror:
        gate = mirror.posix.faults.gate("read")
        await mirror.want_each(names)
        for lent in (0, 2, 4, 4):
            await gate.arrived(2 + lent)
            await trio.testing.wait_all_tasks_blocked()
            assert gate.waiting == 2 + lent
            for _ in range(4):
                clock.jump(copier.STUCK_SECONDS / 2)
                await trio.testing.wait_all_tasks_blocked()
        gate.open()
        await go_on(mirror, clock, 8)
        assert mirror.copier._lent == 0
        assert mirror.metrics.copies_completed == 8


@pytest.mark.parametrize("read", [False, True])
async def test_large_files_that_nobody_reads_in_sequence_give_way_to_readers(
    area: Area, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """One fetch at a time; all places of the copier when nobody waits for the source."""
    monkeypatch.setattr(copier, "YIELD_SECONDS", 60.0)
    names = area.write_files(6, 4 * MIB)
    async with area.mount(copy_workers=4, copies=False) as mirror:
        handle = await mirror.open(names[0])
        for offset in (2 * MIB, MIB) if read else ():
            assert len(await mirror.read(handle, offset, CHUNK_BYTES)) == CHUNK_BYTES
        await mirror.idle()
        gate = mirror.posix.faults.gate("read")
        mirror.start_copying()
        await mirror.want_each(names[1:])
        await gate.arrived(1 if read else 4)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert gate.waiting == (1 if read else 4)
        gate.open()
        handle.release()
        await mirror.settled()
        assert [mirror.bytes_read(name) for name in names[1:]] == 5 * [4 * MIB]


async def test_a_read_ahead_of_the_copy_pulls_what_it_needs_forward(area: Area) -> None:
    (name,) = area.write_files(1, 16 * MIB)
    data = content(16 * MIB, 0)
    async with area.mount(copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        handle = await mirror.open(name)
        await gate.arrived()  # the copy has begun at the start of the file
        results = []

        async def read() -> None:
            results.append(await mirror.read(handle, 9 * MIB, CHUNK_BYTES))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await gate.arrived(2)
            gate.release(1)
            await until(lambda: bool(results), "the read")
        assert results == [data[9 * MIB : 9 * MIB + CHUNK_BYTES]]
        assert len(mirror.posix.reads) == 1
        gate.open()
        handle.release()
        await mirror.settled()
        assert mirror.bytes_read(name) == len(data)


async def test_of_a_file_that_is_too_large_there_is_no_map(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarchfs.cache.reservations.MOST_BYTES", 2 * MIB)
    (name,) = area.write_files(1, 3 * MIB)
    async with area.mounted() as mirror:
        handle = await mirror.open(name)
        assert await mirror.read(handle, MIB, MIB) == content(3 * MIB, 0)[MIB : 2 * MIB]
        assert mirror.copier.jobs.files[handle.ino].copy.chunks.count == 0
        assert "it is larger than" in mirror.reason(handle.ino)
        handle.release()


async def test_a_closed_file_keeps_nothing_that_passed_by(area: Area) -> None:
    (name,) = area.write_files(1, 2 * MIB)
    async with area.mounted([]) as mirror:
        handle = await mirror.open(name)
        passing = mirror.copier.jobs.files[handle.ino]._passing = mock.Mock()
        handle.release()
    passing.close.assert_called_once_with()


async def go_on(mirror: Mirror, clock: trio.testing.MockClock, files: int) -> None:
    """The source was slow, and is spared for a while."""
    while mirror.metrics.copies_completed < files:
        clock.jump(1.0)
        await trio.testing.wait_all_tasks_blocked(0.001)
    await mirror.settled()


async def let_pass(mirror: Mirror, clock: trio.testing.MockClock, seconds: float) -> None:
    # Whoever is about to sleep must have begun to, or sleeps from the later time on.
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(seconds)
    await trio.testing.wait_all_tasks_blocked()
    await mirror.idle()


@pytest.mark.parametrize(
    ("size", "code"), [(10_000, errno.EIO), (10_000, errno.ENFILE), (3 * MIB, errno.ESHUTDOWN)]
)
async def test_what_fails_is_retried(
    area: Area, clock: trio.testing.MockClock, size: int, code: int
) -> None:
    (name,) = area.write_files(1, size)
    async with area.mount(copy_workers=1) as mirror:
        mirror.posix.faults.fail("read", code, times=2)
        await mirror.want(name)
        await mirror.settled()
        assert mirror.posix.faults.calls["read"] == 1
        # As a thread of the data path asks, which has no event loop.
        reason = await trio.to_thread.run_sync(mirror.reason, await mirror.ino(name))
        error = os.strerror(code)
        assert reason == f"copying failed: {error} (just now; it is tried again in 1 s)"
        await let_pass(mirror, clock, RETRY_SECONDS[0] + 0.01)
        assert mirror.posix.faults.calls["read"] == 2
        await let_pass(mirror, clock, RETRY_SECONDS[0] + 0.01)
        assert mirror.posix.faults.calls["read"] == 2, "the second time it waits longer"
        await let_pass(mirror, clock, RETRY_SECONDS[1])
        await mirror.settled()
        assert await mirror.state(name) == "resident"
        assert mirror.metrics.copies_failed == 0
        assert mirror.bytes_read(name) == size


async def test_a_reader_of_a_file_being_copied_gets_one_more_try(area: Area) -> None:
    (name,) = area.write_files(1, 3 * MIB)
    async with area.mounted() as mirror:
        mirror.posix.faults.fail("read", errno.EIO, times=2)
        assert await mirror.read_file(name) == content(3 * MIB, 0)


async def test_what_goes_on_failing_is_given_up(area: Area, clock: trio.testing.MockClock) -> None:
    """Counted once, though several reads of it fail at the same time."""
    (name,) = area.write_files(1, 16 * MIB)
    async with area.mounted(copy_workers=4) as mirror:
        mirror.copier.unit_bytes.value = 1 * MIB
        gate = mirror.posix.faults.gate("read")
        mirror.posix.faults.fail("read", errno.EIO)
        await mirror.want(name)
        await gate.arrived(4)
        gate.open()
        await mirror.settled()
        for seconds in RETRY_SECONDS:
            assert mirror.metrics.copies_failed == 0
            await let_pass(mirror, clock, seconds + 0.01)
        assert mirror.metrics.copies_failed == 1
        calls = mirror.posix.faults.calls["read"]
        await let_pass(mirror, clock, 1000)
        assert mirror.posix.faults.calls["read"] == calls
        # This is not tried again.
        mirror.posix.faults.end()
        mirror.posix.faults.fail("read", errno.EACCES)
        await mirror.want(name)
        await mirror.settled()
        assert mirror.metrics.copies_failed == 2


async def test_the_scan_wants_every_regular_file_and_nothing_else(area: Area) -> None:
    wanted = {"a", "d/b", "d/e/c", "d/empty"}
    for name in wanted:
        area.write(name, content(1000 if "empty" not in name else 0))
    (area.source / "link").symlink_to("a")
    (area.source / "broken").symlink_to("nowhere")
    os.mkfifo(area.source / "fifo")
    async with area.mount() as mirror:
        scan = Scan(mirror.tree, mirror.copier.jobs)
        await scan.everything()
        await mirror.settled()
        assert (scan.failed, scan.running) == (0, False)
        for name in wanted:
            assert await mirror.state(name) == "resident", name
        assert mirror.metrics.copies_completed == len(wanted)
        mirror.copier.jobs.want = None  # type: ignore[assignment, method-assign]
        await scan.everything()
        await scan.listed(map(str.encode, wanted))


@pytest.mark.parametrize(
    ("all_of_it", "call", "code", "after", "times", "failed"),
    [
        (True, "found_each", errno.EACCES, 1, 1, 1),
        (True, "found_each", errno.EIO, 1, 3, 0),
        (True, "found", errno.EIO, 1, 6, 0),
        (True, "found", errno.EIO, 0, 99, 3),
        (True, "list", errno.ESHUTDOWN, 1, 3, 0),
        (False, "found", errno.EIO, 1, 3, 0),
        (False, "found", errno.EIO, 0, 99, 3),
    ],
)
async def test_what_cannot_be_scanned_stops_nothing_and_is_tried_again(
    area: Area, monkeypatch: pytest.MonkeyPatch,
    all_of_it: bool, call: str, code: int, after: int, times: int, failed: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("monarchfs.prefetch.scan.RETRY_SECONDS", (0.0, 0.0, 0.0))
    names = ("a", "d/b", "e/c")
    for name in names:
        area.write(name, content(1000))
    async with area.mount() as mirror:
        mirror.posix.faults.fail(call, code, after=after, times=times)
        scan = Scan(mirror.tree, mirror.copier.jobs)
        await (scan.everything() if all_of_it else scan.listed([n.encode() for n in names]))
        await mirror.settled()
        assert scan.failed == failed
        assert mirror.metrics.copies_completed == len(names) - failed


@pytest.mark.parametrize("all_of_it", [True, False])
async def test_an_index_that_cannot_be_written_stops_no_scan(
    area: Area, monkeypatch: pytest.MonkeyPatch, all_of_it: bool
) -> None:
    area.write("d/a", content(1000))
    async with area.mounted() as mirror:
        scan = Scan(mirror.tree, mirror.copier.jobs)
        for call in ("nodes.record_found_each", "listings.begin_listing"):
            with monkeypatch.context() as patch:
                part, name = call.split(".")
                patch.setattr(getattr(mirror.index, part), name, disk_is_full)
                await (scan.everything() if all_of_it else scan.listed([b"d/a"]))
        assert scan.failed == (2 if all_of_it else 1)


async def test_a_list_is_wanted_in_its_order_as_far_as_it_exists(area: Area) -> None:
    area.write_files(5)
    (area.source / "d").mkdir()
    paths = [b"f003", b"nothing", b"f001", b"d", b"d/x", b"./f004", b"f003"]
    async with area.mount(copies=False, copy_workers=1) as mirror:
        scan = Scan(mirror.tree, mirror.copier.jobs)
        await scan.listed(paths)
        assert scan.failed == 3
        mirror.start_copying()
        await mirror.settled()
        assert await order(mirror) == ["f003", "f001", "f004"]
        assert mirror.metrics.copies_completed == 3


async def test_a_long_queue_holds_up_the_scan(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarchfs.prefetch.scan.QUEUE_LIMIT", 4)
    monkeypatch.setattr("monarchfs.prefetch.scan.BATCH", 3)
    area.write_files(20)
    async with area.mount(copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Scan(mirror.tree, mirror.copier.jobs).everything)
            await gate.arrived()
            await until(lambda: len(mirror.copier.jobs.queue) >= 4, "the queue")
            await trio.testing.wait_all_tasks_blocked()
            assert len(mirror.copier.jobs.queue) < 4 + 3
            gate.open()
        await mirror.settled()
        assert mirror.metrics.copies_completed == 20


async def test_scanned_files_keep_to_a_rate_and_opened_ones_do_not(
    area: Area, clock: trio.testing.MockClock
) -> None:
    names = area.write_files(4, MIB)
    area.write("opened", content(8 * MIB, 9))
    async with area.mounted(copy_workers=2, rate=MIB) as mirror:
        handle = await mirror.open("opened")
        await mirror.want_each(names)
        await until(lambda: mirror.residency.state(handle.ino) == "resident", "the opened file")
        handle.release()
        for copied in (1, 2, 3, 4):
            await until(lambda: mirror.metrics.copies_completed > copied, "one more")  # noqa: B023
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert mirror.metrics.copies_completed == 1 + copied
            clock.jump(1.0)


async def test_one_without_room_costs_no_rate(area: Area, clock: trio.testing.MockClock) -> None:
    area.write("large", content(8 * MIB))
    names = ["large", *area.write_files(1, MIB)]
    async with area.mounted([4 * MIB], copy_workers=1, rate=MIB) as mirror:
        await mirror.want_each(names)
        await until(lambda: mirror.metrics.copies_completed == 1, "the small one")
    assert trio.current_time() == 0, "no time has passed"


async def test_each_node_scans_in_its_own_order(area: Area, clock: trio.testing.MockClock) -> None:
    for number in range(40):
        area.write(f"d{number % 4}/f{number}", content(100, number))
    orders: list[list[bytes]] = []
    for seed in (1, 2):
        async with area.mount(copy_workers=1, copies=False) as mirror:
            scan = Scan(mirror.tree, mirror.copier.jobs, jitter_seconds=2, random=Random(seed))
            begun = trio.current_time()
            clock.autojump_threshold = 0.05
            await scan.everything()
            clock.autojump_threshold = math.inf
            assert 0 < trio.current_time() - begun < 2
            jobs = iter(mirror.copier.jobs.take_next, None)
            nodes = [mirror.index.nodes.node(ino) for ino, _priority in jobs]
            orders.append([node.name for node in nodes if node is not None])
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(orders[0]) == 40
    assert orders[0] != orders[1]


# Small files that are copied together: that it is so, and that none of them pays for another.


@pytest.fixture
def names(area: Area) -> list[str]:
    return area.write_files(6)


async def begin(mirror: Mirror, names: list[str], together: int = 64) -> None:
    """Have them copied, so many at a time."""
    mirror.copier.together.value = together
    await mirror.want_each(names)
    mirror.start_copying()


async def check(mirror: Mirror, names: list[str]) -> None:
    """All are resident and right, and nothing is left over."""
    await mirror.settled()
    assert mirror.states([await mirror.ino(name) for name in names]) == ["resident"] * len(names)
    read = mirror.source.counters.read_bytes
    await mirror.read_each(names)
    assert mirror.source.counters.read_bytes == read


async def let_it_be_stuck(clock: trio.testing.MockClock) -> None:
    for _ in range(6):
        clock.jump(copier.STUCK_SECONDS / 2)
        await trio.testing.wait_all_tasks_blocked()


async def test_many_files_are_few_transactions(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    names = area.write_files(100)
    async with area.mount(copies=False) as mirror:
        copy_idle = CopyIdle(mirror.copier.jobs, Scan(mirror.tree, mirror.copier.jobs), 0)
        commits = 0
        real = mirror.index.environment.write

        def write(*args: object, **options: object) -> object:
            nonlocal commits
            commits += 1
            return real(*args, **options)  # type: ignore[arg-type]

        await mirror.want_each(names)
        whole, tell = mirror.whole, mirror.whole.misses_events
        monkeypatch.setattr(mirror.index.environment, "write", write)
        monkeypatch.setattr(whole, "misses_events", lambda: [] if whole.busy else tell())
        mirror.copier.together.value = 50
        mirror.start_copying()
        await mirror.idle()
        assert mirror.copier.jobs.active == 0
        assert copy_idle.since_uptime_seconds is not None, "the end of the last one is noticed"
        assert mirror.posix.faults.calls["fetch"] == 2
        assert commits <= 8
        assert mirror.metrics.copies_completed == 100
        counters = mirror.source.counters
        assert counters.read_bytes == counters.prefetch_read_bytes == 100 * 10_000
        assert counters.calls["prefetch", "read"].operations == 100
        await check(mirror, names)


async def test_how_many_follows_the_time_taken(area: Area, clock: trio.testing.MockClock) -> None:
    names = area.write_files(60)
    async with area.mount(copy_workers=1, copies=False) as mirror:
        await begin(mirror, names[:40], together=1)
        await mirror.idle()
        assert mirror.copier.together.value > 4
        grown = mirror.copier.together.value
        mirror.posix.faults.before("read", lambda: clock.jump(2 * copier.LONG_SECONDS))
        await mirror.want_each(names[40:])
        await until(lambda: mirror.copier.together.value < grown, "a smaller number")
        await go_on(mirror, clock, 60)
        await check(mirror, names)


async def test_one_that_hangs_holds_up_no_other(area: Area, clock: trio.testing.MockClock) -> None:
    names = area.write_files(12)
    async with area.mount(copy_workers=1, copies=False) as mirror:
        gate = mirror.posix.gate_at(area.source / names[3])
        await begin(mirror, names)
        await gate.arrived()
        await until(lambda: mirror.metrics.copies_completed == 3, "those before it")
        assert mirror.copier.jobs.active == 9
        await mirror.read_each(names[:3])
        assert mirror.source.counters.demand_read_bytes == 0
        # A reader takes out what has not had its turn.
        with trio.fail_after(5):
            await mirror.read_each(names[5:6])
        assert mirror.copier.jobs.active == 8
        mirror.whole.lend()
        await let_it_be_stuck(clock)
        await until(lambda: mirror.metrics.copies_completed == 11, "the others")
        await trio.testing.wait_all_tasks_blocked()
        assert mirror.copier.jobs.active == 1
        gate.open()
        await check(mirror, names)
        assert mirror.source.counters.read_bytes == 120_000


async def test_a_hanging_tier(area: Area, names: list[str], clock: trio.testing.MockClock) -> None:
    async with area.mount(copy_workers=1, copies=False) as mirror:
        gate = mirror.tier.faults.gate("write_whole")
        await begin(mirror, names)
        await gate.arrived()
        await until(lambda: mirror.source.counters.prefetch_read_bytes == 60_000, "all to be read")
        await let_it_be_stuck(clock)
        await mirror.read_each(names)
        gate.open()
        await check(mirror, names)
        assert mirror.tier.faults.calls["write_whole"] == 6
        assert mirror.source.counters.prefetch_read_bytes == 60_000


async def test_files_wait_to_be_stored_together_for_a_while(area: Area, names: list[str]) -> None:
    async with area.mount(copies=False) as mirror:
        mirror.small_files._patience = 3600
        gate = mirror.posix.gate_at(area.source / names[5])
        await begin(mirror, names, together=6)
        await gate.arrived()
        await until(lambda: len(mirror.small_files._waiting) == 5, "the others to be read")
        await mirror.copier.suspend()
        gate.open()
        await until(lambda: not mirror.whole.busy, "the last one to be read")
        mirror.small_files.take_events()
        await trio.testing.wait_all_tasks_blocked()
        assert mirror.metrics.copies_completed == 0
        accounts = mirror.cache.accounts.placement.ledger(mirror.tier.id)
        assert (accounts.reserved_bytes, accounts.files) == (0, 0)
    async with area.mount() as mirror:
        assert mirror.states([await mirror.ino(name) for name in names]) == ["remote"] * 6


async def test_what_somebody_waits_for_needs_no_turn(area: Area, names: list[str]) -> None:
    async with area.mount(copies=False) as mirror:  # the copier does not run at all
        mirror.small_files._patience = 3600
        await mirror.want_each(names)
        inos = [await mirror.ino(name) for name in names[2:4]]
        mirror.copier.hurry(inos)
        await until(lambda: mirror.states(inos) == ["resident"] * 2, "the copies")
        mirror.copier.hurry(inos)  # they are there
        mirror.start_copying()
        await check(mirror, names)
        assert mirror.source.counters.read_bytes == 60_000


async def test_a_file_that_has_changed_is_not_stored(area: Area, names: list[str]) -> None:
    async with area.mount(copies=False) as mirror:
        inos = [await mirror.ino(name) for name in names]
        area.replace(names[2], b"other")
        await begin(mirror, names)
        await mirror.settled()
        assert mirror.states(inos) == ["resident"] * 2 + ["remote"] + ["resident"] * 3
        node = mirror.index.nodes.node(inos[2])
        assert node is not None
        assert node.outdated


@pytest.mark.parametrize(
    ("part", "call", "shares"),
    [
        ("segments", "begin_segments", True),
        ("replicas", "put_replicas", True),
        ("replicas", "begin_copies", False),
    ],
)
async def test_what_cannot_be_recorded_leaves_nothing_behind(
    area: Area,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    call: str,
    shares: bool,
) -> None:
    async with area.mount(copies=False, shares=shares) as mirror:
        inos = [await mirror.ino(name) for name in names]
        with monkeypatch.context() as patch:
            patch.setattr(getattr(mirror.index, part), call, disk_is_full)
            await begin(mirror, names)
            await mirror.settled()
        assert mirror.states(inos) == ["remote"] * 6
        await mirror.mend()
        await mirror.want_each(names)
        await check(mirror, names)


async def test_one_that_is_too_young_waits_alone(
    area: Area, names: list[str], clock: trio.testing.MockClock
) -> None:
    await area.settled()
    async with area.mounted(copies=False, mode=FreshnessMode.TTL) as mirror:
        (area.source / names[2]).write_bytes(content(10_000, 77))
        young = await mirror.ino(names[2])
        await begin(mirror, names)
        await until(lambda: mirror.metrics.copies_completed >= 5, "the others")
        await area.settled()
        while mirror.residency.state(young) != "resident":
            clock.jump(copier.YOUNG_SECONDS)
            await trio.testing.wait_all_tasks_blocked(0.001)


# Small files are copied ahead of a reader that opens many of them; others are not.


SIZE = 5_000


@asynccontextmanager
async def copying_ahead(mirror: Mirror) -> AsyncIterator[Ahead]:
    """Whoever opens ten opens many."""
    with mock.patch.object(ahead, "MANY", 10):
        found = Ahead(mirror.tree, mirror.cache, mirror.copier.jobs)
        mirror.files.on_open.add(found.note_open)
        mirror.start_copying()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.run)
            yield found
            nursery.cancel_scope.cancel()


async def read_each(mirror: Mirror, names: list[str]) -> None:
    """What is being read is answered from that by the C part; here it is waited for."""
    for name in names:
        ino = await mirror.ino(name)
        await until(lambda: not mirror.copier.jobs.copying(ino), "it to be stored")  # noqa: B023
        assert await mirror.read_file(name) == (mirror.area.source / name).read_bytes()


async def looked_again() -> None:
    for _ in range(5):
        await trio.sleep(ahead.LOOK_SECONDS)


def resident(mirror: Mirror) -> int:
    return sum(totals.resident for totals in mirror.index.replicas.tier_totals().values())


async def test_as_many_again_of_the_same_directory(area: Area) -> None:
    names, others = area.write_files(60, SIZE, "train/"), area.write_files(30, SIZE, "val/")
    async with area.mount() as mirror, copying_ahead(mirror) as found:
        await read_each(mirror, names[:10])
        await until(lambda: resident(mirror) == 20, "as many again to be copied")
        await mirror.idle()
        await looked_again()
        await mirror.settled()
        assert resident(mirror) == 20
        assert [mirror.bytes_read(name) for name in others] == [0] * len(others)
        # What is opened of it says that more is of use.
        await read_each(mirror, names[10:30])
        await until(lambda: resident(mirror) >= 50, "more to be copied")
        await read_each(mirror, names[30:])
        await until(lambda: resident(mirror) == 60, "all to be there")
        await mirror.settled()
        assert [mirror.bytes_read(name) for name in names] == [SIZE] * len(names)
        some = found.allowance
        assert (some.waiting, some.waiting_bytes, some.opened_bytes) == ({}, 0, 60 * SIZE)


async def test_nothing_after_a_few_opens_or_where_files_are_large(area: Area) -> None:
    few, large = area.write_files(30, SIZE, "few/"), area.write_files(14, MIB + 1, "large/")
    async with area.mount() as mirror, copying_ahead(mirror) as found:
        await read_each(mirror, few[:9] + large[:11])
        await looked_again()
        await mirror.settled()
        assert resident(mirror) == 20
        assert found.names == 0
        assert found.allowance.opened_files == 9


@pytest.mark.parametrize("why", ["they cannot be looked up", "they are gone"])
async def test_files_that_cannot_be_copied_ahead_cost_nobody_anything(area: Area, why: str) -> None:
    names = area.write_files(40, SIZE, "train/")
    async with area.mount() as mirror, copying_ahead(mirror):
        if why == "they are gone":
            for name in names[20:]:
                os.unlink(area.source / name)
        else:
            mirror.posix.faults.fail("found_each", errno.EACCES)
        await read_each(mirror, names[:20])
        await looked_again()
        await mirror.settled()
        assert resident(mirror) == 20
