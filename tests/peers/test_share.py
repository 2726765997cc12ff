"""Nodes that share a dataset that does not fit each of them, but all of them together."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.peers.nodes import (
    Nodes,
    owned,
    read_all,
    requires_peers,
    total_bytes,
    used_bytes,
    warm,
    write_source,
)
from tests.support.mounting import Bench, run, wait_for

pytestmark = requires_peers

FILES = 200
TIER = "6M"
"""The files take 12 MiB."""
MiB = 1 << 20


@pytest.fixture
def source(work: Bench) -> Path:
    rng = random.Random(5)
    return write_source(work.path / "s", [rng.randint(57_400, 61_400) for _ in range(FILES)])


def owned_files(source: Path, names: str) -> dict[str, int]:
    return {name: len(sizes) for name, sizes in owned(source, names).items()}


def read_bytes_of_an_epoch(nodes: Nodes, source: Path) -> int:
    before = nodes.read_bytes()
    nodes.read_at_once(source)
    nodes.kept_files()
    return nodes.read_bytes() - before


def until_an_epoch_spares_the_source(nodes: Nodes, source: Path) -> None:
    """A busy machine misses a deadline now and then, and goes to the source; not in each epoch."""
    most = 0.02 * total_bytes(source)
    wait_for(lambda: read_bytes_of_an_epoch(nodes, source) < most, "an epoch without the source")


@pytest.mark.parametrize("options", [[], ["--evict", "lru"], ["--prefetch", "all"]])
def test_later_epochs_do_not_read_the_source(work: Bench, source: Path, options: list[str]) -> None:
    nodes = Nodes(work, source, 3, *options, tier=TIER)
    read_bytes_of_an_epoch(nodes, source)
    until_an_epoch_spares_the_source(nodes, source)
    kept = nodes.kept_files()
    for name, count in owned_files(source, "abc").items():
        assert count <= kept[name] < FILES / 2 + 5


def test_a_part_of_the_dataset_is_kept_by_its_owner_alone(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3, "--share", "partition")
    read_bytes_of_an_epoch(nodes, source)
    until_an_epoch_spares_the_source(nodes, source)
    owned = owned_files(source, "abc")
    wait_for(lambda: nodes.kept_files() == owned, "copies for owners that were late to go")
    mount = nodes.mounts["a"]
    warm(mount)
    assert nodes.kept_files() == owned
    files = [path for path in sorted(mount.path.rglob("0*")) if path.is_file()]
    state = "user.monarchfs.state"
    foreign = next(path for path in files if os.getxattr(path, state) != b"resident")
    assert "the node that owns it keeps it" in run("why", str(foreign)).stdout


def test_copies_that_a_mount_without_partition_left_go(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 2)
    for mount in nodes.mounts.values():
        read_all(mount, source)
    assert nodes.kept_files() == {"a": FILES, "b": FILES}
    for mount in nodes.mounts.values():
        assert mount.umount().returncode == 0
    nodes.mounts = {name: nodes.mount(name, "--share", "partition") for name in nodes.mounts}
    owned = owned_files(source, "ab")
    wait_for(lambda: nodes.kept_files() == owned, "the others' copies to go")
    until_an_epoch_spares_the_source(nodes, source)
    for mount in nodes.mounts.values():
        assert used_bytes([mount]) < 0.8 * total_bytes(source)


def test_the_files_of_a_lost_node_are_kept_by_who_stands_in(work: Bench, source: Path) -> None:
    nodes = Nodes(work, source, 3, "--share", "partition")
    nodes.lose("a")
    until_an_epoch_spares_the_source(nodes, source)
    kept = nodes.kept_files().values()
    assert min(kept) > FILES / 3
    assert sum(kept) > 0.95 * FILES


@pytest.mark.parametrize("options", [[], ["--share", "partition"]])
def test_large_files_without_room_are_read_from_their_owners(
    work: Bench, options: list[str]
) -> None:
    sizes = [6 * MiB] * 10 + [66 * MiB + 12345] * len(options[:1])
    large = write_source(work.path / "large", sizes)
    # Each has room for what it owns: few files are not spread evenly.
    most = max(sum(sizes) for sizes in owned(large, "abc").values())
    nodes = Nodes(work, large, 3, *options, tier=str(most + 5 * MiB))
    read_bytes_of_an_epoch(nodes, large)
    until_an_epoch_spares_the_source(nodes, large)
