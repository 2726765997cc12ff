"""The worker's part in sharing with peers: it tells them what it has, and reads what they have."""

from __future__ import annotations

import os
import secrets
import socket
from types import ModuleType
from typing import Any

import trio

from monarchfs.cache.cache import Cache
from monarchfs.config.model import ShareMode
from monarchfs.metadata.tree import Tree
from monarchfs.metrics import Metrics
from monarchfs.peers import _replicas
from monarchfs.peers.catalogue import Publisher
from monarchfs.peers.following import Following
from monarchfs.peers.foreign import ForeignReplicas
from monarchfs.peers.holdings import IndexHoldings
from monarchfs.peers.name_supply import NameSupply
from monarchfs.peers.names import NameOwners
from monarchfs.peers.nodes import Peers
from monarchfs.peers.owners import Owners
from monarchfs.peers.ownership import Ownership
from monarchfs.peers.service import Service
from monarchfs.peers.span_sharing import SpanNodes, SpanService
from monarchfs.peers.supply import Supply
from monarchfs.prefetch.copier import Copier
from monarchfs.prefetch.spans import SPAN_BYTES
from monarchfs.system.http_server import serve

CONNECTIONS = 512
"""Each peer has some, and each may wait for two seconds."""

MOST_BODY_BYTES = 1 << 20


class Peering:
    """Constant: the nodes, which of them this one is, and the socket on which nginx asks. Changing:
    ``_counted``, what ``count`` added so far."""

    def __init__(
        self,
        tree: Tree,
        copier: Copier,
        cache: Cache,
        message: dict[str, Any],
        descriptor: int,
        share: ShareMode,
        nursery: trio.Nursery,
    ) -> None:
        """``message``: as ``Peers.to_message`` gives it. Takes 0.1 s for 1,024 nodes."""
        os.set_inheritable(descriptor, False)
        peers = Peers.from_message(message)
        self.following = Following(peers)
        self._listener = socket.socket(fileno=descriptor)
        self._ownership = owners = Ownership(peers.nodes)
        self._holdings = IndexHoldings(
            tree.index.replicas, cache.tiers, owners, peers.nodes[peers.own]
        )
        self._publisher = Publisher(self._holdings, secrets.randbits(63))
        index = tree.index
        self._supply = supply = Supply(
            tree.names,
            lambda ino: None if (ref := index.nodes.dirref(ino)) is None else ref.path,
            copier.jobs,
            copier.hurry,
            lambda name: bool(self._holdings.rows([name])[0].segment),
            lambda name: owners.serves(peers.own, name),
        )
        copier.jobs.owners = Owners(owners, self.following, index.nodes.dirref, supply.copies)
        copier.jobs.on_step.add(supply.changed)
        self._counted = [0, 0, 0, 0, 0]
        spans = SpanService(supply, copier.jobs, cache, owners, peers.own)
        self._digests = spans.digests
        self._taken = spans.taken
        self._nodes = SpanNodes(copier.jobs, spans, owners, self.following)
        copier.files.nodes = self._nodes
        name_owners = NameOwners(owners, self.following)
        tree.shared.bind(name_owners)
        name_supply = NameSupply(
            tree.known,
            tree.names.ask_for_peers,
            tree.directories.shared.known,
            tree.list_for_peers,
            supply.directory,
            name_owners,
            nursery,
        )
        names = name_supply if tree.freshness.serves_stale else None
        self._service = Service(self._publisher, supply, spans.answer, names)
        self._lookup = cache.lookup
        if share is not ShareMode.REPLICATE:
            cache.lookup.owns = self._owns_some
        cache.reservations.keeps_foreign = share is not ShareMode.PARTITION
        self._foreign = None
        if share is ShareMode.PARTITION:
            self._foreign = ForeignReplicas(cache, owners, self.following)

    def begin(self, hooks: ModuleType) -> None:
        """Have the threads that read small files ask peers. Call this before the session's threads
        start."""
        _replicas.owners(self._ownership.tables, self.following.own)
        hooks.misses_peers(_replicas.read)

    def _owns_some(self, name: bytes, size: int) -> bool:
        """Whether this node owns a span of the file, at least, or copies it for its peers."""
        number, own = self._ownership.number, self.following.own
        spans = range(-(-size // SPAN_BYTES) or 1)
        taken = self._supply.copies(name) or self._taken.has_any(name)
        return taken or any(number(name, span) == own for span in spans)

    def changed(self, name: bytes) -> None:
        """A replica was added or removed."""
        if self._holdings.owns(name):
            self._publisher.note((name,))
        else:
            self._lookup.foreign_stored()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve)
            nursery.start_soon(self.following.run)
            if self._foreign is not None:
                nursery.start_soon(self._foreign.run)
            nursery.start_soon(self._digests.run)
            nursery.start_soon(self._nodes.run)

    async def _serve(self) -> None:
        await serve(
            self._listener,
            self._service.answer,
            connections=CONNECTIONS,
            most_body_bytes=MOST_BODY_BYTES,
        )

    def count(self, metrics: Metrics) -> None:
        """Add what happened since the last call."""
        now = [0, 0, 0, 0, _replicas.bypassed()]
        for number in range(len(self.following.nodes)):
            for place, value in enumerate(_replicas.counts(number)[:4]):
                now[place] += int(value)
        more = [n - c for n, c in zip(now, self._counted, strict=True)]
        files, read_bytes, wrong, failed, bypassed = more
        self._counted = now
        metrics.peer_files += files
        metrics.peer_bytes += read_bytes
        metrics.peer_wrong_files += wrong
        metrics.peer_failures += failed
        metrics.peer_bypassed_files += bypassed

    def report(self) -> dict[str, Any]:
        """This node, and all peers."""
        here = self.following.nodes[self.following.own]
        own = {"name": here.name, "address": here.address, "port": here.port}
        return {**own, "peers": self.status()}

    def status(self) -> list[dict[str, Any]]:
        """Each peer."""
        now = trio.current_time()
        known = _replicas.known(len(self.following.nodes))
        rows = []
        for number, node in enumerate(self.following.nodes):
            if number == self.following.own:
                continue
            files, read_bytes, wrong, failed, nanoseconds, avoided = _replicas.counts(number)
            heard = self.following.heard.get(number)
            rows.append(
                {
                    "name": node.name,
                    "address": node.address,
                    "port": node.port,
                    "answered": self.following.answered[number].is_set(),
                    "answer_age_seconds": None if heard is None else round(now - heard, 3),
                    "has_files": known[number],
                    "read_files": files,
                    "read_bytes": read_bytes,
                    "read_seconds": round(nanoseconds / 1e9, 6),
                    "wrong": wrong,
                    "failed": failed,
                    "avoided": avoided,
                    "error": self.following.errors.get(number),
                }
            )
        return rows
