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
    mark = pathlib.Path({path!r}, name)
    return not mark.exists() and (mark.touch() or True)

def test_passes():
    pass
"""

CASES = {
    "late": "def test_it():\n    if first_time('x'): wait_for(lambda: False, 'a file', 0.01)",
    "slow": "def test_it():\n    if first_time('x'): raise trio.TooSlowError",
    "in set-up": (
        "@pytest.fixture\ndef made():\n    if first_time('x'): Stopwatch().check(0, 'to make it')\n"
        "def test_it(made): pass"
    ),
    "late again": "def test_it():\n    Stopwatch().check(0, 'it never is in time')",
    "wrong": "def test_it():\n    assert not first_time('x')",
    "late and wrong": (
        "def test_it():\n    if first_time('x'): raise Late('too late')\n"
        "def test_other():\n    assert not first_time('y')"
    ),
    "late, then a leak": (
        "@pytest.fixture\ndef made():\n    yield\n    assert not first_time('y'), 'a mount'\n"
        "def test_it(made):\n    if first_time('x'): raise Late('too late')"
    ),
    "a leak is waited for": (
        "@pytest.fixture\ndef made():\n    yield\n    if first_time('x'): raise Late('a mount')\n"
        "def test_it(made): pass"
    ),
}


@pytest.mark.parametrize(
    ("case", "options"),
    [*((case, []) for case in CASES), *((case, ["-n2"]) for case in ("late", "wrong"))],
)
def test_only_what_failed_by_a_limit_of_time_is_run_again(
    tmp_path: Path, case: str, options: list[str]
) -> None:
    test = tmp_path / "test_case.py"
    test.write_text(ONCE.format(path=str(tmp_path)) + CASES[case])
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.repeating"]\n')
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {REPOSITORY}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--repeat-late", *options, str(test)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    passes = case in ("late", "slow", "in set-up")
    assert done.returncode == (0 if passes else 1), done.stdout
    assert ("unstable: failed by a limit of time" in done.stdout) == passes
    if passes:
        # Once for the run, once for the repetition.
        assert f"{test.name}::test_it: " in done.stdout
        assert len(re.findall(r"\d passed", done.stdout)) == 2
