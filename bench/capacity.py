"""A tier that holds 56% of the data: what is allocated, evicted, and read from the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool
from pathlib import Path
from typing import NamedTuple

from bench import epochs
from bench.harness import Mount, Source, reader_processes, repeated, wait_for
from bench.report import Result
from bench.task import Task
from monarchfs.config.places import OWNER

SHARE = 0.56
MOST_READ = 0.46
EPOCHS = 3
POLICIES = ("keep", "lru", "sieve", "weighted")
SAMPLE_SECONDS = 0.02
SYNC_SECONDS = 45
MOST_USED = 1.0001
"""A file's extents are on the disk, and known, after the next sync."""
DISK_BYTES = 4 * epochs.DATASET_BYTES


class Allocated(NamedTuple):
    """Bytes of the blocks of all files, and of the directories with the file that says whose they
    are, below one."""

    files: int
    directories: int
    names: frozenset[str]
    """Of the complete replicas: those below two-digit directories."""


def allocated(root: Path) -> Allocated:
    """What copies take there; what goes meanwhile is not counted."""
    files = directories = 0
    names: list[str] = []
    below = [os.fspath(root)]
    while below:
        path = below.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    try:
                        blocks = entry.stat(follow_symlinks=False).st_blocks
                    except FileNotFoundError:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        directories += blocks * 512
                        below.append(entry.path)
                        continue
                    if entry.name == OWNER:  # says whose the directory is
                        directories += blocks * 512
                        continue
                    files += blocks * 512
                    if len(os.path.basename(path)) == 2:
                        names.append(entry.name)
        except FileNotFoundError:
            continue
    return Allocated(files, directories, frozenset(names))


class Watch:
    """Looks at a tier. Changing: the most bytes that were allocated to files; the most that the
    file system lost beyond its directories (0 without one of its own); how many replicas went; how
    often it looked."""

    def __init__(self, tier: Path, disk: Path | None) -> None:
        self.most = self.most_of_disk = self.gone = self.looks = 0
        self._tier = tier
        self._disk = disk
        self._free = 0 if disk is None else free_bytes(disk)
        self._names: frozenset[str] = frozenset()

    def look(self) -> None:
        # The disk first: a directory made in between is then counted in the tier's favour.
        taken = 0 if self._disk is None else self._free - free_bytes(self._disk)
        now = allocated(self._tier)
        self.most = max(self.most, now.files)
        self.most_of_disk = max(self.most_of_disk, taken - now.directories)
        self.gone += len(self._names - now.names)
        self._names = now.names
        self.looks += 1


def free_bytes(path: Path) -> int:
    st = os.statvfs(path)
    return st.f_bfree * st.f_frsize


@contextmanager
def disk(place: Path) -> Iterator[Path | None]:
    """An ext4 of its own, so that its free blocks tell what the tier takes; None without root."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        yield None
        return
    image, point = place / "disk.img", place / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
    for command in (
        ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", options, str(image)],
        ["mount", "-o", "loop", str(image), str(point)],
    ):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    try:
        yield point
    finally:
        # What a worker could not sync in the time of monarchfs umount, the kernel still writes.
        wait_for(lambda: unmounted(point), "the tier's disk to be free", pause=0.2)
        image.unlink()


def unmounted(point: Path) -> bool:
    return subprocess.run(["umount", str(point)], check=False, capture_output=True).returncode == 0


def unaccounted(mount: Mount, tier: Path) -> int:
    """By how many bytes status and disk differ. What extents take is known after a sync."""
    deadline = time.monotonic() + SYNC_SECONDS

    def difference() -> int:
        used: int = mount.status()["tiers"][0]["used_bytes"]
        return abs(used - allocated(tier).files)

    while (now := difference()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return now


def measure(
    policy: str, place: Path, source: Source, pool: Pool, files: list[epochs.File], result: Result
) -> None:
    """Three epochs over an empty cache with one policy."""
    promised = policy == "keep"
    capacity = int(epochs.DATASET_BYTES * SHARE) >> 10 << 10
    with disk(place) as own:
        tier = (own or place) / "tier"
        tier.mkdir(mode=0o755)
        options = ("--freshness", "immutable", "--evict", policy)
        mount = Mount(source.path, place / "m", *options, tier=tier, size=f"{capacity >> 10}K")
        watch = Watch(tier, own)
        with repeated(watch.look, SAMPLE_SECONDS), mount:
            by_status = 0
            for number in range(EPOCHS):
                source.take_counts()
                seconds = epochs.epoch(pool, mount.path, files, number)
                status = mount.wait_idle()
                read_bytes, _operations = source.take_counts()
                total = status["source_io"]["read_bytes"]
                later = promised and number > 0
                for how, value in (("", read_bytes), (" by status", total - by_status)):
                    result.figure(
                        f"{policy}: epoch {number + 1}, read from the source{how}",
                        value / epochs.DATASET_BYTES,
                        "x data",
                        at_most=MOST_READ if later else None,
                    )
                by_status = total
                result.figure(f"{policy}: epoch {number + 1}", seconds, "s")
            difference = unaccounted(mount, tier)
    # A walk over files takes a while: where some go and others come meanwhile, it sees both.
    result.figure(
        f"{policy}: most allocated to files",
        watch.most / capacity,
        "x tier",
        at_most=MOST_USED if promised else None,
    )
    if own is not None:
        result.figure(
            f"{policy}: most taken from the file system",
            watch.most_of_disk / capacity,
            "x tier",
            at_most=MOST_USED,
        )
    result.figure(f"{policy}: allocated, but by status", difference, "B", at_most=0)
    gone = 0 if promised else None
    result.figure(f"{policy}: replicas that went", watch.gone, "", at_most=gone)
    result.figure(f"{policy}: looks at the tier", watch.looks, "")


def run(task: Task) -> Result:
    place = task.place
    result = Result(
        "capacity",
        f"2 GiB, 4 KiB to 64 MiB, random order, {epochs.READERS} readers, tier of {SHARE:.0%}",
    )
    backing = place / "data"
    files = epochs.generate(backing)
    with Source(backing, place / "source") as source, reader_processes(epochs.READERS) as pool:
        for policy in POLICIES:
            here = place / policy
            here.mkdir()
            measure(policy, here, source, pool, files, result)
            shutil.rmtree(here)
    result.notes = [
        f"{len(files)} files; every byte is compared with its checksum; freshness immutable; a"
        " reader drops a file's pages before it reads it",
        f"allocated: the sum of st_blocks, looked at every {SAMPLE_SECONDS * 1000:g} ms; taken:"
        " what an ext4 that holds nothing but the tier has less free, its directories left out"
        " (only as root)",
        "replicas that went: names of complete ones that one look saw and the next did not",
    ]
    return result
