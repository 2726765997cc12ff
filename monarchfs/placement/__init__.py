"""Pure decisions about where replicas go."""

from monarchfs.placement.events import (
    Abandoned,
    Action,
    Dropped,
    Event,
    Grant,
    Kept,
    Loaded,
    Place,
    RefusalReason,
    Refuse,
    Resumed,
    RoomWanted,
    Stored,
    TierBack,
    TierLost,
    TierSeen,
    Wanted,
)
from monarchfs.placement.placement import Eviction, Placement

__all__ = [
    "Abandoned",
    "Action",
    "Dropped",
    "Event",
    "Eviction",
    "Grant",
    "Kept",
    "Loaded",
    "Place",
    "Placement",
    "RefusalReason",
    "Refuse",
    "Resumed",
    "RoomWanted",
    "Stored",
    "TierBack",
    "TierLost",
    "TierSeen",
    "Wanted",
]
