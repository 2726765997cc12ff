"""What a read of one file runs through, in the running program: functions, files, threads, changes
of language.

    python -m bench.trace [resident|cold-small|cold-large] [--json] [MOUNT-OPTION...]

A copy of the tree is built whose functions say when they are entered (gcc's
``-finstrument-functions``, ``sys.setprofile``). A mount of it is read, one file at a time: open(2),
read(2) to the end, close(2). Its names are known, and nothing else happens. What the worker runs
through while nobody reads, too, is left out. Of several reads that with the fewest functions is
shown.

A change of language: a thread enters a function of C after one of Python, or the other way round;
each such pair of functions counts once. Small functions that the compiler would put into others
are functions, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

from tests.support.copied import Copy, copied
from tests.support.programs import Running

PACKAGE = "monarchfs"
FLAGS = (
    "-g -O0 -finstrument-functions -finstrument-functions-exclude-file-list=/usr/"
    " -include bench/trace_enter.h"
)
SMALL_BYTES, LARGE_BYTES = 64 << 10, 24 << 20
FILES = 6
QUIET_SECONDS = 1.0
"""After so long all is done that a read causes, but for what comes every 30 seconds (sync)."""
_EVENT = Struct("=QII")
_MOST_EVENTS = 1 << 22
"""TRACE_EVENTS in trace_enter.h."""
_READER = """
import os, sys, time
for line in sys.stdin:
    begin = time.monotonic_ns()
    fd = os.open(line[:-1], os.O_RDONLY)
    while os.read(fd, 1 << 20):
        pass
    os.close(fd)
    print(begin, time.monotonic_ns(), flush=True)
"""


class Case(NamedTuple):
    """Files of ``size`` bytes; whether they are copied before they are read."""

    size: int
    resident: bool


CASES = {
    "resident": Case(SMALL_BYTES, True),
    "cold-small": Case(SMALL_BYTES, False),
    "cold-large": Case(LARGE_BYTES, False),
}


class Function(NamedTuple):
    """``path`` is below the package."""

    path: str
    name: str

    @property
    def in_c(self) -> bool:
        return not self.path.endswith(".py")


class Entered(NamedTuple):
    """When (ns, CLOCK_MONOTONIC) which thread entered which function."""

    ns: int
    thread: int
    function: Function


class Counts(NamedTuple):
    """Of the functions that were entered: what a reader of the code has to look at."""

    functions: int
    files: int
    threads: int
    changes: int


def count(entered: Sequence[Entered]) -> Counts:
    functions = {one.function for one in entered}
    last: dict[int, Function] = {}
    changes = set()
    for one in entered:
        before = last.get(one.thread, one.function)
        last[one.thread] = one.function
        if before.in_c != one.function.in_c:
            changes.add((before, one.function))
    return Counts(len(functions), len({one.path for one in functions}), len(last), len(changes))


class Trace:
    """What the functions of a worker have noted in ``directory``."""

    def __init__(self, copy: Copy, directory: Path, worker: int) -> None:
        self._package = copy.path / PACKAGE
        self._directory = directory
        self._worker = worker
        self._named: dict[tuple[str, int], Function] = {}

    def between(self, begin_ns: int, end_ns: int) -> list[Entered]:
        """In their order."""
        found = [*self._of_python(), *self._of_c(begin_ns, end_ns)]
        return sorted(one for one in found if begin_ns <= one.ns < end_ns)

    def _of_python(self) -> Iterator[Entered]:
        with open(self._directory / f"{self._worker}.python") as file:
            for line in file:
                ns, thread, path, name = line.split()
                yield Entered(int(ns), int(thread), Function(path, name))

    def _of_c(self, begin_ns: int, end_ns: int) -> Iterator[Entered]:
        for path in self._directory.glob(f"{self._worker}.*.so"):
            image = path.name.split(".", 1)[1]
            events = []
            with path.open("rb") as file:
                noted, *_ = _EVENT.unpack(file.read(_EVENT.size))
                if noted > _MOST_EVENTS:
                    raise RuntimeError(f"{image}: more was entered than {_MOST_EVENTS} functions")
                for ns, thread, offset in _EVENT.iter_unpack(file.read(noted * _EVENT.size)):
                    if begin_ns <= ns < end_ns:
                        events.append((ns, thread, offset))
            self._name(image, {offset for *_, offset in events})
            for ns, thread, offset in events:
                yield Entered(ns, thread, self._named[image, offset])

    def _name(self, image: str, offsets: set[int]) -> None:
        unknown = [offset for offset in sorted(offsets) if (image, offset) not in self._named]
        if not unknown:
            return
        (built,) = self._package.rglob(image)
        command = ["addr2line", "-f", "-e", str(built), *map(hex, unknown)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        for offset, name, place in zip(unknown, lines[::2], lines[1::2], strict=True):
            path = os.path.relpath(place.rpartition(":")[0], self._package)
            self._named[image, offset] = Function(path, name)


class Mount:
    """A mount of the copy's program, of FILES files; ended at the end of the block."""

    def __init__(self, copy: Copy, place: Path, case: Case, options: Sequence[str]) -> None:
        self._command = [str(copy.python), "-I", "-m", "monarchfs"]
        self._source, self._path = place / "source", place / "mount"
        self._options = [
            *("--tier", f"{place}/tier=1G", "--state-dir", f"{place}/state"),
            *("--prefetch", "access", "-o", "standby=false,reserve_percent=1", *options),
        ]
        for directory in (self._source, self._path):
            directory.mkdir()
        self.names = [f"f{number}" for number in range(FILES)]
        for name in self.names:
            (self._source / name).write_bytes(os.urandom(case.size))
        self._case = case

    def __enter__(self) -> Mount:
        self._run("mount", str(self._source), str(self._path), *self._options)
        if self._case.resident:
            self._run("warm", str(self._path), "--wait")
        subprocess.run(["ls", "-l", str(self._path)], check=True, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self._run("umount", str(self._path))

    def worker(self) -> int:
        return int(json.loads(self._run("status", str(self._path), "--json"))["worker"]["pid"])

    def path(self, name: str) -> str:
        return str(self._path / name)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [*self._command, *words], check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout


def reads(mount: Mount, trace: Trace) -> Iterator[tuple[list[Entered], list[Entered]]]:
    """For each file what was entered until its reader had all bytes, and until all was done."""
    time.sleep(2 * QUIET_SECONDS)
    now = time.monotonic_ns()
    always = {one.function for one in trace.between(now - int(QUIET_SECONDS * 1e9), now)}
    with Running([sys.executable, "-c", _READER]) as reader:
        for name in mount.names:
            reader.tell(mount.path(name))
            begin, end = map(int, reader.line().split())
            time.sleep(QUIET_SECONDS)
            whole = trace.between(begin, time.monotonic_ns())
            own = [one for one in whole if one.function not in always]
            yield [one for one in own if one.ns < end], own
        reader.stdin.close()


def steps(entered: Sequence[Entered]) -> Iterator[tuple[int, Function]]:
    """Each function once, where it was entered first, with the number of its thread."""
    threads: dict[int, int] = {}
    seen: set[Function] = set()
    for one in entered:
        number = threads.setdefault(one.thread, len(threads) + 1)
        if one.function not in seen:
            seen.add(one.function)
            yield number, one.function


def show(case: str, answered: Sequence[Entered], whole: Sequence[Entered]) -> Iterator[str]:
    yield f"{case:24}{'functions':>10}{'files':>7}{'threads':>9}{'changes of language':>21}"
    for what, entered in (("until it is read", answered), ("until all is done", whole)):
        functions, files, threads, changes = count(entered)
        yield f"{what:24}{functions:>10}{files:>7}{threads:>9}{changes:>21}"
    yield ""
    for number, function in steps(whole):
        yield f"{number:>3}  {function.path:36}{function.name}"


def as_json(entered: Sequence[Entered]) -> dict[str, Any]:
    order = [{"thread": n, "file": one.path, "function": one.name} for n, one in steps(entered)]
    return {**count(entered)._asdict(), "order": order}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", nargs="?", choices=CASES, default="cold-small")
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    arguments, options = parser.parse_known_args()
    with copied() as copy:
        place = copy.path.parent / "place"
        directory = copy.path.parent / "traced"
        for path in (place, directory):
            path.mkdir()
        directory.chmod(0o777)
        print("building the C part", file=sys.stderr, flush=True)
        if trouble := copy.build(f"{FLAGS} '-DTRACE_DIRECTORY=\"{directory}\"'"):
            print(f"the C part cannot be built: {trouble}", file=sys.stderr)
            return 1
        package = str(copy.path / PACKAGE)
        hook = f"trace_python.trace_worker({package!r}, {str(directory)!r})"
        copy.begin_with(f"import bench.trace_python as trace_python; {hook}")
        with Mount(copy, place, CASES[arguments.case], options) as mount:
            trace = Trace(copy, directory, mount.worker())
            found = min(reads(mount, trace), key=lambda read: count(read[1]).functions)
    if arguments.json:
        answered, whole = map(as_json, found)
        print(json.dumps({"case": arguments.case, "read": answered, "all": whole}))
    else:
        print("\n".join(show(arguments.case, *found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
