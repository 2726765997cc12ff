"""The names and attributes of known files, beside the source itself and bindfs; and those of one
large directory, known or not."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.pool import Pool
from pathlib import Path

from bench import directory, mirrors
from bench.harness import Mount, drop_names, memory_place, reader_processes
from bench.report import Result
from bench.task import Task

QUICK_FILES, FULL_FILES = 20_000, 100_000
FILES_PER_DIRECTORY = 1000
FILE_BYTES = 16
MOST_SECONDS = 600.0
MIRRORS = ("bindfs", "bindfs, tuned")


def path_of(root: str, number: int) -> str:
    return f"{root}/{number // FILES_PER_DIRECTORY:04d}/{number:06d}.bin"


def generate(root: Path, files: int) -> None:
    for number in range(files):
        path = path_of(str(root), number)
        if number % FILES_PER_DIRECTORY == 0:
            os.makedirs(os.path.dirname(path))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, b"x" * FILE_BYTES)
        os.close(fd)


def stat_all(root: str, files: int, seed: int) -> float:
    """Microseconds a file, in random order; runs in a reader process."""
    paths = [path_of(root, number) for number in range(files)]
    random.Random(seed).shuffle(paths)
    started = time.perf_counter()
    size = sum(os.stat(path).st_size for path in paths)
    seconds = time.perf_counter() - started
    assert size == files * FILE_BYTES
    return seconds / files * 1e6


def find_all(root: str, files: int, _seed: int) -> float:
    """The same for find(1), which asks for each file's size."""
    started = time.perf_counter()
    done = subprocess.run(
        ["find", root, "-type", "f", "-printf", "%s\n"], stdout=subprocess.PIPE, check=True
    )
    seconds = time.perf_counter() - started
    assert done.stdout == f"{FILE_BYTES}\n".encode() * files
    return seconds / files * 1e6


WORK: dict[str, Callable[[str, int, int], float]] = {"stat": stat_all, "find -printf %s": find_all}


def run(task: Task) -> Result:
    place = task.place
    files = QUICK_FILES if task.quick else FULL_FILES
    rounds = task.rounds_or(3, 5)
    result = Result("names", f"{files:,} known files in directories of {FILES_PER_DIRECTORY:,}")
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        pool = stack.enter_context(reader_processes(1))
        source = stack.enter_context(memory_place()) / "data"
        generate(source, files)
        roots = {"direct": source}
        for freshness in ("immutable", f"ttl={mirrors.DAY}", "open"):
            options = ("--freshness", freshness, "--prefetch", "none")
            mount = stack.enter_context(Mount(source, place / freshness, *options))
            roots[f"monarchfs, {freshness.partition('=')[0]}"] = mount.path
        for name in mirrors.installed(MIRRORS):
            roots[name] = stack.enter_context(mirrors.mirror(name, source, place / name))
        for root in roots.values():
            find_all(str(root), files, 0)
        order = list(roots)
        for seed in range(rounds):
            for name in order:
                for what, value in measure(pool, roots[name], files, seed).items():
                    values[what][name].append(value)
            order.reverse()
    for what, by_name in values.items():
        for name in by_name:
            if name != "direct":
                result.compare(f"{what}: {name}", "us", by_name[name], by_name["direct"])
    result.notes = [
        f"microseconds a file; source on tmpfs; {rounds} rounds, order reversed each time, after"
        " one find that made the names known; stat in random order; nothing is copied",
        "warm: once more, the kernel has what the mount's freshness or the mirror's settings allow",
    ]
    if os.geteuid() == 0:
        result.notes.append(
            "cold: the kernel's names and attributes were dropped before: those of a mount then"
            " come from its daemon (ours: from the index), those of the source from tmpfs, which"
            " keeps them in memory, so 'direct' is as fast as a local file system can be"
        )
    directory.run(task, result)
    return result


def measure(pool: Pool, root: Path, files: int, seed: int) -> dict[str, float]:
    found = {}
    for what, work in WORK.items():
        if os.geteuid() == 0:
            drop_names()
            found[f"{what}, cold"] = pool.apply_async(work, (str(root), files, seed)).get(
                MOST_SECONDS
            )
        found[f"{what}, warm"] = pool.apply_async(work, (str(root), files, seed)).get(MOST_SECONDS)
    return found
