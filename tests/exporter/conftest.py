"""Asynchronous tests, each in its own trio run."""

from tests.layers.conftest import pytest_pyfunc_call as pytest_pyfunc_call
