"""Nodes that share a dataset that does not fit each of them, but all of them together."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monarchfs.peers.nodes import parse_nodes
from monarchfs.peers.ownership import Ownership
from monarchfs.peers.web_server import find_nginx
from monarchfs.types import SourceStat
from tests.peers.test_large_files import owned_bytes
from tests.peers.test_sharing import Nodes, kill_node, total_bytes
from tests.support import surroundings
from tests.support.mounting import Bench, Mount, run, wait_for

pytestmark = [
    surroundings.requires_fuse,
    pytest.mark.skipif(find_nginx() is None, reason="needs nginx: apt-get install nginx-light"),
]

FILES = 400
TIER = "12M"
"""The files take 24 MiB."""


@pytest.fixture
def source(work: Bench) -> Path:
    """Small files, each of some blocks."""
    rng = random.Random(5)
    path = work.path / "source"
    for number in range(FILES):
        directory = path / f"{number % 5}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:04d}.f").write_bytes(rng.randbytes(rng.randint(57_400, 61_400)))
    for file in path.rglob("*"):
        os.utime(file, (1.6e9, 1.6e9))
    return path


def owned_files(source: Path, names: str) -> dict[str, int]:
    """How many files each node owns."""
    ownership = Ownership(parse_nodes(list(names), 1))
    device = source.stat().st_dev
    owned = dict.fromkeys(names, 0)
    for file in source.rglob("*"):
        if file.is_file():
            stat = SourceStat.of(file.stat(), device)
            owned[ownership.owner(stat.version.replica_name).name] += 1
    return owned


def kept_files(nodes: Nodes) -> dict[str, int]:
    return {name: mount.status()["files"]["resident"] for name, mount in nodes.mounts.items()}


def is_local(file: Path) -> bool:
    return os.getxattr(file, "user.monarchfs.state") == b"resident"


def read_epoch(mount: Mount, source: Path, seed: int) -> None:
    """Every file, in random order, without leaving it in the kernel's page cache."""
    files = sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file())
    random.Random(seed).shuffle(files)
    for name in files:
        with open(mount.path / name, "rb") as file:
            assert file.read() == (source / name).read_bytes(), name
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes_of_an_epoch(nodes: Nodes, source: Path) -> int:
    """Of the source."""
    before = nodes.read_bytes()
    with ThreadPoolExecutor(3) as pool:
        mounts = enumerate(nodes.mounts.values())
        for read in [pool.submit(read_epoch, mount, source, seed) for seed, mount in mounts]:
            read.result()
    for mount in nodes.mounts.values():
        mount.wait_idle()
    return nodes.read_bytes() - before


def until_an_epoch_spares_the_source(nodes: Nodes, source: Path) -> None:
    """A busy machine misses a deadline now and then, and goes to the source; not in each epoch."""
    most = 0.02 * total_bytes(source)
    wait_for(lambda: read_bytes_of_an_epoch(nodes, source) < most, "an epoch without the source")


@pytest.mark.parametrize("options", [[], ["--evict", "lru"], ["--prefetch", "all"]])
def test_later_epochs_do_not_read_the_source(work: Bench, source: Path, options: list[str]) -> None:
    nodes = Nodes(work, source, 3, *options, tier=TIER)
    nodes.until_they_know_each_other()
    read_bytes_of_an_epoch(nodes, source)
    until_an_epoch_spares_the_source(nodes, source)
    for name, owned in owned_files(source, "abc").items():
        resident = nodes.mounts[name].status()["files"]["resident"]
        assert owned <= resident < FILES / 2 + 5


def test_a_part_of_the_dataset_is_kept_by_its_owner_alone(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3, "--share", "partition")
    nodes.until_they_know_each_other()
    read_bytes_of_an_epoch(nodes, source)
    until_an_epoch_spares_the_source(nodes, source)
    owned = owned_files(source, "abc")
    wait_for(lambda: kept_files(nodes) == owned, "copies for owners that were late to go")
    mount = nodes.mounts["a"]
    warmed = run("warm", str(mount.path), "--wait")
    assert warmed.returncode == 0, warmed.stderr
    assert mount.status()["files"]["resident"] == owned["a"]
    foreign = next(path for path in sorted(mount.path.rglob("*.f")) if not is_local(path))
    assert "the node that owns it keeps it" in run("why", str(foreign)).stdout


def test_copies_that_a_mount_without_partition_left_go(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2, tier="1G")
    nodes.until_they_know_each_other()
    for mount in nodes.mounts.values():
        read_epoch(mount, source, 0)
    for mount in nodes.mounts.values():
        assert mount.wait_idle()["files"]["resident"] == FILES
        assert mount.umount().returncode == 0
    nodes.mounts = {name: nodes.mount(name, "--share", "partition") for name in nodes.mounts}
    owned = owned_files(source, "ab")
    wait_for(lambda: kept_files(nodes) == owned, "the others' copies to go")
    until_an_epoch_spares_the_source(nodes, source)
    for mount in nodes.mounts.values():
        assert mount.status()["tiers"][0]["used_bytes"] < 0.8 * total_bytes(source)


def test_the_files_of_a_lost_node_are_kept_by_who_stands_in(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3, "--share", "partition")
    nodes.until_they_know_each_other()
    lost = nodes.mounts.pop("a")
    kill_node(lost)
    work.mounts.remove(lost)
    run("umount", str(lost.path))
    until_an_epoch_spares_the_source(nodes, source)
    kept = [mount.status()["files"]["resident"] for mount in nodes.mounts.values()]
    assert min(kept) > FILES / 3
    assert sum(kept) > 0.95 * FILES


MiB = 1 << 20


@pytest.mark.parametrize("options", [[], ["--share", "partition"]])
def test_large_files_without_room_are_read_from_their_owners(
    work: Bench, options: list[str]
) -> None:
    rng = random.Random(6)
    large = work.path / "large"
    large.mkdir()
    for number, size in enumerate([20 * MiB] * 10 + [140 * MiB + 12345] * len(options[:1])):
        (large / f"{number}").write_bytes(rng.randbytes(size))
        os.utime(large / f"{number}", (1.6e9, 1.6e9))
    # Each has room for what it owns: few files are not spread evenly.
    most = max(owned_bytes(large, name, "abc") for name in "abc")
    nodes = Nodes(work, large, 3, *options, tier=str(most + 18 * MiB))
    nodes.until_they_know_each_other()
    read_bytes_of_an_epoch(nodes, large)
    until_an_epoch_spares_the_source(nodes, large)
