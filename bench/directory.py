"""``ls -l``, ``find`` and ``du`` of one large directory: seconds beside the same of the source
itself, and what the source is asked meanwhile, by kind."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from urllib.request import urlopen

from bench.harness import Mount, memory_place, monarchfs
from bench.report import Result
from bench.task import Task

FULL_FILES, QUICK_FILES = 50_000, 10_000
FILE_BYTES = 16
FULL_TTL_SECONDS, QUICK_TTL_SECONDS = 30, 10
MOST_SECONDS = 600.0

COMMANDS = {
    "ls -l": ("ls", "-l"),
    "find -printf %s": ("find", "-type", "f", "-printf", "%s\n"),
    "du -a": ("du", "-a"),
}
CALLS = {"ls -l": 3, "find -printf %s": 1, "du -a": 1}
"""Of the source for a name, where the command runs there: the attributes; ls asks for two extended
ones. Listing comes on top."""

LISTING_CALLS = 200
"""At most, and what is asked of the root."""

_OPERATIONS = re.compile(r'monarchfs_source_operations_total{.*operation="(\w+)".*} ([0-9.e+]+)')


def generate(root: Path, files: int) -> None:
    root.mkdir()
    for number in range(files):
        (root / f"{number:06d}.bin").write_bytes(b"x" * FILE_BYTES)


def seconds(root: Path, command: tuple[str, ...]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL, check=True, timeout=MOST_SECONDS)
    return time.perf_counter() - started


class Watched(Mount):
    """A mount whose operations of the source are counted by kind."""

    def __init__(self, source: Path, place: Path, freshness: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        options = ("--freshness", freshness, "--prefetch", "none")
        super().__init__(source, place, *options, "--metrics-port", str(self.port))

    def operations(self) -> dict[str, int]:
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            text = page.read().decode()
        found: dict[str, int] = defaultdict(int)
        for kind, number in _OPERATIONS.findall(text):
            found[kind] += int(float(number))
        return found


class Table:
    """Rows of one command and freshness."""

    def __init__(
        self, result: Result, mount: Watched, source: Path, what: str, mode: str, files: int
    ) -> None:
        self._result, self._mount, self._source = result, mount, source
        self._what, self._mode, self._files = what, mode, files

    def row(
        self, state: str, *, most_calls: int, at_most: float | None = None, headline: str = ""
    ) -> None:
        """Run the command in the mount as it is now, and on the source."""
        command = COMMANDS[self._what]
        direct = seconds(self._source, command)
        before = self._mount.operations()
        took = seconds(self._mount.path / "d", command)
        after = self._mount.operations()
        name = f"{self._what}, {self._files:,} names, {self._mode}, {state}"
        self._result.compare(name, "s", [took], [direct], at_most=at_most, headline=headline)
        asked = {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind]}
        kinds = ", ".join(f"{kind} {number:,}" for kind, number in sorted(asked.items()))
        self._result.figure(
            f"{name}: the source is asked ({kinds or 'nothing'})",
            sum(asked.values()),
            "operations",
            at_most=most_calls,
        )


def run(task: Task, result: Result) -> None:
    files = QUICK_FILES if task.quick else FULL_FILES
    ttl = QUICK_TTL_SECONDS if task.quick else FULL_TTL_SECONDS
    with memory_place() as place:
        source = place / "data"
        source.mkdir()
        generate(source / "d", files)
        for what in COMMANDS:
            for mode in ("immutable", f"ttl={ttl}"):
                _measure(task, result, source, what, mode, files, ttl)
    result.notes.append(
        f"one directory of {files:,} names: each command in mounts of its own; cold: the mount is"
        " new; known: new, after `warm --metadata`; again: once more; direct is measured before"
        " each. What the source is asked is counted by the mount"
    )


def _measure(
    task: Task, result: Result, source: Path, what: str, mode: str, files: int, ttl: int
) -> None:
    once = CALLS[what] * files + LISTING_CALLS
    kept = mode.partition("=")[0]
    task.say(f"{what}, {kept}")
    mount = Watched(source, task.place / f"{kept} {what} cold", mode)
    with mount:
        table = Table(result, mount, source / "d", what, kept, files)
        table.row("cold", most_calls=once)
        table.row("again", most_calls=LISTING_CALLS, at_most=2.0)
        if kept == "ttl":
            time.sleep(ttl + 1)
            table.row("after the ttl", most_calls=files + LISTING_CALLS)
            return
    mount = Watched(source, task.place / f"{kept} {what} known", mode)
    with mount:
        monarchfs("warm", str(mount.path), "--metadata", "--wait", seconds=MOST_SECONDS)
        table = Table(result, mount, source / "d", what, kept, files)
        table.row("known", most_calls=LISTING_CALLS)
        table.row("known, again", most_calls=LISTING_CALLS, at_most=2.0)
