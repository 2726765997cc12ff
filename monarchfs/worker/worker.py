"""The worker's tasks: it takes over, serves, obeys the supervisor, and ends."""

from __future__ import annotations

import logging
import os
import time
from time import perf_counter_ns
from typing import TYPE_CHECKING

import trio

# The session comes before anything that imports pyfuse3.
from monarchfs.fuse import session as fuse_session  # isort: skip
from monarchfs.cache.cache import purge
from monarchfs.config.model import PrefetchMode
from monarchfs.metadata.freshness import NS
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.scan import read_list
from monarchfs.system.logs import FewOfEach
from monarchfs.system.threads import run_sync
from monarchfs.types import ROOT_INO
from monarchfs.worker.bootstrap import Bootstrap, SupervisorChannel
from monarchfs.worker.commands import answer_client
from monarchfs.worker.opening import boot_id
from monarchfs.worker.parts import Parts
from monarchfs.worker.status import status

if TYPE_CHECKING:
    from monarchfs.metrics import Histogram

log = logging.getLogger(__name__)

SHUTDOWN_SYNC_SECONDS = 5.0
BEAT_SECONDS = 0.25


class Worker(Parts):
    """See ``Parts``. Changing: the files that were being copied when an earlier worker ended;
    whether a later worker waits for this one's end."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        channel: SupervisorChannel,
        nursery: trio.Nursery,
        log_filter: FewOfEach,
    ) -> None:
        super().__init__(bootstrap, channel, nursery)
        self._log_filter = log_filter
        self._interrupted: list[int] = []
        self._leaving = False

    async def start(self) -> None:
        """Do everything that comes before the first request. Raises OSError, MonarchError."""
        if self.restarts:
            self._take_over()
        self.cache.load(boot_id(), self._take_over_files)
        # An earlier worker of this mount has asked; the source may hang by now.
        if not self.restarts or self.index.nodes.node(ROOT_INO) is None:
            await self.tree.attributes.load_root()

    def _take_over(self) -> None:
        """For what only an earlier worker knew, assume the worst."""
        self._interrupted = self.index.replicas.under_way()
        self.tree.recorder.take_over(self.handle_table.moved_ns)
        self.files.racy_opens.take_over(self._mount_ns, time.time_ns())

    def _take_over_files(self) -> None:
        if handles := self.adapter.take_over():
            log.info("took over %d open files", handles)

    async def beat(self) -> None:
        """Show the supervisor that the event loop runs, and store the counts, for ever."""
        while True:
            self.handle_table.beat()
            self.count()
            self._log_filter.report()
            await trio.sleep(BEAT_SECONDS)

    async def listen(self) -> None:
        """Obey the supervisor until it says stop or is gone."""
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
                        message["number"],
                        message["ids"],
                        message.get("error", 0),
                        message.get("reason", ""),
                    )
                case "client" if not fds:  # no descriptor was left for it (recv_fds, EMFILE)
                    log.warning("a request is not answered: the limit of open files is reached")
                case "client":
                    (fd,) = fds
                    self._nursery.start_soon(answer_client, self.commands, message["request"], fd)
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
        if (weights := self.said.weights()) is not None:
            self.cache.accounts.weigh(list(weights.items()), replace=True)
        self.cache.accounts.on_weights.add(self.said.keep_weights)
        self._nursery.start_soon(self.kernel.run)
        self._nursery.start_soon(self.passthrough.run)
        self._nursery.start_soon(self.relay.run)
        self._nursery.start_soon(self.relay.walk)
        if self.relay.misses is not None:
            self._nursery.start_soon(self.arrivals.run)
            self._nursery.start_soon(self.window.run)
            self._nursery.start_soon(self.announcing.resume)
        self._nursery.start_soon(self.adapter.handleless.run)
        self._nursery.start_soon(self.copier.run)
        self._nursery.start_soon(self.cache.watch)
        self._nursery.start_soon(self.cache.accounts.sync_loop)
        self._nursery.start_soon(purge, self.index, self._mount_ns)
        self._nursery.start_soon(_measure_delay, self.metrics.event_loop_delay)
        if self.peering is not None:
            self._nursery.start_soon(self.peering.run)
        if self._exporter is not None:
            self._nursery.start_soon(self._exporter.run)
        if config.scrub_bytes_per_second:
            self._nursery.start_soon(self.cache.scrub, config.scrub_bytes_per_second)
        if self.touch is not None:
            self._nursery.start_soon(self.touch.run)
        if not self.restarts:
            self.warming.forget()
        elif config.tiers:
            self.warming.resume()
        for ino in self._interrupted:
            self.copier.jobs.want(ino, Priority.SCANNED)
        if config.index_file is not None:
            # Before the scan, which then finds what it looks for.
            trusted = config.allow_other  # the kernel goes by the modes in it then
            await self.load.run(config.index_file, self._root_ino, trusted=trusted)
        if self.ahead is not None:
            self._nursery.start_soon(self.ahead.run)
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

    async def close(self) -> None:
        """Store what was copied, within a bounded time."""
        with trio.CancelScope(shield=True), trio.move_on_after(SHUTDOWN_SYNC_SECONDS):
            await self.copier.suspend()
            if not self._leaving:  # else somebody waits, and the machine goes on
                await self.cache.accounts.sync()
                self.said.clear()
        self.count()
        self.cache.close()
        self.index.close(clean=not self._leaving)


async def _measure_delay(delay: Histogram) -> None:
    while True:
        due = perf_counter_ns() + NS
        await trio.sleep(1)
        delay.observe(max(0, perf_counter_ns() - due))
