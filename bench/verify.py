"""A load that verifies every byte it reads through a mount against the source.

    python -m bench.verify MOUNT DATA SEED [KIND]...

reads files at random, in all the KINDS of ways or those named, until its input is closed; then it
prints a JSON object. DATA is the real directory behind the source.

``pinned``, ``cached`` and ``uncached`` open a file of that kind, read it and close it; ``held``
reads through descriptors that stay open for long, ``mapped`` through memory maps; ``names`` asks
for attributes and listings. Pages are dropped before they are read again.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bench.harness import MIB, REPOSITORY, forget_pages, write_random

T = TypeVar("T")

FILES = {"pinned": 64, "cached": 160, "uncached": 2}
"""How many of each kind there are. Which they become, the tier's size decides."""
SMALLEST, LARGEST = 4 << 10, 4 * MIB
UNCACHED_BYTES = 56 * MIB
KINDS = {"pinned": 3, "cached": 4, "uncached": 1, "held": 3, "mapped": 2, "names": 1}
"""And how often each comes."""
HELD, MAPPED = 8, 3
MOST_EXAMPLES = 10
END_SECONDS = 60.0


def generate(root: Path) -> None:
    rng = random.Random(1)
    for kind, count in FILES.items():
        for number in range(count):
            size = int(SMALLEST * (LARGEST / SMALLEST) ** rng.random())
            if kind == "uncached":
                size = UNCACHED_BYTES
            write_random(root / path_of(kind, number), size, rng)


def path_of(kind: str, number: int) -> str:
    return f"{kind}/{number % 8}/{number:03d}.bin"


class Stall(NamedTuple):
    """The longest that one call took, and the time.monotonic() at which it began."""

    seconds: float
    when: float


class Open(NamedTuple):
    """An open file of the mount, in a map of memory too if it is read in that way."""

    path: str
    fd: int
    memory: mmap.mmap | None


class Reader:
    """Constant: where. Changing: what it has seen so far, and what it keeps open."""

    def __init__(self, mount: str, data: str, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self.stalls: dict[str, Stall] = {}
        self._mount = mount
        self._data = data
        self._rng = rng
        self._sources: dict[str, mmap.mmap] = {}
        self._kept: dict[str, list[Open]] = {"held": [], "mapped": []}

    def step(self, kind: str) -> None:
        """One piece of work. An error counts, and is not the end."""
        self.counts[kind] += 1
        try:
            match kind:
                case "names":
                    self._names()
                case "held" | "mapped":
                    self._read_kept(kind)
                case _:
                    self._read_file(kind)
        except OSError as error:
            self.errors.append(f"{kind} at {time.monotonic():.3f}: {error}")

    def close(self) -> None:
        for kind, files in self._kept.items():
            while files:
                self._close(kind, files.pop())

    def _timed(self, kind: str, call: Callable[[], T]) -> T:
        when = time.monotonic()
        try:
            return call()
        finally:
            stall = Stall(time.monotonic() - when, when)
            self.stalls[kind] = max(stall, self.stalls.get(kind, stall))

    def _any_path(self, *kinds: str) -> str:
        kind = self._rng.choice(kinds)
        return path_of(kind, self._rng.randrange(FILES[kind]))

    def _open(self, kind: str, path: str) -> Open:
        fd = self._timed(kind, lambda: os.open(f"{self._mount}/{path}", os.O_RDONLY))
        memory = None
        if kind == "mapped":
            memory = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        return Open(path, fd, memory)

    def _close(self, kind: str, file: Open) -> None:
        if file.memory is not None:
            file.memory.close()
        self._timed(kind, lambda: os.close(file.fd))

    def _read_file(self, kind: str) -> None:
        file = self._open(kind, self._any_path(kind))
        try:
            size = len(self._source(file.path))
            if self._rng.random() < 0.7:
                forget_pages(file.fd)
            start, end = 0, size
            if kind == "uncached":
                start = self._rng.randrange(size)
                end = min(size, start + 2 * MIB)
            length = self._rng.choice((4 << 10, 128 << 10, MIB)) if size < MIB else MIB
            for offset in range(start, end, length):
                self._read(kind, file, offset, min(length, end - offset))
        finally:
            self._close(kind, file)

    def _read_kept(self, kind: str) -> None:
        files = self._kept[kind]
        if len(files) < (HELD if kind == "held" else MAPPED):
            files.append(self._open(kind, self._any_path("pinned", "cached", "cached", "uncached")))
        file = self._rng.choice(files)
        size = len(self._source(file.path))
        if file.memory is not None:
            # Pages that are mapped cannot be dropped.
            file.memory.madvise(mmap.MADV_DONTNEED)
        forget_pages(file.fd)
        offset = self._rng.randrange(size)
        self._read(kind, file, offset, min(self._rng.choice((1, 4096, 256 << 10)), size - offset))
        if self._rng.random() < 0.02:
            files.remove(file)
            self._close(kind, file)

    def _read(self, kind: str, file: Open, offset: int, length: int) -> None:
        memory = file.memory
        if memory is not None:
            data = self._timed(kind, lambda: memory[offset : offset + length])
        else:
            data = self._timed(kind, lambda: os.pread(file.fd, length, offset))
        self.bytes += len(data)
        if data != self._source(file.path)[offset : offset + length]:
            self.wrong.append(f"{kind} {file.path}: {len(data)} of {length} bytes at {offset}")

    def _names(self) -> None:
        path = self._any_path(*FILES)
        found = self._timed("names", lambda: os.stat(f"{self._mount}/{path}"))
        expected = os.stat(f"{self._data}/{path}")
        if (found.st_size, found.st_mtime_ns) != (expected.st_size, expected.st_mtime_ns):
            self.wrong.append(f"attributes of {path}: {found}")
        folder = os.path.dirname(path)
        names = self._timed("names", lambda: os.listdir(f"{self._mount}/{folder}"))
        if sorted(names) != sorted(os.listdir(f"{self._data}/{folder}")):
            self.wrong.append(f"the listing of {folder}: {len(names)} names")

    def _source(self, path: str) -> mmap.mmap:
        if path not in self._sources:
            with open(f"{self._data}/{path}", "rb") as file:
                self._sources[path] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return self._sources[path]


def read_until_told(mount: str, data: str, seed: str, *kinds: str) -> None:
    rng = random.Random(seed)
    reader = Reader(mount, data, rng)
    chosen = kinds or tuple(KINDS)
    weights = [KINDS[kind] for kind in chosen]
    while not select.select([0], [], [], 0)[0]:
        reader.step(*rng.choices(chosen, weights))
    reader.close()
    found = {
        "counts": reader.counts,
        "bytes": reader.bytes,
        "wrong": len(reader.wrong),
        "errors": len(reader.errors),
        "examples": [*reader.wrong[:MOST_EXAMPLES], *reader.errors[:MOST_EXAMPLES]],
        "stalls": reader.stalls,
    }
    print(json.dumps(found))


class Found:
    """What all readers of a load have found."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes = self.wrong = self.errors = 0
        self.examples: list[str] = []
        self.stalls: dict[str, Stall] = {}

    def add(self, one: dict[str, Any]) -> None:
        self.counts.update(one["counts"])
        self.bytes += one["bytes"]
        self.wrong += one["wrong"]
        self.errors += one["errors"]
        self.examples += one["examples"]
        for kind, (seconds, when) in one["stalls"].items():
            stall = Stall(seconds, when)
            self.stalls[kind] = max(stall, self.stalls.get(kind, stall))

    @property
    def worst(self) -> Stall:
        return max(self.stalls.values())


class Load:
    """Readers as processes, from `start` to `stop`."""

    def __init__(self, mount: Path, data: Path) -> None:
        self._arguments = [str(mount), str(data)]
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *kinds: Sequence[str]) -> None:
        """One reader for each of ``kinds``, which are its kinds; none of them: all."""
        for number, some in enumerate(kinds):
            command = [sys.executable, "-m", "bench.verify", *self._arguments, str(number), *some]
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=REPOSITORY,
                    start_new_session=True,
                )
            )

    def stop(self, found: Found) -> None:
        """Adds what they have found. One that died or that hangs is an error."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], END_SECONDS)
            text = process.stdout.read() if ready else ""
            if text:
                found.add(json.loads(text))
                process.wait()
                continue
            found.errors += 1
            ended = f"died ({process.wait()})" if ready else "hangs"
            found.examples.append(f"reader {number} {ended}")
        self.end()

    def end(self) -> None:
        """Those that are still there are killed, and not waited for: they may be unable to die."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        self._processes.clear()


if __name__ == "__main__":
    read_until_told(*sys.argv[1:])
