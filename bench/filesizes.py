"""How fast resident files of different sizes are read, by way to them."""

from __future__ import annotations

import os
import random
import shutil
from collections import defaultdict
from contextlib import ExitStack
from multiprocessing.pool import Pool
from pathlib import Path
from time import perf_counter

from bench import mirrors
from bench.harness import (
    MIB,
    Mount,
    Unusable,
    drop_pages,
    forget_pages,
    memory_place,
    monarchfs,
    reader_processes,
    write_random,
)
from bench.report import Kind, Result, Series, point
from bench.task import Task

SIZES = (4 << 10, 32 << 10, 256 << 10, 2 * MIB, 16 * MIB)
MOST_BYTES, MOST_FILES = 64 * MIB, 2000
"""Of one size."""
READ_BYTES = MIB
DIRECT = "direct"
OURS = {
    "monarchfs, relayed": ("--freshness", "immutable", "--data-path", "relay"),
    "monarchfs, passthrough": ("--data-path", "passthrough"),
}
MOST_SECONDS = 600.0


def count_of(size: int) -> int:
    return min(MOST_FILES, MOST_BYTES // size)


def path_of(root: str, size: int, number: int) -> str:
    return f"{root}/{size}/{number:04d}"


def read_all(root: str, size: int, seed: int) -> float:
    """MB/s of all files of one size in random order, each opened, read and closed; runs in a
    reader process."""
    numbers = random.Random(seed).sample(range(count_of(size)), count_of(size))
    buffer = bytearray(min(size, READ_BYTES))
    paths = [path_of(root, size, number) for number in numbers]
    found = 0
    started = perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        left = size
        while left and (count := os.readv(fd, [buffer])):
            left -= count
            found += count
        os.close(fd)
    seconds = perf_counter() - started
    if found != size * len(paths):
        raise ValueError(f"{found} bytes of files of {size}")
    return found / 1e6 / seconds


def forget(root: Path, size: int) -> None:
    """Has the files' pages read again from below."""
    if os.geteuid() == 0:
        drop_pages()
        return
    for number in range(count_of(size)):
        with open(path_of(str(root), size, number), "rb") as file:
            forget_pages(file.fileno())


def label(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"


def ways(
    stack: ExitStack, place: Path, memory: Path, source: Path, result: Result
) -> dict[str, Path]:
    """The roots by name; those that cannot be had here are left out of the result, with the
    reason."""
    roots = {DIRECT: source}
    for number, (name, options) in enumerate(OURS.items()):
        if name.endswith("passthrough") and os.geteuid() != 0:
            result.leave_out(name, "only root's mounts have the kernel read local copies itself")
            continue
        try:
            tier = memory / f"tier{number}"
            mount = stack.enter_context(Mount(source, place / f"m{number}", *options, tier=tier))
        except Unusable as error:
            result.leave_out(name, str(error))
            continue
        monarchfs("warm", str(mount.path), "--wait")
        roots[name] = mount.path
    installed = mirrors.installed(mirrors.NAMES)
    for name in mirrors.NAMES:
        if name in installed:
            roots[name] = stack.enter_context(mirrors.mirror(name, source, memory / name))
        else:
            result.leave_out(name, "not installed")
    return roots


Speeds = dict[int, dict[str, list[float]]]
"""MB/s by size and way."""


def measure(task: Task, pool: Pool, roots: dict[str, Path], rounds: int) -> Speeds:
    """Each round the other way round."""
    found: Speeds = {size: defaultdict(list) for size in SIZES}
    order = list(roots)
    for number in range(rounds + 1):
        for size in SIZES:
            task.say(f"round {number} of {rounds}, {label(size)}")
            for name in order:
                forget(roots[name], size)
                arguments = (str(roots[name]), size, number)
                speed = pool.apply_async(read_all, arguments).get(MOST_SECONDS)
                if number > 0:  # the first makes names known
                    found[size][name].append(speed)
        order.reverse()
    return found


def run(task: Task) -> Result:
    result = Result("sizes", "How fast are resident files of different sizes read?")
    task.keep(result)
    rounds = task.rounds_or(3, 7)
    with memory_place() as memory, reader_processes(1) as pool, ExitStack() as stack:
        source = memory / "data"
        rng = random.Random(1)
        for size in SIZES:
            for number in range(count_of(size)):
                write_random(Path(path_of(str(source), size, number)), size, rng)
        task.say("files are copied")
        roots = ways(stack, task.place, memory, source, result)
        found = measure(task, pool, roots, rounds)
        stack.close()
        shutil.rmtree(source)
    for size, by_name in found.items():
        for name in roots:
            if name != DIRECT:
                speeds, others = by_name[name], by_name[DIRECT]
                result.compare(f"files of {label(size)}", "MB/s", speeds, others, arm=name)
    for name in roots:
        points = [point(size, by_name[name]) for size, by_name in found.items()]
        result.series.append(
            Series(
                *(name, "file size (bytes)", "opened, read and closed (MB/s)", points, Kind.LINES),
                plot="Throughput by file size, resident files, one reader",
                log="xy",
            )
        )
    result.notes = [
        f"files of one size, at most {MOST_FILES:,} and {MOST_BYTES // MIB} MiB of them, in random"
        f" order by one reader, {READ_BYTES // MIB} MiB at a time; {rounds} rounds, order reversed"
        " each time, after one that makes names known",
        "everything on tmpfs; the kernel's pages are dropped before; direct: the source itself",
        "other mirrors as they come; rclone: --vfs-cache-mode full, names cached for a day",
    ]
    return result
