"""``monarchfs run`` of several jobs on a node: one mount, which outlives the job that made it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import surroundings
from tests.support.mounting import (
    WAIT_SECONDS,
    Bench,
    kill_each,
    requires_mounts,
    wait_for,
)
from tests.support.private_mounts import Place, left_clean, lines_of, make_place

pytestmark = [*requires_mounts, surroundings.requires_namespaces]

FILES, LARGE = 40, 3
KILLED = int(os.environ.get("JOBS_KILLED", "4"))
SCRIPT = "readlink /proc/self/ns/mnt; read line"

READER = """
import hashlib, json, os, random, sys, time
sums = json.load(open(sys.argv[1]))
kept = {name: open(f"source/{name}", "rb") for name in list(sums)[-2:]}
rng, reads, wrong, longest = random.Random(1), 0, [], 0.0

def content(file):
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    return file.read()

def read(name):
    global reads, longest
    began = time.monotonic()
    if name in kept:
        data = content(kept[name])
    else:
        with open(f"source/{name}", "rb") as file:
            data = content(file)
    longest = max(longest, time.monotonic() - began)
    reads += 1
    if hashlib.sha256(data).hexdigest() != sums[name]:
        wrong.append(name)

for name in sums:
    read(name)
print("reads", flush=True)
while not os.path.exists(sys.argv[2]):
    read(rng.choice(list(sums)))
print(json.dumps({"reads": reads, "wrong": wrong, "longest": longest}))
"""
"""Reads each file, then files at random until a file appears; two stay open. The mount is asked
each time: what the kernel has of a file is dropped before."""


@pytest.fixture(params=["root", "user"])
def place(work: Bench, request: pytest.FixtureRequest) -> Iterator[Place]:
    with left_clean(make_place(work, user=request.param == "user")) as made:
        yield made


class Jobs:
    """Jobs of one user, and the files that they read."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stop = place.path / "stop"
        self.sums = place.path / "sums"
        rng = random.Random(3)
        known = {}
        sizes = [110_000] * FILES + [3 << 20] * LARGE
        for number, size in enumerate(sizes):
            data = rng.randbytes(size)
            (place.source / f"f{number}").write_bytes(data)
            os.utime(place.source / f"f{number}", (1e9, 1e9))
            known[f"f{number}"] = hashlib.sha256(data).hexdigest()
        self.bytes = sum(sizes)
        self.sums.write_text(json.dumps(known))

    def start(self, job: int, *words: str) -> subprocess.Popen[str]:
        return self.place.start(
            *words, job=job, stdin=subprocess.PIPE, options=["--freshness", "immutable"]
        )

    def waiting(self, job: int) -> subprocess.Popen[str]:
        """A job that has the mount, and does nothing until it gets a line."""
        process = self.start(job, "sh", "-c", SCRIPT)
        assert next(lines_of(process)).startswith("mnt:")
        return process

    def reading(self, job: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", READER, str(self.sums), str(self.stop)]
        process = self.start(job, *words)
        assert next(lines_of(process)) == "reads\n"
        return process

    def ended(self, reader: subprocess.Popen[str]) -> dict[str, Any]:
        """What a reader says in the end. On a busy machine one read may have waited for seconds for
        the next worker."""
        self.stop.touch()
        wait_for(lambda: reader.poll() is not None, "a reader to end")
        out, errors = reader.communicate()
        assert (errors, reader.returncode) == ("", 0)
        result: dict[str, Any] = json.loads(out)
        assert result["wrong"] == []
        assert result["reads"] > 0
        return result

    def is_other(self, worker: int) -> bool:
        """Whether another one serves."""
        return bool(self.status()["worker"]["pid"] != worker)

    def status(self) -> dict[str, Any]:
        """Once a worker answers."""

        def told() -> dict[str, Any] | None:
            status = self.place.told()
            return status if status.get("state") == "serving" else None

        result: dict[str, Any] = wait_for(told, "a mount that serves")
        return result


def below(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def mount_namespaces(pid: int) -> set[str]:
    """Those in which a process and its descendants are, without that of the test."""
    found = set()
    for one in below(pid):
        with suppress(FileNotFoundError):  # a command of its that has ended
            found.add(os.readlink(f"/proc/{one}/ns/mnt"))
    return found - {os.readlink("/proc/self/ns/mnt")}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def kill_job(process: subprocess.Popen[str], seed: int | None = None) -> None:
    """As a batch system ends a job: nobody has time to clean up. With ``seed`` one dies after the
    other, in some order, and may react."""
    pids = below(process.pid)
    if seed is None:
        kill_each(pids, signal.SIGSTOP)
        while started := [pid for pid in below(process.pid) if pid not in pids]:
            kill_each(started, signal.SIGSTOP)
            pids += started
    else:
        random.Random(seed).shuffle(pids)
    kill_each(pids)
    process.communicate(timeout=WAIT_SECONDS)


@pytest.mark.smoke
def test_jobs_share_a_mount_and_the_last_one_unmounts(place: Place) -> None:
    jobs = Jobs(place)
    processes = [jobs.waiting(number) for number in (1, 2, 3)]
    spaces = [mount_namespaces(process.pid) for process in processes]
    # Only the shells of the jobs, deep below, are in the mount's own.
    assert len(set.intersection(*spaces)) == 1
    for process in processes:
        # The one that made the mount ends first, and is waited for by nobody.
        assert process.communicate("\n", timeout=WAIT_SECONDS) == ("", "")
        assert process.returncode == 0
    place.wait_nothing_left()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_job_that_is_killed_takes_nothing_of_the_others(place: Place, seed: int | None) -> None:
    jobs = Jobs(place)
    first = jobs.waiting(1)
    reader = jobs.reading(2)
    wait_for(lambda: jobs.status()["files"]["resident"] >= FILES + LARGE, "all to be copied")
    before = jobs.status()
    assert before["source_io"]["read_bytes"] == jobs.bytes
    kill_job(first, seed)
    wait_for(partial(jobs.is_other, before["worker"]["pid"]), "another worker")
    later = jobs.reading(3)
    # All is local still: nothing was read of the source again.
    assert jobs.status()["files"]["resident"] >= FILES + LARGE
    assert jobs.status()["source_io"]["read_bytes"] == jobs.bytes
    jobs.ended(reader)
    jobs.ended(later)


def test_the_owner_is_killed_again_and_again(place: Place) -> None:
    """JOBS_KILLED: how often. Prints the longest read."""
    jobs = Jobs(place)
    holders = [jobs.waiting(1)]
    readers = [jobs.reading(98), jobs.reading(99)]
    for number in range(2, KILLED + 2):
        holders.append(jobs.waiting(number))
        worker = jobs.status()["worker"]["pid"]
        supervisor = parent_of(worker)
        owner = next((holder for holder in holders if supervisor in below(holder.pid)), None)
        if owner is not None:
            kill_job(owner, seed=number if number % 2 else None)
            holders.remove(owner)
        else:  # a reader's job: its command goes on
            kill_each((parent_of(supervisor), supervisor, worker))
        wait_for(partial(jobs.is_other, worker), "another worker")
    for reader in readers:
        print(f"{KILLED} kills:", jobs.ended(reader))
    for holder in holders:
        assert holder.communicate("\n", timeout=WAIT_SECONDS) == ("", "")


def test_a_killed_supervisor_is_replaced(place: Place) -> None:
    """Also if no other job has the mount."""
    jobs = Jobs(place)
    reader = jobs.reading(1)
    for _ in range(2):
        worker = jobs.status()["worker"]["pid"]
        os.kill(parent_of(worker), signal.SIGKILL)
        wait_for(partial(jobs.is_other, worker), "another worker")
    jobs.ended(reader)


def test_the_daemon_alone_is_killed(place: Place) -> None:
    """Its supervisor lives, and leaves the mount to the other job."""
    jobs = Jobs(place)
    first, reader = jobs.waiting(1), jobs.reading(2)
    worker = jobs.status()["worker"]["pid"]
    os.kill(parent_of(parent_of(worker)), signal.SIGKILL)
    wait_for(partial(jobs.is_other, worker), "another worker")
    assert first.communicate("\n", timeout=WAIT_SECONDS) == ("", "")
    jobs.ended(reader)


def test_what_a_later_job_is_told(place: Place) -> None:
    """Its exit code and its report are its own command's and the mount's."""
    jobs = Jobs(place)
    first = jobs.waiting(1)
    report = place.path / "report"
    report.touch()
    report.chmod(0o666)
    done = place.run(
        *("sh", "-c", "cat source/f1 | wc -c; exit 7"),
        options=["--json", str(report), "--freshness", "immutable"],
        env={"SLURM_JOB_ID": "2"},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (7, "110000", "")
    told = json.loads(report.read_text())
    assert (told["view"], told["exit_code"], told["status"]["state"]) == ("own", 7, "serving")
    assert first.communicate("\n", timeout=WAIT_SECONDS) == ("", "")


def test_a_job_that_is_killed_while_it_joins(place: Place) -> None:
    jobs = Jobs(place)
    reader = jobs.reading(1)
    for milliseconds in range(50, 500, 75):
        joining = jobs.start(2, "sh", "-c", SCRIPT)
        with pytest.raises(subprocess.TimeoutExpired):
            joining.wait(milliseconds / 1000)  # each is at another place by then

        kill_job(joining)
    jobs.ended(reader)


def test_unmounting_ends_it_for_all(place: Place) -> None:
    jobs = Jobs(place)
    first, second = jobs.waiting(1), jobs.waiting(2)
    supervisor = parent_of(jobs.status()["worker"]["pid"])
    os.kill(supervisor, signal.SIGTERM)
    wait_for(lambda: not Path(f"/proc/{supervisor}").exists(), "the supervisor to end")
    for process in (first, second):
        assert process.communicate("\n", timeout=WAIT_SECONDS) == ("", "")
        assert process.returncode == 0


def test_files_that_the_kernel_reads_itself_stay_open(work: Bench) -> None:
    with left_clean(make_place(work, user=False)) as place:
        jobs = Jobs(place)
        first = jobs.waiting(1)
        warm = place.run("sh", "-c", "cat source/f4? | wc -c", env={"SLURM_JOB_ID": "1"})
        assert warm.returncode == 0
        wait_for(lambda: jobs.status()["files"]["resident"] >= LARGE, "large files to be copied")
        reader = jobs.reading(2)
        wait_for(lambda: jobs.status()["passthrough"]["registered"] > 0, "a backing file")
        assert jobs.status()["data_path"] == "passthrough"
        kill_job(first)
        assert jobs.status()["data_path"] == "passthrough"
        jobs.ended(reader)
