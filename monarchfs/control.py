"""The control socket: one JSON object a line, one request and one reply a connection.

A request is ``{"command": ..., ...}``; a reply is ``{"ok": true, "result": {...}}`` or
``{"ok": false, "error": "one line"}``. The supervisor listens and answers ``status`` and ``umount``
itself; other commands reach the worker, together with the connection. Who may connect is decided by
the socket's mode (0600, the mount's user) and by SO_PEERCRED. All messages and limits are in
docs/CONTROL.md.

``refresh``, ``pin``, ``unpin`` and ``evict`` carry ``"paths": [...]``, relative to the mount's root
(``""`` is the root), with bytes that are no text as lone surrogates (os.fsencode undoes that). They
may take as long as they need: before its reply the worker then writes lines
``{"progress": {...}}``, one every PROGRESS_SECONDS at least, also while the source hangs. Who asked
gives up after SILENCE_SECONDS without a line. A client that closes the connection wants no more:
the next line then fails with EPIPE, and the worker ends the command.

So do ``warm``, with ``"what": "copy" | "metadata" | "check"`` and ``"wait": true | false``, and
``why``. A ``warm`` that is no check goes on when the client is gone. Results are what the command
line prints with ``--json`` (docs/USAGE.md); that of ``why`` is ``{"paths": [...]}``, each with its
``"path"`` and either what is known or an ``"error"``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from monarchfs.types import OperationError

MOST_REQUEST_BYTES = 64 << 10
MOST_REPLY_BYTES = 16 << 20
MOST_PATH_BYTES = 4096
MOST_NAME_BYTES = 255
PROGRESS_SECONDS = 5.0
SILENCE_SECONDS = 20.0
_RETRY_SECONDS = 0.02
_UCRED = struct.Struct("=iII")


UNKNOWN_CONNECTION = -1


@dataclass(frozen=True, slots=True)
class Registration:
    """What a supervisor writes beside its socket.

    ``mountpoint`` means something in ``mount_namespace`` only (the inode number, namespaces(7)).
    ``start_ticks`` is when the supervisor's process began (field 22 of proc_pid_stat(5)): with it
    a process number says for certain who is meant. ``connection`` is the minor number of the
    mount's device, by which a mount namespace that got a copy of the mount knows it too; releases
    before this one wrote none.
    """

    mountpoint: str
    mount_namespace: int
    source: str
    uid: int
    supervisor_pid: int
    start_ticks: int
    state_dir: str
    started_ns: int
    connection: int = UNKNOWN_CONNECTION

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Registered:
    """A registration that was found; ``stem`` is its path without ``.json`` or ``.sock``, and
    ``owner_uid`` is who wrote it: whoever the supervisor runs as."""

    stem: str
    owner_uid: int
    entry: Registration

    @property
    def socket_path(self) -> str:
        return self.stem + ".sock"


def root_uid() -> int:
    """Root as this process sees it: in a user namespace that does not map root, as that of a user's
    ``monarchfs run``, another number (user_namespaces(7))."""
    return os.stat("/").st_uid


def own_mount_namespace() -> int:
    """The inode number of this process's mount namespace."""
    return os.stat("/proc/self/ns/mnt").st_ino


def registration_stem(runtime_dir: str, mountpoint: str, connection: int) -> str:
    """Where the socket and the registration of a mount are, without their suffix.

    Jobs with mount namespaces of their own may share the directory and the mount point's name, and
    one mount may lie over another one.
    """
    name = os.fsencode(mountpoint) + b"\0%d\0%d" % (own_mount_namespace(), connection)
    digest = hashlib.sha256(name).hexdigest()
    return os.path.join(runtime_dir, digest[:24])


def encode_message(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def encode_result(result: Mapping[str, Any]) -> bytes:
    """The reply of a command that worked."""
    return encode_message({"ok": True, "result": result})


def encode_progress(progress: Mapping[str, Any]) -> bytes:
    """How far a long command has come, before its reply."""
    return encode_message({"progress": progress})


def encode_error(error: str) -> bytes:
    """The reply of a command that failed; ``error`` is one line."""
    return encode_message({"ok": False, "error": error})


def decode_message(line: bytes) -> dict[str, Any]:
    """The object on one line. Raises ValueError for anything else."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message


def decode_request(line: bytes) -> dict[str, Any]:
    """A request, checked as far as that is the same for all commands, so that nothing strange
    reaches a worker. Raises ValueError, with the reason in one line."""
    request = decode_message(line)
    if not isinstance(request.get("command"), str):
        raise ValueError("it names no command")
    for name, value in request.items():
        for part in value if isinstance(value, list) else [value]:
            _check_value(name[:40], part, in_list=isinstance(value, list))
    paths = request.get("paths", [])
    if not isinstance(paths, list):
        raise ValueError("'paths' must be a list of strings")
    for path in paths:
        _check_path(path)
    timeout = request.get("timeout", 1.0)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
        raise ValueError("timeout must be a number of seconds above 0")
    return request


def _check_value(name: str, value: object, *, in_list: bool) -> None:
    if isinstance(value, str):
        try:
            plain = b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            plain = False
        if not plain:
            raise ValueError(f"{name!a} holds a character that no path can have")
    elif in_list:
        raise ValueError(f"{name!a} must be a list of strings")
    elif not (value is None or isinstance(value, (bool, int, float))):
        raise ValueError(f"{name!a} must be a plain value or a list of strings")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name!a} must be a finite number")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError(f"{name!a} must have less than 64 bits")


def _check_path(path: str) -> None:
    encoded = os.fsencode(path)
    if encoded.startswith(b"/") or b".." in encoded.split(b"/"):
        raise ValueError("a path must be relative to the mount's root and stay below it")
    if too_long(path):
        raise ValueError(f"a path is longer than {MOST_PATH_BYTES} bytes, or a name in it is")


def too_long(path: str) -> bool:
    """Whether no file can have the path (or no name of a file a name in it)."""
    encoded = os.fsencode(path)
    return len(encoded) > MOST_PATH_BYTES or max(map(len, encoded.split(b"/"))) > MOST_NAME_BYTES


def peer_uid(connection: socket.socket) -> int:
    """The effective uid of whoever connected or listens (SO_PEERCRED, unix(7))."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(packed)[1])


def may_ask(connection: socket.socket, uid: int) -> bool:
    """Whether who connected is root, the mount's user or who runs this.

    In a user namespace the machine's root has no number of its own, but that of everybody from
    outside (user_namespaces(7), overflowuid). Of those the socket's mode has let in only root.
    """
    return peer_uid(connection) in (0, uid, os.geteuid(), _outsiders())


def _outsiders() -> int | None:
    """The uid that those have who are not of this user namespace; None outside of one."""
    with open("/proc/self/uid_map", encoding="ascii") as uid_map:
        if uid_map.read().split() == ["0", "0", "4294967295"]:
            return None
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as number:
        return int(number.read())


def short_socket_path(directory_fd: int, path: str) -> str:
    """A name for the socket ``path`` in an open directory that fits into sun_path (108 bytes)."""
    return f"/proc/self/fd/{directory_fd}/{os.path.basename(path)}"


class Connection:
    """A client's connection to the supervisor of one mount; a context manager."""

    def __init__(self, socket_path: str, timeout: float) -> None:
        """Connects within ``timeout`` seconds; raises OperationError if nobody listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._received = bytearray()
        self._socket.settimeout(timeout)
        deadline = time.monotonic() + timeout
        try:
            # The socket itself, and no link: a user's could lead root to another mount's daemon.
            # By its descriptor, because sun_path holds 108 bytes only.
            place = os.open(socket_path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not stat.S_ISSOCK(os.fstat(place).st_mode):
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "it is not a socket")
                self._connect(f"/proc/self/fd/{place}", deadline)
            finally:
                os.close(place)
        except OSError as error:
            self._socket.close()
            raise OperationError(
                f"the mount's daemon does not answer on {socket_path}: {error.strerror or error}"
            ) from None

    def _connect(self, path: str, deadline: float) -> None:
        # A full backlog makes connect fail at once where the socket has a timeout (unix(7)).
        while True:
            try:
                self._socket.connect(path)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def peer_uid(self) -> int:
        return peer_uid(self._socket)

    def request(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The result of one command, within ``timeout`` seconds; OperationError otherwise."""
        return self._ask(message, timeout, None)

    def long_request(
        self, message: Mapping[str, Any], progress: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """The same for a command that takes its time: ``progress`` is called with what the daemon
        says of it meanwhile; OperationError after SILENCE_SECONDS without a word."""
        return self._ask(message, SILENCE_SECONDS, progress)

    def _ask(
        self,
        message: Mapping[str, Any],
        timeout: float,
        progress: Callable[[dict[str, Any]], None] | None,
    ) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        try:
            self._socket.settimeout(timeout)
            with suppress(BrokenPipeError, ConnectionResetError):  # refused already: it says why
                self._socket.sendall(encode_message(message))
            reply = decode_message(self._read_line(deadline))
            while progress is not None and isinstance(reply.get("progress"), dict):
                progress(reply["progress"])
                reply = decode_message(self._read_line(time.monotonic() + timeout))
        except TimeoutError:
            raise OperationError(
                f"the mount's daemon did not answer within {round(timeout, 1):g} s: see its log;"
                " monarchfs umount removes the mount all the same"
            ) from None
        except (OSError, ValueError) as error:
            raise OperationError(f"the mount's daemon gave no answer: {error}") from None
        if reply.get("ok") is True and isinstance(reply.get("result"), dict):
            return dict(reply["result"])
        raise OperationError(str(reply.get("error", "the mount's daemon refused without a reason")))

    def wait_closed(self, timeout: float) -> bool:
        """Waits until the other side is gone; whether it went within ``timeout`` seconds."""
        self._socket.settimeout(max(timeout, 0.001))
        try:
            while self._socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass  # reset by a peer that died: gone as well
        return True

    def _read_line(self, deadline: float) -> bytes:
        received = self._received
        part = bytes(received)
        while b"\n" not in part:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            part = self._socket.recv(1 << 16)
            if not part:
                raise ValueError("the connection was closed")
            received += part
            if len(received) > MOST_REPLY_BYTES:
                raise ValueError("the reply is too long")
        line, _, rest = bytes(received).partition(b"\n")
        self._received = bytearray(rest)
        return line


def request(registered: Registered, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The result of one command sent to the daemon that is registered.

    Raises OperationError if nobody listens or somebody else does, if there is no answer within
    ``timeout`` seconds, or with the daemon's own words if it refuses.
    """
    deadline = time.monotonic() + timeout
    with Connection(registered.socket_path, timeout) as connection:
        if connection.peer_uid != registered.owner_uid:
            raise OperationError(f"somebody else listens on {registered.socket_path}")
        return connection.request(message, max(0.1, deadline - time.monotonic()))


def find_mounts(runtime_dirs: Iterable[str]) -> list[Registered]:
    """All registrations in ``runtime_dirs`` that can be read, also of daemons that are gone.

    Those of other users count for their own mounts only, because anybody can write into /tmp.
    """
    found = []
    for directory in runtime_dirs:
        try:
            names = sorted(os.listdir(directory))
            owner = os.lstat(directory)
        except OSError:
            continue
        if not stat.S_ISDIR(owner.st_mode) or owner.st_mode & 0o022:
            continue
        for name in names:
            if name.endswith(".json"):
                registered = _read_registration(os.path.join(directory, name))
                if registered is not None and registered.owner_uid == owner.st_uid:
                    found.append(registered)
    return found


def decode_registration(content: bytes, owner_uid: int) -> Registration:
    """What a file that belongs to ``owner_uid`` says. Raises ValueError for anything else than a
    registration, and for one of another user's mount, unless root wrote it."""
    message = decode_message(content)
    known = {}
    for field in fields(Registration):
        if field.name not in message and field.default is not MISSING:
            continue
        if type(message.get(field.name)).__name__ != field.type:
            raise ValueError(f"it has no {field.name}")
        known[field.name] = message[field.name]
    entry = Registration(**known)
    if owner_uid not in (0, entry.uid, root_uid()):
        raise ValueError("it is about another user's mount")
    return entry


def _read_registration(path: str) -> Registered | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            owner_uid = os.fstat(file.fileno()).st_uid
            entry = decode_registration(file.read(MOST_REQUEST_BYTES), owner_uid)
    except (OSError, ValueError):
        return None
    return Registered(path.removesuffix(".json"), owner_uid, entry)
