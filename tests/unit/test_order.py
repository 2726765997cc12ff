"""An announced order: who reads in it is followed, who does not costs little."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.prefetch.fetch_threads import FetchThreads
from monarchfs.prefetch.order import LAG, Order
from monarchfs.types import Node, SourceStat

SIZE = 100_000
DISTANCE = 40 * SIZE
NO_TIME = 10**18


def node(number: int) -> Node:
    """The file of that number; inode numbers are larger by 1000."""
    stat = SourceStat(0, number, SIZE, NO_TIME, NO_TIME, NO_TIME, 0o100644, 1, 0, 0, 0, 0, 4096)
    return Node(1000 + number, stat, 1, b"%d" % number, 0, False, b"")


def order_of(numbers: list[int]) -> Order:
    return Order(b"\0".join(b"%d" % number for number in numbers))


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
        while names := self.order.take(32):
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
            self.order.opened(ino, SIZE, self.now)
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
        [n for start in range(at * batch, len(numbers), readers * batch) for n in
         numbers[start : start + batch]]
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
def test_readers_that_take_turns_are_followed(
    readers: int, batch: int, share: float, seed: int
) -> None:
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


def test_readers_that_begin_in_the_middle_are_found() -> None:
    numbers = list(range(6 * LAG))
    reading = Reading(order_of(numbers), set())
    reading.look()
    for number in numbers[5 * LAG : 5 * LAG + 400]:
        reading.open(number)
    assert not reading.given_up
    assert len(reading.fetched & {1000 + n for n in range(5 * LAG, 5 * LAG + 400)}) > 300


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


def test_names_are_taken_as_they_came() -> None:
    order = Order(b"a/b\0\0c\0/17\0a/b\0")
    assert order.take(10) == [b"a/b", b"c", b"/17", b"a/b"]
    assert order.take(10) == []
    order.found([node(1), None, node(2), node(1)])
    assert [found.ino for found in order.next_files(10, SIZE * 10)] == [1001, 1002]


def test_threads_grow_until_the_source_takes_longer() -> None:
    threads = FetchThreads(64)
    for _ in range(5):
        threads.adapt(0.01, late=True)
    assert threads.count == 64
    for _ in range(20):
        threads.adapt(0.05, late=True)
    assert threads.count < 16
    before = threads.count
    threads.adapt(0.01, late=False)
    assert threads.count == before


def test_what_was_opened_is_not_wanted_any_more() -> None:
    order = order_of([1, 2])
    order.found([node(int(name)) for name in order.take(10)])
    first, second = order.next_files(10, DISTANCE)
    assert order.wants(first.ino)
    order.fetch(first)
    order.fetch(second)
    assert not order.wants(first.ino)
    assert order.takes_back(first.ino)  # it could not be fetched
    order.opened(first.ino, SIZE, 0.0)
    assert not order.wants(first.ino)
    assert not order.takes_back(first.ino)
    order.opened(second.ino, SIZE, 0.0)
    assert order.ended
    assert order.fetched_bytes == 0


def test_what_comes_next_is_awaited_until_it_was_opened_or_nobody_reads_on() -> None:
    names = LAG + 100
    order = order_of(list(range(1, names + 1)))
    far = []
    while taken := order.take(32):
        far.append(order.sees_far)
        order.found([node(int(name)) for name in taken])
    assert (far[0], order.sees_far) == (False, True)
    order.opened(1001, SIZE, 0.0)
    # The last one was not taken yet.
    expected = {1001: False, 1002: True, 1000 + LAG: True, 1000 + names: False}
    assert {ino: order.awaits(ino) for ino in expected} == expected
    order.suspend()
    assert not any(map(order.awaits, expected))
    order.opened(1002, SIZE, 0.0)
    assert order.awaits(1003)


def test_an_order_that_has_begun_is_found_by_its_first_open() -> None:
    order = Order(b"\0".join(b"%d" % number for number in range(1, 3000)), begun=True)
    order.found([node(int(name)) for name in order.take(32)])
    assert not list(order.next_files(10, DISTANCE))  # nothing is known of its readers
    assert order.strayed(3000)
    assert order.seek(b"2000", 3000)
    order.found([node(int(name)) for name in order.take(32)])
    assert order.expects(3001)
    order.opened(3001, SIZE, 0.0)
    assert next(order.next_files(10, DISTANCE)).ino == 3002


def test_files_that_were_announced_by_their_inode_numbers_are_found() -> None:
    order = Order(b"\0".join(b"/%d" % number for number in range(1001, 1500)), begun=True)
    assert order.seek(b"no/such/path", 1300)
    assert order.take(1) == [b"/1301"]
