"""FUSE_INIT requests: a real one, and made ones."""

from __future__ import annotations

import struct

from monarchfs.fuse.protocol import FUSE_INIT
from tests.support.fake_worker import IN_HEADER

# What Linux 6.18 sent on /dev/fuse: 104 bytes, minor 45, INIT_EXT and flags2 set.
LINUX_6_18 = bytes.fromhex(
    "680000001a0000000200000000000000000000000000000000000000000000000000000000000000"
    "070000002d00000000000200fbffff73fd050000" + "00" * 44
)


def request(flags: int, *, unique: int = 2, max_readahead: int = 131072) -> bytes:
    body = struct.pack("=IIIII44x", 7, 31, max_readahead, flags & 0xFFFFFFFF, flags >> 32)
    header = IN_HEADER.pack(IN_HEADER.size + len(body), FUSE_INIT, unique, 0, 0, 0, 0, 0, 0)
    return header + body
