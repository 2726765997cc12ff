"""Small files that are copied together: that it is so, and that none of them pays for another."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from monarchfs.prefetch import copier, copy_slots, retries
from monarchfs.prefetch.copy_idle import CopyIdle
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.scan import Scan
from monarchfs.types import FreshnessMode, Node
from tests.support.faults import Gate, disk_is_full
from tests.support.mirror import MIB, Area, Mirror, content, until


async def begin(mirror: Mirror, names: list[str], together: int = 64) -> None:
    """Have them copied, so many at a time."""
    mirror.copier.together.value = together
    for name in names:
        await mirror.want(name)
    mirror.start_copying()


async def check(mirror: Mirror, names: list[str]) -> None:
    """All are resident and right, and nothing is left over."""
    await mirror.settled()
    assert mirror.states([await mirror.ino(name) for name in names]) == ["resident"] * len(names)
    read = mirror.source.counters.read_bytes
    for name in names:
        assert await mirror.read_file(name) == (mirror.area.source / name).read_bytes()
    assert mirror.source.counters.read_bytes == read


def at_file(mirror: Mirror, name: str) -> Gate:
    """Where whoever is about to read the file waits."""
    ino = (mirror.area.source / name).stat().st_ino
    gate = mirror.posix.faults.gate(name)
    real = mirror.posix.read

    def read(fd: int, offset: int, size: int) -> object:
        if os.fstat(fd).st_ino == ino:
            mirror.posix.faults.meet(name)
        return real(fd, offset, size)

    mirror.posix.read = read  # type: ignore[assignment,method-assign]
    return gate


async def test_many_files_are_few_calls_and_few_transactions(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = area.write_files(100)
    async with area.mount(copies=False) as mirror:
        commits = 0
        real = mirror.index._write

        def write(*args: object, **options: object) -> object:
            nonlocal commits
            commits += 1
            return real(*args, **options)  # type: ignore[arg-type]

        for name in names:
            await mirror.want(name)
        tell = mirror.whole.misses_events
        monkeypatch.setattr(mirror.index, "_write", write)
        monkeypatch.setattr(
            mirror.whole,
            "misses_events",
            lambda: [] if mirror.whole.busy else tell(),
        )
        mirror.copier.together.value = 50
        mirror.start_copying()
        await mirror.idle()
        assert mirror.posix.faults.calls["fetch"] == 2
        assert commits <= 8
        assert mirror.metrics.copies_completed == 100
        counters = mirror.source.counters
        assert counters.read_bytes == counters.prefetch_read_bytes == 100 * 10_000
        kind = counters.calls["prefetch", "read"]
        assert kind.operations == 100
        await check(mirror, names)


@pytest.mark.parametrize("shares", [True, False])
async def test_what_is_about_to_be_written_is_recorded_once(
    area: Area, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """Each file of its own before it is made; of files that share one only that."""
    names = area.write_files(6)
    async with area.mount(copies=False, shares=shares) as mirror:
        begun: list[str] = []

        def listen(call: str) -> None:
            real = getattr(mirror.index, call)

            def heard(*given: object) -> None:
                begun.append(call)
                real(*given)

            monkeypatch.setattr(mirror.index, call, heard)

        listen("begin_segments")
        listen("begin_copies")
        await begin(mirror, names)
        await check(mirror, names)
        assert set(begun) == {"begin_segments" if shares else "begin_copies"}
        assert not shares or len(begun) == len(mirror.tier.segments.found()) == 1


async def test_what_others_have_read_is_kept_from_any_buffer(area: Area) -> None:
    names = area.write_files(5, 7000)
    async with area.mount(copies=False) as mirror:
        nodes = [await mirror.node(name) for name in names]
        places = mirror.cache.reserve_each(nodes, evicts=False)
        data = memoryview(bytearray(b"".join(content(7000, number) for number in range(5))))
        given_up, *kept = [place for place in places if place is not None]
        given_up.given_up = True
        cut = [data[7000 * n : 7000 * (n + 1)] for n in range(5)]
        results = await mirror.cache.write_each([*zip((given_up, *kept), cut, strict=True)])
        assert results == [False, True, True, True, True]
        mirror.cache.cancel(given_up)
        data[:] = bytes(35_000)  # it is not looked at any more
        assert mirror.states([node.ino for node in nodes]) == ["remote"] + ["resident"] * 4
        for number in range(1, 5):
            assert await mirror.read_file(names[number]) == content(7000, number)
        assert mirror.source.counters.read_bytes == 0
        await mirror.settled()


async def test_the_end_of_the_last_one_is_noticed(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        copy_idle = CopyIdle(mirror.copier.jobs, Scan(mirror.tree, mirror.copier.jobs), 0)
        await begin(mirror, names)
        await mirror.idle()
        assert mirror.copier.jobs.active == 0
        assert copy_idle.since_uptime_seconds is not None


async def test_how_many_it_are_follows_the_time_that_it_takes(
    area: Area, clock: trio.testing.MockClock
) -> None:
    names = area.write_files(60)
    async with area.mount(copy_workers=1, copies=False) as mirror:
        await begin(mirror, names[:40], together=1)
        await mirror.idle()
        assert mirror.copier.together.value > 4
        grown = mirror.copier.together.value
        mirror.posix.faults.before("read", lambda: clock.jump(2 * copier.LONG_SECONDS))
        for name in names[40:]:
            await mirror.want(name)
        await until(lambda: mirror.copier.together.value < grown, "a smaller number")
        while mirror.metrics.copies_completed < 60:
            clock.jump(1.0)  # the source is slow now, and is spared for a while
            await trio.testing.wait_all_tasks_blocked(0.001)
        await check(mirror, names)


async def test_large_empty_and_opened_files_are_copied_alone(area: Area) -> None:
    names = area.write_files(4)
    area.write("large", content(3 * MIB, 50))
    area.write("empty", b"")
    async with area.mount(copies=False) as mirror:
        handle = await mirror.open(names[0])
        await begin(mirror, [names[0], "large", names[1], "empty", names[2], names[3]])
        await mirror.want(names[1], Priority.OPENED)
        await mirror.idle()
        assert mirror.source.counters.read_bytes == 40_000 + 3 * MIB
        handle.release()
        await check(mirror, [*names, "large", "empty"])


async def test_a_reader_takes_out_what_has_not_had_its_turn(area: Area) -> None:
    names = area.write_files(8)
    async with area.mount(copy_workers=1, copies=False) as mirror:
        gate = at_file(mirror, names[0])
        await begin(mirror, names)
        await gate.arrived(1)
        with trio.fail_after(5):
            assert await mirror.read_file(names[5]) == content(10_000, 5)
        assert mirror.copier.jobs.active == 7
        gate.open()
        await check(mirror, names)
        assert mirror.source.counters.read_bytes == 80_000


async def test_what_was_read_before_one_that_hangs_is_stored(area: Area) -> None:
    names = area.write_files(4)
    async with area.mount(copy_workers=1, copies=False) as mirror:
        gate = at_file(mirror, names[2])
        await begin(mirror, names)
        await gate.arrived(1)
        await until(lambda: mirror.metrics.copies_completed == 2, "those before it")
        assert mirror.copier.jobs.active == 2
        for number in range(2):
            assert await mirror.read_file(names[number]) == content(10_000, number)
        assert mirror.source.counters.demand_read_bytes == 0
        gate.open()
        await check(mirror, names)
        assert mirror.source.counters.read_bytes == 40_000


async def test_one_that_hangs_gives_the_others_back(
    area: Area, clock: trio.testing.MockClock
) -> None:
    names = area.write_files(12)
    async with area.mount(copy_workers=1, copies=False) as mirror:
        gate = at_file(mirror, names[3])
        await begin(mirror, names)
        await gate.arrived(1)
        mirror.whole.lend()
        for _ in range(6):
            clock.jump(copy_slots.STUCK_SECONDS / 2)
            await trio.testing.wait_all_tasks_blocked()
        await until(lambda: mirror.metrics.copies_completed == 11, "the others")
        await trio.testing.wait_all_tasks_blocked()
        assert mirror.copier.jobs.active == 1
        gate.open()
        await check(mirror, names)
        assert mirror.source.counters.read_bytes == 120_000


async def test_a_tier_that_hangs_has_nothing_written_twice(
    area: Area, clock: trio.testing.MockClock
) -> None:
    names = area.write_files(6)
    async with area.mount(copy_workers=1, copies=False) as mirror:
        gate = mirror.tier.faults.gate("write_whole")
        await begin(mirror, names)
        await gate.arrived(1)
        for _ in range(6):
            clock.jump(copy_slots.STUCK_SECONDS / 2)
            await trio.testing.wait_all_tasks_blocked()
        for number, name in enumerate(names):
            assert await mirror.read_file(name) == content(10_000, number)
        gate.open()
        await check(mirror, names)
        assert mirror.tier.faults.calls["write_whole"] == 6
        assert mirror.source.counters.prefetch_read_bytes == 60_000


async def all_but_the_last_are_read(mirror: Mirror, names: list[str]) -> Gate:
    """Six files of one batch; the last waits at the gate, the others to be stored with it."""
    mirror.arrivals._patience = 3600
    gate = at_file(mirror, names[5])
    await begin(mirror, names, together=6)
    await gate.arrived()
    await until(lambda: len(mirror.arrivals._waiting) == 5, "the others to be read")
    return gate


async def test_files_wait_to_be_stored_together_but_not_for_the_end(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        gate = await all_but_the_last_are_read(mirror, names)
        await mirror.copier.files.suspend()
        gate.open()
        await until(lambda: not mirror.whole.busy, "the last one to be read")
        mirror.arrivals.take_events()
        await trio.testing.wait_all_tasks_blocked()
        assert mirror.metrics.copies_completed == 0
        accounts = mirror.cache.placement.ledger(mirror.tier.id)
        assert (accounts.reserved_bytes, accounts.files) == (0, 0)
    async with area.mount() as mirror:
        assert mirror.states([await mirror.ino(name) for name in names]) == ["remote"] * 6


async def test_all_of_a_batch_are_stored_at_once(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        mirror.arrivals._patience = 3600
        await begin(mirror, names, together=6)
        await check(mirror, names)


async def test_what_somebody_waits_for_is_stored_before_the_rest_of_its_batch(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        gate = await all_but_the_last_are_read(mirror, names)
        ino = await mirror.ino(names[3])
        mirror.copier.hurry([ino])
        await until(lambda: mirror.states([ino]) == ["resident"], "the copy")
        assert not mirror.copier.jobs.pending(ino)
        gate.open()
        await check(mirror, names)
    assert not mirror.arrivals._hurried


async def test_what_somebody_waits_for_needs_no_turn(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:  # the copier does not run at all
        mirror.arrivals._patience = 3600
        for name in names:
            await mirror.want(name)
        inos = [await mirror.ino(name) for name in names[2:4]]
        mirror.copier.hurry(inos)
        await until(lambda: mirror.states(inos) == ["resident"] * 2, "the copies")
        mirror.copier.hurry(inos)  # they are there
        mirror.start_copying()
        await check(mirror, names)
        assert mirror.source.counters.read_bytes == 60_000


class SomeOwners:
    """Other nodes own the files with these numbers. ``asked``: which were asked for, while which
    had been read; each waits until ``answers``, and some are late."""

    def __init__(self, mirror: Mirror, theirs: list[int]) -> None:
        self.mirror = mirror
        self.theirs = theirs
        self.asked: list[list[int]] = []
        self.late: set[int] = set()
        self.answers = trio.Event()

    def elsewhere(self, node: Node) -> bool:
        return node.ino in self.theirs

    async def ask(self, nodes: Sequence[Node]) -> list[Node]:
        self.asked.append([node.ino for node in nodes])
        await self.answers.wait()
        late, self.late = self.late, set()
        return [node for node in nodes if node.ino in late]


async def test_others_files_are_asked_for_together_and_read_then(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        mirror.arrivals._patience = 0
        inos = [await mirror.ino(name) for name in names]
        owners = mirror.arrivals.owners = SomeOwners(mirror, inos[1:4])
        owners.late = {inos[2]}
        await begin(mirror, names, together=6)
        own = [inos[0], *inos[4:]]
        await until(lambda: mirror.states(own) == ["resident"] * 3, "the node's own")
        assert owners.asked == [inos[1:4]]
        assert mirror.source.counters.read_bytes == 30_000
        owners.answers.set()
        await check(mirror, names)
        assert owners.asked == [inos[1:4], [inos[2]]]


async def test_who_waits_for_a_file_does_not_wait_for_its_owner(area: Area) -> None:
    """Which may be lost, and is asked for it with others."""
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        mirror.arrivals._patience = 0
        inos = [await mirror.ino(name) for name in names]
        owners = mirror.arrivals.owners = SomeOwners(mirror, inos[1:4])
        owners.late = {inos[2]}
        await begin(mirror, names, together=6)
        await until(lambda: owners.asked == [inos[1:4]], "the owners to be asked")
        mirror.copier.hurry(inos[2:3])
        await until(lambda: mirror.states(inos[2:3]) == ["resident"], "the copy")
        owners.answers.set()
        await check(mirror, names)
        assert owners.asked == [inos[1:4]]
        assert mirror.source.counters.read_bytes == 60_000


async def test_what_others_own_is_copied_last(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        inos = [await mirror.ino(name) for name in names]
        mirror.copier.jobs.elsewhere = inos[:3].__contains__
        for ino in inos:
            mirror.copier.jobs.want(ino, Priority.SCANNED)
        queue = mirror.copier.jobs.queue
        turns = [queue.pop() for _ in inos]
        assert [turn[0] for turn in turns if turn] == [*inos[3:], *inos[:3]]


async def test_what_fails_is_tried_again_and_the_others_are_stored(
    area: Area, clock: trio.testing.MockClock
) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        mirror.posix.faults.fail("open", errno.EIO, after=2, times=1)
        await begin(mirror, names)
        await until(lambda: mirror.metrics.copies_completed == 5, "the others")
        await mirror.idle()
        assert mirror.metrics.copies_failed == 0
        clock.jump(retries.RETRY_SECONDS[0] + 1)
        await until(lambda: mirror.metrics.copies_completed == 6, "the second try")
        await check(mirror, names)


@pytest.mark.parametrize("how", ["replaced", "gone", "grown"])
async def test_a_file_that_has_changed_is_not_stored(area: Area, how: str) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        inos = [await mirror.ino(name) for name in names]
        path = area.source / names[2]
        if how == "replaced":
            (area.source / "other").write_bytes(b"other")
            (area.source / "other").replace(path)
        elif how == "gone":
            path.unlink()
        else:
            with path.open("ab") as file:
                file.write(b"more")
        await begin(mirror, names)
        await mirror.settled()
        assert mirror.states(inos) == ["resident"] * 2 + ["remote"] + ["resident"] * 3
        node = mirror.index.node(inos[2])
        assert node is not None
        assert node.outdated


async def test_a_file_that_changes_while_it_is_read_is_not_stored(area: Area) -> None:
    names = area.write_files(3)
    async with area.mount(copies=False) as mirror:
        inos = [await mirror.ino(name) for name in names]
        (area.source / names[1]).chmod(0o600)
        real = mirror.posix.read

        def read(fd: int, offset: int, size: int) -> object:
            os.utime(area.source / names[0], ns=(1, 1))
            return real(fd, offset, size)

        mirror.posix.read = read  # type: ignore[assignment,method-assign]
        await begin(mirror, names)
        await mirror.settled()
        assert mirror.states(inos) == ["remote", "remote", "resident"]


async def test_a_tier_that_fails_one_of_them_has_the_others(area: Area) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False) as mirror:
        mirror.tier.faults.fail("write_whole", errno.EIO, after=2, times=1)
        await begin(mirror, names)
        await mirror.settled()
        assert mirror.metrics.copies_completed == 5
        assert mirror.metrics.tier_errors == 1
        found = mirror.states([await mirror.ino(name) for name in names])
        assert sorted(found) == ["remote"] + ["resident"] * 5


@pytest.mark.parametrize(
    ("call", "shares"),
    [
        ("begin_segments", True),
        ("put_replicas", True),
        ("begin_copies", False),
        ("put_replica", False),
    ],
)
async def test_what_cannot_be_recorded_leaves_nothing_behind(
    area: Area, monkeypatch: pytest.MonkeyPatch, call: str, shares: bool
) -> None:
    names = area.write_files(6)
    async with area.mount(copies=False, shares=shares) as mirror:
        inos = [await mirror.ino(name) for name in names]
        with monkeypatch.context() as patch:
            patch.setattr(mirror.index, call, disk_is_full)
            await begin(mirror, names)
            await mirror.settled()
        assert mirror.states(inos) == ["remote"] * 6
        mirror.check_books()
        await mirror.mend()
        for name in names:
            await mirror.want(name)
        await check(mirror, names)


async def test_there_is_room_for_some_of_them(area: Area) -> None:
    for number in range(8):
        area.write(f"f{number}", content(4096 * (10 - number), number))
    async with area.mount([38 * 4096], copies=False) as mirror:
        await begin(mirror, [f"f{number}" for number in range(8)])
        await mirror.settled()
        found = mirror.states([await mirror.ino(f"f{number}") for number in range(8)])
        assert found == ["resident"] * 4 + ["remote"] * 4


async def test_one_that_is_too_young_waits_alone(area: Area, clock: trio.testing.MockClock) -> None:
    names = area.write_files(6)
    await area.settled()
    async with area.mount(copies=False, mode=FreshnessMode.TTL) as mirror:
        (area.source / names[2]).write_bytes(content(10_000, 77))
        young = await mirror.ino(names[2])
        await begin(mirror, names)
        await until(lambda: mirror.metrics.copies_completed >= 5, "the others")
        await area.settled()
        while mirror.residency.state(young) != "resident":
            clock.jump(copier.YOUNG_SECONDS)
            await trio.testing.wait_all_tasks_blocked(0.001)
        await mirror.settled()


async def test_one_whose_place_is_not_known_any_more(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    area.write("d/f", content(1000))
    names = area.write_files(3)
    async with area.mount(copies=False) as mirror:
        node = await mirror.node("d/f")
        real = mirror.index.dirref
        mirror.copier.jobs.want(node.ino, Priority.SCANNED)
        with monkeypatch.context() as patch:
            patch.setattr(
                mirror.index, "dirref", lambda ino: None if ino == node.parent else real(ino)
            )
            await begin(mirror, names)
            await until(lambda: mirror.metrics.copies_completed == 3, "the others")
            await mirror.idle()
        assert mirror.residency.state(node.ino) == "remote"
        assert mirror.copier.jobs.retries.due_in(node.ino) is not None
