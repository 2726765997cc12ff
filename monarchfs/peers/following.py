"""Follows what the job's other nodes have, with a task for each of them."""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import trio

from monarchfs.peers import _replicas
from monarchfs.peers.catalogue import Follower
from monarchfs.peers.credentials import TOKEN_SECONDS, token
from monarchfs.peers.messages import PeerError, decode_page
from monarchfs.peers.nodes import Peers
from monarchfs.system.threads import run_sync
from monarchfs.types import Lane

T = TypeVar("T")
log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
BUSY_SECONDS = 0.1
"""The pause after an answer with something new."""

PEERS_A_SECOND = 64
"""The most peers that are asked: with more of them, each is asked less often."""

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
START_SECONDS = 10.0
"""How long to wait for each node: the nodes of a job start at about the same time."""

ANSWER_SECONDS = 5.0
MAX_ANSWER_BYTES = 1 << 20
THREADS = 8


async def ask(
    number: int,
    path: str,
    body: bytes | None,
    seconds: float,
    most_bytes: int,
    decode: Callable[[bytes], T],
    threads: trio.CapacityLimiter,
    lane: Lane = Lane.BACKGROUND,
) -> T:
    """What a peer's worker answers to a POST, or to a GET if ``body`` is None, decoded by one of
    ``threads``. ``lane``: a peer that failed is asked what no reader waits for, to find out whether
    it is back. Raises OSError and PeerError."""

    def answer() -> T:
        probe = lane is not Lane.DEMAND
        status, data = _replicas.ask(number, path, body, seconds, most_bytes, probe)
        if status != 200:
            raise PeerError(f"status {status}")
        return decode(data)

    return await run_sync(answer, abandon_on_cancel=True, limiter=threads)


def avoided(number: int) -> bool:
    """Whether a peer is asked nothing now, because it fails."""
    return bool(_replicas.counts(number)[-1])


class Following:
    """The catalogues of all peers.

    Constant: ``nodes``, in the order of their numbers; ``own``, this one's number;
    ``starts_until``, until when those that have not answered may be starting. Changing:
    ``errors``, why a peer does not answer, by number; ``answered``, by number, set once a peer's
    whole catalogue is known; ``heard``, when a peer last answered (trio.current_time());
    ``_addresses``, as far as they are known.
    """

    def __init__(self, peers: Peers) -> None:
        self.nodes = nodes = peers.nodes
        self.own = peers.own
        self.errors: dict[int, str] = {}
        self.answered = [trio.Event() for _ in nodes]
        self.heard: dict[int, float] = {}
        self._addresses: dict[int, str] = {}
        self._secret = peers.secret
        self._tls = bool(peers.pin)
        _replicas.pin(peers.pin)
        self.starts_until = trio.current_time() + START_SECONDS
        self._threads = trio.CapacityLimiter(THREADS)
        self._least = len(nodes) / PEERS_A_SECOND
        self._wakes = trio.lowlevel.ParkingLot()

    def starts(self, number: int) -> bool:
        """Whether it may not have been mounted yet."""
        return trio.current_time() < self.starts_until and not self.answered[number].is_set()

    async def until_started(self, number: int) -> None:
        with trio.move_on_at(self.starts_until):
            await self.answered[number].wait()

    async def run(self) -> None:
        """Follow all peers until cancelled."""
        own = await self._address(self.own)
        _replicas.address(own)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._see_failures)
            nursery.start_soon(self._renew_tokens, own)
            for number in range(len(self.nodes)):
                if number != self.own:
                    nursery.start_soon(self._follow, number, own)

    def _sign(self, number: int, own: str) -> None:
        text = token(own, self._addresses[number], self._secret, time.time())
        _replicas.token(number, text)

    async def _renew_tokens(self, own: str) -> None:
        while True:
            await trio.sleep(TOKEN_SECONDS / 4)
            for number in self._addresses:
                self._sign(number, own)

    async def _see_failures(self) -> None:
        """Of requests of others: whoever is avoided is asked as soon as it may be."""
        failures = _replicas.failures_fd()
        while True:
            await trio.lowlevel.wait_readable(failures)
            os.eventfd_read(failures)
            self._wakes.unpark_all()

    async def _sleep(self, number: int, seconds: float) -> None:
        """For so long, or as long as the peer has to be avoided."""
        until = trio.current_time() + seconds
        while (left := until - trio.current_time()) > 0:
            with trio.move_on_after(left):
                await self._wakes.park()
                if avoided(number):
                    await trio.sleep(_replicas.pause(number))
                    return

    async def _address(self, number: int) -> str:
        """The node's address as the others see it. Waits until its name can be resolved."""
        node = self.nodes[number]
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                found = await trio.socket.getaddrinfo(
                    node.address, node.port, type=socket.SOCK_STREAM
                )
                return str(found[0][4][0])
            except OSError as exc:
                self._failed(number, f"{node.address}: {exc.strerror or exc}")
            await trio.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    async def _follow(self, number: int, own: str) -> None:
        address = self._addresses[number] = await self._address(number)
        self._sign(number, own)
        _replicas.peer(number, self.nodes[number].url(address, tls=self._tls))
        follower = Follower()
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                again, rows = await self._ask(number, follower)
            except (OSError, PeerError) as exc:
                if not (isinstance(exc, OSError) and exc.errno == errno.EAGAIN):
                    self._failed(number, str(exc))
                if self.starts(number):
                    await trio.sleep(max(self._least, FIRST_PAUSE_SECONDS))
                    _replicas.retry(number)
                    continue
                # Nobody else finds out whether it is back: a reader would wait for that.
                await trio.sleep(_replicas.pause(number) or pause)
                pause = min(pause * 2, MAX_PAUSE_SECONDS)
                continue
            pause = FIRST_PAUSE_SECONDS
            if self.errors.pop(number, None) is not None:
                log.info("peer %s answers", self.nodes[number].name)
            if not again:
                # The nodes must not all ask at the same moment.
                interval = max(self._least, BUSY_SECONDS if rows else INTERVAL_SECONDS)
                await self._sleep(number, interval * random.uniform(0.75, 1.25))

    async def _ask(self, number: int, follower: Follower) -> tuple[bool, int]:
        """Ask once. Returns whether to ask again at once, and how many rows came."""
        path = f"/ask/catalogue?{follower.query()}"
        page = await ask(
            number, path, None, ANSWER_SECONDS, MAX_ANSWER_BYTES, decode_page, self._threads
        )
        self.heard[number] = trio.current_time()
        void, again = follower.take_page(page)
        if void:
            _replicas.remove_all(number)
        _replicas.put(number, page.rows)
        if not again:
            self.answered[number].set()
        return again, len(page.rows)

    def _failed(self, number: int, why: str) -> None:
        if self.errors.get(number) != why:
            log.warning("peer %s: %s", self.nodes[number].name, why)
        self.errors[number] = why
