"""Small replicas, which share files: where they lie, how they go, and what a crash leaves."""

import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarchfs.cache.index import set_aside
from monarchfs.cache.index.environment import Environment
from monarchfs.cache.reasons import Cause
from monarchfs.cache.store.allocator import allocated
from monarchfs.cache.store.listed import SegmentLists
from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.types import Replica, TierFile
from tests.support.faults import FaultySegments, FaultyTier, disk_is_full
from tests.support.mirror import ALL_ROOM, KIB, MIB, Area, Mirror, content, until
from tests.support.on_disk import Place, own_files, spoil

SIZE = 10_000
TAKEN = allocated(SIZE)
FAST = TAKEN + 4096
"""The room of a tier that holds one file."""


async def copy(mirror: Mirror, names: list[str]) -> list[int]:
    """Have them copied together."""
    mirror.copier.together.value = 64
    inos = [await mirror.ino(name) for name in names]
    await mirror.want_each(names)
    if not mirror._copying:
        mirror.start_copying()
    await mirror.idle()
    return inos


@asynccontextmanager
async def copied(
    area: Area, count: int, size: int = SIZE, *, of: int = 0, room: int = ALL_ROOM, **options: Any
) -> AsyncIterator[tuple[Mirror, list[str], list[int]]]:
    """A mount that has copied so many files together, and their numbers; the names of all, of which
    there may be more."""
    names = area.write_files(of or count, size)
    async with area.mounted([room], copies=False, **options) as mirror:
        yield mirror, names, await copy(mirror, names[:count])


async def read_locally(mirror: Mirror, names: list[str]) -> None:
    mirror.posix.reads.clear()
    await mirror.read_each(names)
    assert mirror.posix.reads == []


async def evict(mirror: Mirror, *inos: int) -> None:
    for ino in inos:
        assert mirror.cache.evict(ino)
    await mirror.idle()


async def is_left(area: Area, names: list[str], **options: Any) -> None:
    """The next mount serves these files itself, and has given everything else back."""
    async with area.mounted(copies=False, **options) as mirror:
        await until(lambda: blocks(mirror.tier) == len(names) * TAKEN, "the rest to be given back")
        await until(
            lambda: len(mirror.index.segments.segments(mirror.tier.id)) == 1, "so for segments"
        )
        await mirror.idle()
        mirror.check_books()
        await read_locally(mirror, names)


def lies_in(tier: FaultyTier, segment: int) -> Path:
    return Path(tier.path) / "segments" / f"{segment:016x}"


def blocks(tier: FaultyTier) -> int:
    return sum(tier.segments.blocks(segment) for segment in tier.segments.found())


def occupied(mirror: Mirror) -> int:
    """What the first tier holds, on the disk and by the books."""
    found = blocks(mirror.tier)
    assert found == mirror.used()
    return found


def segment_bytes(tier: FaultyTier, replica: Replica) -> bytes:
    with lies_in(tier, replica.segment).open("rb") as file:
        return os.pread(file.fileno(), replica.size, replica.offset)


def unsynced(mirror: Mirror) -> None:
    """As if the machine went down now: nothing is synced at the end of this mount."""
    for group in mirror.cache.accounts.durability._unsynced.values():
        del group[:]


async def test_one_that_is_not_written_leaves_the_others_alone(area: Area) -> None:
    names = area.write_files(6)
    async with area.mounted(copies=False) as mirror:
        mirror.tier.faults.fail("after_write", errno.EIO, after=2, times=1)
        nodes = [await mirror.node(name) for name in names]
        inos = [node.ino for node in nodes]
        reserved = mirror.cache.reservations.reserve_each(nodes, evicts=False)
        places = [(place, content(SIZE, n)) for n, place in enumerate(reserved) if place]
        for (place, _), result in zip(
            places, await mirror.cache.writer.write_each(places), strict=True
        ):
            if isinstance(result, OSError):  # as the copier does
                mirror.cache.writer.tier_failed(place, result)
                await mirror.cache.writer.abandon(place, Cause.FAILED, "for the test")
        assert mirror.states(inos).count("remote") == 1
        assert mirror.metrics.copies_completed == 5
        await mirror.settled()
        (first,) = mirror.tier.segments.found()
        await mirror.mend()
        await copy(mirror, names)
        assert set(mirror.states(inos)) == {"resident"}
        assert len(mirror.tier.segments.found()) == 2, "one that failed is not written to again"
        assert {mirror.replica(ino).segment for ino in inos} >= {first}


async def test_a_tier_that_gives_nothing_back_has_files_of_their_own(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with copied(area, 2, of=4) as (_, names, _inos):
        pass

    monkeypatch.setattr(SegmentFiles, "frees_punched", lambda _: False)
    async with area.mounted(copies=False) as mirror:
        await mirror.mend()
        await read_locally(mirror, names[:2])
        await copy(mirror, names)
        assert len(own_files(area.tier(1))) == 2
        await read_locally(mirror, names)


async def test_what_is_evicted_gives_its_blocks_back(area: Area) -> None:
    """A tier of 64 MiB has segments of 4 MiB."""
    taken = allocated(900 * KIB)
    async with copied(area, 9, 900 * KIB, room=64 * MIB) as (mirror, names, inos):
        await mirror.cache.accounts.sync()
        await read_locally(mirror, names)
        by_segment: dict[int, list[int]] = {}
        for ino in inos:
            by_segment.setdefault(mirror.replica(ino).segment, []).append(ino)
        assert len(by_segment) == 3
        left = 9
        for segment, lying in by_segment.items():
            path = lies_in(mirror.tier, segment)
            assert path.stat().st_size <= 4 * MIB
            for number, ino in enumerate(lying, 1):
                assert path.exists()
                await evict(mirror, ino)
                left -= 1
                assert occupied(mirror) == left * taken
                last = number == len(lying) and segment != list(by_segment)[-1]
                assert path.exists() != last
                assert path.with_suffix(".list").exists() != last
                mirror.check_books()
        (empty,) = mirror.index.segments.segments(mirror.tier.id)
    async with area.mounted([64 * MIB], copies=False) as mirror:
        await until(lambda: not mirror.index.segments.segments(mirror.tier.id), "it to be removed")
        assert empty not in mirror.tier.segments.found()
        assert not lies_in(mirror.tier, empty).with_suffix(".list").exists()


async def test_no_list_outlives_its_segment(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is written to while the last replica goes."""
    async with copied(area, 9, 900 * KIB, room=64 * MIB) as (mirror, _, inos):
        first = mirror.replica(inos[0]).segment
        gate, real = mirror.tier.faults.gate(), SegmentLists.append

        def append(lists: SegmentLists, segment: int, rows: list[TierFile]) -> None:
            if segment == first:
                gate.meet()
            real(lists, segment, rows)

        monkeypatch.setattr(SegmentLists, "append", append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.cache.accounts.sync)
            await gate.arrived()
            await evict(mirror, *(ino for ino in inos if mirror.replica(ino).segment == first))
            assert not lies_in(mirror.tier, first).exists()
            gate.open()
        there = {path.stem for path in lies_in(mirror.tier, first).parent.iterdir()}
        assert f"{first:016x}" not in there


@pytest.mark.parametrize("durable", [True, False])
async def test_what_is_open_is_given_back_when_it_is_closed(area: Area, durable: bool) -> None:
    names = area.write_files(3)
    async with area.mount() as mirror:
        inos = [await mirror.copied(name) for name in names]
        if durable:
            await mirror.cache.accounts.sync()
        old = mirror.replica(inos[1])
        first, second = await mirror.open(names[1]), await mirror.open(names[1])
        assert mirror.cache.accounts.drop(inos[1], "for the test")
        await mirror.cache.maintain()
        await mirror.idle()
        assert mirror.residency.state(inos[1]) == "remote"
        assert segment_bytes(mirror.tier, old) == content(SIZE, 1)
        assert occupied(mirror) == 3 * TAKEN
        first.release()
        await mirror.idle()
        mirror.posix.reads.clear()
        assert await mirror.read(second, 5, 5000) == content(SIZE, 1)[5:5005]
        assert mirror.posix.reads == []
        # Others get a new one meanwhile.
        await mirror.copied(names[1])
        assert mirror.replica(inos[1])[-2:] != old[-2:]
        assert await mirror.read(second, 5, 5000) == content(SIZE, 1)[5:5005]
        second.release()
        await mirror.settled()
        assert occupied(mirror) == 3 * TAKEN
        assert segment_bytes(mirror.tier, old) == bytes(SIZE)
        await read_locally(mirror, names)


async def test_what_threads_are_reading_stays_until_they_have_read_it(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with copied(area, 2) as (mirror, _, (ino, _other)):
        busy = {ino}
        monkeypatch.setattr(mirror.cache.readers, "reading", busy.__contains__)
        old = mirror.replica(ino)
        assert mirror.cache.accounts.drop(ino, "for the test")
        await trio.sleep(0.02)
        assert segment_bytes(mirror.tier, old) == content(SIZE, 0)
        assert mirror.used() == 2 * TAKEN
        busy.clear()
        await mirror.settled()
        assert segment_bytes(mirror.tier, old) == bytes(SIZE)


def listen(mirror: Mirror, patch: pytest.MonkeyPatch) -> list[str]:
    """The calls on which the order of a removal depends, in their order."""
    calls: list[str] = []
    real, drop = mirror.index.environment.sync, mirror.index.replicas.drop_replicas

    def sync() -> None:
        calls.append("begin sync")
        real()
        calls.append("end sync")

    def dropping(inos: Sequence[int]) -> None:
        drop(inos)
        calls.append("commit")

    patch.setattr(mirror.index.environment, "sync", sync)
    patch.setattr(mirror.index.replicas, "drop_replicas", dropping)
    mirror.tier.faults.before("remove", lambda: calls.append("punch"))
    return calls


async def test_what_a_power_cut_could_bring_back_is_not_punched_before(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with copied(area, 2, of=4) as (mirror, names, inos):
        await mirror.cache.accounts.sync()
        inos += await copy(mirror, names[2:])
        calls = listen(mirror, monkeypatch)
        await evict(mirror, inos[3])
        assert calls == ["commit", "punch"], "a reboot takes it anyway"
        calls.clear()
        await evict(mirror, inos[1])
        assert calls == ["commit", "begin sync", "end sync", "punch"]
        assert mirror.states(inos) == ["resident", "remote", "resident", "remote"]


async def test_one_that_may_return_is_enough(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    async with copied(area, 1, of=4) as (mirror, names, inos):
        await mirror.cache.accounts.sync()
        inos += await copy(mirror, names[1:])
        calls = listen(mirror, monkeypatch)
        # The first goes alone, and the others together when that has gone.
        gate = mirror.tier.faults.gate("remove")
        assert mirror.cache.evict(inos[1])
        await gate.arrived()
        assert mirror.cache.evict(inos[0])
        assert mirror.cache.evict(inos[2])
        gate.open()
        await mirror.idle()
        assert calls[:4] == ["commit", "punch", "commit", "commit"]
        assert calls[4:] == ["begin sync", "end sync", "punch"]


async def test_without_the_sync_it_stays(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    async with copied(area, 3) as (mirror, _, inos):
        await mirror.cache.accounts.sync()
        old = mirror.replica(inos[0])
        with monkeypatch.context() as patch:
            patch.setattr(mirror.index.environment, "sync", disk_is_full)
            await evict(mirror, inos[0])
            for _ in range(2):
                await mirror.cache.maintain()
                await mirror.idle()
            assert segment_bytes(mirror.tier, old) == content(SIZE, 0)
            assert occupied(mirror) == 3 * TAKEN
            assert mirror.cache.usage.out_of_service(mirror.tier.id) is None, "it is not to blame"
        await mirror.cache.maintain()
        await mirror.settled()
        assert occupied(mirror) == 2 * TAKEN


async def test_nor_does_the_next_worker_punch_without_the_sync(
    area: Area, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with copied(area, 2, sound=False) as (mirror, names, inos):
        await mirror.cache.accounts.sync()
        old = mirror.replica(inos[0])
        mirror.index.replicas.drop_replicas([inos[0]])  # and is killed
    with monkeypatch.context() as patch:
        patch.setattr(Environment, "sync", disk_is_full)
        async with area.mount(copies=False, sound=False) as mirror:
            await until(lambda: "looks at its segments" in caplog.text, "it to give up")
            assert segment_bytes(mirror.tier, old) == content(SIZE, 0)
    await is_left(area, names[1:])


async def test_a_frozen_index_has_nothing_punched_that_was_durable(area: Area) -> None:
    async with copied(area, 2, of=3, sound=False) as (mirror, names, inos):
        await mirror.cache.accounts.sync()
        inos += await copy(mirror, names[2:])
        lying = [mirror.replica(ino) for ino in inos]
        for ino in (inos[0], inos[2]):
            assert mirror.cache.evict(ino)
        mirror.index.environment._frozen = "for the test"
        assert not mirror.cache.evict(inos[1])
        await mirror.idle()
        await mirror.cache.maintain()
        await mirror.idle()
        assert segment_bytes(mirror.tier, lying[0]) == content(SIZE, 0)
        assert segment_bytes(mirror.tier, lying[1]) == content(SIZE, 1)
    await is_left(area, [names[1]])


async def test_a_reboot_that_lost_the_index_of_a_segment(area: Area) -> None:
    """What was synced is in the list; what was not is removed with the rest of it."""
    async with copied(area, 3, of=5, sound=False) as (mirror, names, _):
        await mirror.cache.accounts.sync()
        before = shutil.copytree(area.state, area.path / "before")
        await copy(mirror, names[3:])
        unsynced(mirror)
    shutil.rmtree(area.state)
    before.rename(area.state)
    await is_left(area, names[:3], boot_id=b"second boot")


async def test_a_new_index_takes_over_what_the_lists_say_and_is_so(area: Area) -> None:
    async with copied(area, 5, of=6, sound=False) as (mirror, names, inos):
        await mirror.cache.accounts.sync()
        await copy(mirror, names[5:])  # not in a list
        unsynced(mirror)
        spoilt = mirror.replica(inos[2])
        spoil(Place(lies_in(mirror.tier, spoilt.segment), spoilt.offset), 100)
    set_aside(str(area.state))
    async with area.mounted(copies=False) as mirror:
        await mirror.idle()
        assert mirror.index.replicas.tier_totals()[mirror.tier.id].found == 4
        assert occupied(mirror) == 4 * TAKEN
        mirror.check_books()
        await mirror.read_each(names)
        assert [mirror.bytes_read(name) for name in names] == [0, 0, SIZE, 0, 0, SIZE]
        assert mirror.metrics.replicas_adopted == 4
        await mirror.idle()
        mirror.check_books()
        # They go as all others do.
        assert occupied(mirror) == 6 * TAKEN
        await evict(mirror, await mirror.ino(names[0]))
        assert occupied(mirror) == 5 * TAKEN


async def test_a_disk_that_does_not_give_one_back_keeps_the_others(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with copied(area, 4, sound=False) as (mirror, names, inos):
        bad = mirror.replica(inos[2])
    set_aside(str(area.state))
    real = FaultySegments.verify

    def verify(*given: object) -> bool:
        if given[2] == bad.offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(FaultySegments, "verify", verify)
    async with area.mounted(copies=False) as mirror:
        await mirror.idle()
        assert mirror.cache.usage.out_of_service(mirror.tier.id) is None
        assert mirror.index.replicas.tier_totals()[mirror.tier.id].found == 3
        await mirror.read_each(names)


@pytest.mark.parametrize("call", ["replicas.put_replica", "segments.begin_segments"])
async def test_a_move_not_recorded(area: Area, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    names = area.write_files(2)
    async with area.mounted([FAST, ALL_ROOM]) as mirror:
        inos = [await mirror.copied(name) for name in names]
        assert [mirror.replica(ino).tier for ino in inos] == [tier.id for tier in mirror.tiers]
        assert mirror.cache.accounts.drop(inos[0], "for the test")
        await mirror.idle()
        mirror.cache.accounts.segments._allocators[mirror.tier.id].seal()  # type: ignore[union-attr]
        tried = trio.Event()

        def fail(*_: object, **options: object) -> None:
            tried.set()
            disk_is_full()

        with monkeypatch.context() as patch:
            part, name = call.split(".")
            patch.setattr(getattr(mirror.index, part), name, fail)
            await mirror.read_file(names[1])
            with trio.fail_after(5):
                await tried.wait()
            await until(lambda: not mirror.cache.accounts.busy, "its end")
            await mirror.idle()
        assert mirror.replica(inos[1]).tier == mirror.tiers[1].id
        assert blocks(mirror.tier) == 0
        await read_locally(mirror, names[1:])
        await until(lambda: not mirror.cache.accounts.busy, "the move")


def replaced(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def without_segments(path: Path) -> None:
    shutil.rmtree(path / "segments")


@pytest.mark.parametrize("how", [shutil.rmtree, replaced, without_segments])
async def test_a_tier_that_becomes_another_one(area: Area, how: Callable[[Path], None]) -> None:
    """What it had is read from the source; once it is there again it takes files as before."""
    async with copied(area, 3, of=6, sound=False) as (mirror, names, _):
        held = await mirror.open(names[0])
        how(area.path / "tier1")
        assert await mirror.read(held, 0, SIZE) == content(SIZE, 0), "it is still open"
        await mirror.read_each(names)
        await copy(mirror, names)
        area.tier(1)
        held.release()
        for _ in range(4):
            await mirror.cache.maintain()
            await mirror.idle()
            await copy(mirror, names)
            await mirror.read_each(names)
        assert mirror.cache.usage.out_of_service(mirror.tier.id) is None
        inos = [await mirror.ino(name) for name in names]
        assert mirror.states(inos) == ["resident"] * 6
        await read_locally(mirror, names)
        for ino in inos:
            assert lies_in(mirror.tier, mirror.replica(ino).segment).exists()
        await mirror.settled()
    async with area.mounted() as mirror:
        await read_locally(mirror, names)
