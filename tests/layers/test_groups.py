"""Small files that are copied together: that it is so, and that none of them pays for another."""

from __future__ import annotations

import errno
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
        clock.jump(copy_slots.STUCK_SECONDS / 2)
        await trio.testing.wait_all_tasks_blocked()


async def test_many_files_are_few_calls_and_few_transactions(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        await mirror.want_each(names[40:])
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


async def test_a_tier_that_hangs_has_nothing_written_twice(
    area: Area, names: list[str], clock: trio.testing.MockClock
) -> None:
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


async def all_but_the_last_are_read(mirror: Mirror, names: list[str]) -> Gate:
    """Six files of one batch; the last waits at the gate, the others to be stored with it."""
    mirror.arrivals._patience = 3600
    gate = mirror.posix.gate_at(mirror.area.source / names[5])
    await begin(mirror, names, together=6)
    await gate.arrived()
    await until(lambda: len(mirror.arrivals._waiting) == 5, "the others to be read")
    return gate


async def test_files_wait_to_be_stored_together_but_not_for_the_end(
    area: Area, names: list[str]
) -> None:
    async with area.mount(copies=False) as mirror:
        gate = await all_but_the_last_are_read(mirror, names)
        await mirror.copier.files.suspend()
        gate.open()
        await until(lambda: not mirror.whole.busy, "the last one to be read")
        mirror.arrivals.take_events()
        await trio.testing.wait_all_tasks_blocked()
        assert mirror.metrics.copies_completed == 0
        accounts = mirror.cache.accounts.placement.ledger(mirror.tier.id)
        assert (accounts.reserved_bytes, accounts.files) == (0, 0)
    async with area.mount() as mirror:
        assert mirror.states([await mirror.ino(name) for name in names]) == ["remote"] * 6


async def test_what_somebody_waits_for_is_stored_before_the_rest_of_its_batch(
    area: Area, names: list[str]
) -> None:
    async with area.mount(copies=False) as mirror:
        gate = await all_but_the_last_are_read(mirror, names)
        ino = await mirror.ino(names[3])
        mirror.copier.hurry([ino])
        await until(lambda: mirror.states([ino]) == ["resident"], "the copy")
        assert not mirror.copier.jobs.pending(ino)
        gate.open()
        await check(mirror, names)
    assert not mirror.arrivals._hurried


async def test_what_somebody_waits_for_needs_no_turn(area: Area, names: list[str]) -> None:
    async with area.mount(copies=False) as mirror:  # the copier does not run at all
        mirror.arrivals._patience = 3600
        await mirror.want_each(names)
        inos = [await mirror.ino(name) for name in names[2:4]]
        mirror.copier.hurry(inos)
        await until(lambda: mirror.states(inos) == ["resident"] * 2, "the copies")
        mirror.copier.hurry(inos)  # they are there
        mirror.start_copying()
        await check(mirror, names)
        assert mirror.source.counters.read_bytes == 60_000


class SomeOwners:
    """Other nodes own the files with these numbers. ``asked``: which were asked for; each waits
    until ``answers``, and some are late."""

    def __init__(self, theirs: list[int], late: int) -> None:
        self.theirs = theirs
        self.asked: list[list[int]] = []
        self.late = {late}
        self.answers = trio.Event()

    def elsewhere(self, node: Node) -> bool:
        return node.ino in self.theirs

    async def ask(self, nodes: Sequence[Node]) -> list[Node]:
        self.asked.append([node.ino for node in nodes])
        await self.answers.wait()
        late, self.late = self.late, set()
        return [node for node in nodes if node.ino in late]


@pytest.mark.parametrize("hurried", [False, True], ids=["nobody waits", "somebody waits"])
async def test_others_files_are_asked_for_together_and_read_then(
    area: Area, names: list[str], hurried: bool
) -> None:
    """Who waits for a file does not wait for its owner, which may be lost."""
    async with area.mount(copies=False) as mirror:
        mirror.arrivals._patience = 0
        inos = [await mirror.ino(name) for name in names]
        owners = mirror.arrivals.owners = SomeOwners(inos[1:4], late=inos[2])
        await begin(mirror, names, together=6)
        own = [inos[0], *inos[4:]]
        await until(lambda: mirror.states(own) == ["resident"] * 3, "the node's own")
        assert owners.asked == [inos[1:4]]
        assert mirror.source.counters.read_bytes == 30_000
        if hurried:
            mirror.copier.hurry(inos[2:3])
            await until(lambda: mirror.states(inos[2:3]) == ["resident"], "the copy")
        owners.answers.set()
        await check(mirror, names)
        assert owners.asked == [inos[1:4]] + ([] if hurried else [[inos[2]]])
        assert mirror.source.counters.read_bytes == 60_000


async def test_what_others_own_is_copied_last(area: Area, names: list[str]) -> None:
    async with area.mount(copies=False) as mirror:
        inos = [await mirror.ino(name) for name in names]
        mirror.copier.jobs.elsewhere = inos[:3].__contains__
        for ino in inos:
            mirror.copier.jobs.want(ino, Priority.SCANNED)
        queue = mirror.copier.jobs.queue
        turns = [queue.pop() for _ in inos]
        assert [turn[0] for turn in turns if turn] == [*inos[3:], *inos[:3]]


async def test_what_fails_is_tried_again_and_the_others_are_stored(
    area: Area, names: list[str], clock: trio.testing.MockClock
) -> None:
    async with area.mount(copies=False) as mirror:
        mirror.posix.faults.fail("open", errno.EIO, after=2, times=1)
        await begin(mirror, names)
        await until(lambda: mirror.metrics.copies_completed == 5, "the others")
        await mirror.idle()
        assert mirror.metrics.copies_failed == 0
        clock.jump(retries.RETRY_SECONDS[0] + 1)
        await until(lambda: mirror.metrics.copies_completed == 6, "the second try")
        await check(mirror, names)


async def test_a_file_that_has_changed_is_not_stored(area: Area, names: list[str]) -> None:
    async with area.mount(copies=False) as mirror:
        inos = [await mirror.ino(name) for name in names]
        area.replace(names[2], b"other")
        await begin(mirror, names)
        await mirror.settled()
        assert mirror.states(inos) == ["resident"] * 2 + ["remote"] + ["resident"] * 3
        node = mirror.index.tree.node(inos[2])
        assert node is not None
        assert node.outdated


@pytest.mark.parametrize(
    ("call", "shares"),
    [
        ("segments.begin_segments", True),
        ("replicas.put_replicas", True),
        ("replicas.begin_copies", False),
    ],
)
async def test_what_cannot_be_recorded_leaves_nothing_behind(
    area: Area, names: list[str], monkeypatch: pytest.MonkeyPatch, call: str, shares: bool
) -> None:
    async with area.mount(copies=False, shares=shares) as mirror:
        inos = [await mirror.ino(name) for name in names]
        with monkeypatch.context() as patch:
            part, name = call.split(".")
            patch.setattr(getattr(mirror.index, part), name, disk_is_full)
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


async def test_one_whose_place_is_not_known_any_more(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    area.write("d/f", content(1000))
    names = area.write_files(3)
    async with area.mount(copies=False) as mirror:
        node = await mirror.node("d/f")
        real = mirror.index.tree.dirref
        mirror.copier.jobs.want(node.ino, Priority.SCANNED)
        with monkeypatch.context() as patch:
            patch.setattr(
                mirror.index.tree, "dirref", lambda ino: None if ino == node.parent else real(ino)
            )
            await begin(mirror, names)
            await until(lambda: mirror.metrics.copies_completed == 3, "the others")
            await mirror.idle()
        assert mirror.residency.state(node.ino) == "remote"
        assert mirror.copier.jobs.retries.due_in(node.ino) is not None
