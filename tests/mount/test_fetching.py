"""Small files that are copied ahead of their readers, on a real mount: the C part reads them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import trees
from tests.support.mounting import Bench, FaultySource, Mount, requires_mounts, run, wait_for

pytestmark = requires_mounts

FILES = 60
TOTAL = sum(1000 + 7 * number for number in range(FILES))
READER = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"


def content(number: int) -> bytes:
    return bytes([number]) * (1000 + 7 * number)


def name(number: int) -> str:
    return f"{number % 3}/{number}"


@pytest.fixture
def source(faulty: FaultySource) -> FaultySource:
    trees.write_files(faulty.backing, {name(number): content(number) for number in range(FILES)})
    return faulty


def mounted(work: Bench, source: FaultySource, *options: str) -> Mount:
    return work.mount(source.path, "--freshness", "immutable", *options)


def wait_resident(mount: Mount, count: int) -> None:
    wait_for(lambda: mount.status()["files"]["resident"] == count, f"{count} files to be copied")


def check(mount: Mount, source: FaultySource) -> None:
    """All are here, and each was read once."""
    wait_resident(mount, FILES)
    for number in range(FILES):
        assert (mount.path / name(number)).read_bytes() == content(number)
    assert source.counts()["read_bytes"] == TOTAL


def shown(mount: Mount, number: int, what: str) -> str:
    return os.getxattr(mount.path / name(number), f"user.monarchfs.{what}").decode()


def read_soon(mount: Mount, number: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", READER, str(mount.path / name(number))]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_each_file_is_read_once_and_nobody_waited_for_it(work: Bench, source: FaultySource) -> None:
    mount = mounted(work, source, "--prefetch", "all")
    check(mount, source)
    assert source.counts()["operations"]["open"] == FILES
    io = mount.wait_idle()["source_io"]
    assert (io["read_bytes"], io["prefetch_read_bytes"]) == (TOTAL, TOTAL)
    assert io["demand_read_bytes"] == 0


def test_what_somebody_names_is_copied_where_nothing_else_is(
    work: Bench, source: FaultySource
) -> None:
    mount = mounted(work, source, "--prefetch", "none")
    assert run("warm", str(mount.path), "--wait").returncode == 0
    check(mount, source)


def test_a_reader_is_answered_from_the_read_that_was_begun_ahead(
    work: Bench, source: FaultySource
) -> None:
    source.faults(delay=0.3, delayed=["read"])
    mount = mounted(work, source, "--prefetch", "all")
    readers = [read_soon(mount, number) for number in range(0, FILES, 10)]
    for number, reader in zip(range(0, FILES, 10), readers, strict=True):
        assert reader.communicate(timeout=30)[0] == content(number)
    check(mount, source)


def test_some_that_hang_hold_up_neither_others_nor_readers(
    work: Bench, source: FaultySource
) -> None:
    hung = range(0, 40, 5)
    source.faults(hang=[f"open {name(number)}" for number in hung])
    mount = mounted(work, source, "--prefetch", "all")
    wait_resident(mount, FILES - len(hung))
    assert mount.status()["prefetch"]["active"] == len(hung)
    assert shown(mount, 5, "state") == "copying"
    source.faults()
    check(mount, source)


def test_what_fails_is_tried_again(work: Bench, source: FaultySource) -> None:
    source.faults(fail={f"read {name(number)}": errno.EIO for number in range(5)})
    mount = mounted(work, source, "--prefetch", "all")
    said = "copying failed: Input/output error"
    wait_for(lambda: said in shown(mount, 3, "reason"), "what the source says")
    source.faults()
    wait_resident(mount, FILES)
    prefetch = mount.status()["prefetch"]
    assert (prefetch["failed"], prefetch["outdated"]) == (0, 0)


def test_there_are_more_directories_than_are_kept_open(work: Bench) -> None:
    tree = work.path / "tree"
    for number in range(1000):
        (tree / f"{number}").mkdir(parents=True)
        (tree / f"{number}" / "file").write_bytes(os.urandom(100))
    mount = work.mount(tree, "--freshness", "immutable", "--prefetch", "all")
    wait_resident(mount, 1000)
    for number in range(0, 1000, 50):
        path = Path(f"{number}") / "file"
        assert (mount.path / path).read_bytes() == (tree / path).read_bytes()
