"""Small replicas from a real nginx: the right bytes, or a reason. Whoever has another key, or none,
is no peer."""

import errno
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from monarchfs.cache.store.checksum import checksum, digests
from monarchfs.core import _units
from monarchfs.core.units import Unit
from monarchfs.peers import _replicas, credentials, web_server
from monarchfs.peers.nodes import PeerNode
from monarchfs.supervisor import peering
from monarchfs.types import OperationError, SourceStat
from tests.support.mounting import free_port, wait_for

T = TypeVar("T")

UNKNOWN, AVOIDED, FAILED, WRONG = 1, 2, 3, 4
"""enum fetch_result in _fetch.h."""

SECRET = credentials.mount_secret(bytes(32), 1000, [1000], b"/lustre/data")
SEGMENT = 5
NAME = f"tier/segments/{SEGMENT:016x}"


HERE = "127.0.0.1"


def token(sender: str = HERE, receiver: str = HERE, secret: str = SECRET, age: float = 0) -> str:
    return credentials.token(sender, receiver, secret, time.time() - age)


class Peer:
    """Peer 0, an nginx that has one segment with ``data``."""

    process: subprocess.Popen[bytes]

    def __init__(self, path: Path, certificate: str = "") -> None:
        if web_server.find_nginx() is None:
            pytest.skip("needs nginx: apt-get install nginx-light")
        self.data = random.Random(1).randbytes(4 << 20)
        (path / NAME).parent.mkdir(parents=True)
        (path / NAME).write_bytes(self.data)
        (path / "nginx").mkdir(mode=0o700)
        self.port = free_port()
        self._options = web_server.WebServerOptions(
            *(path / "nginx", "127.0.0.1", self.port, [path / "tier"], path / "worker.sock"),
            *(SECRET, certificate),
        )

    def start(self) -> None:
        for name, text in web_server.files(self._options).items():
            (self._options.directory / name).write_text(text)
        self.process = web_server.start(self._options, str(web_server.find_nginx()), {})

        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        wait_for(answers, "nginx")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait()

    def replica(self, offset: int, size: int) -> bytes:
        name = os.urandom(16)
        digest = checksum(self.data[offset : offset + size])
        _replicas.put(0, [(name, digest, size, 0, SEGMENT, offset)])
        return name


@contextmanager
def a_peer(path: Path, certificate: str = "") -> Iterator[Peer]:
    """One that is known, with a token for it; unless it encrypts, its address is, too."""
    peer = Peer(path, certificate)
    try:
        peer.start()
        _replicas.peer(0, "" if certificate else f"http://127.0.0.1:{peer.port}")
        _replicas.token(0, token())
        _replicas.address(HERE)
        yield peer
    finally:
        peer.stop()
        _replicas.peer(0, "")
        _replicas.remove_all(0)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with a_peer(tmp_path) as peer:
        yield peer


def test_the_bytes_of_many(peer: Peer) -> None:
    known = []
    for _ in range(200):
        size = random.randint(1, 300_000)
        offset = random.randrange(0, len(peer.data) - size) & ~4095
        known.append((peer.replica(offset, size), offset, size))
    for name, offset, size in known:
        assert _replicas.fetch(name, size) == peer.data[offset : offset + size]
    files, bytes_, wrong, failed, nanoseconds, avoided = _replicas.counts(0)
    assert files >= 200
    assert bytes_ >= sum(size for *_, size in known)
    assert (wrong, failed, avoided) == (0, 0, False)
    assert nanoseconds > 0
    assert _replicas.known(1) == [200]


@pytest.mark.parametrize(
    ("digest", "segment", "offset", "size"),
    [
        (1, SEGMENT, 8192, 5000),
        (None, SEGMENT + 1, 8192, 5000),
        (None, SEGMENT, 4 << 20, 5000),
        (None, SEGMENT, 8192, 4999),
        (None, SEGMENT, 0, 5000),
    ],
    ids=["checksum", "no such segment", "beyond its end", "size", "gap"],
)
def test_what_is_not_the_replica_is_not_asked_for_again(
    peer: Peer, tmp_path: Path, digest: int | None, segment: int, offset: int, size: int
) -> None:
    with open(tmp_path / NAME, "r+b") as file:
        file.write(bytes(5000))
    name = os.urandom(16)
    right = checksum(peer.data[offset : offset + 5000])
    _replicas.put(0, [(name, digest or right, 5000, 0, segment, offset)])
    assert _replicas.fetch(name, size) == WRONG
    assert _replicas.fetch(name, size) == UNKNOWN
    assert not _replicas.counts(0)[-1]


@pytest.mark.parametrize(
    "given",
    [
        "",
        "?e=99999999999&s=AAAAAAAAAAAAAAAAAAAAAA",
        token("127.0.0.2"),
        token(receiver="127.0.0.2"),
        token(age=2 * credentials.TOKEN_SECONDS),
        token(secret="0" * 64),
    ],
    ids=["none", "forged", "another address", "another peer", "expired", "another job"],
)
def test_who_has_no_token_gets_nothing(peer: Peer, given: str) -> None:
    name = peer.replica(0, 100)
    _replicas.token(0, given)
    assert _replicas.fetch(name, 100) == FAILED
    assert _replicas.fetch(name, 100) == AVOIDED
    _replicas.peer(0, f"http://127.0.0.1:{peer.port}")
    assert _replicas.ask(0, "/", None, 5, 999)[0] == 403
    assert _replicas.fetch(name, 100) == AVOIDED


def test_a_peer_that_is_gone_and_comes_back(peer: Peer) -> None:
    """No reader waits to find out."""
    name = peer.replica(0, 100)
    peer.stop()
    assert _replicas.fetch(name, 100) == FAILED
    peer.start()
    wait_for(lambda: _replicas.pause(0) == 0, "the pause to be over")
    assert _replicas.fetch(name, 100) == AVOIDED
    wait_for(lambda: _replicas.fetch(name, 100, True) == peer.data[:100], "the peer")
    assert _replicas.fetch(name, 100) == peer.data[:100]


def test_requests_that_one_stall_fails_count_once(peer: Peer) -> None:
    peer.process.send_signal(signal.SIGSTOP)

    def ask(_: int) -> None:
        with suppress(OSError):
            _replicas.ask(0, "/", None, 0.5, 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert _replicas.counts(0)[-1]
    assert _replicas.pause(0) <= 1


def test_a_server_without_its_worker_is_avoided(peer: Peer) -> None:
    name = peer.replica(0, 100)
    assert _replicas.ask(0, "/ask/catalogue", None, 5, 10_000, True)[0] == 502
    assert _replicas.fetch(name, 100) == AVOIDED
    assert _replicas.pause(0) > 0


def test_nothing_but_the_tiers_is_served(peer: Peer) -> None:
    def ask(method: str, path: str) -> bytes:
        with socket.create_connection(("127.0.0.1", peer.port)) as connection:
            lines = (f"{method} {path}{token()} HTTP/1.1", "Host: x", "Connection: close", "", "")
            connection.sendall("\r\n".join(lines).encode())
            return connection.makefile("rb").readline().split()[1]

    segment = f"/tier/0/segments/{SEGMENT:016x}"
    assert ask("GET", segment) == b"200"
    outside = [f"/tier/0/{up}nginx/nginx.conf" for up in ("../", "%2e%2e/", "..%2f")]
    for path in ("/", "/tier/0/", "/tier/0/segments/", "/tier/1/x", *outside):
        assert ask("GET", path) in (b"400", b"403", b"404"), path
    for method in ("PUT", "DELETE", "POST", "MKCOL"):
        assert ask(method, segment) in (b"403", b"405"), method


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
    source = tmp_path / "source"
    source.write_bytes(peer.data[:PART_BYTES])
    fd = os.open(source, os.O_RDONLY)
    version = SourceStat.of(os.fstat(fd), 0).version
    unit = Unit(1, 0, PART_BYTES, chunk_bytes=128 << 10, version=version, device=0)
    expected = digests(peer.data[:PART_BYTES])
    (tmp_path / "tier/parts").mkdir()
    file = tmp_path / "tier/parts/00"
    held = bytearray(peer.data[:PART_BYTES])
    if what == "damaged":
        held[600_000] ^= 1
    if what != "gone":
        file.write_bytes(held[: 600_000 if what == "cut off" else PART_BYTES])
    if what == "refused":
        _replicas.token(0, "?none")
    before = _replicas.counts(0)[1]
    assert unit.read_elsewhere(_replicas.range, 0, "/tier/0/parts/00", expected) == result
    assert unit.elsewhere_bytes == comes
    assert _replicas.counts(0)[1] - before == (PART_BYTES if what == "right" else 0)
    assert unit.read(fd)
    os.close(fd)
    assert unit.read_bytes == PART_BYTES - comes
    assert unit.peek(0, PART_BYTES) == peer.data[:PART_BYTES]


# Peers that encrypt

OTHER = credentials.mount_secret(bytes(32), 1001, [1001], b"/lustre/data")


def in_thread(do: Callable[[], T]) -> T:
    """By a thread of its own: each makes its connections with the key that is expected then."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


@pytest.fixture
def encrypting(tmp_path: Path) -> Iterator[Peer]:
    with a_peer(tmp_path, credentials.key_and_certificate(SECRET)) as peer:
        yield peer
    _replicas.pin("")


def expect(secret: str, peer: Peer) -> None:
    _replicas.pin(credentials.public_key_pin(secret))
    _replicas.peer(0, f"https://127.0.0.1:{peer.port}")


def test_a_peer_with_the_key_is_read(encrypting: Peer) -> None:
    expect(SECRET, encrypting)
    name = encrypting.replica(1000, 5000)
    assert in_thread(lambda: _replicas.fetch(name, 5000)) == encrypting.data[1000:6000]


def test_a_peer_with_another_key_is_not(encrypting: Peer) -> None:
    expect(OTHER, encrypting)
    with pytest.raises(OSError, match=os.strerror(errno.EKEYREJECTED)):
        in_thread(lambda: _replicas.ask(0, "/", None, 5, 100))
    name = encrypting.replica(0, 100)
    assert in_thread(lambda: _replicas.fetch(name, 100)) == AVOIDED
    expect(OTHER, encrypting)
    assert in_thread(lambda: _replicas.fetch(name, 100)) == FAILED


HANDSHAKE = """
import sys, threading
from monarchfs.peers import _replicas
pin, url, token, checksum, segment = sys.argv[1:]
_replicas.pin(pin)
_replicas.address("127.0.0.1")
_replicas.token(0, token)
_replicas.peer(0, url)
_replicas.put(0, [(bytes(16), int(checksum), 5000, 0, int(segment), 0)])
threading.stack_size(64 << 10)
got = []
thread = threading.Thread(target=lambda: got.append(_replicas.fetch(bytes(16), 5000)))
thread.start()
thread.join()
sys.stdout.buffer.write(got[0])
"""


def test_a_handshake_fits_into_half_of_a_pool_thread_s_stack(encrypting: Peer) -> None:
    """STACK_BYTES of core/_pool.c."""
    data = encrypting.data[:5000]
    words = [credentials.public_key_pin(SECRET), f"https://127.0.0.1:{encrypting.port}", token()]
    command = [sys.executable, "-c", HANDSHAKE, *words, str(checksum(data)), str(SEGMENT)]
    assert subprocess.check_output(command, timeout=30) == data


def test_without_tls_it_gives_nothing(encrypting: Peer) -> None:
    _replicas.peer(0, f"http://127.0.0.1:{encrypting.port}")
    name = encrypting.replica(0, 100)
    assert isinstance(in_thread(lambda: _replicas.fetch(name, 100)), int)
    with socket.create_connection(("127.0.0.1", encrypting.port)) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"400 Bad Request" in connection.makefile("rb").read()


def test_openssl_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_names, **_path: None)
    with pytest.raises(OperationError, match="apt-get install openssl"):
        credentials.public_key_pin(SECRET)


# Secrets and tokens, and the address on which a node serves

KEY = bytes(range(64))


def test_a_secret_is_of_a_user_groups_and_a_source() -> None:
    usual = (KEY, 1000, [1000, 5], b"/data/a")
    others: list[tuple[int, Any]] = [(0, bytes(64)), (1, 1001), (2, [1000]), (3, b"/data/b")]
    given = [usual, *((*usual[:at], value, *usual[at + 1 :]) for at, value in others)]
    secrets = [credentials.mount_secret(*one) for one in given]
    assert len(set(secrets)) == len(secrets)
    assert credentials.mount_secret(KEY, 1000, [5, 1000, 5], b"/data/a") == secrets[0]


def test_tokens_are_made_where_md5_is_not_for_security(monkeypatch: pytest.MonkeyPatch) -> None:
    really = hashlib.md5

    def md5(data: bytes, *, usedforsecurity: bool = True) -> Any:
        assert not usedforsecurity
        return really(data, usedforsecurity=False)

    monkeypatch.setattr(hashlib, "md5", md5)
    assert credentials.token(HERE, HERE, "secret", 0).startswith("?e=900&s=")


def test_a_name_service_that_hangs_does_not_hang_a_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(60))
    with pytest.raises(OperationError, match="the address of node1 is not known"):
        peering.address_of(PeerNode("n1", "node1", 9466), 0.1)
