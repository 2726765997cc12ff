"""Which lines and branches of Python and C the tests go through: make coverage.

    python -m tests.coverage [PYTEST-ARGUMENT...]

The tests (those of --quick, or as pytest's arguments say) run in a copy of the tree whose C part
counts (gcc's ``--coverage``); each Python process of the copy is measured by coverage.py. A process
that is killed leaves no counts, and the programs of tests/c are not counted.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.copied import Copy, Overdue, copied

SECONDS = 2 * 3600.0
PACKAGE = "monarchfs"
COUNTING = "--coverage -fprofile-update=atomic -O0"
SETTINGS = """\
[run]
branch = true
source = {source}
data_file = {data}
parallel = true
patch = _exit, fork
disable_warnings = no-data-collected, module-not-measured, no-ctracer
"""


class Covered(NamedTuple):
    """How many lines and branches a file has, and how many of them some test went through."""

    lines: int
    lines_run: int
    branches: int
    branches_run: int


def measured(copy: Copy) -> None:
    """From now on the copy's processes leave counts in ``data`` and beside the objects."""
    data = copy.path / "data"
    data.mkdir()
    settings = data / "coveragerc"
    settings.write_text(SETTINGS.format(source=copy.path / PACKAGE, data=data / "counts"))
    # Also processes whose environment was cleared.
    start = f"import coverage, os; os.environ['COVERAGE_PROCESS_START'] = {str(settings)!r}"
    copy.begin_with(f"{start}; coverage.process_startup()")
    # Processes of other users leave theirs, too.
    for path in (data, *copy.path.rglob("*/")):
        path.chmod(0o777)


def of_python(copy: Copy) -> Iterator[tuple[str, Covered]]:
    settings, report = copy.path / "data" / "coveragerc", copy.path / "data" / "report.json"
    for words in (["combine", "--quiet"], ["json", "--quiet", "-o", str(report)]):
        command = [str(copy.python), "-m", "coverage", *words, f"--rcfile={settings}"]
        subprocess.run(command, cwd=copy.path, check=True)
    for name, file in json.loads(report.read_text())["files"].items():
        counts = file["summary"]
        yield (
            os.path.relpath(copy.path / name, copy.path),
            Covered(
                counts["num_statements"],
                counts["covered_lines"],
                counts["num_branches"],
                counts["covered_branches"],
            ),
        )


def of_c(copy: Copy) -> Iterator[tuple[str, Covered]]:
    """From what stands beside each object. A header's lines are those of the first that has it."""
    seen = set()
    for notes in sorted(copy.path.rglob("*.gcno")):
        command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", str(notes)]
        out = subprocess.run(command, cwd=copy.path, check=True, capture_output=True, text=True)
        for file in json.loads(out.stdout)["files"]:
            name = os.path.relpath(copy.path / file["file"], copy.path)
            if name in seen or not name.startswith(PACKAGE):
                continue
            seen.add(name)
            lines: dict[int, int] = defaultdict(int)
            for line in file["lines"]:
                lines[line["line_number"]] += line["count"]
            branches = [branch["count"] for line in file["lines"] for branch in line["branches"]]
            run = sum(map(bool, lines.values())), sum(map(bool, branches))
            yield name, Covered(len(lines), run[0], len(branches), run[1])


def by_package(files: dict[str, Covered]) -> dict[str, Covered]:
    """For each package and language, as in ``cache (Python)``; then all of each language."""
    rows: dict[str, Covered] = defaultdict(lambda: Covered(0, 0, 0, 0))
    for name, covered in sorted(files.items()):
        language = "Python" if name.endswith(".py") else "C"
        parts = Path(name).parts
        package = parts[1] if len(parts) > 2 else PACKAGE
        for row in (f"{package} ({language})", f"all ({language})"):
            rows[row] = Covered(*map(sum, zip(rows[row], covered, strict=True)))
    return dict(sorted(rows.items(), key=lambda row: (row[0].startswith("all"), row[0])))


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def table(rows: dict[str, Covered]) -> Iterator[str]:
    yield f"{'':28}{'lines':>8}{'run':>8}{'branches':>10}{'run':>8}"
    for name, (lines, lines_run, branches, branches_run) in rows.items():
        runs = percent(lines_run, lines), percent(branches_run, branches)
        yield f"{name:28}{lines:>8}{runs[0]:>8}{branches:>10}{runs[1]:>8}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = parser.parse_known_args()[1]
    with copied() as copy:
        print("building the C part", flush=True)
        if (trouble := copy.build(COUNTING)) is not None:
            print(f"the C part cannot be built: {trouble}", file=sys.stderr)
            return 1
        measured(copy)
        print("running the tests", flush=True)
        try:
            code, output = copy.test(words or ["--quick"], SECONDS)
        except Overdue:
            print(f"the tests did not end within {SECONDS:.0f} s", file=sys.stderr)
            return 1
        # What failed went through less than it should.
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print(*failed, output.strip().rpartition("\n")[2], sep="\n")
        if code not in (0, 1):
            print(output[-2000:], file=sys.stderr)
            return 1
        files = dict([*of_python(copy), *of_c(copy)])
    print("\n".join(table(by_package(files))))
    return code


if __name__ == "__main__":
    sys.exit(main())
