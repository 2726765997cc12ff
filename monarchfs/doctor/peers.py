"""Sharing with peers: nginx, libcurl, the list and the key, and whether each peer answers.

libcurl is loaded by ``_replicas``, so that is imported where it is needed: most mounts, and their
checks, do without.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from importlib import import_module
from ipaddress import ip_address

from monarchfs.config import Config
from monarchfs.doctor.checks import Check, Value, from_error, ok, problem, warning
from monarchfs.fuse.mount import SYSTEM_PATH
from monarchfs.peers import credentials
from monarchfs.peers.nodes import PeerNode, Peers
from monarchfs.peers.web_server import find_nginx
from monarchfs.supervisor.peering import address_of, find_peers
from monarchfs.types import MonarchError

PEERS_SECONDS = 15.0
MOST_SHOWN = 8
SECURE_LINK = "http_secure_link_module"
_VERSION_SECONDS = 3.0
_RESOLVE_SECONDS = 3.0
_ANSWER_SECONDS = 2.0
_ANSWER_BYTES = 1 << 20
_ALL_SECONDS = 6.0
_THREADS = 32


def peers(config: Config) -> Iterator[Check]:
    """For a child process, because names may not be resolved in time."""
    try:
        import_module("monarchfs.peers._replicas")
    except ImportError as error:
        detail = f"libcurl, which peers need, cannot be loaded: {error}"
        yield problem("libcurl", detail, "apt-get install libcurl4")
        return
    program = find_nginx()
    if program is None:
        remedy = "apt-get install nginx-light"
        yield problem("nginx", "nginx, which peers need, is not installed", remedy)
        return
    asked = [program, "-V"]
    environ = {"PATH": SYSTEM_PATH}
    done = subprocess.run(
        asked, capture_output=True, text=True, timeout=_VERSION_SECONDS, env=environ, check=False
    )
    yield judge_nginx(program, done.stderr)
    try:
        # As the mount names it, whose secret has the name in it.
        source = os.path.realpath(config.source) if config.source else ""
        found = find_peers(replace(config, source=source))
        assert found is not None  # there is a list, or this is not asked
        own = found.nodes[found.own]
        address = address_of(own, _RESOLVE_SECONDS)
    except MonarchError as error:
        yield from_error("peers", error)
        return
    if ip_address(address).is_loopback and len(found.nodes) > 1:
        detail = f"{own.name}, this node, is {address} here, where no other node reaches it"
        yield warning("peers", detail, "correct /etc/hosts, or give NAME=ADDRESS")
    yield from judge_peers(ask_all(found, address, authorised=bool(config.source)))


def judge_nginx(program: str, build: str) -> Check:
    """Whether it can check tokens, by what `nginx -V` says."""
    version = build.partition("nginx/")[2].split("\n")[0].split(" ")[0]
    numbers: dict[str, Value] = {"path": program, "version": version}
    if SECURE_LINK not in build:
        detail = f"{program} {version} was built without {SECURE_LINK}: peers get nothing"
        return problem("nginx", detail, "apt-get install nginx-light", **numbers)
    return ok("nginx", f"{program} {version}", **numbers)


def ask_all(peers: Peers, own_address: str, *, authorised: bool) -> dict[PeerNode, str]:
    """Why each of the other nodes does not answer, "" for those that do. ``authorised``: the secret
    is that of the source, so they have to answer a request that is signed with it."""
    from monarchfs.peers import _replicas

    path = "/ask/catalogue?after=" if authorised else "/"

    def ask(number: int, node: PeerNode) -> str:
        found = socket.getaddrinfo(node.address, node.port, type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
        token = credentials.token(own_address, address, peers.secret, time.time())
        _replicas.token(number, token if authorised else "")
        _replicas.peer(number, node.url(address, tls=bool(peers.pin)))
        status, _answer = _replicas.ask(number, path, None, _ANSWER_SECONDS, _ANSWER_BYTES)
        # Who has no token is refused: so there is somebody.
        return "" if status == 200 or (status == 403 and not authorised) else f"status {status}"

    _replicas.address(own_address)
    _replicas.pin(peers.pin)
    pool = ThreadPoolExecutor(_THREADS)
    others = [one for one in enumerate(peers.nodes) if one[0] != peers.own]
    asked = {pool.submit(ask, *one): one[1] for one in others}
    done, _late = wait(asked, _ALL_SECONDS)
    pool.shutdown(wait=False, cancel_futures=True)
    return {node: _said(one) if one in done else "no answer" for one, node in asked.items()}


def _said(one: Future[str]) -> str:
    try:
        return one.result()
    except OSError as error:
        return error.strerror or str(error)


def judge_peers(said: dict[PeerNode, str]) -> Iterator[Check]:
    """One check for all, and one for each of the first few that do not answer."""
    silent = {node: why for node, why in said.items() if why}
    answering = len(said) - len(silent)
    judged = warning if silent else ok
    detail = f"{answering} of {len(said)} peers answer" if said else "there are no others"
    yield judged("peers", detail, peers=len(said), answering=answering)
    for node, why in list(silent.items())[:MOST_SHOWN]:
        remedy = "mount there as well; check its firewall"
        if why == "status 403":
            remedy = "mount there with the same key, user, groups and source; compare the clocks"
        where = f"{node.name} ({node.address}:{node.port}): {why}"
        yield warning("peer", where, remedy, peer=node.name, address=node.address, port=node.port)
