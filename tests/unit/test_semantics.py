"""Every promise in docs/SEMANTICS.md and docs/SECURITY.md has its test."""

from __future__ import annotations

import re

import pytest

from tests.support.mounting import REPOSITORY

ROOT = REPOSITORY
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("document", ["SEMANTICS.md", "SECURITY.md"])
def test_the_tests_that_promises_name_exist(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    named = NAMED.findall(text)
    assert len(named) > 15
    for path, function in named:
        source = (ROOT / path).read_text()
        assert f"def {function or 'test_'}" in source, (path, function)


def test_every_promise_names_one() -> None:
    text = (ROOT / "docs" / "SEMANTICS.md").read_text()
    promises = text.partition("## What is not promised")[0]
    for promise in re.split(r"^- \*\*", promises, flags=re.MULTILINE)[1:]:
        assert NAMED.search(promise), promise.partition("**")[0]


def test_every_hostile_surface_names_one() -> None:
    text = (ROOT / "docs" / "SECURITY.md").read_text()
    table = text.partition("## What may be hostile")[2].partition("## Who may read")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        assert NAMED.search(row), row
