"""Which of the bugs in ``table`` the tests find: make test-mutants.

    python -m tests.mutants [--thorough] [NAME...]

In a copy of the tree, each bug is put in alone, the C part that it is in is built, and the tests
are run that should find it. At the end, tests that failed are run without any, and have to pass.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tests.mutants.table import MUTANTS, Mutant
from tests.support.copied import Copy, Overdue, copied

TEST_SECONDS = 120
"""A test that takes longer hangs."""

MUTANT_SECONDS = 600.0
ALL_SECONDS = 3600.0
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
FOUND, NOT_FOUND, NOT_BUILT, NOT_RUN = "found", "not found", "could not be built", "tests not run"


class Result(NamedTuple):
    """``by``: the test that found it, or what went wrong."""

    outcome: str
    by: str


class Row(NamedTuple):
    mutant: Mutant
    result: Result
    seconds: float

    @property
    def found(self) -> bool:
        return self.result.outcome == FOUND


class Sick(Exception):
    """The table or the tests are at fault."""


@contextmanager
def planted(copy: Copy, mutant: Mutant) -> Iterator[str | None]:
    """The copy with the bug, which is taken out at the end. Gives why it could not be built."""
    file = copy.path / mutant.file
    text = file.read_text()
    outputs = [*copy.path.rglob("*.so"), *copy.path.rglob("*.o")]
    before = {path: (path.read_bytes(), path.stat()) for path in (file, *outputs)}
    if text.count(mutant.old) != 1:
        raise Sick(f"{mutant.name}: {mutant.file} has its old text {text.count(mutant.old)} times")
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield copy.build() if file.suffix == ".c" else None
    finally:
        for path, (content, st) in before.items():
            if path.read_bytes() != content:
                path.write_bytes(content)
                # So that the next change is newer by more than a second, as setuptools wants it.
                os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def run(copy: Copy, tests: Sequence[str], seconds: float, *, stop: bool = True) -> Result:
    """``stop`` at the first that fails. What fails by a limit of time is run once more, alone."""
    options = ["-x"] if stop else []
    try:
        code, output = copy.test(
            [*options, "--repeat-late", f"--timeout={TEST_SECONDS}", *tests], seconds
        )
    except Overdue:
        return Result(NOT_RUN, f"{' '.join(tests)} did not end within {seconds:.0f} s")
    failed = FAILED.search(output)
    if failed and code in (1, 2):
        return Result(FOUND, failed[1])
    if code or not re.search(r"\d passed", output):
        return Result(NOT_RUN, " ".join(output.split())[-200:])
    if stop and "unstable: failed by" in output:
        return run(copy, tests, seconds, stop=False)  # the others were not run
    return Result(NOT_FOUND, "")


def look_for(copy: Copy, mutant: Mutant, *, thorough: bool) -> Result:
    """Raises Sick."""
    with planted(copy, mutant) as trouble:
        if trouble is not None:
            return Result(NOT_BUILT, " ".join(trouble.split())[:200])
        result = run(copy, mutant.tests, MUTANT_SECONDS)
        if thorough and result.outcome == NOT_FOUND:
            result = run(copy, ["--quick"], ALL_SECONDS)
        return result


def without_bugs(copy: Copy, rows: Sequence[Row]) -> list[Row]:
    """The same, where a test that fails without any bug has found none."""
    tests = list(dict.fromkeys(row.result.by for row in rows if row.found))
    if not tests:
        return list(rows)
    code, output = copy.test(["--repeat-late", *tests], ALL_SECONDS)
    failed = FAILED.findall(output) if code else []
    return [
        row._replace(result=Result(NOT_RUN, f"{row.result.by} fails without it, too"))
        if row.result.by in failed
        else row
        for row in rows
    ]


def examine(mutants: Sequence[Mutant], *, thorough: bool) -> list[Row]:
    """Raises Sick. Tells how far it is."""
    rows = []
    with copied() as copy:
        if any(mutant.file.endswith(".c") for mutant in mutants):
            print("building the C part", flush=True)
            if (trouble := copy.build()) is not None:
                raise Sick(f"the C part cannot be built: {trouble}")
        for n, mutant in enumerate(mutants, 1):
            print(f"{n:2}/{len(mutants)} {mutant.name}: ", end="", flush=True)
            began = time.monotonic()
            result = look_for(copy, mutant, thorough=thorough)
            row = Row(mutant, result, time.monotonic() - began)
            by = f" by {result.by}" if row.found else result.by and f": {result.by}"
            print(f"{result.outcome}{by} ({row.seconds:.0f} s)", flush=True)
            rows.append(row)
        print("without any bug", flush=True)
        return without_bugs(copy, rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument(
        "--thorough", action="store_true", help="run all quick tests for those that are not found"
    )
    options = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is none called {', '.join(unknown)}: see table.txt")
    mutants = [known[name] for name in options.names or known]
    try:
        rows = examine(mutants, thorough=options.thorough)
    except Sick as exc:
        print(f"\n{exc}", file=sys.stderr)
        return 1
    print(f"{sum(row.found for row in rows)} of {len(rows)} found")
    for mutant, result, _ in (row for row in rows if not row.found):
        print(f"  {result.outcome}: {mutant.name} ({mutant.file}): {mutant.breaks}")
    return 0 if all(row.result.outcome in (FOUND, NOT_FOUND) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
