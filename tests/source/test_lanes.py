"""The facade: stuck calls lend their slots, cancelled calls leave nothing open."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from monarchfs.source import Source
from monarchfs.source.lanes import Call, LaneThreads, lend
from monarchfs.source.releases import Releases
from monarchfs.types import DirRef, Lane, SourceChanged
from tests.source.tools import HangingPosix, open_descriptors, soon
from tests.support.timing import wait_for

DEMAND, BACKGROUND = Lane.DEMAND, Lane.BACKGROUND


async def test_each_function_has_its_asynchronous_twin(root: Path, hanging: HangingPosix) -> None:
    (root / "d").mkdir()
    (root / "l").symlink_to("file")
    os.setxattr(root / "file", "user.a", b"1")
    source = Source(hanging)
    here = source.root
    assert (await source.stat(here, b"file", DEMAND)).size == 8
    assert await source.readlink(here, b"l", DEMAND) == b"file"
    assert (await source.found(here, b"l", DEMAND))[1] == b"file"
    assert len(await source.found_each(here, [b"l", b"d"], BACKGROUND)) == 2
    assert await source.getxattr(here, b"file", b"user.a", DEMAND) == b"1"
    assert await source.listxattr(here, b"file", DEMAND) == [b"user.a"]
    assert await source.access(here, b"file", os.R_OK, DEMAND)
    assert (await source.statvfs(DEMAND)).f_bsize == os.statvfs(root).f_bsize
    assert source.counters.operations == 10, "listxattr also asks for the ACL"
    fd, st = await source.open(here, b"file", DEMAND)
    assert await source.read(fd, 2, 3, DEMAND) == (b"nte", st.version)
    assert await source.read(fd, 0, 99, BACKGROUND) == (b"contents", st.version)
    await source.close(fd, DEMAND)
    fd, _ = await source.open(here, b"file", DEMAND)
    source.close_soon(fd)
    await source.open_directory(here, BACKGROUND)
    counters = source.counters
    assert (counters.demand_read_bytes, counters.prefetch_read_bytes) == (3, 8)
    assert counters.read_bytes == 11
    assert 0 < counters.seconds < 10
    async with source.list(here, DEMAND, batch=3) as batches:
        sizes = [len(entries) async for entries in batches]
    assert sizes == [3, 1]


async def test_errors_are_raised_and_only_trouble_is_counted(
    hanging: HangingPosix, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    source = Source(hanging)
    with pytest.raises(FileNotFoundError):
        await source.stat(source.root, b"none", DEMAND)
    with pytest.raises(SourceChanged):
        await source.stat(DirRef(b"none", 1), b"x", DEMAND)
    assert source.counters.errors == 0
    monkeypatch.setattr(os, "fstatvfs", fail)
    with pytest.raises(OSError, match="Input/output error"):
        await source.statvfs(DEMAND)
    assert source.counters.errors == 1
    assert source.counters.operations == 3


async def test_lanes_do_not_wait_for_each_other(
    hanging: HangingPosix, nursery: trio.Nursery
) -> None:
    source = Source(hanging, demand_threads=1, background_threads=1)
    nursery.start_soon(source.stat, source.root, b"hang", BACKGROUND)
    await soon(lambda: hanging.inside == 1)
    assert (await source.stat(source.root, b"file", DEMAND)).size == 8


async def test_stuck_calls_lend_their_slots_and_take_them_back(
    hanging: HangingPosix, nursery: trio.Nursery
) -> None:
    source = Source(hanging, demand_threads=2, background_threads=1, stuck_seconds=0.05)
    await nursery.start(source.watch)
    for _ in range(5):
        nursery.start_soon(source.stat, source.root, b"hang", DEMAND)
    assert (await source.stat(source.root, b"file", DEMAND)).size == 8
    await soon(lambda: source.counters.stuck == 5)
    assert source.demand.limiter.total_tokens == 7
    assert source.background.limiter.total_tokens == 1
    hanging.release.set()
    await soon(lambda: source.counters.stuck == 0)
    assert source.demand.limiter.total_tokens == 2
    await soon(lambda: source.demand.limiter.borrowed_tokens == 0)


async def test_a_cancelled_call_is_stuck_until_its_thread_returns(
    hanging: HangingPosix, nursery: trio.Nursery
) -> None:
    source = Source(hanging, demand_threads=1, stuck_seconds=0.05)
    await nursery.start(source.watch)
    with trio.move_on_after(0.01) as scope:
        await source.stat(source.root, b"hang", DEMAND)
    assert scope.cancelled_caught
    await soon(lambda: hanging.inside == 1)
    assert (await source.stat(source.root, b"file", DEMAND)).size == 8
    assert source.demand.limiter.borrowed_tokens == 1
    hanging.release.set()
    await soon(lambda: source.demand.limiter.borrowed_tokens == 0)
    await soon(lambda: source.demand.limiter.total_tokens == 1)


def test_lending_is_bounded_and_serves_demand_first() -> None:
    releases = Releases()
    demand, background = (LaneThreads(DEMAND, 4, releases), LaneThreads(BACKGROUND, 2, releases))
    for lane, count in ((demand, 3), (background, 5)):
        for _ in range(count):
            lane.running[Call(lane, int, (), None, None)] = None
    young = Call(demand, int, (), None, None)
    young.started = time.monotonic()
    demand.running[young] = None
    assert lend((demand, background), 60, 5) == 8
    assert demand.limiter.total_tokens == 7
    assert background.limiter.total_tokens == 4
    assert lend((demand, background), 60, 2) == 8
    assert demand.limiter.total_tokens == 6
    assert background.limiter.total_tokens == 2
    demand.running.clear()
    background.running.clear()
    assert lend((demand, background), 60, 5) == 0
    assert (demand.limiter.total_tokens, background.limiter.total_tokens) == (4, 2)


async def test_responding_goes_by_the_deadline(
    hanging: HangingPosix, nursery: trio.Nursery
) -> None:
    source = Source(hanging, deadline=0.05)
    assert source.responding
    nursery.start_soon(source.stat, source.root, b"hang", BACKGROUND)
    await soon(lambda: hanging.inside == 1)
    nursery.start_soon(source.stat, source.root, b"hang", DEMAND)
    await soon(lambda: hanging.inside == 2)
    await soon(lambda: not source.responding)
    # One dead storage target does not make all of the source dead.
    await source.stat(source.root, b"file", DEMAND)
    assert source.responding
    await soon(lambda: not source.responding)
    hanging.release.set()
    await soon(lambda: source.responding and hanging.inside == 0)


async def test_a_file_opened_for_a_cancelled_caller_is_closed(hanging: HangingPosix) -> None:
    source = Source(hanging)
    before = open_descriptors()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as callers:
            callers.start_soon(source.open, source.root, b"hang", DEMAND)
            await soon(lambda: hanging.inside == 1)
            scope.cancel()
    assert open_descriptors() == before + 1
    hanging.release.set()
    await soon(lambda: open_descriptors() == before)


async def test_a_thread_that_outlives_the_run_still_closes_its_file(
    hanging: HangingPosix, nursery: trio.Nursery
) -> None:
    """The fixtures let it go on, and see that nothing is left open."""
    source = Source(hanging)
    fd, _ = await source.open(source.root, b"file", DEMAND)
    nursery.start_soon(source.open, source.root, b"hang", DEMAND)
    nursery.start_soon(source.read, fd, 1, 10, DEMAND)
    await soon(lambda: hanging.inside == 2)
    source.close_soon(fd)


async def test_closing_is_done_even_if_cancelled_before_it_began(
    root: Path, hanging: HangingPosix, nursery: trio.Nursery
) -> None:
    source = Source(hanging, demand_threads=1)
    fd = os.open(root / "file", os.O_RDONLY)
    before = open_descriptors()
    nursery.start_soon(source.stat, source.root, b"hang", DEMAND)
    await soon(lambda: hanging.inside == 1)
    with trio.move_on_after(0) as scope:
        await source.close(fd, DEMAND)
    assert scope.cancelled_caught
    await soon(lambda: open_descriptors() == before - 1)


def test_a_call_that_finished_as_its_caller_was_cancelled_is_disposed_of() -> None:
    lane = LaneThreads(DEMAND, 1, Releases())
    disposed: list[str] = []
    done = threading.Event()

    def dispose(result: str) -> None:
        disposed.append(result)
        done.set()

    call = Call(lane, str.upper, ("result",), dispose, None)
    assert call() == "RESULT"
    call.abandon()
    assert done.wait(10)
    assert disposed == ["RESULT"]

    never = Call(lane, disposed.append, ("ran",), None, done.clear)
    never.abandon()
    wait_for(lambda: not done.is_set(), "the turn to end")
    assert never() is None
    assert disposed == ["RESULT"]


async def test_an_abandoned_read_is_counted_when_it_comes_back(hanging: HangingPosix) -> None:
    source = Source(hanging)
    fd, _ = await source.open(source.root, b"file", DEMAND)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as callers:
            callers.start_soon(source.read, fd, 1, 100, BACKGROUND)
            await soon(lambda: hanging.inside == 1)
            scope.cancel()
    assert source.counters.read_bytes == 0
    hanging.release.set()
    await soon(lambda: source.counters.prefetch_read_bytes == 7)
    await source.close(fd, DEMAND)


async def test_a_listing_left_early_or_cancelled_closes_its_directory(
    root: Path, hanging: HangingPosix, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(hanging)
    before = open_descriptors()
    async with source.list(source.root, DEMAND, batch=1) as batches:
        async for entries in batches:
            assert len(entries) == 1
            break
    await soon(lambda: open_descriptors() == before)

    real_fsencode = os.fsencode

    def slow_fsencode(name: str) -> bytes:
        hanging.hang()
        return real_fsencode(name)

    monkeypatch.setattr(os, "fsencode", slow_fsencode)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as callers, source.list(source.root, DEMAND) as batches:
            callers.start_soon(batches.__anext__)
            await soon(lambda: hanging.inside == 1)
            scope.cancel()
    assert open_descriptors() > before
    hanging.release.set()
    await soon(lambda: open_descriptors() == before)
