"""Other mirrors of a directory, as they come, and told to cache what they can: names and attributes
for a day, pages for as long as the kernel likes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import ismount
from pathlib import Path

from bench.harness import detach, end, wait_for

NAMES = ("bindfs", "mergerfs", "rclone")
TUNED = ("bindfs, tuned", "mergerfs, tuned")
DAY = 86400


def installed(names: tuple[str, ...] = (*NAMES, *TUNED)) -> list[str]:
    return [name for name in names if shutil.which(name.partition(",")[0])]


@contextmanager
def mirror(name: str, source: Path, place: Path, capacity: int | None = None) -> Iterator[Path]:
    """``source`` seen through the program ``name``, until the block ends; what it keeps lies in
    ``place``, which is made, and is no more than ``capacity`` bytes (None: as much as it likes), if
    it keeps to that."""
    path = place / "mnt"
    path.mkdir(parents=True)
    command = _command(name, str(source), str(path), str(place / "cache"))
    if name == "rclone" and capacity is not None:
        command += ["--vfs-cache-max-size", f"{capacity}B", "--vfs-cache-poll-interval", "1s"]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_for(lambda: ismount(path) or process.poll() is not None, name, 20)
        yield path
    finally:
        detach(path)
        end(process)


def _command(name: str, source: str, path: str, cache: str) -> list[str]:
    match name:
        case "bindfs":
            return ["bindfs", "-f", "-r", source, path]
        case "bindfs, tuned":
            options = f"kernel_cache,entry_timeout={DAY},attr_timeout={DAY}"
            return ["bindfs", "-f", "-r", "-o", options, source, path]
        case "mergerfs":
            return ["mergerfs", "-f", "-o", "ro", source, path]
        case "mergerfs, tuned":
            options = f"cache.files=auto-full,cache.attr={DAY},cache.entry={DAY},cache.open={DAY}"
            return ["mergerfs", "-f", "-o", f"ro,{options}", source, path]
        case "rclone":  # slower by far without
            names = ["--vfs-fast-fingerprint", "--dir-cache-time", "24h", "--attr-timeout", "24h"]
            pages = ["--vfs-cache-mode", "full", "--cache-dir", cache, "--config", "/dev/null"]
            return ["rclone", "mount", source, path, "--read-only", *names, *pages]
    raise ValueError(f"no mirror {name}")
