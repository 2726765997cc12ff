"""What placement is told, and what it answers. Sizes are bytes; ``tier`` is a tier's
number, ``ino`` the mount's number of one version of a file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from monarchfs.types import Space

# Events: the tiers.


@dataclass(frozen=True, slots=True)
class TierSeen:
    """A tier's capacity and the room on its file system, as just read.

    A tier takes nothing before the first; sent again from time to time: room that others (or
    dropped replicas) gave back counts from then on. ``written_bytes`` is what the copies in
    progress on this tier had written before ``space`` was read; 0 is safe but wasteful, because
    those bytes are then missing twice: as no longer free, and as still reserved. Nothing may be
    reported as stored between the reading of ``space`` and this event.
    """

    tier: int
    capacity_bytes: int
    space: Space
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The replicas that the tier held when it was mounted, in place of what was known of it.

    Sent before any copy to this tier starts.
    """

    tier: int
    files: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class TierLost:
    """The tier cannot be used: nothing is placed there. What it holds stays counted."""

    tier: int
    reason: str


@dataclass(frozen=True, slots=True)
class TierBack:
    """The tier can be used again."""

    tier: int


# Events: files.


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file that has no replica should get one. Answered by ``Place`` or ``Refuse``."""

    ino: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """A partial replica in progress wants to grow. Answered by ``Grant`` or ``Refuse``."""

    ino: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The copy is complete: it occupies ``allocated_bytes``, and its reservation ends."""

    ino: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A partial copy is put to rest: it occupies ``allocated_bytes``, its reservation ends."""

    ino: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A partial replica at rest, of ``allocated_bytes``, goes on being filled."""

    ino: int
    tier: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The copy in progress was given up and removed, also what it had before it was resumed.

    Of an ``ino`` that has no copy in progress, it passes: clean-up paths may cross.
    """

    ino: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A replica of ``allocated_bytes`` was removed: one at rest, or what a copy resumed from."""

    ino: int
    tier: int
    allocated_bytes: int


Event = (
    TierSeen
    | Loaded
    | TierLost
    | TierBack
    | Wanted
    | RoomWanted
    | Stored
    | Kept
    | Resumed
    | Abandoned
    | Dropped
)

# Actions.


class RefusalReason(Enum):
    """Why a file gets no replica, or a partial one no more room (for users too)."""

    NO_ROOM = "no room"
    """No tier has that many bytes."""
    NO_INODES = "no inodes"
    """There are bytes, but the tier's file system has no inodes to spare."""
    NO_TIER = "no tier"
    """No tier is usable: all are lost or were never seen. Of a partial replica: its own is."""


@dataclass(frozen=True, slots=True)
class Place:
    """Copy the file to this tier: all of it (``reserved_bytes`` are set aside), or only parts,
    each with room asked for by ``RoomWanted``."""

    ino: int
    tier: int
    reserved_bytes: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """No. ``missing_bytes`` more in one tier would have been enough (0: bytes are not what is
    missing)."""

    ino: int
    reason: RefusalReason
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The partial replica may grow by ``size_bytes``, as asked for."""

    ino: int
    size_bytes: int


Action = Place | Refuse | Grant
