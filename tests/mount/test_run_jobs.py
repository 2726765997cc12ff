"""``monarchfs run`` of several jobs on a node: one mount, which outlives the job that made it."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import surroundings, trees
from tests.support.mounting import WAIT_SECONDS, Bench, kill_each, requires_mounts, wait_for
from tests.support.private_mounts import Place, left_clean, lines_of, make_place
from tests.support.processes import parent_of
from tests.support.reading import COMMAND, REPOSITORY

pytestmark = [*requires_mounts, surroundings.requires_namespaces]

FILES, LARGE = 16, 2
"""The large ones have the last numbers."""
KILLED = int(os.environ.get("JOBS_KILLED", "4"))
SCRIPT = "readlink /proc/self/ns/mnt; read line"


@pytest.fixture(params=["root", "user"])
def place(work: Bench, request: pytest.FixtureRequest) -> Iterator[Place]:
    with left_clean(make_place(work, user=request.param == "user")) as made:
        yield made


class Jobs:
    """Jobs of one user, and the files that they read."""

    def __init__(self, place: Place) -> None:
        self.place = place
        sizes = [110_000] * FILES + [3 << 20] * LARGE
        self.bytes = sum(sizes)
        self.files = {f"f{n}": trees.random_bytes(size, n) for n, size in enumerate(sizes)}
        trees.write_files(place.source, self.files)
        for name in self.files:
            os.utime(place.source / name, (1e9, 1e9))
        shutil.copytree(place.source, place.path / "truth")

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
        """A job that reads here and there, compares, and has some files open and mapped."""
        process = self.start(job, "sh", "-c", f"cd {REPOSITORY} && exec {shlex.join(COMMAND)}")
        call = ["loop", str(self.place.source), list(self.files), f"{self.place.path}/truth", job]
        assert process.stdin is not None
        process.stdin.write(json.dumps(call) + "\n")
        process.stdin.flush()
        assert json.loads(next(lines_of(process))) == {"result": "reading"}
        return process

    def ended(self, reader: subprocess.Popen[str]) -> tuple[int, float]:
        """How often a reader has read, and how many seconds the longest round took. On a busy
        machine that may have waited for seconds for the next worker."""
        out, errors = reader.communicate('["end"]\n', timeout=WAIT_SECONDS)
        assert (errors, reader.returncode) == ("", 0)
        said, _ = map(json.loads, out.splitlines())
        rounds, worst = said["result"]
        assert rounds > 0
        return rounds, worst

    def is_other(self, worker: int) -> bool:
        return bool(self.status()["worker"]["pid"] != worker)

    def status(self) -> Any:
        """Once a worker answers."""

        def told() -> dict[str, Any] | None:
            status = self.place.told()
            return status if status.get("state") == "serving" else None

        return wait_for(told, "a mount that serves")


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
    """The exit code and the report of each are its own command's and the mount's."""
    jobs = Jobs(place)
    processes = [jobs.waiting(number) for number in (1, 2, 3)]
    spaces = [mount_namespaces(process.pid) for process in processes]
    # Only the shells of the jobs, deep below, are in the mount's own.
    assert len(set.intersection(*spaces)) == 1
    report = place.path / "report"
    report.touch()
    report.chmod(0o666)
    done = place.run(
        *("sh", "-c", "cat source/f1 | wc -c; exit 7"),
        options=["--json", str(report), "--freshness", "immutable"],
        env={"SLURM_JOB_ID": "4"},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (7, "110000", "")
    told = json.loads(report.read_text())
    assert (told["view"], told["exit_code"], told["status"]["state"]) == ("own", 7, "serving")
    for process in processes:
        # The one that made the mount ends first, and is waited for by nobody.
        assert process.communicate("\n", timeout=WAIT_SECONDS) == ("", "")
        assert process.returncode == 0
    place.wait_nothing_left()


def test_the_owner_is_killed_again_and_again(place: Place) -> None:
    """It takes nothing of the others: what is local is not read again. JOBS_KILLED: how often.
    Prints the longest read."""
    jobs = Jobs(place)
    holders = [jobs.waiting(1)]
    readers = [jobs.reading(98), jobs.reading(99)]
    wait_for(lambda: jobs.status()["files"]["resident"] >= FILES + LARGE, "all to be copied")
    for number in range(2, KILLED + 2):
        holders.append(jobs.waiting(number))
        status = jobs.status()
        assert status["source_io"]["read_bytes"] == jobs.bytes
        worker = status["worker"]["pid"]
        supervisor = parent_of(worker)
        owner = next((holder for holder in holders if supervisor in below(holder.pid)), None)
        if owner is not None:
            kill_job(owner, seed=number if number % 2 else None)
            holders.remove(owner)
        else:  # a reader's job: its command goes on
            kill_each((parent_of(supervisor), supervisor, worker))
        wait_for(partial(jobs.is_other, worker), "another worker")
    readers.append(jobs.reading(100))
    status = jobs.status()
    assert status["files"]["resident"] >= FILES + LARGE
    assert status["source_io"]["read_bytes"] == jobs.bytes
    for reader in readers:
        print(f"{KILLED} kills:", jobs.ended(reader))
    for holder in holders:
        assert holder.communicate("\n", timeout=WAIT_SECONDS) == ("", "")


def test_a_killed_supervisor_is_replaced(place: Place) -> None:
    """Also if no other job has the mount. If the daemon alone is killed, its supervisor leaves the
    mount to another job."""
    jobs = Jobs(place)
    reader = jobs.reading(1)
    for _ in range(2):
        worker = jobs.status()["worker"]["pid"]
        os.kill(parent_of(worker), signal.SIGKILL)
        wait_for(partial(jobs.is_other, worker), "another worker")
    other = jobs.waiting(2)
    worker = jobs.status()["worker"]["pid"]
    os.kill(parent_of(parent_of(worker)), signal.SIGKILL)
    wait_for(partial(jobs.is_other, worker), "another worker")
    jobs.ended(reader)
    assert other.communicate("\n", timeout=WAIT_SECONDS) == ("", "")


def test_a_job_that_is_killed_while_it_joins(place: Place) -> None:
    jobs = Jobs(place)
    reader = jobs.reading(1)
    for milliseconds in range(125 if place.user else 50, 500, 150):
        joining = jobs.start(2, "sh", "-c", SCRIPT)
        with pytest.raises(subprocess.TimeoutExpired):
            joining.wait(milliseconds / 1000)  # each is at another place by then
        kill_job(joining)
    jobs.ended(reader)


def test_unmounting_ends_it_for_all(work: Bench) -> None:
    with left_clean(make_place(work, user=True)) as place:
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
        warm = place.run("sh", "-c", f"cat source/f{FILES} | wc -c", env={"SLURM_JOB_ID": "1"})
        assert warm.returncode == 0
        wait_for(lambda: jobs.status()["files"]["resident"] >= 1, "a large file to be copied")
        reader = jobs.reading(2)
        wait_for(lambda: jobs.status()["passthrough"]["registered"] > 0, "a backing file")
        assert jobs.status()["data_path"] == "passthrough"
        kill_job(first)
        assert jobs.status()["data_path"] == "passthrough"
        jobs.ended(reader)
