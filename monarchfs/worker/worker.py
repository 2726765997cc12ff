"""The composition root of the worker: it builds the parts, connects them and runs their tasks."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import trio

# The session comes before anything that imports pyfuse3.
from monarchfs.fuse import session as fuse_session  # isort: skip
from monarchfs import control
from monarchfs.cache.cache import Cache
from monarchfs.config.model import Config, DataPath, PrefetchMode
from monarchfs.engine.misses import Misses
from monarchfs.fs.files import Files
from monarchfs.fs.find import Finder
from monarchfs.fs.freshness import NS, Freshness
from monarchfs.fs.load import Load
from monarchfs.fs.reasons import Reasons
from monarchfs.fs.refresh import Refresh
from monarchfs.fs.tree import Tree
from monarchfs.fs.why import Why
from monarchfs.fs.xattrs import Xattrs
from monarchfs.fuse.adapter import Adapter
from monarchfs.fuse.datapath import ResidentReplicas, kernel_reads
from monarchfs.fuse.handle_table import HandleTable
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.notify import Notifier
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.quick import Quick
from monarchfs.fuse.relay import Relay
from monarchfs.index import Index, set_aside
from monarchfs.metrics import Metrics
from monarchfs.metrics.kept import PersistentCounts
from monarchfs.prefetch.ahead import Ahead
from monarchfs.prefetch.arrivals import Arrivals
from monarchfs.prefetch.copier import Copier
from monarchfs.prefetch.lull import Lull
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.scan import Scan, read_list
from monarchfs.prefetch.touch import Touch
from monarchfs.prefetch.warm import Warming
from monarchfs.source.posix import PosixSource
from monarchfs.source.source import Source
from monarchfs.store.tier import Tier
from monarchfs.system.logs import FewOfEach
from monarchfs.system.low_priority import run_sync_at
from monarchfs.system.threads import run_sync
from monarchfs.types import (
    ROOT_INO,
    EvictionPolicy,
    FreshnessMode,
    IndexUnusable,
    OperationError,
)
from monarchfs.worker.bootstrap import Bootstrap, SupervisorChannel
from monarchfs.worker.commands import Commands
from monarchfs.worker.status import status

if TYPE_CHECKING:
    from monarchfs.exporter.run import Exporter
    from monarchfs.metrics import Histogram

log = logging.getLogger(__name__)

BACKGROUND_EXTRA = 8
"""Background threads for scanning, beside those that copy."""

SHUTDOWN_SYNC_SECONDS = 5.0
BEAT_SECONDS = 0.25


def _safe(config: Config) -> Config:
    """What is left of a mount whose workers died and died: the source."""
    return replace(
        config,
        tiers=(),
        prefetch=PrefetchMode.NONE,
        prefetch_list=None,
        index_file=None,
        scrub_bytes_per_second=0,
        touch_source_seconds=0.0,
    )


class Worker:
    """The composition root. Constant: its parts, each of which owns what it opens."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        channel: SupervisorChannel,
        nursery: trio.Nursery,
        log_filter: FewOfEach,
    ) -> None:
        config = _safe(bootstrap.config) if bootstrap.safe else bootstrap.config
        self.config = config
        self.restarts = bootstrap.restarts
        self.slots = HandleTable(bootstrap.handles_fd, fuse_session.hooks)
        # What is left in a journal, threads take up.
        journal = bootstrap.requests_fd
        relays = journal is not None or not bootstrap.safe
        self.slots.begin(fuse_session.RELAY_THREADS if relays else 0)
        self._leaving = False
        self._interrupted: list[int] = []
        self._mount_ns = bootstrap.mount_ns
        self._channel = channel
        self._log_filter = log_filter
        self._nursery = nursery
        self.metrics = Metrics()
        self._state_dir = f"/proc/self/fd/{bootstrap.state_fd}"
        posix = PosixSource(
            bootstrap.source_fd, root=bootstrap.source_root, has_layouts=self.slots.has_layouts
        )
        self.slots.has_layouts = posix.has_layouts
        self._root_ino = posix.root.ino
        self.index = self._open_index()
        self.kernel_reads = self._decide(bootstrap.passes)
        # Numbers that the kernel knows are not given to other files, also if the index was lost.
        if self.slots.numbers:
            self.index.skip_numbers_after(self.slots.numbers)
        self.slots.numbers = self.index.next_number
        # Where nobody waits for a copy or a scan, those who read go first.
        quietly = run_sync_at(config.copy_nice)
        self.source = Source(
            posix,
            demand_threads=config.source_threads,
            background_threads=config.copy_workers + BACKGROUND_EXTRA,
            deadline=config.source_deadline_seconds,
            behind=quietly,
        )
        tiers = [
            _open_tier(
                fd,
                spec.path,
                self.index.tier_number(spec.path),
                os.path.join(spec.path, spec.directory),
            )
            for spec, fd in zip(config.tiers, bootstrap.tier_fds, strict=not bootstrap.safe)
        ]
        free_opens = not self.kernel_reads and _free_opens(config)
        self.relay = Relay(fuse_session.hooks, self.metrics, free_opens=free_opens)
        self.relay.on_source_reads = self.source.count_elsewhere
        self.source.reads_elsewhere = lambda: self.relay.waits
        self.cache = Cache(
            self.index,
            tiers,
            [spec.size for spec in config.tiers],
            self.metrics,
            trio.CapacityLimiter(config.local_threads),
            nursery,
            eviction=config.evict,
            reserve_percent=config.reserve_percent,
            readers=self.relay,
            behind=quietly,
        )
        self.copier = Copier(
            self.source,
            self.cache,
            self.metrics,
            nursery,
            copy_workers=config.copy_workers,
            keeps=config.prefetch is not PrefetchMode.NONE,
            trusts_times=config.freshness.mode is FreshnessMode.IMMUTABLE,
            rate=config.prefetch_bytes_per_second,
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
        )
        self.tree.on_moved = self._directory_moved
        self.index.on_name = fuse_session.hooks.names_forget
        self.index.on_node = fuse_session.hooks.names_forget_ino
        self.kernel = Notifier(fuse_session.invalidate_inode, fuse_session.invalidate_entry)
        self.files = Files(self.tree, self.cache, self.copier, self.metrics, self.kernel)
        self.cache.noticed = self.files.noticed
        self.cache.forget_pages = self.kernel.invalidate_inode
        self.reasons = Reasons(self.files, self.cache, self.copier)
        finder = Finder(self.tree, [os.fsencode(config.mountpoint), os.fsencode(config.source)])
        self.xattrs = Xattrs(self.tree, self.files, self.reasons, self.source, nursery)
        self.warming = Warming(self.tree, self.xattrs, self.cache, self.copier, nursery)
        self.commands = Commands(
            self.tree,
            self.cache,
            Refresh(self.tree, self.kernel),
            self.warming,
            finder,
            Why(self.tree, self.cache, self.reasons, finder, lambda: self.source.responding),
            partial(_metrics, self),
        )
        self.scan = Scan(self.tree, self.copier, jitter_seconds=config.prefetch_jitter_seconds)
        self.load = Load(self.tree, bootstrap.mount_ns)
        self.lull = Lull(self.copier, self.scan, bootstrap.mount_ns)
        self._kept = self._keep_counts(bootstrap.counts_fd)
        self.interrupts = Interrupts(self.metrics)
        self.misses = Misses(
            fuse_session.hooks, self.index, posix.opened_directory, self.files.only_remote
        )
        self.arrivals = Arrivals(
            self.misses,
            self.source,
            self.cache,
            self.copier,
            self.metrics,
            nursery,
            self.files.opened_by_others,
        )
        if relays:
            self.misses.start(
                posix.device,
                keeps=config.prefetch is not PrefetchMode.NONE,
                layouts=posix.has_layouts,
                nice=config.copy_nice,
            )
            self.copier.small = self.arrivals
            self.relay.misses = self.misses
            self.tree.on_brought = self.relay.known
            self.relay.waiting = lambda: self.interrupts.waiting
        self.relay.begin(
            self.files,
            lasting_ns=freshness.ttl_ns,
            tells=self.cache.tracks or config.touch_source_seconds > 0,
            opens_here=not self.kernel_reads,
        )
        self.passthrough = Passthrough(
            self.files, channel.send_now, self.metrics, self.relay, counts=self.kernel_reads
        )
        self.cache.let_go = self.passthrough.let_go
        self.cache.take_back = self.passthrough.take_back
        self.cache.stored = self.passthrough.stored
        self.adapter = Adapter(
            self.tree,
            self.files,
            self.xattrs,
            self.interrupts,
            self.metrics,
            self.relay,
            self.slots,
            self.passthrough,
            fuse_session.back_open,
            fuse_session.current_request,
            fuse_session.current_node,
        )
        current_request = fuse_session.current_request
        quick = Quick(
            *(
                self.tree,
                self.files,
                self.adapter.handles,
                self.relay,
                self.metrics,
                current_request,
                self.passthrough,
                self.xattrs,
            )
        )
        fuse_session.on_request(quick.answer)
        self.session = fuse_session.Session(
            self.adapter,
            bootstrap.init_fd,
            bootstrap.fuse_fd,
            relays=relays,
            free_opens=self.relay.free_opens,
            waiting_reads=config.source_threads,
            journal=journal,
        )
        if journal is not None:
            self.adapter.answered_soon = fuse_session.answered_soon
        self._exporter = _exporter(self, bootstrap.metrics_fd)
        fuse_session.on_interrupt(self.interrupts.on_interrupt)

    def _decide(self, passes: bool) -> bool:
        """Whether resident files are for the kernel to read; ``passes``: it may come to that. It
        is decided once a mount: the kernel goes by the first answer to an open."""
        if self.slots.kernel_reads is None:
            totals = self.index.tier_totals().values()
            dataset = ResidentReplicas(
                sum(tier.resident for tier in totals), sum(tier.allocated_bytes for tier in totals)
            )
            self.slots.kernel_reads = passes and (
                self.config.data_path is DataPath.PASSTHROUGH
                or kernel_reads(dataset, free_opens=_free_opens(self.config))
            )
        return bool(self.slots.kernel_reads)

    def _open_index(self) -> Index:
        """The index; one that cannot be used is set aside and a new one made."""
        try:
            return self._open_index_of_root()
        except IndexUnusable as exc:
            aside = set_aside(self._state_dir)
            told = f"{exc}: kept as {aside}, starting with an empty one"
            log.warning("%s", told.replace(self._state_dir, self.config.state_dir))
            return self._open_index_of_root()

    def _open_index_of_root(self) -> Index:
        # A commit that a killed process made is in the page cache, whole: that index is sound.
        index = Index.open(self._state_dir, source_id=self.config.dataset_id, trust_after_kill=True)
        try:
            known = index.node(ROOT_INO)
            if known is not None and known.stat is not None and known.stat.ino != self._root_ino:
                raise IndexUnusable("the index is of another source: its root is another directory")
        except IndexUnusable:
            index.close(clean=False)
            raise
        return index

    def _keep_counts(self, descriptor: int | None) -> PersistentCounts:
        """Goes on from what the worker before has counted."""
        for tier in self.config.tiers:
            self.metrics.errors_of_tier(tier.path)
        parts = {
            "mount": self.metrics,
            "source": self.source.counters,
            "scan": self.scan,
            "lull": self.lull,
        }
        kept = PersistentCounts(descriptor, parts)
        try:
            kept.restore()
        except ValueError as error:
            log.warning("counting from 0 again: %s", error)
        return kept

    @property
    def requests_waiting(self) -> int:
        """How many wait for the source, or for a tier."""
        return self.interrupts.waiting + self.misses.waiting

    def _directory_moved(self, now_ns: int) -> None:
        self.slots.note_moved(now_ns)
        self.misses.forget_all()
        fuse_session.hooks.names_forget_all()

    def count(self) -> None:
        """Bring the counts up to date, and keep them: before they are shown to anybody."""
        self.relay.count()
        self.arrivals.look()
        self._kept.save()

    async def start(self) -> None:
        """Everything that must be so before the first request. Raises OSError, MonarchError."""
        if self.restarts:
            self._take_over()
        self.cache.load(_boot_id(), self._take_over_files)
        # An earlier worker of this mount has asked; the source may hang by now.
        if not self.restarts or self.index.node(ROOT_INO) is None:
            await self.tree.load_root()

    def _take_over(self) -> None:
        """What an earlier worker knew and no record tells is taken to be so."""
        self._interrupted = self.index.under_way()
        self.tree.take_over(self.slots.moved_ns)
        self.files.take_over(self._mount_ns, time.time_ns())

    def _take_over_files(self) -> None:
        if handles := self.adapter.take_over():
            log.info("took over %d open files", handles)

    async def beat(self) -> None:
        """Show the supervisor that the event loop turns, and keep what was counted, for ever."""
        while True:
            self.slots.beat()
            self.count()
            self._log_filter.tell()
            await trio.sleep(BEAT_SECONDS)

    async def listen(self) -> None:
        """Do what the supervisor says until it says stop or is gone."""
        while True:
            received = await self._channel.receive()
            if received is None:
                log.warning("the supervisor is gone")
                break
            message, fds = received
            match message.get("do"):
                case "serve":
                    self.passthrough.begin(message["backing_ids"] if self.kernel_reads else 0)
                    self.session.hand_over()
                    self._nursery.start_soon(self._begin_background)
                    await self._channel.send({"event": "ready"})
                case "status":
                    answer = {"number": message["number"], "status": status(self)}
                    await self._channel.send({"event": "status", **answer})
                case "backed":
                    self.passthrough.answered(
                        *(message["number"], message["ids"]),
                        *(message.get("error", 0), message.get("reason", "")),
                    )
                case "client":
                    self._nursery.start_soon(self._client, message["request"], fds)
                case "again":
                    fuse_session.take_again()
                case "stop":
                    break
                case "leave":
                    self._leaving = True
                    break
                case unknown:
                    log.warning("unknown message from the supervisor: %r", unknown)
        self._nursery.cancel_scope.cancel()

    async def _begin_background(self) -> None:
        config = self.config
        self._nursery.start_soon(self.kernel.run)
        self._nursery.start_soon(self.passthrough.run)
        self._nursery.start_soon(self.relay.run)
        self._nursery.start_soon(self.relay.walk)
        if self.relay.misses is not None:
            self._nursery.start_soon(self.arrivals.run)
        self._nursery.start_soon(self.adapter.implicit.run)
        self._nursery.start_soon(self.copier.run)
        self._nursery.start_soon(self.cache.watch)
        self._nursery.start_soon(self.cache.sync_loop)
        self._nursery.start_soon(self.cache.purge, self._mount_ns)
        self._nursery.start_soon(_measure_delay, self.metrics.event_loop_delay)
        if self._exporter is not None:
            self._nursery.start_soon(self._exporter.run)
        if config.scrub_bytes_per_second:
            self._nursery.start_soon(self.cache.scrub, config.scrub_bytes_per_second)
        if config.touch_source_seconds:
            self._nursery.start_soon(self._touch().run)
        if not self.restarts:
            self.warming.forget()
        elif config.tiers:
            self.warming.resume()
        for ino in self._interrupted:
            # Behind what is opened: some of these were being removed when the other worker died.
            self.copier.want(ino, Priority.SCANNED)
        if config.index_file is not None:
            # Before the scan, which then finds what it looks for.
            trusted = config.allow_other  # the kernel goes by the modes in it then
            await self.load.run(config.index_file, self._root_ino, trusted=trusted)
        if config.prefetch is PrefetchMode.AUTO and config.tiers:
            ahead = Ahead(self.tree, self.cache, self.copier, self.relay.seen)
            self.files.counted = ahead.opened
            self._nursery.start_soon(ahead.run)
        elif config.prefetch is PrefetchMode.ALL:
            self._nursery.start_soon(self.scan.everything)
        elif config.prefetch is PrefetchMode.FILE and config.prefetch_list is not None:
            roots = [os.fsencode(root) for root in (config.mountpoint, config.source)]
            try:
                paths = await run_sync(read_list, config.prefetch_list, roots)
            except OSError as error:  # it was there when this was mounted
                log.warning("nothing is prefetched: %s: %s", config.prefetch_list, error.strerror)
                return
            self._nursery.start_soon(self.scan.listed, paths)

    def _touch(self) -> Touch:
        touch = Touch(
            self.source,
            self.cache,
            self.metrics,
            self.tree.place,
            self.files.open_now,
            self.config.touch_source_seconds,
        )
        self.files.opened_locally = touch.opened
        return touch

    async def _client(self, request: dict[str, Any], fds: list[int]) -> None:
        """Answer one control connection. The supervisor has checked who it is."""
        (fd,) = fds
        with trio.socket.from_stdlib_socket(socket.socket(fileno=fd)) as connection:
            stream, command = trio.SocketStream(connection), request["command"]
            error = f"unknown command {command!a}"
            if self.commands.knows(command):
                try:
                    await self.commands.answer(request, stream)
                    return
                except Exception:  # a client's question must not cost the job its mount
                    log.exception("the command %r failed", command)
                    error = "it failed unexpectedly: the worker's log says more"
            with suppress(OSError, trio.BrokenResourceError):  # the client may be gone
                await stream.send_all(control.encode_error(error))

    async def close(self) -> None:
        """Keep what was copied, within a bounded time."""
        with trio.CancelScope(shield=True), trio.move_on_after(SHUTDOWN_SYNC_SECONDS):
            await self.copier.put_aside_all()
            if not self._leaving:  # else somebody waits, and the machine goes on
                await self.cache.sync()
        self.count()
        self.cache.close()
        self.index.close(clean=not self._leaving)


def _free_opens(config: Config) -> bool:
    """Whether the kernel may open files without asking: the same for all workers of a mount, as it
    does not begin to ask again. Not where somebody has to hear of each open: the source, or who
    goes by what was used, as files that the kernel has in memory are used unseen."""
    return (
        config.freshness.mode is FreshnessMode.IMMUTABLE
        and config.evict is EvictionPolicy.KEEP
        and not config.touch_source_seconds
    )


def _exporter(worker: Worker, descriptor: int | None) -> Exporter | None:
    if descriptor is None:
        return None
    # Mounts without metrics are not to pay for the import.
    from monarchfs.exporter.run import Exporter
    from monarchfs.worker.metric_values import values_now

    return Exporter(partial(values_now, worker), descriptor)


def _metrics(worker: Worker) -> dict[str, Any]:
    """What the exporter of the node asks for."""
    from monarchfs.exporter.wire import encode
    from monarchfs.worker.metric_values import values_now

    return encode(values_now(worker))


async def _measure_delay(delay: Histogram) -> None:
    while True:
        due = perf_counter_ns() + NS
        await trio.sleep(1)
        delay.observe(max(0, perf_counter_ns() - due))


def _boot_id() -> bytes:
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().strip()


def _open_tier(fd: int, path: str, number: int, directory: str) -> Tier:
    """Raises OperationError for one in which something lies that is not ours."""
    try:
        return Tier(fd, path, number, directory=directory)
    except OSError as exc:
        place = os.path.normpath(os.path.join(directory, exc.filename or ""))
        raise OperationError(
            f"tier {path}: {place}: {exc.strerror}: remove it, or name another --tier"
        ) from None
