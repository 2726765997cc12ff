"""A million small files: finding and copying them, the worker's memory, the index, remounting."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Mount, drop_names, reader_processes, repeated
from bench.processes import kill, processes_of
from bench.report import Result
from bench.task import Task

FILES = int(os.environ.get("MILLION_FILES", "1000000"))
FILES_PER_DIRECTORY = 1000
FILE_BYTES = 1024
READERS = 4
ROUNDS = 3
RANDOM_READS = 20_000
SAMPLE_SECONDS = 0.25
POLL_SECONDS = 1.0 if FILES > 200_000 else 0.2
MOST_MB = 150
MOST_REMOUNT_SECONDS = 2
OPTIONS = ("--freshness", "immutable")


def content(number: int) -> bytes:
    return (b"%016d" % number) * (FILE_BYTES // 16)


def path_of(number: int) -> str:
    return f"{number // FILES_PER_DIRECTORY:04d}/{number:07d}.bin"


def make_directory(task: tuple[str, int]) -> None:
    """One directory with its files; runs in a reader process."""
    root, first = task
    os.mkdir(f"{root}/{first // FILES_PER_DIRECTORY:04d}")
    for number in range(first, min(first + FILES_PER_DIRECTORY, FILES)):
        fd = os.open(f"{root}/{path_of(number)}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, content(number))
        os.close(fd)


def read_files(task: tuple[str, list[int], bool]) -> tuple[int, float]:
    """How many had the wrong content, and seconds. ``afresh``: not from the file's own pages."""
    root, numbers, afresh = task
    wrong = 0
    started = time.perf_counter()
    for number in numbers:
        fd = os.open(f"{root}/{path_of(number)}", os.O_RDONLY)
        if afresh:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        wrong += os.read(fd, FILE_BYTES + 1) != content(number)
        os.close(fd)
    return wrong, time.perf_counter() - started


def walk(root: Path) -> float:
    """Seconds for the names and sizes of all files; ValueError where some are missing."""
    started = time.perf_counter()
    done = subprocess.run(
        ["find", str(root), "-type", "f", "-printf", "%s\n"], stdout=subprocess.PIPE, check=True
    )
    seconds = time.perf_counter() - started
    found, size = done.stdout.count(b"\n"), f"{FILE_BYTES}\n".encode()
    if done.stdout != size * FILES:
        raise ValueError(f"a walk found {found} files instead of {FILES}, or wrong sizes")
    return seconds


class Memory:
    """RssAnon of a process, in MB. Changing: the most that was seen."""

    def __init__(self, pid: int) -> None:
        self.most = 0.0
        self._pid = pid

    def now(self) -> float:
        with open(f"/proc/{self._pid}/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("RssAnon:"))
        value = int(line.split()[1]) * 1024 / 1e6
        self.most = max(self.most, value)
        return value


@contextmanager
def memory_of(mount: Mount) -> Iterator[Memory]:
    """The memory of the mount's worker, looked at all the time."""
    memory = Memory(int(mount.status()["worker"]["pid"]))
    with repeated(memory.now, SAMPLE_SECONDS):
        yield memory


def watch(mount: Mount, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for the status now and then until ``done``; that status."""
    while not done(status := mount.status()):
        if status["state"] != "serving":
            raise ValueError(f"the mount says: {status['state']}")
        time.sleep(POLL_SECONDS)
    return status


def scanned(status: dict[str, Any]) -> bool:
    return not status["prefetch"]["scanning"] and status["files"]["known"] >= FILES


def idle(status: dict[str, Any]) -> bool:
    prefetch = status["prefetch"]
    return not (prefetch["scanning"] or prefetch["queued"] or prefetch["active"])


def index_bytes(state: Path) -> int:
    """What the index occupies on the disk."""
    # Not its blocks: some are allocated ahead of it.
    return (state / "index" / "data.mdb").stat().st_size


def walks(result: Result, what: str, mount: Path, source: Path, *, drop: bool = False) -> None:
    values: list[float] = []
    others: list[float] = []
    for _ in range(ROUNDS):
        for root, times in ((mount, values), (source, others)):
            if drop:
                os.sync()
                drop_names()
            times.append(walk(root))
    result.compare(what, "s", values, others)


def known_only(place: Path, source: Path, result: Result) -> None:
    """``--prefetch access``: a walk makes the names known, and nothing is copied."""
    mount = Mount(source, place, *OPTIONS, "--prefetch", "access")
    with mount, memory_of(mount) as memory:
        before, empty = memory.now(), index_bytes(place / "state")
        result.figure("first walk of an unknown tree", FILES / walk(mount.path), "1/s")
        size = index_bytes(place / "state") - empty
        result.figure("index, per known file", size / FILES, "B")
        walks(result, "walk, all known", mount.path, source)
        growth = (memory.now() - before) / (FILES / 1e5)
        result.figure("anonymous memory, growth per 100,000 names walked", growth, "MB")


def scan_alone(place: Path, source: Path, result: Result) -> None:
    """``--prefetch all`` without room for copies: the scan waits for none of them."""
    started = time.perf_counter()
    mount = Mount(source, place, *OPTIONS, "--prefetch", "all", size="64K")
    with mount, memory_of(mount) as memory:
        watch(mount, scanned)
        result.figure("scan alone", FILES / (time.perf_counter() - started), "1/s")
        watch(mount, idle)
        result.figure("anonymous memory, scan alone, most", memory.most, "MB")


def copied(place: Path, source: Path, result: Result) -> None:
    """``--prefetch all``: everything is found, copied, read, and found again by new mounts."""
    started = time.perf_counter()
    mount = Mount(source, place, *OPTIONS, "--prefetch", "all")
    with mount, memory_of(mount) as memory, reader_processes(READERS) as pool:
        at_first = memory.now()
        status = watch(mount, lambda now: now["files"]["resident"] >= FILES / 5)
        early, early_files = memory.now(), status["files"]["resident"]
        watch(mount, scanned)
        at_scanned = memory.now()
        result.figure("found beside copying", FILES / (time.perf_counter() - started), "1/s")
        status = watch(mount, idle)
        result.figure("found and copied", FILES / (time.perf_counter() - started), "1/s")
        at_copied = memory.now()
        missing = FILES - status["files"]["resident"]
        result.figure("files that are not resident then", missing, "", at_most=0)
        result.figure("index, per resident file", index_bytes(place / "state") / FILES, "B")
        order = random.Random(1).sample(range(FILES), FILES)
        tasks = [(str(mount.path), order[n::READERS], False) for n in range(READERS)]
        began = time.perf_counter()
        wrong = sum(answer[0] for answer in pool.map(read_files, tasks, chunksize=1))
        seconds = time.perf_counter() - began
        result.figure(f"read once by {READERS} readers", FILES / seconds, "1/s")
        result.figure("wrong files", wrong, "", at_most=0)
        at_read = memory.now()
        reads(result, mount.path, source)
        walks(result, "walk, all resident", mount.path, source)
        if os.geteuid() == 0:
            walks(result, "walk, kernel's caches emptied", mount.path, source, drop=True)
        for what, value in (
            *(("at first", at_first), ("scanned", at_scanned), ("copied", at_copied)),
            *(("read", at_read), ("walked", memory.now())),
        ):
            result.figure(f"anonymous memory, {what}", value, "MB")
        growth = (at_copied - early) / ((FILES - early_files) / 1e5)
        result.figure("its growth per 100,000 copies", growth, "MB", at_most=1)
        growth = (at_read - at_copied) / (FILES / 1e5)
        result.figure("its growth per 100,000 files read", growth, "MB", at_most=1)
        result.figure("anonymous memory, most", memory.most, "MB", at_most=MOST_MB)


def reads(result: Result, mount: Path, source: Path) -> None:
    """One reader, in random order; the mount's own pages are dropped, those below it stay."""
    values: list[float] = []
    others: list[float] = []
    for seed in range(ROUNDS):
        numbers = random.Random(seed).sample(range(FILES), min(RANDOM_READS, FILES))
        for root, times in ((mount, values), (source, others)):
            wrong, seconds = read_files((str(root), numbers, root is mount))
            if wrong:
                raise ValueError(f"{wrong} files had the wrong content")
            times.append(seconds / len(numbers) * 1e6)
    result.compare("open, read, close of a resident file", "us", values, others)


def remounts(place: Path, source: Path, result: Result) -> None:
    """How long a mount of the full cache takes to answer, left in order and not."""
    state, tier = place / "state", place / "tier"
    options = ("--state-dir", str(state), *OPTIONS, "--prefetch", "all")
    times: dict[str, list[float]] = {"umount": [], "kill -9": []}
    for number in range(2 * ROUNDS):
        how = "kill -9" if number % 2 else "umount"
        # Every second one finds what the one before, which was killed, has left.
        mount = Mount(source, place.with_name(f"{place.name}-{number}"), *options, tier=tier)
        started = time.perf_counter()
        with mount:
            (mount.path / path_of(FILES - 1)).stat()
            seconds = time.perf_counter() - started
            if number:
                times["umount" if how == "kill -9" else "kill -9"].append(seconds)
            status = mount.status()
            if status["files"]["resident"] != FILES:
                raise ValueError(f"after {how} {status['files']['resident']} files are resident")
            if how == "kill -9":
                kill(processes_of(mount.path))
    for how, values in times.items():
        worst = max(values)
        result.figure(f"remount after {how}", worst, "s", at_most=MOST_REMOUNT_SECONDS)


def run(task: Task) -> Result:
    place = task.place
    result = Result(
        "million",
        f"{FILES:,} files of {FILE_BYTES} bytes in directories of"
        f" {FILES_PER_DIRECTORY:,}, tier on disk",
    )
    source = place / "data"
    source.mkdir()
    with reader_processes(READERS) as pool:
        firsts = range(0, FILES, FILES_PER_DIRECTORY)
        pool.map(make_directory, [(str(source), first) for first in firsts], chunksize=1)
    known_only(place / "known", source, result)
    shutil.rmtree(place / "known")
    scan_alone(place / "scan", source, result)
    shutil.rmtree(place / "scan")
    copied(place / "copied", source, result)
    remounts(place / "copied", source, result)
    result.notes = [
        "anonymous memory is RssAnon of the worker: the index's pages are the page cache's",
        "a walk is find -printf %s; known: the index has every attribute, and the kernel's own"
        " caches are as the walk before left them; freshness immutable",
        "scan alone: from the mount command on, with a tier that has room for 16 files",
        "remount: the mount command and the first answer, the longest of the rounds; after kill -9"
        " of both processes the old mount was unmounted before",
        "fewer files: MILLION_FILES=100000 make bench ARGS=million",
    ]
    return result
