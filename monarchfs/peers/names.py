"""Names and attributes between nodes: what this node asks the owners of directories, and what it
answers about its own.

A directory is owned as files are (``ownership``), by its inode number in the source; a large one in
parts, by hashes of names. Only the source's own file system is shared: the device numbers of others
differ between nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import trio
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from monarchfs.metadata.tree import Tree
from monarchfs.peers.copy_service import CopyService
from monarchfs.peers.following import Following, ask, avoided
from monarchfs.peers.messages import (
    MOST_NAMES,
    NamesQuestion,
    PeerError,
    decode_listing,
    decode_names,
    encode_names_question,
)
from monarchfs.peers.ownership import Ownership
from monarchfs.types import DirRef, Lane, MonarchError, Node, PeerListing, PeerNames

T = TypeVar("T")
log = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
"""A directory of this size, which has some ten thousand names, is owned in parts."""

PARTS = 4

DEMAND_SECONDS = 0.4
"""An owner answers a reader's node after this time, with what it has found by then."""

BACKGROUND_SECONDS = 2.0
MARGIN_SECONDS = 0.4
"""For the way to the owner and back."""

MOST_ANSWER_BYTES = 1 << 20
THREADS = 16
MOST_RUNNING = 64
"""Questions for which the source is being asked. Where it hangs, further ones get what is known."""


class NameOwners:
    """Constant: who owns what, and the nodes."""

    def __init__(self, ownership: Ownership, following: Following) -> None:
        self._ownership = ownership
        self._following = following
        self._threads = trio.CapacityLimiter(THREADS)

    def divide(
        self, directory: DirRef, size: int, names: Sequence[bytes]
    ) -> dict[int, list[bytes]]:
        """The names in a directory of ``size`` bytes that other nodes own, or stand in for, by the
        node to ask."""
        found: dict[int, list[bytes]] = {}
        for part, some in _parts(size, names).items():
            number = self._whom_to_ask(_key(directory), part)
            if number != self._ownership.own:
                found.setdefault(number, []).extend(some)
        return found

    def served(self, directory: DirRef, size: int, names: Sequence[bytes]) -> list[bytes]:
        """Those of the names that this node owns, or stands in for."""
        key = _key(directory)
        return [
            name
            for part, some in _parts(size, names).items()
            if self._ownership.serves(key, part)
            for name in some
        ]

    def _whom_to_ask(self, key: bytes, part: int) -> int:
        owner, own = self._ownership.number(key, part), self._ownership.own
        young = trio.current_time() < self._following.starts_until
        if owner == own or young or not avoided(owner):
            return owner
        other = self._ownership.stand_in(key, part)
        return own if avoided(other) else other

    async def ask(
        self, owner: int, directory: DirRef, names: list[bytes], most_age_ns: int, lane: Lane
    ) -> PeerNames | None:
        """What the owner says about the first of these names; None if it does not answer in time.
        Raises nothing but Cancelled."""
        question = NamesQuestion(
            *directory[:2], names[:MOST_NAMES], most_age_ns, lane is Lane.DEMAND
        )
        return await self._ask("/ask/names", owner, question, decode_names)

    async def list(
        self, owner: int, directory: DirRef, most_age_ns: int, lane: Lane
    ) -> PeerListing | None:
        """The directory's entries as its owner has them; None if it does not say in time, or there
        are many. Raises nothing but Cancelled."""
        question = NamesQuestion(*directory[:2], [], most_age_ns, lane is Lane.DEMAND)
        return await self._ask("/ask/listing", owner, question, decode_listing)

    async def _ask(
        self, path: str, owner: int, question: NamesQuestion, decode: Callable[[bytes], T]
    ) -> T | None:
        if not question.demand:
            await self._following.until_started(owner)
        question = question._replace(most_age_ns=max(0, question.most_age_ns))
        body, lane = encode_names_question(question), _lane_of(question)
        seconds = _answer_seconds(question) + MARGIN_SECONDS
        try:
            return await ask(
                owner, path, body, seconds, MOST_ANSWER_BYTES, decode, self._threads, lane
            )
        except (OSError, PeerError) as exc:
            log.debug("peer %d says nothing about names: %s", owner, exc)
            return None


def _key(directory: DirRef) -> bytes:
    return xxh3_128_digest(b"%d" % directory.ino)


def _parts(size: int, names: Sequence[bytes]) -> dict[int, list[bytes]]:
    """The names in a directory of ``size`` bytes, by the parts in which it is owned."""
    if size < LARGE_BYTES:
        return {0: list(names)} if names else {}
    found: dict[int, list[bytes]] = {}
    for name in names:
        found.setdefault(xxh3_64_intdigest(name) % PARTS, []).append(name)
    return found


def _answer_seconds(question: NamesQuestion) -> float:
    """After this time an owner answers."""
    return DEMAND_SECONDS if question.demand else BACKGROUND_SECONDS


class NameService:
    """Constant: what is known, and asks the source; where directories are; who owns them. Changing:
    ``_running``, how many questions wait for the source."""

    def __init__(
        self, tree: Tree, copies: CopyService, owners: NameOwners, nursery: trio.Nursery
    ) -> None:
        self._tree = tree
        self._index = tree.index
        self._copies = copies
        self._owners = owners
        self._nursery = nursery
        self._running = 0

    async def answer(self, question: NamesQuestion) -> PeerNames:
        """What is known when the time is up. Raises nothing but Cancelled.

        Answers only for what this node owns, or stands in for.
        """
        arrived_ns = time.time_ns()
        since_ns, lane = self._since_ns(question, arrived_ns), _lane_of(question)
        parent, names = 0, list[bytes]()
        with trio.move_on_after(_answer_seconds(question)):
            parent, names = await self._served(question, question.names, lane)
            lacking = [name for name in names if self._known(parent, name, since_ns) is None]
            if lacking:
                find = self._tree.batches.find_each
                await self._run(partial(find, parent, lacking, lane, peers=False))
        rows = []
        oldest_ns = arrived_ns
        for name in names:
            if (found := self._known(parent, name, since_ns)) is not None:
                asked_ns, node = found
                oldest_ns = min(oldest_ns, asked_ns)
                rows.append((name, node.stat, node.target))
        return PeerNames(arrived_ns - oldest_ns, rows)

    async def listing(self, question: NamesQuestion) -> PeerListing | None:
        """The directory's entries; None if they are not known when the time is up, or there are
        many. Raises nothing but Cancelled."""
        arrived_ns = time.time_ns()
        since_ns, lane = self._since_ns(question, arrived_ns), _lane_of(question)
        with trio.move_on_after(_answer_seconds(question)):
            parent, served = await self._served(question, [b"."], lane)
            if not served:
                return None
            known = self._tree.shared.known_listing
            if known(parent, since_ns) is None:
                await self._run(partial(self._tree.list_for_peers, parent, lane))
            if (listed := known(parent, since_ns)) is not None:
                asked_ns, listing = listed
                return listing._replace(age_ns=max(0, arrived_ns - asked_ns))
        return None

    def _since_ns(self, question: NamesQuestion, arrived_ns: int) -> int:
        """When the source must have been asked. With ``immutable`` what was known before the mount
        counts as of its time, so its age is not known."""
        since_ns = arrived_ns - question.most_age_ns
        return since_ns if since_ns < 0 else max(since_ns, self._tree.freshness.mount_ns + 1)

    async def _served(
        self, question: NamesQuestion, names: Sequence[bytes], lane: Lane
    ) -> tuple[int, list[bytes]]:
        """The directory, and those of the names that this node owns, or stands in for."""
        try:
            ino = await self._copies.directory(question.path, lane)
        except (OSError, MonarchError):
            return 0, []  # the peer will meet the same error in the source
        node = None if ino is None else self._index.nodes.node(ino)
        directory = None if ino is None else self._index.nodes.dirref(ino)
        if node is None or directory is None or node.stat.device or node.stat.ino != question.ino:
            return 0, []
        size = node.stat.size if question.names else 0
        return node.ino, self._owners.served(directory, size, names)

    async def _run(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Ask the source. Answers are recorded even if they come too late for this question."""
        if self._running >= MOST_RUNNING:
            return
        done = trio.Event()

        async def run() -> None:
            self._running += 1
            try:
                await ask()
            except (OSError, MonarchError) as exc:
                log.debug("names that a peer wants are not known: %s", exc)
            finally:
                self._running -= 1
                done.set()

        self._nursery.start_soon(run)
        await done.wait()

    def _known(self, parent: int, name: bytes, since_ns: int) -> tuple[int, Node] | None:
        """What a name stands for, and when the source was asked about it."""
        dirent = self._index.nodes.dirent(parent, name)
        node = None if dirent is None else self._index.nodes.node(dirent.ino)
        if dirent is None or node is None or node.stat.device:
            return None
        asked_ns = min(dirent.checked_ns, node.fetched_ns)
        if (
            asked_ns < since_ns
            or self._tree.known.entry(dirent.checked_ns, node, time.time_ns()) is None
        ):
            return None
        return asked_ns, node


def _lane_of(question: NamesQuestion) -> Lane:
    return Lane.DEMAND if question.demand else Lane.BACKGROUND
