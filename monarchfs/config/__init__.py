"""What a mount is told to do: parsed at the edge, frozen from there on."""

from monarchfs.config.model import (
    Config,
    EvictPolicy,
    Freshness,
    PrefetchMode,
    TierSpec,
    User,
)
from monarchfs.types import FreshnessMode

__all__ = [
    "Config",
    "EvictPolicy",
    "Freshness",
    "FreshnessMode",
    "PrefetchMode",
    "TierSpec",
    "User",
]
