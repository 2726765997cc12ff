"""What the kernel is told: names, from the table of the C part, and in FUSE_INIT (linux/fuse.h)."""

import ctypes
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.fuse import packing
from monarchfs.fuse.protocol import (
    CONGESTION_THRESHOLD,
    FUSE_INIT,
    IN_HEADER,
    MAX_BACKGROUND,
    MAX_PAGES,
    MAX_WRITE,
    InitFlag,
    InitReply,
    ProtocolError,
    amend_init_reply,
    build_init_reply,
    parse_init_reply,
    parse_init_request,
)
from monarchfs.fuse.session import hooks
from monarchfs.metadata.tree import Entry
from monarchfs.types import Node, SourceStat

ENTRY_BYTES = 128
# What Linux 6.18 sent on /dev/fuse: 104 bytes, minor 45, INIT_EXT and flags2 set.
LINUX_6_18 = bytes.fromhex(
    "680000001a0000000200000000000000000000000000000000000000000000000000000000000000"
    "070000002d00000000000200fbffff73fd050000" + "00" * 44
)

library = ctypes.CDLL(hooks.__file__)
library.names_enter.restype = ctypes.c_bool


def request(flags: int, *, unique: int = 2, max_readahead: int = 131072) -> bytes:
    body = struct.pack("=IIIII44x", 7, 31, max_readahead, flags & 0xFFFFFFFF, flags >> 32)
    header = IN_HEADER.pack(IN_HEADER.size + len(body), FUSE_INIT, unique, 0, 0, 0, 0, 0, 0)
    return header + body


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


def test_what_does_not_fit_is_not_answered() -> None:
    hooks.names_put(1, b"late", 100.0, False, node_of(5, mtime_ns=1 << 63))
    hooks.names_put(1, b"n" * 256, 100.0, False, node_of(5))
    assert answered(1, b"late") is None
    assert answered(1, b"n" * 256) is None
    packed = packing.entry(Entry(node_of(2**50, size=10**13), 1.5, 365 * 86_400.0))
    assert len(packed) == 40 + 88
    assert struct.unpack_from("=QQQQII", packed) == (2**50, 0, 1, 365 * 86_400, 500_000_000, 0)
    assert struct.unpack_from("=QQQqqqIIIIIIIIII", packed, 40) == (
        *(2**50, 10**13, 2**40),
        *(2**62 // 10**9, -1, 0, 2**62 % 10**9, 999_999_999, 5),
        *(0o100644, 2**32 - 1, 2**32 - 2, 3, 1, 4096, 0),
    )


KEEP = (
    *("4.18.0-305.el8.x86_64", "4.19.0-27-amd64", "6.9.0", "6.11.0-29-generic"),
    *("6.12.0-55.el10.x86_64", "6.12.9-arch1-1"),
)
DROP = (
    *("5.10.0-46-amd64", "6.1.0-50-amd64", "6.8.0-100-generic", "6.12.10", "6.12.118+deb13-amd64"),
    *("6.13-rc7", "6.18.44", "7.0"),
)


def test_which_kernels_are_to_keep_listings() -> None:
    assert not [release for release in KEEP if packing.drops_listings(release)]
    assert all(map(packing.drops_listings, DROP))


LIBFUSE_FLAGS = (
    InitFlag.ASYNC_READ
    | InitFlag.AUTO_INVAL_DATA
    | InitFlag.DO_READDIRPLUS
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.WRITEBACK_CACHE
    | InitFlag.EXPORT_SUPPORT
)


def reply(flags: int = LIBFUSE_FLAGS, *, unique: int = 2) -> bytes:
    return build_init_reply(
        InitReply(unique, 7, 38, 4096, InitFlag(flags), 12, 9, 131072, 0, 0, 0, 0)
    )


def test_the_amended_reply_for_a_real_kernel() -> None:
    amended = parse_init_reply(amend_init_reply(LINUX_6_18, reply(), posix_acl=False))
    flags = (
        InitFlag.ASYNC_READ
        | InitFlag.ASYNC_DIO
        | InitFlag.DO_READDIRPLUS
        | InitFlag.PARALLEL_DIROPS
        | InitFlag.MAX_PAGES
        | InitFlag.CACHE_SYMLINKS
        | InitFlag.INIT_EXT
        | InitFlag.DIRECT_IO_ALLOW_MMAP
        | InitFlag.HAS_RESEND
        | InitFlag.NO_EXPORT_SUPPORT
    )
    limits = (MAX_BACKGROUND, CONGESTION_THRESHOLD, MAX_WRITE)
    assert amended == InitReply(2, 7, 38, 128 << 10, flags, *limits, 1, MAX_PAGES, 0, 0)
    with_acl = parse_init_reply(amend_init_reply(LINUX_6_18, reply(), posix_acl=True))
    assert with_acl.flags == flags | InitFlag.POSIX_ACL


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_passthrough_is_asked_for_together_with_its_depth(depth: int) -> None:
    answered = reply(LIBFUSE_FLAGS | InitFlag.INIT_EXT | InitFlag.PASSTHROUGH)
    for asked, offered in ((LINUX_6_18, True), (request(InitFlag.INIT_EXT), False)):
        amended = parse_init_reply(
            amend_init_reply(asked, answered, posix_acl=False, stack_depth=depth)
        )
        wanted = depth if offered else 0
        assert (InitFlag.PASSTHROUGH in amended.flags) == bool(wanted)
        assert amended.max_stack_depth == wanted


@given(offered=st.integers(0, 2**64 - 1), answered=st.integers(0, 2**64 - 1), acl=st.booleans())
def test_nothing_is_set_that_was_not_offered(offered: int, answered: int, acl: bool) -> None:
    asked = request(offered)
    amended = parse_init_reply(amend_init_reply(asked, reply(answered), posix_acl=acl))
    assert amended.flags & ~parse_init_request(asked).flags == 0
    unwanted = InitFlag.AUTO_INVAL_DATA | InitFlag.WRITEBACK_CACHE | InitFlag.READDIRPLUS_AUTO
    assert amended.flags & (unwanted | InitFlag.EXPORT_SUPPORT) == 0
    assert bool(amended.max_pages) == (InitFlag.MAX_PAGES in amended.flags)


def test_an_old_kernels_short_request_has_no_upper_flags() -> None:
    body = struct.pack("=IIII", 7, 31, 65536, InitFlag.PARALLEL_DIROPS)
    short = IN_HEADER.pack(IN_HEADER.size + len(body), FUSE_INIT, 2, 0, 0, 0, 0, 0, 0) + body
    amended = parse_init_reply(amend_init_reply(short, reply(), posix_acl=True))
    assert amended.flags == InitFlag.PARALLEL_DIROPS
    assert (amended.max_readahead, amended.max_pages) == (65536, 0)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        pytest.param(b"", reply(), id="no request"),
        pytest.param(LINUX_6_18[:50], reply(), id="short request"),
        pytest.param(b"\x68\0\0\0\x03" + LINUX_6_18[5:], reply(), id="not FUSE_INIT"),
        pytest.param(LINUX_6_18, b"", id="no reply"),
        pytest.param(LINUX_6_18, reply()[:40], id="short reply"),
        pytest.param(LINUX_6_18, struct.pack("=IiQ", 16, -71, 2), id="refused"),
        pytest.param(LINUX_6_18, reply(unique=4), id="reply to another request"),
    ],
)
def test_nonsense_is_refused(asked: bytes, answered: bytes) -> None:
    with pytest.raises(ProtocolError):
        amend_init_reply(asked, answered, posix_acl=False)
