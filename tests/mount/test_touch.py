"""``mount --touch-source`` on a file system that records every access time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounting import Bench, requires_mounts, wait_for

pytestmark = requires_mounts


@pytest.fixture
def strict(ext4: Callable[..., Path]) -> Path:
    source = ext4("-O", "^has_journal", options="loop,strictatime") / "data"
    source.mkdir()
    for name in ("used", "idle"):
        (source / name).write_bytes(os.urandom(300_000))
    return source


def read(path: Path) -> bytes:
    # Not in this process: should the mount hang, the test must not.
    return subprocess.run(["cat", path], capture_output=True, check=True, timeout=30).stdout


def test_access_times_of_what_is_used_go_on(work: Bench, strict: Path) -> None:
    options = ("--freshness", "immutable", "--prefetch", "all", "--touch-source", "1s")
    mount = work.mount(strict, *options)
    wait_for(lambda: mount.status()["files"]["resident"] == 2, "both to be resident")
    content = (strict / "used").read_bytes()
    before = {name: (strict / name).stat() for name in ("used", "idle")}
    assert read(mount.path / "used") == content
    wait_for(lambda: mount.status()["touch"]["completed"], "a touch")
    for name, old in before.items():
        now = (strict / name).stat()
        assert (now.st_atime_ns > old.st_atime_ns) == (name == "used")
        assert now.st_atime_ns >= old.st_atime_ns
        assert (now.st_mtime_ns, now.st_ctime_ns) == (old.st_mtime_ns, old.st_ctime_ns)
    status = mount.status()
    assert (status["touch"]["failed"], status["files"]["resident"]) == (0, 2)
