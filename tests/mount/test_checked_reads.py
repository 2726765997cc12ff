"""Bytes of the source whose version was looked at are of that version, whatever comes next."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support import surroundings
from tests.support.mounting import Bench, requires_mounts, wait_for
from tests.support.trees import write_files

pytestmark = requires_mounts

SIZE, AT, ASKED = 4 << 20, 2 << 20, 128 << 10
CHECKS = {"5", "262"}
"""fstat(2) and newfstatat(2) of x86_64, for which the machine that asks may be another."""


@contextmanager
def slow_checks(pid: int) -> Iterator[None]:
    """Each thread of this process comes back from fstat(2) 0.3 s late."""
    calls = "fstat,newfstatat"
    command = ["strace", "-f", "-qq", "-p", str(pid), "-o", "/dev/null", "-e", f"trace={calls}"]
    tracer = subprocess.Popen(
        [*command, "-e", f"inject={calls}:delay_exit=1000000"], stderr=subprocess.PIPE
    )
    try:
        tasks = Path(f"/proc/{pid}/task")
        wait_for(
            lambda: all(f"TracerPid:\t{tracer.pid}\n" in (task / "status").read_text()
                        for task in tasks.iterdir()),
            "all threads to be traced",
        )  # fmt: skip
        yield
    finally:
        tracer.terminate()
        tracer.communicate(timeout=10)


def checking(pid: int, reader: threading.Thread) -> set[str]:
    """Threads that are in fstat(2)."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            if (task / "syscall").read_text().split()[0] in CHECKS:
                found.add(task.name)
    assert found or reader.is_alive(), "the bytes came without a check"
    return found


@surroundings.program("strace")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="knows numbers of x86_64 alone")
def test_a_change_between_the_check_and_the_answer_is_not_seen(work: Bench) -> None:
    """By a writer on the same node, whose bytes are in the page cache at once."""
    source = write_files(work.path / "source", {"f": b"A" * SIZE})
    os.utime(source / "f", (1, 1))
    mount = work.mount(source, "--prefetch", "none", "--freshness", "ttl=60")
    worker = mount.worker_pid()
    with (mount.path / "f").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, 0) == b"A" * 4096  # Python's; the next ones are not
        got: list[bytes] = []
        reader = threading.Thread(
            target=lambda: got.append(os.pread(file.fileno(), ASKED, AT)), daemon=True
        )
        with slow_checks(worker):
            reader.start()
            threads = wait_for(lambda: checking(worker, reader), "the check")
            # On its way in it is there for a moment, on its way back for long.
            wait_for(lambda: threads & checking(worker, reader), "the check to have its answer")
            with (source / "f").open("r+b", buffering=0) as file_of_source:
                file_of_source.write(b"B" * SIZE)
            assert reader.is_alive()
            reader.join(20)
        assert got == [b"A" * ASKED]
