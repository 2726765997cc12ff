"""Nodes that share large files: spans come from their owners, and every byte is the source's."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from monarchfs.peers.nodes import parse_nodes
from monarchfs.peers.ownership import Ownership
from monarchfs.peers.web_server import find_nginx
from monarchfs.prefetch.spans import SPAN_BYTES
from monarchfs.types import SourceStat
from tests.peers.test_sharing import (
    Nodes,
    kill_node,
    peers,
    read_all,
    read_at_once,
    total_bytes,
)
from tests.support import surroundings
from tests.support.mounting import Bench, run, wait_for

pytestmark = [
    surroundings.requires_fuse,
    pytest.mark.skipif(find_nginx() is None, reason="needs nginx: apt-get install nginx-light"),
]

MiB = 1 << 20
SIZES = [2 * MiB, 5 * MiB + 1, 20 * MiB, 66 * MiB + 12345, 3 * MiB, 9 * MiB, 140 * MiB]


@pytest.fixture
def source(work: Bench) -> Path:
    """Some large files, one with holes."""
    rng = random.Random(4)
    path = work.path / "source"
    path.mkdir()
    for number, size in enumerate(SIZES):
        (path / f"{number}").write_bytes(rng.randbytes(size))
    with open(path / "holes", "wb") as file:
        file.truncate(30 * MiB)
        os.pwrite(file.fileno(), rng.randbytes(3 * MiB), 11 * MiB)
    for entry in path.iterdir():
        os.utime(entry, (1.6e9, 1.6e9))
    return path


def read_from_peers(nodes: Nodes) -> int:
    return sum(peer["read_bytes"] for m in nodes.mounts.values() for peer in peers(m))


def owned_bytes(source: Path, name: str, names: str) -> int:
    """What a node owns."""
    ownership = Ownership(parse_nodes(list(names), 1))
    device = source.stat().st_dev
    owned = 0
    for file in source.iterdir():
        stat = SourceStat.of(file.stat(), device)
        for start in range(0, stat.size, SPAN_BYTES):
            if ownership.owner(stat.version.replica_name, start // SPAN_BYTES).name == name:
                owned += min(SPAN_BYTES, stat.size - start)
    return owned


def large_replicas(work: Bench, name: str) -> list[Path]:
    """The files of a node's complete large replicas."""
    return [
        file
        for file in (work.path / name / "tier").glob("*/??/*")
        if file.is_file() and "." in file.name
    ]


def test_a_copy_of_all_reads_the_source_once(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3, "--prefetch", "all")
    for mount in nodes.mounts.values():
        assert mount.wait_idle()["files"]["resident"] == len(SIZES) + 1
    assert nodes.read_bytes() < 1.3 * total_bytes(source)
    assert read_from_peers(nodes) > 1.6 * total_bytes(source)
    for mount in nodes.mounts.values():
        read_all(mount, source)


def test_readers_of_all_at_once(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3)
    nodes.until_they_know_each_other()
    read_at_once(nodes, source)
    for mount in nodes.mounts.values():
        assert mount.wait_idle()["files"]["resident"] == len(SIZES) + 1
    # A busy machine misses a deadline now and then, and goes to the source.
    assert nodes.read_bytes() < 1.6 * total_bytes(source)
    assert not any(peer["wrong"] for m in nodes.mounts.values() for peer in peers(m))


def test_owners_copy_their_spans_alone_for_others(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3)
    nodes.until_they_know_each_other()
    a, *others = nodes.mounts.values()
    run("warm", str(a.path), "--wait", timeout=60)
    for mount in others:
        mount.wait_idle()
    kept = sum(mount.status()["tiers"][0]["used_bytes"] for mount in others)
    assert 0 < kept < 1.1 * total_bytes(source)
    assert nodes.read_bytes() < 1.2 * total_bytes(source)
    read_all(a, source)
    for mount in others:
        run("warm", str(mount.path), "--wait", timeout=60)
        read_all(mount, source)
    assert nodes.read_bytes() < 1.3 * total_bytes(source)


def test_a_worker_that_has_copied_nothing_reads_what_its_tier_has(
    work: Bench, source: Path
) -> None:
    nodes = Nodes(work, source, 2)
    nodes.until_they_know_each_other()
    a, b = nodes.mounts.values()
    run("warm", str(a.path), "--wait", timeout=60)
    assert b.umount().returncode == 0
    state = f"{b.path.parent}/state"
    run("cache", "remove", "--yes", state, "--state-dir", state)
    pid = a.status()["worker"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: a.status()["worker"]["pid"] not in (None, pid), "another worker")
    b = nodes.mounts["b"] = nodes.mount("b")
    nodes.until_they_know_each_other()
    run("warm", str(b.path), "--wait", timeout=60)
    assert peers(b)[0]["read_bytes"] >= 0.8 * owned_bytes(source, "a", "ab")
    read_all(b, source)


@pytest.mark.parametrize("what", ["corrupted", "cut off", "removed"])
def test_replicas_that_somebody_changed(work: Bench, source: Path, what: str) -> None:
    nodes = Nodes(work, source, 2)
    nodes.until_they_know_each_other()
    a, b = nodes.mounts.values()
    run("warm", str(a.path), "--wait", timeout=60)
    replicas = large_replicas(work, "a")
    assert len(replicas) == len(SIZES) + 1
    for replica in replicas:
        replica.chmod(0o600)
        if what == "corrupted":
            with open(replica, "r+b") as file:
                for at in range(0, replica.stat().st_size, 128 << 10):
                    os.pwrite(file.fileno(), b"damage", at)
        elif what == "cut off":
            os.truncate(replica, MiB)
        else:
            replica.unlink()
    read_all(b, source)
    b.wait_idle()
    read_all(b, source)
    if what == "corrupted":
        assert peers(b)[0]["wrong"] > 0


def test_an_owner_that_dies_amid_reading(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2)
    nodes.until_they_know_each_other()
    a, b = nodes.mounts.values()
    run("warm", str(a.path), "--wait", timeout=60)
    for number, file in enumerate(sorted(source.iterdir())):
        if number == 3:
            kill_node(a)
        assert (b.path / file.name).read_bytes() == file.read_bytes()
    assert b.wait_idle()["files"]["resident"] == len(SIZES) + 1
    work.mounts.remove(a)
    run("umount", str(a.path))


@pytest.mark.parametrize("options", [[], ["--share", "partition"]])
def test_the_spans_of_a_lost_owner_are_read_once(
    work: Bench, source: Path, options: list[str]
) -> None:
    nodes = Nodes(work, source, 3, *options)
    nodes.until_they_know_each_other()
    lost = nodes.mounts.pop("a")
    kill_node(lost)
    work.mounts.remove(lost)
    run("umount", str(lost.path))
    wait_for(lambda: all(peers(m)[0]["failed"] for m in nodes.mounts.values()), "the loss")
    for mount in nodes.mounts.values():
        warmed = run("warm", str(mount.path), "--wait", timeout=60)
        assert warmed.returncode == 0, warmed.stderr
    for mount in nodes.mounts.values():
        mount.wait_idle()
    owned = owned_bytes(source, "a", "abc")
    # A busy machine misses a deadline now and then, and goes to the source.
    assert nodes.read_bytes() < 1.1 * total_bytes(source) + 0.5 * owned
    for mount in nodes.mounts.values():
        read_all(mount, source)
    if options:
        used = [m.status()["tiers"][0]["used_bytes"] for m in nodes.mounts.values()]
        assert sum(used) < 1.1 * total_bytes(source)
        assert nodes.read_bytes() < 1.2 * total_bytes(source) + 0.5 * owned


def test_an_owner_that_hangs_costs_some_deadlines(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2)
    nodes.until_they_know_each_other()
    a, b = nodes.mounts.values()
    run("warm", str(a.path), "--wait", timeout=60)
    server = a.status()["peer_server"]["pid"]
    os.kill(server, signal.SIGSTOP)
    try:
        began = time.monotonic()
        read_all(b, source)
        assert b.wait_idle()["files"]["resident"] == len(SIZES) + 1
        assert time.monotonic() - began < 30
        assert peers(b)[0]["failed"] > 0
        assert not peers(b)[0]["read_bytes"]
    finally:
        os.kill(server, signal.SIGCONT)


def test_a_version_that_the_source_has_no_more(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2, "--freshness", "open")
    nodes.until_they_know_each_other()
    a, b = nodes.mounts.values()
    run("warm", str(a.path), "--wait", timeout=60)
    for file in source.iterdir():
        with open(file, "r+b") as changed:
            os.pwrite(changed.fileno(), b"new", file.stat().st_size // 2)
    read_all(b, source)
    b.wait_idle()
    read_all(b, source)
