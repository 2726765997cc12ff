"""The window's task, with a clock of our own, and memory that is only a set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.engine.misses import WindowState
from monarchfs.prefetch.order import DESERTED_SECONDS
from monarchfs.prefetch.window import FIRST_DISTANCE, IDLE_SECONDS, LOOK_SECONDS, Window
from monarchfs.types import Node, SourceStat

SIZE = 1 << 20
FILES = 60
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
        self.held: set[int] = set()
        self.asked: list[int] = []
        self.hits: list[int] = []

    def unopened(self, nodes: Iterable[Node]) -> list[Any]:
        return []

    def window(self, nodes: Sequence[Node], threads: int, most_bytes: int) -> list[int]:
        self.held.update(node.ino for node in nodes)
        self.asked += [node.ino for node in nodes]
        return []

    def window_drop(self, inos: Sequence[int]) -> None:
        self.held.difference_update(inos)

    def window_limit(self, size: int) -> None:
        pass

    def window_state(self) -> WindowState:
        read, hits = len(self.asked), len(self.hits)
        return WindowState(len(self.held) * SIZE, read, read * SIZE, read * 1_000_000, hits=hits)


class Following:
    """A window that follows orders of the files 1 to ``FILES`` or others. Changing: the clock."""

    def __init__(self, clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
        self.clock = clock
        self.memory = Memory()
        self.look_up = trio.Event()
        """Names are looked up when it is set."""
        self.look_up.set()
        self.window = Window(
            cast(Any, SimpleNamespace(nodes=self._nodes)),
            cast(Any, SimpleNamespace()),
            cast(Any, self._cache()),
            cast(Any, SimpleNamespace(observers=[], keeps=False, files={})),
            lambda _ino: False,
            evicts=False,
        )
        self.window.bind(cast(Any, self.memory), WINDOW_BYTES, 8)
        nursery.start_soon(self.window.run)

    def _cache(self) -> SimpleNamespace:
        index = SimpleNamespace(
            replicas_of=lambda _inos: {},
            nodes_of=lambda inos: {ino: node(ino) for ino in inos},
            dirref=lambda _ino: SimpleNamespace(path=b""),
        )
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


def test_a_deserted_order_does_not_share_the_distance() -> None:
    async def test(following: Following) -> None:
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

    follow(test)


def test_an_order_without_opens_is_held_after_its_announcer() -> None:
    """The command ``monarchfs order`` exits before the job begins."""

    async def test(following: Following) -> None:
        following.announce("one", range(1, FILES + 1), lambda: True)
        await following.wait()
        before = set(following.memory.held)
        await following.wait(IDLE_SECONDS / 2)
        assert following.memory.held == before != set()
        await following.wait(IDLE_SECONDS / 2)
        assert not following.window.orders

    follow(test)


def test_what_nobody_reads_on_is_fetched_once_more_at_most() -> None:
    """Single opens that agree have little fetched again, however many they are."""

    async def test(following: Following) -> None:
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

    follow(test)


def test_what_is_opened_while_its_name_is_looked_up_is_not_fetched() -> None:
    async def test(following: Following) -> None:
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

    follow(test)
