"""Nodes that share: mounts of one source on addresses of their own, each with its own tier."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config.places import search_of
from monarchfs.control.client import request
from monarchfs.peers.web_server import find_nginx
from monarchfs.supervisor.recover import required
from monarchfs.types import OperationError
from tests.support import surroundings
from tests.support.mounting import Bench, Mount, run, wait_for

pytestmark = [
    surroundings.requires_fuse,
    pytest.mark.skipif(find_nginx() is None, reason="needs nginx: apt-get install nginx-light"),
]

FILES = 300


@pytest.fixture
def source(work: Bench) -> Path:
    """Small files in some directories; the total is ``total_bytes``."""
    rng = random.Random(3)
    path = work.path / "source"
    for number in range(FILES):
        directory = path / f"class {number % 7}" / "x"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:04d}").write_bytes(rng.randbytes(rng.randint(1, 60_000)))
    old = 1_600_000_000
    for file in path.rglob("*"):
        os.utime(file, (old, old))
    return path


def total_bytes(source: Path) -> int:
    return sum(file.stat().st_size for file in source.rglob("*") if file.is_file())


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Nodes:
    """Mounts that share, called a, b, c."""

    def __init__(
        self, work: Bench, source: Path, count: int, *options: str, tier: str = "1G"
    ) -> None:
        self.work = work
        self.tier = tier
        self.source = source
        self.options = options
        self.names = "abcdefgh"[:count]
        addresses = [f"127.0.0.{2 + number}" for number in range(count)]
        self.ports = [free_port(address) for address in addresses]
        self.list = ",".join(
            f"{name}={address}:{port}"
            for name, address, port in zip(self.names, addresses, self.ports, strict=True)
        )
        self.key = work.path / "key"
        self.key.write_bytes(os.urandom(64))
        self.key.chmod(0o400)
        self.mounts = {name: self.mount(name) for name in self.names}

    def mount(self, name: str, *options: str) -> Mount:
        at = self.work.path / name
        at.mkdir(exist_ok=True)
        return self.work.mount(
            *(self.source, "--state-dir", f"{at}/state", "--freshness", "immutable"),
            *("--peers", self.list, "--peer-name", name, "--peer-key", str(self.key)),
            *(*self.options, *options),
            tiers=[f"{at}/tier={self.tier}"],
            point=at / "mnt",
        )

    def until_they_know_each_other(self) -> None:
        def do() -> bool:
            return all(answers(peer) for mount in self.mounts.values() for peer in peers(mount))

        wait_for(do, "the peers")

    def read_bytes(self) -> int:
        """What all have read of the source."""
        return sum(mount.status()["source_io"]["read_bytes"] for mount in self.mounts.values())


def peers(mount: Mount) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = mount.status()["peers"]
    return listed


def answers(peer: dict[str, Any]) -> bool:
    return bool(peer["error"] is None and not peer["avoided"] and peer["answered"])


def kill_node(mount: Mount) -> None:
    """Supervisor, worker and web server."""
    status = mount.status()
    pid = status["worker"]["pid"]
    supervisor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    for victim in (supervisor, pid, status["peer_server"]["pid"]):
        os.kill(victim, signal.SIGKILL)


def read_all(mount: Mount, source: Path, seed: int = 0) -> None:
    """Every file, in random order; each has the source's bytes."""
    files = sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file())
    random.Random(seed).shuffle(files)
    for file in files:
        assert (mount.path / file).read_bytes() == (source / file).read_bytes(), file


def read_at_once(nodes: Nodes, source: Path) -> None:
    """Each node reads every file, in an order of its own."""
    with ThreadPoolExecutor(3) as pool:
        reads = [
            pool.submit(read_all, mount, source, seed)
            for seed, mount in enumerate(nodes.mounts.values())
        ]
        for read in reads:
            read.result()


def test_each_byte_leaves_the_source_once(work: Bench, source: Path) -> None:
    slow = work.faulty_source(source)
    slow.faults(delay=0.01, delayed=["open", "read"])  # nobody asks peers instead of a faster one
    nodes = Nodes(work, slow.path, 3)
    nodes.until_they_know_each_other()
    read_at_once(nodes, source)
    for mount in nodes.mounts.values():
        assert mount.wait_idle()["files"]["resident"] == FILES
    # A busy machine misses a deadline now and then, and goes to the source.
    assert nodes.read_bytes() < 1.5 * total_bytes(source)
    assert sum(peer["read_files"] for m in nodes.mounts.values() for peer in peers(m)) > FILES
    assert not any(peer["wrong"] for m in nodes.mounts.values() for peer in peers(m))


def test_nodes_copy_everything_ahead_and_each_byte_leaves_the_source_once(
    work: Bench, source: Path
) -> None:
    nodes = Nodes(work, source, 3, "--prefetch", "all")
    for mount in nodes.mounts.values():
        assert mount.wait_idle()["files"]["resident"] == FILES
    assert nodes.read_bytes() < 1.5 * total_bytes(source)
    for mount in nodes.mounts.values():
        read_all(mount, source)
    assert not any(peer["wrong"] for m in nodes.mounts.values() for peer in peers(m))


def test_what_a_peer_has_is_found_after_it_was_mounted_anew(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2, "--prefetch", "all")
    first = nodes.mounts["a"]
    first.wait_idle()
    nodes.mounts["b"].wait_idle()
    assert first.umount().returncode == 0
    nodes.mounts["a"] = nodes.mount("a", "--prefetch", "none")
    b = nodes.mounts["b"]
    assert b.umount().returncode == 0
    at = work.path / "b"
    run("cache", "remove", "--yes", str(at / "state"), "--state-dir", str(at / "state"))
    b = nodes.mounts["b"] = nodes.mount("b", "--prefetch", "none")
    nodes.until_they_know_each_other()
    owned = wait_for(lambda: peers(b)[0]["has_files"], "the catalogue")
    read_all(b, source)
    assert 0.3 * FILES < owned < 0.7 * FILES
    assert peers(b)[0]["read_files"] >= owned


@pytest.mark.parametrize("freshness", ["immutable", "ttl=600", "open"])
def test_opens_are_counted_where_they_were_served(
    work: Bench, source: Path, freshness: str
) -> None:
    nodes = Nodes(work, source, 2, "--freshness", freshness, "--prefetch", "access")
    a, b = nodes.mounts.values()
    read_all(a, source)
    a.wait_idle()
    nodes.until_they_know_each_other()
    owned = wait_for(lambda: peers(b)[0]["has_files"], "the catalogue")
    read_all(b, source)
    served = b.status()["served"]
    places = ("local", "peer", "source")  # local: a had it copied
    assert sum(served[f"{place}_opens"] for place in places) == FILES
    assert sum(served[f"{place}_file_bytes"] for place in places) == total_bytes(source)
    # Only while a name is fresh does an open not ask the source.
    assert served["peer_files"] >= owned
    assert served["peer_opens"] == (0 if freshness == "open" else served["peer_files"])


@pytest.mark.parametrize("what", ["corrupted", "cut off", "removed"])
def test_segments_that_somebody_changed(work: Bench, source: Path, what: str) -> None:
    nodes = Nodes(work, source, 2)
    a, b = nodes.mounts.values()
    read_all(a, source)
    a.wait_idle()
    nodes.until_they_know_each_other()
    wait_for(lambda: peers(b)[0]["has_files"], "the catalogue")
    segments = list((work.path / "a/tier").glob("*/segments/*"))
    assert segments
    for segment in segments:
        if segment.suffix:
            continue
        segment.chmod(0o600)
        if what == "corrupted":
            segment.write_bytes(bytes(segment.stat().st_size))
        elif what == "cut off":
            os.truncate(segment, 100)
        else:
            segment.unlink()
    read_all(b, source)
    assert peers(b)[0]["wrong"] > 0


def test_a_peer_that_dies_amid_reading(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2)
    a, b = nodes.mounts.values()
    nodes.until_they_know_each_other()
    read_all(a, source, 1)
    files = sorted(file for file in source.rglob("*") if file.is_file())
    for number, file in enumerate(files):
        if number == FILES // 3:
            kill_node(a)
        name = file.relative_to(source)
        assert (b.path / name).read_bytes() == file.read_bytes()
    work.mounts.remove(a)
    run("umount", str(a.path))


def test_a_worker_or_a_server_that_dies_is_followed_by_another(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2)
    a, b = nodes.mounts.values()
    nodes.until_they_know_each_other()
    pid = a.status()["worker"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: a.status()["worker"]["pid"] not in (None, pid), "another worker")
    server = a.status()["peer_server"]["pid"]
    os.kill(server, signal.SIGTERM)
    wait_for(lambda: a.status()["peer_server"]["pid"] not in (None, server), "another nginx")
    nodes.until_they_know_each_other()
    read_all(a, source)
    a.wait_idle()
    wait_for(lambda: peers(b)[0]["has_files"], "the catalogue")
    read_all(b, source)
    assert peers(b)[0]["read_files"]


def test_the_list_is_changed_under_a_mount(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3)
    a, b, c = nodes.mounts.values()
    nodes.until_they_know_each_other()
    worker = a.status()["worker"]["pid"]
    for mount in (a, b):
        done = run("peers", str(mount.path), "remove", "c")
        assert (done.returncode, done.stdout) == (0, "a\nb\n"), done.stderr
    assert a.status()["worker"]["pid"] != worker
    assert [peer["name"] for peer in peers(a)] == ["b"]
    # A worker that follows has the same list.
    worker = a.status()["worker"]["pid"]
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: a.status()["worker"]["pid"] not in (None, worker), "another worker")
    wait_for(lambda: [peer["name"] for peer in peers(a)] == ["b"], "its list")
    for mount in (a, b):
        c_again = nodes.list.split(",")[2]
        done = run("peers", str(mount.path), "add", c_again, "--json")
        assert json.loads(done.stdout) == {"nodes": ["a", "b", "c"]}, done.stderr
    nodes.until_they_know_each_other()
    read_all(a, source)
    a.wait_idle()
    wait_for(lambda: all(p["has_files"] or p["name"] == "b" for p in peers(c)), "the catalogue")
    read_all(c, source)
    shown = json.loads(run("peers", str(c.path), "--json").stdout)
    assert (shown["name"], shown["address"], shown["port"]) == ("c", "127.0.0.4", nodes.ports[2])
    assert shown["peer_server"]["pid"]
    gave = {peer["name"]: peer for peer in shown["peers"]}
    assert gave["a"]["read_files"] > 0
    assert gave["a"]["answer_age_seconds"] < 60
    lines = run("peers", str(c.path)).stdout.splitlines()
    assert lines[0].startswith(f"this node: c=127.0.0.4:{nodes.ports[2]}; nginx is process ")
    assert lines[1].split() == ["peer", "state", "has", "gave", "bytes", "a", "file", "fallbacks"]
    assert [line.split("=")[0] for line in lines[2:]] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["add", "a"], 1, "'a' is twice in the list"),
        (["remove", "x"], 1, "'x' is not in the list"),
        (["remove", "a"], 1, "'a' is this node"),
        (["add", "x;y"], 1, "'x;y' is no peer"),
        (["add"], 2, "which nodes"),
    ],
)
def test_a_list_that_cannot_be_changed_stays(
    work: Bench, source: Path, words: list[str], code: int, said: str
) -> None:
    nodes = Nodes(work, source, 1)
    mount = nodes.mounts["a"]
    worker = mount.status()["worker"]["pid"]
    done = run("peers", str(mount.path), *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert mount.status()["worker"]["pid"] == worker


@pytest.mark.parametrize("add", ["bcd", 1, True, {}])
def test_a_list_is_a_list(work: Bench, source: Path, add: object) -> None:
    mount = Nodes(work, source, 1).mounts["a"]
    daemon = required(str(mount.path), search_of(os.environ)).daemon
    with pytest.raises(OperationError, match="must be"):
        request(daemon, {"command": "change_peers", "add": add}, 10)


def test_a_mount_of_its_own_has_no_peers(work: Bench, source: Path) -> None:
    mount = work.mount(source)
    for words in ([], ["add", "x"]):
        done = run("peers", str(mount.path), *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert "has no peers: mount with --peers" in done.stderr


def test_the_doctor_asks_each_peer(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2)
    nodes.until_they_know_each_other()
    silent = free_port("127.0.0.4")
    words = [
        *("--quick", "--json", "--tier", f"{work.path}/x=1M", "--state-dir", f"{work.path}/y"),
        *("--peers", f"{nodes.list},x=127.0.0.4:{silent}", "--peer-name", "a"),
    ]

    def ask(*more: str) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for check in json.loads(run("doctor", *words, *more).stdout)["checks"]:
            found.setdefault(check["name"], []).append(check)
        return found

    # It is one of them for the other node, by the key and the source.
    found = ask(str(source), "--peer-key", str(nodes.key))
    assert found["nginx"][0]["state"] == "ok"
    assert "no other node reaches it" in found["peers"][0]["detail"]
    assert found["peers"][1]["detail"] == "1 of 2 peers answer"
    assert [(one["peer"], one["detail"].split(": ")[1]) for one in found["peer"]] == [
        ("x", "Connection refused")
    ]
    assert ask("--peer-key", str(nodes.key))["peers"][1]["answering"] == 1
    other = work.path / "other"
    other.write_bytes(os.urandom(64))
    other.chmod(0o400)
    refused = ask(str(source), "--peer-key", str(other))["peer"]
    assert "same key, user, groups and source" in refused[0]["remedy"]
    assert ask()["peers"][0]["state"] == "problem"


def test_a_version_that_the_source_has_no_more_is_not_taken(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2, "--freshness", "open")
    a, b = nodes.mounts.values()
    read_all(a, source)
    a.wait_idle()
    nodes.until_they_know_each_other()
    wait_for(lambda: peers(b)[0]["has_files"], "the catalogue")
    for file in source.rglob("*"):
        if file.is_file():
            file.write_bytes(b"new" + file.read_bytes()[3:])
    # Perhaps with the help of the peer, which has the new version by now.
    read_all(b, source)


def test_another_key_is_nobody(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2)
    a, b = nodes.mounts.values()
    read_all(a, source)
    assert b.umount().returncode == 0
    nodes.key.chmod(0o600)
    nodes.key.write_bytes(os.urandom(64))
    nodes.key.chmod(0o400)
    b = nodes.mounts["b"] = nodes.mount("b")
    wait_for(lambda: peers(b)[0]["error"] == "status 403", "the refusal")
    read_all(b, source)
    assert not peers(b)[0]["read_files"]


def test_unmounting_leaves_no_server(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 1)
    server = nodes.mounts["a"].status()["peer_server"]["pid"]
    assert Path(f"/proc/{server}").exists()
    assert nodes.mounts["a"].umount().returncode == 0
    assert not Path(f"/proc/{server}").exists()
    with socket.create_server(("127.0.0.2", nodes.ports[0])):
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peers", "x,y", "--peer-name", "z"], "z, is not in the list of peers"),
        (["--peers", "x,y", "--peer-name", "x"], "peers need a key"),
        (["--peers", "x,x", "--peer-name", "x"], "'x' is twice in the list"),
        (["--peers", "x;y", "--peer-name", "x"], "'x;y' is no peer"),
        (["--peers", "/none", "--peer-name", "x"], "the list of peers /none cannot be read"),
        (["--peers", "x", "--peer-name", "x", "--peer-key", "/none"], "the key /none cannot be"),
        (["--peers", "x", "--peer-name", "x", "--peer-key", "{open}"], "chmod 0400"),
        (["--peers", "x", "--peer-name", "x", "--peer-key", "{short}"], "at least 32 bytes"),
    ],
)
def test_what_cannot_be_shared(work: Bench, source: Path, options: list[str], words: str) -> None:
    (work.path / "open").write_bytes(bytes(64))
    (work.path / "open").chmod(0o444)
    (work.path / "short").write_bytes(bytes(8))
    (work.path / "short").chmod(0o400)
    named = [o.format(open=work.path / "open", short=work.path / "short") for o in options]
    (work.path / "mnt").mkdir()
    done = run(
        *("mount", str(source), f"{work.path}/mnt", "--state-dir", f"{work.path}/state"),
        *("--tier", f"{work.path}/tier=1G", *named),
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
