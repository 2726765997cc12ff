"""The modes of open inodes, against the counters that the kernel keeps (fs/fuse/iomode.c)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.fuse.iomodes import CACHED, IoModes


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
