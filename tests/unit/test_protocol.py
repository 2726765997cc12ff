"""FUSE_INIT: the layouts against a real kernel's bytes, and what the amendment sets and clears."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from tests.support.fuse_init import LINUX_6_18, request

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


def test_a_real_request_is_understood() -> None:
    parsed = parse_init_request(LINUX_6_18)
    assert (parsed.unique, parsed.major, parsed.minor) == (2, 7, 45)
    assert parsed.max_readahead == 128 << 10
    wanted = InitFlag.PARALLEL_DIROPS | InitFlag.INIT_EXT | InitFlag.PASSTHROUGH
    assert parsed.flags & wanted == wanted


def test_a_reply_is_80_bytes_in_the_kernels_layout() -> None:
    raw = build_init_reply(
        InitReply(9, 7, 38, 1, InitFlag.INIT_EXT | InitFlag.PASSTHROUGH, 2, 3, 4, 5, 6, 7, 1)
    )
    assert len(raw) == 80
    assert struct.unpack_from("=IiQIIII", raw) == (80, 0, 9, 7, 38, 1, 1 << 30)
    assert struct.unpack_from("=HHIIHHII", raw, 32) == (2, 3, 4, 5, 6, 7, 1 << 5, 1)


replies = st.builds(
    InitReply,
    unique=st.integers(0, 2**64 - 1),
    major=st.just(7),
    minor=st.integers(0, 99),
    max_readahead=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 2**64 - 1).map(lambda bits: InitFlag(bits | InitFlag.INIT_EXT)),
    max_background=st.integers(0, 2**16 - 1),
    congestion_threshold=st.integers(0, 2**16 - 1),
    max_write=st.integers(0, 2**32 - 1),
    time_gran=st.integers(0, 2**32 - 1),
    max_pages=st.integers(0, 2**16 - 1),
    map_alignment=st.integers(0, 2**16 - 1),
    max_stack_depth=st.integers(0, 2),
)


@given(replies)
def test_replies_survive_a_round_trip(answer: InitReply) -> None:
    assert parse_init_reply(build_init_reply(answer)) == answer


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
