"""The window's task, with a clock of our own, and memory that is only a set."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.cache.replicas import Reservation
from monarchfs.core.misses import Served, WindowState
from monarchfs.prefetch import window
from monarchfs.prefetch.arrivals import Arrivals
from monarchfs.prefetch.governor import Governor
from monarchfs.prefetch.order import DESERTED_SECONDS
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.window import IDLE_SECONDS, LOOK_SECONDS, Window
from monarchfs.prefetch.window_size import FIRST_DISTANCE, WindowSize
from monarchfs.types import Node, OperationError, SourceStat

SIZE = 1 << 20
FILES = 90
WINDOW_BYTES = 64 * SIZE
NO_TIME = 10**18


def node(ino: int) -> Node:
    stat = SourceStat(0, ino, SIZE, NO_TIME, NO_TIME, NO_TIME, 0o100644, 1, 0, 0, 0, 0, 4096)
    return Node(ino, stat, 1, b"%d" % ino, 0, False, b"")


class Memory:
    """What ``Misses`` does for the window: files that were asked for are ``held`` at once, until
    they are opened or dropped. ``asked`` has all of them, as often as they were."""

    source_seconds = 0.001

    def __init__(self) -> None:
        self.took_ns = 0
        self.each_ns = 1_000_000
        self.held: set[int] = set()
        self.asked: list[int] = []
        self.hits: list[int] = []

    def unopened(self, nodes: Iterable[Node]) -> list[Any]:
        return []

    def window(self, nodes: Sequence[Node], threads: int, most_bytes: int) -> list[int]:
        self.held.update(node.ino for node in nodes)
        self.asked += [node.ino for node in nodes]
        self.took_ns += len(nodes) * self.each_ns
        return []

    def window_drop(self, inos: Sequence[int]) -> None:
        self.held.difference_update(inos)

    def window_limit(self, size: int) -> None:
        pass

    def window_state(self) -> WindowState:
        read, hits = len(self.asked), len(self.hits)
        return WindowState(len(self.held) * SIZE, read, read * SIZE, self.took_ns, hits=hits)


class ToldGovernor(Governor):
    """``told`` has what it was told. Its share is what a test says, if that says something."""

    def __init__(self) -> None:
        super().__init__(4, 1.0, lambda: (0, 0))
        self.fixed: float | None = None
        self.told: list[tuple[float, int, int]] = []

    def record(
        self, now: float, target: int | None, seconds: float, size: int, count: int = 1
    ) -> None:
        self.told.append((seconds, size, count))
        super().record(now, target, seconds, size, count)

    @property
    def share(self) -> float:
        return super().share if self.fixed is None else self.fixed


class Following:
    """A window that follows orders of the files 1 to ``FILES`` or others. Changing: the clock."""

    def __init__(self, clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
        self.clock = clock
        self.memory = Memory()
        self.governor = ToldGovernor()
        self.look_up = trio.Event()
        """Names are looked up when it is set."""
        self.look_up.set()
        self.window = Window(
            cast(Any, SimpleNamespace(nodes=self._nodes)),
            cast(Any, SimpleNamespace()),
            cast(Any, self._cache()),
            cast(Any, SimpleNamespace(observers=[], keeps=False, files={})),
            cast(Any, self.memory),
            WindowSize(cast(Any, self.memory), WINDOW_BYTES, 8, self.governor),
            lambda _ino: False,
            evicts=False,
        )
        nursery.start_soon(self.window.run)

    def _cache(self) -> SimpleNamespace:
        tree = SimpleNamespace(
            nodes_of=lambda inos: {ino: node(ino) for ino in inos},
            dirref=lambda _ino: SimpleNamespace(path=b""),
        )
        replicas = SimpleNamespace(replicas_of=lambda _inos: {})
        index = SimpleNamespace(tree=tree, replicas=replicas)
        return SimpleNamespace(
            index=index, usage=SimpleNamespace(room_for=lambda _size: (None, []))
        )

    async def _nodes(self, names: Sequence[bytes]) -> list[Node | None]:
        await self.look_up.wait()
        return [node(int(name)) for name in names]

    def announce(self, stream: str, inos: Iterable[int], exited: Callable[[], bool]) -> None:
        self.window.announce(stream, b"\0".join(b"%d" % ino for ino in inos), exited)

    def open(self, ino: int) -> None:
        if ino in self.memory.held:
            self.memory.hits.append(ino)
        self.memory.held.discard(ino)
        self.window.opened(node(ino), False)

    async def wait(self, seconds: float = 2 * LOOK_SECONDS) -> None:
        """Until the window has done what there is to do, ``seconds`` from now."""
        await trio.testing.wait_all_tasks_blocked()
        self.clock.jump(seconds)
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            self.clock.jump(LOOK_SECONDS)
        await trio.testing.wait_all_tasks_blocked()


def follow(test: Callable[[Following], Awaitable[None]]) -> None:
    clock = trio.testing.MockClock()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await test(Following(clock, nursery))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)


def in_a_window(test: Callable[[Following], Awaitable[None]]) -> Callable[[], None]:
    """A test that takes a window."""

    def run() -> None:
        follow(test)

    return run


events = st.lists(
    st.one_of(
        st.just("open"),
        st.just("exit"),
        st.sampled_from([0.2, DESERTED_SECONDS / 2, DESERTED_SECONDS + 1, 60.0]),
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(events)
def test_a_deserted_order_holds_nothing_until_an_open_agrees_again(
    history: list[str | float],
) -> None:
    follow(partial(_deserted, history))


async def _deserted(history: list[str | float], following: Following) -> None:
    memory, exited, agreed_at, opened = following.memory, False, float("inf"), 0
    following.announce("one", range(1, FILES + 1), lambda: exited)
    await following.wait()
    assert memory.held
    for event in history:
        before = set(memory.held)
        if event == "open":
            opened += 1
            following.open(opened)
            agreed_at = trio.current_time()
            await following.wait()
            assert memory.held >= before - {opened}
            assert opened + 1 in memory.held
        elif event == "exit":
            exited = True
        else:
            await following.wait(float(event))
            idle = trio.current_time() - agreed_at
            if exited and idle > DESERTED_SECONDS + LOOK_SECONDS:
                assert not memory.held
            elif not exited or idle < DESERTED_SECONDS:
                assert memory.held == before
    # The names are known still, and those that were given up come first.
    rest = range(opened + 1, FILES + 1)
    for ino in rest:
        following.open(ino)
        await following.wait()
    assert set(memory.hits) >= set(rest[1:])
    assert not following.window.orders
    assert not memory.held


@in_a_window
async def test_a_deserted_order_does_not_share_the_distance(following: Following) -> None:
    memory, exited = following.memory, False
    one, two = range(1, FILES + 1), range(101, 101 + FILES)
    following.announce("one", one, lambda: exited)
    following.announce("two", two, lambda: False)
    await following.wait()
    for place in range(20):
        following.open(one[place])
        following.open(two[place])
        await following.wait()
    each = FIRST_DISTANCE // SIZE // 2
    assert len(memory.held.intersection(one)) == each
    assert len(memory.held.intersection(two)) == each
    exited = True
    # Two goes on, one does not.
    for place in range(20, 40):
        following.open(two[place])
        await following.wait(1.0)
    assert not memory.held.intersection(one)
    assert len(memory.held.intersection(two)) == 2 * each


@in_a_window
async def test_an_order_without_opens_is_held_after_its_announcer(following: Following) -> None:
    """The command ``monarchfs order`` exits before the job begins."""
    following.announce("one", range(1, FILES + 1), lambda: True)
    await following.wait()
    before = set(following.memory.held)
    await following.wait(IDLE_SECONDS / 2)
    assert following.memory.held == before != set()
    await following.wait(IDLE_SECONDS / 2)
    assert not following.window.orders


@in_a_window
async def test_what_nobody_reads_on_is_fetched_once_more_at_most(following: Following) -> None:
    """Single opens that agree have little fetched again, however many they are."""
    following.announce("one", range(1, FILES + 1), lambda: True)
    for ino in range(1, 21):
        following.open(ino)
        await following.wait()
    assert len(following.memory.held) * SIZE >= FIRST_DISTANCE
    for ino in range(21, 31):
        await following.wait(DESERTED_SECONDS + 1)
        assert not following.memory.held
        before = len(following.memory.asked)
        following.open(ino)
        await following.wait()
        assert len(following.memory.asked) == before + 1


@in_a_window
async def test_what_is_opened_during_its_look_up_is_not_fetched(
    following: Following,
) -> None:
    following.look_up = trio.Event()
    following.announce("one", range(1, 4), lambda: False)
    await following.wait()
    following.open(1)
    following.look_up.set()
    await following.wait()
    assert following.memory.asked == [2, 3]
    following.open(2)
    following.open(3)
    await following.wait()
    assert not following.window.orders


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.01, 0.25, 0.3, 0.5, 1.0]), min_size=1, max_size=5))
def test_the_distance_is_what_the_governor_allows_and_never_below_the_first(
    shares: list[float],
) -> None:
    async def test(following: Following) -> None:
        memory, most = following.memory, WINDOW_BYTES // SIZE
        following.window.size.distance = WINDOW_BYTES  # as after readers had to wait
        following.announce("one", range(1, 10 * FILES), lambda: False)
        following.announce("two", range(20 * FILES, 30 * FILES), lambda: False)
        following.governor.fixed = 1.0
        await following.wait()
        for place in range(most):
            following.open(1 + place)
            await following.wait()
        opened = 1 + most
        for share in shares:
            following.governor.fixed = share
            for _ in range(most):  # what is ahead is read first
                following.open(opened)
                opened += 1
                await following.wait()
            of_one = [ino for ino in memory.held if ino < 20 * FILES]
            allowed = max(FIRST_DISTANCE, share * WINDOW_BYTES)
            assert len(of_one) == math.ceil(allowed / 2 / SIZE)

    follow(test)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=12))
def test_each_read_is_told_to_the_governor_once(steps: list[int]) -> None:
    async def test(following: Following) -> None:
        memory, told = following.memory, following.governor.told
        following.announce("one", range(1, FILES + 1), lambda: False)
        await following.wait()
        opened = 0
        for step in steps:
            memory.each_ns = step * 1_000_000
            for _ in range(step):
                opened += 1
                following.open(opened)
            await following.wait()
        assert sum(count for _, _, count in told) == len(memory.asked)
        assert sum(size * count for _, size, count in told) == len(memory.asked) * SIZE
        assert round(sum(seconds * count for seconds, _, count in told) * 1e9) == memory.took_ns

    follow(test)


@in_a_window
async def test_a_slow_source_brings_the_readers_nearer(following: Following) -> None:
    """With the governor itself: the window's reads alone make it hold back, and let go."""
    memory, governor = following.memory, Governor(4, 0.25, lambda: (0, 0))
    following.window.size._governor = governor
    following.window.size.distance = WINDOW_BYTES
    following.announce("one", range(1, 1000), lambda: False)
    await following.wait()
    most = WINDOW_BYTES // SIZE
    opened = 0

    async def read(seconds: float) -> None:
        nonlocal opened
        opened += 1
        following.open(opened)
        await following.wait(seconds)

    for _ in range(100):
        await read(0.2)
    assert governor.share == 1.0
    assert len(memory.held) == most
    memory.each_ns *= 4
    for _ in range(100):
        await read(1.0)
    assert governor.share == 0.25
    assert len(memory.held) == most // 4
    memory.each_ns //= 4
    for _ in range(200):
        await read(0.2)
    assert governor.share == 1.0
    assert len(memory.held) == most


def test_the_copier_tells_of_no_read_of_the_window() -> None:
    """Nor of bytes that were in memory already."""
    cache = SimpleNamespace(index=SimpleNamespace(tree=SimpleNamespace(nodes_of=lambda _inos: {})))
    jobs = SimpleNamespace(retries=SimpleNamespace(forget_failures=lambda _ino: None))
    data = memoryview(bytes(SIZE))
    served = [
        Served(1, 0, False, data, 0, took_ns=5),
        Served(2, 0, False, data, 0, took_ns=7, from_window=True),
        Served(3, 0, False, data, 0, took_ns=0),
    ]
    parts = [
        SimpleNamespace(served=lambda: served),
        None,
        cache,
        jobs,
        None,
        SimpleNamespace(start_soon=lambda _function: None),
        None,
        None,
    ]
    arrivals = Arrivals(*cast(Any, parts))

    async def main() -> None:
        places = [SimpleNamespace(node=node(ino), size=SIZE) for ino in (1, 2, 3)]
        batch = arrivals.want(cast(list[Reservation], places), Priority.HINTED)
        arrivals.take_events()
        assert (batch.unread, batch.took_ns, batch.sizes) == (0, 5, [SIZE])

    trio.run(main)


@in_a_window
async def test_orders_of_processes_that_exited_go_first(following: Following) -> None:
    inos = list(range(1, FILES + 1))
    most = 3 * len(b"\0".join(b"%d" % ino for ino in inos)) + 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "MOST_NAME_BYTES", most)
        for stream in ("first", "second", "third"):
            following.announce(stream, inos, partial(stream.__ne__, "second"))
        following.announce("fourth", inos, lambda: False)
        assert list(following.window.orders) == ["second", "third", "fourth"]
        following.announce("fifth", inos, lambda: False)
        with pytest.raises(OperationError, match="too much memory"):
            following.announce("sixth", inos, lambda: False)
        assert list(following.window.orders) == ["second", "fourth", "fifth"]
