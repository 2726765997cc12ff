"""Metadata operations of nodes that go through one source: each by itself, or sharing names."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.harness import Mount, drop_caches, wait_for
from bench.pfs import ParallelFileSystem, Profile
from bench.report import Result
from bench.task import Task

PROFILE = Profile("names", 1e9, 1e-3, 1e-3, metadata_in_flight=24)
"""Eight operations at once of each of three nodes."""

FIND, STAT = ("-type", "f"), ("-type", "f", "-size", "+1G")
COMMANDS = {"find -type f": FIND, "find -size": STAT}
APART, SHARED = "mounts of their own", "sharing"
Options = Sequence[tuple[str, ...]]


def generate(path: Path, directories: int, files: int) -> None:
    """Empty files."""
    for number in range(directories):
        directory = path / f"{number:04d}"
        directory.mkdir(parents=True)
        for name in range(files):
            (directory / f"{name:06d}").touch()
            os.utime(directory / f"{name:06d}", (1.6e9, 1.6e9))
        os.utime(directory, (1.6e9, 1.6e9))


def go_through(mount: Mount, command: tuple[str, ...]) -> float:
    """Seconds."""
    began = time.perf_counter()
    subprocess.run(["find", mount.path, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


@contextmanager
def mounted(
    source: Path, place: Path, options: Options, know_each_other: Callable[[list[Mount]], bool]
) -> Iterator[list[Mount]]:
    with ExitStack() as undo:
        mounts = []
        for number, words in enumerate(options):
            fixed = ("--freshness", "immutable", "--prefetch", "none")
            mount = Mount(source, place / f"n{number}", *fixed, *words)
            mounts.append(undo.enter_context(mount))
        if options[0]:
            wait_for(lambda: know_each_other(mounts), "the nodes to know each other", 60)
        yield mounts


def measure(
    task: Task,
    result: Result,
    options: Callable[[Path], Options],
    know_each_other: Callable[[list[Mount]], bool],
) -> None:
    """``options``: of each node, given a directory for a key."""
    for directories, files in ((10, 300), (300, 10)) if task.quick else ((40, 300), (1200, 10)):
        data = task.place / f"names-{directories}" / "data"
        generate(data, directories, files)
        for number, (what, command) in enumerate(COMMANDS.items()):
            unit = 0
            for arm in ("one node", APART, SHARED):
                place = data.parent / f"{number}{arm[:3]}"
                place.mkdir()
                words = options(place) if arm is SHARED else [()] * (1 if arm == "one node" else 3)
                task.say(f"{directories} directories of {files}, {what}, {arm}")
                drop_caches()
                with (
                    ParallelFileSystem(data, place / "source", PROFILE, forgets=True) as pfs,
                    mounted(place / "source", place, words, know_each_other) as mounts,
                    ThreadPoolExecutor(len(mounts)) as pool,
                ):
                    row = f"{directories} directories of {files} files, {what}, {arm}"
                    before = pfs.counts()
                    first = list(pool.map(go_through, mounts[:2], [command] * 2))
                    at_once = (pfs.counts() - before).metadata
                    seconds = [go_through(mount, command) for mount in mounts[2:]]
                    asked = (pfs.counts() - before).metadata
                    unit = unit or asked
                    result.figure("time of the slowest at once", max(first), "s", arm=row)
                    if not seconds:
                        result.figure(
                            "operations", asked / (directories * files), "a file", arm=row
                        )
                        continue
                    goal = 1.2 if arm is SHARED else None
                    result.figure("operations of two at once", at_once / unit, "x one", arm=row)
                    result.figure("time of a third one later", seconds[0], "s", arm=row)
                    result.figure("operations of all", asked / unit, "x one", at_most=goal, arm=row)
