"""Who is at the other end of a Unix socket, and a name for one that is short enough."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_UCRED = struct.Struct("=iII")


class AnySocket(Protocol):
    """A socket, also one of trio."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def peer_uid(connection: socket.socket) -> int:
    """The effective uid of whoever connected or listens (SO_PEERCRED, unix(7))."""
    return _credentials(connection)[1]


def peer_pid(connection: AnySocket) -> int:
    """The process that connected or listens; 0 if it has no number in this pid namespace."""
    return _credentials(connection)[0]


def _credentials(connection: AnySocket) -> tuple[int, int, int]:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(packed)
    return pid, uid, gid


def may_ask(connection: socket.socket, uid: int) -> bool:
    """Whether root connected, the mount's user, or who runs this.

    In a user namespace the machine's root has the number of all outsiders (user_namespaces(7),
    overflowuid). Of those the socket's mode lets in only root.
    """
    return peer_uid(connection) in (0, uid, os.geteuid(), _outsiders())


def _outsiders() -> int | None:
    """The uid that users outside this user namespace have here; None outside of one."""
    with open("/proc/self/uid_map", encoding="ascii") as uid_map:
        if uid_map.read().split() == ["0", "0", "4294967295"]:
            return None
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as number:
        return int(number.read())


@contextmanager
def short_socket_path(path: str) -> Iterator[str]:
    """Another name for the socket ``path`` that fits into sun_path (108 bytes). Raises OSError."""
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)
