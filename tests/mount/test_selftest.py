"""``monarchfs selftest``: it finds nothing wrong where nothing is, what is wrong elsewhere, and
leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from monarchfs.cli.main import main
from monarchfs.selftest import counters, dataset
from tests.support.mounting import Bench, assert_one_line, needs_mounts, run

STATS = """\
snapshot_time             1764153900.123456789 secs.nsecs
read_bytes                2000 samples [bytes] 100 16384 32768000
open                      2016 samples [usec] 21 3122 99999 1234567
getxattr                  7 samples [reqs]
broken
"""


@pytest.fixture
def directory(work: Bench) -> Path:
    """Of the file system; ``second`` beside it is the same one."""
    for name in ("site", "second"):
        (work.path / name).mkdir()
    return work.path / "site"


@needs_mounts
def test_all_is_well(
    work: Bench,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dataset, "MANY_NAMES", 40)
    monkeypatch.setenv("TMPDIR", str(work.path))
    monkeypatch.setattr("tempfile.tempdir", str(work.path))
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
        *[("mirror", "ok")] * 3,
        ("epochs", "ok"),
        *[("freshness", "ok")] * 2,
        ("kill", "ok"),
    ], found
    assert (code, found["problems"], found["about"]["machine"]) == (0, 0, os.uname().machine)
    epochs = found["checks"][4]
    assert (epochs["first_read_bytes"], epochs["second_operations"]) == (
        40 * dataset.SMALL_BYTES,
        0,
    )
    assert sorted(work.path.rglob("*")) == before


@needs_mounts
def test_a_second_path_that_is_another_directory_is_a_problem(
    work: Bench,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dataset, "MANY_NAMES", 4)
    monkeypatch.setattr("monarchfs.selftest.run._SEEN_SECONDS", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(work.path))
    words = ["selftest", str(directory), "--second", str(work.path / "second"), "--files", "4"]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "problem  freshness" in shown
    assert "--second must be the same directory" in shown
    assert shown.endswith("\n1 problem\n")
    assert os.listdir(directory) == []


@needs_mounts
def test_what_is_refused(work: Bench, directory: Path) -> None:
    assert_one_line(run("selftest", f"{directory}/no"), 2, f"{directory}/no is no directory")
    assert_one_line(run("selftest", "/proc"), 2, "cannot write to /proc: ")


CHANGES = {
    "a byte": ("2 bytes", "printf x | dd of='{0}' bs=1 seek=70000 conv=notrunc; {1}"),
    "its size": ("st_size", "echo >>'{0}'"),
    "its mode": ("st_mode", "chmod 600 '{0}'"),
    "an attribute": ("attributes are", "setfattr -n user.x -v y '{0}'"),
    "it is gone": ("only in the source", "rm '{0}'"),
    "another one": ("only in the mount", "touch '{0}.new'"),
    "a link": ("target differs", "ln -sfn elsewhere '{2}'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_difference_is_found(tmp_path: Path, change: str) -> None:
    roots = [tmp_path / "source", tmp_path / "mirror"]
    (roots[0] / "d").mkdir(parents=True)
    (roots[0] / "d" / "f").write_bytes(bytes(100_000))
    (roots[0] / "l").symlink_to("somewhere")
    subprocess.run(["cp", "-a", str(roots[0]), str(roots[1])], check=True)

    def found() -> Counter[str]:
        """Kinds of differences; the copy has times of its own."""
        lines = dataset.differences(*roots)
        return Counter(line for line in lines if not line.endswith("only ctime"))

    same = found()
    said, script = CHANGES[change]
    file = roots[1] / "d" / "f"
    keep = f"touch -r '{roots[0] / 'd' / 'f'}' '{file}'"
    subprocess.run(["sh", "-ec", script.format(file, keep, roots[1] / "l")], check=True,
                   capture_output=True)  # fmt: skip
    new = found() - same
    words = "bytes differ at 0" if change == "a byte" else said
    assert any(words in line for line in new), new


def test_counters_of_the_client() -> None:
    assert counters.parse(STATS) == {"read_bytes": 32_768_000, "open": 2016, "getxattr": 7}
