"""What a mount is told to do: parsed at the edge, frozen from there on."""

from monarchfs.config.model import (
    Config,
    DataPath,
    EvictPolicy,
    FreshnessSetting,
    PrefetchMode,
    TierSpec,
    User,
)
from monarchfs.types import FreshnessMode

__all__ = [
    "Config",
    "DataPath",
    "EvictPolicy",
    "FreshnessMode",
    "FreshnessSetting",
    "PrefetchMode",
    "TierSpec",
    "User",
]
