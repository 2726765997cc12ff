"""The ways in which a job reaches a dataset: directly, from a local copy, or through the mount.

An experiment runs the same job once over each arm. What an arm needs (copies, tiers, state) lies in
a directory that the experiment gives it; where that is decides how fast local storage is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from bench.harness import Mount, Unusable, monarchfs, wait_for
from bench.pfs import INSTANT, ParallelFileSystem
from bench.processes import cpu_seconds, processes_of

SETTLE_SECONDS = 600.0


class Reached:
    """A dataset that a job may read now.

    ``path`` is where; ``ready_seconds`` is what had to be waited for before the job may begin;
    ``cache`` is a directory that the job may fill itself (None: not in this arm).
    """

    def __init__(self, path: Path, ready_seconds: float = 0.0, cache: Path | None = None) -> None:
        self.path = path
        self.ready_seconds = ready_seconds
        self.cache = cache

    @property
    def pids(self) -> list[int]:
        """The processes that serve it, now: for memory limits and processor time."""
        return []


class ReachedMount(Reached):
    """By a mount of this project."""

    def __init__(self, mount: Mount, ready_seconds: float) -> None:
        super().__init__(mount.path, ready_seconds)
        self.mount = mount
        self._at_rest()

    def _at_rest(self) -> None:
        """What a mount does once at its start, such as to load a second worker ahead of need, takes
        as long however little data there are: a short job is not to be measured with it."""
        used = [-1.0]

        def rests() -> bool:
            used.append(cpu_seconds(self.pids))
            return used[-1] == used[-2] and len(self.pids) > 2

        wait_for(rests, "the mount to be at rest", pause=0.3)

    @property
    def pids(self) -> list[int]:
        return processes_of(self.path)


class Arm(Protocol):
    """``name`` is short, for tables and plots; ``freshness`` says how old what is read may be."""

    name: str
    freshness: str

    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> AbstractContextManager[Reached]:
        """``place`` is an empty directory of its own; ``capacity`` are the bytes of local storage
        that may be used, None: enough for all. Raises Unusable where this cannot be done."""
        ...


class Direct:
    """The job reads the parallel file system."""

    name = "parallel FS"
    freshness = "none: reads the source"

    @contextmanager
    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> Iterator[Reached]:
        yield Reached(pfs.path)


class Local:
    """The whole dataset lies on local storage, since before the clock. Where not all fits, it
    cannot be."""

    name = "all local"
    freshness = "copied once"

    @contextmanager
    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> Iterator[Reached]:
        check_room(pfs.backing, capacity)
        data = place / "data"
        # The real files: the parallel file system is neither waited for nor counted.
        copy_tree(pfs.backing, data)
        yield Reached(data)


class Copied:
    """``cp -r`` from the parallel file system, then the job. Where not all fits, it cannot be."""

    name = "cp -r first"
    freshness = "copied once"

    @contextmanager
    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> Iterator[Reached]:
        check_room(pfs.backing, capacity)
        data = place / "data"
        started = time.perf_counter()
        copy_tree(pfs.path, data)
        yield Reached(data, time.perf_counter() - started)


class FrameworkCache:
    """The job reads the parallel file system and fills a cache of its own on local storage."""

    name = "framework cache"
    freshness = "copied once"

    @contextmanager
    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> Iterator[Reached]:
        check_room(pfs.backing, capacity)
        cache = place / "cache"
        cache.mkdir()
        yield Reached(pfs.path, cache=cache)


class Monarchfs:
    """A mount of this project. ``warm``: another mount was there before and left its copies."""

    freshness = "immutable"

    def __init__(self, name: str, *, warm: bool = False) -> None:
        self.name = name
        self._warm = warm

    @contextmanager
    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> Iterator[Reached]:
        size = "100%" if capacity is None else f"{capacity >> 10}K"
        options = ("--freshness", self.freshness)
        if self._warm:
            with unhindered(pfs), Mount(pfs.path, place / "m", *options, size=size) as first:
                monarchfs("warm", str(first.path), "--wait", seconds=SETTLE_SECONDS)
        started = time.perf_counter()
        with Mount(pfs.path, place / "m", *options, size=size) as mount:
            yield ReachedMount(mount, time.perf_counter() - started)


DIRECT = Direct()
LOCAL = Local()
COPIED = Copied()
FRAMEWORK_CACHE = FrameworkCache()
COLD = Monarchfs("monarchfs cold")
WARM = Monarchfs("monarchfs warm", warm=True)


@contextmanager
def unhindered(pfs: ParallelFileSystem) -> Iterator[None]:
    """The parallel file system as fast as it can be meanwhile: to prepare what is not measured."""
    profile = pfs.profile
    pfs.use(INSTANT)
    try:
        yield
    finally:
        pfs.use(profile)


def check_room(root: Path, capacity: int | None) -> None:
    """Raises Unusable where not all of a tree fits."""
    if capacity is not None and capacity < tree_bytes(root):
        raise Unusable("the dataset does not fit into local storage, and this takes all or nothing")


def copy_tree(source: Path, target: Path) -> None:
    """As ``cp -r`` does it; blocks until it is done."""
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)


def tree_bytes(root: Path) -> int:
    """Sum of the sizes of all files below it."""
    return sum(
        os.lstat(os.path.join(path, name)).st_size
        for path, _directories, names in os.walk(root)
        for name in names
    )


@contextmanager
def place_for(parent: Path, arm: Arm) -> Iterator[Path]:
    """An empty directory for one run of an arm, gone afterwards."""
    path = parent / "".join(c if c.isalnum() else "-" for c in arm.name)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)
