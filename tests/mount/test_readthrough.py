"""What is read from the source, and how often: counted by the source itself."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path

import pytest

from monarchfs.config.places import OWNER
from tests.support import trees
from tests.support.mounting import Bench, FaultySource, requires_mounts, wait_for

pytestmark = [*requires_mounts, pytest.mark.smoke]


@pytest.fixture
def source(work: Bench) -> FaultySource:
    backing = work.path / "backing"
    backing.mkdir()
    return work.faulty_source(backing)


def drop_page_cache() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("1")


def read_all(root: str, paths: list[str], seed: int) -> None:
    random.Random(seed).shuffle(paths)
    for path in paths:
        with open(os.path.join(root, path), "rb", buffering=0) as file:
            while file.read(200_000):
                pass


@pytest.mark.parametrize("prefetch", ["access", "auto", "all"])
def test_the_first_epoch_reads_the_source_once_and_the_second_not_at_all(
    work: Bench, source: FaultySource, prefetch: str
) -> None:
    contents = trees.dataset(source.backing, files=120)
    total = sum(map(len, contents.values()))
    source.faults(delay=0.002)
    mount = work.mount(source.path, "--freshness", "immutable", "--prefetch", prefetch)
    context = multiprocessing.get_context("spawn")
    parts = [list(contents)[n::4] + list(contents)[n + 1 :: 4] for n in range(4)]
    readers = [
        context.Process(target=read_all, args=(str(mount.path), part, seed))
        for seed, part in enumerate(parts)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
        assert reader.exitcode == 0
    status = mount.wait_idle()
    assert status["files"]["resident"] == len(contents)
    assert total <= source.counts()["read_bytes"] <= 1.02 * total
    assert status["source_io"]["read_bytes"] <= 1.02 * total

    source.counts(reset=True)
    before = mount.status()["source_io"]["operations"]
    drop_page_cache()
    for path, data in contents.items():
        assert (mount.path / path).read_bytes() == data
    assert source.counts() == {"operations": {}, "read_bytes": 0}
    assert mount.status()["source_io"]["operations"] == before
    assert mount.status()["served"]["local_opens"] >= len(contents)


def test_a_large_file_read_at_random_while_it_is_copied_is_read_once(
    work: Bench, source: FaultySource
) -> None:
    data = trees.random_bytes((24 << 20) + 4321, 11)
    (source.backing / "large").write_bytes(data)
    source.faults(delay=0.005)
    mount = work.mount(source.path, "--freshness", "immutable")
    rng = random.Random(2)
    with (mount.path / "large").open("rb", buffering=0) as file:
        for _ in range(150):
            offset = rng.randrange(len(data))
            assert os.pread(file.fileno(), 100_000, offset) == data[offset : offset + 100_000]
    mount.wait_idle()
    assert os.getxattr(mount.path / "large", "user.monarchfs.state") == b"resident"
    assert source.counts()["read_bytes"] == len(data)


def test_prefetch_all_copies_everything_unasked(work: Bench, source: FaultySource) -> None:
    contents = trees.dataset(source.backing, files=30)
    mount = work.mount(source.path, "--prefetch", "all", "--freshness", "immutable")
    status = wait_for(
        lambda: (s := mount.status())["files"]["resident"] == len(contents) and s, "the copies"
    )
    assert status["source_io"]["demand_read_bytes"] == 0
    source.faults(fail={"* *": 5})
    for path, data in contents.items():
        assert (mount.path / path).read_bytes() == data


def test_prefetch_none_reads_exactly_what_is_asked(work: Bench, source: FaultySource) -> None:
    (source.backing / "f").write_bytes(trees.random_bytes(3 << 20, 4))
    mount = work.mount(source.path, "--prefetch", "none")
    fd = os.open(mount.path / "f", os.O_RDONLY | os.O_DIRECT)
    try:
        assert len(os.pread(fd, 4096, 1 << 20)) == 4096
    except OSError:
        pytest.fail("O_DIRECT read failed")
    finally:
        os.close(fd)
    assert source.counts()["read_bytes"] == 4096
    assert mount.status()["files"]["resident"] == 0


def test_a_list_is_copied_in_its_order(work: Bench, source: FaultySource) -> None:
    contents = trees.dataset(source.backing, files=12, largest=1 << 20)
    order = random.Random(3).sample(sorted(contents), 6)
    listing = work.path / "list"
    listing.write_text("".join(f"{path}\n" for path in order) + "missing\n")
    mount = work.mount(
        source.path, "--prefetch", str(listing), "--freshness", "immutable", "-o", "copy_workers=1"
    )
    wait_for(lambda: mount.status()["files"]["resident"] == len(order), "the listed files")
    mount.wait_idle()
    states = {p: os.getxattr(mount.path / p, "user.monarchfs.state") for p in contents}
    assert {p for p, state in states.items() if state == b"resident"} == set(order)


def test_a_source_that_changes_during_the_copy_is_not_kept(
    work: Bench, source: FaultySource
) -> None:
    size = 8 << 20
    path = source.backing / "f"
    path.write_bytes(b"a" * size)
    source.faults(rate=8 << 20)
    mount = work.mount(source.path, "--freshness", "ttl=0")
    with (mount.path / "f").open("rb", buffering=0) as file:
        assert file.read(4096) == b"a" * 4096
        wait_for(lambda: source.counts()["read_bytes"] > 1 << 20, "the copy to begin")
        path.write_bytes(b"b" * size)
        source.faults()
        mount.wait_idle()
        assert mount.status()["prefetch"]["outdated"] == 1
    assert (mount.path / "f").read_bytes() == b"b" * size


def test_many_readers_of_one_byte_range_cause_one_read(work: Bench, source: FaultySource) -> None:
    data = trees.random_bytes(900_000, 8)
    (source.backing / "f").write_bytes(data)
    source.faults(delay=0.05)
    mount = work.mount(source.path, "--freshness", "immutable")
    context = multiprocessing.get_context("spawn")
    readers = [
        context.Process(target=read_all, args=(str(mount.path), ["f"], seed)) for seed in range(6)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
        assert reader.exitcode == 0
    assert source.counts()["read_bytes"] == len(data)
    assert source.counts()["operations"]["open"] == 1


# -- room


def allocated(directory: Path) -> int:
    """What copies take: all files but the one that says whose the directory is."""
    files = [p for p in directory.rglob("*") if p.is_file() and p.name != OWNER]
    return sum(p.stat().st_blocks * 512 for p in files)


def test_a_full_tier_is_never_exceeded_and_small_files_still_get_in(
    work: Bench, source: FaultySource
) -> None:
    big = {f"big{n}": trees.random_bytes(3 << 20, n) for n in range(4)}
    small = {f"small{n}": trees.random_bytes(50_000, n) for n in range(10)}
    for name, data in (big | small).items():
        (source.backing / name).write_bytes(data)
    capacity = 8 << 20
    mount = work.mount(source.path, tier=str(capacity))
    for name, data in (big | small).items():
        assert (mount.path / name).read_bytes() == data
        assert allocated(work.path / "tier") <= capacity
    status = mount.wait_idle()
    assert allocated(work.path / "tier") <= capacity
    (tier,) = status["tiers"]
    assert tier["used_bytes"] == allocated(work.path / "tier")
    assert tier["capacity_bytes"] == capacity
    states = {n: os.getxattr(mount.path / n, "user.monarchfs.state") for n in big | small}
    assert sum(states[n] == b"resident" for n in big) == 2
    assert all(states[n] == b"resident" for n in small)
    refused = next(n for n in big if states[n] != b"resident")
    assert b"no room" in os.getxattr(mount.path / refused, "user.monarchfs.reason").lower()


def test_what_does_not_fit_spills_into_the_next_tier(work: Bench, source: FaultySource) -> None:
    contents = {f"f{n}": trees.random_bytes(1 << 20, n) for n in range(6)}
    for name, data in contents.items():
        (source.backing / name).write_bytes(data)
    fast, slow = work.path / "fast", work.path / "slow"
    mount = work.mount(source.path, tiers=[f"{fast}=3M", f"{slow}=100M"])
    for name, data in contents.items():
        assert (mount.path / name).read_bytes() == data
    mount.wait_idle()
    where = [os.getxattr(mount.path / n, "user.monarchfs.tier").decode() for n in contents]
    assert where.count(str(fast)) == 2
    assert where.count(str(slow)) == 4
    assert allocated(fast) <= 3 << 20


def test_a_file_larger_than_the_tier_is_kept_in_part(work: Bench, source: FaultySource) -> None:
    data = trees.random_bytes(80 << 20, 5)
    (source.backing / "huge").write_bytes(data)
    capacity = 40 << 20
    mount = work.mount(source.path, "--freshness", "immutable", tier=str(capacity))
    with (mount.path / "huge").open("rb", buffering=0) as file:
        assert file.read(100) == data[:100]
        status = mount.wait_idle()
        assert status["tiers"][0]["used_bytes"] <= capacity
        assert allocated(work.path / "tier") <= capacity
        drop_page_cache()
        source.counts(reset=True)
        assert os.pread(file.fileno(), 4 << 20, 0) == data[: 4 << 20]
        assert source.counts()["read_bytes"] == 0
        drop_page_cache()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        assert b"".join(iter(lambda: file.read(1 << 20), b"")) == data
        read_bytes = source.counts()["read_bytes"]
        assert read_bytes <= len(data) - 0.8 * capacity, "the local part was read from the source"
    # It is held open for some seconds, as nobody says that it was closed.
    wait_for(lambda: mount.wait_idle()["files"]["partial"] == 1, "it to be suspended")
    assert os.getxattr(mount.path / "huge", "user.monarchfs.state") == b"partial"
    assert allocated(work.path / "tier") <= capacity


@pytest.mark.parametrize("huge", [False, True])
def test_a_second_mount_with_the_same_state_reads_nothing_again(
    work: Bench, source: FaultySource, huge: bool
) -> None:
    contents = trees.dataset(source.backing, files=20, largest=1 << 20)
    if huge:
        contents["huge"] = trees.random_bytes(80 << 20, 5)
        (source.backing / "huge").write_bytes(contents["huge"])
    mount = work.mount(source.path, "--freshness", "immutable", tier="40M")
    for path in contents:
        (mount.path / path).read_bytes()
    wait_for(lambda: mount.wait_idle()["files"]["partial"] == huge, "it to be suspended")
    used = mount.status()["tiers"][0]["used_bytes"]
    assert mount.umount().returncode == 0
    source.counts(reset=True)
    again = work.mount(source.path, "--freshness", "immutable", tier="40M")
    # The segments' lists are written at the end.
    lists = sum(p.stat().st_blocks * 512 for p in work.path.glob("tier*/*/segments/*.list"))
    assert again.status()["tiers"][0]["used_bytes"] == used + lists > used
    for path, data in contents.items():
        assert (again.path / path).read_bytes() == data
    expected = len(contents["huge"]) - used if huge else 0
    assert source.counts()["read_bytes"] <= expected + (4 << 20 if huge else 0)


# -- a source that fails


def test_the_sources_errors_are_the_readers_and_pass(work: Bench, source: FaultySource) -> None:
    data = trees.random_bytes(2 << 20, 6)
    (source.backing / "f").write_bytes(data)
    (source.backing / "g").write_bytes(data)
    mount = work.mount(source.path, "--freshness", "ttl=0")
    source.faults(fail={"read f": 5})
    with pytest.raises(OSError, match="Input/output error"):
        (mount.path / "f").read_bytes()
    assert (mount.path / "g").read_bytes() == data
    source.faults(fail={"open f": 13})
    with pytest.raises(PermissionError):
        (mount.path / "f").read_bytes()
    source.faults()
    assert (mount.path / "f").read_bytes() == data
    mount.wait_idle()
    assert os.getxattr(mount.path / "f", "user.monarchfs.state") == b"resident"


def test_a_tier_without_room_on_its_file_system_is_routed_around(
    work: Bench, source: FaultySource
) -> None:
    import subprocess

    tier = work.path / "tier"
    tier.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "none", str(tier)], check=True)
    try:
        contents = {f"f{n}": trees.random_bytes(700_000, n) for n in range(5)}
        for name, data in contents.items():
            (source.backing / name).write_bytes(data)
        mount = work.mount(source.path, tiers=[f"{tier}=2M"])
        (tier / "foreign").write_bytes(bytes(900_000))
        for name, data in contents.items():
            assert (mount.path / name).read_bytes() == data
        mount.wait_idle()
        os.statvfs(tier)
        assert mount.umount().returncode == 0
    finally:
        subprocess.run(["umount", str(tier)], check=True)


@pytest.mark.parametrize(("options", "most"), [((), 600), (("--prefetch", "access"), 150)])
def test_who_opens_many_small_files_finds_others_there(
    work: Bench, source: FaultySource, options: tuple[str, ...], most: int
) -> None:
    paths = [f"{directory}/{number:03d}" for directory in ("a", "b") for number in range(300)]
    for number, path in enumerate(paths):
        (source.backing / path).parent.mkdir(exist_ok=True)
        (source.backing / path).write_bytes(b"%d." % number * 500)
    mount = work.mount(source.path, "--freshness", "immutable", *options)
    for path in paths[:150]:
        assert (mount.path / path).read_bytes() == (source.backing / path).read_bytes()
    if options:
        assert mount.wait_idle()["files"]["resident"] == most
        return
    # As much again, all of it where something was opened.
    wait_for(lambda: mount.status()["files"]["resident"] >= 250, "others to be copied")
    status = mount.wait_idle()
    total = sum((source.backing / path).stat().st_size for path in paths[:300])
    assert 250 <= status["files"]["resident"] <= 300
    assert source.counts()["read_bytes"] <= total
    before = status["served"]["source_opens"]
    for path in paths[150:300]:
        assert (mount.path / path).read_bytes() == (source.backing / path).read_bytes()
    # What was opened counts, though the kernel did not say it: more of it is worth while.
    not_there = 300 - status["files"]["resident"]
    assert mount.status()["served"]["source_opens"] <= before + not_there
    for path in paths[300:]:
        assert (mount.path / path).read_bytes() == (source.backing / path).read_bytes()
    wait_for(lambda: mount.status()["files"]["resident"] == most, "all to be copied")
    total = sum((source.backing / path).stat().st_size for path in paths)
    assert mount.status()["source_io"]["read_bytes"] == total
