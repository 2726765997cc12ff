"""Where Lustre has the bytes of a file: its layout, from the attribute ``lustre.lov``. Pure.

Formats are those of lustre/include/uapi/linux/lustre/lustre_idl.h: lov_mds_md_v1 and _v3, and
lov_comp_md_v1 for composite files (progressive layouts, mirrors). Little-endian, as on the wire.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

ATTRIBUTE = b"lustre.lov"

_V1, _V3, _COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD60BD0
_RELEASED = 0x80000000
"""LOV_PATTERN_F_RELEASED: an archive has the bytes, the storage targets have none."""
_STALE, _INIT = 0x1, 0x10
"""Of a component: its bytes are old (of a mirror); it has objects."""

_MAGIC = struct.Struct("<I")
_HEAD = struct.Struct("<II16xIHH")
"""magic, pattern, (object id), stripe size, stripe count, generation."""
_POOL_BYTES = 16
_OBJECT = struct.Struct("<16x4xI")
"""(object id, generation), number of the storage target."""
_COMPOSITE_HEAD = struct.Struct("<III HHH 14x")
"""magic, size, generation, flags, components, mirrors."""
_COMPONENT = struct.Struct("<IIQQII16x")
"""id, flags, first byte, end (all ones: none), where its layout is, and how long that is."""


class Part(NamedTuple):
    """The bytes [start, end) of a file lie on these storage targets in turn, ``stripe_bytes`` on
    each."""

    start: int
    end: int
    stripe_bytes: int
    targets: tuple[int, ...]


class Layout(NamedTuple):
    """``released``: reading has the file brought back from an archive, which may be a tape."""

    released: bool
    parts: tuple[Part, ...]

    @property
    def targets(self) -> frozenset[int]:
        """All that have bytes of the file."""
        return frozenset(target for part in self.parts for target in part.targets)

    def target(self, offset: int) -> int | None:
        """The storage target that has a byte; None where none is known to."""
        for part in self.parts:
            if part.start <= offset < part.end:
                # Stripes are counted from the start of the file (lov_offset.c).
                return part.targets[offset // part.stripe_bytes % len(part.targets)]
        return None

    def span(self, offset: int, most: int) -> int:
        """How many bytes to read in one call at ``offset``, at most ``most``: no more than lie in
        one piece on one storage target."""
        for part in self.parts:
            if part.start <= offset < part.end and len(part.targets) > 1:
                return min(most, part.stripe_bytes)
        return most


def parse(value: bytes) -> Layout | None:
    """The layout in the attribute's value; None for one of a kind that is not known here (a file
    that lies on a metadata server altogether, or elsewhere), or that is not whole."""
    try:
        (magic,) = _MAGIC.unpack_from(value)
        if magic == _COMPOSITE:
            return _composite(value)
        found = _plain(value, 0, (1 << 64) - 1)
    except struct.error:
        return None
    if found is None:
        return None
    released, part = found
    return Layout(released, (part,) if part is not None else ())


def _plain(value: bytes, start: int, end: int) -> tuple[bool, Part | None] | None:
    magic, pattern, stripe_bytes, count, _generation = _HEAD.unpack_from(value)
    if magic not in (_V1, _V3):
        return None
    if pattern & _RELEASED:
        return True, None
    at = _HEAD.size + (_POOL_BYTES if magic == _V3 else 0)
    targets = tuple(
        _OBJECT.unpack_from(value, at + number * _OBJECT.size)[0] for number in range(count)
    )
    return False, Part(start, end, stripe_bytes, targets) if targets and stripe_bytes else None


def _composite(value: bytes) -> Layout:
    count = _COMPOSITE_HEAD.unpack_from(value)[4]
    released, parts = [], []
    for number in range(count):
        _id, flags, start, end, offset, size = _COMPONENT.unpack_from(
            value, _COMPOSITE_HEAD.size + number * _COMPONENT.size
        )
        if offset + size > len(value):
            raise struct.error("a component is not whole")
        found = _plain(value[offset : offset + size], start, end)
        if found is None:
            released.append(False)
            continue
        released.append(found[0])
        if found[1] is not None and flags & _INIT and not flags & _STALE:
            parts.append(found[1])
    # As mdt_hsm_is_released in lustre/mdt/mdt_handler.c: all of it or nothing.
    return Layout(bool(released) and all(released), tuple(parts))
