"""The tiers: the only package that writes to them.

``tier`` connects the parts of one: ``replica_files`` has replicas with a file each, ``segments``
those that share files. ``allocator`` places them there, ``listed`` notes what lies there.
``directory`` and ``files`` say what a single file must be, ``trials`` what a file system does.
``read`` reads an open replica and, with ``checksum``, tells whether it still is what was written.
"""

from monarchfs.cache.store.read import read_full, read_nowait
from monarchfs.cache.store.tier import Tier

__all__ = ["Tier", "read_full", "read_nowait"]
