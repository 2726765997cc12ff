"""``monarchfs analyze --darshan``: logs that pydarshan ships, and what is said of a job's reads."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli.main import main
from monarchfs.insight.darshan import FileReads, JobReads, read_logs
from monarchfs.insight.darshan_verdict import analyze_darshan, paths_of, text_lines
from monarchfs.prefetch.scan import read_list
from monarchfs.types import OperationError
from tests.support.golden import Golden

needs_pydarshan = pytest.mark.skipif(
    find_spec("darshan") is None, reason="needs pydarshan: make setup"
)

MIB = 1 << 20


def logs() -> list[Path]:
    found = find_spec("darshan")
    places = [] if found is None else found.submodule_search_locations or []
    paths = {path.name: path for place in places for path in Path(place).rglob("*.darshan")}
    return [paths[name] for name in sorted(paths)]


def log(name: str) -> str:
    return str(next(path for path in logs() if path.name.startswith(name)))


@needs_pydarshan
@pytest.mark.parametrize("path", logs(), ids=lambda path: path.name[:30])
def test_sums_are_those_of_pydarshan(path: Path) -> None:
    """It reads the same log in another way: as tables."""
    import darshan

    job = read_logs([str(path)])
    report = darshan.DarshanReport(str(path), read_all=False)
    total = reads = seconds = 0.0
    for module in ("POSIX", "STDIO"):
        if module not in report.modules:
            continue
        report.mod_read_all_records(module)
        for table, sums in (("counters", ("BYTES_READ", "READS")), ("fcounters", ("F_READ_TIME",))):
            frame = report.records[module].to_df()[table]
            named = frame["id"].map(lambda one: report.name_records[one].startswith("/"))
            values = [float(frame[named][f"{module}_{name}"].clip(lower=0).sum()) for name in sums]
            if table == "counters":
                total, reads = total + values[0], reads + values[1]
            else:
                seconds += values[0]
    of_files = job.files.values()
    assert sum(one.bytes for one in of_files) == total
    assert sum(one.reads for one in of_files) == reads
    assert sum(one.read_seconds for one in of_files) == pytest.approx(seconds)
    assert job.processes == report.metadata["job"]["nprocs"]
    assert job.readers <= job.processes
    assert all(one.path.startswith("/") for one in of_files)


@needs_pydarshan
def test_every_log_is_said_something_about(capsys: pytest.CaptureFixture[str]) -> None:
    for path in logs():
        assert main(["analyze", "--darshan", str(path)]) == 0
        said = capsys.readouterr().out
        assert any(word in said for word in ("o verdict", "nput-bound"))


@needs_pydarshan
def test_several_logs_are_one_job() -> None:
    one, other = log("pq_app_read_id71317"), log("pq_app_read_id71344")
    job = read_logs([one, other])
    assert job.processes == job.readers == 2
    assert sorted(Path(path).name for path in job.files) == ["A", "C"]
    assert sum(file.bytes for file in job.files.values()) == 12_300
    twice = read_logs([one, one])
    (file,) = twice.files.values()
    assert (file.bytes, file.extent, file.once) == (20_000, 10_000, 10_000)


@needs_pydarshan
def test_a_job_of_many_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "list"
    arguments = ["analyze", "--darshan", log("sample-badost"), "--list", str(listed), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"].endswith("/tokio-abc-results/inputs")
    assert (found["processes"], found["readers"]) == (2048, 2048)
    assert found["files"][0]["opens"] == 2048
    assert found["distinct_bytes"] == 808
    assert found["rooms"][-1]["local_share"] > 0.999
    assert found["verdict"]["kind"] == "compute-bound"
    roots = [b"/mnt", found["source"].rpartition("/")[0].encode()]
    assert read_list(str(listed), roots) == [b"inputs/posix1m2.in"]


@needs_pydarshan
def test_what_the_job_wrote_is_left_out() -> None:
    found = analyze_darshan(read_logs([log("shane_macsio")]), "/tmp/test", None)
    assert found.files == []
    assert found.written_files == 1
    assert found.verdict.kind == "unknown"


@needs_pydarshan
def test_a_log_that_is_cut_off(tmp_path: Path) -> None:
    whole = Path(log("sample-badost")).read_bytes()
    for length in (8, 100, 1000, len(whole) // 2, len(whole) - 100):
        path = tmp_path / f"{length}.darshan"
        path.write_bytes(whole[:length])
        with pytest.raises(OperationError, match=re.escape(f"{path}: ")):
            read_logs([str(path)])


def test_without_pydarshan_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"3.41\0\0\0\0")
    for name in [*(name for name in sys.modules if name.split(".")[0] == "darshan"), "darshan"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["analyze", "--darshan", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'darshan>=3.4'" in said


def read_file(path: str, times: int = 1, size: int = 110_000, **more: Any) -> FileReads:
    """Read whole, so often, in reads of 64 KiB."""
    reads = -(-size // 65536) * times
    numbers = {"read_seconds": 0.01 * times, "meta_seconds": 0.001 * times, "small": reads, **more}
    return FileReads(path, times, reads, times * size, size, sized=reads, **numbers)


def job_of(*files: FileReads, seconds: float = 10.0, processes: int = 1, **more: Any) -> JobReads:
    return JobReads(
        ["train.py"],
        begun=100.0,
        ended=100.0 + seconds,
        processes=processes,
        readers=processes,
        process_seconds=processes * seconds,
        files={one.path: one for one in files},
        **more,
    )


def dataset(times: int = 1, **more: Any) -> list[FileReads]:
    return [read_file(f"/d/train/{n % 9}/{n}", times, first=1000.0 - n, **more) for n in range(500)]


def jobs() -> Iterator[tuple[str, JobReads, str | None]]:
    for seconds in (6.0, 20.0, 100.0):
        yield f"5.5 s of {seconds:.0f} s were waited", job_of(*dataset(), seconds=seconds), None
    yield "four epochs", job_of(*dataset(4)), "/d"
    shard = read_file("/d/shard", size=64 * MIB)
    shard.bytes = 2 * MIB
    yield "little is read of a large file", job_of(*dataset(), shard), "/d"
    alone = replace(shard, read_seconds=9.0, reads=500)
    yield "of that alone", job_of(alone), "/d"
    yield "nearly half is spent on opens", job_of(*dataset(meta_seconds=0.009)), "/d"
    yield "large sequential reads", job_of(*dataset(sequential=2, small=0)), "/d"
    other = read_file("/elsewhere/x", 1000)
    mounts = {"/d": "lustre", "/": "ext4"}
    partly = job_of(*dataset(), other, processes=4, partial=True, mounts=mounts)
    yield "four processes, also elsewhere, and Darshan had no memory", partly, "/d/train"
    yield "nothing was read", JobReads(), None


def test_what_is_said_of_jobs(golden: Golden) -> None:
    texts = []
    for what, job, source in jobs():
        found = analyze_darshan(job, source, "/home/me/list")
        texts.append("\n".join([f"# {what}", *text_lines(found)]) + "\n")
    golden("analyze-darshan.txt", "\n".join(texts))


def test_the_list_has_the_order_of_the_job() -> None:
    """Without names that no list can hold, and large files of which little was read."""
    odd, shard = read_file("/d/train/a\nb", first=1.0), read_file("/d/shard", size=64 * MIB)
    shard.bytes = 2 * MIB
    found = analyze_darshan(job_of(*dataset(), odd, shard), "/d/", None)
    assert paths_of(found) == [f"/d/train/{n % 9}/{n}" for n in reversed(range(500))]
    assert paths_of(analyze_darshan(JobReads(), None, None)) == []
