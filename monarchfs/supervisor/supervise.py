"""The supervisor's loop over a mount that serves: control socket, worker, signals, unmounting."""

from __future__ import annotations

import logging
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarchfs import control
from monarchfs.config import Config
from monarchfs.fuse.unmount import Unmount, Unmounted, abort_connection
from monarchfs.supervisor.launch import Worker
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
_DEFAULT_UMOUNT_SECONDS = 30.0
_NO_WORKER = "the mount's worker does not answer: see monarchfs status"

COMMANDS = ("status", "umount")
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

    Constant: config, the mount's descriptor and connection, control socket, saved FUSE_INIT.
    Changing: the worker (another one could take its place), what it last said of itself, clients,
    the unmount under way.
    """

    def __init__(
        self,
        config: Config,
        worker: Worker,
        control_socket: ControlSocket,
        *,
        fuse: int,
        connection: int,
        init_request: bytes,
        mark_suspect: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self.config = config
        self.worker = worker
        self.control_socket = control_socket
        self.fuse = fuse
        self.connection = connection
        # A worker that takes this one's place answers the same FUSE_INIT to its own libfuse.
        self.init_request = init_request
        self._mark_suspect = mark_suspect
        self._release = release
        self._clients: dict[int, Client] = {}
        self._waiting_for_unmount: list[socket.socket] = []
        self._unmount: Unmount | None = None
        self._worker_serves = True
        self._started = time.monotonic()
        self._reports = Reports(self._ask_for_report, self._reply_status)
        self._exit_code: int | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_reading, self._wake_writing = socket.socketpair()

    def catch_signals(self) -> None:
        """From here on signals unmount; those that come before `run` are kept for it."""
        self._wake_writing.setblocking(False)
        signal.set_wakeup_fd(self._wake_writing.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # The number arrives through the descriptor; the handler only has to exist.
            signal.signal(number, lambda _number, _frame: None)

    def run(self) -> int:
        """Serves until the mount is gone; the exit code: 0, or 1 if the worker died."""
        register = partial(self._selector.register, events=selectors.EVENT_READ)
        register(self._wake_reading, data=self._on_signal)
        register(self.control_socket.listener, data=self._on_connection)
        register(self.worker.channel, data=self._on_worker_message)
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
        if control.peer_uid(connection) not in (0, self.config.user.uid, os.geteuid()):
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

    def _on_worker_message(self) -> None:
        try:
            message = self.worker.channel.receive(0)
        except (TimeoutError, BlockingIOError):
            return
        except (OSError, ValueError) as error:
            log.warning("the worker speaks nonsense: %s", error)
            return
        match message:
            case None:
                # The tick sees whether it is dead; the channel has nothing more to say.
                self._selector.unregister(self.worker.channel)
                self.worker.wait_gone(1.0)
            case {"event": "status", "number": int(number), "status": dict(report)}:
                self._reports.arrived(number, report, time.monotonic())
            case {"event": "failed", "error": error}:
                log.error("worker: %s", error)

    def _tick(self) -> None:
        now = time.monotonic()
        for client in [c for c in self._clients.values() if c.deadline <= now]:
            self._forget(client)
            self._reply(client.connection, control.encode_error("no request came in time"))
        if self._worker_serves:
            self._reports.tick(now)
        if self._unmount is None and self._connection_is_dead():
            log.info("%s was unmounted", self.config.mountpoint)
            self._exit_code = 0
        elif self._worker_serves and self.worker.is_gone():
            self._on_worker_gone()
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
            case "status" if self._worker_serves:
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
            case _ if self._hand_over(connection, request, now):
                connection.close()
            case _:
                self._reply(connection, control.encode_error(_NO_WORKER))

    def _hand_over(self, connection: socket.socket, request: dict[str, Any], now: float) -> bool:
        """Whether the worker was given a request: it is not, while it does not answer anything."""
        if not self._worker_serves or self._reports.overdue(now):
            return False
        message = {"do": "client", "request": request}
        return self.worker.channel.send(message, [connection.fileno()])

    def _ask_for_report(self, number: int) -> bool:
        return self.worker.channel.send({"do": "status", "number": number})

    def _status(self) -> dict[str, Any]:
        """What the worker last said, and what only the supervisor knows."""
        now = time.monotonic()
        last = self._reports.latest
        worker = {"pid": self.worker.pid, "restarts": 0, **last.get("worker", {}), "error": None}
        known = {
            "source": self.config.source,
            "mountpoint": self.config.mountpoint,
            "state": "starting",
            **last,
            "age_seconds": round(now - self._reports.came, 3) if last else None,
            "uptime_seconds": round(now - self._started, 3),
            "worker": worker,
        }
        if not self._worker_serves:
            worker |= {"pid": None, "error": f"the worker {self.worker.describe_end()}"}
            known["state"] = "down"
        elif self._reports.overdue(now) or not last:
            known["state"] = "worker not answering"
        return known

    def _reply_status(self, connection: socket.socket) -> None:
        self._reply(connection, control.encode_result(self._status()))

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
        if self._unmount is None:
            self._unmount = Unmount(self.config.mountpoint, deadline, self.connection)
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
            self._exit_code = int(outcome is Unmounted.FAILED or not self._worker_serves)

    def _on_worker_gone(self) -> None:
        """A worker may end when the mount has; otherwise its users must get errors, not hang."""
        self._worker_serves = False
        self._reports.give_up()
        if self.worker.crashed:
            self._mark_suspect()
        if self._unmount is None and self._connection_is_dead():
            self._exit_code = 0
        elif self._unmount is None:
            log.error("the worker %s: unmounting", self.worker.describe_end())
            self._begin_unmount(_DEAD_WORKER_SECONDS)

    def _connection_is_dead(self) -> bool:
        """Asked now and then, not registered: the kernel wakes who polls at every request."""
        poll = select.poll()
        poll.register(self.fuse, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))

    def _finish(self, code: int) -> None:
        """Order matters to a caller who mounts again at once: the lock is free, and the socket
        gone, before the reply says that it is done."""
        self.worker.end()
        if self.worker.crashed:  # perhaps only now, while it closed
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
        times = [now + _TICK_SECONDS, *(client.deadline for client in self._clients.values())]
        times += self._reports.deadlines
        if self._unmount is not None:
            times.append(self._unmount.next_step)
        return max(0.0, min(times) - now)
