"""Nodes that share (--peers) over links of their own: epochs, a sampler's partitions, and faults.

Each node is a network namespace (`bench.netns`) with a mount of its own and a reader. All of them
read one emulated file system, whose bandwidth they share.
"""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import NamedTuple

from bench.harness import Mount, Unusable, detach, drop_caches, reader_processes, wait_for
from bench.netns import Network, network
from bench.pfs import Counts, ParallelFileSystem, Profile
from bench.processes import kill, processes_of
from bench.report import Result
from bench.task import Task
from monarchfs.peers.web_server import find_nginx

MB = 1e6
PROFILE = Profile("shared", 150 * MB, 1e-3, 1e-3)
FILES = 300
FILE_BYTES = 110_000
EPOCHS = 3
PORT = 7979
FAULT_AT = 0.25
"""A fault comes when the nodes have read this much of the source, of the dataset."""

ALONE, APART, SHARED = "source alone", "mounts of their own", "sharing"
FAULTS = ("none", "killed", "frozen", "cut off", "slow")


class Read(NamedTuple):
    """What a reader met: seconds in all and of the longest file, errors, wrong files."""

    seconds: float
    longest: float
    errors: int
    wrong: int


def generate(path: Path, files: int) -> None:
    """Files in directories of 100, each with its checksum at its end."""
    rng = random.Random(1)
    for number in range(files):
        file = path / name_of(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        data = number.to_bytes(8, "big") + rng.randbytes(FILE_BYTES - 12)
        file.write_bytes(data + zlib.crc32(data).to_bytes(4, "big"))
    for entry in path.rglob("*"):
        os.utime(entry, (1.6e9, 1.6e9))


def name_of(number: int) -> str:
    return f"{number // 100:03d}/{number:06d}"


def is_right(data: bytes, number: int) -> bool:
    """Whether these are the bytes of the file of this number."""
    return (
        len(data) == FILE_BYTES
        and int.from_bytes(data[:8], "big") == number
        and zlib.crc32(data[:-4]).to_bytes(4, "big") == data[-4:]
    )


def read_all(task: tuple[str, Sequence[int], bool]) -> Read:
    """Read these files, in their order. The last field: several nodes read one mount, so what one
    has read is dropped from its page cache."""
    root, numbers, drops = task
    longest, errors, wrong = 0.0, 0, 0
    began = time.perf_counter()
    for number in numbers:
        before = time.perf_counter()
        try:
            with open(f"{root}/{name_of(number)}", "rb", buffering=0) as file:
                data = file.read()
                if drops:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            errors += 1
        else:
            wrong += not is_right(data, number)
        longest = max(longest, time.perf_counter() - before)
    return Read(time.perf_counter() - began, longest, errors, wrong)


def whole_orders(files: int, nodes: int, epoch: int) -> list[list[int]]:
    """Each node reads all files, in an order of its own."""
    return [random.Random(1000 * epoch + node).sample(range(files), files) for node in range(nodes)]


def partitions(files: int, nodes: int, epoch: int) -> list[list[int]]:
    """As a distributed sampler: the nodes divide the files in another way in each epoch."""
    order = random.Random(epoch).sample(range(files), files)
    return [order[node::nodes] for node in range(nodes)]


def expected_when_lost(nodes: int, at: float) -> float:
    """What is read of the source in all, relative to the dataset, when an owner of 1/nodes of it,
    which has no reader, is lost after the share ``at`` of the dataset was read of the source. The
    owner has read that share of its files, and the nodes that stand in read what they lack of
    them."""
    lacks: float = (1 - at) ** (1 / (nodes - 1))  # each has read another part by then
    return 1 + at * lacks / nodes


@dataclass
class Cluster:
    """The nodes, a reader process for each, the data, and where mounts are made."""

    net: Network
    pool: Pool
    data: Path
    files: int
    place: Path

    @property
    def bytes(self) -> int:
        return self.files * FILE_BYTES

    def read(self, roots: Sequence[Path], orders: list[list[int]], *, drops: bool) -> list[Read]:
        work = [(str(root), order, drops) for root, order in zip(roots, orders, strict=True)]
        return self.pool.map(read_all, work, chunksize=1)

    @contextmanager
    def source(self) -> Iterator[ParallelFileSystem]:
        drop_caches()
        with ParallelFileSystem(self.data, self.place / "source", PROFILE) as pfs:
            yield pfs

    @contextmanager
    def mounted(self, name: str, *, share: bool) -> Iterator[list[Mount]]:
        """A mount on each node, of the source."""
        key = self.place / "key"
        if not key.exists():
            key.write_bytes(os.urandom(64))
            key.chmod(0o400)
        nodes = range(self.net.count)
        listed = ",".join(f"n{n}={self.net.address(n)}:{PORT}" for n in nodes)
        mounts: list[Mount] = []
        try:
            for node in nodes:
                words = ["--freshness", "immutable"]
                if share:
                    words += ["--peers", listed, "--peer-name", f"n{node}", "--peer-key", str(key)]
                at = self.place / f"{name}-{node}"
                mount = Mount(self.place / "source", at, *words, enter=self.net.enter(node))
                mounts.append(mount.__enter__())
            if share:
                wait_for(lambda: know_each_other(mounts), "the nodes to know each other", 60)
            yield mounts
        finally:
            for mount in mounts:
                end(mount)


def end(mount: Mount) -> None:
    """Unmount it, also if its processes are dead or stopped."""
    for pid in processes_of(mount.path):
        os.kill(pid, signal.SIGCONT)
    try:
        mount.umount()
    except Unusable:
        detach(mount.path)


def know_each_other(mounts: Sequence[Mount]) -> bool:
    return all(peer["answered"] for mount in mounts for peer in mount.status()["peers"])


def epochs(
    cluster: Cluster,
    arm: str,
    orders: Callable[[int, int, int], list[list[int]]],
    say: Callable[[str], None],
) -> Iterator[tuple[list[Read], Counts]]:
    """All epochs through one arm, and what each asked of the source."""
    nodes = cluster.net.count
    with cluster.source() as pfs:
        before = pfs.counts()
        share = cluster.mounted(arm.replace(" ", "-"), share=arm is SHARED)
        with share if arm is not ALONE else _nothing() as mounts:
            roots = [mount.path for mount in mounts] or [pfs.path] * nodes
            for epoch in range(EPOCHS):
                say(f"{nodes} nodes, {arm}, epoch {epoch + 1}")
                reads = cluster.read(roots, orders(cluster.files, nodes, epoch), drops=arm is ALONE)
                for mount in mounts:
                    mount.wait_idle()
                now = pfs.counts()
                yield reads, now - before
                before = now
                drop_caches()


@contextmanager
def _nothing() -> Iterator[list[Mount]]:
    yield []


def strike(cluster: Cluster, mount: Mount, fault: str) -> None:
    """Have the fault happen to the first node."""
    if fault == "killed":
        kill(processes_of(mount.path))
    elif fault == "frozen":
        for pid in processes_of(mount.path):
            os.kill(pid, signal.SIGSTOP)
    elif fault == "cut off":
        cluster.net.cut(0)
    elif fault == "slow":
        cluster.net.slow(0)


def with_fault(cluster: Cluster, fault: str) -> tuple[list[Read], Counts]:
    """The first epoch of all nodes but the first one, to which the fault happens amid it."""
    name = f"fault-{fault.replace(' ', '-')}"
    nodes = cluster.net.count
    with cluster.source() as pfs, cluster.mounted(name, share=True) as mounts:
        before = pfs.counts()
        orders = whole_orders(cluster.files, nodes, 0)[1:]
        work = [(str(m.path), order, False) for m, order in zip(mounts[1:], orders, strict=True)]
        running = cluster.pool.map_async(read_all, work, chunksize=1)
        due = FAULT_AT * cluster.bytes
        wait_for(lambda: (pfs.counts() - before).read_bytes > due or running.ready(), "a part", 60)
        strike(cluster, mounts[0], fault)
        reads = running.get(300)
        for mount in mounts[1:]:
            mount.wait_idle()
        return reads, pfs.counts() - before


def report_epochs(
    result: Result, cluster: Cluster, arm: str, found: list[tuple[list[Read], Counts]], how: str
) -> None:
    row = f"{cluster.net.count} nodes, {how}{arm}"
    for epoch, (reads, asked) in enumerate(found, start=1):
        name = f"epoch {epoch}"
        slowest = max(read.seconds for read in reads)
        result.figure(f"{name}, time of the slowest node", slowest, "s", arm=row)
        size = asked.read_bytes / cluster.bytes
        goal = 1.1 if arm is SHARED and epoch == 1 else None
        result.figure(f"{name}, read of the source", size, "x data", at_most=goal, arm=row)
        operations = asked.operations / cluster.files
        result.figure(f"{name}, operations of the source a file", operations, "", arm=row)
    bad = sum(read.errors + read.wrong for reads, _asked in found for read in reads)
    result.figure("errors and wrong files", bad, "", at_most=0, arm=row)


def report_fault(
    result: Result, cluster: Cluster, fault: str, reads: list[Read], asked: Counts
) -> None:
    row = (
        f"{cluster.net.count} nodes, one {fault}"
        if fault != "none"
        else (f"{cluster.net.count} nodes, one without a reader")
    )
    result.figure("time of the slowest node", max(r.seconds for r in reads), "s", arm=row)
    result.figure("longest file", max(r.longest for r in reads), "s", at_most=2.0, arm=row)
    lost = 1.3 if fault in ("killed", "cut off") else None
    size = asked.read_bytes / cluster.bytes
    result.figure("read of the source", size, "x data", at_most=lost, arm=row)
    if fault != "none":
        expected = expected_when_lost(cluster.net.count, FAULT_AT)
        result.figure("the same, if it gives nothing any more", expected, "x data", arm=row)
    result.figure("errors", sum(r.errors for r in reads), "", at_most=0, arm=row)
    result.figure("wrong files", sum(r.wrong for r in reads), "", at_most=0, arm=row)


def measure(task: Task, result: Result, count: int, files: int) -> None:
    """All arms and faults, on so many nodes."""
    place = task.place / f"{count}"
    place.mkdir()
    with reader_processes(count) as pool, network(count) as net:
        cluster = Cluster(net, pool, task.place / "data", files, place)
        for arm in (ALONE, APART, SHARED):
            found = list(epochs(cluster, arm, whole_orders, task.say))
            report_epochs(result, cluster, arm, found, "")
        for arm in (APART, SHARED):
            inner = Cluster(net, pool, cluster.data, files, place / "partitions")
            inner.place.mkdir(exist_ok=True)
            found = list(epochs(inner, arm, partitions, task.say))
            report_epochs(result, inner, arm, found, "a part each, ")
    for fault in FAULTS:
        task.say(f"{count} nodes, one {fault}")
        with reader_processes(count) as pool, network(count) as net:
            cluster = Cluster(net, pool, task.place / "data", files, place)
            report_fault(result, cluster, fault, *with_fault(cluster, fault))


def run(task: Task) -> Result:
    counts = (3,) if task.quick else (3, 8)
    result = Result(
        "nodes",
        f"{' and '.join(map(str, counts))} nodes, each with a link of its own, read"
        f" {FILES} files of {FILE_BYTES / MB:g} MB",
    )
    if find_nginx() is None:
        result.leave_out("all of it", "nginx is not installed: apt-get install nginx-light")
        return result
    try:
        with network(2):
            pass
    except Unusable as error:
        result.leave_out("all of it", str(error))
        return result
    generate(task.place / "data", FILES)
    for count in counts:
        measure(task, result, count, FILES)
        task.keep(result)
    result.notes = [
        f"the source: {PROFILE.bandwidth / MB:g} MB/s for all nodes together,"
        f" {1000 * PROFILE.read_seconds:g} ms an operation; page caches dropped before each epoch",
        "nodes: network namespaces on one machine, which share its processors; links of 1 Gbit/s",
        f"faults: after {FAULT_AT:.0%} of the data were read; the node that fails has no reader;"
        " slow: 1 MB/s (and 10 ms, where the kernel has netem)",
    ]
    return result
