"""What a mount is told to do: parsed at the edge, frozen from there on."""

from monarchfs.config.model import Config, DataPath, FreshnessSetting, PrefetchMode, TierSpec, User
from monarchfs.types import EvictionPolicy, FreshnessMode

__all__ = [
    "Config",
    "DataPath",
    "EvictionPolicy",
    "FreshnessMode",
    "FreshnessSetting",
    "PrefetchMode",
    "TierSpec",
    "User",
]
