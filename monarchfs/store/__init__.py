"""The tiers: the only package that writes to them.

``tier`` holds the replicas of one tier, ``files`` what a single file of it must be, ``checksum``
and ``verify`` tell whether it still is what was written, ``read`` has the two ways of reading an
open one.
"""

from monarchfs.store.errors import ReplicaLost
from monarchfs.store.read import read_full, read_nowait
from monarchfs.store.tier import Tier

__all__ = ["ReplicaLost", "Tier", "read_full", "read_nowait"]
