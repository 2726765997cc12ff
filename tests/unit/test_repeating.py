"""What CI runs once more: failures by a limit of time, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.surroundings import REPOSITORY

ONCE = """
import pathlib, pytest, trio
from tests.support.timing import Late, Stopwatch, wait_for

def first_time(name):
    mark = pathlib.Path(f"{__file__}.{name}")
    return not mark.exists() and (mark.touch() or True)

def test_passes():
    pass
"""

CASES = {
    "late": """
def test_late():
    if first_time('x'): wait_for(lambda: False, 'a file', 0.01)
def test_slow():
    if first_time('y'): raise trio.TooSlowError
@pytest.fixture
def made():
    if first_time('z'): Stopwatch().check(0, 'to make it')
def test_in_setup(made): pass
""",
    "late_again": "def test_it(): Stopwatch().check(0, 'it never is in time')",
    "wrong": "def test_it(): assert not first_time('x')",
    "late_and_wrong": """
def test_it():
    if first_time('x'): raise Late('too late')
def test_other(): assert not first_time('y')
""",
    "late_then_a_leak": """
@pytest.fixture
def made():
    yield
    assert not first_time('y'), 'a mount'
def test_it(made):
    if first_time('x'): raise Late('too late')
""",
    "a_leak_is_waited_for": """
@pytest.fixture
def made():
    yield
    if first_time('x'): raise Late('a mount')
def test_it(made): pass
""",
}

RUN_EACH = """
import sys, pytest
for path in sys.argv[2:]:
    code = pytest.main(["--repeat-late", *sys.argv[1].split(), path])
    print(f"exit code {int(code)}", flush=True)
"""


@pytest.mark.parametrize(
    ("options", "cases"), [("", list(CASES)), ("-n2", ["late", "late_and_wrong"])]
)
def test_only_what_failed_by_a_limit_of_time_is_run_again(
    tmp_path: Path, options: str, cases: list[str]
) -> None:
    paths = [tmp_path / f"test_{case}.py" for case in cases]
    for path, case in zip(paths, cases, strict=True):
        path.write_text(ONCE + CASES[case])
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.repeating"]\n')
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {REPOSITORY}\n")
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, options, *map(str, paths)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    *shown, rest = re.split(r"^exit code (\d)$\n", done.stdout, flags=re.M)
    assert (len(shown), rest) == (2 * len(cases), ""), done.stdout + done.stderr
    for case, text, code in zip(cases, shown[::2], shown[1::2], strict=True):
        passes = case == "late"
        assert code == ("0" if passes else "1"), text
        assert ("unstable: failed by a limit of time" in text) == passes, text
        if passes:
            # The repetition, then the run.
            assert re.findall(r"(\d) passed", text) == ["3", "1"]
            for name in ("late", "slow", "in_setup"):
                assert f"test_late.py::test_{name}: " in text
