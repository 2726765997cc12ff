"""What a real Lustre showed, on an emulated one: files in its archive, layouts of any size, and how
many reads a copy is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.pfs import INSTANT, ParallelFileSystem, set_layout
from tests.support import surroundings
from tests.support.mounting import Bench, requires_mounts, run

pytestmark = [*requires_mounts, surroundings.program("gcc"), surroundings.requires_own_clone]

KIB, MIB = 1 << 10, 1 << 20

Lustre = Callable[..., ParallelFileSystem]


@pytest.fixture
def backing(work: Bench) -> Path:
    root = work.path / "backing"
    root.mkdir()
    return root


@pytest.fixture
def lustre(work: Bench, backing: Path) -> Iterator[Lustre]:
    """Mounts ``backing``; unmounted after what uses it."""
    with ExitStack() as stack:

        def mount(**options: Any) -> ParallelFileSystem:
            options = {"targets": 4, **options}
            return stack.enter_context(
                ParallelFileSystem(backing, work.path / "lustre", INSTANT, **options)
            )

        yield mount
        for mounted in work.mounts:
            mounted.umount()


def write(path: Path, size: int, **layout: Any) -> bytes:
    data = os.urandom(size)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if layout:
        set_layout(path, **layout)
    return data


def asked(*command: str) -> dict[str, Any]:
    done = run(*command, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("stripes", [171, 300, 2000])
@pytest.mark.parametrize("size", [5000, 3 * MIB])
def test_layouts_of_any_size(
    work: Bench, backing: Path, lustre: Lustre, size: int, stripes: int
) -> None:
    data = write(backing / "wide", size, stripes=stripes)
    mount = work.mount(lustre().path)
    warmed = asked("warm", str(mount.path), "--wait")
    assert (warmed["resident"], warmed["failed"], warmed["error"]) == (1, 0, "")
    assert (mount.path / "wide").read_bytes() == data
