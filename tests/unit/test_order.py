"""Orders of files, announced or learned: who reads in one is followed, others cost little."""

import os
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monarchfs.control.messages import weight_requests
from monarchfs.core.misses import WindowState
from monarchfs.prefetch import order as order_module
from monarchfs.prefetch import window
from monarchfs.prefetch.governor import Governor
from monarchfs.prefetch.learned_order import MOST_AHEAD, NEAR, SURE, LearnedOrder
from monarchfs.prefetch.order import LAG, Order, Orders
from monarchfs.prefetch.window import IDLE_SECONDS, LOOK_SECONDS, Window
from monarchfs.prefetch.window_size import WindowSize
from monarchfs.system.listeners import Listeners
from monarchfs.system.process_stat import start_ticks
from monarchfs.types import EvictionPolicy, Node, OperationError, SourceStat
from monarchfs.worker import kept_hints as module
from monarchfs.worker.announcing import Announcing
from monarchfs.worker.kept_hints import DIRECTORY, KeptHints, KeptOrder
from tests.layers.whole import NoReaders

SIZE = 100_000
DISTANCE = 40 * SIZE
NO_TIME = 10**18


def node(number: int, more: int = 1000, size: int = SIZE) -> Node:
    """The file of that number; inode numbers are larger."""
    stat = SourceStat(0, number, size, NO_TIME, NO_TIME, NO_TIME, 0o100644, 1, 0, 0, 0, 0, 4096)
    return Node(number + more, stat, 1, b"%d" % number, 0, False, b"")


def joined(numbers: Iterable[int]) -> bytes:
    return b"\0".join(b"%d" % number for number in numbers)


def order_of(numbers: Iterable[int]) -> Order:
    return Order(joined(numbers))


class Reading:
    """``order`` as the window uses it. ``local`` files are on this node: none of their opens is
    seen. ``fetched`` are those that were asked for, ``late`` those that were not when they were
    opened, ``wasted`` those that were given up."""

    def __init__(self, order: Order, local: set[int]) -> None:
        self.order = order
        self.local = local
        self.fetched: set[int] = set()
        self.late = 0
        self.wasted: list[int] = []
        self.given_up = False
        self.now = 0.0

    def look(self) -> None:
        while names := self.order.take_names(32):
            self.order.found([node(int(name)) for name in names])
        while files := list(self.order.next_files(32, DISTANCE)):
            remote = [file for file in files if file.ino - 1000 not in self.local]
            self.order.looked_at(len(files), len(remote))
            for file in remote:
                self.order.fetch(file)
                self.fetched.add(file.ino)
        self.wasted += self.order.passed(DISTANCE)
        assert self.order.fetched_bytes == len(self.order.fetched) * SIZE
        assert self.order.fetched_bytes <= DISTANCE + 32 * SIZE

    def open(self, number: int) -> None:
        if number in self.local or self.given_up:
            return
        ino = 1000 + number
        self.late += ino not in self.fetched
        if self.order.expects(ino):
            self.order.note_open(ino, SIZE, self.now)
        elif self.order.strayed(ino):
            self.wasted += self.order.fetched
            self.given_up = not self.order.seek(b"%d" % number, 1000 + number)
        if not self.given_up:
            self.look()


def in_turns(numbers: list[int], readers: int, batch: int, rng: random.Random) -> Iterator[int]:
    """As processes of a loader read that take batches in turn, each as fast as it is. None is more
    than two batches ahead of the slowest: what PyTorch's DataLoader asks for (``prefetch_factor``).
    """
    queues = [
        [n for start in range(at * batch, len(numbers), readers * batch)
         for n in numbers[start : start + batch]]
        for at in range(readers)
    ]  # fmt: skip
    while longest := max(map(len, queues)):
        queue = rng.choice([q for q in queues if q and longest - len(q) <= 2 * batch])
        yield queue.pop(0)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.integers(0, 1000),
)
def test_taking_turns_is_followed(readers: int, batch: int, share: float, seed: int) -> None:
    rng = random.Random(seed)
    numbers = list(range(600))
    rng.shuffle(numbers)
    local = {number for number in numbers if rng.random() < share}
    reading = Reading(order_of(numbers), local)
    reading.look()
    for number in in_turns(numbers, readers, batch, rng):
        reading.open(number)
    assert not reading.given_up
    assert not reading.order.ended or not reading.order.fetched
    remote = len(numbers) - len(local)
    assert reading.late <= readers * batch + remote // 4
    assert len(reading.fetched) <= remote


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.5]))
def test_a_wrong_order_is_given_up_at_little_cost(seed: int, share: float) -> None:
    rng = random.Random(seed)
    numbers = list(range(3000))
    local = {number for number in numbers if rng.random() < share}
    rng.shuffle(numbers)
    reading = Reading(order_of(numbers), local)
    rng.shuffle(numbers)
    reading.look()
    for number in numbers[:1000]:
        reading.open(number)
    assert reading.given_up
    # Of what the source gives without an order: each file that is not local is read once.
    assert len(reading.fetched) <= 0.02 * (len(numbers) - len(local))


def test_files_that_others_read_do_not_end_an_order() -> None:
    """Half of the opens are of files that are not in the list."""
    numbers = list(range(2000))
    reading = Reading(order_of(numbers), set())
    reading.look()
    for number in numbers:
        reading.open(number)
        reading.open(100_000 + number)
    assert not reading.given_up
    assert reading.order.ended
    order, searches = order_of(range(100)), 0
    for number in range(1000, 41000):
        if order.strayed(1000 + number):
            searches += 1
            assert order.seek(b"%d" % number, 1000 + number)
    assert 5 < searches < 15


def test_what_nobody_opens_is_given_up_when_readers_are_far() -> None:
    numbers = list(range(3 * LAG))
    reading = Reading(order_of(numbers), set())
    reading.look()
    for number in numbers:
        if number % 3:
            reading.open(number)
    reading.order.passed(DISTANCE)
    assert all((ino - 1000) % 3 == 0 for ino in reading.wasted)
    assert len(reading.wasted) > LAG // 4
    assert reading.order.fetched_bytes <= DISTANCE + 32 * SIZE
    names = LAG + 100
    order = order_of(list(range(1, names + 1)))
    far = []
    while taken := order.take_names(32):
        far.append(order.sees_far)
        order.found([node(int(name)) for name in taken])
    assert (far[0], order.sees_far) == (False, True)
    order.note_open(1001, SIZE, 0.0)
    # The last one was not taken yet.
    expected = {1001: False, 1002: True, 1000 + LAG: True, 1000 + names: False}
    assert {ino: order.awaits(ino) for ino in expected} == expected
    order.suspend()
    assert not any(map(order.awaits, expected))
    order.note_open(1002, SIZE, 0.0)
    assert order.awaits(1003)


def shuffled(files: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(1000, 1000 + files), files)


def side_by_side(order: list[int], readers: int, seed: int) -> list[int]:
    """By readers that take turns, but not strictly."""
    rest, chance = list(order), random.Random(seed)
    return [rest.pop(chance.randrange(min(readers, len(rest)))) for _ in order]


class Learning:
    def __init__(self) -> None:
        self.order = LearnedOrder()
        self.given: dict[int, int] = {}  # and how many before it
        self.taken = self.reached = 0

    def followed(self) -> bool:
        return self.order.followed

    def read(self, files: Iterable[int]) -> int:
        """How many had been given out before they were opened."""
        known = 0
        for ino in files:
            known += ino in self.given
            self.reached = max(self.reached, self.given.pop(ino, 0))
            self.order.note_open(ino)
            taken = self.order.take_inos(self.taken - self.reached)
            assert not taken or self.order.followed
            self.given.update(
                zip(taken, range(self.taken + 1, self.taken + 1 + len(taken)), strict=True)
            )
            self.taken += len(taken)
            assert self.taken - self.reached <= MOST_AHEAD
        return known


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    files=st.integers(600, 3000),
    readers=st.integers(1, 8),
    kept=st.sampled_from([0, 0.3, 0.6]),
)
def test_an_order_that_comes_again(seed: int, files: int, readers: int, kept: float) -> None:
    """Some of its files are local after the first epoch."""
    reading = Learning()
    order = shuffled(files, seed)
    assert reading.read(side_by_side(order, readers, seed)) == 0
    local = set(random.Random(seed).sample(order, int(kept * files)))
    order = [ino for ino in order if ino not in local]
    reading.read(side_by_side(order, readers, seed + 1))
    if len(order) >= 600:
        for epoch in (2, 3):
            known = reading.read(side_by_side(order, readers, seed + epoch))
            assert known >= 0.9 * len(order) - NEAR


def test_one_that_was_lost_has_to_agree_for_longer() -> None:
    reading = Learning()
    order = shuffled(5000, 1)
    reading.read([*order, *order[:1000]])
    assert reading.followed()
    reading.order.lost()
    assert not reading.followed()
    assert reading.order.times_learned == 1
    reading.given.clear()
    reading.taken = reading.reached = 0
    assert 1700 < reading.read(order[2000:4000]) <= 2000 - 2 * SURE
    assert reading.order.times_learned == 2


# What jobs have said, for the worker that comes next


WEIGHTS = st.dictionaries(st.integers(1, 20), st.floats(0, 1e9), max_size=5)


def files_of(state: Path) -> list[str]:
    return os.listdir(state / DIRECTORY) if (state / DIRECTORY).exists() else []


@given(st.lists(st.tuples(WEIGHTS, st.booleans(), st.booleans()), max_size=12))
@example([({5: 1.0}, False, False), ({6: 2.0}, False, True)])
def test_weights_are_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[dict[int, float], bool, bool]]
) -> None:
    """Also if the worker dies in between as it writes one, or later weights replaced many."""
    state = str(tmp_path_factory.mktemp("state"))
    said, expected, given = KeptHints(state, 1), dict[int, float](), False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_SUPERSEDED", 100)
        for weights, replace, restarts in history:
            if restarts:
                if given:
                    with (Path(state) / DIRECTORY / "weights").open("ab") as file:
                        file.write(b"half")
                said = KeptHints(state, 1)
                assert said.weights() == (expected if given else None)
            said.keep_weights(list(weights.items()), replace=replace)
            expected = {**({} if replace else expected), **weights}
            given = True
            assert (Path(state) / DIRECTORY / "weights").stat().st_size < 1000
    assert KeptHints(state, 1).weights() == (expected if given else None)


def test_orders_are_kept_until_they_are_over(tmp_path: Path) -> None:
    said = KeptHints(str(tmp_path), 1)
    one, two = KeptOrder("one/../", b"a\0b\n", 17, 4), KeptOrder("two", b"c", 0, None)
    said.keep_order(one)
    said.keep_order(two)
    assert KeptHints(str(tmp_path), 1).orders() == [one, two]
    said.keep_order(one._replace(names=b"d"))
    assert [order.names for order in said.orders()] == [b"c", b"d"]
    for _ in range(2):
        said.forget_order("one/../")
    assert said.orders() == [two]
    said.keep_weights([(1, 1.0)], replace=True)
    said.clear()
    assert (said.orders(), said.weights(), files_of(tmp_path)) == ([], None, [])
    said = KeptHints(str(tmp_path), 1)
    said.keep_order(KeptOrder("one", b"a", 1, 1))
    said.keep_weights([(1, 1.0)], replace=True)
    (kept,) = (path for path in (tmp_path / DIRECTORY).iterdir() if path.name != "weights")
    half = kept.with_name(kept.name + ".new")
    half.write_bytes(kept.read_bytes())
    (tmp_path / DIRECTORY / "order-x").write_bytes(b"no JSON")
    assert len(said.orders()) == 1
    assert sorted(files_of(tmp_path)) == sorted([kept.name, "weights"])
    later = KeptHints(str(tmp_path), 2)
    assert (later.orders(), later.weights(), files_of(tmp_path)) == ([], None, [])


def test_what_is_not_kept_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / DIRECTORY).write_text("no directory")
    said = KeptHints(str(tmp_path), 1)
    said.keep_order(KeptOrder("one", b"a", 1, 1))
    said.keep_weights([(1, 1.0)], replace=False)
    said.forget_order("one")
    said.clear()
    assert (said.orders(), said.weights()) == ([], None)
    assert "not kept" in caplog.text


def test_a_wrong_weight_is_found_before_any_is_sent() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        weight_requests([*[("a" * 99, 1.0)] * 999, ("b", -1.0)], replace=True)


def test_the_next_worker_knows_orders_and_whether_their_announcers_live(tmp_path: Path) -> None:
    said, lives = KeptHints(str(tmp_path), 1), start_ticks(os.getpid())
    orders = Mock(on_dropped=Listeners())
    assert lives is not None
    said.keep_order(KeptOrder("dead", b"a", 2**22 + 1, 5))
    said.keep_order(KeptOrder("other", b"b", os.getpid(), lives + 1))
    said.keep_order(KeptOrder("living", b"c\0d", os.getpid(), lives))
    said.keep_order(KeptOrder("unknown", b"e", 0, None))  # of another pid namespace
    said.keep_weights([(n, n / 2) for n in range(5000)], replace=True)
    accounts = Mock(eviction=EvictionPolicy.WEIGHTED)
    announcing = Announcing(orders, accounts, said)
    trio.run(announcing.resume_weights)
    weighed = [(*call.args, call.kwargs["replace"]) for call in accounts.weigh.call_args_list]
    assert [pair for part, _ in weighed for pair in part] == [(n, n / 2) for n in range(5000)]
    assert [replace for _, replace in weighed] == [True, False, False, False]
    trio.run(announcing.resume)
    assert all(call.kwargs == {"begun": True} for call in orders.announce.call_args_list)
    calls = [call.args for call in orders.announce.call_args_list]
    assert [(stream, names, Order(names, *who).exited) for stream, names, *who in calls] == [
        *(("dead", b"a", True), ("other", b"b", True)),
        *(("living", b"c\0d", False), ("unknown", b"e", False)),
    ]
    assert [order.stream for order in said.orders()] == [stream for stream, *_ in calls]


# The window's task, with a clock of our own, and memory that is only a set


EACH = 1 << 20
FILES = 90


def listed(ino: int) -> Node:
    return node(ino, 0, EACH)


class Memory:
    """What ``Misses`` does for the window: files that were asked for are ``held`` at once, until
    they are dropped."""

    source_seconds = 0.001

    def __init__(self) -> None:
        self.held: set[int] = set()

    def unopened(self, nodes: Iterable[Node]) -> list[Any]:
        return []

    def window(self, nodes: Sequence[Node], threads: int, most_bytes: int) -> list[int]:
        self.held.update(node.ino for node in nodes)
        return []

    def window_drop(self, inos: Sequence[int]) -> None:
        self.held.difference_update(inos)

    def window_limit(self, size: int) -> None:
        pass

    def window_state(self) -> WindowState:
        return WindowState(len(self.held) * EACH)


LIVING, EXITED = 1, 2
"""Processes that announce."""


class Following:
    """A window that follows orders of the files 1 to ``FILES``."""

    def __init__(self, clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
        self.clock = clock
        self.memory = Memory()
        nodes = SimpleNamespace(
            nodes_of=lambda inos: {ino: listed(ino) for ino in inos},
            dirref=lambda _ino: SimpleNamespace(path=b""),
        )
        index = SimpleNamespace(nodes=nodes, replicas=SimpleNamespace(replicas_of=lambda _inos: {}))
        room = SimpleNamespace(room_for=lambda _size: (None, []))
        self.window = Window(
            cast(Any, SimpleNamespace(nodes=self._nodes)),
            cast(Any, SimpleNamespace(reads_for_readers=(0, 0), open_directories=AsyncMock())),
            cast(Any, SimpleNamespace(index=index, usage=room, readers=NoReaders())),
            cast(Any, SimpleNamespace(on_step=Listeners(), keeps=False, files={})),
            cast(Any, self.memory),
            WindowSize(cast(Any, self.memory), 64 * EACH, 8, Governor(4, 0.25)),
            Orders(),
            evicts=False,
        )
        nursery.start_soon(self.window.run)

    async def _nodes(self, names: Sequence[bytes]) -> list[Node | None]:
        return [listed(int(name)) for name in names]

    def announce(self, stream: str, pid: int) -> None:
        self.window.announce(stream, joined(range(1, FILES + 1)), pid, 1)

    async def wait(self, seconds: float) -> None:
        """Until the window has done what there is to do, ``seconds`` from now."""
        await trio.testing.wait_all_tasks_blocked()
        self.clock.jump(seconds)
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            self.clock.jump(LOOK_SECONDS)
        await trio.testing.wait_all_tasks_blocked()


def in_a_window(test: Callable[[Following], Awaitable[None]]) -> Callable[[], None]:
    clock = trio.testing.MockClock()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            following = Following(clock, nursery)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(order_module, "start_ticks", {LIVING: 1}.get)
                await test(following)
            nursery.cancel_scope.cancel()

    return lambda: trio.run(main, clock=clock)


@in_a_window
async def test_an_order_without_opens_is_held_after_its_announcer(following: Following) -> None:
    """The command ``monarchfs order`` exits before the job begins."""
    following.announce("one", EXITED)
    await following.wait(2 * LOOK_SECONDS)
    before = set(following.memory.held)
    await following.wait(IDLE_SECONDS / 2)
    assert following.memory.held == before != set()
    await following.wait(IDLE_SECONDS / 2)
    assert not following.window.orders


@in_a_window
async def test_orders_of_processes_that_exited_go_first(following: Following) -> None:
    most = 3 * len(joined(range(1, FILES + 1))) + 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "MOST_NAME_BYTES", most)
        for stream in ("first", "second", "third"):
            following.announce(stream, LIVING if stream == "second" else EXITED)
        following.announce("fourth", LIVING)
        assert list(following.window.orders) == ["second", "third", "fourth"]
        following.announce("fifth", LIVING)
        with pytest.raises(OperationError, match="too much memory"):
            following.announce("sixth", LIVING)
        assert list(following.window.orders) == ["second", "fourth", "fifth"]
