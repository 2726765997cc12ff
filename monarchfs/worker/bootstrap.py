"""What the supervisor hands to a worker, and the worker's end of the channel between them."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Any

import trio

from monarchfs.config.model import PROTOCOL_VERSION, Config, Descriptors
from monarchfs.control.peers import peer_uid
from monarchfs.types import OperationError

CHANNEL_BYTES = 256 << 10

OTHER_RELEASE = "it is of a release that the running supervisor cannot talk to: mount again"


@dataclass(frozen=True)
class Bootstrap:
    """See ``supervisor.mounted.Mounted.start_worker``."""

    config: Config
    fds: Descriptors
    init_fd: int
    channel_fd: int
    source_root: tuple[int, int]
    peers: dict[str, Any] | None
    mount_ns: int
    restarts: int
    safe: bool
    waits: bool
    passes: bool

    @classmethod
    def read(cls, fd: int) -> Bootstrap:
        """Raises OperationError if the supervisor's release has another protocol."""
        with open(fd, "rb") as file:
            message = json.loads(file.read())
        fds = message["fds"]
        if message["speaks"] != PROTOCOL_VERSION:
            send(fds["channel"], {"event": "failed", "error": OTHER_RELEASE})
            raise OperationError(OTHER_RELEASE)
        init, channel, tiers = fds.pop("init"), fds.pop("channel"), tuple(fds.pop("tiers"))
        fds.setdefault("counts")  # a supervisor of an earlier release has none
        plain = ("mount_ns", "restarts", "safe", "waits", "passes")
        return cls(
            Config.from_json(message["config"]),
            Descriptors(**fds, tiers=tiers),
            init,
            channel,
            tuple(message["source_root"]),
            message.get("peers"),
            **{name: message[name] for name in plain},
        )

    @property
    def supervisor_uid(self) -> int:
        """The user who made the channel: root, if this is the worker of another user's mount."""
        with socket.socket(fileno=os.dup(self.channel_fd)) as channel:
            return peer_uid(channel)


def send(channel_fd: int, message: dict[str, Any]) -> None:
    """Send a message before there is a ``SupervisorChannel``. Blocks."""
    with socket.socket(fileno=os.dup(channel_fd)) as channel:
        channel.send(json.dumps(message).encode())


def wait_to_begin(channel_fd: int) -> dict[str, Any] | None:
    """Report that this process could take over, and wait for the order. None: it is not needed."""
    send(channel_fd, {"event": "loaded"})
    with socket.socket(fileno=os.dup(channel_fd)) as channel:
        message = channel.recv(CHANNEL_BYTES)
    told = json.loads(message) if message else {}
    return told if told.get("do") == "begin" else None


class SupervisorChannel:
    """The worker's end of the channel to the supervisor: one JSON object a message."""

    def __init__(self, fd: int) -> None:
        self._plain = socket.socket(fileno=fd)
        self._socket = trio.socket.from_stdlib_socket(self._plain)

    async def send(self, message: dict[str, Any]) -> None:
        await self._socket.send(json.dumps(message).encode())

    def send_now(self, message: dict[str, Any]) -> bool:
        """Whether a message could be sent without waiting."""
        try:
            self._plain.send(json.dumps(message).encode())
        except OSError:
            return False
        return True

    async def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """A message and the descriptors that came with it; None when the supervisor is gone."""
        await trio.lowlevel.wait_readable(self._plain)
        data, fds, _flags, _address = socket.recv_fds(
            self._plain, CHANNEL_BYTES, 4, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
        for fd in fds:  # recv_fds of older Pythons does not pass MSG_CMSG_CLOEXEC on
            os.set_inheritable(fd, False)
        return (json.loads(data), fds) if data else None
