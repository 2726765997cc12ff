"""The lock on a state directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from monarchfs.config import User
from monarchfs.supervisor.lock import LOCK, take_lock


def test_a_lock_whose_file_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that gives up removes the file. The next one locks another file."""
    real = fcntl.flock

    def give_up_before(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        (tmp_path / LOCK).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", give_up_before)
    user = User("me", os.geteuid(), os.getegid(), tuple(os.getgroups()))
    state = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock = take_lock(state, user)
        try:
            assert os.path.samestat(os.fstat(lock), (tmp_path / LOCK).stat())
        finally:
            os.close(lock)
    finally:
        os.close(state)
