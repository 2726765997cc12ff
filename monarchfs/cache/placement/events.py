"""The events that placement gets, and the actions that it answers with. Sizes are bytes; ``tier``
is a tier's number, ``ino`` the mount's number of one version of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from monarchfs.types import Space


class PlacementEvent:
    """Something that placement has to know."""

    __slots__ = ()


class Owner(Enum):
    """Who owns a file, where nodes share and do not all keep everything: what goes for it depends
    on that."""

    NOBODY = "nobody"
    """This node keeps what it can, whoever owns it."""
    THIS_NODE = "this node"
    """Replicas of files that other nodes own go for it, under every policy."""
    OTHER_NODE = "other node"
    """No replica of a file that this node owns goes for it."""


# Events: the tiers.


@dataclass(frozen=True, slots=True)
class TierSeen(PlacementEvent):
    """A tier's capacity and the room on its file system, as just read.

    A tier takes nothing before the first of these events. They are sent again from time to time, so
    that room which others freed counts. ``written_bytes`` is what the copies and moves in progress
    on this tier had written before ``space`` was read. To report too little is safe but wasteful:
    those bytes are then counted twice, as used in the file system and as still reserved. Nothing
    may be reported as stored or evicted between reading ``space`` and this event. A file that was
    unlinked and is not reported yet counts as free twice, until the next of these events.

    If the tier holds more than its capacity, or leaves others less than their room, the answer is
    ``Evict``. With ``demote``, and if little has to go, it is ``Move`` to a slower tier with room.
    """

    tier: int
    capacity_bytes: int
    space: Space
    written_bytes: int = 0
    demote: bool = False


@dataclass(frozen=True, slots=True)
class Loaded(PlacementEvent):
    """The replicas that the tier holds: those with a record, in all states, and those that were
    not ``Dropped`` when they lost it. This replaces what was known of the tier, except for files
    that are leaving.

    Sent only while no copy to this tier, and no move from or to it, is in progress.
    """

    tier: int
    files: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class TierLost(PlacementEvent):
    """The tier cannot be used: nothing is placed there and nothing evicted. Its replicas, and files
    that are leaving it, stay counted."""

    tier: int
    reason: str


@dataclass(frozen=True, slots=True)
class TierBack(PlacementEvent):
    """The tier can be used again."""

    tier: int


# Events: files.


@dataclass(frozen=True, slots=True)
class Wanted(PlacementEvent):
    """A file without a replica should get one. Answered by ``Evict``..., ``Place``, or by
    ``Refuse``. ``evicts``: other replicas may be evicted for it (somebody opened it, or asked for
    it)."""

    ino: int
    size_bytes: int
    evicts: bool = False
    owner: Owner = Owner.NOBODY


@dataclass(frozen=True, slots=True)
class WantedEach(PlacementEvent):
    """``Wanted`` for each (number, size in bytes). Answered by ``Evict``... and a ``Place`` for
    each of the first files, up to one for which there is no room and none can be made, together
    with the files after it. The caller asks for each of the others by itself."""

    files: Sequence[tuple[int, int]]
    evicts: bool = False
    owner: Owner = Owner.NOBODY


@dataclass(frozen=True, slots=True)
class RoomWanted(PlacementEvent):
    """A partial replica in progress wants to grow. Answered by ``Evict``..., ``Grant``, or by
    ``Refuse``."""

    ino: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stored(PlacementEvent):
    """Copies are complete, or suspended: the replica of each (number, bytes), whole or partial,
    occupies that many bytes. Its reservation ends."""

    files: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Resized(PlacementEvent):
    """A replica at rest, not ``busy``, occupies ``more_bytes`` more than was reported (negative:
    fewer)."""

    ino: int
    tier: int
    more_bytes: int


@dataclass(frozen=True, slots=True)
class Resumed(PlacementEvent):
    """A suspended copy goes on; its partial replica has ``allocated_bytes``. The rest as in
    ``Wanted``. If the replica is being moved, the move must have failed before."""

    ino: int
    tier: int
    allocated_bytes: int
    evicts: bool = False
    owner: Owner = Owner.NOBODY


@dataclass(frozen=True, slots=True)
class Abandoned(PlacementEvent):
    """The copy in progress was given up and removed, with what it had before it was resumed.

    Ignored if ``ino`` has no copy in progress: clean-up paths may cross.
    """

    ino: int


@dataclass(frozen=True, slots=True)
class Dropped(PlacementEvent):
    """The record of a replica of ``allocated_bytes`` is gone, and its file is about to be removed.
    The replica was at rest, or a copy resumed from it. Ended by ``Evicted`` or
    ``EvictionFailed``."""

    ino: int
    tier: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Evicted(PlacementEvent):
    """The file of an evicted, dropped or moved replica is removed."""

    ino: int
    tier: int


@dataclass(frozen=True, slots=True)
class EvictionFailed(PlacementEvent):
    """The file or its record could not be removed: it stays, and counts as a replica."""

    ino: int
    tier: int


@dataclass(frozen=True, slots=True)
class Known(PlacementEvent):
    """The tier has a replica that an earlier mount left. Without this event the policy learns of
    the replica when it is accessed. May come at any time."""

    ino: int
    tier: int


@dataclass(frozen=True, slots=True)
class Accessed(PlacementEvent):
    """A replica was opened, or (``tier`` is None) a file without a complete one, which comes before
    its copy is asked for. Sent for every open if the policy tracks accesses, else at least for
    complete replicas outside the fastest tier. Answered by nothing, or by ``Evict``, ``Move``."""

    ino: int
    tier: int | None


@dataclass(frozen=True, slots=True)
class Weighed(PlacementEvent):
    """Users said how much files (number, weight) weigh, for a policy that goes by it. ``replace``:
    what was said of others is void."""

    weights: Sequence[tuple[int, float]]
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Moved(PlacementEvent):
    """The replica is in its new tier, and its record says so. It occupies ``allocated_bytes``
    there. The file in the old tier is about to be removed; ``Evicted`` or ``EvictionFailed`` ends
    that. May be answered by the ``Move`` of another replica, for which this one made room."""

    ino: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class MoveFailed(PlacementEvent):
    """The replica stays where it was (or was dropped), and its new file is removed. May be answered
    by ``Evict``."""

    ino: int


# Actions.


class RefusalReason(Enum):
    """Why a file gets no replica, or a partial replica no more room. Users see this."""

    NO_ROOM = "no room"
    """No tier has that many bytes."""
    NO_INODES = "no inodes"
    """There are bytes, but the tier's file system has no inodes to spare."""
    NO_TIER = "no tier"
    """No tier is usable: all are lost or were never seen. For a partial replica: its own tier."""


class Place(NamedTuple):
    """Copy the file to this tier: all of it (``reserved_bytes`` are set aside), or only parts, with
    ``RoomWanted`` before each.

    Files that are leaving the tier count as room: nothing may be written, and no file made, before
    enough of them are gone. A file of the same name may be among them.
    """

    ino: int
    tier: int
    reserved_bytes: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is no room. ``missing_bytes`` more in one tier would have been enough (0: bytes are not
    what is missing)."""

    ino: int
    reason: RefusalReason
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The partial replica may grow by ``size_bytes``, as asked for."""

    ino: int
    size_bytes: int


class EvictionReason(Enum):
    """Why a replica is evicted. Users see this."""

    OUTDATED = "evicted: the source does not have this version any more"
    """Or the replica belongs to no known file."""
    POLICY = "evicted for another file"
    PRESSURE = "evicted because its tier has less room"


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop the record and remove the file, which counts as leaving from now on. ``Evicted`` or
    ``EvictionFailed`` ends that; ``Dropped`` is not sent."""

    ino: int
    tier: int
    allocated_bytes: int
    reason: EvictionReason


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the replica from ``tier`` to the tier ``to``, where ``reserved_bytes`` are set aside,
    then change its record. ``Moved`` or ``MoveFailed`` ends it.

    Readers keep using it meanwhile, and it is not evicted. The move has to fail if the file may
    need more than ``reserved_bytes`` (because its present file system compresses).
    """

    ino: int
    tier: int
    to: int
    reserved_bytes: int


Action = Place | Refuse | Grant | Evict | Move
