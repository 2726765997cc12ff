"""Checksums: whether a replica still holds the bytes that were copied.

Each block of 128 KiB (the last one of a file may be shorter) has a digest, XXH3 with 64 bits; the
checksum of a file is the digest of its blocks' digests, so that a copy that arrives in any order
needs no second reading. XXH3 finds damage, not malice: who can write to a tier is its owner.

Measured (xxhash 4.1, Python 3.11, one core of a small virtual machine): 128 KiB take 2.5 to 4 us
and 1 MiB 20 us, some 50 GB/s in the cache; 100 bytes take 0.05 us. The GIL is released meanwhile:
a thread that counts during a hash of 512 MiB (42 ms) was never held up for more than 0.1 ms.
"""

from __future__ import annotations

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from monarchfs.types import Data

BLOCK_BYTES = 128 * 1024
DIGEST_BYTES = 8


def digests(data: Data) -> bytes:
    """One digest (8 bytes, big-endian) for each block of ``data``, which starts at a block."""
    view = memoryview(data).cast("B")
    blocks = range(0, len(view), BLOCK_BYTES)
    return b"".join([xxh3_64_digest(view[at : at + BLOCK_BYTES]) for at in blocks])


def combine(block_digests: Data) -> int:
    """The checksum of the file whose blocks have these digests, in order: 64 bits, unsigned."""
    return xxh3_64_intdigest(block_digests)


def checksum(data: Data) -> int:
    """The checksum of a file that holds ``data``."""
    return combine(digests(data))
