"""The tiers: the only package that writes to them.

``tier`` holds the replicas of one tier, ``segments`` the files that many of them share,
``allocator`` says where in these a replica goes, ``listed`` what lies there. ``directory`` and
``files`` have what a single file must be, ``checksum`` and ``verify`` tell whether a replica still
is what was written, ``read`` has the two ways of reading an open one.
"""

from monarchfs.store.errors import ReplicaLost
from monarchfs.store.read import read_full, read_nowait
from monarchfs.store.tier import Tier

__all__ = ["ReplicaLost", "Tier", "read_full", "read_nowait"]
