"""What the recorder noted about the mount."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monarchfs.insight.replay import Setup
from monarchfs.types import EvictionPolicy


@dataclass(frozen=True, slots=True)
class Facts:
    freshness: str
    tier_paths: tuple[str, ...]
    setup: Setup
    sampled: int
    dropped: int
    hidden: frozenset[str]
    gaps: int
    passthrough: bool


def read_facts(facts: Mapping[str, Any]) -> Facts:
    """Raises KeyError, TypeError, ValueError for what no recorder writes."""
    tiers = facts.get("tiers") or ()
    prefetch = facts.get("prefetch")
    return Facts(
        str(facts.get("freshness", "?")),
        tuple(str(tier["path"]) for tier in tiers),
        Setup(
            tuple(int(tier["capacity"]) for tier in tiers),
            EvictionPolicy(facts.get("policy", "keep")),
            prefetch not in (None, "none", "access", "auto"),
            facts.get("freshness") == "immutable",
            copies=prefetch != "none",
        ),
        int(facts.get("sampled", 1)),
        int(facts.get("dropped", 0)),
        frozenset(facts.get("hidden") or ()),
        len(facts.get("gaps") or ()),
        facts.get("data_path") == "passthrough",
    )
