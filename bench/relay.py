"""Relayed reads of resident files against the same reads done directly, beside other mirrors."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.harness import (
    MIB,
    Mount,
    detach,
    drop_caches,
    forget_pages,
    memory_place,
    wait_for,
    write_random,
)
from bench.report import Result

ROUNDS = 7
LARGE_BYTES = 512 * MIB
SMALL_FILES, SMALL_BYTES = 1500, 110_000
MEASURES = (
    *(("large file", "MB/s"), ("small files", "1/s")),
    *(("large file, page cache", "MB/s"), ("small files, page cache", "1/s")),
)


def generate(root: Path) -> None:
    rng = random.Random(1)
    for number in range(SMALL_FILES):
        write_random(root / "small" / f"{number:05d}.jpg", SMALL_BYTES, rng)
    write_random(root / "large", LARGE_BYTES, rng)


def read_large(root: Path) -> float:
    """MB/s in reads of 1 MiB."""
    buffer = bytearray(MIB)
    started = time.perf_counter()
    with open(root / "large", "rb", buffering=0) as file:
        size = 0
        while count := file.readinto(buffer):
            size += count
    assert size == LARGE_BYTES
    return size / 1e6 / (time.perf_counter() - started)


def read_small(root: Path, seed: int) -> float:
    """Files a second in random order, opened, read at once and closed."""
    buffer = bytearray(SMALL_BYTES + 1)
    names = [f"{root}/small/{number:05d}.jpg" for number in range(SMALL_FILES)]
    random.Random(seed).shuffle(names)
    started = time.perf_counter()
    for name in names:
        with open(name, "rb", buffering=0) as file:
            assert file.readinto(buffer) == SMALL_BYTES
    return SMALL_FILES / (time.perf_counter() - started)


def empty_page_cache(root: Path) -> None:
    if os.geteuid() == 0:
        drop_caches()
        return
    for path in (root / "large", *(root / "small").iterdir()):
        with path.open("rb") as file:
            forget_pages(file.fileno())


def measure(root: Path, seed: int) -> list[float]:
    """The four MEASURES, in that order."""
    empty_page_cache(root)
    large = read_large(root)
    large_cached = read_large(root)
    empty_page_cache(root)
    small = read_small(root, seed)
    return [large, small, large_cached, read_small(root, seed + 1)]


@contextmanager
def other_mirror(command: list[str], path: Path) -> Iterator[Path]:
    """A mirror that runs in the foreground, on ``path``, until it is unmounted."""
    path.mkdir()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_for(lambda: os.path.ismount(path) or process.poll() is not None, command[0], 20)
        yield path
    finally:
        detach(path)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def peers(source: Path, place: Path) -> Iterator[tuple[str, list[str], Path]]:
    """Name, command and mount point of the other mirrors that are installed."""
    if shutil.which("bindfs"):
        path = place / "bindfs"
        yield "bindfs", ["bindfs", "-f", "-r", str(source), str(path)], path
    if shutil.which("rclone"):
        path = place / "rclone"
        command = ["rclone", "mount", str(source), str(path), "--read-only"]
        cache = ["--vfs-cache-mode", "full", "--cache-dir", str(place / "rclone-cache")]
        # Names and attributes are believed for as long as the mount lives, as with immutable.
        trust = ["--vfs-fast-fingerprint", "--dir-cache-time", "24h", "--attr-timeout", "24h"]
        config = ["--config", "/dev/null"]
        yield "rclone", [*command, *cache, *trust, *config], path


def run(place: Path) -> Result:
    result = Result("relay", "resident files relayed by the daemon, one reader")
    with ExitStack() as stack:
        memory = stack.enter_context(memory_place())
        source = memory / "data"
        generate(source)
        mount = Mount(source, place / "m", "--freshness", "immutable", tier=memory / "tier")
        stack.enter_context(mount)
        systems = {"direct": source, "monarchfs": mount.path}
        for name, command, path in peers(source, memory):
            systems[name] = stack.enter_context(other_mirror(command, path))
        for root in systems.values():
            measure(root, 0)
        mount.wait_idle()
        found: dict[str, list[list[float]]] = {name: [] for name in systems}
        order = list(systems)
        for number in range(ROUNDS):
            for name in order:
                found[name].append(measure(systems[name], 10 * number))
            order.reverse()
    for index, (what, unit) in enumerate(MEASURES):
        direct = [values[index] for values in found["direct"]]
        for name in systems:
            if name != "direct":
                values = [values[index] for values in found[name]]
                result.compare(f"{what}: {name}", unit, values, direct)
    missing = {"bindfs", "rclone"} - set(systems)
    result.notes = [
        "data, replicas and rclone's cache on tmpfs, so that the disk is no part of it; direct is"
        " the same file on tmpfs",
        f"{LARGE_BYTES // MIB} MiB file in 1 MiB reads; {SMALL_FILES} files of"
        f" {SMALL_BYTES // 1000} KB in random order; {ROUNDS} rounds in turn, order reversed each"
        " time, after one round that filled the caches",
        "before each measurement "
        + (
            "the kernel's caches were dropped (pages, names, attributes)"
            if os.geteuid() == 0
            else "the files' pages were dropped (root would drop names and attributes too)"
        )
        + "; 'page cache' is the same read once more, pages in the kernel's cache",
        *(f"{name} is not installed" for name in sorted(missing)),
    ]
    return result
