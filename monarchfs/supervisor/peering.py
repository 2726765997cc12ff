"""Whom a mount shares its copies with, as its supervisor arranges it."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

from monarchfs.config import Config
from monarchfs.peers import credentials
from monarchfs.peers.certificates import key_and_certificate, public_key_pin
from monarchfs.peers.nodes import PeerNode, Peers, parse_nodes
from monarchfs.peers.web_server import WebServerOptions, configuration, find_nginx
from monarchfs.supervisor.identity import acting_as, popen_as
from monarchfs.supervisor.peer_server import PeerServer
from monarchfs.system.bounded import answer_within
from monarchfs.types import OperationError, UsageError

_BACKLOG = 1024
RESOLVE_SECONDS = 5.0


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
        key = credentials.read_site_key(config.peer_key)
    except OSError as error:
        raise UsageError(
            f"the key {config.peer_key} cannot be read: {error.strerror}: see --peer-key"
        ) from None
    if find_nginx() is None:
        raise UsageError("peers need nginx, which is not installed: apt-get install nginx-light")
    user = config.user
    groups = {user.gid, *user.groups}
    secret = credentials.mount_secret(key, user.uid, groups, os.fsencode(config.source))
    return Peers(tuple(nodes), own, secret, public_key_pin(secret) if config.peer_tls else "")


def open_peer_server(
    config: Config, peers: Peers, address: str, directory: str, tiers: list[str], undo: ExitStack
) -> PeerServer:
    """The web server, not started yet, with the socket on which the worker answers it.

    ``address``: where it listens. ``directory`` is the server's own, below the state directory; it
    is made here. ``tiers``: the dataset's directories. Raises OperationError.
    """
    user = config.user
    path = Path(directory)
    own = peers.nodes[peers.own]
    certificate = key_and_certificate(peers.secret) if peers.pin else ""
    try:
        with acting_as(user):
            path.mkdir(0o700, exist_ok=True)
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise OperationError(f"{path} is no directory: remove it")
            options = WebServerOptions(
                path,
                address,
                own.port,
                [Path(tier) for tier in tiers],
                path / "worker.sock",
                peers.secret,
                certificate=certificate,
            )
            configuration(options)
            (path / "worker.sock").unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(options.worker_socket))
            listener.listen(_BACKLOG)
    except (OSError, ValueError) as error:
        raise OperationError(f"cannot serve peers: {path}: {error}") from None
    program = find_nginx()
    assert program is not None  # find_peers has looked
    server = PeerServer(program, options, popen_as(user), listener, peers)
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
