"""The lists beside segments: torn, damaged, hostile, huge."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.store import Tier, listed
from monarchfs.types import TierFile
from tests.store.tools import KIB, mode_of, name_of
from tests.support.surroundings import no_file_larger_than

SEGMENT = 0xABC
FILE = f"segments/{SEGMENT:016x}"
LIST = f"{FILE}.list"


def row(number: int, offset: int, size: int = 4096, allocated: int | None = None) -> TierFile:
    blocks = -(-size // 4096) * 4096 if allocated is None else allocated
    return TierFile(name_of(number), number << 50, size, blocks, True, 0, SEGMENT, offset)


def untimed(rows: list[TierFile]) -> list[TierFile]:
    return [each._replace(made_ns=0) for each in rows]


@pytest.fixture
def begun(path: Path, tier: Tier) -> Tier:
    """A tier with a segment of 64 KiB."""
    (result,) = tier.segments.write_each([(SEGMENT, 0, os.urandom(64 * KIB))])
    assert isinstance(result, int)
    return tier


def test_what_is_noted_is_found(path: Path, begun: Tier) -> None:
    segments = begun.segments
    assert segments.noted(SEGMENT) == []
    segments.lists.append(SEGMENT, [])
    assert not (path / LIST).exists()
    rows = [row(1, 0, 5000), row(2, 8 * KIB, 1), row(3, 12 * KIB)]
    segments.lists.append(SEGMENT, [row(9, 0), row(9, 64 * KIB)])  # overwritten, and past the end
    segments.lists.append(SEGMENT, rows[1:])
    segments.lists.append(SEGMENT, rows[:1])
    found = segments.noted(SEGMENT)
    assert untimed(found) == rows
    assert {each.made_ns for each in found} == {os.stat(path / LIST).st_mtime_ns}
    assert mode_of(path / LIST) == 0o600
    assert segments.noted(SEGMENT + 1) == []
    # Not another segment's, by whatever name.
    os.rename(path / LIST, path / f"segments/{1:016x}.list")
    segments.create(1)
    os.truncate(path / f"segments/{1:016x}", 64 * KIB)
    assert segments.noted(1) == []


def test_a_list_torn_at_every_byte(path: Path, begun: Tier) -> None:
    batches = [[row(1, 0), row(2, 4 * KIB)], [row(3, 8 * KIB)], [row(4, 12 * KIB)]]
    ends, intact = [0], b""
    for batch in batches:
        begun.segments.lists.append(SEGMENT, batch)
        intact = (path / LIST).read_bytes()
        ends.append(len(intact))
    for length in range(len(intact) + 1):
        (path / LIST).write_bytes(intact[:length])
        whole = sum(length >= end for end in ends[1:])
        expected = [each for batch in batches[:whole] for each in batch]
        assert untimed(begun.segments.noted(SEGMENT)) == expected


def test_a_list_damaged_at_every_byte(path: Path, begun: Tier) -> None:
    first, second = [row(1, 0)], [row(2, 4 * KIB)]
    begun.segments.lists.append(SEGMENT, first)
    begun.segments.lists.append(SEGMENT, second)
    intact = (path / LIST).read_bytes()
    for n in range(len(intact)):
        damaged = bytearray(intact)
        damaged[n] ^= 0x81
        (path / LIST).write_bytes(damaged)
        expected = [] if n < len(intact) // 2 else first
        assert untimed(begun.segments.noted(SEGMENT)) == expected


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_list_of_nothing(data: bytes, begins_well: bool) -> None:
    batch = listed.batch(SEGMENT, [row(1, 0)]) if begins_well else b""
    found = listed.rows(SEGMENT, batch + data, 0)
    assert [each.name for each in found] == [name_of(1)] * begins_well


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
    begun.segments.lists.append(SEGMENT, [row(1, 0)])
    os.truncate(path / LIST, 1 << 40)
    assert untimed(begun.segments.noted(SEGMENT)) == [row(1, 0)]
    # One that is intact all along, and longer than what is read.
    batch = listed.batch(SEGMENT, [row(n, n * 4096) for n in range(16)] * 64)
    with open(path / LIST, "wb") as file:
        for _ in range(2 * listed.MAX_BYTES // len(batch)):
            file.write(batch)
    found = begun.segments.noted(SEGMENT)
    assert [each.offset for each in found] == [n * 4096 for n in range(16)]
    # A number of rows that no memory could hold.
    header = listed._HEADER.pack(b"mfsl", 1, 2**32 - 1, 0)
    (path / LIST).write_bytes(header + bytes(1000))
    assert begun.segments.noted(SEGMENT) == []


def test_a_batch_without_room_tears_nothing(path: Path, begun: Tier) -> None:
    begun.segments.lists.append(SEGMENT, [row(1, 0)])
    size = os.stat(path / LIST).st_size
    with no_file_larger_than(size + 10), pytest.raises(OSError, match="too large") as error:
        begun.segments.lists.append(SEGMENT, [row(2, 4 * KIB)])
    assert error.value.errno == errno.EFBIG
    assert os.stat(path / LIST).st_size == size
    begun.segments.lists.append(SEGMENT, [row(3, 4 * KIB)])
    assert untimed(begun.segments.noted(SEGMENT)) == [row(1, 0), row(3, 4 * KIB)]
