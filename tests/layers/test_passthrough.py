"""Passthrough over real layers, with a kernel that holds every open to its rules."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio

from monarchfs.fuse import passthrough
from monarchfs.types import EvictionPolicy, FreshnessMode
from tests.layers.passing import Passing
from tests.support.mirror import ALL_ROOM, KIB, MIB, Area, content, until

SIZE = 50_000
ALL = "01234567"

Mounted = Callable[..., AbstractAsyncContextManager[Passing]]


@pytest.fixture
def passing(area: Area, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    """Mounts eight files. Those that are named are copied before anything is passed through."""
    monkeypatch.setattr("monarchfs.cache.tiers.SPACE_MAX_AGE_SECONDS", 0.0)
    monkeypatch.setattr(passthrough, "NEWS_SECONDS", 0.002)
    for name in ALL:
        area.write(name, content(SIZE, int(name)))

    @asynccontextmanager
    async def mounted(
        copied: Sequence[str] = "",
        tiers: Sequence[int] = (ALL_ROOM,),
        *,
        most: int = 64,
        seed: int = 0,
        shares: bool = False,
        **options: Any,
    ) -> AsyncIterator[Passing]:
        async with area.mount(tiers, shares=shares, **options) as mirror:
            for name in copied:
                await mirror.copied(name)
            kernel = Passing(mirror, monkeypatch, most=most, seed=seed)
            try:
                yield kernel
                assert kernel.eio == []
                await mirror.settled()
            finally:
                kernel.close()

    return mounted


async def given_back(kernel: Passing) -> None:
    await until(lambda: not kernel.registry.files, "the id to be given back")


async def test_a_resident_file_is_passed_through(passing: Mounted) -> None:
    async with passing("0") as kernel:
        first = await kernel.open("0")
        second = await kernel.open("0")
        assert first.backing_id == second.backing_id == 1
        assert await kernel.read(first) == content(SIZE, 0)
        await kernel.release(first)
        await kernel.release(second)
        assert await kernel.read_file("0") == (content(SIZE, 0), True)
        assert (kernel.registry.made, kernel.passthrough.ids) == (1, 1), "it was asked for once"
        assert kernel.mirror.metrics.passthrough_opens + kernel.threads.opened == 3
        assert len(kernel.slots) == 0


async def test_what_is_open_while_it_is_copied_stays_relayed(passing: Mounted) -> None:
    async with passing() as kernel:
        early = await kernel.open("0")
        assert await kernel.read(early) == content(SIZE, 0)
        await kernel.mirror.idle()
        assert kernel.mirror.residency.state(early.ino) == "resident"
        late = await kernel.open("0")
        assert (early.backing_id, late.backing_id) == (0, 0)
        await kernel.release(early)
        assert (await kernel.read_file("0"))[1] is False
        await kernel.release(late)
        assert await kernel.read_file("0") == (content(SIZE, 0), True)


async def test_resident_files_are_offered_before_they_are_opened(passing: Mounted) -> None:
    async with passing("0123") as kernel:
        mirror = kernel.mirror
        mirror.nursery.start_soon(kernel.passthrough.run)
        await until(lambda: kernel.passthrough.ids == 4, "what is there to be offered")
        await mirror.copied("4")
        await until(lambda: kernel.passthrough.ids == 5, "what came to be offered")
        for name in "01234":
            assert kernel.passthrough.known(await mirror.ino(name)), "no open has to wait"
            assert await kernel.read_file(name) == (content(SIZE, int(name)), True)
        assert kernel.registry.made == 5


async def test_an_evicted_replica_is_closed_before_its_room_is_given(passing: Mounted) -> None:
    async with passing("0") as kernel:
        mirror = kernel.mirror
        await kernel.read_file("0")
        (replica,) = kernel.open_replicas()
        one = await kernel.open("0")
        assert not mirror.cache.evict(one.ino), "it is open"
        await kernel.release(one)
        assert mirror.cache.evict(one.ino)
        await mirror.idle()
        assert (kernel.registry.files, kernel.passthrough.ids) == ({}, 0)
        assert not replica.exists()


async def test_a_moved_replica_is_let_go(passing: Mounted) -> None:
    async with passing("01", [64 * KIB, ALL_ROOM]) as kernel:
        mirror = kernel.mirror
        mirror.cache.accounts.drop(await mirror.ino("0"), "for the test")
        await mirror.idle()
        assert (await kernel.read_file("1"))[1]
        await until(lambda: mirror.metrics.replicas_moved == 1, "the move")
        await mirror.idle()
        assert kernel.registry.files == {}, "the old one is not kept open"
        assert await kernel.read_file("1") == (content(SIZE, 1), True)
        assert str(kernel.open_replicas()[0]).startswith(mirror.tiers[0].path)


async def test_what_shares_its_file_is_never_passed_through(area: Area, passing: Mounted) -> None:
    """Neither ahead nor at an open; and the tier is not blamed for it."""
    for name in ("large", "late"):
        area.write(name, content(2 * MIB, len(name)))
    async with passing(["0", "1", "large"], shares=True) as kernel:
        mirror = kernel.mirror
        mirror.nursery.start_soon(kernel.passthrough.run)
        await until(lambda: kernel.passthrough.ids == 1, "what has its own to be offered")
        assert [kernel.passthrough.known(await mirror.ino(name)) for name in "01"] == [0, 0]
        ones = [await kernel.open(name) for name in "0101"]
        assert [one.backing_id for one in ones] == [0, 0, 0, 0]
        assert await kernel.read(ones[1]) == content(SIZE, 1)
        for one in ones:
            await kernel.release(one)
        await mirror.copied("2")
        await mirror.copied("late")
        await until(lambda: kernel.passthrough.ids == 2, "another one to be offered")
        assert kernel.registry.made == 2
        assert (mirror.metrics.passthrough_opens, mirror.metrics.backing_refused) == (0, 0)
        assert kernel.threads.opened == 0


async def test_what_came_to_share_a_file(passing: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    async with passing("0", shares=True) as kernel:
        # It lay in a file of its own when the open began.
        monkeypatch.setattr(kernel.passthrough, "known", lambda _: None)
        assert await kernel.read_file("0") == (content(SIZE, 0), False)
        assert kernel.registry.made == 0


@pytest.mark.parametrize("corrupt", [True, False])
async def test_a_replica_that_goes_under_an_open(passing: Mounted, corrupt: bool) -> None:
    """The kernel allows no other mode for its inode, so the file becomes another one."""
    async with passing("0") as kernel:
        mirror = kernel.mirror
        early = await kernel.open("0")
        assert early.backing_id
        if corrupt:
            mirror.cache.accounts.corrupt(early.ino)
        else:
            mirror.cache.accounts.drop(early.ino, "its replica was lost")
        late = await kernel.open("0")
        assert late.ino != early.ino
        assert late.backing_id == 0
        assert await kernel.read(late) == content(SIZE, 0)
        await kernel.release(late)
        await mirror.idle()
        assert await kernel.read_file("0") == (content(SIZE, 0), True)
        assert await kernel.read(early) == content(SIZE, 0), "the kernel reads on what it has"
        await kernel.release(early)
        await mirror.idle()
        assert list(kernel.registry.files) == [2]


# While the supervisor is asked for an id.


async def read_relayed(kernel: Passing) -> None:
    assert await kernel.read_file("0") == (content(SIZE, 0), False)


@pytest.mark.parametrize("opens", [1, 3])
async def test_a_replica_that_goes_while_its_id_is_asked_for(passing: Mounted, opens: int) -> None:
    async with passing("0") as kernel:
        mirror = kernel.mirror
        ino = await mirror.ino("0")
        kernel.answers = False
        async with trio.open_nursery() as nursery:
            for _ in range(opens):
                nursery.start_soon(read_relayed, kernel)
            await until(lambda: bool(kernel.registry.files), "the question")
            mirror.cache.accounts.corrupt(ino)
            kernel.answer_at_last()
        await mirror.idle()
        assert mirror.metrics.passthrough_opens == 0
        await given_back(kernel)


async def test_a_supervisor_that_is_late(passing: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough, "ANSWER_SECONDS", 0.01)
    async with passing("0") as kernel:
        kernel.answers = False
        one = await kernel.open("0")
        assert one.backing_id == 0
        kernel.answer_at_last()
        await kernel.release(one)
        await given_back(kernel)
        assert await kernel.read_file("0") == (content(SIZE, 0), True)


async def test_opens_that_wait_together_get_one_answer(passing: Mounted) -> None:
    async with passing("0") as kernel:
        async with trio.open_nursery() as nursery:
            killed = await nursery.start(killed_in_open, kernel)
            for _ in range(5):
                nursery.start_soon(kernel.read_file, "0")
            await trio.lowlevel.checkpoint()
            killed.cancel()
        assert kernel.registry.made == 1
        assert kernel.passthrough.ids == 1


async def test_nobody_waits_for_the_answer_any_more(passing: Mounted) -> None:
    async with passing("0") as kernel:
        async with trio.open_nursery() as nursery:
            kernel.answers = False
            killed = await nursery.start(killed_in_open, kernel)
            await until(lambda: bool(kernel.registry.files), "the question")
            killed.cancel()
        kernel.answer_at_last()
        await given_back(kernel)


async def killed_in_open(
    kernel: Passing, task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await kernel.release(await kernel.open("0"))


async def test_refusals_end_the_asking(passing: Mounted, caplog: pytest.LogCaptureFixture) -> None:
    async with passing("0") as kernel:
        kernel.registry.refuses = errno.ELOOP
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                await read_relayed(kernel)
        assert kernel.mirror.metrics.backing_refused == passthrough.MOST_REFUSALS
        assert kernel.passthrough.data_path == "relay"
        (line,) = [r.getMessage() for r in caplog.records if "kernel" in r.getMessage()]
        assert "symbolic links" in line, "with the reason"


async def test_more_files_than_ids(passing: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    async with passing(ALL, most=3) as kernel:
        held = [await kernel.open(name) for name in "012"]
        assert all(one.backing_id for one in held)
        assert await kernel.read_file("3") == (content(SIZE, 3), False), "none is left"
        await kernel.release(held.pop(0))
        assert await kernel.read_file("3") == (content(SIZE, 3), True), "the idle one went"
        for one in held:
            await kernel.release(one)
        assert kernel.passthrough.ids == len(kernel.registry.files) == 3
        kernel.mirror.nursery.start_soon(kernel.passthrough.run)
        await until(lambda: kernel.passthrough._crowded, "them to be counted")
        ino = await kernel.mirror.ino("7")
        assert kernel.passthrough.known(ino) == 0, "a small file is not worth the wait"
        monkeypatch.setattr(passthrough, "SMALL_BYTES", 1)
        assert kernel.passthrough.known(ino) is None
        assert await kernel.read_file("7") == (content(SIZE, 7), True)


async def test_another_worker_goes_on(passing: Mounted) -> None:
    async with passing("012") as kernel:
        early = await kernel.open("0")
        await kernel.read_file("1")
        relayed = await kernel.open("3")
        for _ in range(3):
            kernel.kill_worker()
            kernel.begin_worker()
            assert len(kernel.registry.files) == 1
            late = await kernel.open("0")
            assert late.backing_id == early.backing_id
            assert (await kernel.open("3")).backing_id == 0
            assert not kernel.mirror.cache.evict(early.ino), "the kernel reads it"
            assert kernel.passthrough.ids == 1
        for one in list(kernel.opens):
            await kernel.release(one)
        assert relayed not in kernel.opens
        assert len(kernel.slots) == 0
        assert await kernel.read_file("0") == (content(SIZE, 0), True)
        assert kernel.passthrough.ids == len(kernel.registry.files) == 1


@pytest.mark.parametrize("seed", range(12))
async def test_no_interleaving_breaks_the_kernels_rules(
    passing: Mounted, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    room = 5 * 64 * KIB
    monkeypatch.setattr(passthrough, "SMALL_BYTES", SIZE if seed % 3 else 0)
    async with passing(
        tiers=[room, room],
        most=(64, 5)[seed % 2],
        seed=seed,
        mode=FreshnessMode.OPEN,
        eviction=EvictionPolicy.SIEVE,
        copy_workers=3,
    ) as kernel:
        mirror = kernel.mirror
        world = World(kernel, seed)
        kernel.threads.misses = 0.3
        mirror.nursery.start_soon(kernel.passthrough.run)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(world.process)
            nursery.start_soon(world.trouble)
        assert kernel.opens == []
        assert len(kernel.slots) == 0
        await mirror.idle()
        # What is offered for passthrough is registered a moment before the worker hears of it.
        await until(lambda: kernel.passthrough.ids == len(kernel.registry.files), "all answers")
        assert len(kernel.registry.files) == len(kernel.supervisor)
        opened = mirror.metrics.passthrough_opens, kernel.threads.opened
        assert sum(opened) > 20, "else this test shows nothing"
        assert all(opened)
        assert kernel.threads.missed_opens > 0
        for name in ALL:
            mirror.cache.evict(await mirror.ino(name))
        await mirror.idle()
        assert not any("deleted" in str(path) for path in kernel.open_replicas())


class World:
    """Processes that open, read and close, and what happens meanwhile."""

    def __init__(self, kernel: Passing, seed: int) -> None:
        self.mirror = kernel.mirror
        self.kernel = kernel
        self.random = random.Random(seed)
        self.contents = {name: [content(SIZE, int(name))] for name in ALL}
        self.passed: dict[int, bytes] = {}

    async def process(self) -> None:
        for _ in range(60):
            name = self.random.choice(ALL[: self.random.choice((2, 8))])
            try:
                one = await self.kernel.open(name)
            except Exception as exc:
                if getattr(exc, "errno", None) == errno.ESTALE:
                    continue  # it was replaced twice meanwhile
                raise
            for _ in range(self.random.randrange(3)):
                try:
                    data = await self.kernel.read(one)
                except Exception as exc:
                    if getattr(exc, "errno", None) != errno.ESTALE or one.backing_id:
                        raise
                    break  # its copy was lost, and it was replaced in the source
                assert data in self.contents[name]
                if one.backing_id:
                    assert self.passed.setdefault(one.ino, data) == data, "one inode, one version"
                await self.pause()
            await self.kernel.release(one)

    async def pause(self) -> None:
        if self.random.random() < 0.3:
            await trio.sleep(self.random.random() * 0.004)
        else:
            await trio.lowlevel.checkpoint()

    async def trouble(self) -> None:
        mirror = self.mirror
        for step in range(60):
            await trio.sleep(0.005)
            name = self.random.choice(ALL)
            ino = await mirror.ino(name)
            match self.random.randrange(6):
                case 0:
                    mirror.cache.evict(ino)
                case 1:
                    mirror.cache.accounts.corrupt(ino)
                case 2:
                    mirror.cache.accounts.drop(ino, "its replica was lost")
                case 3:
                    data = content(SIZE + step, step + 50)
                    self.contents[name].append(data)
                    mirror.area.write(name + ".new", data)
                    (mirror.area.source / (name + ".new")).rename(mirror.area.source / name)
                case 4:
                    self.kernel.registry.refuses_next = errno.ENOMEM
                case 5:
                    await mirror.cache.maintain()
