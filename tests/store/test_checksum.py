"""Checksums. They are on disk, so they never change (tests/formats)."""

from __future__ import annotations

import array
import os

import pytest
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from monarchfs.store.checksum import BLOCK_BYTES, checksum, combine, digests


def test_a_digest_for_each_block_and_one_of_all() -> None:
    data = os.urandom(2 * BLOCK_BYTES + 1)
    blocks = [data[:BLOCK_BYTES], data[BLOCK_BYTES:-1], data[-1:]]
    assert digests(data) == b"".join(xxh3_64_digest(block) for block in blocks)
    assert checksum(data) == xxh3_64_intdigest(digests(data))
    assert digests(data[: 2 * BLOCK_BYTES]) == digests(data)[:16]
    assert digests(data[BLOCK_BYTES:]) == digests(data)[8:]


def test_any_buffer() -> None:
    data = os.urandom(BLOCK_BYTES + 8)
    words = array.array("Q", data)
    assert checksum(bytearray(data)) == checksum(memoryview(data)) == checksum(data)
    assert checksum(memoryview(words)) == checksum(data)


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES - 2])
def test_every_byte_and_the_order_of_blocks_count(at: int) -> None:
    data = bytearray(os.urandom(3 * BLOCK_BYTES - 1))
    before = checksum(data)
    data[at] ^= 1
    assert checksum(data) != before
    assert combine(digests(data)[8:] + digests(data)[:8]) != checksum(data)
    assert checksum(bytes(5)) != checksum(bytes(6))
