"""TEMPORARY integration stub by the lead: overwrite freely."""
from __future__ import annotations
from dataclasses import dataclass
from enum import Enum
from monarchfs.types import Space
class RefusalReason(Enum):
    NO_ROOM = "no room"
    NO_TIER = "no tier"
@dataclass(frozen=True)
class TierSeen:
    tier: int; capacity_bytes: int; space: Space
@dataclass(frozen=True)
class Loaded:
    tier: int; files: int; allocated_bytes: int
@dataclass(frozen=True)
class Wanted:
    ino: int; size_bytes: int
@dataclass(frozen=True)
class RoomWanted:
    ino: int; size_bytes: int
@dataclass(frozen=True)
class Stored:
    ino: int; allocated_bytes: int
@dataclass(frozen=True)
class Kept:
    ino: int; allocated_bytes: int
@dataclass(frozen=True)
class Resumed:
    ino: int; tier: int; allocated_bytes: int
@dataclass(frozen=True)
class Abandoned:
    ino: int
@dataclass(frozen=True)
class Dropped:
    ino: int; tier: int; allocated_bytes: int
Event = object
@dataclass(frozen=True)
class Place:
    ino: int; tier: int; reserved_bytes: int; whole: bool
@dataclass(frozen=True)
class Refuse:
    ino: int; reason: RefusalReason; missing_bytes: int
@dataclass(frozen=True)
class Grant:
    ino: int; size_bytes: int
Action = object
