"""Bytes of Lustre layouts, as lustre_idl.h lays them out."""

import struct

MIB = 1 << 20


RELEASED = 0x80000001


def plain(
    targets: list[int], stripe: int = MIB, *, pool: bytes | None = None, pattern: int = 1
) -> bytes:
    magic = 0x0BD10BD0 if pool is None else 0x0BD30BD0
    value = struct.pack("<II", magic, pattern) + b"object id: 16 by"
    value += struct.pack("<IHH", stripe, len(targets), 1)
    if pool is not None:
        value += pool.ljust(16, b"\0")
    for target in targets:
        value += b"object id: 16 by" + struct.pack("<II", 0, target)
    return value
