"""Peers that encrypt: whoever has another key, or none, is no peer. Secrets, tokens, addresses."""

from __future__ import annotations

import errno
import hashlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from monarchfs.cache.store.checksum import checksum
from monarchfs.peers import _replicas, certificates, credentials
from monarchfs.peers.nodes import PeerNode
from monarchfs.supervisor import peering
from monarchfs.types import OperationError
from tests.peers.nodes import Nodes, read_all, total_bytes, write_source
from tests.peers.test_replicas import AVOIDED, FAILED, SECRET, SEGMENT, Peer, a_peer, token
from tests.support import surroundings
from tests.support.mounting import Bench, run

T = TypeVar("T")

OTHER = credentials.mount_secret(bytes(32), 1001, [1001], b"/lustre/data")


def in_thread(do: Callable[[], T]) -> T:
    """By a thread of its own: each makes its connections with the key that is expected then."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(do()))
    thread.start()
    thread.join()
    return results[0]


def error_of_a_question() -> int | None:
    try:
        _replicas.ask(0, "/", None, 5, 100)
    except OSError as error:
        return error.errno
    return None


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with a_peer(tmp_path, certificates.key_and_certificate(SECRET)) as peer:
        yield peer
    _replicas.pin("")


def expect(secret: str, peer: Peer) -> None:
    _replicas.pin(certificates.public_key_pin(secret))
    _replicas.peer(0, f"https://127.0.0.1:{peer.port}")


def test_the_key_is_a_matter_of_the_secret() -> None:
    assert certificates.public_key_pin(SECRET) == certificates.public_key_pin(SECRET)
    assert certificates.public_key_pin(SECRET) != certificates.public_key_pin(OTHER)
    first, second = map(certificates.key_and_certificate, (SECRET, SECRET))
    assert first.split("-----")[2] == second.split("-----")[2]


def test_a_peer_with_the_key_is_read(peer: Peer) -> None:
    expect(SECRET, peer)
    name = peer.replica(1000, 5000)
    assert in_thread(lambda: _replicas.fetch(name, 5000)) == peer.data[1000:6000]


def test_a_peer_with_another_key_is_not(peer: Peer) -> None:
    expect(OTHER, peer)
    assert in_thread(error_of_a_question) == errno.EKEYREJECTED
    name = peer.replica(0, 100)
    assert in_thread(lambda: _replicas.fetch(name, 100)) == AVOIDED
    expect(OTHER, peer)
    assert in_thread(lambda: _replicas.fetch(name, 100)) == FAILED


HANDSHAKE = """
import sys, threading
from monarchfs.peers import _replicas
pin, url, token, checksum, segment = sys.argv[1:]
_replicas.pin(pin)
_replicas.token(token, "127.0.0.1")
_replicas.peer(0, url)
_replicas.put(0, [(bytes(16), int(checksum), 5000, 0, int(segment), 0)])
threading.stack_size(64 << 10)
got = []
thread = threading.Thread(target=lambda: got.append(_replicas.fetch(bytes(16), 5000)))
thread.start()
thread.join()
sys.stdout.buffer.write(got[0])
"""


def test_a_handshake_fits_into_half_of_a_pool_thread_s_stack(peer: Peer) -> None:
    """STACK_BYTES of core/_pool.c."""
    data = peer.data[:5000]
    words = [certificates.public_key_pin(SECRET), f"https://127.0.0.1:{peer.port}", token()]
    command = [sys.executable, "-c", HANDSHAKE, *words, str(checksum(data)), str(SEGMENT)]
    assert subprocess.check_output(command, timeout=30) == data


def test_without_tls_it_gives_nothing(peer: Peer) -> None:
    _replicas.peer(0, f"http://127.0.0.1:{peer.port}")
    name = peer.replica(0, 100)
    assert isinstance(in_thread(lambda: _replicas.fetch(name, 100)), int)
    with socket.create_connection(("127.0.0.1", peer.port)) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"400 Bad Request" in connection.makefile("rb").read()


def test_openssl_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_names, **_path: None)
    with pytest.raises(OperationError, match="apt-get install openssl"):
        certificates.public_key_pin(SECRET)


@surroundings.requires_fuse
def test_mounts_that_encrypt_share(work: Bench) -> None:
    source = write_source(work.path / "source", [*range(1, 60_000, 600), 5 << 20])
    nodes = Nodes(work, source, 2, "--peer-tls", "--prefetch", "all")
    for mount in nodes.mounts.values():
        mount.wait_idle()
        read_all(mount, source)
    assert nodes.read_bytes() < 1.1 * total_bytes(source)
    assert nodes.served("peer_files") > 20
    told = ("--peers", nodes.list, "--peer-name", "a", "--peer-key", str(nodes.key))
    done = run("doctor", str(source), *told, "--peer-tls", "--quick")
    assert "1 of 1 peers answer" in done.stdout, done.stdout + done.stderr
    done = run("doctor", str(source), *told, "--quick")
    assert "0 of 1 peers answer" in done.stdout, done.stdout + done.stderr


# Secrets and tokens, and the address on which a node serves

KEY = bytes(range(64))


def test_a_secret_is_of_a_user_groups_and_a_source() -> None:
    secrets = [
        credentials.mount_secret(KEY, 1000, [1000, 5], b"/data/a"),
        credentials.mount_secret(KEY, 1001, [1000, 5], b"/data/a"),
        credentials.mount_secret(KEY, 1000, [1000], b"/data/a"),
        credentials.mount_secret(KEY, 1000, [1000, 5], b"/data/b"),
        credentials.mount_secret(bytes(64), 1000, [1000, 5], b"/data/a"),
    ]
    assert len(set(secrets)) == len(secrets)
    assert credentials.mount_secret(KEY, 1000, [5, 1000, 5], b"/data/a") == secrets[0]


def test_tokens_are_made_where_md5_is_not_for_security(monkeypatch: pytest.MonkeyPatch) -> None:
    really = hashlib.md5

    def md5(data: bytes, *, usedforsecurity: bool = True) -> Any:
        assert not usedforsecurity
        return really(data, usedforsecurity=False)

    monkeypatch.setattr(hashlib, "md5", md5)
    assert credentials.token("127.0.0.1", "secret", 0).startswith("?e=900&s=")


def test_a_name_service_that_hangs_does_not_hang_a_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(60))
    with pytest.raises(OperationError, match="the address of node1 is not known"):
        peering.address_of(PeerNode("n1", "node1", 9466), 0.1)


def test_an_address_needs_no_name_service() -> None:
    assert peering.address_of(PeerNode("n1", "127.0.0.7", 9466)) == "127.0.0.7"
