"""Measurements at sizes that take seconds: that they measure what they say, and leave nothing
behind."""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from bench import calls, copying, epochs, growth, programs, staging, verify
from bench.arms import DIRECT, LOCAL, Arm
from bench.copying import ALL, CP, NO_LATENCY, RSYNC, WARM, Case, Tree
from bench.harness import Unusable, reader_processes
from bench.pfs import INSTANT, ParallelFileSystem
from bench.report import Result
from bench.task import Size, Task
from tests.support.mounting import fuse_mounts, requires_fuse, requires_root
from tests.support.programs import execute
from tests.support.surroundings import REPOSITORY, program


@requires_fuse
@requires_root
@pytest.mark.timeout(120)
def test_each_way_copies_all_of_it(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    case = Case(Tree("1 KB", 20, 1000), NO_LATENCY, 1)
    found = copying.measure(case, Task(tmp_path, Size.QUICK), memory)
    ways = {CP, WARM, ALL} | ({RSYNC} if shutil.which("rsync") else set())
    assert set(found.seconds) == ways
    assert all(seconds > 0 for (seconds,) in found.seconds.values())
    assert list(memory.iterdir()) == []
    assert fuse_mounts(str(tmp_path)) == []


@requires_fuse
@requires_root
@pytest.mark.timeout(180)
def test_growth_of_a_small_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "REMOUNTS", 1)
    result, grown = Result("growth", ""), growth.Grown()
    with reader_processes(growth.READERS) as pool:
        growth.Tree(40, Task(tmp_path, Size.QUICK, 1), result, grown, pool).run()
    growth.lines(result, grown)
    compared = {what for _, *whats in growth.COMPARED.values() for what in whats}
    alone = {what for whats in growth.ALONE.values() for what in whats}
    assert set(grown.mine) == compared | alone
    assert list(tmp_path.iterdir()) == []
    assert fuse_mounts(str(tmp_path)) == []


@requires_fuse
@requires_root
@pytest.mark.timeout(120)
@pytest.mark.parametrize("arm", [DIRECT, LOCAL, *programs.PROGRAMS], ids=lambda arm: arm.name)
def test_a_job_reads_the_same_bytes_by_every_way(tmp_path: Path, arm: Arm) -> None:
    data = programs.generate(tmp_path / "data", 3, 0)
    place = tmp_path / "place"
    place.mkdir()
    found = programs.Found()
    with (
        ParallelFileSystem(tmp_path / "data", tmp_path / "pfs", INSTANT) as pfs,
        reader_processes(1) as pool,
    ):
        try:
            programs.job(arm, pfs, place, pool, data, None, found, 0)
        except Unusable as error:
            pytest.skip(str(error))
    assert len(found.seconds[0]) == programs.EPOCHS
    first = found.counts[0][0].read_bytes
    assert first == 0 if arm is LOCAL else first >= data.size
    assert fuse_mounts(str(tmp_path)) == []


def test_wrong_bytes_are_an_error(tmp_path: Path) -> None:
    data = programs.generate(tmp_path / "data", 2, 0)
    (tmp_path / "data" / data.files[1].path).write_bytes(b"else")
    with reader_processes(1) as pool, pytest.raises(ValueError, match="1 files had the wrong"):
        epochs.epoch(pool, tmp_path / "data", data.files, 0)


@requires_fuse
@requires_root
@program("mksquashfs", "squashfs-tools")
@pytest.mark.timeout(180)
def test_staging_reads_the_same_bytes_by_every_way(tmp_path: Path) -> None:
    result = Result("staging", "")
    staging.measure(Task(tmp_path, Size.QUICK, 1), "two files", 2, 5000, result)
    assert set(result.freshness) == {row.arm for row in result.rows if row.arm}
    assert len(result.notes) == len(staging.SHARES) * (len(result.freshness) - 1)
    assert fuse_mounts(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ((0.0, [1.0, 2.0]), (1.0, [1.0, 2.0]), "always"),
        ((1.0, [1.0, 2.0]), (0.0, [1.0, 2.0]), "never"),
        ((0.0, [1.0, 2.0]), (10.0, [1.0, 1.0]), "up to 10 epochs"),
        ((10.0, [1.0, 1.0]), (0.0, [1.0, 2.0]), "from 12 epochs on"),
    ],
)
def test_break_evens(
    mine: tuple[float, list[float]], other: tuple[float, list[float]], said: str
) -> None:
    one, two = (programs.Found([ready], [seconds]) for ready, seconds in (mine, other))
    assert staging.break_even(one, two) == said


@requires_fuse
@requires_root
def test_a_files_calls_are_counted(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "data" / "d").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "d" / name).write_bytes(b"abc")
    (tmp_path / "place").mkdir()
    (plain,) = [case for case in calls.CASES if case.name == calls.PLAIN]
    asked = calls.count(plain, tmp_path / "data", tmp_path / "place")
    assert (asked["read"], asked["enqueue"] >= 3) == (3, True)


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A directory, and a copy of it in the place of a mount; one file of each kind."""
    monkeypatch.setattr(verify, "FILES", {"pinned": 1, "cached": 1, "uncached": 1})
    monkeypatch.setattr(verify, "LARGEST", 64 << 10)
    monkeypatch.setattr(verify, "UNCACHED_BYTES", 64 << 10)
    data, mount = tmp_path / "data", tmp_path / "mount"
    verify.generate(data)
    shutil.copytree(data, mount)
    return data, mount


def read(trees: tuple[Path, Path], kind: str, steps: int = 50) -> verify.Reader:
    data, mount = trees
    reader = verify.Reader(str(mount), str(data), random.Random(1))
    for _ in range(steps):
        reader.step(kind)
    reader.close()
    return reader


@pytest.mark.parametrize("kind", verify.KINDS)
def test_what_is_right_and_what_is_gone(trees: tuple[Path, Path], kind: str) -> None:
    reader = read(trees, kind)
    assert (reader.wrong, reader.errors) == ([], [])
    assert reader.counts[kind] == 50
    assert reader.bytes > 0 or kind == "names"
    shutil.rmtree(trees[1])
    assert len(read(trees, kind, 5).errors) == 5


@pytest.mark.parametrize("kind", verify.KINDS)
def test_wrong_bytes_and_attributes(trees: tuple[Path, Path], kind: str) -> None:
    for path in trees[1].rglob("*.bin"):
        data = bytearray(path.read_bytes())
        data[::512] = bytes(byte ^ 1 for byte in data[::512])
        path.write_bytes(path.read_bytes()[: len(data) // 2] if kind == "held" else data)
    assert read(trees, kind).wrong


def test_a_reader_that_dies_is_an_error(trees: tuple[Path, Path]) -> None:
    data, mount = trees
    load = verify.Load(mount, data)
    load.start((), ("no such kind",))
    found = verify.Found()
    load.stop(found)
    assert found.errors == 1
    assert "reader 1 died" in "".join(found.examples)
    assert found.wrong == 0


@requires_fuse
@program("gcc")
@program("addr2line")
def test_a_read_from_its_open_to_its_copy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.trace", "cold-small", "--json", "--data-path", "relay"]
    done = execute(command, cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    functions = [step["function"] for step in said["all"]["order"]]
    shown = ["opens_answer", "small_read", "SmallFiles.run", "resident_put"]
    assert [name for name in functions if name in shown] == shown
    assert len(functions) == said["all"]["functions"] >= said["read"]["functions"] > len(shown)
    assert said["all"]["changes"] > 0
    assert list(tmp_path.iterdir()) == []
