"""The load that verifies what it reads finds what is wrong."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from bench import verify

READ = ("pinned", "cached", "uncached", "held", "mapped")


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A directory, and a copy of it in the place of a mount; one file of each kind."""
    monkeypatch.setattr(verify, "FILES", {"pinned": 1, "cached": 1, "uncached": 1})
    monkeypatch.setattr(verify, "LARGEST", 64 << 10)
    monkeypatch.setattr(verify, "UNCACHED_BYTES", 64 << 10)
    data, mount = tmp_path / "data", tmp_path / "mount"
    verify.generate(data)
    shutil.copytree(data, mount)
    return data, mount


def read(trees: tuple[Path, Path], kind: str, steps: int = 50) -> verify.Reader:
    data, mount = trees
    reader = verify.Reader(str(mount), str(data), random.Random(1))
    for _ in range(steps):
        reader.step(kind)
    reader.close()
    return reader


@pytest.mark.parametrize("kind", verify.KINDS)
def test_what_is_right(trees: tuple[Path, Path], kind: str) -> None:
    reader = read(trees, kind)
    assert (reader.wrong, reader.errors) == ([], [])
    assert reader.counts[kind] == 50
    assert reader.stalls[kind].seconds > 0
    assert reader.bytes > 0 or kind == "names"


@pytest.mark.parametrize(
    ("kind", "ends_early"), [*((kind, False) for kind in READ), ("pinned", True), ("held", True)]
)
def test_wrong_bytes(trees: tuple[Path, Path], kind: str, ends_early: bool) -> None:
    for path in trees[1].rglob("*.bin"):
        data = bytearray(path.read_bytes())
        data[::512] = bytes(byte ^ 1 for byte in data[::512])
        path.write_bytes(path.read_bytes()[: len(data) // 2] if ends_early else data)
    assert read(trees, kind).wrong


def test_wrong_attributes_and_listings(trees: tuple[Path, Path]) -> None:
    path = trees[1] / verify.path_of("pinned", 0)
    os.utime(path, (1, 1))
    (path.parent / "more").touch()
    wrong = read(trees, "names").wrong
    assert any("attributes" in text for text in wrong)
    assert any("listing" in text for text in wrong)


@pytest.mark.parametrize("kind", verify.KINDS)
def test_errors(trees: tuple[Path, Path], kind: str) -> None:
    shutil.rmtree(trees[1])
    assert len(read(trees, kind, 5).errors) == 5


def test_a_reader_that_dies_is_an_error(trees: tuple[Path, Path]) -> None:
    data, mount = trees
    load = verify.Load(mount, data)
    load.start((), ("no such kind",))
    found = verify.Found()
    load.stop(found)
    assert found.errors == 1
    assert "reader 1 died" in "".join(found.examples)
    assert found.wrong == 0
