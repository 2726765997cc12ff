"""What a real Lustre showed, on an emulated one: files in its archive, layouts of any size, and how
many reads a copy is."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.pfs import INSTANT, ParallelFileSystem, set_layout
from monarchfs.core.units import Unit
from monarchfs.source.direct import DirectDescriptor
from monarchfs.source.posix import PosixSource
from tests.support import surroundings
from tests.support.mounting import Bench, asked, requires_mounts, run, wait_for

pytestmark = [*requires_mounts, surroundings.program("gcc"), surroundings.requires_own_clone]

KIB, MIB = 1 << 10, 1 << 20

Lustre = Callable[[], ParallelFileSystem]


@pytest.fixture
def backing(work: Bench) -> Path:
    root = work.path / "backing"
    root.mkdir()
    return root


@pytest.fixture
def lustre(work: Bench, backing: Path) -> Iterator[Lustre]:
    """Mounts ``backing``; unmounted after what uses it."""
    with ExitStack() as stack:

        def mount() -> ParallelFileSystem:
            pfs = ParallelFileSystem(backing, work.path / "lustre", INSTANT, targets=4)
            return stack.enter_context(pfs)

        yield mount
        for mounted in work.mounts:
            mounted.umount()


def write(path: Path, size: int, **layout: Any) -> bytes:
    data = os.urandom(size)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if layout:
        set_layout(path, **layout)
    return data


def test_nothing_but_a_reader_recalls(work: Bench, backing: Path, lustre: Lustre) -> None:
    """Not one of the commands, nor copying ahead of readers; and what is there is copied."""
    small = write(backing / "d" / "small", 5000, released=True)
    large = write(backing / "d" / "large", 3 * MIB, stripes=3, released=True)
    for name in ("near", "nearer"):
        write(backing / "d" / name, 2000)
    write(backing / "d" / "near and large", 3 * MIB)
    pfs = lustre()
    source, tier = str(pfs.path), f"{work.path}/planned=1G"
    doctor = asked("doctor", source, "--tier", tier)
    rates = next(check for check in doctor["checks"] if check["name"] == "source_speed")
    assert rates["sampled_bytes"] == 3 * MIB + 4000  # of all that are there
    asked("plan", source, "--tier", tier)
    assert pfs.requests().recall == 0

    mount = work.mount(pfs.path, "--prefetch", "all", "--touch-source", "1h")
    point = str(mount.path)
    warmed = asked("warm", point, "--wait")
    assert (warmed["resident"], warmed["archived"], warmed["failed"]) == (3, 2, 0)
    assert warmed["archived_bytes"] == 3 * MIB + 5000
    for path in sorted(mount.path.rglob("*")):
        path.stat()
        for name in os.listxattr(path):
            os.getxattr(path, name)
    why = asked("why", f"{point}/d/small", f"{point}/d/large")
    assert [path["cause"] for path in why["paths"]] == ["in the archive"] * 2
    (mount.path / "d" / "small").open("rb").close()  # opened is not read
    asked("pin", point, "d")
    asked("evict", point, "d")
    asked("refresh", point, "d")
    asked("warm", point, "d", "--wait")
    asked("warm", point, "d", "--metadata", "--wait")
    assert run("warm", point, "--check").returncode == 1
    assert pfs.requests().recall == 0

    assert (mount.path / "d" / "small").read_bytes() == small
    assert (mount.path / "d" / "large").read_bytes() == large
    assert pfs.requests().recall == 2
    wait_for(lambda: asked("status", point)["files"]["resident"] == 5, "them to be copied")


def test_what_is_copied_ahead_is_asked_for_once(work: Bench, backing: Path, lustre: Lustre) -> None:
    """One open brings its attributes and its bytes."""
    for number in range(300):
        write(backing / f"{number % 3}" / f"{number}", 3000)
    write(backing / "0" / "large", 3 * MIB)
    pfs = lustre()
    mount = work.mount(pfs.path, "--prefetch", "none", "--freshness", "immutable")
    before, opens = pfs.requests(), pfs.counts().open
    assert asked("warm", str(mount.path), "--wait")["copied"] == 301
    assert 301 <= (pfs.requests() - before).enqueue < 350
    opened = pfs.counts().open - opens  # more than once where two have the same place
    wait_for(lambda: (pfs.requests() - before).close == opened, "all to be closed")
    assert mount.umount().returncode == 0
    mount = work.mount(pfs.path, "--prefetch", "none", "--freshness", "immutable")
    assert asked("warm", str(mount.path), "--wait")["copied"] == 0
    assert pfs.counts().open == opens + opened, "what has a copy is looked at, not opened"


def test_layouts_of_any_size(work: Bench, backing: Path, lustre: Lustre) -> None:
    written = {
        f"{stripes} {size}": write(backing / f"{stripes} {size}", size, stripes=stripes)
        for stripes in (171, 300, 2000)
        for size in (5000, 3 * MIB)
    }
    mount = work.mount(lustre().path)
    warmed = asked("warm", str(mount.path), "--wait")
    assert (warmed["resident"], warmed["failed"], warmed["error"]) == (len(written), 0, "")
    assert {name: (mount.path / name).read_bytes() for name in written} == written


def sizes_of_a_unit(pfs: ParallelFileSystem, data: bytes, start: int, **how: bool) -> list[int]:
    """Reads the rest of the file "f" in one, up to 8 MiB; the sizes that the source was asked for,
    as the emulator counts them."""
    before = pfs.read_sizes()
    root = os.open(pfs.path, os.O_RDONLY)
    source = PosixSource(root)
    fd, stat = source.open(source.root, b"f")
    try:
        end = min(len(data), start + 8 * MIB)
        chunk, device = 128 * KIB, source.device
        unit = Unit(1, start, end, chunk_bytes=chunk, version=stat.version, device=device, **how)
        source.read_unit(fd, DirectDescriptor(), unit)
        assert unit.peek(start, end) == data[start:end]
    finally:
        source.close(fd)
        os.close(root)
    return sorted((Counter(pfs.read_sizes()) - Counter(before)).elements())


def test_a_unit_asks_for_whole_requests(backing: Path, lustre: Lustre) -> None:
    """Of 4 MiB, aligned; the emulator sees each as four of 1 MiB. Of what is read at random, for
    blocks."""
    data, pfs = write(backing / "f", 8 * MIB), lustre()
    for start, sizes in (
        (0, [MIB] * 8),
        (4 * MIB - 256 * KIB, [256 * KIB] + [MIB] * 4),
        (7 * MIB, [MIB]),
    ):
        assert sizes_of_a_unit(pfs, data, start) == sizes
    assert 256 * KIB in sizes_of_a_unit(pfs, data, 0, in_requests=False)


HOLES = (0, 5 * MIB, 40 * MIB + 5, 100 * MIB)
"""Where a file of 100 MiB and a little has a byte; there is nothing between."""


def write_holes(path: Path, **layout: Any) -> None:
    with path.open("wb") as opened:
        for offset in HOLES:
            opened.seek(offset)
            opened.write(b"x")
    set_layout(path, **layout)


def test_holes_are_not_read(work: Bench, backing: Path, lustre: Lustre) -> None:
    """Nor does looking for them bring a file back from the archive."""
    write_holes(backing / "f", stripes=4)
    write_holes(backing / "taped", released=True)
    pfs = lustre()
    mount = work.mount(pfs.path)
    warmed = asked("warm", str(mount.path), "--wait")
    assert (warmed["resident"], warmed["archived"]) == (1, 1)
    assert pfs.counts().read_bytes <= len(HOLES) * MIB
    assert pfs.requests().seek > 0
    assert pfs.requests().recall == 0
    read = pfs.counts().read_bytes
    assert_same(mount.path / "f", backing / "f")
    assert pfs.counts().read_bytes == read
    allocated = sum(path.stat().st_blocks for path in (work.path / "tier").rglob("*.*"))
    assert 0 < allocated * 512 <= len(HOLES) * 64 * KIB


def test_a_source_that_knows_no_holes_is_read(work: Bench, backing: Path) -> None:
    write_holes(backing / "f")
    source = work.faulty_source(backing)
    mount = work.mount(source.path)
    assert asked("warm", str(mount.path), "--wait")["resident"] == 1
    assert source.counts()["read_bytes"] == HOLES[-1] + 1
    assert_same(mount.path / "f", backing / "f")


def assert_same(path: Path, expected: Path) -> None:
    """The same bytes, and no hole is to be seen."""
    assert path.read_bytes() == expected.read_bytes()
    with path.open("rb", buffering=0) as file:
        assert os.lseek(file.fileno(), MIB, os.SEEK_DATA) == MIB
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == HOLES[-1] + 1
