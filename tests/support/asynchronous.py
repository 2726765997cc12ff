"""Tests that are coroutines: the hook of a folder runs them in trio, each folder as it needs it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def arguments_of(test: pytest.Function) -> dict[str, Any] | None:
    """What a coroutine is to be called with; None for any other test."""
    if not inspect.iscoroutinefunction(test.obj):
        return None
    return {name: test.funcargs[name] for name in test._fixtureinfo.argnames}
