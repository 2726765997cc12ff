"""Copy rate, growth and other programs, at sizes that take seconds: that they measure what they
say, and leave nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import copying, epochs, growth, programs
from bench.arms import DIRECT, LOCAL, Arm
from bench.copying import ALL, CP, NO_LATENCY, READ, RSYNC, WARM, Case, Tree
from bench.harness import Unusable, reader_processes
from bench.pfs import INSTANT, Counts, ParallelFileSystem
from bench.report import Result
from bench.task import Size, Task
from tests.support.mounting import fuse_mounts, requires_fuse, requires_root

# Copy rate.


def test_rates_are_files_of_small_and_megabytes_of_large_files() -> None:
    seconds = {WARM: [2.0], CP: [4.0], RSYNC: [8.0], READ: [1.0], ALL: [4.0]}
    small = copying.Found(Case(Tree("s", 100, 1000), "fast", 1), seconds, Counts(open=100))
    large = copying.Found(Case(Tree("l", 2, 500_000_000), "busy", 1), seconds, Counts())
    assert small.rates(WARM) == [50.0]
    assert large.rates(WARM) == [500.0]
    result = Result("copying", "")
    copying.show(result, small)
    copying.show(result, large)
    rows = {(row.what, row.against): row for row in result.rows}
    assert rows["s files, fast: warm against cp -r", CP].holds is True
    missed = rows["l files, busy: warm against reading alone", READ]
    assert (missed.ratio, missed.holds) == (0.5, False)
    copying.bars(result, [small, large])
    assert {one.panel for one in result.series} == {"fast", "busy"}
    assert {one.plot for one in result.series} == {"Copying small files", "Copying large files"}


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


# Growth.


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
    assert {one.panel for one in result.series if one.plot in growth.COMPARED} == compared
    assert {one.name for one in result.series if one.plot not in growth.COMPARED} == alone
    assert set(grown.mine) == compared | alone
    figures = {row.what: row for row in result.rows}
    assert figures["40 files: files that are not resident then"].value == 0
    assert list(tmp_path.iterdir()) == []
    assert fuse_mounts(str(tmp_path)) == []


# Other programs.


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
