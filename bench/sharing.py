"""Nodes that share (--peers), against mounts of their own and the source alone.

The nodes are mounts on one machine, on addresses of their own, and their readers. All of them read
one emulated file system, whose bandwidth they share.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path

from bench import shared_names
from bench.harness import Mount, drop_caches, reader_processes, wait_for
from bench.pfs import Counts, ParallelFileSystem, Profile
from bench.processes import processes_of
from bench.report import Result
from bench.task import Task
from monarchfs.peers.web_server import find_nginx

NODES = 3
EPOCHS = 2
MB = 1e6
PROFILE = Profile("shared", 150 * MB, 1e-3, 1e-3)
ALONE, APART, SHARED = "source alone", "mounts of their own", "sharing"
COPIED = "sharing, --prefetch all"
PARTED = "sharing, --share partition"
ENCRYPTED = "sharing, --peer-tls"
TOO_MANY = "small files, 2.2 x a node's tier"
TOO_LARGE = "large files, 2.2 x a node's tier"
BLOCK = 4096


@dataclass(frozen=True)
class Dataset:
    """So many files of one size; ``arms``, the ways in which they are read, in ``epochs``.
    ``times_tier``: how many times the room of a node's tier they take; 0: all have room."""

    name: str
    files: int
    file_bytes: int
    arms: tuple[str, ...]
    epochs: int = EPOCHS
    times_tier: float = 0.0

    @property
    def bytes(self) -> int:
        return self.files * self.file_bytes

    @property
    def tier(self) -> str:
        """The size of each node's tier."""
        if not self.times_tier:
            return "8G"
        return str(int(self.files * -(-self.file_bytes // BLOCK) * BLOCK / self.times_tier))


def datasets(quick: bool) -> list[Dataset]:
    every = (ALONE, APART, SHARED, ENCRYPTED, COPIED)
    return [
        Dataset("small files", 600 if quick else 3000, 110_000, every[:-1]),
        Dataset(TOO_MANY, 600 if quick else 3000, 110_000, (APART, SHARED, PARTED), 3, 2.2),
        Dataset("large files", 6 if quick else 12, 64 << 20, every),
        Dataset(TOO_LARGE, 96, 4 << 20, (APART, SHARED, PARTED), 3, 2.2),
    ]


@dataclass
class Found:
    """Of one arm: seconds of each epoch, of the slowest node; what the source was asked in each,
    and before the first."""

    seconds: list[float] = field(default_factory=list)
    asked: list[Counts] = field(default_factory=list)
    processor_seconds: float = 0.0
    copy_seconds: float = 0.0


def name_of(number: int) -> str:
    return f"{number // 200:03d}/{number:06d}"


def generate(path: Path, dataset: Dataset) -> None:
    """Files in directories of 200."""
    rng = random.Random(1)
    for number in range(dataset.files):
        file = path / name_of(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(number.to_bytes(8, "big") + rng.randbytes(dataset.file_bytes - 8))
    for entry in path.rglob("*"):
        os.utime(entry, (1.6e9, 1.6e9))


def read_all(task: tuple[str, Dataset, int, bool]) -> float:
    """Seconds that a node takes for all files, in an order of its own. The last field: all nodes
    read one mount, so what one has read is dropped from its page cache. ValueError for wrong
    bytes."""
    root, dataset, seed, drops = task
    order = list(range(dataset.files))
    random.Random(seed).shuffle(order)
    started = time.perf_counter()
    for number in order:
        with open(f"{root}/{name_of(number)}", "rb") as file:
            data = file.read()
            if drops:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if len(data) != dataset.file_bytes or int.from_bytes(data[:8], "big") != number:
            raise ValueError(f"{root}: file {number} has wrong bytes")
    return time.perf_counter() - started


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def sharing_options(place: Path) -> list[tuple[str, ...]]:
    """The options of each node."""
    key = place / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    addresses = [f"127.0.0.{2 + node}" for node in range(NODES)]
    nodes = ",".join(f"n{i}={a}:{free_port(a)}" for i, a in enumerate(addresses))
    return [
        ("--peers", nodes, "--peer-name", f"n{node}", "--peer-key", str(key))
        for node in range(NODES)
    ]


def know_each_other(mounts: list[Mount]) -> bool:
    return all(peer["answered"] for mount in mounts for peer in mount.status()["peers"])


def measure(arm: str, task: Task, data: Path, dataset: Dataset, pool: Pool) -> Found:
    """All epochs through one arm."""
    found = Found()
    place = data.parent / str(dataset.arms.index(arm))  # short: sockets lie below it
    place.mkdir()
    drop_caches()
    with ExitStack() as undo:
        source = place / "source"
        pfs = undo.enter_context(ParallelFileSystem(data, source, PROFILE))
        before, began = pfs.counts(), time.perf_counter()
        roots = [source] * NODES
        mounts: list[Mount] = []
        if arm is not ALONE:
            options = [()] * NODES if arm is APART else sharing_options(place)
            more = {
                COPIED: ("--prefetch", "all"),
                PARTED: ("--share", "partition"),
                ENCRYPTED: ("--peer-tls",),
            }.get(arm, ())
            for node in range(NODES):
                words = ("--freshness", "immutable", *more, *options[node])
                mount = Mount(source, place / f"n{node}", *words, size=dataset.tier)
                mounts.append(undo.enter_context(mount))
            roots = [mount.path for mount in mounts]
            if arm is not APART:
                wait_for(lambda: know_each_other(mounts), "the nodes to know each other", 60)
            if arm is COPIED:
                for mount in mounts:
                    mount.wait_idle()
                found.copy_seconds = time.perf_counter() - began
        for epoch in range(dataset.epochs):
            task.say(f"{dataset.name}, {arm}, epoch {epoch + 1}")
            work = [
                (str(root), dataset, 10 * epoch + node, arm is ALONE)
                for node, root in enumerate(roots)
            ]
            found.seconds.append(max(pool.map(read_all, work, chunksize=1)))
            for mount in mounts:
                mount.wait_idle()
            now = pfs.counts()
            found.asked.append(now - before)
            before = now
            drop_caches()
        found.processor_seconds = sum(_processor_seconds(mount) for mount in mounts)
    return found


def _processor_seconds(mount: Mount) -> float:
    """Of the supervisor and what it has started: workers, nginx."""
    ticks = 0
    for pid in processes_of(mount.path):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def report(result: Result, dataset: Dataset, arm: str, found: Found) -> None:
    row = f"{dataset.name}, {arm}"
    for epoch, (seconds, asked) in enumerate(zip(found.seconds, found.asked, strict=True), start=1):
        goal = 1.05 if (arm, epoch) in ((SHARED, 1), (COPIED, 1)) else None
        if arm in (SHARED, PARTED) and dataset.times_tier and epoch > 1:
            goal = 0.02
        name = f"epoch {epoch}"
        result.figure(f"{name}, time of the slowest node", seconds, "s", arm=row)
        result.figure(
            *(f"{name}, read of the source", asked.read_bytes / dataset.bytes, "x data"),
            at_most=goal,
            arm=row,
        )
        operations = asked.operations / dataset.files
        result.figure(f"{name}, operations of the source a file", operations, "", arm=row)
    if found.copy_seconds:
        result.figure("from the first mount to the last copy", found.copy_seconds, "s", arm=row)
    if found.processor_seconds:
        per_file = 1000 * found.processor_seconds / (dataset.files * NODES * dataset.epochs)
        result.figure("processor time of the daemons a read", per_file, "ms", arm=row)


def run(task: Task) -> Result:
    every = datasets(task.quick)
    sizes = [f"{one.files:,} files of {one.file_bytes / MB:.2g} MB" for one in every]
    texts = list(dict.fromkeys(sizes))
    result = Result(
        "sharing",
        f"{NODES} nodes read {' and '.join(texts)}, {EPOCHS} or 3 epochs, each in its own order",
    )
    if find_nginx() is None:
        result.leave_out("all of it", "nginx is not installed: apt-get install nginx-light")
        return result
    for number, dataset in enumerate(every):
        data = task.place / str(number) / "data"
        generate(data, dataset)
        with reader_processes(NODES) as pool:
            for arm in dataset.arms:
                report(result, dataset, arm, measure(arm, task, data, dataset, pool))
        shutil.rmtree(data.parent)
    shared_names.measure(task, result, sharing_options, know_each_other)
    result.notes = [
        f"the source: {PROFILE.bandwidth / MB:g} MB/s for all nodes together,"
        f" {1000 * PROFILE.read_seconds:g} ms an operation; page caches dropped before each epoch",
        "nodes: mounts on one machine, which share its processors; the network is the loopback",
        "source alone: names are looked up once for all nodes; bytes that two read at once, too",
        "the daemons: supervisors, workers, nginx",
        "names: 1 ms an operation, 24 at once, and no name in the memory of the source's client",
    ]
    return result
