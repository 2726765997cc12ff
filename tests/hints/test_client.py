"""Hints never disturb a job."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from monarchfs.hints import client
from monarchfs.types import OperationError


def test_hints_need_none_of_the_daemons_libraries() -> None:
    """Only the standard library, so that a job's environment need not have anything else."""
    allowed = "('monarchfs', *sys.stdlib_module_names)"
    code = (
        "import sys; before = set(sys.modules); import monarchfs.hints.client;"
        "names = {name.split('.')[0] for name in set(sys.modules) - before};"
        f"print(sorted(names - set({allowed})))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_path_outside_of_all_mounts_has_none(tmp_path: object) -> None:
    assert client.find_mount(str(tmp_path)) is None


def test_a_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_failed", set())
    calls = []

    def fail() -> None:
        calls.append(1)
        raise OperationError("nobody listens")

    with caplog.at_level(logging.WARNING):
        assert not client.quietly("/data", fail)
        assert not client.quietly("/data", fail)
    assert len(calls) == 1
    assert len(caplog.records) == 1
