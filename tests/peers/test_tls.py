"""Peers that encrypt: whoever has another key, or none, is no peer."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from monarchfs.peers import _replicas, certificates, credentials
from monarchfs.store.checksum import checksum
from monarchfs.types import OperationError
from tests.peers.test_replicas import AVOIDED, FAILED, SECRET, SEGMENT, replica, serving
from tests.peers.test_sharing import Nodes, read_all, total_bytes
from tests.support import surroundings
from tests.support.mounting import Bench, free_port, run

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
def served(tmp_path: Path) -> Iterator[tuple[bytes, int]]:
    """Peer 0, which encrypts: the bytes of its segment, and its port."""
    data = random.Random(1).randbytes(1 << 20)
    (tmp_path / "tier/segments").mkdir(parents=True)
    (tmp_path / f"tier/segments/{SEGMENT:016x}").write_bytes(data)
    port = free_port()
    with serving(tmp_path, port, certificates.key_and_certificate(SECRET)):
        _replicas.token(credentials.token("127.0.0.1", SECRET, time.time()), "127.0.0.1")
        yield data, port
    _replicas.peer(0, "")
    _replicas.remove_all(0)
    _replicas.pin("")


def test_the_key_is_a_matter_of_the_secret() -> None:
    assert certificates.public_key_pin(SECRET) == certificates.public_key_pin(SECRET)
    assert certificates.public_key_pin(SECRET) != certificates.public_key_pin(OTHER)
    first, second = map(certificates.key_and_certificate, (SECRET, SECRET))
    assert first.split("-----")[2] == second.split("-----")[2]


def test_a_peer_with_the_key_is_read(served: tuple[bytes, int]) -> None:
    data, port = served
    _replicas.pin(certificates.public_key_pin(SECRET))
    _replicas.peer(0, f"https://127.0.0.1:{port}")
    name = replica(data, 1000, 5000)
    assert in_thread(lambda: _replicas.fetch(name, 5000)) == data[1000:6000]


def test_a_peer_with_another_key_is_not(served: tuple[bytes, int]) -> None:
    data, port = served
    _replicas.pin(certificates.public_key_pin(OTHER))
    _replicas.peer(0, f"https://127.0.0.1:{port}")
    assert in_thread(error_of_a_question) == errno.EKEYREJECTED
    name = replica(data, 0, 100)
    assert in_thread(lambda: _replicas.fetch(name, 100)) == AVOIDED
    _replicas.peer(0, f"https://127.0.0.1:{port}")
    assert in_thread(lambda: _replicas.fetch(name, 100)) == FAILED


HANDSHAKE = """
import sys, threading
from monarchfs.peers import _replicas
pin, url, token, name, checksum, segment = sys.argv[1:]
_replicas.pin(pin)
_replicas.token(token, "127.0.0.1")
_replicas.peer(0, url)
_replicas.put(0, [(bytes.fromhex(name), int(checksum), 5000, 0, int(segment), 0)])
threading.stack_size(64 << 10)
got = []
thread = threading.Thread(target=lambda: got.append(_replicas.fetch(bytes.fromhex(name), 5000)))
thread.start()
thread.join()
sys.stdout.buffer.write(got[0])
"""


def test_a_handshake_fits_into_half_of_a_pool_thread_s_stack(served: tuple[bytes, int]) -> None:
    """STACK_BYTES of fuse/_pool.c."""
    data, port = served
    done = subprocess.run(
        [sys.executable, "-c", HANDSHAKE, certificates.public_key_pin(SECRET),
         f"https://127.0.0.1:{port}", credentials.token("127.0.0.1", SECRET, time.time()),
         os.urandom(16).hex(), str(checksum(data[:5000])), str(SEGMENT)],
        capture_output=True, check=False, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, data[:5000]), done.stderr


def test_without_tls_it_gives_nothing(served: tuple[bytes, int]) -> None:
    data, port = served
    _replicas.peer(0, f"http://127.0.0.1:{port}")
    name = replica(data, 0, 100)
    assert isinstance(in_thread(lambda: _replicas.fetch(name, 100)), int)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"400 Bad Request" in connection.makefile("rb").read()


def test_openssl_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_names, **_path: None)
    with pytest.raises(OperationError, match="apt-get install openssl"):
        certificates.public_key_pin(SECRET)


@surroundings.requires_fuse
def test_mounts_that_encrypt_share(work: Bench) -> None:
    source = work.path / "source"
    source.mkdir()
    rng = random.Random(3)
    for number in range(100):
        file = source / str(number)
        file.write_bytes(rng.randbytes(rng.randint(1, 60_000)))
        os.utime(file, (1_600_000_000, 1_600_000_000))
    (source / "large").write_bytes(rng.randbytes(5 << 20))
    os.utime(source / "large", (1_600_000_000, 1_600_000_000))
    nodes = Nodes(work, source, 2, "--peer-tls", "--prefetch", "all")
    nodes.until_they_know_each_other()
    for mount in nodes.mounts.values():
        mount.wait_idle()
        read_all(mount, source)
    assert nodes.read_bytes() < 1.1 * total_bytes(source)
    assert sum(mount.status()["served"]["peer_files"] for mount in nodes.mounts.values()) > 20
    told = ("--peers", nodes.list, "--peer-name", "a", "--peer-key", str(nodes.key))
    done = run("doctor", str(source), *told, "--peer-tls", "--quick")
    assert "1 of 1 peers answer" in done.stdout, done.stdout + done.stderr
    done = run("doctor", str(source), *told, "--quick")
    assert "0 of 1 peers answer" in done.stdout, done.stdout + done.stderr
