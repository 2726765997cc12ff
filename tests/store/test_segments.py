"""Segments on real file systems: what is written and read, given back, refused, and failed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monarchfs.store import ReplicaLost, Tier, _records
from monarchfs.store.checksum import checksum
from monarchfs.store.segments import Allocator, SegmentFiles, allocated
from monarchfs.types import Data, TierFile
from tests.store.tools import KIB, code_of, files_below, mode_of, name_of, needs_root
from tests.support.surroundings import no_file_larger_than

ONE, TWO = 0x1, 0xFEDC_BA98_7654_3210
FILE = f"segments/{ONE:016x}"


def open_segments(path: Path) -> SegmentFiles:
    fd = os.open(path, os.O_RDONLY)
    try:
        return SegmentFiles(fd, str(path), os.geteuid())
    finally:
        os.close(fd)


@pytest.fixture
def own(path: Path) -> Iterator[SegmentFiles]:
    opened = open_segments(path)
    yield opened
    opened.close()


@pytest.fixture(params=["path", "small", "disk"], ids=["here", "memory", "disk"])
def anywhere(request: pytest.FixtureRequest) -> Iterator[SegmentFiles]:
    opened = open_segments(request.getfixturevalue(request.param))
    yield opened
    opened.close()


def record(own: SegmentFiles, segment: int, offset: int, size: int) -> bytes:
    fd = own.open(segment, offset + size)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def codes(results: Sequence[int | OSError]) -> list[int | None]:
    return [code_of(result) for result in results]


# Records


def test_records_are_written_read_and_given_back(anywhere: SegmentFiles) -> None:
    own = anywhere
    sizes = [1, 4096, 4097, 100_000, 20_000, 0, 300]
    data = [os.urandom(size) for size in sizes]
    places, begun = Allocator(256 * KIB).place(sizes)
    assert len(begun) == 1
    written = [(*place, each) for place, each in zip(places, data, strict=True)]
    assert own.write_each(written) == [checksum(each) for each in data]
    assert own.found() == begun
    for (segment, offset), each in zip(places, data, strict=True):
        assert record(own, segment, offset, len(each)) == each
        assert own.verify(segment, offset, len(each), checksum(each))
        assert not own.verify(segment, offset, len(each), checksum(each) ^ 1)
    before = own.blocks(begun[0])
    assert before >= sum(allocated(size) for size in sizes)

    own.punch(begun[0], [(places[n][1], allocated(sizes[n])) for n in (1, 3)])
    assert before - own.blocks(begun[0]) == 4096 + allocated(100_000)
    for n, (segment, offset) in enumerate(places):
        expected = bytes(sizes[n]) if n in (1, 3) else data[n]
        assert record(own, segment, offset, sizes[n]) == expected
    assert own.verify(begun[0], places[2][1], sizes[2], checksum(data[2]))
    assert not own.verify(begun[0], places[3][1], sizes[3], checksum(data[3]))

    own.remove(begun[0])
    own.remove(begun[0])
    assert own.found() == []
    assert own.blocks(begun[0]) == 0
    assert own.data_ranges(begun[0]) == []
    own.punch(begun[0], [(0, 4096)])


def test_layout(path: Path, tier: Tier) -> None:
    assert not (path / "segments").exists()
    assert tier.segments.found() == []
    assert tier.segments.blocks(TWO) == 0
    tier.segments.remove(TWO)
    with pytest.raises(ReplicaLost):
        tier.segments.open(TWO, 0)
    tier.segments.punch(TWO, [(0, 4096)])
    assert not (path / "segments").exists()
    tier.segments.create(TWO)
    tier.segments.lists.append(TWO, [TierFile(name_of(1), 1, 1, 4096, True)])
    assert files_below(path) == {"segments/fedcba9876543210", "segments/fedcba9876543210.list"}
    assert mode_of(path / "segments") == 0o700
    assert mode_of(path / "segments/fedcba9876543210") == 0o600
    tier.segments.remove(TWO)
    assert files_below(path) == set()


def test_zeros_are_written(anywhere: SegmentFiles) -> None:
    own = anywhere
    results = own.write_each([(ONE, 0, bytes(128 * KIB)), (ONE, 256 * KIB, b"x" * 4096)])
    assert codes(results) == [None] * 2
    assert own.data_ranges(ONE) == [(0, 128 * KIB), (256 * KIB, 260 * KIB)]
    own.punch(ONE, [(4 * KIB, 4 * KIB), (64 * KIB, 4 * KIB)])
    assert own.data_ranges(ONE) == [
        (0, 4 * KIB),
        (8 * KIB, 64 * KIB),
        (68 * KIB, 128 * KIB),
        (256 * KIB, 260 * KIB),
    ]


def test_the_checksum_of_what_is_written_is_that_of_the_file(own: SegmentFiles) -> None:
    at = 0
    for size in (
        128 * KIB - 1,
        128 * KIB,
        (1 << 20),
        8 * (1 << 20) - 1,
        8 * (1 << 20),
        8 * (1 << 20) + 1,
        17 * (1 << 20),
    ):
        data = os.urandom(size)
        assert own.write_each([(ONE, at, data)]) == [checksum(data)], size
        at += allocated(size)


def test_any_buffer_is_data(own: SegmentFiles) -> None:
    view = memoryview(b"-abc-")[1:4]
    records: list[tuple[int, int, Data]] = [
        (ONE, 0, b"abc"),
        (ONE, 4096, bytearray(b"abc")),
        (ONE, 8192, view),
    ]
    assert codes(own.write_each(records)) == [None] * 3
    assert [record(own, ONE, n * 4096, 3) for n in range(3)] == [b"abc"] * 3
    assert own.write_each([]) == []
    with pytest.raises(TypeError):
        _records.put_each([(1, 0, "text")])  # type: ignore[list-item]


def test_a_shorter_segment_is_lost(own: SegmentFiles) -> None:
    own.write_each([(ONE, 4096, b"good")])
    os.close(own.open(ONE, 4100))
    with pytest.raises(ReplicaLost):
        own.open(ONE, 4101)
    with pytest.raises(ReplicaLost):
        own.verify(ONE, 4096, 5, 0)
    with pytest.raises(ReplicaLost):
        own.verify(TWO, 0, 1, 0)


def test_verifying_is_paced_and_reads_no_neighbour(own: SegmentFiles) -> None:
    data = os.urandom((2 << 20) + 5)
    own.write_each([(ONE, 0, b"a" * 4096), (ONE, 4096, data), (ONE, 4 << 20, b"b" * 4096)])
    asked: list[int] = []
    assert own.verify(ONE, 4096, len(data), checksum(data), asked.append)
    assert asked == [1 << 20, 1 << 20, 5]

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own.verify(ONE, 4096, len(data), checksum(data), stop)


# One writer


def test_only_who_made_a_segment_writes_to_it(path: Path, own: SegmentFiles) -> None:
    own.create(ONE)
    with pytest.raises(FileExistsError):
        own.create(ONE)
    assert codes(own.write_each([(ONE, 0, b"a" * 8192)])) == [None]
    other = open_segments(path)
    results = other.write_each([(ONE, 0, b"b"), (TWO, 0, b"c"), (ONE, 4096, b"d")])
    assert codes(results) == [errno.EEXIST, None, errno.EEXIST]
    other.punch(ONE, [(4096, 4096)])
    # Not even when it has it open.
    assert code_of(*other.write_each([(ONE, 0, b"b")])) == errno.EEXIST
    assert record(own, ONE, 0, 8192) == b"a" * 4096 + bytes(4096)
    assert codes(own.write_each([(ONE, 4096, b"a" * 4096)])) == [None]
    assert record(other, ONE, 0, 8192) == b"a" * 8192
    other.close()


def test_a_segment_that_was_taken_away_is_not_written_to(path: Path, own: SegmentFiles) -> None:
    own.write_each([(ONE, 0, b"a"), (TWO, 0, b"a")])
    os.unlink(path / FILE)
    results = own.write_each([(ONE, 4096, b"b"), (TWO, 4096, b"b")])
    assert isinstance(results[0], ReplicaLost)
    assert code_of(results[1]) is None
    (path / FILE).write_bytes(b"another")
    (result,) = own.write_each([(ONE, 4096, b"b")])
    assert isinstance(result, ReplicaLost)
    assert (path / FILE).read_bytes() == b"another"
    shutil.rmtree(path / "segments")
    with pytest.raises(ReplicaLost):
        own.open(TWO, 0)
    assert codes(own.write_each([(3, 0, b"c")])) == [None]
    assert own.found() == [3]
    assert record(own, 3, 0, 1) == b"c"


def test_few_descriptors_are_kept(path: Path, own: SegmentFiles) -> None:
    before = len(os.listdir("/proc/self/fd"))
    numbers = range(1, 201)
    assert codes(own.write_each([(n, 0, b"%d" % n) for n in numbers])) == [None] * 200
    own.punch(1, [(4096, 4096)])
    assert len(os.listdir("/proc/self/fd")) - before == 64 + 1  # and the directory
    # Those that were closed are still written to.
    assert codes(own.write_each([(n, 4096, b"more") for n in numbers])) == [None] * 200
    for n in numbers:
        assert record(own, n, 0, 4100).rstrip(b"\0") == (b"%d" % n).ljust(4096, b"\0") + b"more"
    for n in numbers:
        own.remove(n)
    assert len(os.listdir("/proc/self/fd")) - before == 1
    assert files_below(path) == set()


def test_four_threads_write_at_once(own: SegmentFiles) -> None:
    allocator = Allocator(1 << 20)
    batches = []
    for number in range(60):
        data = [os.urandom(1000 * (1 + (number + n) % 40)) for n in range(16)]
        places, _ = allocator.place([len(each) for each in data])
        batches.append([(*place, each) for place, each in zip(places, data, strict=True)])
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(own.write_each, batches):
            assert codes(results) == [None] * 16
        list(pool.map(own.punch, own.found(), [[(2 << 20, 4096)]] * 60))
    for batch in batches:
        for segment, offset, written in batch:
            assert record(own, segment, offset, len(written)) == written


# Failures


def test_what_could_not_be_written_leaves_the_others_right(own: SegmentFiles) -> None:
    data = os.urandom(20_000)
    with no_file_larger_than(30_000):
        results = own.write_each(
            [(ONE, 0, data), (ONE, 20 * KIB, data), (TWO, 0, data), (TWO, 40 * KIB, data)]
        )
    assert codes(results) == [None, errno.EFBIG, None, errno.EFBIG]
    assert own.data_ranges(ONE) == [(0, 20 * KIB)]
    assert own.data_ranges(TWO) == [(0, 20_000)]
    for segment in (ONE, TWO):
        assert own.verify(segment, 0, len(data), checksum(data))
        assert own.blocks(segment) == 20 * KIB


@needs_root
def test_a_full_tier(small: Path) -> None:
    own = open_segments(small)
    data = os.urandom(400 * KIB)
    little = (ONE, 1200 * KIB, b"little")
    results = own.write_each([(ONE, n * 400 * KIB, data) for n in range(3)])
    assert codes(results) == [None, None, errno.ENOSPC]
    assert own.blocks(ONE) == 800 * KIB
    assert codes(own.write_each([little])) == [None]
    assert own.blocks(ONE) == 804 * KIB
    assert [record(own, ONE, n * 400 * KIB, len(data)) for n in (0, 1)] == [data, data]
    assert record(own, ONE, 1200 * KIB, 6) == b"little"
    own.punch(ONE, [(0, 400 * KIB)])
    assert codes(own.write_each([(ONE, 800 * KIB, data)])) == [None]
    with pytest.raises(OSError, match="No space left"):
        own.lists.append(ONE, [TierFile(name_of(1), 1, 1, 4096, True)] * 10_000)
    assert os.stat(small / f"{FILE}.list").st_size == 0
    own.close()


@needs_root
def test_a_full_disk(disk: Path) -> None:
    own = open_segments(disk)
    data = os.urandom(1 << 20)
    results = own.write_each([(ONE, n << 20, data) for n in range(40)])
    stored = [n for n, each in enumerate(results) if code_of(each) is None]
    assert 15 < len(stored) < 40
    assert {code_of(each) for each in results} == {None, errno.ENOSPC}
    os.sync()
    for n in stored:
        assert own.verify(ONE, n << 20, len(data), checksum(data))
    assert own.blocks(ONE) < (len(stored) + 1) << 20
    own.close()


def test_a_failed_punch_is_raised_after_the_others_were_tried(own: SegmentFiles) -> None:
    own.write_each([(ONE, 0, os.urandom(64 * KIB))])
    with pytest.raises(OSError, match="Invalid argument"):
        own.punch(ONE, [(0, 4096), (0, 0), (8192, 4096)])
    assert own.data_ranges(ONE) == [(4096, 8192), (12288, 64 * KIB)]


def test_room_that_a_failure_keeps_is_logged(
    own: SegmentFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_records, "put_each", lambda records: [(errno.EIO, 0)] * len(records))
    monkeypatch.setattr(_records, "punch", lambda _fd, _ranges: errno.EOPNOTSUPP)
    with caplog.at_level(logging.WARNING):
        (result,) = own.write_each([(ONE, 0, b"x")])
    assert code_of(result) == errno.EIO
    assert "could not give back 4096 bytes" in caplog.text


# What is not ours


def test_only_segments_are_found(path: Path, own: SegmentFiles) -> None:
    own.write_each([(ONE, 0, b"a"), (TWO, 0, b"b")])
    own.lists.append(ONE, [TierFile(name_of(1), 1, 1, 4096, True)])
    for name in ("0" * 16, "1" * 15, "1" * 17, "A" * 16, ".probe-12", f"{3:016x}.list", "x"):
        (path / "segments" / name).touch()
    assert own.found() == [ONE, TWO]


# Trial


def test_whether_room_comes_back(anywhere: SegmentFiles) -> None:
    segments = Path(anywhere.path) / "segments"
    assert anywhere.frees_punched()
    assert files_below(segments) == set()
    for name in (".probe-0123", ".probe-other"):
        (segments / name).write_bytes(b"x")
    assert anywhere.frees_punched()
    assert files_below(segments) == {".probe-other"}


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.EOPNOTSUPP, False), (0, False), (errno.EIO, None)]
)
def test_room_that_does_not_come_back(
    path: Path, own: SegmentFiles, monkeypatch: pytest.MonkeyPatch, code: int, expected: bool | None
) -> None:
    monkeypatch.setattr(_records, "punch", lambda _fd, _ranges: code)
    if expected is None:
        with pytest.raises(OSError, match="Input/output error"):
            own.frees_punched()
    else:
        assert own.frees_punched() is expected
    assert files_below(path / "segments") == set()


# The tier


def test_what_extents_take_is_measured(disk: Path) -> None:
    """ext4: more than four extents of a file take a block of their own."""
    own = open_segments(disk)
    size = 8 * KIB
    own.write_each([(ONE, number * size, b"x" * size) for number in range(20)])
    own.punch(ONE, [(number * size, 4 * KIB) for number in range(20)])
    os.sync()
    own.trees.measure()
    taken = own.trees.bytes
    assert taken == own.blocks(ONE) - 20 * 4 * KIB > 0
    own.close()

    again = open_segments(disk)
    again.trees.measure()
    assert again.trees.bytes == 0  # not counted yet
    again.trees.count()
    again.trees.measure()
    assert again.trees.bytes == taken
    again.remove(ONE)
    assert again.trees.bytes == 0
    again.trees.measure()
    assert again.trees.bytes == 0
    again.close()
