"""Mounts of nodes that share a dataset: it is read of the source once, and every byte is the
source's."""

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.peers.nodes import (
    FILES,
    Nodes,
    files_of,
    owned,
    peers,
    read_all,
    requires_peers,
    total_bytes,
    used_bytes,
    warm,
    write_source,
)
from tests.support.mounting import Bench, Mount, asked, assert_one_line, free_port, run, wait_for

pytestmark = requires_peers

MiB = 1 << 20
LARGE = [2 * MiB, 2 * MiB, 3 * MiB, 3 * MiB, 4 * MiB, 5 * MiB + 1, 9 * MiB, 66 * MiB + 12345]
MANY = 200
TIER = "6M"
DIRECTORIES = 14


def small(count: int) -> list[int]:
    rng = random.Random(3)
    return [rng.randint(1, 60_000) for _ in range(count)]


@pytest.fixture
def source(work: Bench) -> Path:
    return write_source(work.path / "small", small(FILES))


@pytest.fixture
def large(work: Bench) -> Path:
    path = write_source(work.path / "large", [*LARGE, 0])
    (with_holes,) = path.rglob(f"{len(LARGE):04d}")
    with open(with_holes, "r+b") as file:
        file.truncate(30 * MiB)
        os.pwrite(file.fileno(), random.Random(4).randbytes(3 * MiB), 11 * MiB)
    os.utime(with_holes, (1.6e9, 1.6e9))
    return path


@pytest.fixture
def mixed(work: Bench) -> Path:
    return write_source(work.path / "mixed", [*small(FILES // 2), *LARGE])


def slowed(work: Bench, source: Path, delay: float, *delayed: str) -> Path:
    """Nobody asks peers instead of a faster one."""
    slow = work.faulty_source(source)
    slow.faults(delay=delay, delayed=delayed)
    return slow.path


def small_files(source: Path, owner: str) -> int:
    return sum(size <= 60_000 for size in owned(source, "ab")[owner])


def one_that_has_all(work: Bench, source: Path, *options: str) -> tuple[Nodes, Mount, Mount]:
    """Two nodes; the first has copied everything, and the other knows what it owns of that."""
    nodes = Nodes(work, source, 2, *options)
    a, b = nodes.mounts.values()
    warm(a)
    until_it_knows_of_the_others(source, b)
    return nodes, a, b


def until_it_knows_of_the_others(source: Path, b: Mount) -> None:
    """What large files the others have, nodes learn when they want to know."""
    count = small_files(source, "a")
    wait_for(lambda: peers(b)[0]["has_files"] >= count, "the catalogue")


@pytest.mark.parametrize("kind", ["source", "large"])
def test_each_byte_leaves_the_source_once(
    work: Bench, kind: str, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    nodes = Nodes(work, slowed(work, source, 0.03, "open", "read"), 3)
    nodes.read_at_once(source)
    assert set(nodes.kept_files().values()) == {len(files_of(source))}
    assert nodes.read_bytes() < 1.5 * total_bytes(source)
    assert not nodes.wrong()


# Of the source, in datasets. A busy machine misses a deadline now and then, and goes there.
@pytest.mark.parametrize(("kind", "most_read"), [("source", 1.5), ("large", 1.3)])
def test_nodes_copy_everything_ahead_and_each_byte_leaves_the_source_once(
    work: Bench, kind: str, most_read: float, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    nodes = Nodes(work, source, 3, "--prefetch", "all")
    assert set(nodes.kept_files().values()) == {len(files_of(source))}
    assert nodes.read_bytes() < most_read * total_bytes(source)
    if kind == "source":
        assert nodes.served("peer_names") > 1.5 * FILES
    for mount in nodes.mounts.values():
        read_all(mount, source)
    assert not nodes.wrong()


def mounted_anew(nodes: Nodes) -> None:
    assert nodes.mounts["a"].umount().returncode == 0
    nodes.mounts["a"] = nodes.mount("a")


def another_worker(nodes: Nodes) -> None:
    nodes.mounts["a"].kill_worker()


def another_server(nodes: Nodes) -> None:
    a = nodes.mounts["a"]
    server = a.status()["peer_server"]["pid"]
    os.kill(server, signal.SIGTERM)
    wait_for(lambda: a.status()["peer_server"]["pid"] not in (None, server), "another nginx")


def test_who_comes_later_gets_what_a_tier_has(work: Bench, mixed: Path) -> None:
    nodes, _, b = one_that_has_all(work, mixed)
    state = f"{b.path.parent}/state"
    for after in (mounted_anew, another_worker, another_server):
        after(nodes)
        assert b.umount().returncode == 0
        run("cache", "remove", "--yes", state, "--state-dir", state)
        b = nodes.mounts["b"] = nodes.mount("b")
        nodes.until_they_know_each_other()
        until_it_knows_of_the_others(mixed, b)
        warm(b)
        read_all(b, mixed)
        gave = peers(b)[0]
        assert gave["read_bytes"] >= 0.8 * sum(owned(mixed, "ab")["a"]), after
        assert gave["read_files"] >= 0.8 * small_files(mixed, "a"), after


@pytest.mark.parametrize("freshness", ["immutable", "ttl=600", "open"])
def test_opens_are_counted_where_they_were_served(
    work: Bench, source: Path, freshness: str
) -> None:
    _, _, b = one_that_has_all(work, source, "--freshness", freshness, "--prefetch", "access")
    read_all(b, source)
    served = b.status()["served"]
    places = ("local", "peer", "source")  # local: a had it copied
    assert sum(served[f"{place}_opens"] for place in places) == FILES
    assert sum(served[f"{place}_file_bytes"] for place in places) == total_bytes(source)
    # Only while a name is fresh does an open not ask the source.
    assert served["peer_files"] >= len(owned(source, "ab")["a"])
    assert served["peer_opens"] == (0 if freshness == "open" else served["peer_files"])


def test_replicas_that_somebody_changed(work: Bench, mixed: Path) -> None:
    """Cut off, removed: test_replicas.py, and test_spans.py for large ones."""
    _, _, b = one_that_has_all(work, mixed)
    tier = work.path / "a" / "tier"
    segments = [path for path in tier.glob("*/segments/*") if not path.suffix]
    own_files = [path for path in tier.glob("*/??/*") if path.suffix]
    assert segments
    assert len(own_files) == len(LARGE)
    for replica in [*segments, *own_files]:
        replica.chmod(0o600)
        with open(replica, "r+b") as file:
            for at in range(0, replica.stat().st_size, 4096):
                os.pwrite(file.fileno(), b"damage", at)
    for _ in range(2):
        read_all(b, mixed)
        b.wait_idle()
    assert peers(b)[0]["wrong"] > 0


@pytest.mark.parametrize("options", [[], ["--share", "partition"]])
def test_the_spans_of_a_lost_owner_are_read_once(
    work: Bench, large: Path, options: list[str]
) -> None:
    slow = slowed(work, large, 0.05, "read")
    nodes = Nodes(work, slow, 3, *options)
    nodes.lose("a")
    wait_for(lambda: all(peers(m)[0]["failed"] for m in nodes.mounts.values()), "the loss")
    for mount in nodes.mounts.values():
        warm(mount)
    nodes.kept_files()
    most = 0.5 * sum(owned(slow, "abc")["a"])
    assert nodes.read_bytes() < 1.1 * total_bytes(large) + most
    for mount in nodes.mounts.values():
        read_all(mount, large)
    if options:
        assert used_bytes(nodes.mounts.values()) < 1.1 * total_bytes(large)
        assert nodes.read_bytes() < 1.2 * total_bytes(large) + most


def test_the_list_is_changed_under_a_mount(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3)
    a, b, c = nodes.mounts.values()
    worker = a.worker_pid()
    for mount in (a, b):
        done = run("peers", str(mount.path), "remove", "c")
        assert (done.returncode, done.stdout) == (0, "a\nb\n"), done.stderr
    assert a.worker_pid() != worker
    assert [peer["name"] for peer in peers(a)] == ["b"]
    # A worker that follows has the same list.
    a.kill_worker()
    wait_for(lambda: [peer["name"] for peer in peers(a)] == ["b"], "its list")
    for mount in (a, b):
        c_again = nodes.list.split(",")[2]
        assert asked("peers", str(mount.path), "add", c_again) == {"nodes": ["a", "b", "c"]}
    nodes.until_they_know_each_other()
    read_all(a, source)
    a.wait_idle()
    wait_for(lambda: all(p["has_files"] or p["name"] == "b" for p in peers(c)), "the catalogue")
    read_all(c, source)
    shown = asked("peers", str(c.path))
    assert (shown["name"], shown["address"], shown["port"]) == ("c", "127.0.0.4", nodes.ports[2])
    assert shown["peer_server"]["pid"]
    gave = {peer["name"]: peer for peer in shown["peers"]}
    assert gave["a"]["read_files"] > 0
    assert gave["a"]["answer_age_seconds"] < 60


def test_the_doctor_asks_each_peer(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2)
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
    nodes.new_key()
    refused = ask(str(source), "--peer-key", str(nodes.key))["peer"]
    assert "same key, user, groups and source" in refused[0]["remedy"]
    assert ask()["peers"][0]["state"] == "problem"


def test_a_version_that_the_source_has_no_more_is_not_taken(work: Bench, mixed: Path) -> None:
    _, _, b = one_that_has_all(work, mixed, "--freshness", "open")
    for file in files_of(mixed):
        with open(file, "r+b") as changed:
            os.pwrite(changed.fileno(), b"new", file.stat().st_size // 2)
    # Perhaps with the help of the peer, which has the new version by now.
    for _ in range(2):
        read_all(b, mixed)
        b.wait_idle()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peers", "x,y", "--peer-name", "z"], "z, is not in the list of peers"),
        (["--peers", "x,y", "--peer-name", "x"], "peers need a key"),
        (["--peers", "/none", "--peer-name", "x"], "the list of peers /none cannot be read"),
        (["--peers", "x", "--peer-name", "x", "--peer-key", "/none"], "the key /none cannot be"),
        (["--peers", "x", "--peer-name", "x", "--peer-key", "{open}"], "chmod 0400"),
        (["--peers", "x", "--peer-name", "x", "--peer-key", "{short}"], "at least 32 bytes"),
    ],
)
def test_what_cannot_be_shared(work: Bench, options: list[str], words: str) -> None:
    keys = {"open": (64, 0o444), "short": (8, 0o400)}
    for name, (size, mode) in keys.items():
        (work.path / name).write_bytes(bytes(size))
        (work.path / name).chmod(mode)
    named = [option.format(**{name: work.path / name for name in keys}) for option in options]
    (work.path / "source").mkdir()
    assert_one_line(work.try_to_mount(work.path / "source", *named), 2, words)


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


# A dataset that does not fit each node, but all of them together


@pytest.fixture
def many(work: Bench) -> Path:
    """12 MiB, of which a node has room for ``TIER``."""
    rng = random.Random(5)
    return write_source(work.path / "s", [rng.randint(57_400, 61_400) for _ in range(MANY)])


def owned_files(source: Path, names: str) -> dict[str, int]:
    return {name: len(sizes) for name, sizes in owned(source, names).items()}


def read_bytes_of_an_epoch(nodes: Nodes, source: Path) -> int:
    before = nodes.read_bytes()
    nodes.read_at_once(source)
    nodes.kept_files()
    return nodes.read_bytes() - before


def until_an_epoch_spares_the_source(nodes: Nodes, source: Path, share: float = 0.02) -> None:
    """A busy machine misses a deadline now and then, and goes to the source; not in each epoch."""
    most = share * total_bytes(source)
    wait_for(lambda: read_bytes_of_an_epoch(nodes, source) < most, "an epoch without the source")


@pytest.mark.parametrize("options", [[], ["--evict", "lru"], ["--prefetch", "all"]])
def test_later_epochs_do_not_read_the_source(work: Bench, many: Path, options: list[str]) -> None:
    nodes = Nodes(work, many, 3, *options, tier=TIER)
    read_bytes_of_an_epoch(nodes, many)
    until_an_epoch_spares_the_source(nodes, many)
    kept = nodes.kept_files()
    for name, count in owned_files(many, "abc").items():
        assert count <= kept[name] < MANY / 2 + 5


def test_a_part_of_the_dataset_is_kept_by_its_owner_alone(work: Bench, many: Path) -> None:
    nodes = Nodes(work, many, 3, "--share", "partition")
    read_bytes_of_an_epoch(nodes, many)
    until_an_epoch_spares_the_source(nodes, many)
    owned = owned_files(many, "abc")
    wait_for(lambda: nodes.kept_files() == owned, "copies for owners that were late to go")
    mount = nodes.mounts["a"]
    warm(mount)
    assert nodes.kept_files() == owned
    files = [path for path in sorted(mount.path.rglob("0*")) if path.is_file()]
    state = "user.monarchfs.state"
    foreign = next(path for path in files if os.getxattr(path, state) != b"resident")
    assert "the node that owns it keeps it" in run("why", str(foreign)).stdout


def test_copies_that_a_mount_without_partition_left_go(work: Bench, many: Path) -> None:
    nodes = Nodes(work, many, 2)
    for mount in nodes.mounts.values():
        read_all(mount, many)
    assert nodes.kept_files() == {"a": MANY, "b": MANY}
    for mount in nodes.mounts.values():
        assert mount.umount().returncode == 0
    nodes.mounts = {name: nodes.mount(name, "--share", "partition") for name in nodes.mounts}
    owned = owned_files(many, "ab")
    wait_for(lambda: nodes.kept_files() == owned, "the others' copies to go")
    until_an_epoch_spares_the_source(nodes, many)
    for mount in nodes.mounts.values():
        assert used_bytes([mount]) < 0.8 * total_bytes(many)


def test_the_files_of_a_lost_node_are_kept_by_who_stands_in(work: Bench, many: Path) -> None:
    nodes = Nodes(work, many, 3, "--share", "partition")
    nodes.lose("a")
    until_an_epoch_spares_the_source(nodes, many)
    kept = nodes.kept_files().values()
    assert min(kept) > MANY / 3
    assert sum(kept) > 0.95 * MANY


@pytest.mark.parametrize("options", [[], ["--share", "partition"]])
def test_large_files_without_room_are_read_from_their_owners(
    work: Bench, options: list[str]
) -> None:
    sizes = [6 * MiB] * 10 + [66 * MiB + 12345] * len(options[:1])
    large = slowed(work, write_source(work.path / "large", sizes), 0.01, "read")
    # Each has room for what it owns: few files are not spread evenly.
    most = max(sum(sizes) for sizes in owned(large, "abc").values())
    nodes = Nodes(work, large, 3, *options, tier=str(most + 5 * MiB))
    read_bytes_of_an_epoch(nodes, large)
    # Without the others, all of them together would read more than there is.
    until_an_epoch_spares_the_source(nodes, large, share=0.25)


# Names and attributes


def go_through(source: Path, *mounts: Mount) -> None:
    """All at once, as ``find -ls``; everything is as in the source."""
    with ThreadPoolExecutor(len(mounts)) as pool:
        list(pool.map(lambda mount: compare(mount, source), mounts))


def compare(mount: Mount, source: Path) -> None:
    for base, directories, files in os.walk(mount.path):
        directories.sort()
        for name in files:
            path = Path(base, name)
            there, here = (source / path.relative_to(mount.path)).lstat(), path.lstat()
            for field in ("st_size", "st_mtime_ns", "st_ctime_ns", "st_mode", "st_uid", "st_nlink"):
                assert getattr(here, field) == getattr(there, field), path


def operations(nodes: Nodes) -> int:
    return sum(mount.status()["source_io"]["operations"] for mount in nodes.mounts.values())


def test_nodes_that_go_through_a_source_ask_it_once(work: Bench, source: Path) -> None:
    nodes = Nodes(work, slowed(work, source, 0.005, "lookup"), 3, "--prefetch", "none")
    *first, last = nodes.mounts.values()
    before = operations(nodes)
    go_through(source, *first)
    asked = operations(nodes) - before
    # A busy machine misses a deadline now and then, and asks the source.
    assert FILES <= asked < 1.4 * (FILES + 4 * DIRECTORIES)
    before = operations(nodes)
    go_through(source, last)
    assert operations(nodes) - before < 0.3 * FILES, "it comes later"
    assert nodes.served("peer_names") > 1.2 * FILES
