"""Datasets of image-like records in TFRecord files, as ImageNet is kept for training."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from bench.jobs.training import MODULUS

# ImageNet's mean: 138 GB of 1.28 million images.
RECORD_BYTES = 110_000
# Length and its CRC before the data, the data's CRC after them.
FRAME_BYTES = 16


class Shards(NamedTuple):
    """What a directory holds; ``checksum`` is what a job must find, as `bench.jobs.training` has
    it, ``payload_bytes`` are the records' without their frames."""

    root: Path
    files: int
    samples: int
    file_bytes: int
    payload_bytes: int
    checksum: int


def _masked(data: bytes) -> bytes:
    """TFRecord's CRC (tensorflow/core/lib/hash/crc32c.h): CRC-32C, rotated, plus a constant."""
    crc: int = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def generate(root: Path, size: int, shard_bytes: int, *, seed: int = 1) -> Shards:
    """Writes files of about ``shard_bytes`` with ``size`` bytes in all, or a little more."""
    rng = random.Random(seed)
    root.mkdir(parents=True)
    per_shard = max(1, shard_bytes // (RECORD_BYTES + FRAME_BYTES))
    length = struct.pack("<Q", RECORD_BYTES)
    header = length + _masked(length)
    files = samples = written = checksum = 0
    while written < size:
        with (root / f"train-{files:05d}.tfrecord").open("wb") as file:
            for _record in range(per_shard):
                data = rng.randbytes(RECORD_BYTES)
                checksum = (checksum + zlib.crc32(data)) % MODULUS
                written += file.write(b"".join((header, data, _masked(data))))
                samples += 1
        files += 1
    return Shards(root, files, samples, written, samples * RECORD_BYTES, checksum)
