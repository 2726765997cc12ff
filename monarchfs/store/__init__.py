"""The tiers: the only package that writes to them.

``tier`` holds the replicas of one tier, ``read`` the two ways of reading an open one.
"""

from monarchfs.store.errors import ReplicaLost
from monarchfs.store.read import read_full, read_nowait
from monarchfs.store.tier import Tier, replica_name

__all__ = ["ReplicaLost", "Tier", "read_full", "read_nowait", "replica_name"]
