"""``monarchfs selftest``: it finds nothing wrong where nothing is, what is wrong elsewhere, and
leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from monarchfs.cli.main import main
from monarchfs.doctor import selftest_counters as counters
from monarchfs.doctor import selftest_dataset as dataset
from tests.support.mounting import Bench, assert_one_line, needs_mounts, run

STATS = """\
snapshot_time             1764153900.123456789 secs.nsecs
read_bytes                2000 samples [bytes] 100 16384 32768000
open                      2016 samples [usec] 21 3122 99999 1234567
getxattr                  7 samples [reqs]
broken
"""


@pytest.fixture
def directory(work: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the file system; ``second`` beside it may become the same one. All is made in ``work``,
    with fewer names."""
    for name in ("site", "second"):
        (work.path / name).mkdir()
    monkeypatch.setattr(dataset, "MANY_NAMES", 40)
    monkeypatch.setattr("monarchfs.doctor.selftest.KILLS", 1)
    monkeypatch.setattr("monarchfs.doctor.selftest.MODES", ("immutable", "open"))
    monkeypatch.setattr("tempfile.tempdir", str(work.path))
    return work.path / "site"


@needs_mounts
def test_all_is_well(work: Bench, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = work.path / "second"
    subprocess.run(["mount", "--bind", str(directory), str(second)], check=True)
    before = sorted(work.path.rglob("*"))
    try:
        words = ["selftest", str(directory), "--second", str(second), "--files", "40", "--json"]
        code = main(words)
        found = json.loads(capsys.readouterr().out)
    finally:
        subprocess.run(["umount", str(second)], check=True)
    assert [(one["name"], one["state"]) for one in found["checks"]] == [
        ("dataset", "ok"),
        *[("mirror", "ok")] * 2,
        *[(name, "ok") for name in ("epochs", "freshness", "kill")],
    ], found
    assert (code, found["problems"], found["about"]["machine"]) == (0, 0, os.uname().machine)
    epochs = found["checks"][3]
    read = (epochs["first_read_bytes"], epochs["second_operations"])
    assert read == (40 * dataset.SMALL_BYTES, 0)
    assert sorted(work.path.rglob("*")) == before


@needs_mounts
def test_problems_are_told_and_the_rest_is_tried(
    work: Bench,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is immutable shows no new name, and of other changes none where a copy is complete; and
    another directory is no second way to the first."""
    monkeypatch.setattr("monarchfs.doctor.selftest._SEEN_SECONDS", 0.1)
    monkeypatch.setattr("monarchfs.doctor.selftest.MODES", ("open", "immutable"))
    command = ["selftest", str(directory), "--files", "4"]
    for modes, words, said in (
        (("open", "immutable"), [], r"immutable: late or never: .*\bnew\n"),
        ((), ["--second", str(work.path / "second")], "--second must be the same directory"),
    ):
        monkeypatch.setattr("monarchfs.doctor.selftest.MODES", modes)
        assert main([*command, *words]) == 1
        shown = capsys.readouterr().out
        assert re.findall(r"^problem +(\w+)", shown, re.M) == ["freshness"]
        assert re.search(said, shown)
        assert "ok       kill " in shown
        assert shown.endswith("\n1 problem\n")
        assert os.listdir(directory) == []


@needs_mounts
def test_what_is_refused(work: Bench, directory: Path) -> None:
    assert_one_line(run("selftest", f"{directory}/no"), 2, f"{directory}/no is no directory")
    assert_one_line(run("selftest", "/proc"), 2, "cannot write to /proc: ")
    done = run("selftest", str(directory), "--tier", "/proc")
    assert_one_line(done, 2, "cannot write to /proc: ")
    assert os.listdir(directory) == []


CHANGES = {
    "bytes differ at 0": "echo >>d/f; truncate -s -2 d/f; echo >>d/f; touch -r ../source/d/f d/f",
    "st_size": "echo >>d/f",
    "st_mode": "chmod 600 d/f",
    "attributes are": "setfattr -n user.x -v y d/f",
    "only in the source": "rm d/f",
    "only in the mount": "touch d/new",
    "target differs": "ln -sfn elsewhere l",
}


@pytest.mark.parametrize("said", CHANGES)
def test_each_difference_is_found(tmp_path: Path, said: str) -> None:
    source, mirror = tmp_path / "source", tmp_path / "mirror"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_bytes(bytes(100_000))
    (source / "l").symlink_to("somewhere")
    subprocess.run(["cp", "-a", str(source), str(mirror)], check=True)
    same = dataset.differences(source, mirror)  # each copy has a ctime of its own
    command = ["sh", "-ec", CHANGES[said]]
    subprocess.run(command, cwd=mirror, check=True, capture_output=True)
    assert not any(said in line for line in same)
    assert any(said in line for line in dataset.differences(source, mirror))


def test_counters_of_the_client() -> None:
    assert counters.parse(STATS) == {"read_bytes": 32_768_000, "open": 2016, "getxattr": 7}
