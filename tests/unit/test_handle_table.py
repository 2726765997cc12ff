"""What outlives a worker: the table of open files, against a dictionary, and counts."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.fs.files import FileHandle
from monarchfs.fuse import handle_table
from monarchfs.fuse.handles import Handles
from monarchfs.fuse.passthrough import kernel_reads
from monarchfs.fuse.session import hooks
from monarchfs.metrics import Metrics
from monarchfs.metrics.persistent import PersistentCounts
from monarchfs.source.lanes import SourceCounters
from monarchfs.types import Lane


def view(table: int) -> handle_table.HandleTable:
    return handle_table.HandleTable(table, hooks)


@pytest.fixture
def table() -> Iterator[int]:
    fd = handle_table.make_table(4)
    yield fd
    os.close(fd)


class File:
    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.released = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class Inode:
    """The kernel's rule: what the first open is answered with, all are until the last release.
    ``backing_id`` goes with the last of them where it is ``going``."""

    backing_id: int = 0
    modes: list[int] = field(default_factory=list)
    going: bool = False

    @property
    def backed(self) -> bool:
        return any(self.modes)

    def open(self) -> int:
        self.modes.append(self.modes[0] if self.modes else self.backing_id)
        return self.modes[0]

    def close(self) -> None:
        self.modes.pop()
        if self.going and not self.modes:
            self.backing_id, self.going = 0, False

    def back(self, backing_id: int) -> bool:
        done = not self.backing_id
        self.backing_id = self.backing_id or backing_id
        return done

    def unback(self, at_last: bool) -> bool:
        if self.backed:
            self.going |= at_last
        else:
            self.backing_id = 0
        return not self.backed


STEPS = ["open", "close", "die", "back", "unback", "unback at last"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7)), max_size=80))
def test_against_a_dictionary(steps: list[tuple[str, int]]) -> None:
    """Also as the supervisor reads it, and where one worker goes on with what another has left."""
    fd = handle_table.make_table(4)
    inodes = {ino: Inode() for ino in range(1, 9)}
    try:
        slots, expected, given_out = view(fd), dict[int, handle_table.HandleSlot](), set[int]()
        for unique, (what, which) in enumerate(steps, 1):
            ino = which + 1
            if what == "open" and len(expected) == 4:
                with pytest.raises(OSError, match=os.strerror(errno.ENFILE)):
                    slots.add(ino, unique)
            elif what == "open":
                number, backing_id = slots.add(ino, unique)
                assert number
                assert number not in given_out
                assert backing_id == inodes[ino].open()
                given_out.add(number)
                expected[number] = handle_table.HandleSlot(number, ino, unique, backing_id)
            elif what == "close" and given_out:
                number = sorted(given_out)[which % len(given_out)]
                slot = expected.pop(number, None)
                assert slots.end_handle(number) == (None if slot is None else slot.ino)
                if slot is not None:
                    inodes[slot.ino].close()
            elif what == "die":
                slots.close()
                for number, inode in inodes.items():
                    hooks.inode_unback(number, False)
                    inode.backing_id, inode.going = max(inode.modes, default=0), False
                slots = view(fd)
            elif what == "back":
                assert hooks.inode_back(ino, unique) is inodes[ino].back(unique)
            elif what.startswith("unback"):
                at_last = what.endswith("last")
                assert hooks.inode_unback(ino, at_last) is inodes[ino].unback(at_last)
            for number, inode in inodes.items():
                assert hooks.resident_used(number) is bool(inode.modes)
                assert hooks.inode_decided(number) is bool(inode.modes or inode.backing_id)
            assert {slot.number: slot for slot in slots} == expected
            assert {slot.number: slot for slot in handle_table.open_slots(fd)} == expected
            assert handle_table.backing_ids(fd) == {slot.backing_id for slot in slots} - {0}
            assert len(slots) == len(expected)
            for number in given_out:
                known = expected.get(number)
                assert slots.ino(number) == (None if known is None else known.ino)
                assert slots.own(number) == (known is not None)
        slots.close()
    finally:
        for ino in inodes:
            hooks.inode_unback(ino, False)
        os.close(fd)


def test_an_open_that_is_carried_out_twice_is_one_handle(table: int) -> None:
    answer = view(table).add(7, 100)
    slots = view(table)
    assert slots.add(7, 100 | handle_table.RESENT) == answer
    assert slots.add(7, 102 | handle_table.RESENT) != answer
    assert slots.add(7, 100) != answer  # not a repetition: the kernel says so where it is one
    assert len(slots) == 3
    size = os.fstat(table).st_size
    for wrong in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(table, wrong)
    with pytest.raises(PermissionError):
        fcntl.fcntl(table, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_handle_that_was_taken_over_is_released_once(table: int) -> None:
    number, _backing_id = view(table).add(7, 100)
    passthrough: Any = SimpleNamespace(closed=lambda _: None)
    handles = Handles(view(table), passthrough)
    first, second = File(7), File(7)
    handles.take_over(number, cast(FileHandle, first))
    assert handles.add(cast(FileHandle, second), 100 | handle_table.RESENT) == (number, 0)
    assert first.released == 1
    assert cast(File, handles.pop(number)) is second
    assert handles.pop(number) is None
    assert len(handles.table) == 0
    assert handles.get(number) is None
    with pytest.raises(OSError, match="unknown handle"):
        handles.take_over(number, cast(FileHandle, first))
    assert first.released == 2


@pytest.mark.parametrize("free_opens", [True, False])
def test_auto_has_the_worker_read_many_small_files_whose_opens_are_free(free_opens: bool) -> None:
    for files, size in ((0, 0), (100, 100 << 30)):
        assert kernel_reads(files, size, free_opens=free_opens)
    assert kernel_reads(1_000_000, 110_000_000_000, free_opens=free_opens) is not free_opens


SIZE = 64 << 10


@pytest.fixture
def memory() -> Iterator[int]:
    fd = handle_table.make_memory("test-counts", SIZE)
    yield fd
    os.close(fd)


def counted() -> dict[str, object]:
    """Parts in which something of every kind was counted."""
    metrics, source = Metrics(), SourceCounters()
    metrics.local_opens = 3
    metrics.requests.read_local.observe(20_000)
    metrics.requests.read_local.observe(1 << 60)
    metrics.copy_failed(errno.EIO)
    metrics.copy_refused("no room")
    metrics.tier_failed("/tier", errno.ENOSPC)
    source.seconds = 1.5
    source.stuck = 7
    source.of(Lane.DEMAND, "read").operations = 5
    return {"mount": metrics, "source": source}


def metrics_of(parts: dict[str, object]) -> Metrics:
    return cast(Metrics, parts["mount"])


def fresh() -> dict[str, object]:
    metrics = Metrics()
    metrics.errors_of_tier("/tier")
    return {"mount": metrics, "source": SourceCounters()}


def restored(memory: int) -> dict[str, object]:
    parts = fresh()
    PersistentCounts(memory, parts).restore()
    return parts


def test_the_next_one_goes_on_from_what_was_saved(memory: int) -> None:
    before = counted()
    PersistentCounts(memory, before).save()
    after = restored(memory)
    cast(SourceCounters, before["source"]).stuck = 0  # what is so now, not what was counted
    assert repr(plain(after)) == repr(plain(before))
    PersistentCounts(memory, after).save()
    # Counted once, however many go on from it.
    assert repr(plain(restored(memory))) == repr(plain(before))


def plain(parts: dict[str, object]) -> object:
    """Parts as something that can be compared: histograms compare by identity."""

    def of(part: object) -> object:
        if isinstance(part, dict):
            return {str(key): of(value) for key, value in part.items()}
        names = getattr(part, "__dataclass_fields__", None) or getattr(part, "__slots__", None)
        return part if names is None else {name: of(getattr(part, name)) for name in names}

    return of(parts)


def test_one_killed_while_it_saves_leaves_what_was_saved_before(memory: int) -> None:
    parts = counted()
    kept = PersistentCounts(memory, parts)
    kept.save()
    saved = os.pread(memory, SIZE, 0)
    metrics_of(parts).local_opens = 4
    kept.save()
    # All of the second one but its last store.
    os.pwrite(memory, saved[:8], 0)
    assert metrics_of(restored(memory)).local_opens == 3
    parts = counted()
    for number in range(2000):
        metrics_of(parts).tier_failed(f"/tiers/{number}", errno.EIO)
    with pytest.raises(ValueError, match="too many"):
        PersistentCounts(memory, parts).save()


def put(memory: int, document: bytes, length: int | None = None) -> None:
    size = len(document) if length is None else length
    os.pwrite(memory, size.to_bytes(8, "little") + document, 8)
    os.pwrite(memory, (1).to_bytes(8, "little"), 0)


def test_what_makes_no_sense_is_refused(memory: int) -> None:
    for document in (b"nonsense", b"[1]", b"null", b"[" * 5000, b"\xff\xfe", b""):
        put(memory, document)
        parts = fresh()
        with pytest.raises(ValueError, match=r"."):
            PersistentCounts(memory, parts).restore()
        assert repr(plain(parts)) == repr(plain(fresh()))
    put(memory, b"{}", 1 << 63)
    with pytest.raises(ValueError, match="too long"):
        restored(memory)


def test_what_another_release_has_otherwise_is_passed_over(memory: int) -> None:
    other = {
        "mount": {
            "local_opens": 2,
            "requests": {"open_local": {"counts": [1, 2], "total_ns": 5}, "unknown": {}},
            "source_opens": "many",
            "relayed_bytes": True,
            "copy_errors": {"by_name": {"EIO": 1, "EOTHER": 9}},
            "of_tomorrow": 4,
        },
        "unknown": {"x": 1},
        "source": 5,
    }
    put(memory, json.dumps(other).encode())
    expected = fresh()
    metrics_of(expected).local_opens = 2
    metrics_of(expected).copy_errors.by_name["EIO"] = 1
    assert repr(plain(restored(memory))) == repr(plain(expected))
