"""Whom a mount shares its copies with, and its web server for them: started with the mount,
restarted if it dies, ended with it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from monarchfs.config import Config, User
from monarchfs.peers import web_server
from monarchfs.peers.credentials import (
    key_and_certificate,
    mount_secret,
    public_key_pin,
    read_site_key,
)
from monarchfs.peers.nodes import PeerNode, Peers, parse_nodes
from monarchfs.peers.web_server import WebServerOptions, configuration, find_nginx
from monarchfs.supervisor.identity import acting_as, open_file_as, popen_as
from monarchfs.system.bounded import answer_within
from monarchfs.system.privileges import die_with_parent
from monarchfs.types import OperationError, UsageError

log = logging.getLogger(__name__)

_BACKLOG = 1024
RESOLVE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 60.0
_STEADY_SECONDS = 60.0
"""A server that lived for so long is started again at once."""
_END_SECONDS = 1.0


def find_peers(config: Config) -> Peers | None:
    """Whom the mount is to share with; None: nobody.

    Raises UsageError for a list or a key that is none, OperationError if TLS is wanted and openssl
    is missing or fails.
    """
    if not config.peers:
        return None
    nodes = parse_nodes(config.peers, config.peer_port)
    name = config.peer_name or socket.gethostname()
    known = {node.name: number for number, node in enumerate(nodes)}
    own = known.get(name, known.get(name.partition(".")[0]))
    if own is None:
        raise UsageError(
            f"this node, {name}, is not in the list of peers: name it with --peer-name"
        )
    if config.peer_key is None:
        raise UsageError("peers need a key that all of them have: give its file with --peer-key")
    try:
        key = read_site_key(config.peer_key)
    except OSError as error:
        raise UsageError(
            f"the key {config.peer_key} cannot be read: {error.strerror}: see --peer-key"
        ) from None
    if find_nginx() is None:
        raise UsageError("peers need nginx, which is not installed: apt-get install nginx-light")
    user = config.user
    groups = {user.gid, *user.groups}
    secret = mount_secret(key, user.uid, groups, os.fsencode(config.source))
    return Peers(tuple(nodes), own, secret, public_key_pin(secret) if config.peer_tls else "")


def open_peer_server(
    config: Config, peers: Peers | None, address: str | None, undo: ExitStack
) -> PeerServer | None:
    """The web server, not started yet, with the socket on which the worker answers it; None where
    the mount shares with nobody. ``address``: where it listens. Its directory, below the state
    directory, is made here. Raises OperationError."""
    if peers is None or address is None:
        return None
    user = config.user
    path = Path(config.state_dir, "peers")
    own = peers.nodes[peers.own]
    certificate = key_and_certificate(peers.secret) if peers.pin else ""
    try:
        with acting_as(user):
            path.mkdir(0o700, exist_ok=True)
            options = WebServerOptions(
                path,
                address,
                own.port,
                [Path(tier.path, tier.directory) for tier in config.tiers],
                path / "worker.sock",
                peers.secret,
                certificate=certificate,
            )
            configuration(options)
            (path / "worker.sock").unlink(missing_ok=True)
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(options.worker_socket))
            listener.listen(_BACKLOG)
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise OperationError(f"cannot serve peers: {path}: {error}") from None
    program = find_nginx()
    assert program is not None  # find_peers has looked
    server = PeerServer(program, options, user, directory, listener, peers)
    undo.callback(server.close)
    return server


def address_of(node: PeerNode, seconds: float = RESOLVE_SECONDS) -> str:
    """Where it listens. A directory service may never answer. Raises OperationError."""

    def resolved() -> str:
        return str(socket.getaddrinfo(node.address, None)[0][4][0])

    address: str | None = answer_within(seconds, resolved, otherwise=None)
    if address is None:
        raise OperationError(
            f"cannot serve peers: the address of {node.address} is not known: see getent hosts"
            f" {node.address}"
        )
    return address


class PeerServer:
    """One nginx.

    Constant: its program and options, whose process it is, its open directory, and the socket of
    the workers. Changing: ``peers``, whom it serves; the process, when it was started, when the
    next one may be, and the pause before that one.
    """

    def __init__(
        self,
        program: str,
        options: WebServerOptions,
        user: User,
        directory: int,
        listener: socket.socket,
        peers: Peers,
    ) -> None:
        """``directory``: the descriptor of that of the options; ``listener``: where workers answer
        the server. Both are closed in the end."""
        self.listener = listener
        self.peers = peers
        self._program = program
        self._options = options
        self._user = user
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._next = 0.0
        self._pause = _FIRST_PAUSE_SECONDS

    def tick(self, now: float) -> None:
        """Start it if it does not run."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if now - self._started >= _STEADY_SECONDS:
                self._pause = _FIRST_PAUSE_SECONDS
            log.warning(
                "nginx ended (%s): peers get nothing from here for %g s: see %s",
                code, self._pause, self._options.directory / "nginx.log",
            )  # fmt: skip
            self._put_off(now)
        if now < self._next:
            return
        try:
            self._write_files()
            self._process = web_server.start(
                self._options,
                self._program,
                popen_as(self._user),
                partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
            self._started = now
        except OSError as error:
            log.warning("cannot start nginx: %s", error)
            self._put_off(now)

    def _write_files(self) -> None:
        """Anew each time: they are the user's, who may have changed them."""
        for name, text in web_server.files(self._options, as_root=self._user.uid == 0).items():
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            descriptor = open_file_as(self._user, name, flags, directory=self._directory)
            with open(descriptor, "w") as file:
                file.write(text)

    def _put_off(self, now: float) -> None:
        self._next = now + self._pause
        self._pause = min(self._pause * 2, _MAX_PAUSE_SECONDS)

    @property
    def pid(self) -> int | None:
        """Of the process that runs, if one does."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def close(self) -> None:
        """End it; what it serves is cut off."""
        self.listener.close()
        os.close(self._directory)
        process, self._process = self._process, None
        self._next = float("inf")
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
