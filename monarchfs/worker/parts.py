"""The composition root of the file system: it builds the parts and connects them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import trio

# The session comes before anything that imports pyfuse3.
from monarchfs.fuse import session as fuse_session  # isort: skip
from monarchfs.cache.accounts import Accounts, CacheOptions
from monarchfs.cache.cache import Cache
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.config.model import DataPath, PrefetchMode, ShareMode
from monarchfs.core.misses import Misses
from monarchfs.fs.files import Files
from monarchfs.fs.open_counts import OpenCounts
from monarchfs.fs.xattrs import Xattrs
from monarchfs.fuse.adapter import Adapter
from monarchfs.fuse.fast_path import FastPath
from monarchfs.fuse.handle_table import HandleTable
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.notify import Notifier
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay
from monarchfs.fuse.thread_counts import count_threads
from monarchfs.index import Index, OnChange
from monarchfs.metadata.find import Finder
from monarchfs.metadata.freshness import NS, Freshness
from monarchfs.metadata.load import Load
from monarchfs.metadata.tree import Tree
from monarchfs.metrics import Metrics
from monarchfs.prefetch.ahead import Ahead
from monarchfs.prefetch.arrivals import Arrivals
from monarchfs.prefetch.copier import Copier
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
from monarchfs.types import EvictionPolicy, FreshnessMode, OperationError
from monarchfs.worker.bootstrap import Bootstrap, SupervisorChannel
from monarchfs.worker.opening import (
    forget_earlier_mounts,
    free_opens,
    keep_counts,
    open_index,
    open_tiers,
    reads_by_kernel,
    safe,
)

if TYPE_CHECKING:
    from monarchfs.worker.peering import JobNodes, Peering

BACKGROUND_EXTRA = 8
"""Background threads for scanning, beside those that copy."""


class Parts:
    """The parts of a mount's file system, connected. Constant; each owns what it opens.

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
        self.relays = relays = journal is not None or not bootstrap.safe
        table.begin(fuse_session.RELAY_THREADS if relays else 0)
        self.mount_ns = bootstrap.mount_ns
        self.peering: Peering | None = None
        self.metrics = Metrics()
        state_dir = f"/proc/self/fd/{bootstrap.state_fd}"
        posix = PosixSource(
            bootstrap.source_fd, root=bootstrap.source_root, has_layouts=table.has_layouts
        )
        table.has_layouts = posix.has_layouts
        self.root_ino = posix.root.ino
        on_change = OnChange(
            fuse_session.hooks.names_forget,
            fuse_session.hooks.names_forget_ino,
            self._replica_changed,
        )
        self.index = open_index(config, state_dir, self.root_ino, on_change)
        first = table.kernel_reads is None and not bootstrap.safe
        if first and forget_earlier_mounts(bootstrap, state_dir, self.index, posix):
            self.index = open_index(config, state_dir, self.root_ino, on_change)
        if table.kernel_reads is None:
            table.kernel_reads = reads_by_kernel(config, self.index, passes=bootstrap.passes)
        self.kernel_reads = bool(table.kernel_reads)
        # Even if the index was lost, numbers that the kernel knows are not given to other files.
        if table.numbers:
            self.index.environment.skip_numbers_after(table.numbers)
        table.numbers = self.index.environment.next_id
        shares = bootstrap.peers is not None and bootstrap.peers_fd is not None and relays
        nodes = _job_nodes(bootstrap.peers or {}, self.index) if shares else None
        # Copies and scans that nobody waits for give way to readers.
        quietly = run_sync_at(config.copy_nice)
        self.relay = Relay(
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
        self.kernel = Notifier()
        accounts = Accounts(
            self.index,
            open_tiers(config, bootstrap, self.index),
            self.metrics,
            TierThreads(config.local_threads, quietly),
            nursery,
            self.relay,
            CacheOptions(
                config.evict,
                config.reserve_percent,
                keeps_foreign=nodes is None or config.share is not ShareMode.PARTITION,
            ),
            owns=None
            if nodes is None or config.share is ShareMode.REPLICATE
            else nodes.share.owns_some,
        )
        self.cache = Cache(accounts)
        self.copier = Copier(
            self.source,
            self.cache,
            self.metrics,
            nursery,
            workers=config.copy_workers,
            rate=config.prefetch_bytes_per_second,
            floor=config.prefetch_floor / 100,
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
            threads=self.relay,
            peers=None if nodes is None else nodes.name_owners,
        )
        self.tree.recorder.on_moved.add(self._directory_moved)
        opens = OpenCounts(self.relay, known=not self.relay.free_opens)
        self.ahead: Ahead | None = None
        if config.prefetch is PrefetchMode.AUTO and config.tiers:
            self.ahead = Ahead(self.tree, self.cache, self.copier.jobs)
        self.touch: Touch | None = None
        if config.touch_source_seconds:
            self.touch = Touch(
                self.source,
                self.cache,
                self.metrics,
                self.tree.known,
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
            self.touch,
        )
        if self.ahead is not None:
            self.files.on_open.add(self.ahead.opened)
        roots = [os.fsencode(root) for root in (config.mountpoint, config.source)]
        self.finder = Finder(self.tree, roots)
        self.xattrs = Xattrs(self.tree, self.files.residency, self.source, nursery)
        self.xattrs.on_plain.add(fuse_session.hooks.absent_add)
        self.warming = Warming(self.tree, self.xattrs, self.cache, self.copier.jobs, nursery)
        self.scan = Scan(self.tree, self.copier.jobs, jitter_seconds=config.prefetch_jitter_seconds)
        self.load = Load(self.tree)
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
        if nodes is not None and bootstrap.peers_fd is not None:
            from monarchfs.worker.peering import Peering

            self.peering = Peering(
                nodes,
                self.tree,
                self.copier,
                self.cache,
                bootstrap.peers_fd,
                config.share,
                fuse_session.hooks,
                nursery,
            )
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
            self.copier.files,
            self.metrics,
            nursery,
            self.files.opened_elsewhere,
        )
        self.window = Window(
            NamedFiles(self.tree, self.finder),
            self.source,
            self.cache,
            self.copier.jobs,
            self.misses,
            WindowSize(self.misses, config.window, config.source_threads, self.copier.governor),
            evicts=config.evict is not EvictionPolicy.KEEP,
        )
        self.cache.lookup.awaited = self.window.awaits
        self.files.on_open.add(self.window.opened)
        if relays:
            self.misses.start(
                posix.device,
                keeps=config.prefetch is not PrefetchMode.NONE,
                layouts=posix.has_layouts,
                nice=config.copy_nice,
            )
            self.copier.bind(self.arrivals)
        self.relay.begin(
            self.files,
            lasting_ns=freshness.ttl_ns,
            tells=self.cache.tracks or config.touch_source_seconds > 0,
            opens_here=not self.kernel_reads,
            misses=self.misses if relays else None,
            interrupts=self.interrupts,
        )
        self.passthrough = Passthrough(
            self.files, channel.send_now, self.metrics, self.relay, counts=self.kernel_reads
        )
        accounts.bind(self.passthrough)
        self.adapter = Adapter(
            self.tree,
            self.files,
            self.xattrs,
            self.interrupts,
            self.metrics,
            self.relay,
            table,
            self.passthrough,
            journals=journal is not None,
        )
        fast_path = FastPath(
            self.tree,
            self.files,
            self.xattrs,
            self.adapter.handles,
            self.relay,
            self.metrics,
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
        fuse_session.on_interrupt(self.interrupts.on_interrupt)

    @property
    def requests_waiting(self) -> int:
        """How many requests wait for the source or for a tier."""
        return self.interrupts.waiting + self.relay.waiting

    @property
    def data_path(self) -> str:
        """Who reads resident files, for people."""
        return "direct" if self.relay.direct else self.passthrough.data_path

    def _replica_changed(self, name: bytes) -> None:
        if self.peering is not None:
            self.peering.changed(name)

    def _directory_moved(self, now_ns: int) -> None:
        self.handle_table.note_moved(now_ns)
        self.misses.forget_all()
        fuse_session.hooks.names_forget_all()

    def count(self) -> None:
        """Bring the counts up to date, and store them. Called before they are shown."""
        for reads in count_threads(self.metrics):
            self.source.count_elsewhere(*reads)
        self.arrivals.take_events()
        self.window.count(self.metrics)
        if self.peering is not None:
            self.peering.count(self.metrics)
        self._kept.save()


def _job_nodes(message: dict[str, Any], index: Index) -> JobNodes:
    # Mounts that share nothing do not load libcurl.
    try:
        from monarchfs.worker.peering import JobNodes
    except ImportError as error:
        raise OperationError(
            f"peers need libcurl, which cannot be loaded: {error}: apt-get install libcurl4"
        ) from None

    return JobNodes(message, index)
