"""The table of names that the C part answers from."""

from __future__ import annotations

import ctypes
import math
import struct
import time

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from monarchfs.fuse import fast_path
from monarchfs.fuse.session import hooks
from monarchfs.metadata.freshness import FOREVER_SECONDS
from monarchfs.metadata.tree import Entry
from monarchfs.types import Node, SourceStat

PARENTS = st.integers(1, 2)
NAMES = st.sampled_from([b"a", b"b", b"\xff", b"n" * 255])
INOS = st.integers(10, 13)
SECONDS = st.sampled_from([0.0, 1e-4, 364 * 86_400.0, FOREVER_SECONDS])
FOREVER = (math.inf, math.inf)
ENTRY_BYTES = 128

library = ctypes.CDLL(hooks.__file__)
library.names_enter.restype = ctypes.c_bool


def answered(parent: int, name: bytes) -> bytes | None:
    """The answer to a look-up."""
    out = ctypes.create_string_buffer(ENTRY_BYTES)
    number, length = ctypes.c_uint64(parent), ctypes.c_size_t(len(name))
    if not library.names_enter(number, name, length, out):
        return None
    library.names_leave()
    return out.raw


def node_of(ino: int, **other: int) -> Node:
    whole = {
        "device": 0, "ino": 9, "size": ino * 7, "mtime_ns": -1, "ctime_ns": 5, "atime_ns": 2**62,
        "mode": 0o100644, "nlink": 2**32 - 1, "uid": 2**32 - 2, "gid": 3, "rdev": 2**33 + 1,
        "blocks": 2**40, "blksize": 4096,
    } | other  # fmt: skip
    return Node(ino, SourceStat(**whole), 1, b"elsewhere", 0, False, b"target")


class TableMachine(RuleBasedStateMachine):
    """The table answers what a dictionary would, for as long as it may. tests/c/names.c has names
    that stand for one file, and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        hooks.names_forget_all()
        self.known: dict[tuple[int, bytes], tuple[int, float, float]] = {}
        # While the oldest one stays, no room is used again, for which others would have to go.
        hooks.names_put(3, b"the oldest", FOREVER_SECONDS, node_of(9))

    @rule(parent=PARENTS, name=NAMES, ino=INOS, seconds=SECONDS)
    def put(self, parent: int, name: bytes, ino: int, seconds: float) -> None:
        before = time.monotonic()
        hooks.names_put(parent, name, seconds, node_of(ino))
        times = (before + seconds, time.monotonic() + seconds)
        self.known[parent, name] = (ino, *(FOREVER if seconds == FOREVER_SECONDS else times))

    @rule(parent=PARENTS, name=NAMES)
    def forget(self, parent: int, name: bytes) -> None:
        hooks.names_forget(parent, name)
        self.known.pop((parent, name), None)

    @rule(parent=PARENTS, name=NAMES)
    def look_up(self, parent: int, name: bytes) -> None:
        ino, least, most = self.known.get((parent, name), (0, 0.0, 0.0))
        before = time.monotonic()
        answer = answered(parent, name)
        after = time.monotonic()
        if answer is None:
            assert after >= least
            return
        assert before <= most
        number, _, seconds, _, rest_ns, _ = struct.unpack_from("=QQQQII", answer)
        assert number == ino
        if least == math.inf:
            assert (seconds, rest_ns) == (FOREVER_SECONDS, 0)
        else:
            assert least - after <= seconds + rest_ns / 1e9 <= most - before + 1e-6
        assert answer[40:] == fast_path._entry(Entry(node_of(ino), 0.0, 0.0))[40:]

    def teardown(self) -> None:
        hooks.names_forget_all()


TestTable = TableMachine.TestCase


def test_what_does_not_fit_is_not_answered() -> None:
    hooks.names_put(1, b"late", 100.0, node_of(5, mtime_ns=1 << 63))
    hooks.names_put(1, b"n" * 256, 100.0, node_of(5))
    assert answered(1, b"late") is None
    assert answered(1, b"n" * 256) is None
