"""Of very many files, a part by the hash of their numbers: the same one in each epoch."""

from __future__ import annotations

_SPREAD = 0x9E3779B97F4A7C15


def hashed(number: int) -> int:
    return number * _SPREAD >> 24 & 0xFFFFFFFF


def one_of(files: int, most: int) -> int:
    """A power of two: of so many files one is looked at, so that at most ``most`` are."""
    return 1 << max(0, (files - 1) // most).bit_length()
