"""Fetching files ahead of their readers, in the order in which somebody said they will be read,
or in which they were read before.

What a tier has room for goes there, only sooner. The rest goes into the window: memory, until it
was read. So the order saves no bytes of the source, but its latency. Nobody waits for anything
here.

At first 1 MiB is fetched ahead, then twice what was opened, up to the distance, which is doubled
whenever readers come to files that are not there yet. So a wrong order has little more than 1 MiB
read in vain. The next files are ``awaited``: none of them goes for another file, under any
policy. A worker's death loses the window; the next one fetches nothing before an open shows where
the readers are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import trio

from monarchfs.cache.cache import Cache
from monarchfs.core.misses import Misses
from monarchfs.metrics import Metrics
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.learned_order import LearnedOrder
from monarchfs.prefetch.named_files import NamedFiles, is_file
from monarchfs.prefetch.order import Order, Orders
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.window_size import WindowSize
from monarchfs.source.source import Source
from monarchfs.system.listeners import Listeners
from monarchfs.types import Node, OperationError, ReplicaState

log = logging.getLogger(__name__)

MOST_ORDERS = 64

LEARNED = "\0learned"
"""The name of the order that nobody announced."""

MOST_NAME_BYTES = 256 << 20
"""Of all orders together."""

BATCH = 32
"""Files looked up and fetched without a checkpoint."""

LOOK_SECONDS = 0.05
"""How often to look how far the readers are, if nothing else wakes this."""

LIMIT_SECONDS = 1.0
IDLE_SECONDS = 600.0
"""An order of which nothing was opened for so long is dropped: its job has ended."""

NEAR_SECONDS = 0.0003
"""A source that gives a file within this time is not slower than the window."""


class Window:
    """Constant: its parts. Changing: ``size``; ``orders``; the order of
    opens (``_learned``); ``_to_tier``, files that a tier may take, which are not stored yet or not
    opened; ``_refused``, those for which there was no room after all, and when the last one was
    found."""

    def __init__(
        self,
        files: NamedFiles,
        source: Source,
        cache: Cache,
        jobs: CopyJobs,
        misses: Misses,
        size: WindowSize,
        orders: Orders,
        *,
        evicts: bool,
    ) -> None:
        """``misses`` reads files into the window; ``orders``, of which others ask, too, are
        followed; ``evicts``: files may have to go for others."""
        self.size = size
        self.orders = orders
        self.on_dropped: Listeners[[str]] = Listeners()
        """Is told of each announced order that is over, and of each that is to be announced."""
        self._given_up = self._times_learned = 0
        self._learned = LearnedOrder()
        self._files = files
        self._source = source
        self._cache = cache
        self._jobs = jobs
        self._misses = misses
        self._evicts = evicts
        self._to_tier: set[int] = set()
        self._refused: set[int] = set()
        self._refused_at = -math.inf
        self._lost: dict[Order, Node] = {}
        self._opened: list[int] = []
        self._news = trio.lowlevel.ParkingLot()
        jobs.on_step.add(self._stepped)

    def announce(
        self, name: str, names: bytes, pid: int, pid_began: int | None, *, begun: bool = False
    ) -> None:
        """Files will be read in this order (see ``Order``). It takes the place of what was
        announced under the same ``name``, and of what was learned. If memory is short, orders of
        processes that have exited go for it. Raises OperationError. No checkpoint."""
        self._drop(name)
        if not names.strip(b"\0"):
            return
        self._drop(LEARNED)
        most = MOST_NAME_BYTES - len(names)
        while sum(map(len, self.orders.values())) > most:
            left = (name for name, order in self.orders.items() if order.exited)
            if (oldest := next(left, None)) is None:
                raise OperationError("the orders that this mount was told of take too much memory")
            self._drop(oldest)
        while len(self.orders) >= MOST_ORDERS:
            self._drop(next(iter(self.orders)))
        self._follow(name, Order(names, pid, pid_began, begun=begun))

    def _follow(self, name: str, order: Order) -> None:
        order.opened_at = trio.current_time()
        self.orders[name] = order
        self._news.unpark_all()

    def note_open(self, node: Node, local: bool) -> None:
        """A file was opened; ``local``: all of it was on this node. No checkpoint."""
        if self.orders:
            self._pass_on(node, local)
        if not local and self.orders.keys() <= {LEARNED}:
            self._learn(node.ino)

    def _pass_on(self, node: Node, local: bool) -> None:
        ino, orders = node.ino, self.orders.values()
        agree = list(orders) if local else [order for order in orders if order.expects(ino)]
        for order in agree:
            order.opened_at = trio.current_time()
            order.note_open(ino, node.stat.size, order.opened_at)
            self.size.agreed += not local
        self._to_tier.discard(ino)
        self._opened.append(ino)
        if agree:
            self._news.unpark_all()
        else:
            self._lost |= {order: node for order in orders if order.strayed(ino)}

    def _learn(self, ino: int) -> None:
        """A file was opened that is not on this node, and no order was announced."""
        learned, times = self._learned, self._learned.times_learned
        learned.note_open(ino)
        if learned.times_learned > times:
            log.info("files are read in the same order as before: it is followed")
            self._follow(LEARNED, Order(b""))
        order = self.orders.get(LEARNED)
        if order is not None and (inos := learned.take_inos(order.ahead)):
            known = self._cache.index.nodes.nodes_of(inos)
            nodes = [known.get(ino) for ino in inos]
            order.found([node if is_file(node) else None for node in nodes])

    def _stepped(self, inos: Sequence[int]) -> None:
        """The copier has done something for files."""
        ended = self._to_tier.intersection(inos) if self._to_tier else ()
        for ino in ended:
            if not self._jobs.pending(ino):
                record = self._cache.accounts.state(ino)
                if record is None or record.state is not ReplicaState.RESIDENT:
                    self._to_tier.discard(ino)
                    self._refused.add(ino)
                    self._refused_at = trio.current_time()

    def count(self, metrics: Metrics) -> None:
        """Bring the metrics up to date."""
        metrics.orders_given_up += self._given_up
        self._given_up = 0
        metrics.orders_learned += self._learned.times_learned - self._times_learned
        self._times_learned = self._learned.times_learned
        self.size.count(metrics)

    # -- the task

    async def run(self) -> None:
        """For ever."""
        limited, looked = -LIMIT_SECONDS, 0.0
        while True:
            if not self.orders:
                self.size.set_limit(0)
                await self._news.park()
                limited = -LIMIT_SECONDS
            now = trio.current_time()
            if now - limited >= LIMIT_SECONDS:
                limited = now
                if self.size.look_for_room():
                    for order in self.orders.values():
                        self._misses.window_drop(list(order.fetched))
            if now - looked >= LOOK_SECONDS:
                looked = now
                self._look(now)
                self.size.tell_governor(now, self._source.reads_for_readers)
                self.size.adapt()
            moved = False
            for order in list(self.orders.values()):
                moved |= await self._fetch_some(order)
            if not moved:
                with trio.move_on_after(LOOK_SECONDS):
                    await self._news.park()

    @property
    def _distance_of_each(self) -> int:
        return self.size.distance_of_each(
            sum(not order.suspended for order in self.orders.values())
        )

    def _look(self, now: float) -> None:
        """Find out how far the readers are."""
        orders = self.orders.values()
        self._forget_opened()
        for order, node in self._lost.items():
            self._search(order, node)
        self._lost.clear()
        for ino in list(filter(self._cache.readers.seen, self._to_tier)):
            if (opened := self._cache.index.nodes.node(ino)) is not None:
                self.note_open(opened, local=True)
            self._to_tier.discard(ino)
        self._refused = {
            ino for ino in self._refused if any(ino in order.fetched for order in orders)
        }
        for name, order in list(self.orders.items()):
            self._give_up(order.passed(self._distance_of_each))
            if order.deserted(now):
                self._give_up(order.suspend())
            ended = order.ended and name != LEARNED
            if ended or now - order.opened_at > IDLE_SECONDS:
                self._drop(name)

    def _search(self, order: Order, node: Node) -> None:
        name = next((name for name, known in self.orders.items() if known is order), None)
        directory = self._cache.index.nodes.dirref(node.parent)
        if name is None or directory is None:
            return
        path = directory.path + b"/" + node.name if directory.path else node.name
        fetched = list(order.fetched)
        if name == LEARNED or not order.seek(path, node.ino):
            what = "order of before" if name == LEARNED else "announced order"
            log.info("the %s is given up: files are read in another one", what)
            self._given_up += 1
            self._drop(name)
        elif not order.fetched:
            self._give_up(fetched)

    def _drop(self, name: str) -> None:
        order = self.orders.pop(name, None)
        if order is not None:
            self._give_up(list(order.fetched))
        if name == LEARNED:
            self._learned.lost()
        else:
            self.on_dropped(name)

    def _forget_opened(self) -> None:
        """Whoever opened them did not wait for the window: what it has of them came too late."""
        if self._opened:
            self._misses.window_drop(self._opened)
        self._opened.clear()

    def _give_up(self, inos: list[int]) -> None:
        self._to_tier.difference_update(inos)
        self._refused.difference_update(inos)
        if inos:
            self._misses.window_drop(inos)

    # -- fetching

    async def _fetch_some(self, order: Order) -> bool:
        """Have the next files fetched. Whether there may be more."""
        await trio.lowlevel.checkpoint()
        names = order.take_names(BATCH)
        if names:
            before = len(self._opened)
            order.found(found := await self._files.nodes(names))
            sizes = {node.ino: node.stat.size for node in found if node is not None}
            for ino in self._opened[before:]:
                # It was opened while its name was looked up.
                if ino in sizes and order.expects(ino):
                    order.note_open(ino, sizes[ino], trio.current_time())
        refused = [ino for ino in self._refused if order.takes_back(ino)]
        self._refused.difference_update(refused)
        nodes = list(order.next_files(BATCH, self._distance_of_each))
        if nodes:
            held = self._cache.index.replicas.replicas_of([node.ino for node in nodes])
            order.looked_at(len(nodes), len(nodes) - len(held))
            nodes = [node for node in nodes if node.ino not in held]
        nodes = self._without_room(order, nodes)
        nodes += self._cache.index.nodes.nodes_of(refused).values()
        await self._into_window(order, nodes)
        return bool(names or nodes)

    def _without_room(self, order: Order, nodes: Sequence[Node]) -> list[Node]:
        """Have those copied into a tier for which there may be room; the others."""
        if not nodes:
            return []
        need, rooms = self._cache.usage.room_for(max(node.stat.size for node in nodes))
        evicts = False
        if self._evicts:
            # Looking for what may go takes long where most of it is to be opened, too.
            evicts = order.sees_far and trio.current_time() >= self._refused_at + LIMIT_SECONDS
            need *= len(nodes) + len(self._to_tier)  # for the last of them nothing may have to go
        has_room = evicts or any(room.takes(need) for room in rooms)
        others = []
        for node in nodes:
            if has_room and self._jobs.keeps and self._cache.reservations.keeps(node):
                order.fetch(node)
                self._to_tier.add(node.ino)
                self._jobs.want(node.ino, Priority.HINTED)
            else:
                others.append(node)
        return others

    async def _into_window(self, order: Order, nodes: Sequence[Node]) -> None:
        misses = self._misses
        if not nodes or not self.size.limit_bytes:
            return
        if 0 < misses.source_seconds < NEAR_SECONDS:
            return
        await self._source.open_directories(misses.unopened(nodes))
        files = self._jobs.files
        if order not in self.orders.values():
            return  # it was dropped meanwhile: nobody would give these up
        self._forget_opened()
        # Some may have been opened meanwhile. No checkpoint from here on.
        nodes = [node for node in nodes if order.wants(node.ino) and files.get(node.ino) is None]
        refused = set(misses.window(nodes, self.size.threads, self.size.most_of_file))
        for node in nodes:
            if node.ino not in refused:
                order.fetch(node)
