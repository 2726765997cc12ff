"""Reads of resident files by every way that they can take, beside other mirrors."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path

from bench import mirrors
from bench.harness import (
    MIB,
    Mount,
    drop_caches,
    drop_pages,
    forget_pages,
    memory_place,
    monarchfs,
    reader_processes,
    write_random,
)
from bench.processes import Daemon
from bench.report import Result
from bench.task import Task

RANDOM_BYTES, PAGE = 4096, 4096
SMALL_BYTES, FILES_PER_DIRECTORY = 110_000, 1000
SLOW_SHARE = 0.1
"""Of the small files, for mirrors that take about a millisecond for each."""
MOST_SECONDS = 600.0
LOAD_READERS, ASK_SECONDS = 4, 0.02
FORGETFUL = ("--freshness", f"ttl={mirrors.DAY}")
OURS = {
    "relay": (*FORGETFUL, "--data-path", "relay"),
    "relay, immutable": ("--freshness", "immutable", "--data-path", "relay"),
    "passthrough": (*FORGETFUL, "--data-path", "passthrough"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is read, and how often; the seconds for which readers read as fast as they can."""

    large_bytes: int
    random_reads: int
    small_files: int
    rounds: int
    load_seconds: float


QUICK = Sizes(192 * MIB, 4000, 2000, 3, 2.0)
FULL = Sizes(1024 * MIB, 20_000, 20_000, 5, 5.0)

Reading = Callable[[str, int, Sizes], float]


# What a reader process does: work a second, with the files' root, a seed and the sizes.


def sequential(root: str, _seed: int, sizes: Sizes) -> float:
    """MB/s, 1 MiB at a time."""
    buffer = bytearray(MIB)
    started = time.perf_counter()
    with open(f"{root}/large", "rb", buffering=0) as file:
        size = 0
        while count := file.readinto(buffer):
            size += count
    assert size == sizes.large_bytes
    return size / 1e6 / (time.perf_counter() - started)


def at_random(root: str, seed: int, sizes: Sizes) -> float:
    rng = random.Random(seed)
    blocks = sizes.large_bytes // RANDOM_BYTES
    offsets = [rng.randrange(blocks) * RANDOM_BYTES for _ in range(sizes.random_reads)]
    buffers = [bytearray(RANDOM_BYTES)]
    fd = os.open(f"{root}/large", os.O_RDONLY)
    started = time.perf_counter()
    for offset in offsets:
        os.preadv(fd, buffers, offset)
    seconds = time.perf_counter() - started
    os.close(fd)
    return sizes.random_reads / seconds


def mapped(root: str, _seed: int, _sizes: Sizes) -> float:
    """Pages a second, one byte of each."""
    with open(f"{root}/large", "rb") as file:
        started = time.perf_counter()
        with mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
            touched = len(memory[::PAGE])
            seconds = time.perf_counter() - started
    return touched / seconds


def small(root: str, seed: int, sizes: Sizes) -> float:
    """Files a second, each opened, read at once and closed."""
    return _small(root, seed, sizes.small_files, sizes.small_files)


def some_small(root: str, seed: int, sizes: Sizes) -> float:
    """The same for fewer of them, always the same."""
    return _small(root, seed, sizes.small_files, int(sizes.small_files * SLOW_SHARE))


def _small(root: str, seed: int, files: int, count: int) -> float:
    buffer = bytearray(SMALL_BYTES + 1)
    numbers = random.Random(0).sample(range(files), count)
    random.Random(seed).shuffle(numbers)
    paths = [small_path(root, number) for number in numbers]
    started = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        assert os.readv(fd, [buffer]) == SMALL_BYTES
        os.close(fd)
    return count / (time.perf_counter() - started)


def small_path(root: str, number: int) -> str:
    return f"{root}/{number // FILES_PER_DIRECTORY:03d}/{number:06d}.jpg"


def read_until(root: str, deadline: float, seed: int, files: int) -> int:
    """How many small files were read until time.monotonic() is ``deadline``."""
    rng = random.Random(seed)
    count = 0
    while time.monotonic() < deadline:
        fd = os.open(small_path(root, rng.randrange(files)), os.O_RDONLY)
        forget_pages(fd)
        assert len(os.read(fd, SMALL_BYTES + 1)) == SMALL_BYTES
        os.close(fd)
        count += 1
    return count


# What is measured.


@dataclass(frozen=True, slots=True)
class Measure:
    """``drop`` comes before it. ``aims`` are shares of direct, by the way that is read."""

    what: str
    unit: str
    read: Reading
    drop: Callable[[], None] | None
    aims: dict[str, float]


LARGE_AIMS = {"passthrough": 0.95, "relay": 0.7, "relay, immutable": 0.7}
RANDOM_AIMS = {"passthrough": 0.95, "relay": 0.25, "relay, immutable": 0.25}
WARM_AIMS = {"relay": 0.95, "relay, immutable": 0.95}
LARGE = (
    Measure("sequential", "MB/s", sequential, drop_pages, LARGE_AIMS),
    Measure("sequential, page cache", "MB/s", sequential, None, WARM_AIMS),
    Measure("random 4 KiB, page cache", "1/s", at_random, None, WARM_AIMS),
    Measure("mapped, page cache", "1/s", mapped, None, WARM_AIMS),
    Measure("random 4 KiB", "1/s", at_random, drop_pages, RANDOM_AIMS),
    Measure("mapped", "1/s", mapped, drop_pages, {"passthrough": 0.95}),
)
SMALL = (
    Measure("small files", "1/s", small, drop_pages, dict.fromkeys(OURS, 0.4)),
    Measure(
        *("small files, page cache", "1/s", small, None),
        {"relay": 0.4, "relay, immutable": 0.75, "passthrough": 0.4},
    ),
    Measure("small files, no names either", "1/s", small, drop_caches, {}),
)
AHEAD = 1.5
"""Small files a second, against the best of the other mirrors."""


@dataclass(slots=True)
class Way:
    """One way to the files. ``daemon`` where it is ours."""

    name: str
    root: Path
    daemon: Daemon | None = None

    @property
    def slow(self) -> bool:
        return self.name == "rclone"


class Comparison:
    """All ways, each measured in turn with ``direct``. Changing: what was found, by measure and
    way, and what was found directly then."""

    def __init__(self, direct: Path, ways: list[Way], pool: Pool, sizes: Sizes) -> None:
        self.values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.others: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.cpu: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._direct = direct
        self._ways = ways
        self._pool = pool
        self._sizes = sizes

    def rounds(self, measures: tuple[Measure, ...], count: int) -> None:
        order = list(self._ways)
        for number in range(count):
            for way in order:
                for index, measure in enumerate(measures):
                    self._measure(way, measure, 10 * number + index)
            order.reverse()

    def _measure(self, way: Way, measure: Measure, seed: int) -> None:
        reading = some_small if way.slow and measure.read is small else measure.read
        self.others[measure.what][way.name].append(self._read(self._direct, reading, seed))
        if measure.drop is not None:
            empty(way, measure.drop)
        before = way.daemon.cpu_seconds() if way.daemon is not None else 0.0
        self.values[measure.what][way.name].append(self._read(way.root, reading, seed))
        if way.daemon is not None:
            self.cpu[measure.what][way.name] += way.daemon.cpu_seconds() - before

    def _read(self, root: Path, reading: Reading, seed: int) -> float:
        # A reader that a signal ended (SIGBUS) would be waited for for ever.
        return self._pool.apply_async(reading, (str(root), seed, self._sizes)).get(MOST_SECONDS)

    def show(self, result: Result, measures: tuple[Measure, ...]) -> None:
        for measure in measures:
            for name, values in self.values[measure.what].items():
                others, aim = self.others[measure.what][name], measure.aims.get(name)
                what = f"{measure.what}: {name}"
                result.compare(what, measure.unit, values, others, at_least=aim)

    def show_ahead(self, result: Result, what: str) -> None:
        """Ours against the best of the others, as shares of direct, round by round."""
        shares = {
            name: [v / o for v, o in zip(values, self.others[what][name], strict=True)]
            for name, values in self.values[what].items()
        }
        for names, best, aim in (
            (mirrors.NAMES, "best mirror as it comes", AHEAD),
            (mirrors.TUNED, "best tuned mirror", None),
        ):
            others = [shares[name] for name in names if name in shares]
            if not others:
                continue
            bests = [max(some) for some in zip(*others, strict=True)]
            for name in (name for name in OURS if name in shares):
                against = f"{what}: {name}, against the {best}"
                result.compare(against, "share", shares[name], bests, at_least=aim)


def empty(way: Way, drop: Callable[[], None]) -> None:
    if os.geteuid() == 0:
        drop()
        return
    for folder, _, names in os.walk(way.root):
        for name in names:
            with open(f"{folder}/{name}", "rb") as file:
                forget_pages(file.fileno())


# The ways.


def ours() -> dict[str, tuple[str, ...]]:
    """The ways that this version has, with their options."""
    has_paths = "--data-path" in monarchfs("mount", "--help")
    found: dict[str, tuple[str, ...]] = {}
    for name, options in OURS.items():
        if has_paths and (name != "passthrough" or os.geteuid() == 0):
            found[name] = options
        elif not has_paths and name != "passthrough":
            found[name] = options[: options.index("--data-path")]
    return found


@contextmanager
def all_ways(memory: Path, place: Path, source: Path, files: int) -> Iterator[list[Way]]:
    """Every way to the ``files`` files of ``source``, which are resident in ours."""
    with ExitStack() as stack:
        ways: list[Way] = []
        for number, (name, options) in enumerate(ours().items()):
            mount = Mount(source, place / f"m{number}", *options, tier=memory / f"tier{number}")
            stack.enter_context(mount)
            monarchfs("warm", str(mount.path), "--wait")
            if mount.wait_idle()["files"]["resident"] != files:
                raise ValueError(f"not all files are resident: {mount.status()['files']}")
            ways.append(Way(name, mount.path, Daemon(mount.path)))
        for name in mirrors.installed():
            path = stack.enter_context(mirrors.mirror(name, source, memory / name))
            ways.append(Way(name, path))
        yield ways


def large_files(result: Result, place: Path, memory: Path, pool: Pool, sizes: Sizes) -> None:
    source = memory / "data"
    write_random(source / "large", sizes.large_bytes, random.Random(1))
    with all_ways(memory, place, source, 1) as ways:
        found = Comparison(source, ways, pool, sizes)
        found.rounds(LARGE[:1], 1)
        found = Comparison(source, ways, pool, sizes)
        found.rounds(LARGE, sizes.rounds)
    found.show(result, LARGE)
    for name, seconds in found.cpu["sequential"].items():
        per_100_gb = seconds / (sizes.rounds * sizes.large_bytes) * 100e9
        result.figure(f"daemon's CPU time for 100 GB: {name}", per_100_gb, "s")


def small_files(result: Result, place: Path, memory: Path, pool: Pool, sizes: Sizes) -> None:
    source = memory / "data"
    rng = random.Random(1)
    for number in range(sizes.small_files):
        write_random(Path(small_path(str(source), number)), SMALL_BYTES, rng)
    with all_ways(memory, place, source, sizes.small_files) as ways:
        found = Comparison(source, ways, pool, sizes)
        found.rounds(SMALL[:1], 1)
        found = Comparison(source, ways, pool, sizes)
        found.rounds(SMALL, sizes.rounds)
        busy = [
            (way.name, delays(way.daemon, way.root, sizes), delays(way.daemon, source, sizes))
            for way in ways
            if way.daemon is not None
        ]
    found.show(result, SMALL)
    for measure in SMALL:
        found.show_ahead(result, measure.what)
    for name, seconds in found.cpu["small files, page cache"].items():
        per_million = seconds / (sizes.rounds * sizes.small_files) * 1e6
        result.figure(f"daemon's CPU time for 1,000,000 opens: {name}", per_million, "s")
    for name, milliseconds, others in busy:
        what = f"status under {LOAD_READERS} readers: {name}"
        for which, of in (
            ("median", statistics.median),
            ("99%", lambda times: statistics.quantiles(times, n=100)[98]),
            ("longest", max),
        ):
            result.compare(f"{what}, {which}", "ms", [of(milliseconds)], [of(others)])


def delays(daemon: Daemon, root: Path, sizes: Sizes) -> list[float]:
    """How long the worker's event loop takes to answer something else, in ms, while readers read
    the files below ``root`` as fast as they can."""
    found = []
    with reader_processes(LOAD_READERS) as pool:
        deadline = time.monotonic() + sizes.load_seconds
        tasks = [(str(root), deadline, seed, sizes.small_files) for seed in range(LOAD_READERS)]
        load = pool.starmap_async(read_until, tasks, chunksize=1)
        while not load.ready():
            started = time.perf_counter()
            daemon.status()
            found.append((time.perf_counter() - started) * 1000)
            time.sleep(ASK_SECONDS)
        load.get(MOST_SECONDS)
    return found


def run(task: Task) -> Result:
    place = task.place
    sizes = QUICK if task.quick else FULL
    sizes = replace(sizes, rounds=task.rounds or sizes.rounds)
    result = Result("datapath", "resident files, one reader, by every way; share of direct")
    with memory_place() as memory, reader_processes(1) as pool:
        for part in (large_files, small_files):
            here, there = place / part.__name__, memory / part.__name__
            here.mkdir()
            there.mkdir()
            task.say(part.__name__.replace("_", " "))
            part(result, here, there, pool, sizes)
            shutil.rmtree(there)
    absent = sorted(set(OURS) - set(ours()))
    missing = sorted(set(mirrors.NAMES) - set(mirrors.installed(mirrors.NAMES)))
    cached = "pages" if os.geteuid() == 0 else "the files' pages"
    result.notes = [
        f"{sizes.large_bytes // MIB} MiB file: 1 MiB reads, {sizes.random_reads:,} preads, a byte"
        f" of each page; {sizes.small_files:,} files of {SMALL_BYTES // 1000} KB in random order,"
        f" opened, read, closed (rclone: {SLOW_SHARE:.0%} of them); {sizes.rounds} rounds, order"
        " reversed each time, each beside the same work done directly",
        f"everything on tmpfs; {cached} dropped before, but for 'page cache'; no names either: the"
        " kernel's names and attributes too (only as root)",
        "relay: opens reach the daemon (freshness ttl); tuned: names are cached for a day, pages"
        " across opens (rclone is always); the reader is Python, whose time is part of both sides",
        "status: a question that the worker's event loop answers, while readers read resident"
        " files; 'direct' while they read the source directly",
        "CPU time: of supervisor and worker in all rounds, for what was read and opened there (page"
        " cache), scaled up",
        *(f"{name}: not in this version, or not for this user" for name in absent),
        *(f"{name} is not installed" for name in missing),
    ]
    return result
