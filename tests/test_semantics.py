"""Every promise in docs/SEMANTICS.md has its test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_the_tests_that_promises_name_exist() -> None:
    text = (ROOT / "docs" / "SEMANTICS.md").read_text()
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
