"""The supervisor's loop over a mount that serves: control socket, worker, signals, unmounting."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarchfs import control
from monarchfs.config import Config
from monarchfs.fuse.unmount import Unmount, Unmounted, abort_connection
from monarchfs.supervisor.backing import BackingFiles
from monarchfs.supervisor.daemon import ending_signals
from monarchfs.supervisor.failover import Failover, Phase
from monarchfs.supervisor.notify_systemd import ServiceManager
from monarchfs.supervisor.output import WorkerOutput
from monarchfs.supervisor.registration import ControlSocket
from monarchfs.supervisor.reports import Reports
from monarchfs.types import MonarchError

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_REQUEST_SECONDS = 2.0
_REPLY_SECONDS = 1.0
_MOST_CLIENTS = 64
_STOP_SECONDS = 10.0
_DEAD_WORKER_SECONDS = 1.0
_WORKER_END_SECONDS = 2.5
_SYNC_SECONDS = 5.5
"""How long a worker that unmounts may take to make its copies durable: what it allows itself
(SHUTDOWN_SYNC_SECONDS), and a moment. One that is killed meanwhile keeps the tier's file system
busy for as long as the kernel takes to write."""
_DEFAULT_UMOUNT_SECONDS = 30.0
_DEFAULT_RESTART_SECONDS = 30.0
_NO_WORKER = "the mount's worker does not answer: see monarchfs status"

COMMANDS = ("status", "umount", "restart")
"""What is answered here; the worker knows the others."""


@dataclass(slots=True)
class Client:
    """A connection whose request is still being read."""

    connection: socket.socket
    deadline: float
    received: bytes = b""


class Supervisor:
    """One mount, from the moment it serves until it is gone. One thread; nothing here blocks for
    more than about two seconds.

    Constant: config, the mount's descriptor and connection, control socket. Changing: the workers
    (``failover``), what the last one said of itself, clients, the unmount under way.
    """

    def __init__(
        self,
        config: Config,
        failover: Failover,
        control_socket: ControlSocket,
        *,
        fuse: int,
        connection: int,
        backing: BackingFiles,
        output: WorkerOutput | None,
        mark_suspect: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self.config = config
        self.failover = failover
        self.control_socket = control_socket
        self.fuse = fuse
        self.connection = connection
        self._backing = backing
        self._output = output
        self._mark_suspect = mark_suspect
        self._release = release
        self._clients: dict[int, Client] = {}
        self._waiting_for_unmount: list[socket.socket] = []
        self._unmount: Unmount | None = None
        self._started = time.monotonic()
        self._reports = Reports(self._ask_for_report, self._reply_status)
        self._exit_code: int | None = None
        self._manager = ServiceManager(os.environ if config.foreground else {})
        self._selector = selectors.DefaultSelector()
        self._wake_reading, self._wake_writing = socket.socketpair()

    def catch_signals(self) -> None:
        """From here on signals unmount; those that come before `run` are kept for it."""
        self._wake_writing.setblocking(False)
        signal.set_wakeup_fd(self._wake_writing.fileno(), warn_on_full_buffer=False)
        for number in ending_signals():
            # The number arrives through the descriptor; the handler only has to exist.
            signal.signal(number, lambda _number, _frame: None)

    def run(self) -> int:
        """Serves until the mount is gone; the exit code: 0, or 1 if no worker could serve it."""
        register = partial(self._selector.register, events=selectors.EVENT_READ)
        register(self._wake_reading, data=self._on_signal)
        register(self.control_socket.listener, data=self._on_connection)
        if self._output is not None:
            register(self._output, data=self._output.pass_on)
        self.failover.attach(self)
        self._manager.ready(f"serving {self.config.source} on {self.config.mountpoint}")
        while self._exit_code is None:
            for key, _ in self._selector.select(self._seconds_to_next()):
                key.data()
            self._tick()
        self._finish(self._exit_code)
        return self._exit_code

    # Events

    def _on_signal(self) -> None:
        numbers = self._wake_reading.recv(64)
        name = signal.Signals(numbers[-1]).name
        if self._unmount is None:
            log.info("%s: unmounting %s", name, self.config.mountpoint)
            self._begin_unmount(_STOP_SECONDS)
        else:
            log.info("%s again: unmounting by force", name)
            self._unmount.deadline = time.monotonic()

    def _on_connection(self) -> None:
        try:
            connection, _ = self.control_socket.listener.accept()
        except OSError as error:
            if not isinstance(error, (BlockingIOError, ConnectionAbortedError)):
                log.warning("cannot take a connection: %s", error.strerror)
            return
        if not control.may_ask(connection, self.config.user.uid):
            self._reply(connection, control.encode_error("this mount belongs to another user"))
            return
        if len(self._clients) >= _MOST_CLIENTS:
            # Those that say nothing must not keep out those that do.
            oldest = next(iter(self._clients.values()))
            self._forget(oldest)
            self._reply(oldest.connection, control.encode_error("too many requests at once"))
        connection.setblocking(False)
        client = Client(connection, time.monotonic() + _REQUEST_SECONDS)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ, partial(self._on_client, client))
        self._on_client(client)

    def _on_client(self, client: Client) -> None:
        if self._clients.get(client.connection.fileno()) is not client:
            return  # dropped meanwhile
        try:
            part = client.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        client.received += part
        line, newline, _ = client.received.partition(b"\n")
        if len(line) > control.MOST_REQUEST_BYTES:
            self._forget(client)
            self._reply(client.connection, control.encode_error("the request is too long"))
        elif newline:
            self._forget(client)
            self._answer(client.connection, line)
        elif not part:
            self._forget(client)
            client.connection.close()

    # As ``failover.Owner``

    def watch(self, what: Any, then: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, then)

    def unwatch(self, what: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it is not watched; it is closed
            self._selector.unregister(what)

    def reported(self, number: int, report: Mapping[str, Any]) -> None:
        self._reports.arrived(number, report, time.monotonic())

    def silenced(self) -> None:
        self._reports.give_up()

    def deserted(self, why: str) -> None:
        """Its users must get errors, not hang."""
        log.error("%s: unmounting", why)
        self._begin_unmount(_DEAD_WORKER_SECONDS)

    def _tick(self) -> None:
        now = time.monotonic()
        self._manager.beat(now)
        if self._output is not None:
            self._output.tick()
        for client in [c for c in self._clients.values() if c.deadline <= now]:
            self._forget(client)
            self._reply(client.connection, control.encode_error("no request came in time"))
        if self.failover.serves:
            self._reports.tick(now)
        if not self._connection_is_dead():
            self.failover.tick()
        elif self._unmount is None:
            log.info("%s was unmounted", self.config.mountpoint)
            self._exit_code = 0
        if self._unmount is not None and self._unmount.next_step <= now:
            self._step_unmount()

    # Requests

    def _answer(self, connection: socket.socket, line: bytes) -> None:
        now = time.monotonic()
        try:
            request = control.decode_request(line)
        except ValueError as error:
            self._reply(connection, control.encode_error(f"the request is not valid: {error}"))
            return
        match request["command"]:
            case "status" if self.failover.serves:
                self._reports.want(connection, now)
            case "status":
                self._reply_status(connection)
            case "umount" if len(self._waiting_for_unmount) >= _MOST_CLIENTS:
                self._reply(connection, control.encode_error("too many requests at once"))
            case "umount":
                timeout = float(request.get("timeout", _DEFAULT_UMOUNT_SECONDS))
                log.info("asked to unmount %s within %g s", self.config.mountpoint, timeout)
                self._waiting_for_unmount.append(connection)
                self._begin_unmount(max(timeout - _WORKER_END_SECONDS, timeout / 2))
            case "restart":
                seconds = float(request.get("timeout", _DEFAULT_RESTART_SECONDS))
                log.info("asked to replace the worker of %s", self.config.mountpoint)
                self.failover.replace(partial(self._reply_restart, connection), seconds)
            case _ if self._hand_over(connection, request, now):
                connection.close()
            case _:
                self._reply(connection, control.encode_error(_NO_WORKER))

    def _hand_over(self, connection: socket.socket, request: dict[str, Any], now: float) -> bool:
        """Whether the worker was given a request: it is not, while it does not answer anything."""
        if not self.failover.serves or self._reports.overdue(now):
            return False
        message = {"do": "client", "request": request}
        return self.failover.worker.channel.send(message, [connection.fileno()])

    def _ask_for_report(self, number: int) -> bool:
        return self.failover.worker.channel.send({"do": "status", "number": number})

    def _status(self) -> dict[str, Any]:
        """What the worker last said, and what only the supervisor knows."""
        now = time.monotonic()
        last, failover = self._reports.latest, self.failover
        death = failover.last_death
        worker = {
            **last.get("worker", {}),
            "pid": failover.worker.pid,
            "restarts": failover.restarts,
            "not_understood": failover.not_understood,
            "error": None,
            "last_death": death and {"why": death.why, "unix_seconds": round(death.when, 3)},
            "retry_seconds": _rounded(failover.retry_seconds),
        }
        known = {
            "state": "starting",
            **last,
            "source": self.config.source,
            "mountpoint": self.config.mountpoint,
            "age_seconds": round(now - self._reports.came, 3) if last else None,
            "uptime_seconds": round(now - self._started, 3),
            "worker": worker,
            "passthrough": {**last.get("passthrough", {}), "registered": len(self._backing)},
        }
        if not failover.serves:
            worker["error"] = failover.trouble
            known["state"] = "down" if failover.phase is Phase.ENDED else "restarting"
            if failover.phase in (Phase.ENDED, Phase.PAUSING):
                worker["pid"] = None
        elif self._reports.overdue(now) or not last:
            known["state"] = "worker not answering"
        elif failover.safe:
            known["state"] = "safe mode"
            worker["error"] = (
                "the workers before it died one after the other, so it only serves the source:"
                f" a whole one is tried in {failover.retry_seconds:.0f} s, and by"
                f" monarchfs restart {self.config.mountpoint} at once"
            )
        return known

    def _reply_status(self, connection: socket.socket) -> None:
        self._reply(connection, control.encode_result(self._status()))

    def _reply_restart(self, connection: socket.socket, error: str | None) -> None:
        worker = {"pid": self.failover.worker.pid, "restarts": self.failover.restarts}
        line = control.encode_result(worker) if error is None else control.encode_error(error)
        self._reply(connection, line)

    def _reply(self, connection: socket.socket, line: bytes) -> None:
        """Sends a short reply and closes; a client that does not read loses it."""
        connection.settimeout(_REPLY_SECONDS)
        try:
            with connection:
                connection.sendall(line)
        except OSError as error:
            log.debug("a client left without its reply: %s", error)

    def _forget(self, client: Client) -> None:
        self._selector.unregister(client.connection)
        del self._clients[client.connection.fileno()]

    # The end

    def _begin_unmount(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._manager.stopping()
        if self._unmount is None:
            self._unmount = Unmount(self.connection, deadline)
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
            ended = self.failover.phase is Phase.ENDED
            self._exit_code = int(outcome is Unmounted.FAILED or ended)

    def _connection_is_dead(self) -> bool:
        """Asked now and then, not registered: the kernel wakes who polls at every request."""
        poll = select.poll()
        poll.register(self.fuse, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))

    def _finish(self, code: int) -> None:
        """Order matters to a caller who mounts again at once: the lock is free, and the socket
        gone, before the reply says that it is done."""
        now = time.monotonic()
        left = self._unmount.deadline - now if self._unmount is not None else 0.0
        answers = self.failover.serves and not self._reports.overdue(now)
        self.failover.close(max(1.0, min(_SYNC_SECONDS, left)) if answers else 1.0)
        if self._output is not None:
            self._selector.unregister(self._output)
            self._output.close()
        if self.failover.worker.crashed:  # perhaps only now, while it closed
            self._mark_suspect()
        abort_connection(self.connection)
        os.close(self.fuse)
        self.control_socket.close()
        self._release()
        outcome = self._unmount.outcome if self._unmount is not None else None
        for connection in self._waiting_for_unmount:
            if code and outcome is Unmounted.FAILED:
                self._reply(connection, control.encode_error("the mount could not be removed"))
            else:
                done = outcome or Unmounted.NOT_MOUNTED
                self._reply(connection, control.encode_result({"outcome": done.name.lower()}))
        for client in list(self._clients.values()):
            self._forget(client)
            client.connection.close()
        self._reports.give_up()

    def _seconds_to_next(self) -> float:
        now = time.monotonic()
        times = [now + _TICK_SECONDS, self.failover.next_tick]
        times += (client.deadline for client in self._clients.values())
        times += self._reports.deadlines
        if self._unmount is not None:
            times.append(self._unmount.next_step)
        return max(0.0, min(times) - now)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
