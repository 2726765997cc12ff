"""Segments on real file systems: what is written and read, noted, given back, refused."""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.cache.store import Tier, _records, listed
from monarchfs.cache.store.allocator import Allocator, allocated
from monarchfs.cache.store.checksum import checksum
from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.types import ReplicaLost, TierFile
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

    for _ in range(2):
        own.remove(begun[0])
    assert own.found() == []
    assert own.data_ranges(begun[0]) == []
    assert own.blocks(begun[0]) == 0
    own.punch(begun[0], [(0, 4096)])
    with pytest.raises(ReplicaLost):
        own.open(begun[0], 0)


def test_verifying_is_paced_and_reads_no_neighbour(own: SegmentFiles) -> None:
    data = os.urandom((2 << 20) + 5)
    own.write_each([(ONE, 0, b"a" * 4096), (ONE, 4096, data), (ONE, 4 << 20, b"b" * 4096)])
    asked: list[int] = []
    assert own.verify(ONE, 4096, len(data), checksum(data), asked.append)
    assert asked == [1 << 20, 1 << 20, 5]


def test_only_who_made_a_segment_writes_to_it(path: Path, own: SegmentFiles) -> None:
    own._make(ONE)
    with pytest.raises(FileExistsError):
        own._make(ONE)
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


def test_few_descriptors_are_kept_and_all_segments_written_to(own: SegmentFiles) -> None:
    before, numbers = len(os.listdir("/proc/self/fd")), range(1, 101)
    for at in (0, 4096):
        written = own.write_each([(n, at, b"%03d" % n) for n in numbers])
        assert codes(written) == [None] * len(numbers)
    own.punch(1, [(8192, 4096)])
    assert len(os.listdir("/proc/self/fd")) - before == 64 + 1  # and the directory
    assert [record(own, n, 4096, 3) for n in numbers] == [b"%03d" % n for n in numbers]


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


def test_a_failed_punch_is_raised_after_the_others_were_tried(own: SegmentFiles) -> None:
    own.write_each([(ONE, 0, os.urandom(64 * KIB))])
    with pytest.raises(OSError, match="Invalid argument"):
        own.punch(ONE, [(0, 4096), (0, 0), (8192, 4096)])
    assert own.data_ranges(ONE) == [(4096, 8192), (12288, 64 * KIB)]


def test_only_segments_are_found(path: Path, own: SegmentFiles) -> None:
    own.write_each([(ONE, 0, b"a"), (TWO, 0, b"b")])
    own.lists.append(ONE, [TierFile(name_of(1), 1, 1, 4096, True)])
    for name in ("0" * 16, "1" * 15, "1" * 17, "A" * 16, ".probe-12", f"{3:016x}.list", "x"):
        (path / "segments" / name).touch()
    assert own.found() == [ONE, TWO]


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
    again.close()


PAGE = 4096


@given(
    steps=st.lists(st.none() | st.lists(st.integers(0, 12 * PAGE), max_size=8), max_size=20),
    segment_bytes=st.sampled_from([PAGE, 8 * PAGE, 8 * PAGE + 1, 10 * PAGE - 1]),
    align=st.sampled_from([PAGE, 2 * PAGE]),
)
def test_records_have_places(steps: list[list[int] | None], segment_bytes: int, align: int) -> None:
    """Sizes to place, or None to seal. Without room a segment is not gone on with."""
    numbers = count(1)
    allocator = Allocator(segment_bytes, align, lambda: next(numbers))
    taken: dict[int, list[tuple[int, int]]] = {}
    sealed: set[int] = set()
    for step in steps:
        if step is None:
            sealed |= set(taken)
            allocator.seal()
            continue
        places, begun = allocator.place(step)
        assert {segment for segment, _ in places} >= set(begun)
        assert not set(begun) & set(taken)
        for (segment, offset), size in zip(places, step, strict=True):
            assert segment in {*taken, *begun} - sealed
            assert offset % align == 0
            end = offset + max(allocated(size, align), align)
            assert end <= segment_bytes or offset == 0
            taken.setdefault(segment, []).append((offset, end))
    for ranges in taken.values():
        assert [0, *(end for _, end in ranges)][:-1] == [offset for offset, _ in ranges]
        assert ranges[-1][1] <= segment_bytes or len(ranges) == 1


LIST = f"{FILE}.list"


def row(number: int, offset: int, size: int = 4096, allocated: int | None = None) -> TierFile:
    blocks = -(-size // 4096) * 4096 if allocated is None else allocated
    return TierFile(name_of(number), number << 50, size, blocks, True, 0, ONE, offset)


def untimed(rows: list[TierFile]) -> list[TierFile]:
    return [each._replace(made_ns=0) for each in rows]


@pytest.fixture
def begun(path: Path, tier: Tier) -> Tier:
    """A tier with a segment of 64 KiB."""
    (result,) = tier.segments.write_each([(ONE, 0, os.urandom(64 * KIB))])
    assert isinstance(result, int)
    return tier


def test_what_is_noted_is_found(path: Path, begun: Tier) -> None:
    segments = begun.segments
    assert segments.noted(ONE) == []
    segments.lists.append(ONE, [])
    assert not (path / LIST).exists()
    rows = [row(1, 0, 5000), row(2, 8 * KIB, 1), row(3, 12 * KIB)]
    segments.lists.append(ONE, [row(9, 0), row(9, 64 * KIB)])  # overwritten, and past the end
    segments.lists.append(ONE, rows[1:])
    segments.lists.append(ONE, rows[:1])
    found = segments.noted(ONE)
    assert untimed(found) == rows
    assert {each.made_ns for each in found} == {os.stat(path / LIST).st_mtime_ns}
    assert [mode_of(each) for each in (path / LIST, path / FILE)] == [0o600] * 2
    assert mode_of(path / "segments") == 0o700
    # Not another segment's, by whatever name.
    os.rename(path / LIST, path / f"segments/{TWO:016x}.list")
    segments._make(TWO)
    os.truncate(path / f"segments/{TWO:016x}", 64 * KIB)
    assert segments.noted(TWO) == []


def test_a_list_torn_or_damaged_at_every_byte(path: Path, begun: Tier) -> None:
    batches = [[row(1, 0), row(2, 4 * KIB)], [row(3, 8 * KIB)], [row(4, 12 * KIB)]]
    ends, intact = [0], b""
    for batch in batches:
        begun.segments.lists.append(ONE, batch)
        intact = (path / LIST).read_bytes()
        ends.append(len(intact))
    for length in range(len(intact) + 1):
        whole = sum(length >= end for end in ends[1:])
        expected = [each for batch in batches[:whole] for each in batch]
        (path / LIST).write_bytes(intact[:length])
        assert untimed(begun.segments.noted(ONE)) == expected
        # The same where that byte is another one.
        damaged = intact[:length] + bytes(byte ^ 0x81 for byte in intact[length : length + 1])
        (path / LIST).write_bytes(damaged + intact[length + 1 :])
        assert untimed(begun.segments.noted(ONE)) == expected


rows_of_any_place = st.lists(
    st.builds(
        row,
        st.integers(0, 2**12),
        st.integers(0, 20).map(lambda n: n * 2048) | st.just(2**63),
        st.integers(0, 4 * 4096) | st.just(2**64 - 1),
        st.just(0),
    )
)


@given(rows_of_any_place)
def test_what_is_kept_overlaps_nothing_kept_or_later(found: list[TierFile]) -> None:
    kept = listed.sound(found, segment_bytes=32768, align=4096)
    blocks: set[int] = set()
    expected = []
    for each in reversed(found):
        if each.offset % 4096 or not each.size or each.offset + each.size > 32768:
            continue
        own = set(range(each.offset // 4096, -(-(each.offset + each.size) // 4096)))
        if own & blocks:
            continue
        blocks |= own
        expected.append(each._replace(allocated_bytes=len(own) * 4096))
    assert kept == sorted(expected, key=lambda each: each.offset)


def test_of_a_huge_list_little_is_read(path: Path, begun: Tier) -> None:
    begun.segments.lists.append(ONE, [row(1, 0)])
    os.truncate(path / LIST, 1 << 40)
    assert untimed(begun.segments.noted(ONE)) == [row(1, 0)]
    # One that is intact all along, and longer than what is read.
    batch = listed.batch(ONE, [row(n, n * 4096) for n in range(16)] * 64)
    with open(path / LIST, "wb") as file:
        for _ in range(2 * listed.MAX_BYTES // len(batch)):
            file.write(batch)
    assert [each.offset for each in begun.segments.noted(ONE)] == [n * 4096 for n in range(16)]
    # A number of rows that no memory could hold.
    header = listed._HEADER.pack(b"mfsl", 1, 2**32 - 1, 0)
    (path / LIST).write_bytes(header + bytes(1000))
    assert begun.segments.noted(ONE) == []


def test_a_batch_without_room_tears_nothing(path: Path, begun: Tier) -> None:
    begun.segments.lists.append(ONE, [row(1, 0)])
    size = os.stat(path / LIST).st_size
    with no_file_larger_than(size + 10), pytest.raises(OSError, match="too large") as error:
        begun.segments.lists.append(ONE, [row(2, 4 * KIB)])
    assert error.value.errno == errno.EFBIG
    assert os.stat(path / LIST).st_size == size
    begun.segments.lists.append(ONE, [row(3, 4 * KIB)])
    assert untimed(begun.segments.noted(ONE)) == [row(1, 0), row(3, 4 * KIB)]
