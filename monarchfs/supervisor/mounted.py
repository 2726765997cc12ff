"""A mount, as its supervisor has it: what all of its workers get, and how one is started.

A worker is told everything by a JSON document in a memory file and by inherited descriptors; it
gets a clean environment and, where this process is root, the identity of the mount's user.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from monarchfs.config.model import PROTOCOL_VERSION
from monarchfs.fuse.connection import FuseConnection
from monarchfs.fuse.handle_table import read_vitals
from monarchfs.fuse.protocol import RESEND, ProtocolError, amend_init_reply
from monarchfs.supervisor.backing import BackingFiles
from monarchfs.supervisor.channel import WorkerChannel, refuse_descriptors
from monarchfs.supervisor.directories import WORKER_LOG, last_log_line, mark_suspect, open_log
from monarchfs.supervisor.launch import WorkerProcess, spawn_as
from monarchfs.supervisor.messages import printable
from monarchfs.supervisor.peering import PeerServer
from monarchfs.supervisor.port import stop_listening
from monarchfs.supervisor.takeover import Handover
from monarchfs.supervisor.worker_logging import WorkerLogging, WorkerOutput
from monarchfs.system.limits import explained
from monarchfs.types import OperationError

log = logging.getLogger(__name__)


class Mounted:
    """Constant: the mount's ``handover``, its ``connection`` and its ``backing`` files; the command
    of a worker; ``peer_server``: nginx, if the mount shares with peers; ``output``: what workers
    write to standard error in the foreground, None where that goes to the log in the state
    directory. ``journal``: the kernel does not repeat requests that a worker took; the next one
    finds them in shared memory."""

    def __init__(
        self,
        handover: Handover,
        command: Sequence[str],
        connection: FuseConnection,
        backing: BackingFiles,
        peer_server: PeerServer | None,
        output: WorkerOutput | None,
    ) -> None:
        self.handover = handover
        self.config = handover.config
        self.fuse = handover.descriptors.fuse
        self.journal = handover.descriptors.requests is not None
        self.connection = connection
        self.backing = backing
        self.peer_server = peer_server
        self.output = output
        self.worker_log = WorkerLogging()
        self._command = command

    def resend(self) -> None:
        """Have the kernel repeat requests that were taken and not answered, if it can."""
        if self.journal:
            return
        try:
            os.write(self.fuse, RESEND)
        except OSError as error:  # unmounted meanwhile, as the supervisor will see
            log.warning("the kernel does not hand requests out again: %s", error.strerror)

    def answer_init(self, reply: bytes) -> None:
        """Answers the kernel's FUSE_INIT with a worker's ``reply``, amended. Raises OperationError,
        and OSError with the kernel's refusal."""
        request, acl = self.handover.init_request, self.config.allow_other
        try:
            depth = self.handover.stack_depth
            amended = amend_init_reply(request, reply, posix_acl=acl, stack_depth=depth)
        except ProtocolError as error:
            raise OperationError(f"FUSE_INIT failed: {error}") from None
        os.write(self.fuse, amended)
        self.backing.try_passthrough()

    def cannot_serve(self, why: str) -> OperationError:
        """For who mounts, with the last words of the worker."""
        words = ""
        if not self.config.foreground:
            state = self.handover.descriptors.state
            words = printable(last_log_line(state, WORKER_LOG, self.config.user))
        said = f" (its last words: {words})" if words else ""
        return OperationError(f"cannot serve {self.config.source}: {why}{said}")

    def vitals(self) -> tuple[int, int, int]:
        """The worker's (beats, answered, stuck_since), from shared memory."""
        return read_vitals(self.handover.descriptors.handles)

    def waiting(self) -> int | None:
        """How many requests wait; where the kernel does not show that, 1 if one was not taken, and
        None if that is not known."""
        count = self.connection.waiting
        if count is not None:
            return count
        poll = select.poll()
        poll.register(self.fuse, select.POLLIN)
        return 1 if poll.poll(0) else None

    def mark_suspect(self) -> None:
        """The next worker is to check the index (see `directories.mark_suspect`)."""
        mark_suspect(self.handover.descriptors.state, self.config.user)

    def release(self) -> None:
        """Let go of what was locked, and of the port for metrics."""
        for lock in self.handover.locks:
            os.close(lock)
        if (metrics := self.handover.descriptors.metrics) is not None:
            stop_listening(socket.socket(fileno=metrics))

    def start_worker(
        self, *, restarts: int, safe: bool = False, waits: bool = False
    ) -> WorkerProcess:
        """Starts a worker, after ``restarts`` others; raises OperationError if its program cannot
        be run, or not now. A ``safe`` one has nothing but the source. One that ``waits`` says when
        it is loaded, and touches nothing before it is told to begin."""
        how = {"restarts": restarts, "safe": safe, "waits": waits}
        try:
            if self.output is not None:
                return self._start(how, self.output.end)
            # What the dead said is kept.
            state, user = self.handover.descriptors.state, self.config.user
            stderr = open_log(state, WORKER_LOG, user, truncate=not restarts)
            try:
                return self._start(how, stderr)
            finally:
                os.close(stderr)
        except OSError as error:
            raise OperationError(f"cannot start a worker: {explained(error)}") from None

    def _start(self, how: Mapping[str, Any], stderr: int) -> WorkerProcess:
        our_init, their_init = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        our_channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        refuse_descriptors(our_init)
        fds = asdict(self.handover.descriptors)
        fds |= {"init": their_init.fileno(), "channel": their_channel.fileno()}
        bootstrap = {
            "speaks": PROTOCOL_VERSION,
            "config": self.config.to_json(),
            "fds": fds,
            "mount_ns": self.handover.mount_ns,
            "source_root": self.handover.source_root,
            "passes": self.handover.stack_depth > 0,
            "peers": self.peer_server and self.peer_server.peers.to_message(),
            **how,
        }
        memory = os.memfd_create("monarchfs-bootstrap")
        single = (fd for name, fd in fds.items() if name != "tiers" and fd is not None)
        inherited = [memory, *self.handover.descriptors.tiers, *single]
        try:
            os.write(memory, json.dumps(bootstrap).encode())
            os.lseek(memory, 0, os.SEEK_SET)
            # The mount point is for people who look at processes (ps(1)).
            words = [*self._command, "--bootstrap-fd", str(memory), self.config.mountpoint]
            process = spawn_as(self.config.user, words, inherited, stdout=stderr, stderr=stderr)
        except BaseException:
            our_init.close()
            our_channel.close()
            raise
        finally:
            os.close(memory)
            their_init.close()
            their_channel.close()
        return WorkerProcess(process, WorkerChannel(our_channel, self.worker_log), our_init)
