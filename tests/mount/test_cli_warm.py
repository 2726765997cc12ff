"""``monarchfs warm`` on real mounts: copying, waiting, looking, and bad input."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monarchfs.cli import warm as warm_module
from monarchfs.cli.warm import RateEstimate
from tests.support import surroundings, trees
from tests.support.mounting import (
    MONARCHFS,
    Bench,
    Mount,
    requires_fuse,
    requires_root,
    run,
    wait_for,
)
from tests.support.timing import Stopwatch

SIZES = """
import os, sys
for directory, _, names in os.walk(sys.argv[1]):
    for name in names:
        print(os.lstat(os.path.join(directory, name)).st_size)
"""

FILES = 40
BYTES = 30_000


def fill(source: Path) -> Path:
    trees.write_files(source, {f"d{n % 4}/file {n}": os.urandom(BYTES) for n in range(FILES)})
    (source / "link").symlink_to("d1")
    (source / "away").symlink_to("/etc")
    os.mkfifo(source / "fifo")
    return source


def warm(mount: Mount, *arguments: str) -> dict[str, object]:
    done = run("warm", str(mount.path), *arguments, "--json")
    assert done.stderr == ""
    result: dict[str, object] = json.loads(done.stdout)
    result["code"] = done.returncode
    return result


@requires_root
@requires_fuse
@pytest.mark.parametrize("prefetch", ["access", "none"])
def test_all_is_copied(work: Bench, prefetch: str) -> None:
    mount = work.mount(fill(work.path / "src"), "--prefetch", prefetch)
    checked = warm(mount, "--check")
    assert (checked["code"], checked["files"], checked["remote"]) == (1, FILES, FILES)
    assert mount.status()["source_io"]["read_bytes"] == 0
    done = run("warm", str(mount.path), "--wait")
    assert (done.returncode, done.stderr) == (0, "")
    size = f"{FILES} files, 1.1M"
    assert done.stdout == f"resident: {size} of {size} (copied now: {size})\n"
    assert warm(mount, "--check")["code"] == 0
    status = mount.status()
    assert status["source_io"]["read_bytes"] == FILES * BYTES
    # Names and attributes, too: nobody asks the source again.
    before = status["source_io"]["operations"]
    listed = subprocess.run(
        [sys.executable, "-c", SIZES, str(mount.path)], capture_output=True, timeout=30, check=True
    )
    assert listed.stdout.count(b"%d\n" % BYTES) == FILES
    assert mount.status()["source_io"]["operations"] == before


@requires_root
@requires_fuse
def test_it_goes_on_without_who_asked(work: Bench) -> None:
    mount = work.mount(fill(work.path / "src"))
    done = run("warm", str(mount.path), "link", "d0/file 0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the mount goes on" in done.stdout
    wait_for(lambda: warm(mount, "d1", "d0/file 0", "--check")["code"] == 0, "copying to end")
    assert mount.status()["files"]["resident"] == FILES // 4 + 1
    known = warm(mount, "d2", "--metadata", "--wait")
    assert (known["code"], known["files"], known["resident"]) == (0, FILES // 4, 0)
    assert mount.status()["files"]["resident"] == FILES // 4 + 1


@requires_root
@requires_fuse
def test_an_interrupted_wait_ends_the_waiting_only(work: Bench) -> None:
    source = work.faulty_source(fill(work.path / "src"))
    mount = work.mount(source.path)
    source.faults(delay=0.02)
    command = [*MONARCHFS, "warm", str(mount.path), "--wait"]
    waiting = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )
    wait_for(lambda: mount.status()["files"]["resident"], "the first copies")
    waiting.send_signal(signal.SIGINT)
    out, error = waiting.communicate(timeout=20)
    assert (waiting.returncode, out, error.count("\n")) == (-signal.SIGINT, "", 1)
    assert error.startswith("monarchfs: interrupted the waiting; the mount goes on with it")
    source.faults()
    wait_for(lambda: warm(mount, "--check")["code"] == 0, "copying to end")


@requires_root
@requires_fuse
def test_no_room_is_told_and_no_failure(work: Bench) -> None:
    mount = work.mount(fill(work.path / "src"), tier="500K")
    done = run("warm", str(mount.path), "--wait")
    assert (done.returncode, done.stderr) == (0, "")
    resident, refused = done.stdout.splitlines()
    assert resident.startswith("resident: ")
    assert refused.startswith("no room:  ")
    assert "more in the tiers would do" in refused
    result = warm(mount, "--wait")
    assert result["refused"] == FILES - int(str(result["resident"]))
    assert int(str(result["short_bytes"])) > 0


@requires_root
@requires_fuse
def test_what_failed_is_an_error(work: Bench) -> None:
    backing = fill(work.path / "src")
    source = work.faulty_source(backing)
    mount = work.mount(source.path)
    source.faults(fail={"read d0/file 0": 13})
    done = run("warm", str(mount.path), "--wait")
    assert done.returncode == 1
    assert done.stdout.startswith(f"resident: {FILES - 1} files")
    assert done.stderr == (
        "monarchfs: 1 failed, the first: d0/file 0: copying failed: Permission denied\n"
    )
    assert (warm(mount, "--wait")["failed"], warm(mount, "--wait")["code"]) == (1, 1)


@requires_root
@requires_fuse
def test_a_source_that_hangs_holds_up_nobody_who_does_not_wait(work: Bench) -> None:
    source = work.faulty_source(fill(work.path / "src"))
    mount = work.mount(source.path)
    source.faults(hang=["read d2/file 2"])
    started = Stopwatch()
    assert run("warm", str(mount.path)).returncode == 0
    started.check(10)
    wait_for(lambda: mount.status()["files"]["resident"] == FILES - 1, "all others")
    source.faults()
    wait_for(lambda: mount.status()["files"]["resident"] == FILES, "that one")


@requires_root
@requires_fuse
def test_on_a_terminal_there_is_a_bar(work: Bench) -> None:
    source = work.faulty_source(fill(work.path / "src"))
    mount = work.mount(source.path)
    source.faults(delay=0.03)
    ours, theirs = surroundings.open_terminal()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*MONARCHFS, "warm", str(mount.path), "--wait"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd="/",
        env=environment,
    )
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # EIO: the other end is closed
            break
    out, _ = process.communicate(timeout=20)
    os.close(ours)
    assert process.returncode == 0
    assert out.startswith(b"resident: ")
    assert b"files" in seen
    assert b"\x1b[" in seen


def test_the_pace() -> None:
    pace = RateEstimate()
    so_far = {"bytes": 400 << 20, "walked": True}
    assert pace.text({**so_far, "copied_bytes": 0}, 0.0) == ""
    half = {**so_far, "copied_bytes": 90 << 20, "resident_bytes": 90 << 20}
    assert pace.text({**half, "moving_bytes": 10 << 20}, 10.0) == "10M/s, 30 s left"
    assert pace.text({**half, "moving_bytes": 10 << 20, "walked": False}, 10.0) == "10M/s"
    for second in range(11, 40):
        text = pace.text({**half, "moving_bytes": 10 << 20}, float(second))
    assert text == "", "nothing moves"


def test_lines_for_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = warm_module._lines()
    so_far = {"files": 2000, "bytes": 4 << 20, "resident": 1000, "resident_bytes": 1 << 20}
    show(so_far)
    assert capsys.readouterr().err == "", "not that often"
    monkeypatch.setattr(warm_module, "_LINE_SECONDS", 0.0)
    show = warm_module._lines()
    show(so_far)
    show({**so_far, "walked": True, "failed": 2, "refused": 3})
    show({**so_far, "what": "metadata"})
    assert capsys.readouterr().err.splitlines() == [
        "warm: 1,000 of 2,000 files, 1.0M of 4.0M found so far",
        "warm: 1,000 of 2,000 files, 1.0M of 4.0M, no room 3, failed 2",
        "warm: 2,000 files found so far",
    ]
