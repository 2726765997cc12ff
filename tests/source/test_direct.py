"""Reads past the source's page cache."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from monarchfs.core.units import Unit
from monarchfs.source import PosixSource, direct
from monarchfs.source.direct import LEAST_BYTES, PERIOD, TRIALS, DirectDescriptor, DirectReads
from monarchfs.types import SourceVersion
from tests.source.tools import open_descriptors, ref

CHUNK = 128 << 10


class Reads:
    """What ``DirectReads`` has units do. Changing: the ``clock``, and which ``ways`` were gone."""

    def __init__(self, *, direct_seconds: float = 1.0, cached_seconds: float = 1.0) -> None:
        self.clock = 0.0
        self.ways: list[bool] = []
        self.seconds = {True: direct_seconds, False: cached_seconds}
        self.refused = False

    def unit(self, size: int = LEAST_BYTES) -> Unit:
        reads = self

        class FakeUnit:
            start, end, direct, hole_bytes = 0, size, False, 0

            def read(self, fd: int, direct: int, request_bytes: int) -> bool:
                on_disk = os.major(os.fstat(fd).st_dev) != 0
                assert not (on_disk and request_bytes)
                assert direct < 0 or os.path.samestat(os.fstat(fd), os.fstat(direct))
                reads.ways.append(direct >= 0)
                self.direct = direct >= 0 and not reads.refused
                reads.clock += reads.seconds[self.direct]
                return True

        return FakeUnit()  # type: ignore[return-value]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "f").write_bytes(b"x")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    yield fd
    os.close(fd)


def go(
    monkeypatch: pytest.MonkeyPatch, reads: Reads, fd: int, count: int, size: int = LEAST_BYTES
) -> list[bool]:
    clock = SimpleNamespace(monotonic=lambda: reads.clock)
    monkeypatch.setattr("monarchfs.source.direct.time", clock)
    decides, descriptor = DirectReads(), DirectDescriptor()
    for _ in range(count):
        assert decides.read(reads.unit(size), fd, descriptor)
    opened = descriptor.close()
    assert descriptor.take_opens() == (opened >= 0), "once a file"
    if opened >= 0:
        os.close(opened)
    return reads.ways


def test_a_file_that_was_closed_meanwhile_has_no_second_descriptor(fd: int) -> None:
    """Its number may stand for another file by then."""
    descriptor, before = DirectDescriptor(), open_descriptors()
    assert descriptor.close() == -1
    assert descriptor.get(fd) == -1
    assert open_descriptors() == before


def test_threads_that_open_it_at_once_have_the_same(fd: int) -> None:
    descriptor, before = DirectDescriptor(), open_descriptors()
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: descriptor.get(fd), range(200)))
    assert found == {descriptor.get(fd)}
    assert descriptor.take_opens() >= 1
    assert descriptor.take_opens() == 0
    os.close(descriptor.close())
    assert open_descriptors() == before


@pytest.mark.parametrize(("seconds", "goes"), [(0.5, True), (1.1, True), (2.0, False)])
def test_the_way_that_takes_longer_is_left(
    monkeypatch: pytest.MonkeyPatch, fd: int, seconds: float, goes: bool
) -> None:
    ways = go(monkeypatch, Reads(direct_seconds=seconds), fd, PERIOD + TRIALS)
    assert sum(ways[: TRIALS - 1]) == TRIALS // 2 - 1
    assert ways[TRIALS - 1 : PERIOD - 1] == [goes] * (PERIOD - TRIALS)
    assert {*ways[PERIOD - 1 : PERIOD + TRIALS - 1]} == {True, False}, "it may have changed"


def test_what_cannot_be_read_that_way_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, fd: int
) -> None:
    reads = Reads()
    reads.refused = True
    assert sum(go(monkeypatch, reads, fd, 2 * PERIOD)) == 1


def test_a_file_system_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open("/proc/self/status", os.O_RDONLY)
    assert not any(go(monkeypatch, Reads(), fd, PERIOD))
    os.close(fd)


def test_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    assert not any(go(monkeypatch, Reads(), fd, PERIOD, LEAST_BYTES - 1))
    monkeypatch.setattr(direct, "_is_fuse", lambda fd: True)
    assert not any(go(monkeypatch, Reads(), fd, PERIOD))


@pytest.mark.parametrize("past", [0, 1, 4095, 4096, CHUNK + 5])
def test_the_same_bytes_come_either_way(root: Path, posix: PosixSource, past: int) -> None:
    """Also those that were written a moment ago and are on no disk."""
    data = random.Random(past).randbytes((2 << 20) + past)
    (root / "f").write_bytes(data)
    fd, stat = posix.open(ref(root), b"f")
    st_dev, st_ino, size, mtime_ns, ctime_ns = stat.version
    version = SourceVersion(st_dev or posix.device, st_ino, size, mtime_ns, ctime_ns)
    ways, descriptor = set(), DirectDescriptor()
    for _ in range(2 * TRIALS):
        unit = Unit(1, CHUNK, size, chunk_bytes=CHUNK, version=version, device=posix.device)
        assert posix.read_unit(fd, descriptor, unit) == size - CHUNK
        assert unit.peek(CHUNK, size) == data[CHUNK:]
        ways.add(unit.direct)
    for opened in (descriptor.close(), fd):
        if opened >= 0:
            posix.close(opened)
    assert False in ways
