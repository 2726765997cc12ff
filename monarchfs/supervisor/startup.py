"""A new worker's steps from its start until it serves. Nothing here waits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from monarchfs.fuse.connection import FuseConnection
from monarchfs.fuse.protocol import RESEND, ProtocolError, parse_init_reply
from monarchfs.supervisor.backing import BackingFiles
from monarchfs.supervisor.launch import WorkerProcess
from monarchfs.supervisor.peer_server import PeerServer

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""So long those before it may take to stop running."""

SOON_SECONDS = 0.01
_LARGEST_INIT = 1 << 18


class Mounted(NamedTuple):
    """The mount: its descriptor, its ``connection``, the kernel's FUSE_INIT.
    ``journal``: the kernel does not repeat requests that a worker took; the next one finds them in
    shared memory. ``vitals`` are the worker's (beats, answered, stuck_since), from shared memory;
    ``waiting`` is the number of waiting requests, None if that is not known.
    ``peer_server``: nginx, if the mount shares with peers."""

    fuse: int
    connection: FuseConnection
    init_request: bytes
    journal: bool
    start_seconds: float
    vitals: Callable[[], tuple[int, int, int]]
    waiting: Callable[[], int | None]
    mark_suspect: Callable[[], None]
    backing: BackingFiles
    peer_server: PeerServer | None = None

    def resend(self) -> None:
        """Have the kernel repeat requests that were taken and not answered, if it can."""
        if self.journal:
            return
        try:
            os.write(self.fuse, RESEND)
        except OSError as error:  # unmounted meanwhile, as the owner will see
            log.warning("the kernel does not hand requests out again: %s", error.strerror)


class WorkerOwner(Protocol):
    """Who owns the worker: the supervisor, with its loop."""

    def watch(self, what: Any, then: Callable[[], None]) -> None:
        """Call ``then`` whenever ``what`` is readable."""

    def unwatch(self, what: Any) -> None:
        """No longer; nothing where it is not watched."""

    def reported(self, number: int, report: Mapping[str, Any]) -> None:
        """The worker answered a question."""

    def silenced(self) -> None:
        """The worker will not answer, or its answer was not understood."""

    def deserted(self, why: str) -> None:
        """No worker can serve the mount."""


class Startup:
    """1. The worker's libfuse answers FUSE_INIT; the kernel has an answer already, so this one is
    dropped.

    2. All earlier workers must have stopped: nobody would answer requests that they take now. The
    kernel is asked to repeat those that they took.

    3. The worker is told to serve, and reports that it does.

    Changing: how far that is; ``was_hurried``: earlier workers still ran; ``serves``; ``failed``,
    why it will not serve.
    """

    def __init__(
        self,
        worker: WorkerProcess,
        mounted: Mounted,
        owner: WorkerOwner,
        all_quiet: Callable[[], bool],
    ) -> None:
        self.serves = False
        self.was_hurried = False
        self.failed: str | None = None
        self._worker = worker
        self._mounted = mounted
        self._owner = owner
        self._all_quiet = all_quiet
        now = time.monotonic()
        self._until = now + mounted.start_seconds
        self._quiet_until: float | None = None
        owner.watch(worker.init, self._on_init)
        worker.init.setblocking(False)
        try:
            worker.init.send(mounted.init_request)
        except OSError as error:
            log.debug("the new worker takes no FUSE_INIT: %s", error)  # it is dead, as will be seen

    @property
    def next_tick(self) -> float:
        """A time.monotonic()."""
        return self._until if self._quiet_until is None else time.monotonic() + SOON_SECONDS

    def tick(self, now: float) -> None:
        """Go on, if it is time."""
        quiet = self._quiet_until is not None and self._all_quiet()
        if self._quiet_until is not None and (quiet or now >= self._quiet_until):
            self._quiet_until, self.was_hurried = None, not quiet
            self._mounted.resend()
            self._mounted.backing.close_unused()
            ids = self._mounted.backing.most
            self._worker.channel.send({"do": "serve", "backing_ids": ids})
        elif now >= self._until and self.failed is None:
            self.failed = "did not become ready in time"

    def _on_init(self) -> None:
        try:
            reply = self._worker.init.recv(_LARGEST_INIT)
        except BlockingIOError:
            return
        except OSError:
            reply = b""
        self._owner.unwatch(self._worker.init)
        if not reply:
            return  # it is going to be gone
        try:
            parse_init_reply(reply)
        except ProtocolError as error:
            self.failed = f"answers FUSE_INIT wrongly: {error}"
            return
        now = time.monotonic()
        self._quiet_until = now + QUIET_SECONDS
        self.tick(now)
