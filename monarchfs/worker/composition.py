"""The composition root of the file system: it builds the parts and connects them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

# The session comes before anything that imports pyfuse3.
from monarchfs.fuse import session as fuse_session  # isort: skip
from monarchfs.cache.accounts import Accounts
from monarchfs.cache.cache import Cache
from monarchfs.cache.index import Index, OnChange
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.config.model import Config, DataPath, PrefetchMode, ShareMode
from monarchfs.core.misses import Misses
from monarchfs.fs.files import Files
from monarchfs.fs.xattrs import Xattrs
from monarchfs.fuse.answerer import Answerer
from monarchfs.fuse.handle_table import HandleTable
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.notify import Notifier
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay, count_threads
from monarchfs.metadata.find import Finder
from monarchfs.metadata.freshness import NS, Freshness
from monarchfs.metadata.tree import Tree
from monarchfs.metrics import Metrics
from monarchfs.prefetch.ahead import Ahead
from monarchfs.prefetch.copier import Copier
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.named_files import NamedFiles
from monarchfs.prefetch.order import Orders
from monarchfs.prefetch.scan import CopyIdle, Scan
from monarchfs.prefetch.small_files import SmallFiles
from monarchfs.prefetch.touch import Touch
from monarchfs.prefetch.warm import Warming
from monarchfs.prefetch.window import Window
from monarchfs.prefetch.window_size import WindowSize
from monarchfs.source import _stats
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


class Composition:
    """The parts of a mount's file system, connected. Constant; each owns what it opens.

    Each gets what it needs when it is made, so the order is that of their dependencies: what is
    shared with other workers and processes; the index and the source; the cache; what is copied
    into it; names; open files; and last, who answers the kernel. In three places two parts need
    each other, and the one made first gets the other later: ``Accounts.bind``, ``Copier.bind``,
    ``Relay.begin``.
    """

    def __init__(
        self, bootstrap: Bootstrap, channel: SupervisorChannel, nursery: trio.Nursery
    ) -> None:
        self.config = config = safe(bootstrap.config) if bootstrap.safe else bootstrap.config
        self.restarts = bootstrap.restarts
        self.mount_ns = bootstrap.mount_ns
        self.metrics = metrics = Metrics()
        self.peering: Peering | None = None  # `_replica_changed` asks
        freshness = Freshness(
            config.freshness.mode, int(config.freshness.ttl_seconds * NS), bootstrap.mount_ns
        )
        # Copies and scans that nobody waits for give way to readers.
        quietly = run_sync_at(config.copy_nice)

        # What earlier workers of this mount left. Threads take up the requests in a journal, but in
        # safe mode they leave all to Python.
        self.handle_table = table = HandleTable(bootstrap.fds.handles, fuse_session.hooks)
        self.relays = not bootstrap.safe
        takes = self.relays or bootstrap.fds.requests is not None
        table.enter_worker(fuse_session.RELAY_THREADS if takes else 0)
        posix = PosixSource(
            bootstrap.fds.source, root=bootstrap.source_root, has_layouts=table.has_layouts
        )
        table.has_layouts = posix.has_layouts
        self.root_ino = posix.root.ino
        self.index = index = self._open_index(bootstrap, posix)
        self.kernel_reads = _who_reads(table, config, index, passes=bootstrap.passes)

        # The source, and the threads of C that read it and the tiers.
        self.relay = Relay(
            free_opens=not self.kernel_reads and free_opens(bootstrap.config),
            direct=config.data_path is DataPath.DIRECT,
            mode=config.freshness.mode,
        )
        self.source = source = Source(
            posix,
            demand_threads=config.source_threads,
            background_threads=config.copy_workers + BACKGROUND_EXTRA,
            deadline=config.source_deadline_seconds,
            behind=quietly,
            reads_elsewhere=lambda: self.relay.waits,
        )
        self.kernel = Notifier()

        # The cache. Who owns what, and what will be opened soon, decides what it keeps.
        nodes = _job_nodes(bootstrap, index) if self.relays else None
        orders = Orders()
        accounts = Accounts(
            index,
            open_tiers(config, bootstrap, index),
            metrics,
            TierThreads(config.local_threads, quietly),
            nursery,
            self.relay,
            eviction=config.evict,
            reserve_percent=config.reserve_percent,
            keeps_foreign=nodes is None or config.share is not ShareMode.PARTITION,
            owns=None
            if nodes is None or config.share is ShareMode.REPLICATE
            else nodes.share.owns_some,
            awaited=orders.awaits,
        )
        self.cache = cache = Cache(accounts)

        # Copies. Large files are shared with the job's other nodes.
        jobs = CopyJobs(
            cache,
            metrics,
            nursery,
            None if nodes is None else nodes.owners,
            keeps=config.prefetch is not PrefetchMode.NONE,
            opens_first=self.relays,
        )
        spans = None if nodes is None else nodes.span_nodes(jobs, cache)
        self.copier = Copier(
            jobs,
            source,
            cache,
            metrics,
            nursery,
            spans,
            workers=config.copy_workers,
            rate=config.prefetch_bytes_per_second,
            floor=config.prefetch_floor / 100,
            trusts_times=config.freshness.mode is FreshnessMode.IMMUTABLE,
            count=self.count_reads,
        )

        # Names.
        self.tree = tree = Tree(
            index,
            source,
            freshness,
            metrics,
            nursery,
            deadline=config.source_deadline_seconds,
            threads=self.relay,
            peers=None if nodes is None else nodes.name_owners,
        )
        tree.recorder.on_moved.add(self._directory_moved)
        roots = [os.fsencode(root) for root in (config.mountpoint, config.source)]
        self.finder = Finder(tree, roots)

        # Open files, and who hears of opens.
        self.touch: Touch | None = None
        if config.touch_source_seconds:
            self.touch = Touch(source, cache, metrics, tree.known, config.touch_source_seconds)
        self.files = files = Files(
            tree,
            cache,
            self.copier,
            metrics,
            self.kernel,
            opens_known=not self.relay.free_opens,
            touch=self.touch,
        )
        self.ahead: Ahead | None = None
        if config.prefetch is PrefetchMode.AUTO and config.tiers:
            self.ahead = Ahead(tree, cache, jobs)
            files.on_open.add(self.ahead.note_open)
        self.xattrs = Xattrs(
            tree, files.residency, source, nursery, kernel_checks=config.allow_other
        )
        self.xattrs.on_plain.add(fuse_session.hooks.absent_add)

        # What is copied without being opened.
        self.warming = Warming(tree, self.xattrs, cache, jobs, nursery)
        self.scan = Scan(tree, jobs, jitter_seconds=config.prefetch_jitter_seconds)
        self.copy_idle = CopyIdle(jobs, self.scan, bootstrap.mount_ns)
        for tier in config.tiers:
            metrics.errors_of_tier(tier.path)
        self._kept = keep_counts(
            bootstrap.fds.counts,
            {
                "mount": metrics,
                "source": source.counters,
                "scan": self.scan,
                "lull": self.copy_idle,
            },
        )

        # The job's other nodes, as long as no thread of C runs.
        if nodes is not None and spans is not None:
            from monarchfs.worker.peering import Peering

            self.peering = Peering(
                nodes, tree, self.copier, cache, spans, config.share, fuse_session.hooks, nursery
            )

        # Small files, which threads of C open and read in the source, and the window of an order.
        self.misses = Misses(
            fuse_session.hooks,
            index.nodes,
            posix.opened_directory,
            files.only_remote,
            files.racy_opens.opens_until,
            shares=nodes is not None,
        )
        self.small_files = SmallFiles(
            self.misses,
            source,
            cache,
            jobs,
            self.copier.files,
            metrics,
            nursery,
            files.opened_elsewhere,
        )
        self.window = Window(
            NamedFiles(tree, self.finder),
            source,
            cache,
            jobs,
            self.misses,
            WindowSize(self.misses, config.window, config.source_threads, self.copier.governor),
            orders,
            evicts=config.evict is not EvictionPolicy.KEEP,
        )
        files.on_open.add(self.window.note_open)
        if self.relays:
            self.misses.start(
                posix.device,
                keeps=config.prefetch is not PrefetchMode.NONE,
                layouts=posix.has_layouts,
                nice=config.copy_nice,
            )
            fuse_session.hooks.misses_opened(_stats.take)
            self.copier.bind(self.small_files)
            if config.freshness.mode is FreshnessMode.OPEN:
                fuse_session.hooks.revalidate_start(posix.device)

        # Who answers the kernel: threads of C, then Python.
        self.interrupts = Interrupts(metrics)
        self.relay.begin(
            files,
            lasting_ns=freshness.ttl_ns,
            tells=cache.tracks or config.touch_source_seconds > 0,
            opens_here=not self.kernel_reads,
            misses=self.misses if self.relays else None,
            interrupts=self.interrupts,
        )
        self.passthrough = Passthrough(
            files, channel.send_now, metrics, self.relay, counts=self.kernel_reads
        )
        accounts.bind(self.passthrough)
        self.answerer = Answerer(
            tree,
            files,
            self.xattrs,
            self.interrupts,
            metrics,
            self.relay,
            table,
            self.passthrough,
            nursery,
        )
        fuse_session.on_request(self.answerer.answer, self.answerer.answer_known)
        fuse_session.on_interrupt(self.interrupts.on_interrupt)
        self.session = fuse_session.Session(
            bootstrap.init_fd,
            bootstrap.fds.fuse,
            relays=takes,
            free_opens=self.relay.free_opens,
            waiting_reads=config.source_threads if self.relays else 0,
            journal=bootstrap.fds.requests,
        )

    def _open_index(self, bootstrap: Bootstrap, posix: PosixSource) -> Index:
        """The index of this mount, which tells the threads of C and the peers of changes."""
        config, table = self.config, self.handle_table
        state_dir = f"/proc/self/fd/{bootstrap.fds.state}"
        on_change = OnChange(
            fuse_session.hooks.names_forget,
            fuse_session.hooks.names_forget_ino,
            self._replica_changed,
        )
        index = open_index(config, state_dir, posix.root.ino, on_change, table.beat)
        first = table.kernel_reads is None and not bootstrap.safe
        if first and forget_earlier_mounts(bootstrap, state_dir, index, posix):
            index = open_index(config, state_dir, posix.root.ino, on_change, table.beat)
        # Even if the index was lost, numbers that the kernel knows are not given to other files.
        if table.numbers:
            index.environment.skip_numbers_after(table.numbers)
        table.numbers = index.environment.next_id
        return index

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

    def count_reads(self) -> None:
        """Bring the counts of the C part's threads up to date."""
        for calls in count_threads(self.metrics):
            self.source.count_elsewhere(*calls)

    def count(self) -> None:
        """Bring the counts up to date, and store them. Called before they are shown."""
        self.count_reads()
        self.small_files.take_events()
        self.window.count(self.metrics)
        if self.peering is not None:
            self.peering.count(self.metrics)
        self._kept.save()


def _who_reads(table: HandleTable, config: Config, index: Index, *, passes: bool) -> bool:
    """Whether the kernel reads resident files itself: as the first worker decided."""
    if table.kernel_reads is None:
        table.kernel_reads = reads_by_kernel(config, index, passes=passes)
    return bool(table.kernel_reads)


def _job_nodes(bootstrap: Bootstrap, index: Index) -> JobNodes | None:
    """None: this mount shares nothing. Raises OperationError."""
    if bootstrap.peers is None or bootstrap.fds.peers is None:
        return None
    # Mounts that share nothing do not load libcurl.
    try:
        from monarchfs.worker.peering import JobNodes
    except ImportError as error:
        raise OperationError(
            f"peers need libcurl, which cannot be loaded: {error}: apt-get install libcurl4"
        ) from None

    return JobNodes(bootstrap.peers, bootstrap.fds.peers, index)
