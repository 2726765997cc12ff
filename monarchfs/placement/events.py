"""What placement is told, and what it answers. Sizes are bytes; ``tier`` is a tier's
number, ``ino`` the mount's number of one version of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from monarchfs.types import Space


class Event:
    """What placement is told."""

    __slots__ = ()


# Events: the tiers.


@dataclass(frozen=True, slots=True)
class TierSeen(Event):
    """A tier's capacity and the room on its file system, as just read.

    A tier takes nothing before the first; sent again from time to time: room that others gave back
    counts from then on. ``written_bytes`` is what the copies (and moves) in progress on this tier
    had written before ``space`` was read; to say too little is safe but wasteful, because those
    bytes are then missing twice: as no longer free, and as still reserved. Nothing may be reported
    as stored or evicted between the reading of ``space`` and this event. A file that was unlinked
    and is not reported yet counts as free twice, until the next of these events.

    Where the promises of capacity and of room for others do not hold any more, it is answered by
    ``Evict``; with ``demote``, while little is missing, by ``Move`` to a slower tier where there is
    room.
    """

    tier: int
    capacity_bytes: int
    space: Space
    written_bytes: int = 0
    demote: bool = False


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """The replicas that the tier held when it was mounted, in place of what was known of it: those
    with a record, in all states. What is leaving stays leaving.

    Sent while no copy to this tier, and no move from or to it, is in progress.
    """

    tier: int
    files: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class TierLost(Event):
    """The tier cannot be used: nothing is placed there and nothing evicted. What it holds, and what
    is leaving it, stays counted."""

    tier: int
    reason: str


@dataclass(frozen=True, slots=True)
class TierBack(Event):
    """The tier can be used again."""

    tier: int


# Events: files.


@dataclass(frozen=True, slots=True)
class Wanted(Event):
    """A file that has no replica should get one. Answered by ``Evict``..., ``Place``, or by
    ``Refuse``. ``evicts``: others may go for it (somebody opened it, or asked for it)."""

    ino: int
    size_bytes: int
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class WantedEach(Event):
    """``Wanted`` of each (number, size in bytes). Answered by ``Evict``... and a ``Place`` for each
    of the first of them, up to one that has no room, nor gets any where room is made for all of the
    others at once: each of the rest is to be asked for by itself."""

    files: Sequence[tuple[int, int]]
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class RoomWanted(Event):
    """A partial replica in progress wants to grow. Answered by ``Evict``..., ``Grant``, or by
    ``Refuse``."""

    ino: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stored(Event):
    """Copies are complete: each (number, bytes) occupies so many, and its reservation ends."""

    files: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Resized(Event):
    """A replica at rest, not ``busy``, occupies ``more_bytes`` more than was reported (negative:
    fewer)."""

    ino: int
    tier: int
    more_bytes: int


@dataclass(frozen=True, slots=True)
class Suspended(Event):
    """A partial copy is put to rest: it occupies ``allocated_bytes``, its reservation ends."""

    ino: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A partial replica at rest, of ``allocated_bytes``, goes on being filled; ``evicts`` as in
    ``Wanted``. Not one that is being moved: that must have failed before."""

    ino: int
    tier: int
    allocated_bytes: int
    evicts: bool = False


@dataclass(frozen=True, slots=True)
class Abandoned(Event):
    """The copy in progress was given up and removed, also what it had before it was resumed.

    Of an ``ino`` that has no copy in progress, it passes: clean-up paths may cross.
    """

    ino: int


@dataclass(frozen=True, slots=True)
class Dropped(Event):
    """The record of a replica of ``allocated_bytes`` is gone, and its file about to be removed: of
    one at rest, or of what a copy resumed from. Ended by ``Evicted`` or ``EvictionFailed``."""

    ino: int
    tier: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """The file of an evicted, dropped or moved replica is removed.

    ``tier`` matters only where files of the inode are leaving several tiers; without it the one
    that began to leave first is meant.
    """

    ino: int
    tier: int | None = None


@dataclass(frozen=True, slots=True)
class EvictionFailed(Event):
    """It could not be removed, or its record could not: it stays, and counts as a replica."""

    ino: int
    tier: int | None = None


@dataclass(frozen=True, slots=True)
class Known(Event):
    """The tier has a replica that an earlier mount left. Without it the policy hears of that
    replica when it is accessed. May come at any time, also late."""

    ino: int
    tier: int


@dataclass(frozen=True, slots=True)
class Accessed(Event):
    """A replica was opened. Said of every one where the policy tracks accesses, else at least of
    complete ones outside the fastest tier. Answered by nothing, or ``Evict``, ``Move``."""

    ino: int
    tier: int


@dataclass(frozen=True, slots=True)
class Moved(Event):
    """The replica lies in the tier where it was to go, and its record says so. It occupies
    ``allocated_bytes`` there; the file in the old tier is about to be removed, which ``Evicted`` or
    ``EvictionFailed`` ends. May be answered by the ``Move`` of another one, for which it made room.
    """

    ino: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class MoveFailed(Event):
    """The replica stays where it was (or was dropped); what was written elsewhere is removed. May
    be answered by ``Evict``."""

    ino: int


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
    each with room asked for by ``RoomWanted``.

    What is leaving the tier counts as room: nothing may be written, and no file made, before
    enough of it is gone. The same file may be among it.
    """

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


class EvictionReason(Enum):
    """Why a replica is evicted (for users too)."""

    OUTDATED = "outdated"
    """The source does not have that version any more, or nobody knows whose it is."""
    POLICY = "evicted for another file"
    PRESSURE = "evicted because its tier has less room"


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop the record and remove the file, which counts as leaving from now on. ``Dropped`` is not
    reported; ``Evicted`` or ``EvictionFailed`` ends it."""

    ino: int
    tier: int
    allocated_bytes: int
    reason: EvictionReason


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the replica from ``tier`` to the tier ``to``, where ``reserved_bytes`` are set aside,
    then change its record. ``Moved`` or ``MoveFailed`` ends it.

    Readers keep using it meanwhile; it is not evicted. It is to fail where the file may come to
    need more than ``reserved_bytes`` (its own file system compresses).
    """

    ino: int
    tier: int
    to: int
    reserved_bytes: int


Action = Place | Refuse | Grant | Evict | Move
