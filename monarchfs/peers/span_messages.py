"""The format of what nodes ask each other about large files.

A question names some spans, each of a file; the answer has a row for each, in their order.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

from monarchfs.peers.errors import PeerError
from monarchfs.peers.supply import is_path

MOST_SPANS = 16
"""The most spans in a question. The answer about each has some 4 KiB."""

_WANTED = struct.Struct("<16sIIIBH")
_PATH = re.compile(r"(/[a-z0-9.]+)*")
_HELD = struct.Struct("<?HI")


class WantedSpan(NamedTuple):
    """A span of a file that a node wants: the name of the file's replica; the part of the span that
    a reader will probably want soon, if any; the priority of the copy; the file's path below the
    source."""

    name: bytes
    span: int
    offset: int
    size: int
    priority: int
    path: bytes


class HeldSpan(NamedTuple):
    """What an owner has of a span. ``coming``: it is copying what it lacks. ``path``: the file's
    path for nginx. ``digests``: 8 bytes for each block of 128 KiB, zeros if it lacks the block;
    empty if it has no block."""

    coming: bool
    path: str = ""
    digests: bytes = b""


def encode_wanted(wanted: Sequence[WantedSpan]) -> bytes:
    """The question."""
    return b"".join(_WANTED.pack(*one[:5], len(one.path)) + one.path for one in wanted)


def decode_wanted(data: bytes) -> list[WantedSpan]:
    """Raises PeerError if it is no question."""
    wanted: list[WantedSpan] = []
    at = 0
    while at < len(data):
        if len(data) - at < _WANTED.size or len(wanted) == MOST_SPANS:
            raise PeerError("a question about spans is cut off, or too long")
        name, span, offset, size, priority, length = _WANTED.unpack_from(data, at)
        at += _WANTED.size
        path = data[at : at + length]
        if len(path) < length or not is_path(path):
            raise PeerError("a question about spans has a path that is none")
        wanted.append(WantedSpan(name, span, offset, size, priority, path))
        at += length
    return wanted


def encode_held(held: Sequence[HeldSpan]) -> bytes:
    """The answer."""
    rows = []
    for one in held:
        path = one.path.encode()
        rows.append(_HELD.pack(one.coming, len(path), len(one.digests)) + path + one.digests)
    return b"".join(rows)


def decode_held(data: bytes, count: int) -> list[HeldSpan]:
    """The answer to a question about ``count`` spans. Raises PeerError if it is none."""
    held: list[HeldSpan] = []
    at = 0
    try:
        for _ in range(count):
            coming, length, size = _HELD.unpack_from(data, at)
            at += _HELD.size
            path = data[at : at + length].decode("ascii")
            at += length
            held.append(HeldSpan(coming, path, data[at : at + size]))
            at += size
    except (struct.error, ValueError):
        raise PeerError("the answer about spans is none") from None
    # The path follows a host's name in a URL, and must not change the host.
    if at != len(data) or not all(_PATH.fullmatch(one.path) for one in held):
        raise PeerError("the answer about spans is none")
    return held
