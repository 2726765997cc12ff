"""What another process needs to go on with a mount whose supervisor dies.

The connection of a FUSE mount lives as long as somebody has its descriptor of /dev/fuse. A standby
supervisor is a process that has this one and all others of the supervisor (``Handover``), and a
connection to it (``StandbyConnection``). If the supervisor dies, the connection ends, and one of
the standbys starts the next supervisor (``start.take_over``).
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from monarchfs.config import Config
from monarchfs.config.model import PROTOCOL_VERSION, Descriptors
from monarchfs.control import messages
from monarchfs.control.peers import peer_uid, short_socket_path
from monarchfs.peers.nodes import Peers
from monarchfs.supervisor.clients import reply
from monarchfs.supervisor.launch import has_only_threads
from monarchfs.system.locks import try_lock
from monarchfs.types import OperationError

log = logging.getLogger(__name__)

COMMAND = "stand_by"
MOST_STANDBYS = 64
_SECONDS = 5.0
_END_SECONDS = 1.0
_MOST_DESCRIPTORS = 64
_PART_BYTES = 1 << 16
_MOST_BYTES = 1 << 22


class OtherRelease(OperationError):
    """The supervisor is of a release with another protocol."""


@dataclass(frozen=True, slots=True)
class Handover:
    """All that a supervisor has of its mount. ``locks`` are held by the open files behind these
    descriptors, so they stay locked while one process has them: the state directory's first, then
    those of the tiers. ``init_request`` is the kernel's FUSE_INIT, and ``stack_depth`` what it was
    answered (0: no passthrough). ``source_root``: inode and device number. ``connection``: the
    number of the FUSE connection. ``peers``: as ``Peers.to_message`` gives it; ``peer_address``:
    where they are served."""

    config: Config
    descriptors: Descriptors
    locks: tuple[int, ...]
    mount_ns: int
    init_request: bytes
    stack_depth: int
    source_root: tuple[int, int]
    connection: int
    peers: dict[str, Any] | None = None
    peer_address: str | None = None

    @property
    def all_descriptors(self) -> list[int]:
        """Each once, in the order in which `from_json` takes them."""
        named = asdict(self.descriptors)
        tiers = named.pop("tiers")
        return [*tiers, *self.locks, *(fd for fd in named.values() if fd is not None)]

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _PLAIN}
        return plain | {
            "speaks": PROTOCOL_VERSION,
            "config": self.config.to_json(),
            "descriptors": asdict(self.descriptors),
            "init_request": base64.b64encode(self.init_request).decode(),
        }

    @classmethod
    def from_json(cls, message: Mapping[str, Any], numbers: Sequence[int]) -> Handover:
        """What `to_json` gave, with the descriptors that came with it, which are the first ones of
        ``numbers``. Raises OtherRelease; ValueError, KeyError or TypeError for nonsense."""
        if message.get("speaks") != PROTOCOL_VERSION:
            raise OtherRelease("the mount there is of another release of monarchfs")
        named = dict(message["descriptors"])
        count = len(named.pop("tiers"))
        end = count + len(message["locks"])
        if len(numbers) < end + sum(fd is not None for fd in named.values()):
            raise ValueError("too few descriptors")
        others = iter(numbers[end:])
        single: dict[str, Any] = {
            name: None if fd is None else next(others) for name, fd in named.items()
        }
        return cls(
            config=Config.from_json(message["config"]),
            descriptors=Descriptors(**single, tiers=tuple(numbers[:count])),
            locks=tuple(numbers[count:end]),
            mount_ns=int(message["mount_ns"]),
            init_request=base64.b64decode(message["init_request"], validate=True),
            stack_depth=int(message["stack_depth"]),
            source_root=(int(message["source_root"][0]), int(message["source_root"][1])),
            connection=int(message["connection"]),
            peers=message["peers"],
            peer_address=message["peer_address"],
        )

    def close(self) -> None:
        """Close all descriptors."""
        for number in self.all_descriptors:
            os.close(number)


_PLAIN = ("locks", "mount_ns", "stack_depth", "source_root", "connection", "peers", "peer_address")


class Standbys:
    """The supervisor's side: connections of standbys. Changing: these; the workers that they were
    told of, after how many others the one that serves came, and the list of nodes (``_told``)."""

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        self._connections: list[socket.socket] = []
        self._workers: list[int] = []
        self._told: tuple[int, list[int], Peers | None] = (0, [], None)

    def add(self, connection: socket.socket) -> None:
        """Give all to a client. Only the user of this process, or root, gets it: whoever has the
        descriptors is the supervisor."""
        if peer_uid(connection) not in (0, os.geteuid()) or len(self._connections) >= MOST_STANDBYS:
            reply(connection, messages.encode_error("this mount cannot be handed over to you"))
            return
        connection.settimeout(_END_SECONDS)
        line = messages.encode_result(self._handover.to_json())
        try:
            sent = socket.send_fds(connection, [line], self._handover.all_descriptors)
            connection.sendall(line[sent:])
            self._send_workers(connection)
            connection.setblocking(False)
        except OSError as error:
            log.warning("a standby left: %s", error)
            connection.close()
            return
        self._connections.append(connection)

    def tell(self, restarts: int, pids: list[int], peers: Peers | None = None) -> None:
        """The worker that serves, after ``restarts`` others, and those that may still run: the next
        supervisor must know when they have stopped. All are children of this process. ``peers``:
        the list of nodes, which may have changed. Called often: whoever has left makes room for
        others. Raises OSError where the workers cannot be opened now."""
        self._connections = [one for one in self._connections if not _is_closed(one)]
        if (restarts, pids, peers) == self._told:
            return
        opened: list[int] = []
        try:
            opened.extend(map(open_process, pids))
        except OSError:
            for number in opened:
                os.close(number)
            raise  # the next call tries again
        self._told = (restarts, list(pids), peers)
        before, self._workers = self._workers, opened
        for number in before:
            os.close(number)
        self._connections = [one for one in self._connections if self._sent_workers(one)]

    def _sent_workers(self, connection: socket.socket) -> bool:
        """Whether it was told; one that does not read is sent away."""
        try:
            self._send_workers(connection)
        except OSError as error:
            log.warning("a standby is sent away: %s", error)
            connection.close()
            return False
        return True

    def _send_workers(self, connection: socket.socket) -> None:
        restarts, _, peers = self._told
        message: dict[str, Any] = {"restarts": restarts, "workers": len(self._workers)}
        if peers is not None:
            message["peers"] = peers.to_message()
        line = json.dumps(message).encode() + b"\n"
        if socket.send_fds(connection, [line], self._workers) < len(line):
            raise BlockingIOError("it does not read")

    def wanted(self) -> bool:
        """Whether somebody would go on with the mount."""
        self._connections = [one for one in self._connections if not _is_closed(one)]
        return bool(self._connections)

    def dismiss(self) -> None:
        """The mount ends on purpose: none of them goes on. Waits a second at most, until they have
        let go of what they hold, the locks among it."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # gone, as `wanted` will see
                connection.send(b'{"end": true}\n')
        until = time.monotonic() + _END_SECONDS
        while self.wanted() and (left := until - time.monotonic()) > 0:
            select.select(self._connections, [], [], left)
        for connection in self._connections:
            connection.close()
        self._connections.clear()


def _is_closed(connection: socket.socket) -> bool:
    """A standby says nothing: what can be read is its end. The socket does not block."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError as error:
        log.debug("a standby's connection broke: %s", error)
    connection.close()
    return True


def open_process(pid: int) -> int:
    """A descriptor that stands for this process and no later one, also in another pid namespace:
    its directory in /proc. (pidfd_open(2) came with Linux 5.3.)"""
    return os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


class OrphanedWorker:
    """A worker of a supervisor that died. The kernel kills it with that one."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: of the process, from ``open_process``; it is this object's."""
        self.descriptor = descriptor

    def kill(self) -> None:
        """Once more, in case it changed that; but not if it is of another pid namespace."""
        if self.descriptor < 0:
            return
        path = os.readlink(f"/proc/self/fd/{self.descriptor}")
        try:
            # Between these calls its number goes to no other: all others come first.
            if os.path.samestat(os.fstat(self.descriptor), os.stat(path)):
                os.kill(int(os.path.basename(path)), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            log.debug("%s is gone, or cannot be seen", path)

    @property
    def reaped(self) -> bool:
        """Whether it is gone with all of its threads."""
        if self.descriptor >= 0 and has_only_threads(b"ZX", self._directory):
            self.close()
        return self.descriptor < 0

    def is_quiet(self) -> bool:
        """As ``WorkerProcess.is_quiet``."""
        return self.reaped or has_only_threads(b"ZXD", self._directory)

    @property
    def _directory(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class StandbyConnection:
    """A standby's side. Changing: the handover, if the list of nodes does; ``workers``, the one
    that serves, and those that may still run; ``restarts``, how many came before it; ``ended``,
    whether the mount ended on purpose."""

    def __init__(self, path: str) -> None:
        """Asks the supervisor whose control socket this is. Raises OperationError."""
        self.workers: list[OrphanedWorker] = []
        self.restarts = 0
        self.ended = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._received = b""
        self._descriptors: list[int] = []
        handed: list[int] = []
        try:
            self._socket.settimeout(_SECONDS)
            with short_socket_path(path) as short:
                self._socket.connect(short)
            if peer_uid(self._socket) != os.geteuid():
                raise OperationError(f"somebody else listens on {path}")
            self._socket.sendall(messages.encode_message({"command": COMMAND}))
            answer = messages.decode_message(self._next_line())
            if answer.get("ok") is not True:
                raise OperationError(str(answer.get("error", "the mount cannot be handed over")))
            self.handover = Handover.from_json(answer["result"], self._descriptors)
            handed = self.handover.all_descriptors
            del self._descriptors[: len(handed)]
            self._understand(self._next_line())
            self._socket.setblocking(False)
        except BaseException as error:
            for number in (*handed, *self._descriptors):
                os.close(number)
            self._socket.close()
            if isinstance(error, (OSError, ValueError, LookupError, TypeError)):
                raise OperationError(f"the mount's daemon on {path}: {error}") from None
            raise

    def _next_line(self) -> bytes:
        while b"\n" not in self._received:
            if not self._receive() or len(self._received) > _MOST_BYTES:
                raise ValueError("it gave no answer")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _receive(self) -> bool:
        part, descriptors, _, _ = socket.recv_fds(self._socket, _PART_BYTES, _MOST_DESCRIPTORS)
        for number in descriptors:
            os.set_inheritable(number, False)
        self._descriptors += descriptors
        self._received += part
        return bool(part)

    def fileno(self) -> int:
        return self._socket.fileno()

    def lives(self) -> bool:
        """Whether the supervisor does; call it when there is something to read."""
        try:
            while self._receive():
                while b"\n" in self._received:
                    self._understand(self._next_line())
        except BlockingIOError:
            return True
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning("the supervisor's connection broke: %s", error)
        return False

    def _understand(self, line: bytes) -> None:
        message = json.loads(line)
        if message.get("end"):
            self.ended = True
            return
        count = int(message["workers"])
        numbers, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        for worker in self.workers:
            worker.close()
        self.workers = [OrphanedWorker(number) for number in numbers]
        self.restarts = int(message["restarts"])
        self.handover = replace(self.handover, peers=message.get("peers", self.handover.peers))

    def close(self) -> None:
        """Let go of all."""
        for worker in self.workers:
            worker.close()
        self.handover.close()
        self._socket.close()


def own(handover: Handover) -> int | None:
    """A descriptor with which this process alone may start the next supervisor, as long as it is
    open; None if another process has one."""
    # Another open file of the mount's table of open files, so the lock is this process's.
    path = f"/proc/self/fd/{handover.descriptors.handles}"
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def others_have(handover: Handover) -> bool:
    """Whether another process has the mount's locks, too, and so would go on with the mount. Waits
    for the end of a process that is dying. The caller's own lock on the state directory is free for
    a moment, and is its own again only if this is False."""
    lock = handover.locks[0]
    other = os.open(f"/proc/self/fd/{lock}", os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(other, lock, inheritable=False)
    os.close(other)
    until = time.monotonic() + _END_SECONDS
    while not (alone := try_lock(lock)) and time.monotonic() < until:
        time.sleep(0.01)
    return not alone
