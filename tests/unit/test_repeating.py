"""What tests stand on: what is run once more, and what a scenario expects."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.observation import Expected, unmet
from tests.support.programs import execute
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
def test_only_what_ran_out_of_time_is_run_again(
    tmp_path: Path, options: str, cases: list[str]
) -> None:
    paths = [tmp_path / f"test_{case}.py" for case in cases]
    for path, case in zip(paths, cases, strict=True):
        path.write_text(ONCE + CASES[case])
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.repeating"]\n')
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {REPOSITORY}\n")
    words = [sys.executable, "-c", RUN_EACH, options, *map(str, paths)]
    done = execute(words, cwd=tmp_path, timeout=240)
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


@pytest.mark.parametrize(
    ("line", "holds", "not_so"),
    [
        ("key 5", [5], [4, 6]),
        ("key 5..7", [5, 6, 7], [4, 8]),
        ("key <=7", [0, 7], [8]),
        ("key >=7  # why not", [7, 99], [6]),
        ("key ?  # who knows", [0, 99], []),
    ],
)
def test_what_a_line_allows(line: str, holds: list[int], not_so: list[int]) -> None:
    expected = Expected.parse(line)
    assert expected.text() == line
    assert all(expected.holds(value) for value in holds)
    assert not any(expected.holds(value) for value in not_so)
    for value in not_so:
        assert expected.exact or expected.widened(value).holds(value)


def test_what_is_not_named_is_zero_where_all_is_named() -> None:
    lines = [Expected.parse(line) for line in ("a 1", "b.* <=5", "c 2")]
    observed = {"a": 1, "b.x": 5, "b.y": 6, "d": 3}
    assert list(unmet(lines, observed, complete=False)) == ["b.y is 6, not <=5", "c is 0, not 2"]
    assert list(unmet(lines, observed, complete=True))[2:] == ["d is 3, and not 0"]
