"""The asking side of the control socket."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from monarchfs.control.messages import (
    MOST_REPLY_BYTES,
    SILENCE_SECONDS,
    decode_message,
    encode_message,
)
from monarchfs.control.peers import peer_uid
from monarchfs.control.registration import Registered
from monarchfs.types import OperationError

_RETRY_SECONDS = 0.02


class ConnectionEnded(OperationError):
    """It ended without a reply: the worker died or was replaced, say."""


class Connection(AbstractContextManager["Connection"]):
    """A client's connection to the supervisor of one mount."""

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

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def peer_uid(self) -> int:
        return peer_uid(self._socket)

    def request(
        self,
        message: Mapping[str, Any],
        timeout: float = SILENCE_SECONDS,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """The result of one command, within ``timeout`` seconds; OperationError otherwise, which is
        ConnectionEnded if nobody will reply any more. Of one that takes long, ``progress`` gets
        what the daemon reports meanwhile; the timeout is then that of each report."""
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
        except OSError as error:
            raise ConnectionEnded(f"the mount's daemon gave no answer: {error}") from None
        except ValueError as error:
            raise OperationError(f"the mount's daemon gave no answer: {error}") from None
        if reply.get("ok") is True and isinstance(reply.get("result"), dict):
            return dict(reply["result"])
        raise OperationError(str(reply.get("error", "the mount's daemon refused without a reason")))

    def fileno(self) -> int:
        """For who waits for several things, if there is none ``received``."""
        return self._socket.fileno()

    @property
    def received(self) -> bool:
        """Whether (a part of) the next message is here already."""
        return bool(self._received)

    def ask(self, message: Mapping[str, Any]) -> None:
        """Begin a command whose progress has bytes behind it; ``next`` gets that."""
        try:
            self._socket.sendall(encode_message(message))
        except OSError as error:
            raise OperationError(f"the mount's daemon gave no answer: {error}") from None

    def next(self, timeout: float) -> tuple[dict[str, Any], bytes]:
        """The next message, and the bytes that its progress says come behind it. Raises
        OperationError, with the daemon's own words if it refuses, and ConnectionError once the
        daemon is gone."""
        deadline = time.monotonic() + timeout
        try:
            message = decode_message(self._read_line(deadline))
            behind = message.get("progress", {}).get("bytes", 0)
            while len(self._received) < behind:
                self._receive(deadline)
        except TimeoutError:
            raise OperationError(f"the mount's daemon said nothing for {timeout:g} s") from None
        except (OSError, ValueError) as error:
            raise ConnectionResetError(f"the mount's daemon is gone: {error}") from None
        if message.get("ok") is False:
            raise OperationError(str(message.get("error", "refused without a reason")))
        content = bytes(self._received[:behind])
        del self._received[:behind]
        return message, content

    def send_list(self, message: Mapping[str, Any], parts: Iterable[bytes]) -> dict[str, Any]:
        """The result of one command that gets a list behind its request. The parts end up as one.
        Raises OperationError."""
        self.ask(message)
        try:
            ready, _ = self.next(SILENCE_SECONDS)
            if ready.get("progress", {}).get("ready"):
                self._socket.settimeout(SILENCE_SECONDS)
                for part in parts:
                    self._socket.sendall(part)
            self.no_more()
            result, _ = self.next(SILENCE_SECONDS)
        except OSError as error:
            raise OperationError(f"the mount's daemon gave no answer: {error}") from None
        return dict(result.get("result", {}))

    def no_more(self) -> None:
        """Tell the daemon that nothing else comes from here: a command that goes on until then
        ends, and its reply comes."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait_closed(self, timeout: float) -> bool:
        """Waits until the other side is gone; whether it was within ``timeout`` seconds."""
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
            part = self._receive(deadline)
            if len(received) > MOST_REPLY_BYTES:
                raise ValueError("the reply is too long")
        line, _, rest = bytes(received).partition(b"\n")
        self._received = bytearray(rest)
        return line

    def _receive(self, deadline: float) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        part = self._socket.recv(1 << 16)
        if not part:
            raise ConnectionResetError("the connection was closed")
        self._received += part
        return part


def connect(registered: Registered, timeout: float) -> Connection:
    """A connection to the registered daemon. Raises OperationError if nobody listens within
    ``timeout`` seconds, or somebody else does."""
    connection = Connection(registered.socket_path, timeout)
    if connection.peer_uid != registered.owner_uid:
        connection.__exit__()
        raise OperationError(f"somebody else listens on {registered.socket_path}")
    return connection


def request(registered: Registered, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The result of one command sent to the registered daemon.

    Raises OperationError if nobody listens or somebody else does, if there is no answer within
    ``timeout`` seconds, or with the daemon's own words if it refuses.
    """
    deadline = time.monotonic() + timeout
    with connect(registered, timeout) as connection:
        return connection.request(message, max(0.1, deadline - time.monotonic()))
