"""How true the emulated parallel file system is: its rate, latencies, noise and counters against
what was asked for and against the kernel's own parts set to the same figures, and what it costs."""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path

from bench.harness import (
    MIB,
    Unusable,
    drop_names,
    drop_pages,
    memory_place,
    reader_processes,
    wait_for,
)
from bench.kernelparts import delayed_mirror, throttled_disk
from bench.pfs import MB, PROFILES, Counts, ParallelFileSystem, Profile
from bench.probes import (
    READERS,
    Data,
    each,
    open_and_close,
    page_reads,
    processor_seconds,
    rate,
    read_range,
)
from bench.report import Kind, Point, Result, Series
from bench.task import Task

BANDWIDTH_GOAL = 0.97
LATENCY_GOAL, LATENCY_EXTRA_MS = 1.1, 0.1
WEATHER_SEED = 3
NOISE_PASSES = 2
SAMPLE_SECONDS = 0.25
TRIES = 10


class Operation:
    """One kind: what each takes in ms, and the emulator's processor time in us."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.milliseconds: list[float] = []
        self.processor: list[float] = []


def account(
    pfs: ParallelFileSystem,
    operation: Operation,
    expected: Counts,
    work: Callable[[], list[float]],
) -> bool:
    """Adds what ``work``'s operations took; not where others were asked for, because somebody on
    this machine dropped caches meanwhile."""
    before, processor = pfs.counts(), processor_seconds(pfs.pid)
    seconds = work()
    spent = processor_seconds(pfs.pid) - processor
    if (pfs.counts() - before)._replace(read_bytes=0) != expected:
        return False
    operations = expected.operations
    operation.processor.append(1e6 * spent / operations)
    operation.milliseconds.append(1e3 * statistics.median(seconds) * len(seconds) / operations)
    return True


def latencies(
    pfs: ParallelFileSystem, data: Data, operations: dict[str, Operation], seed: int
) -> None:
    """One round of each kind, nothing of it cached."""
    small = [pfs.path / path for path in data.small]
    folders = [pfs.path / path for path in data.folders]
    large = pfs.path / data.large
    some, many = len(folders), len(small)
    kinds: list[tuple[str, Counts, Callable[[], list[float]]]] = [
        ("lookup", Counts(lookup=some), lambda: each(os.stat, folders)),
        ("readdir", Counts(opendir=some, readdir=some), lambda: each(os.listdir, folders)),
        ("open", Counts(open=many), lambda: each(open_and_close, small)),
        ("read", Counts(open=1, read=many), lambda: page_reads(large, many, seed)),
    ]
    for name, expected, work in kinds:
        for _ in range(TRIES):
            drop_names()
            known = {"lookup": [], "readdir": folders}.get(name, [*small, large])
            each(os.stat, known)
            if account(pfs, operations[name], expected, work):
                break
        else:
            raise Unusable(f"{name}: something else was asked for, {TRIES} times")


def measure_latencies(
    task: Task, result: Result, pfs: ParallelFileSystem, data: Data, rounds: int
) -> None:
    costs: dict[str, list[float]] = {}
    for profile in PROFILES.values():
        pfs.use(profile.quiet())
        operations = {name: Operation(name) for name in ("lookup", "readdir", "open", "read")}
        for number in range(rounds):
            task.say(f"latencies, {profile.name}, round {number + 1} of {rounds}")
            latencies(pfs, data, operations, number)
        for operation in operations.values():
            metadata = operation.name != "read"
            wanted = 1e3 * (profile.metadata_seconds if metadata else profile.read_seconds)
            result.figure(
                f"{profile.name}: {operation.name}, {wanted:g} ms",
                statistics.median(operation.milliseconds),
                "ms",
                at_most=LATENCY_GOAL * wanted + LATENCY_EXTRA_MS,
                values=operation.milliseconds,
            )
            costs.setdefault(operation.name, []).extend(operation.processor)
    for name, values in costs.items():
        what = f"its processor time, {name}"
        result.figure(what, statistics.median(values), "us", values=values)


def measure_rates(
    task: Task, result: Result, pfs: ParallelFileSystem, data: Data, place: Path, rounds: int
) -> None:
    """Each profile's, and the throttled disk's beside it."""
    measured: dict[tuple[str, str, int], list[float]] = {}
    costs: list[float] = []
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(throttled_disk(data.root, place))
        except Unusable as missing:
            disk = None
            result.leave_out("the rate of a throttled block device", str(missing))
        pool = stack.enter_context(reader_processes(READERS))
        others = set(active_children())
        slow = stack.enter_context(reader_processes(READERS))
        if disk is not None:
            disk.slow_down(one.pid for one in set(active_children()) - others if one.pid)
        for number in range(rounds):
            for profile in PROFILES.values():
                task.say(f"bandwidth, {profile.name}, round {number + 1} of {rounds}")
                pfs.use(profile.quiet())
                for readers in (1, READERS):
                    spent = processor_seconds(pfs.pid)
                    found = rate(pool, pfs.path / data.large, readers)
                    costs.append((processor_seconds(pfs.pid) - spent) / data.bytes * MIB * 1e6)
                    measured.setdefault((profile.name, "pfs", readers), []).append(found / MB)
                    if disk is not None:
                        disk.limit(profile.bandwidth)
                        found = rate(slow, disk.path / data.large, readers)
                        measured.setdefault((profile.name, "disk", readers), []).append(found / MB)
    for (name, where, readers), values in measured.items():
        if where == "disk":
            continue
        cap = PROFILES[name].bandwidth / MB
        what = f"{name}: {readers} reader{'s' if readers > 1 else ''}"
        caps = [cap] * len(values)
        result.compare(what, "MB/s", values, caps, at_least=BANDWIDTH_GOAL, against="its limit")
        beside = measured.get((name, "disk", readers))
        if beside:
            result.compare(what, "MB/s", values, beside, against="throttled loop device")
    result.figure("its processor time, 1 MiB", statistics.median(costs), "us", values=costs)


def measure_mirror(
    task: Task, result: Result, pfs: ParallelFileSystem, data: Data, place: Path, rounds: int
) -> None:
    """Opens and reads beside those of bindfs, delayed as long by strace."""
    for profile in (PROFILES["busy"], PROFILES["crowded"]):
        pfs.use(profile.quiet())
        found: dict[str, tuple[list[float], list[float]]] = {"open": ([], []), "read": ([], [])}
        try:
            with delayed_mirror(
                data.root, place / profile.name, profile.metadata_seconds, profile.read_seconds
            ) as mirror:
                for number in range(rounds):
                    task.say(f"bindfs delayed, {profile.name}, round {number + 1} of {rounds}")
                    for index, root in enumerate((pfs.path, mirror)):
                        paths = [root / path for path in data.small]
                        each(os.stat, paths)
                        opens = each(open_and_close, paths)
                        reads = page_reads(root / data.large, len(paths), number)
                        found["open"][index].append(1e3 * statistics.median(opens))
                        found["read"][index].append(1e3 * statistics.median(reads))
        except Unusable as missing:
            result.leave_out(f"latencies of a delayed mirror, {profile.name}", str(missing))
            return
        for name, (values, others) in found.items():
            what = f"{profile.name}: {name}"
            result.compare(what, "ms", values, others, against="bindfs delayed by strace")


def measure_scaling(
    task: Task, result: Result, pfs: ParallelFileSystem, data: Data, rounds: int
) -> None:
    """Reads of one page by many processes at once, and opens, of which only so many travel."""
    profile = PROFILES["crowded"].quiet()
    pfs.use(profile)
    at_once = 2 * profile.metadata_in_flight
    found: dict[str, list[float]] = {"reads": [], "opens": []}
    count = len(data.small) // 2
    with reader_processes(at_once) as pool:
        path = pfs.path / data.large
        for number in range(rounds):
            task.say(f"many at once, round {number + 1} of {rounds}")
            drop_pages()
            started = time.perf_counter()
            work = [(path, count, reader) for reader in range(at_once)]
            pool.starmap(page_reads, work, chunksize=1)
            found["reads"].append(at_once * count / (time.perf_counter() - started))
            paths = [pfs.path / path for path in data.small[:count]]
            started = time.perf_counter()
            pool.starmap(each, [(open_and_close, paths)] * at_once, chunksize=1)
            found["opens"].append(at_once * count / (time.perf_counter() - started))
    for name, travelling in (("reads", at_once), ("opens", profile.metadata_in_flight)):
        most = travelling / profile.metadata_seconds
        what = f"crowded: {name} of {at_once} processes"
        result.compare(what, "1/s", found[name], [most] * rounds, against="as many as may be")


def left_by(profile: Profile, seconds: float) -> float:
    """Bytes that the noise leaves from its beginning on."""
    total, step = 0.0, 0
    while step * profile.noise_period < seconds:
        lasts = min(profile.noise_period, seconds - step * profile.noise_period)
        share = profile.share(WEATHER_SEED, (step + 0.5) * profile.noise_period)
        total += lasts * profile.bandwidth * (1 - share)
        step += 1
    return total


def measure_noise(
    task: Task, result: Result, pfs: ParallelFileSystem, data: Data, rounds: int
) -> None:
    """Reads all the time, and looks how many bytes have come."""
    profile = replace(PROFILES["crowded"], noise_period=0.25)
    pfs.use(profile)
    ratios, again = [], []
    points: list[Point] = []
    whole = (pfs.path / data.large, 0, data.bytes, 0.0, NOISE_PASSES)
    with reader_processes(1) as pool:
        for number in range(rounds):
            task.say(f"noise, round {number + 1} of {rounds}")
            drop_pages()
            pfs.restart_noise()
            began = time.monotonic()
            reading = pool.apply_async(read_range, whole)
            before = pfs.counts()
            samples = [(0.0, 0)]
            while not reading.ready():
                reading.wait(SAMPLE_SECONDS)
                samples.append((time.monotonic() - began, (pfs.counts() - before).read_bytes))
            _, ended = reading.get()
            ratios.append(left_by(profile, ended - began) / (NOISE_PASSES * data.bytes))
            again.append(ended - began)
            points = [
                Point((t1 + t0) / 2, (b1 - b0) / (t1 - t0) / MB)
                for (t0, b0), (t1, b1) in pairwise(samples[:-1])
            ]
    steps = int(again[-1] / profile.noise_period) + 1
    drawn = [
        Point(time_, (1 - profile.share(WEATHER_SEED, time_)) * profile.bandwidth / MB)
        for step in range(steps)
        for time_ in (step * profile.noise_period, (step + 0.999) * profile.noise_period)
    ]
    result.figure(
        "noise: bytes that were free / that came",
        statistics.median(ratios),
        "",
        at_most=2 - BANDWIDTH_GOAL,
        values=ratios,
    )
    result.figure("noise: the same again, longest / shortest", max(again) / min(again), "")
    labels = ("seconds since the noise began", "bandwidth (MB/s)")
    plot = "What others leave of the emulated bandwidth"
    result.series.append(Series("drawn", *labels, drawn, Kind.TIME, plot=plot))
    result.series.append(Series("measured", *labels, points, Kind.TIME, plot=plot))


TRACED = re.compile(r"\b(openat|pread64|newfstatat)\((.*)\) = (-?\d+)")


def measure_counters(
    task: Task, result: Result, pfs: ParallelFileSystem, data: Data, place: Path
) -> None:
    """What strace saw the emulator do for others, beside what it counted."""
    task.say("counters")
    pfs.use(PROFILES["busy"])
    log = place / "trace"
    # A file for each thread, or their calls are interleaved.
    command = ["strace", "-ff", "-qq", "-o", str(log), "-e", "trace=openat,pread64,newfstatat"]
    try:
        tracer = subprocess.Popen([*command, "-p", str(pfs.pid)])
    except FileNotFoundError:
        result.leave_out("counters beside what strace saw", "strace not found: run make setup")
        return
    try:
        threads = [
            Path(f"/proc/{pfs.pid}/task", name) for name in os.listdir(f"/proc/{pfs.pid}/task")
        ]
        wait_for(
            lambda: all("TracerPid:\t0\n" not in (t / "status").read_text() for t in threads),
            "strace to be attached",
        )
        drop_names()
        before = pfs.counts()
        with reader_processes(READERS) as pool:
            files = [pfs.path / path for path in (*data.small, data.large)] * 2
            random.Random(2).shuffle(files)
            pool.starmap(read_range, [(path, 0, path.stat().st_size) for path in files])
            pool.map(os.listdir, [pfs.path / folder for folder in data.folders])
        counted = pfs.counts() - before
    finally:
        tracer.terminate()
        tracer.wait()
    traces = [trace.read_text() for trace in place.glob(f"{log.name}.*")]
    seen = [found.groups() for trace in traces for found in TRACED.finditer(trace)]
    reads = [int(answer) for call, _, answer in seen if call == "pread64"]
    directories = sum(call == "openat" and "O_DIRECTORY" in given for call, given, _ in seen)
    # New threads open what is not of the backing, which is the working directory; and opendir(3)
    # asks about what it has opened.
    opened = sum(call == "openat" and ', "/' not in given for call, given, _ in seen)
    named = sum(call == "newfstatat" and "AT_EMPTY_PATH" not in given for call, given, _ in seen)
    differences = {
        "reads": (counted.read, len(reads)),
        "bytes read": (counted.read_bytes, sum(reads)),
        "opens": (counted.open, opened - directories),
        "directories opened": (counted.opendir, directories),
        "lookups and attributes": (counted.lookup + counted.getattr, named),
    }
    for name, (ours, theirs) in differences.items():
        result.figure(
            f"counted beside strace: {name}, of {theirs:,}", abs(ours - theirs), "off", at_most=0
        )


@contextmanager
def before_all_else() -> Iterator[bool]:
    """This process and those it starts have the processors first: what else runs on the machine
    says nothing about the emulator. Whether that is allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def run(task: Task) -> Result:
    if os.geteuid() != 0:
        raise Unusable("only root can drop caches and throttle devices: run as root")
    result = Result("calibrate", "Is the emulated parallel file system as slow as it says?")
    rounds = task.rounds_or(3, 5)
    place = task.place
    with memory_place() as memory:
        (memory / "data").mkdir()
        task.say("data")
        data = Data(memory / "data", (256 if task.quick else 512) * MIB, 100 if task.quick else 300)
        quiet = PROFILES["fast"].quiet()
        with (
            before_all_else() as alone,
            ParallelFileSystem(data.root, place / "pfs", quiet, seed=WEATHER_SEED) as pfs,
        ):
            measure_rates(task, result, pfs, data, memory, rounds)
            measure_latencies(task, result, pfs, data, rounds)
            measure_mirror(task, result, pfs, data, place, rounds)
            measure_scaling(task, result, pfs, data, rounds)
            measure_noise(task, result, pfs, data, rounds)
            measure_counters(task, result, pfs, data, place)
    result.notes = [
        f"medians of {rounds} rounds; {data.bytes // MIB} MiB on tmpfs, read by 1 and {READERS}"
        f" processes; {len(data.small)} operations of each kind in a round, nothing of it cached",
        "the throttled device is ext4 on a loop device with blkio.throttle.read_bps_device; it lets"
        " through more than its limit at first",
        f"{'with' if alone else 'without'} real-time priority: what else ran on the machine"
        f" {'waited' if alone else 'disturbed'}",
        "a latency's goal is 1.1 x what was asked for + 0.1 ms; it cannot be less",
    ]
    return result
