"""The supervisor's loop over a mount that serves: control socket, worker, signals, unmounting."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from monarchfs.control import messages
from monarchfs.fuse.connection import is_dead
from monarchfs.fuse.unmount import Unmount, Unmounted
from monarchfs.supervisor import takeover
from monarchfs.supervisor.clients import MOST_CLIENTS, Clients, reply
from monarchfs.supervisor.daemon import ending_signals
from monarchfs.supervisor.failover import Failover, Phase
from monarchfs.supervisor.mounted import Mounted
from monarchfs.supervisor.notify_systemd import ServiceManager
from monarchfs.supervisor.registration import ControlSocket
from monarchfs.supervisor.takeover import Standbys
from monarchfs.system.limits import explained
from monarchfs.types import MonarchError, UsageError

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_FAILED_SECONDS = 0.1
_STOP_SECONDS = 10.0
_DEAD_WORKER_SECONDS = 1.0
_WORKER_END_SECONDS, _WORKER_END_SHARE = 2.5, 0.2
"""What is kept of the time for an unmount, at most, for the worker's end."""
_SYNC_SECONDS = 5.5
"""How long a worker that unmounts may take to make its copies durable: what it allows itself
(SHUTDOWN_SYNC_SECONDS), and a moment. One that is killed meanwhile keeps the tier's file system
busy for as long as the kernel takes to write."""
_DEFAULT_UMOUNT_SECONDS = 30.0
_DEFAULT_RESTART_SECONDS = 30.0
COMMANDS = ("status", "config", "umount", "restart", "change_peers", takeover.COMMAND)
"""What is answered here; the worker knows the others."""


class Supervisor:
    """One mount, from the moment it serves until it is gone. One thread; nothing here blocks for
    more than about two seconds.

    Constant: config, the mount, the control socket. Changing: the workers (``failover``), their
    reports, clients, the unmount under way, whether that is because the mount ``_failed``.
    """

    def __init__(self, mounted: Mounted, failover: Failover, control_socket: ControlSocket) -> None:
        self.config = mounted.config
        self.mounted = mounted
        self.control_socket = control_socket
        self._waiting_for_unmount: list[socket.socket] = []
        self._unmount: Unmount | None = None
        # Of the mount, also where another supervisor made it.
        self._started = time.monotonic() - (time.time_ns() - mounted.handover.mount_ns) / 1e9
        self._exit_code: int | None = None
        self._failed = False
        self._manager = ServiceManager(os.environ if self.config.foreground else {})
        self.failover = failover
        self._selector = failover.selector
        self._wake_reading, self._wake_writing = socket.socketpair()
        self._clients = Clients(
            control_socket.listener, self.config.user.uid, self._selector, self._answer
        )
        self._reports = failover.reports
        self._reports.due.add(self._reply_status)
        self._standbys = Standbys(mounted.handover)

    def obey(self, owner: socket.socket | None) -> None:
        """From here on bytes from ``owner`` unmount, and its end; if there is none, signals. What
        comes before `run` is kept for it."""
        if owner is not None:
            self._selector.register(owner, selectors.EVENT_READ, partial(self._on_owner, owner))
            return
        self._wake_writing.setblocking(False)
        signal.set_wakeup_fd(self._wake_writing.fileno(), warn_on_full_buffer=False)
        for number in ending_signals():
            # The number arrives through the descriptor; the handler only has to exist.
            signal.signal(number, lambda _number, _frame: None)

    def run(self) -> int:
        """Serves until the mount is gone; the exit code: 0, or 1 if it could not be served."""
        register = partial(self._selector.register, events=selectors.EVENT_READ)
        register(self._wake_reading, data=self._on_signal)
        if (output := self.mounted.output) is not None:
            register(output, data=output.pass_on)
        self._manager.ready(f"serving {self.config.source} on {self.config.mountpoint}")
        while self._exit_code is None:
            for key, _ in self._selector.select(self._seconds_to_next()):
                self._do(key.data)
            self._do(self._tick)
        self._finish(self._exit_code)
        return self._exit_code

    def _do(self, step: Callable[[], object]) -> None:
        """One that fails for want of a descriptor, say, is tried again by and by: the mount must
        not end of it."""
        try:
            step()
        except OSError as error:
            self.mounted.worker_log.say(logging.ERROR, f"the supervisor: {explained(error)}")
            time.sleep(_FAILED_SECONDS)

    # Events

    def _on_signal(self) -> None:
        self._told_to_end(signal.Signals(self._wake_reading.recv(64)[-1]).name)

    def _on_owner(self, owner: socket.socket) -> None:
        if owner.recv(1):
            self._told_to_end("the owner")
            return
        # Those of other jobs cannot stand by before the owner is known to them.
        if self._standbys.wanted() or takeover.others_have(self.mounted.handover):
            # Nothing is put back: one of them goes on, as if this process had been killed, too.
            os.kill(os.getpid(), signal.SIGKILL)
        # Not before: what fails for want of a descriptor is tried again.
        self._selector.unregister(owner)
        self._told_to_end("the owner's death")

    def _told_to_end(self, by: str) -> None:
        if self._unmount is None:
            log.info("%s: unmounting %s", by, self.config.mountpoint)
            self._begin_unmount(_STOP_SECONDS)
        else:
            log.info("%s again: unmounting by force", by)
            self._unmount.deadline = time.monotonic()

    def _tick(self) -> None:
        now = time.monotonic()
        self._manager.beat(now)
        if self.mounted.output is not None:
            self.mounted.output.tick()
        if self.mounted.peer_server is not None:
            self.mounted.peer_server.tick(now)
        self._clients.tick(now)
        if self.failover.serves:
            self._reports.tick(self.failover.worker.channel, now)
        if not is_dead(self.mounted.fuse):
            self._do(self._tick_workers)
            self._do(self._tell_standbys)
            self.mounted.backing.tick()
        elif self._unmount is None:
            self._end_dead()
        if self._unmount is not None and self._unmount.next_step <= now:
            self._do(self._step_unmount)

    def _tell_standbys(self) -> None:
        pids = self.failover.reaper.pids(self.failover.worker)
        server = self.mounted.peer_server
        peers = None if server is None else server.peers
        self._standbys.tell(self.failover.restarts, pids, peers)

    def _tick_workers(self) -> None:
        had_ended = self.failover.phase is Phase.ENDED
        self.failover.tick()
        if self.failover.phase is Phase.ENDED and not had_ended:
            # Its users must get errors, not hang.
            self._failed = True
            log.error("%s: unmounting", self.failover.trouble)
            self._begin_unmount(_DEAD_WORKER_SECONDS)

    def _end_dead(self) -> None:
        """The connection ended: with its last mount, or somebody aborted it, as umount -f does with
        one in use. Then its mounts are left, and give only errors."""
        unmount = Unmount(self.mounted.connection, time.monotonic())
        if unmount.outcome is Unmounted.NOT_MOUNTED:
            log.info("%s was unmounted", self.config.mountpoint)
            self._exit_code = 0
            return
        self._failed = True
        log.error("somebody aborted the connection of %s: unmounting", self.config.mountpoint)
        self._begin_unmount(0.0)

    # Requests

    def _answer(self, connection: socket.socket, line: bytes) -> None:
        now = time.monotonic()
        try:
            request = messages.decode_request(line)
        except ValueError as error:
            reply(connection, messages.encode_error(f"the request is not valid: {error}"))
            return
        match request["command"]:
            case "status" if self.failover.serves:
                self._reports.want(connection, self.failover.worker.channel, now)
            case "status":
                self._reply_status(connection)
            case "config":
                reply(connection, messages.encode_result(json.loads(self.config.to_json())))
            case "umount" if len(self._waiting_for_unmount) >= MOST_CLIENTS:
                reply(connection, messages.encode_error("too many requests at once"))
            case "umount":
                timeout = float(request.get("timeout", _DEFAULT_UMOUNT_SECONDS))
                log.info("asked to unmount %s within %g s", self.config.mountpoint, timeout)
                self._waiting_for_unmount.append(connection)
                self._begin_unmount(timeout - min(_WORKER_END_SECONDS, timeout * _WORKER_END_SHARE))
            case "restart":
                seconds = float(request.get("timeout", _DEFAULT_RESTART_SECONDS))
                log.info("asked to replace the worker of %s", self.config.mountpoint)
                self.failover.replace(partial(self._reply_restart, connection), seconds)
            case takeover.COMMAND:
                self._standbys.add(connection)
            case "change_peers":
                self._change_peers(connection, request)
            case _ if self._hand_over(connection, request, now):
                connection.close()
            case _:
                reply(connection, messages.encode_error(messages.NO_WORKER))

    def _hand_over(self, connection: socket.socket, request: dict[str, Any], now: float) -> bool:
        """Whether the worker was given a request: it is not while it leaves others unanswered."""
        if not self.failover.serves or self._reports.overdue(now):
            return False
        message = {"do": "client", "request": request}
        return self.failover.worker.channel.send(message, [connection.fileno()])

    def _reply_status(self, connection: socket.socket) -> None:
        reply(connection, messages.encode_result(self._status()))

    def _status(self) -> dict[str, Any]:
        """What the worker last reported, and what only the supervisor knows."""
        now, failover, last = time.monotonic(), self.failover, self._reports.latest
        death, retry_seconds = failover.last_death, failover.retry_seconds
        server = self.mounted.peer_server
        worker = {
            **last.get("worker", {}),
            "pid": failover.worker.pid,
            "restarts": failover.restarts,
            "not_understood": self.mounted.worker_log.not_understood,
            "error": None,
            "last_death": death and {"why": death[0], "unix_seconds": round(death[1], 3)},
            "retry_seconds": None if retry_seconds is None else round(retry_seconds, 3),
        }
        known = {
            "state": "starting",
            **last,
            "source": self.config.source,
            "mountpoint": self.config.mountpoint,
            "age_seconds": round(now - self._reports.came, 3) if last else None,
            "uptime_seconds": round(now - self._started, 3),
            "worker": worker,
            "peer_server": server and {"pid": server.pid},
            "passthrough": {
                **last.get("passthrough", {}),
                "registered": len(self.mounted.backing),
            },
        }
        if not failover.serves:
            worker["error"] = failover.trouble
            known["state"] = "down" if failover.phase is Phase.ENDED else "restarting"
            if failover.phase in (Phase.ENDED, Phase.PAUSING):
                worker["pid"] = None
        elif self._reports.overdue(now) or not last:
            known["state"] = "worker not answering"
        elif retry_seconds is not None:
            known["state"] = "safe mode"
            worker["error"] = (
                "the workers before it died one after the other, so it only serves the source: a"
                f" whole one is tried in {retry_seconds:.0f} s, and by"
                f" monarchfs restart {self.config.mountpoint} at once"
            )
        return known

    def _reply_restart(self, connection: socket.socket, error: str | None) -> None:
        worker = {"pid": self.failover.worker.pid, "restarts": self.failover.restarts}
        line = messages.encode_result(worker) if error is None else messages.encode_error(error)
        reply(connection, line)

    def _change_peers(self, connection: socket.socket, request: dict[str, Any]) -> None:
        """The next worker has the other list, and is started at once for that."""
        server = self.mounted.peer_server
        if server is None:
            reply(connection, messages.encode_error("this mount has no peers: mount with --peers"))
            return
        before = server.peers
        try:
            add, remove = request.get("add") or [], request.get("remove") or []
            if not (isinstance(add, list) and isinstance(remove, list)):
                raise UsageError("'add' and 'remove' must be lists of nodes")
            server.peers = before.changed(add, remove, self.config.peer_port)
        except UsageError as error:
            reply(connection, messages.encode_error(str(error)))
            return

        def then(error: str | None) -> None:
            if error is not None:
                server.peers = before
            log.info("peers of %s: %s", self.config.mountpoint, error or "another list is in use")
            names = [node.name for node in server.peers.nodes]
            line = messages.encode_result({"nodes": names}) if error is None else None
            reply(connection, line or messages.encode_error(f"the list is as before: {error}"))

        seconds = float(request.get("timeout", _DEFAULT_RESTART_SECONDS))
        self.failover.replace(then, seconds)

    # The end

    def _begin_unmount(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._manager.stopping()
        if self._unmount is None:
            self._unmount = Unmount(self.mounted.connection, deadline)
        else:
            self._unmount.deadline = min(self._unmount.deadline, deadline)

    def _step_unmount(self) -> None:
        assert self._unmount is not None
        try:
            outcome = self._unmount.step()
        except MonarchError as error:
            log.error("cannot unmount %s: %s", self.config.mountpoint, error)
            outcome = Unmounted.FAILED
        if outcome is not None:
            log.info("%s: %s", self.config.mountpoint, outcome.value)
            self._exit_code = int(outcome is Unmounted.FAILED or self._failed)

    def _finish(self, code: int) -> None:
        """The order matters to a caller who mounts again at once: the lock is free, and the socket
        gone, before the reply says that it is done."""
        self._standbys.dismiss()
        now = time.monotonic()
        if self.mounted.peer_server is not None:
            self.mounted.peer_server.close()
        left = self._unmount.deadline - now if self._unmount is not None else 0.0
        answers = self.failover.serves and not self._reports.overdue(now)
        self.failover.close(max(1.0, min(_SYNC_SECONDS, left)) if answers else 1.0)
        if self.mounted.output is not None:
            self._selector.unregister(self.mounted.output)
            self.mounted.output.close()
        if self.failover.worker.crashed:  # perhaps only now, while it closed
            self.mounted.mark_suspect()
        self.mounted.connection.abort()
        self.mounted.connection.close()
        os.close(self.mounted.fuse)
        self.control_socket.close()
        self.mounted.release()
        outcome = self._unmount.outcome if self._unmount is not None else None
        for connection in self._waiting_for_unmount:
            if code and outcome is Unmounted.FAILED:
                reply(connection, messages.encode_error("the mount could not be removed"))
            else:
                done = outcome or Unmounted.NOT_MOUNTED
                reply(connection, messages.encode_result({"outcome": done.name.lower()}))
        self._clients.close()
        self._reports.give_up()

    def _seconds_to_next(self) -> float:
        now = time.monotonic()
        times = [now + _TICK_SECONDS, self.failover.next_tick]
        times += self._clients.deadlines + self._reports.deadlines
        if self._unmount is not None:
            times.append(self._unmount.next_step)
        return max(0.0, min(times) - now)
