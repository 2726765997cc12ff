"""The composition root of the worker: it builds the parts and connects them."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

# The session comes before anything that imports pyfuse3.
from monarchfs.fuse import session as fuse_session  # isort: skip
from monarchfs.cache.accounts import Accounts, CacheOptions
from monarchfs.cache.cache import Cache
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.config.model import DataPath, PrefetchMode
from monarchfs.core.misses import Misses
from monarchfs.fs.file_system import FileSystem
from monarchfs.fs.files import Files
from monarchfs.fs.open_counts import OpenCounts
from monarchfs.fs.reasons import Reasons
from monarchfs.fs.why import Why
from monarchfs.fs.xattrs import Xattrs
from monarchfs.fuse.adapter import Adapter, SessionCalls
from monarchfs.fuse.fast_path import FastPath
from monarchfs.fuse.handle_table import HandleTable
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.notify import Notifier
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay
from monarchfs.index import OnChange
from monarchfs.metadata.find import Finder
from monarchfs.metadata.freshness import NS, Freshness
from monarchfs.metadata.load import Load
from monarchfs.metadata.refresh import Refresh
from monarchfs.metadata.sibling_names import Publishing
from monarchfs.metadata.tree import Tree
from monarchfs.metrics import Metrics
from monarchfs.prefetch.ahead import Ahead
from monarchfs.prefetch.arrivals import Arrivals
from monarchfs.prefetch.copier import Copier, CopyLimits
from monarchfs.prefetch.copy_idle import CopyIdle
from monarchfs.prefetch.named_files import NamedFiles
from monarchfs.prefetch.scan import Scan
from monarchfs.prefetch.touch import Touch
from monarchfs.prefetch.warm import Warming
from monarchfs.prefetch.window import Window
from monarchfs.prefetch.window_size import WindowSize
from monarchfs.source.posix import PosixSource
from monarchfs.source.source import Source
from monarchfs.system.low_priority import run_sync_at
from monarchfs.types import EvictionPolicy, FreshnessMode, Node, OperationError
from monarchfs.worker.announcing import Announcing
from monarchfs.worker.bootstrap import Bootstrap, SupervisorChannel
from monarchfs.worker.commands import Commands
from monarchfs.worker.opening import (
    forget_earlier_mounts,
    free_opens,
    keep_counts,
    open_index,
    open_tiers,
    reads_by_kernel,
    safe,
)
from monarchfs.worker.recording import Recordings
from monarchfs.worker.said import Said

if TYPE_CHECKING:
    from monarchfs.exporter.http import Exporter
    from monarchfs.worker.peering import Peering

BACKGROUND_EXTRA = 8
"""Background threads for scanning, beside those that copy."""


class Parts:
    """The parts of a worker, connected. Constant; each owns what it opens.

    Each gets what it needs when it is made. If two need each other, the one made first gets the
    other later, by a method: ``Relay.begin``, ``Accounts.bind``.
    """

    def __init__(
        self, bootstrap: Bootstrap, channel: SupervisorChannel, nursery: trio.Nursery
    ) -> None:
        config = safe(bootstrap.config) if bootstrap.safe else bootstrap.config
        self.config = config
        self.restarts = bootstrap.restarts
        self.handle_table = table = HandleTable(bootstrap.handles_fd, fuse_session.hooks)
        # Threads take up the requests that are left in a journal.
        journal = bootstrap.requests_fd
        relays = journal is not None or not bootstrap.safe
        table.begin(fuse_session.RELAY_THREADS if relays else 0)
        self._mount_ns = bootstrap.mount_ns
        self._channel = channel
        self._nursery = nursery
        self.peering: Peering | None = None
        self.metrics = Metrics()
        self._state_dir = f"/proc/self/fd/{bootstrap.state_fd}"
        posix = PosixSource(
            bootstrap.source_fd, root=bootstrap.source_root, has_layouts=table.has_layouts
        )
        table.has_layouts = posix.has_layouts
        self._root_ino = posix.root.ino
        on_change = OnChange(
            fuse_session.hooks.names_forget,
            fuse_session.hooks.names_forget_ino,
            self._replica_changed,
        )
        self.index = open_index(config, self._state_dir, self._root_ino, on_change)
        first = table.kernel_reads is None and not bootstrap.safe
        if first and forget_earlier_mounts(bootstrap, self._state_dir, self.index, posix):
            self.index = open_index(config, self._state_dir, self._root_ino, on_change)
        if table.kernel_reads is None:
            table.kernel_reads = reads_by_kernel(config, self.index, passes=bootstrap.passes)
        self.kernel_reads = bool(table.kernel_reads)
        # Even if the index was lost, numbers that the kernel knows are not given to other files.
        if table.numbers:
            self.index.environment.skip_numbers_after(table.numbers)
        table.numbers = self.index.environment.next_id
        # Copies and scans that nobody waits for give way to readers.
        quietly = run_sync_at(config.copy_nice)
        self.relay = Relay(
            fuse_session.hooks,
            self.metrics,
            free_opens=not self.kernel_reads and free_opens(config),
            direct=config.data_path is DataPath.DIRECT,
        )
        self.source = Source(
            posix,
            demand_threads=config.source_threads,
            background_threads=config.copy_workers + BACKGROUND_EXTRA,
            deadline=config.source_deadline_seconds,
            behind=quietly,
            reads_elsewhere=lambda: self.relay.waits,
        )
        self.kernel = Notifier(fuse_session.invalidate_inode, fuse_session.invalidate_entry)
        accounts = Accounts(
            self.index,
            open_tiers(config, bootstrap, self.index),
            self.metrics,
            TierThreads(config.local_threads, quietly),
            nursery,
            self.relay,
            CacheOptions(config.evict, config.reserve_percent),
        )
        self.cache = Cache(accounts)
        self.copier = Copier(
            self.source,
            self.cache,
            self.metrics,
            nursery,
            limits=CopyLimits(
                config.copy_workers,
                config.prefetch_bytes_per_second,
                config.prefetch_floor / 100,
            ),
            keeps=config.prefetch is not PrefetchMode.NONE,
            trusts_times=config.freshness.mode is FreshnessMode.IMMUTABLE,
        )
        freshness = Freshness(
            config.freshness.mode, int(config.freshness.ttl_seconds * NS), bootstrap.mount_ns
        )
        self.tree = Tree(
            self.index,
            self.source,
            freshness,
            self.metrics,
            nursery,
            deadline=config.source_deadline_seconds,
            publishing=Publishing(self.relay.name_known, self.relay.known),
            on_moved=self._directory_moved,
        )
        opens = OpenCounts(self.relay.used, self.relay.open_inodes, known=not self.relay.free_opens)
        self.ahead: Ahead | None = None
        if config.prefetch is PrefetchMode.AUTO and config.tiers:
            self.ahead = Ahead(self.tree, self.cache, self.copier.jobs, self.relay.seen)
        self.touch: Touch | None = None
        if config.touch_source_seconds:
            self.touch = Touch(
                self.source,
                self.cache,
                self.metrics,
                self.tree.known.place,
                opens.inodes,
                config.touch_source_seconds,
            )
        self.files = Files(
            self.tree,
            self.cache,
            self.copier,
            self.metrics,
            self.kernel,
            opens,
            on_open=self._opened,
            on_local_open=None if self.touch is None else self.touch.opened,
        )
        self.reasons = Reasons(self.files.residency, self.cache, self.copier)
        finder = Finder(self.tree, [os.fsencode(config.mountpoint), os.fsencode(config.source)])
        self.xattrs = Xattrs(
            self.tree,
            self.files.residency,
            self.reasons,
            self.source,
            nursery,
            on_plain=self.relay.plain,
        )
        self.warming = Warming(self.tree, self.xattrs, self.cache, self.copier.jobs, nursery)
        self.scan = Scan(self.tree, self.copier.jobs, jitter_seconds=config.prefetch_jitter_seconds)
        self.load = Load(self.tree, bootstrap.mount_ns)
        self.copy_idle = CopyIdle(self.copier.jobs, self.scan, bootstrap.mount_ns)
        for tier in config.tiers:
            self.metrics.errors_of_tier(tier.path)
        self._kept = keep_counts(
            bootstrap.counts_fd,
            {
                "mount": self.metrics,
                "source": self.source.counters,
                "scan": self.scan,
                "lull": self.copy_idle,
            },
        )
        self.interrupts = Interrupts(self.metrics)
        if bootstrap.peers is not None and bootstrap.peers_fd is not None and relays:
            # Mounts that share nothing do not load libcurl.
            try:
                from monarchfs.worker.peering import Peering
            except ImportError as error:
                raise OperationError(
                    f"peers need libcurl, which cannot be loaded: {error}: apt-get install libcurl4"
                ) from None

            self.peering = Peering(
                self.tree,
                self.copier,
                self.cache,
                bootstrap.peers,
                bootstrap.peers_fd,
                config.share,
                nursery,
            )
            self.peering.begin(fuse_session.hooks)
        self.misses = Misses(
            fuse_session.hooks,
            self.index.nodes,
            posix.opened_directory,
            self.files.only_remote,
            self.files.racy_opens.opens_until,
            shares=self.peering is not None,
        )
        self.arrivals = Arrivals(
            self.misses,
            self.source,
            self.cache,
            self.copier.jobs,
            self.metrics,
            nursery,
            self.copier.copy_alone,
            self.files.opened_elsewhere,
        )
        self.window = Window(
            NamedFiles(self.tree.names, self.index.nodes.node, finder.find),
            self.source,
            self.cache,
            self.copier.jobs,
            self.misses,
            WindowSize(self.misses, config.window, config.source_threads, self.copier.governor),
            self.relay.seen,
            evicts=config.evict is not EvictionPolicy.KEEP,
        )
        self.cache.lookup.awaited = self.window.awaits
        self.said = Said(self._state_dir, bootstrap.mount_ns)
        self.announcing = Announcing(self.window if relays else None, self.said)
        self.commands = Commands(
            self.tree,
            self.cache,
            Refresh(self.tree, self.kernel),
            self.warming,
            finder,
            Why(
                self.tree,
                self.cache,
                self.reasons,
                finder,
                lambda: self.source.responding,
                self.metrics,
            ),
            {"metrics": partial(_metrics, self), "peers": partial(_peers, self)},
            {
                "record": Recordings(
                    fuse_session.hooks, self.index, partial(_facts, self), relays=relays
                ).answer,
                "order": self.announcing.answer,
            },
        )
        if relays:
            self.misses.start(
                posix.device,
                keeps=config.prefetch is not PrefetchMode.NONE,
                layouts=posix.has_layouts,
                nice=config.copy_nice,
            )
            self.copier.files.bind(self.arrivals)
        if self.peering is not None:
            self.peering.bind(self.copier.jobs, self.arrivals, self.scan)
        self.relay.begin(
            self.files,
            lasting_ns=freshness.ttl_ns,
            tells=self.cache.tracks or config.touch_source_seconds > 0,
            opens_here=not self.kernel_reads,
            misses=self.misses if relays else None,
            waiting=lambda: self.interrupts.waiting,
        )
        self.relay.counts.on_source_reads.add(self.source.count_elsewhere)
        self.passthrough = Passthrough(
            self.files, channel.send_now, self.metrics, self.relay, counts=self.kernel_reads
        )
        accounts.bind(self.passthrough)
        file_system = FileSystem(self.tree, self.files, self.xattrs)
        self.adapter = Adapter(
            file_system,
            self.interrupts,
            self.metrics,
            self.relay,
            table,
            self.passthrough,
            SessionCalls(
                fuse_session.current_request,
                fuse_session.current_node,
                fuse_session.back_open,
                fuse_session.answered_soon if journal is not None else None,
                fuse_session.hooks.record_answered,
            ),
        )
        fast_path = FastPath(
            file_system,
            self.adapter.handles,
            self.relay,
            self.metrics,
            fuse_session.current_request,
            self.passthrough,
        )
        fuse_session.on_request(fast_path.answer)
        self.session = fuse_session.Session(
            self.adapter,
            bootstrap.init_fd,
            bootstrap.fuse_fd,
            relays=relays,
            free_opens=self.relay.free_opens,
            waiting_reads=config.source_threads,
            journal=journal,
        )
        self._exporter = _exporter(self, bootstrap.metrics_fd)
        fuse_session.on_interrupt(self.interrupts.on_interrupt)

    @property
    def requests_waiting(self) -> int:
        """How many requests wait for the source or for a tier."""
        return self.interrupts.waiting + self.relay.waiting

    @property
    def data_path(self) -> str:
        """Who reads resident files, for people."""
        return "direct" if self.relay.direct else self.passthrough.data_path

    def _opened(self, node: Node, local: bool) -> None:
        """As ``on_open`` of the files."""
        if self.ahead is not None:
            self.ahead.opened(node, local)
        self.window.opened(node, local)

    def _replica_changed(self, name: bytes) -> None:
        if self.peering is not None:
            self.peering.changed(name)

    def _directory_moved(self, now_ns: int) -> None:
        self.handle_table.note_moved(now_ns)
        self.misses.forget_all()
        fuse_session.hooks.names_forget_all()

    def count(self) -> None:
        """Bring the counts up to date, and store them. Called before they are shown."""
        self.relay.counts.count()
        self.arrivals.take_events()
        self.window.count(self.metrics)
        if self.peering is not None:
            self.peering.count(self.metrics)
        self._kept.save()


def _peers(parts: Parts) -> dict[str, Any]:
    if parts.peering is None:
        raise OperationError("this mount has no peers: mount with --peers")
    return parts.peering.report()


def _facts(parts: Parts) -> dict[str, Any]:
    """What a recording says of the mount."""
    config = parts.config
    ttl = f"={config.freshness.ttl_seconds:g}" if config.freshness.mode is FreshnessMode.TTL else ""
    return {
        "source": config.source,
        "mount_point": config.mountpoint,
        "data_path": parts.data_path,
        "freshness": f"{config.freshness.mode.value}{ttl}",
        "prefetch": config.prefetch.value,
        "policy": config.evict.value,
        "tiers": [
            {"path": tier["path"], "capacity": tier["capacity_bytes"]}
            for tier in parts.cache.usage.report()
        ],
        "hidden": [
            *([] if parts.relay.direct else ["reads"]),
            *(["opens"] if parts.relay.free_opens else []),
            "lookups",
        ],
    }


def _exporter(parts: Parts, descriptor: int | None) -> Exporter | None:
    if descriptor is None:
        return None
    # Mounts without metrics do not import this.
    from monarchfs.exporter.http import Exporter
    from monarchfs.worker.metric_values import values_now

    return Exporter(partial(values_now, parts), descriptor)


def _metrics(parts: Parts) -> dict[str, Any]:
    """The answer to the node's exporter."""
    from monarchfs.exporter.wire import encode
    from monarchfs.worker.metric_values import values_now

    return encode(values_now(parts))
