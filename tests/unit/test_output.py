"""Where output cannot be written: what a command did decides its exit code, and one line tells."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def ended(
    *arguments: str,
    shell: str = 'exec "$@"',
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.PIPE,
    **environment: str,
) -> tuple[int, str, str]:
    """A command: its exit code, what it printed and its standard error."""
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *MONARCHFS, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd="/",
        env={**ENVIRONMENT, **environment},
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout or "", done.stderr or ""


def through(end: str, *arguments: str) -> tuple[int, str]:
    """A command whose standard error is as ``end`` says."""
    with without_reader() as broken:
        stderr = broken if end == "no reader" else subprocess.DEVNULL
        return ended(*arguments, shell=ENDS[end], stderr=stderr)[:2]


@pytest.fixture
def storage(work: Bench) -> list[str]:
    (work.path / "source").mkdir()
    (work.path / "source" / "file").write_text("content")
    (work.path / "mnt").mkdir()
    return ["--tier", f"{work.path}/tier=10M", "--state-dir", f"{work.path}/state"]


@requires_root
@requires_fuse
@pytest.mark.parametrize("end", ENDS)
def test_run_ends_as_its_command_did(work: Bench, storage: list[str], end: str) -> None:
    options = [*storage, "--report", "--json", "/dev/full"]
    command = ["--", "sh", "-c", f"echo ran >>{work.path}/ran; exit 3"]
    assert through(end, "run", f"{work.path}/source", *options, *command) == (3, "")
    # And where a line says that nothing could be mounted.
    nowhere = ["--tier", f"{work.path}/no/such=10M", "--report"]
    assert through(end, "run", f"{work.path}/source", *nowhere, *command) == (3, "")
    assert (work.path / "ran").read_text() == "ran\n" * 2


@pytest.mark.parametrize("end", ENDS)
def test_an_error_nobody_can_read_is_the_same_error(end: str) -> None:
    assert through(end, "umount") == (2, "")
    assert through(end, "status", "/nowhere") == (1, "")


@pytest.mark.parametrize("command", ["doctor --quick", "exporter --once", "help", "status"])
def test_without_streams_nothing_else_changes(command: str) -> None:
    code, shown, _ = ended(*command.split())
    assert shown
    closed = ended(*command.split(), shell='exec "$@" <&- >&-', stdout=subprocess.DEVNULL)
    assert closed == (code, "", "")


@requires_root
@requires_fuse
@pytest.mark.parametrize("end", ["full", "all closed", "no reader"])
def test_a_mount_is_made_and_served_all_the_same(work: Bench, storage: list[str], end: str) -> None:
    source, point = work.path / "source", work.path / "mnt"
    options = [*storage, "--log-level", "debug"]
    try:
        assert through(end, "mount", f"{source}", f"{point}", *options) == (0, "")
        assert (point / "file").read_text() == "content"
        assert through(end, "warm", f"{point}", "--wait")[0] == 0
    finally:
        assert run("umount", f"{point}").returncode == 0


@requires_root
@requires_fuse
def test_a_mount_in_the_foreground_logs_to_a_full_disk(work: Bench, storage: list[str]) -> None:
    point = work.path / "mnt"
    command = [*MONARCHFS, "mount", f"{work.path}/source", f"{point}", *storage]
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
    "line",
    [
        *("--help", "--version", "gc --help", "doctor --quick", "completion bash"),
        *("status", "status --json", pytest.param("exporter --once", marks=requires_root)),
        # Where nothing can be mounted there is a problem to tell of, and that alone fails.
        pytest.param("doctor --json --quick", marks=requires_fuse),
    ],
)
def test_output_that_cannot_be_written_is_told_in_one_line(line: str) -> None:
    with open("/dev/full", "w") as full:
        assert ended(*line.split(), stdout=full) == (1, "", NO_ROOM)


@pytest.mark.parametrize("line", ["status", "status --json", "completion bash"])
def test_whoever_reads_may_leave(line: str) -> None:
    with without_reader() as nobody:
        assert ended(*line.split(), stdout=nobody) == (0, "", "")
        assert ended(*line.split(), stdout=nobody, PYTHONUNBUFFERED="1") == (0, "", "")


def test_a_failure_stays_what_it_was_where_nothing_can_be_written() -> None:
    assert ended("umount", shell='exec "$@" >/dev/full 2>&1')[0] == 2
