"""Asynchronous tests, each in its own trio run."""

from __future__ import annotations

from tests.layers.conftest import pytest_pyfunc_call as pytest_pyfunc_call
