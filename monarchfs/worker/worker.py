"""The worker's tasks: it takes over, serves, obeys the supervisor, and ends."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

import trio

# The session comes before anything that imports pyfuse3.
from monarchfs.fuse import session as fuse_session  # isort: skip
from monarchfs.cache.cache import purge
from monarchfs.cache.scrub import Scrub
from monarchfs.config.model import PrefetchMode
from monarchfs.metadata.freshness import NS
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.scan import read_list
from monarchfs.system.logs import FewOfEach
from monarchfs.system.threads import run_sync
from monarchfs.types import ROOT_INO
from monarchfs.worker.announcing import Announcing
from monarchfs.worker.bootstrap import Bootstrap, SupervisorChannel
from monarchfs.worker.commands import Commands, answer_client
from monarchfs.worker.composition import Composition
from monarchfs.worker.kept_hints import KeptHints
from monarchfs.worker.opening import boot_id
from monarchfs.worker.recording import Recordings
from monarchfs.worker.status import status

if TYPE_CHECKING:
    from monarchfs.exporter.http import Exporter
    from monarchfs.metrics import Histogram

log = logging.getLogger(__name__)

SHUTDOWN_SYNC_SECONDS = 5.0
BEAT_SECONDS = 0.25


class Worker:
    """Constant: ``parts``, the file system; who answers people. Changing: the files that were being
    copied when an earlier worker ended; whether a later worker waits for this one's end."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        channel: SupervisorChannel,
        nursery: trio.Nursery,
        log_filter: FewOfEach,
    ) -> None:
        self.parts = parts = Composition(bootstrap, channel, nursery)
        self._channel = channel
        self._nursery = nursery
        self._log_filter = log_filter
        self._said = KeptHints(f"/proc/self/fd/{bootstrap.fds.state}", bootstrap.mount_ns)
        window = parts.window if parts.relays else None
        self._announcing = Announcing(window, parts.cache.accounts, self._said)
        recordings = Recordings(fuse_session.hooks, parts)
        self._commands = Commands(parts, recordings, self._announcing)
        self._exporter = _exporter(parts, bootstrap.fds.metrics)
        self._interrupted: list[int] = []
        self._leaving = self._unmounted = False

    async def start(self) -> None:
        """Do everything that comes before the first request. Raises OSError, MonarchError."""
        if self.parts.restarts:
            self._take_over()
        self.parts.cache.load(boot_id(), self._take_over_files)
        # An earlier worker of this mount has asked; the source may hang by now.
        if not self.parts.restarts or self.parts.index.nodes.node(ROOT_INO) is None:
            await self.parts.tree.attributes.load_root()

    def _take_over(self) -> None:
        """For what only an earlier worker knew, assume the worst."""
        parts = self.parts
        self._interrupted = parts.index.replicas.under_way()
        parts.tree.recorder.take_over(parts.handle_table.moved_ns)
        parts.files.racy_opens.take_over(parts.mount_ns, time.time_ns())

    def _take_over_files(self) -> None:
        if handles := self.parts.answerer.take_over():
            log.info("took over %d open files", handles)

    async def _beat(self) -> None:
        """Show the supervisor that the event loop runs, and store the counts, for ever."""
        while True:
            self.parts.handle_table.beat()
            self.parts.count()
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
                    self.parts.passthrough.limit_ids(
                        message["backing_ids"] if self.parts.kernel_reads else 0
                    )
                    self.parts.session.hand_over()
                    self._nursery.start_soon(self._beat)
                    self._nursery.start_soon(self._begin_background)
                    await self._channel.send({"event": "ready"})
                case "status":
                    answer = {"number": message["number"], "status": status(self.parts)}
                    await self._channel.send({"event": "status", **answer})
                case "backed":
                    self.parts.passthrough.answered(
                        message["number"],
                        message["ids"],
                        message.get("error", 0),
                        message.get("reason", ""),
                    )
                case "client" if not fds:  # no descriptor was left for it (recv_fds, EMFILE)
                    log.warning("a request is not answered: the limit of open files is reached")
                case "client":
                    (fd,) = fds
                    self._nursery.start_soon(answer_client, self._commands, message["request"], fd)
                case "again":
                    fuse_session.hooks.take_again()
                case "stop":
                    self._unmounted = True
                    break
                case "leave":
                    self._leaving = True
                    break
                case unknown:
                    log.warning("unknown message from the supervisor: %r", unknown)
        self._nursery.cancel_scope.cancel()

    async def _begin_background(self) -> None:
        parts, start = self.parts, self._nursery.start_soon
        config = parts.config
        start(parts.kernel.run)
        start(parts.passthrough.run)
        start(parts.relay.run)
        start(parts.relay.walk)
        start(parts.answerer.handleless.run)
        # Before copies take the room of what is to stay.
        await self._announcing.resume_weights()
        if parts.relay.misses is not None:
            start(parts.small_files.run)
            start(parts.window.run)
            start(self._announcing.resume)
        start(parts.copier.run)
        start(parts.cache.watch)
        start(parts.cache.accounts.sync_loop)
        start(purge, parts.index, parts.mount_ns)
        start(_measure_delay, parts.metrics.event_loop_delay)
        if parts.peering is not None:
            start(parts.peering.run)
        if self._exporter is not None:
            start(self._exporter.run)
        if config.scrub_bytes_per_second:
            start(Scrub(parts.cache.accounts, config.scrub_bytes_per_second).run)
        if parts.touch is not None:
            start(parts.touch.run)
        if not parts.restarts:
            parts.warming.forget()
        elif config.tiers:
            parts.warming.resume()
        for ino in self._interrupted:
            parts.copier.jobs.want(ino, Priority.SCANNED)
        if parts.ahead is not None:
            start(parts.ahead.run)
        elif config.prefetch is PrefetchMode.ALL:
            start(parts.scan.everything)
        elif config.prefetch is PrefetchMode.FILE and config.prefetch_list is not None:
            roots = [os.fsencode(root) for root in (config.mountpoint, config.source)]
            try:
                paths = await run_sync(read_list, config.prefetch_list, roots)
            except OSError as error:  # it was there when this was mounted
                log.warning("nothing is prefetched: %s: %s", config.prefetch_list, error.strerror)
                return
            start(parts.scan.listed, paths)

    async def serve(self) -> None:
        """Until the kernel has no mount of it any more."""
        await self.parts.session.serve()
        self._unmounted = True

    async def close(self) -> None:
        """Store what was copied, within a bounded time."""
        if self._unmounted:
            self._said.clear()
        with trio.CancelScope(shield=True), trio.move_on_after(SHUTDOWN_SYNC_SECONDS):
            await self.parts.copier.suspend()
            if not self._leaving:  # else somebody waits, and the machine goes on
                await self.parts.cache.accounts.sync()
        self.parts.count()
        self.parts.cache.close()
        self.parts.index.close(clean=not self._leaving)


def _exporter(parts: Composition, descriptor: int | None) -> Exporter | None:
    if descriptor is None:
        return None
    # Mounts without metrics do not import this.
    from monarchfs.exporter.http import Exporter
    from monarchfs.worker.metric_values import values_now

    return Exporter(partial(values_now, parts), descriptor)


async def _measure_delay(delay: Histogram) -> None:
    while True:
        due = perf_counter_ns() + NS
        await trio.sleep(1)
        delay.observe(max(0, perf_counter_ns() - due))
