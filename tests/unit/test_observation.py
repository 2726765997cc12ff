"""What a scenario expects: how a line reads, what it allows, and how it is recorded."""

from __future__ import annotations

import pytest

from tests.support.observation import Expected, recorded, unmet
from tests.support.scenario import Script


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


def test_tolerances_stay_when_a_scenario_is_recorded() -> None:
    text = "mount; read\ncheck one\n  a 1\n  b.* <=5  # why\n  c 2\ncheck two\n"
    script = Script(text)
    assert script.text() == text
    script.record({"one": {"a": 7, "b.x": 6}, "two": {"d": 1}})
    assert script.text() == ("mount; read\ncheck one\n  a 7\n  b.* <=6  # why\ncheck two\n  d 1\n")
    assert recorded(script.expected["one"], {"a": 7, "b.x": 1}) == script.expected["one"]
