"""The file of a recording: what is written is read again, also from a file that was cut off."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.insight.recording import (
    BLOCK,
    EVENT,
    EVENTS_A_BLOCK,
    MAGIC,
    AnsweredBy,
    Event,
    File,
    Kind,
    RecordingWriter,
    open_recording,
)
from monarchfs.types import OperationError
from tests.support.jobs import add_events

ORIGIN = 5_000_000_000

times = st.integers(0, 10**9).map(lambda ticks: ticks / 1024)
events = st.builds(
    Event,
    times,
    st.floats(0, 1e6, width=32),
    st.sampled_from(Kind),
    st.sampled_from(AnsweredBy),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63),
    st.integers(0, 2**32 - 1),
)


def write(path: Path, *batches: list[Event], files: dict[int, File] | None = None) -> None:
    with path.open("wb") as stream:
        writer = RecordingWriter(stream, 1e9, {"source": "/data", "dropped": 0}, ORIGIN)
        for batch in batches:
            add_events(writer, batch, ORIGIN)
            writer.flush()
        writer.add_files(files or {})
        writer.finish(7.5, {"dropped": 3})
        assert writer.written <= stream.tell()


def event(number: int) -> Event:
    return Event(number / 1024, 0.25, Kind.READ, AnsweredBy.TIER, number, 77, number * 4096, 131072)


def close_enough(one: Event, other: Event) -> bool:
    return abs(one.begin - other.begin) < 1e-6 and one[1:] == other[1:]


@given(st.lists(st.lists(events, max_size=20), max_size=4))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Event]]
) -> None:
    path = tmp_path_factory.mktemp("recording") / "r"
    write(path, *batches)
    recording = open_recording(path)
    written = [event for batch in batches for event in batch]
    for _time in range(2):
        found = list(recording.events)
        assert len(found) == len(written)
        assert all(map(close_enough, found, written))


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "r"
    batches = [[event(n) for n in range(start, start + 10)] for start in (0, 10, 20)]
    write(path, *batches, files={1: File("a", 1)})
    whole = path.read_bytes()
    lengths = set()
    for length in range(len(MAGIC), len(whole)):
        path.write_bytes(whole[:length])
        try:
            recording = open_recording(path)
        except OperationError as error:
            assert "header" in str(error)  # noqa: PT017
            continue
        found = list(recording.events)
        assert not recording.complete
        assert all(map(close_enough, found, map(event, range(len(found)))))
        assert recording.seconds == pytest.approx((len(found) - 1) / 1024 + 0.25 if found else 0)
        lengths.add(len(found))
    assert lengths == {0, 10, 20, 30}


def test_damage_ends_the_events(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, [event(1)])
    whole = bytearray(path.read_bytes())
    header = BLOCK.unpack_from(whole, len(MAGIC))
    whole[len(MAGIC) + 2 * BLOCK.size + header[1]] ^= 0xFF
    path.write_bytes(whole)
    assert list(open_recording(path).events) == []


@pytest.mark.parametrize("content", [b"", b"something else", MAGIC, MAGIC + b"H"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(OperationError):
        open_recording(tmp_path / "r")


def test_many_events_are_small_and_need_little_memory(tmp_path: Path) -> None:
    count = 20 * EVENTS_A_BLOCK
    path = tmp_path / "r"
    with path.open("wb") as stream:
        writer = RecordingWriter(stream, 0.0, {})
        for n in range(count):
            writer.add_packed(EVENT.pack(n * 50_000, n % 999, 0, 1e-5, 110_000, n % 3, 3, 2))
        writer.finish(1.0, {})
    assert path.stat().st_size < 12 * count
    tracemalloc.start()
    assert sum(1 for _event in open_recording(path).events) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
