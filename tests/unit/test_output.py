"""Where output cannot be written: what a command did decides its exit code, and one line tells."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.mounting import (
    MONARCHFS,
    Bench,
    requires_fuse,
    requires_root,
    run,
    wait_for,
)

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    # It would have every letter written at once, and nothing left for the interpreter's end.
    if name != "PYTHONUNBUFFERED" and not name.startswith(("SUDO_", "XDG_", "SLURM_"))
}
NO_ROOM = "monarchfs: cannot write the output: No space left on device\n"
ENDS = {
    "full": 'exec "$@" 2>/dev/full',
    "closed": 'exec "$@" 2>&-',
    "all closed": 'exec "$@" <&- >&- 2>&-',
    "no reader": 'exec "$@"',
}


@contextmanager
def without_reader() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


def through(end: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command whose standard error is as ``end`` says."""
    with without_reader() as broken:
        return subprocess.run(
            ["sh", "-c", ENDS[end], "sh", *MONARCHFS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=broken if end == "no reader" else subprocess.DEVNULL,
            text=True,
            cwd="/",
            env=ENVIRONMENT,
            timeout=60,
            check=False,
        )


def to_full(*arguments: str) -> tuple[int, str]:
    """A command with standard output on a full disk: its exit code and standard error."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MONARCHFS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            timeout=60,
            check=False,
        )
    return done.returncode, done.stderr


@requires_root
@requires_fuse
@pytest.mark.parametrize("end", ENDS)
def test_run_ends_as_its_command_did(work: Bench, end: str) -> None:
    (work.path / "source").mkdir()
    storage = ["--tier", f"{work.path}/tier=10M", "--state-dir", f"{work.path}/state"]
    options = [*storage, "--report", "--json", "/dev/full"]
    command = ["--", "sh", "-c", f"echo ran >>{work.path}/ran; exit 3"]
    done = through(end, "run", f"{work.path}/source", *options, *command)
    assert (done.returncode, done.stdout) == (3, "")
    # And where a line says that nothing could be mounted.
    nowhere = ["--tier", f"{work.path}/no/such=10M", "--report"]
    done = through(end, "run", f"{work.path}/source", *nowhere, *command)
    assert (done.returncode, done.stdout) == (3, "")
    assert (work.path / "ran").read_text() == "ran\n" * 2


@pytest.mark.parametrize("end", ENDS)
def test_an_error_nobody_can_read_is_the_same_error(end: str) -> None:
    done = through(end, "umount")
    assert (done.returncode, done.stdout) == (2, "")
    done = through(end, "status", "/nowhere")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["doctor --quick", "exporter --once", "help", "status"])
def test_without_streams_nothing_else_changes(command: str) -> None:
    words = [*MONARCHFS, *command.split()]
    ends = ["sh", "-c", 'exec "$@" <&- >&-', "sh"]
    shown = subprocess.run(words, capture_output=True, env=ENVIRONMENT, timeout=60, check=False)
    closed = subprocess.run(
        [*ends, *words], stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=60, check=False
    )
    assert shown.stdout
    assert (closed.returncode, closed.stderr) == (shown.returncode, b"")


@requires_root
@requires_fuse
@pytest.mark.parametrize("end", ["full", "all closed", "no reader"])
def test_a_mount_is_made_and_served_all_the_same(work: Bench, end: str) -> None:
    source, point = work.path / "source", work.path / "mnt"
    source.mkdir()
    (source / "file").write_text("content")
    point.mkdir()
    options = ["--tier", f"{work.path}/tier=10M", "--state-dir", f"{work.path}/state"]
    done = through(end, "mount", f"{source}", f"{point}", *options, "--log-level", "debug")
    try:
        assert (done.returncode, done.stdout) == (0, "")
        assert (point / "file").read_text() == "content"
        done = through(end, "warm", f"{point}", "--wait")
        assert done.returncode == 0
    finally:
        assert run("umount", f"{point}").returncode == 0


@requires_root
@requires_fuse
def test_a_mount_in_the_foreground_logs_to_a_full_disk(work: Bench) -> None:
    source, point = work.path / "source", work.path / "mnt"
    source.mkdir()
    (source / "file").write_text("content")
    point.mkdir()
    options = ["--tier", f"{work.path}/tier=10M", "--state-dir", f"{work.path}/state"]
    command = [*MONARCHFS, "mount", f"{source}", f"{point}", *options]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*command, "--foreground", "--log-level", "debug"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            env=ENVIRONMENT,
        )
    try:
        wait_for(lambda: process.poll() is not None or os.path.ismount(point), "the mount")
        assert (point / "file").read_text() == "content"
        assert run("umount", f"{point}").returncode == 0
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["gc", "--help"], ["doctor", "--quick"]),
        # Where nothing can be mounted there is a problem to tell of, and that alone fails.
        pytest.param(["doctor", "--json"], marks=requires_fuse),
    ],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_told_in_one_line(arguments: list[str]) -> None:
    quick = ["--quick"] if arguments == ["doctor", "--json"] else []
    assert to_full(*arguments, *quick) == (1, NO_ROOM)


@requires_root
def test_metrics_that_cannot_be_written_are_told_in_one_line() -> None:
    assert to_full("exporter", "--once") == (1, NO_ROOM)


def test_a_failure_stays_what_it_was_where_nothing_can_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MONARCHFS, "umount"], stdout=full, stderr=full, env=ENVIRONMENT, check=False
        )
    assert done.returncode == 2
