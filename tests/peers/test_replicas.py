"""Small replicas from a real nginx: the right bytes, or a reason."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarchfs.engine import _units
from monarchfs.engine.units import Unit
from monarchfs.peers import _replicas, credentials, web_server
from monarchfs.store.checksum import checksum, digests
from monarchfs.types import SourceStat
from tests.support.mounting import free_port, wait_for

Peer = tuple[bytes, "subprocess.Popen[bytes]", int]

UNKNOWN, AVOIDED, FAILED, WRONG = 1, 2, 3, 4
"""enum fetch_result in _fetch.h."""

SECRET = credentials.mount_secret(bytes(32), 1000, [1000], b"/lustre/data")
SEGMENT = 5


@contextmanager
def serving(path: Path, port: int, certificate: str = "") -> Iterator[subprocess.Popen[bytes]]:
    program = web_server.find_nginx()
    if program is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    own = path / "nginx"
    own.mkdir(mode=0o700, exist_ok=True)
    options = web_server.WebServerOptions(
        own, "127.0.0.1", port, [path / "tier"], path / "worker.sock", SECRET, certificate
    )
    process = web_server.start(options, program, {})

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return False
        return True

    try:
        wait_for(answers, "nginx")
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """Peer 0 with one segment; its bytes, and the process of its server."""
    data = random.Random(1).randbytes(4 << 20)
    (tmp_path / "tier/segments").mkdir(parents=True)
    (tmp_path / f"tier/segments/{SEGMENT:016x}").write_bytes(data)
    port = free_port()
    with serving(tmp_path, port) as process:
        _replicas.peer(0, f"http://127.0.0.1:{port}")
        _replicas.token(credentials.token("127.0.0.1", SECRET, time.time()), "127.0.0.1")
        yield data, process, port
    _replicas.peer(0, "")
    _replicas.remove_all(0)


def replica(data: bytes, offset: int, size: int) -> bytes:
    name = os.urandom(16)
    digest = checksum(data[offset : offset + size])
    _replicas.put(0, [(name, digest, size, 0, SEGMENT, offset)])
    return name


def test_the_bytes_of_many(peer: Peer) -> None:
    data, *_ = peer
    known = []
    for _ in range(200):
        size = random.randint(1, 300_000)
        offset = random.randrange(0, len(data) - size) & ~4095
        known.append((replica(data, offset, size), offset, size))
    for name, offset, size in known:
        assert _replicas.fetch(name, size) == data[offset : offset + size]
    files, bytes_, wrong, failed, nanoseconds, avoided = _replicas.counts(0)
    assert files >= 200
    assert bytes_ >= sum(size for *_, size in known)
    assert (wrong, failed, avoided) == (0, 0, False)
    assert nanoseconds > 0
    assert _replicas.known(1) == [200]


def test_a_replica_that_no_peer_has() -> None:
    assert _replicas.fetch(os.urandom(16), 10) == UNKNOWN


@pytest.mark.parametrize("what", ["checksum", "gap", "segment", "beyond", "size"])
def test_what_is_not_the_replica_is_not_asked_for_again(
    peer: Peer, what: str, tmp_path: Path
) -> None:
    data, *_ = peer
    name = replica(data, 8192, 5000)
    size = 5000
    if what == "checksum":
        _replicas.put(0, [(name, 1, 5000, 0, SEGMENT, 8192)])
    elif what == "gap":
        with open(tmp_path / f"tier/segments/{SEGMENT:016x}", "r+b") as file:
            file.seek(8192)
            file.write(bytes(5000))
    elif what == "segment":
        _replicas.put(0, [(name, 1, 5000, 0, SEGMENT + 1, 8192)])
    elif what == "beyond":
        _replicas.put(0, [(name, 1, 5000, 0, SEGMENT, 4 << 20)])
    else:
        size = 4999
    assert _replicas.fetch(name, size) == WRONG
    assert _replicas.fetch(name, size) == UNKNOWN
    assert not _replicas.counts(0)[-1]


@pytest.mark.parametrize(
    "token",
    [
        "",
        "?e=99999999999&s=AAAAAAAAAAAAAAAAAAAAAA",
        credentials.token("127.0.0.2", SECRET, time.time()),
        credentials.token("127.0.0.1", SECRET, time.time() - 2 * credentials.TOKEN_SECONDS),
        credentials.token("127.0.0.1", "0" * 64, time.time()),
    ],
    ids=["none", "forged", "another address", "expired", "another job"],
)
def test_who_has_no_token_gets_nothing(peer: Peer, token: str) -> None:
    data, *_ = peer
    name = replica(data, 0, 100)
    _replicas.token(token, "127.0.0.1")
    assert _replicas.fetch(name, 100) == FAILED
    assert _replicas.fetch(name, 100) == AVOIDED


def test_a_frozen_peer_costs_one_deadline_and_is_found_again(peer: Peer) -> None:
    data, process, _ = peer
    name = replica(data, 0, 100)
    for _ in range(50):
        assert _replicas.fetch(name, 100) == data[:100]
    process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert _replicas.fetch(name, 100) == FAILED
        assert time.monotonic() - began < 3
        began = time.monotonic()
        assert _replicas.fetch(name, 100) == AVOIDED
        assert time.monotonic() - began < 0.02
    finally:
        process.send_signal(signal.SIGCONT)
    wait_for(lambda: _replicas.fetch(name, 100) == data[:100], "the peer")


def test_a_peer_that_is_gone_and_comes_back(peer: Peer, tmp_path: Path) -> None:
    """No reader waits to find out."""
    data, process, port = peer
    name = replica(data, 0, 100)
    process.terminate()
    process.wait()
    assert _replicas.fetch(name, 100) == FAILED
    with serving(tmp_path, port):
        wait_for(lambda: _replicas.pause(0) == 0, "the pause to be over")
        assert _replicas.fetch(name, 100) == AVOIDED
        wait_for(lambda: _replicas.fetch(name, 100, True) == data[:100], "the peer")
        assert _replicas.fetch(name, 100) == data[:100]


def test_a_server_without_its_worker_is_avoided(peer: Peer) -> None:
    data, *_ = peer
    name = replica(data, 0, 100)
    assert _replicas.ask(0, "/ask/catalogue", None, 5, 10_000, True)[0] == 502
    assert _replicas.fetch(name, 100) == AVOIDED
    assert _replicas.pause(0) > 0


def test_nothing_but_the_tiers_is_served(peer: Peer) -> None:
    _, _, port = peer
    token = credentials.token("127.0.0.1", SECRET, time.time())

    def ask(method: str, path: str) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(
                f"{method} {path}{token} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            )
            return connection.makefile("rb").readline().split()[1]

    assert ask("GET", f"/tier/0/segments/{SEGMENT:016x}") == b"200"
    for path in ("/", "/tier/0/", "/tier/0/segments/", "/tier/1/x", "/tier/0/../nginx/nginx.conf",
                 "/tier/0/%2e%2e/nginx/nginx.conf", "/tier/0/..%2fnginx/nginx.conf"):  # fmt: skip
        assert ask("GET", path) in (b"400", b"403", b"404"), path
    for method in ("PUT", "DELETE", "POST", "MKCOL"):
        assert ask(method, f"/tier/0/segments/{SEGMENT:016x}") in (b"403", b"405"), method


def test_rows_that_are_none() -> None:
    bad: Any
    for bad in ([(b"short", 0, 0, 0, 1, 0)], [1], [(bytes(16),)]):
        with pytest.raises((ValueError, TypeError)):
            _replicas.put(0, bad)


def test_many_come_and_go() -> None:
    rng = random.Random(2)
    held: dict[bytes, int] = {}
    names = [rng.randbytes(16) for _ in range(3000)]
    for name in names[:40]:  # that have one home
        names.append(names[0][:8] + name[8:])
    for step in range(20_000):
        name = rng.choice(names)
        if rng.random() < 0.6:
            held[name] = step % 2
            _replicas.put(step % 2, [(name, 1, 1, 0, 1, 0)])
        else:
            peer = rng.randrange(2)
            _replicas.put(peer, [(name, 0, 0, 0, 0, 0)])
            if held.get(name) == peer:
                del held[name]
    assert all((_replicas.fetch(name, 1) != UNKNOWN) == (name in held) for name in names)
    counts = _replicas.known(2)
    assert counts == [list(held.values()).count(0), list(held.values()).count(1)]
    _replicas.remove_all(0)
    assert _replicas.known(2) == [0, counts[1]]
    assert all((_replicas.fetch(name, 1) != UNKNOWN) == (held.get(name) == 1) for name in names)
    _replicas.remove_all(1)
    assert _replicas.known(2) == [0, 0]


PART_BYTES = 3 * (256 << 10) + 1000


def part_unit(tmp_path: Path, data: bytes) -> tuple[Unit, int, bytes]:
    """A unit of a file with these bytes; a descriptor of the source's; the digests."""
    source = tmp_path / "source"
    source.write_bytes(data[:PART_BYTES])
    fd = os.open(source, os.O_RDONLY)
    stat = SourceStat.of(os.fstat(fd), 0)
    unit = Unit(1, 0, PART_BYTES, chunk_bytes=128 << 10, version=stat.version, device=0)
    return unit, fd, digests(data[:PART_BYTES])


@pytest.mark.parametrize(
    ("what", "result", "comes"),
    [
        ("right", _units.READ, PART_BYTES),
        ("damaged", _units.WRONG, 512 << 10),
        ("cut off", _units.GONE, 512 << 10),
        ("gone", _units.GONE, 0),
        ("refused", _units.FAILED, 0),
    ],
)
def test_units_from_a_peer(peer: Peer, tmp_path: Path, what: str, result: int, comes: int) -> None:
    data, *_ = peer
    unit, fd, expected = part_unit(tmp_path, data)
    (tmp_path / "tier/parts").mkdir()
    file = tmp_path / "tier/parts/00"
    held = bytearray(data[:PART_BYTES])
    if what == "damaged":
        held[600_000] ^= 1
    if what != "gone":
        file.write_bytes(held[: 600_000 if what == "cut off" else PART_BYTES])
    if what == "refused":
        _replicas.token("?none", "127.0.0.1")
    before = _replicas.counts(0)[1]
    assert unit.read_elsewhere(_replicas.range, 0, "/tier/0/parts/00", expected) == result
    assert unit.elsewhere_bytes == comes
    assert _replicas.counts(0)[1] - before == (PART_BYTES if what == "right" else 0)
    assert unit.read(fd)
    os.close(fd)
    assert unit.read_bytes == PART_BYTES - comes
    assert unit.peek(0, PART_BYTES) == data[:PART_BYTES]
