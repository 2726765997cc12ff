"""The worker's part in sharing with peers: it tells them what it has, and reads what they have."""

from __future__ import annotations

import os
import secrets
import socket
from functools import partial
from types import ModuleType
from typing import Any

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.index.index import Index
from monarchfs.config.model import ShareMode
from monarchfs.metadata.tree import Tree
from monarchfs.metrics import Metrics
from monarchfs.peers import _replicas
from monarchfs.peers.catalogue import Catalogue
from monarchfs.peers.copy_service import CopyService
from monarchfs.peers.following import Following
from monarchfs.peers.foreign import drop_foreign
from monarchfs.peers.names import NameOwners, NameService
from monarchfs.peers.node_share import NodeShare
from monarchfs.peers.nodes import Peers
from monarchfs.peers.owners import Owners
from monarchfs.peers.ownership import Ownership
from monarchfs.peers.request_handler import answer
from monarchfs.peers.span_sharing import SpanDigests, SpanNodes, SpanService
from monarchfs.prefetch.copier import Copier
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.system.http_server import serve

CONNECTIONS = 512
"""Each peer has some, and each may wait for two seconds."""

MOST_BODY_BYTES = 1 << 20


class JobNodes:
    """The nodes of a job, what each of them owns, and who asks them. Constant."""

    def __init__(self, message: dict[str, Any], listener_fd: int, index: Index) -> None:
        """``message``: as ``Peers.to_message`` gives it. Takes 0.1 s for 1,024 nodes."""
        os.set_inheritable(listener_fd, False)
        self.listener = socket.socket(fileno=listener_fd)
        peers = Peers.from_message(message)
        self.ownership = Ownership(peers.nodes, peers.own)
        self.share = NodeShare(self.ownership)
        self.following = Following(peers)
        self.owners = Owners(self.share, self.following, index.nodes)
        self.name_owners = NameOwners(self.ownership, self.following)

    def span_nodes(self, jobs: CopyJobs, cache: Cache) -> SpanNodes:
        """Those with which large files are shared."""
        return SpanNodes(jobs, SpanDigests(cache), self.share, self.following)


class Peering:
    """Constant: the nodes, which of them this one is, and the socket on which nginx asks. Changing:
    ``_counted``, what ``count`` added so far."""

    def __init__(
        self,
        nodes: JobNodes,
        tree: Tree,
        copier: Copier,
        cache: Cache,
        spans: SpanNodes,
        mode: ShareMode,
        hooks: ModuleType,
        nursery: trio.Nursery,
    ) -> None:
        """From now on the threads that read small files ask peers; they must not run yet."""
        self.following = nodes.following
        self._listener = nodes.listener
        self._ownership = ownership = nodes.ownership
        self._catalogue = Catalogue(
            tree.index.replicas, cache.tiers, ownership, secrets.randbits(63)
        )
        copies = CopyService(tree, copier, self._catalogue, nodes.share)
        copier.jobs.on_step.add(copies.changed)
        self._counted = [0, 0, 0, 0, 0]
        span_service = SpanService(copies, copier.jobs, cache, spans.digests, nodes.share)
        self._spans = spans
        names = None
        if tree.freshness.serves_stale:
            names = NameService(tree, copies, nodes.name_owners, nursery)
        self._answer = partial(answer, self._catalogue, copies, span_service, names)
        self._cache = cache
        self._mode = mode
        _replicas.owners(ownership.tables, ownership.own)
        hooks.misses_peers(_replicas.read)

    def changed(self, name: bytes) -> None:
        """A replica was added or removed."""
        if self._ownership.owns(name):
            self._catalogue.note((name,))
        else:
            self._cache.lookup.foreign_stored()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            answers = partial(serve, connections=CONNECTIONS, most_body_bytes=MOST_BODY_BYTES)
            nursery.start_soon(answers, self._listener, self._answer)
            nursery.start_soon(self.following.run)
            if self._mode is ShareMode.PARTITION:
                nursery.start_soon(drop_foreign, self._cache, self._ownership, self.following)
            nursery.start_soon(self._spans.digests.run)
            nursery.start_soon(self._spans.run)

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
