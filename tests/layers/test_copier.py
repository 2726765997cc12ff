"""What is copied next, how many at once, and what a source that hangs holds up."""

from __future__ import annotations

import errno
import math
import os
from random import Random

import pytest
import trio
import trio.testing

from monarchfs.prefetch import copy_slots, retries
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.scan import Scan
from tests.support.faults import disk_is_full
from tests.support.mirror import MIB, Area, Mirror, content, until


async def order(mirror: Mirror) -> list[str]:
    """In which the source was read, by the names of the files."""
    names = {path.stat().st_ino: path.name for path in mirror.area.source.iterdir()}
    seen = dict.fromkeys(names[read.ino] for read in mirror.posix.reads)
    return list(seen)


async def test_wanted_files_are_copied_in_the_order_of_their_priorities(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copy_workers=1, copies=False) as mirror:
        for name, priority in zip(names, (3, 2, 0, 3, 1, 0), strict=True):
            await mirror.want(name, priority)
        mirror.start_copying()
        await mirror.settled()
        assert await order(mirror) == [names[number] for number in (2, 5, 4, 1, 0, 3)]
        assert mirror.metrics.copies_completed == 6
        assert mirror.source.counters.demand_read_bytes == 0


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
        mirror.copier.jobs.opened(await mirror.ino("scanned"))
        await mirror.want("listed", Priority.LISTED)
        gate.open()
        await mirror.settled()
        inos = [read.ino for read in mirror.posix.reads]
        assert inos == sorted(inos, key=[(area.source / "scanned").stat().st_ino].count)[::-1]


async def test_a_file_is_not_copied_twice_whoever_wants_it(area: Area) -> None:
    (name,) = area.write_files(1, 2 * MIB)
    async with area.mount() as mirror:
        gate = mirror.posix.faults.gate("read")
        for priority in (3, 0, 2, 1):
            await mirror.want(name, priority)
            await gate.arrived()
        handle = await mirror.open(name)
        gate.open()
        await mirror.idle()
        await mirror.want(name)
        await mirror.idle()
        handle.release()
        await mirror.settled()
        assert mirror.bytes_read(name) == 2 * MIB
        assert mirror.metrics.copies_completed == 1


async def test_with_prefetch_none_nothing_is_copied(area: Area) -> None:
    (name,) = area.write_files(1, 2 * MIB)
    async with area.mount(keeps=False) as mirror:
        await mirror.want(name, 0)
        assert await mirror.read_file(name) == content(2 * MIB, 0)
        await mirror.settled()
        assert mirror.metrics.copies_completed == 0


# A source that hangs. The clock is moved by hand, the threads are real.


async def test_a_call_that_hangs_lends_its_slot(
    area: Area, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_slots, "MAX_LENT", 4)
    names = area.write_files(8)
    async with area.mount(copy_workers=2) as mirror:
        gate = mirror.posix.faults.gate("read")
        await mirror.want_each(names)
        for lent in (0, 2, 4, 4):
            await gate.arrived(2 + lent)
            await trio.testing.wait_all_tasks_blocked()
            assert gate.waiting == 2 + lent
            for _ in range(4):
                clock.jump(copy_slots.STUCK_SECONDS / 2)
                await trio.testing.wait_all_tasks_blocked()
        gate.open()
        await go_on(mirror, clock, 8)
        assert mirror.copier._slots.lent == 0
        assert mirror.metrics.copies_completed == 8


async def test_a_reader_waits_for_no_slot(area: Area) -> None:
    """Also not for a file whose turn in the background will come some time."""
    names = area.write_files(8)
    async with area.mounted(copy_workers=2) as mirror:
        gates = [mirror.posix.gate_at(area.source / name) for name in names[:2]]
        await mirror.want_each(names)
        for gate in gates:
            await gate.arrived()
        await mirror.read_each(names[2:])
        for gate in gates:
            assert gate.waiting == 1
            gate.open()


async def test_a_read_ahead_of_the_copy_pulls_what_it_needs_forward(area: Area) -> None:
    (name,) = area.write_files(1, 16 * MIB)
    data = content(16 * MIB, 0)
    async with area.mount(copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        handle = await mirror.open(name)
        await gate.arrived()  # the copy has begun at the start of the file
        results = []

        async def read() -> None:
            results.append(await mirror.read(handle, 9 * MIB, 5000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await gate.arrived(2)
            gate.release(1)
            await until(lambda: bool(results), "the read")
        assert results == [data[9 * MIB : 9 * MIB + 5000]]
        assert len(mirror.posix.reads) == 1
        gate.open()
        handle.release()
        await mirror.settled()
        assert mirror.bytes_read(name) == len(data)


# Errors that pass.


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


@pytest.mark.parametrize("size", [10_000, 3 * MIB])
async def test_what_fails_is_tried_again_after_a_while(
    area: Area, clock: trio.testing.MockClock, size: int
) -> None:
    (name,) = area.write_files(1, size)
    async with area.mount(copy_workers=1) as mirror:
        mirror.posix.faults.fail("read", errno.EIO, times=2)
        await mirror.want(name)
        await mirror.settled()
        assert mirror.posix.faults.calls["read"] == 1
        # As a thread of the data path asks, which has no event loop.
        reason = await trio.to_thread.run_sync(mirror.reason, await mirror.ino(name))
        assert reason == "copying failed: Input/output error (just now; it is tried again in 1 s)"
        await let_pass(mirror, clock, retries.RETRY_SECONDS[0] + 0.01)
        assert mirror.posix.faults.calls["read"] == 2
        await let_pass(mirror, clock, retries.RETRY_SECONDS[0] + 0.01)
        assert mirror.posix.faults.calls["read"] == 2, "the second time it waits longer"
        await let_pass(mirror, clock, retries.RETRY_SECONDS[1])
        await mirror.settled()
        assert await mirror.state(name) == "resident"
        assert mirror.metrics.copies_failed == 0
        assert mirror.bytes_read(name) == size


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
        for seconds in retries.RETRY_SECONDS:
            assert mirror.metrics.copies_failed == 0
            await let_pass(mirror, clock, seconds + 0.01)
        assert mirror.metrics.copies_failed == 1
        calls = mirror.posix.faults.calls["read"]
        await let_pass(mirror, clock, 1000)
        assert mirror.posix.faults.calls["read"] == calls


async def test_what_stays_that_way_is_not_tried_again(
    area: Area, clock: trio.testing.MockClock
) -> None:
    (name,) = area.write_files(1)
    async with area.mount() as mirror:
        mirror.posix.faults.fail("open", errno.EACCES)
        await mirror.want(name)
        await mirror.settled()
        assert mirror.metrics.copies_failed == 1
        await let_pass(mirror, clock, 1000)
        assert mirror.posix.faults.calls["open"] == 1


# The scan.


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


async def test_a_directory_that_cannot_be_scanned_stops_nothing(area: Area) -> None:
    for name in ("a", "d/b", "e/c"):
        area.write(name, content(1000))
    async with area.mount() as mirror:
        mirror.posix.faults.fail("found_each", errno.EIO, after=1, times=1)
        scan = Scan(mirror.tree, mirror.copier.jobs)
        await scan.everything()
        await mirror.settled()
        assert scan.failed == 1
        assert mirror.metrics.copies_completed == 2


@pytest.mark.parametrize("all_of_it", [True, False])
async def test_an_index_that_cannot_be_written_stops_no_scan(
    area: Area, monkeypatch: pytest.MonkeyPatch, all_of_it: bool
) -> None:
    area.write("d/a", content(1000))
    async with area.mounted() as mirror:
        scan = Scan(mirror.tree, mirror.copier.jobs)
        for call in ("tree.record_found_each", "listings.begin_listing"):
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


async def test_the_scan_waits_while_the_queue_is_long(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# What nobody has open keeps to a rate.


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


async def test_each_node_scans_in_an_order_of_its_own(
    area: Area, clock: trio.testing.MockClock
) -> None:
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
            jobs = iter(mirror.copier.jobs.queue.pop, None)
            nodes = [mirror.index.tree.node(ino) for ino, _priority in jobs]
            orders.append([node.name for node in nodes if node is not None])
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(orders[0]) == 40
    assert orders[0] != orders[1]
