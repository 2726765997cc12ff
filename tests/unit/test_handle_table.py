"""What is open: the table of files, against a dictionary and across the death of its user; and how
the kernel reads them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.fuse.datapath import ResidentReplicas, kernel_reads
from monarchfs.fuse.handle_table import (
    HEADER_BYTES,
    RESENT,
    HandleSlot,
    HandleTable,
    backing_ids,
    make_table,
    open_slots,
)
from monarchfs.fuse.handles import Handles
from monarchfs.fuse.iomodes import CACHED, IoModes
from monarchfs.fuse.session import hooks
from monarchfs.types import OperationError


def view(table: int) -> HandleTable:
    return HandleTable(table, hooks)


@pytest.fixture
def table() -> Iterator[int]:
    fd = make_table(4)
    yield fd
    os.close(fd)


class File:
    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.released = 0

    def release(self) -> None:
        self.released += 1


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "die"]), st.integers(0, 7))))
def test_against_a_dictionary(steps: list[tuple[str, int]]) -> None:
    """Also as the supervisor reads it, and where one worker goes on with what another has left."""
    fd = make_table(4)
    try:
        slots, expected, given_out = view(fd), dict[int, HandleSlot](), set[int]()
        for unique, (what, which) in enumerate(steps, 1):
            if what == "open" and len(expected) == 4:
                with pytest.raises(OSError, match=os.strerror(errno.ENFILE)):
                    slots.add(which + 1, unique)
            elif what == "open":
                number = slots.add(which + 1, unique, which)
                assert number
                assert number not in given_out
                given_out.add(number)
                expected[number] = HandleSlot(number, which + 1, unique, which)
            elif what == "close" and given_out:
                number = sorted(given_out)[which % len(given_out)]
                slot = expected.pop(number, None)
                assert slots.end(number) == (None if slot is None else slot.ino)
            elif what == "die":
                slots.close()
                slots = view(fd)
            assert {slot.number: slot for slot in slots} == expected
            assert {slot.number: slot for slot in open_slots(fd)} == expected
            assert backing_ids(fd) == {slot.backing_id for slot in slots} - {0}
            assert len(slots) == len(expected)
            for number in given_out:
                known = expected.get(number)
                assert slots.ino(number) == (None if known is None else known.ino)
                assert slots.own(number) == (known is not None)
        slots.close()
    finally:
        os.close(fd)


def test_an_open_that_is_carried_out_twice_is_one_handle(table: int) -> None:
    number = view(table).add(7, 100)
    slots = view(table)
    assert slots.add(7, 100 | RESENT) == number
    assert slots.add(7, 102 | RESENT) != number
    assert slots.add(7, 100) != number  # not a repetition: the kernel says so where it is one
    assert len(slots) == 3


def test_a_handle_that_was_taken_over_is_released_once(table: int) -> None:
    number = view(table).add(7, 100)
    handles: Handles[File] = Handles(view(table))
    first, second = File(7), File(7)
    handles.take_over(number, first)
    assert handles.add(second, 100 | RESENT) == number
    assert first.released == 1
    assert handles.pop(number) is second
    assert handles.pop(number) is None
    assert len(handles.table) == 0
    assert handles.get(number) is None
    with pytest.raises(OSError, match="unknown handle"):
        handles.take_over(number, first)
    assert first.released == 2


def test_a_worker_killed_in_the_middle_of_an_open(table: int) -> None:
    slots = view(table)
    slots.add(7, 100)
    os.pwrite(table, bytes(8), HEADER_BYTES)  # the inode number is what is written last
    assert list(view(table)) == []
    assert view(table).add(8, 102)


def test_its_memory_cannot_shrink_under_its_users(table: int) -> None:
    size = os.fstat(table).st_size
    for wrong in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(table, wrong)
    with pytest.raises(PermissionError):
        fcntl.fcntl(table, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("at", [0, 8, 12])
def test_what_is_no_table(table: int, at: int) -> None:
    os.pwrite(table, b"\xff" * 4, at)
    with pytest.raises(OperationError, match="not a table of open files of this release"):
        view(table)


def test_what_is_open_is_counted_by_inode(table: int) -> None:
    """Whoever opened it: its replica is not to be evicted."""
    slots = view(table)
    numbers = [slots.add(70, 100), slots.add(70, 102), slots.add(2**40, 104)]
    assert slots.add(70, 100 | RESENT) == numbers[0]
    slots.close()
    assert not hooks.resident_used(70)
    slots = view(table)
    assert hooks.resident_used(70)
    assert hooks.resident_used(2**40)
    assert not hooks.resident_retire(70)
    for number in numbers:
        slots.end(number)
        slots.end(number)
    assert not hooks.resident_used(70)
    assert not hooks.resident_used(2**40)
    assert hooks.resident_retire(70)
    slots.close()


# The modes of open inodes, against the counters that the kernel keeps (fs/fuse/iomode.c).


class Inode:
    """fuse_inode: ``cached`` counts opens through the page cache; ``backing`` is the file that is
    read instead, with its opens."""

    def __init__(self) -> None:
        self.cached = 0
        self.passed = 0
        self.backing = 0

    def may_open(self, mode: int) -> bool:
        if mode == CACHED:
            return not self.backing  # fuse_file_io_open
        if self.cached:
            return False  # fuse_inode_uncached_io_start: iocachectr > 0
        return self.backing in (0, mode)

    def open(self, mode: int) -> None:
        if mode == CACHED:
            self.cached += 1
        else:
            self.passed, self.backing = self.passed + 1, mode

    def release(self, mode: int) -> None:
        if mode == CACHED:
            self.cached -= 1
        else:
            self.passed -= 1
            self.backing = self.backing if self.passed else 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 3))))
def test_what_the_kernel_accepts_is_what_is_known(steps: list[tuple[bool, int, int]]) -> None:
    modes, inodes, opens = IoModes(), {n: Inode() for n in (1, 2, 3)}, list[tuple[int, int]]()
    for opening, ino, mode in steps:
        inode = inodes[ino]
        known = modes.get(ino)
        assert inode.may_open(mode) == (known in (None, mode))
        if opening and inode.may_open(mode):
            inode.open(mode)
            first = modes.opened(ino, mode)
            assert first == (known is None)
            opens.append((ino, mode))
        elif opening:
            with pytest.raises(ValueError, match="is open in mode"):
                modes.opened(ino, mode)
        elif opens:
            ino, mode = opens.pop(mode % len(opens))
            inodes[ino].release(mode)
            left = any(one == ino for one, _mode in opens)
            assert modes.closed(ino) == (None if left else mode)
        assert len(modes) == len({ino for ino, _mode in opens})
    with pytest.raises(KeyError):
        modes.closed(4)


MANY_SMALL = ResidentReplicas(1_000_000, 110_000_000_000)


@pytest.mark.parametrize("free_opens", [True, False])
def test_auto_has_the_worker_read_many_small_files_whose_opens_are_free(free_opens: bool) -> None:
    for replicas in (ResidentReplicas(0, 0), ResidentReplicas(100, 100 << 30)):
        assert kernel_reads(replicas, free_opens=free_opens)
    assert kernel_reads(MANY_SMALL, free_opens=free_opens) is not free_opens
