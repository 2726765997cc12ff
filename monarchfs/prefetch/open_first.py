"""Whether files are opened to learn their attributes.

A file that is looked at and copied later costs a metadata server two questions, one for its
attributes and one to open it. Where it is copied next, one is enough: it is opened, its attributes
are taken from the descriptor, and it is read through that. For large files, or those that are not
copied, an open in place of a look is dearer.
"""

from __future__ import annotations

from collections.abc import Iterable

from monarchfs.cache.cache import Cache
from monarchfs.core.misses import MOST_BYTES
from monarchfs.types import Node

MOST_WAITING = 256
"""Whoever looks for files that way waits while so many wait for their copy: they are open."""

LITTLE_ROOM = 256 * MOST_BYTES
"""With less room in the tiers, some may not be copied."""

AT_FIRST, MOST = 64, 256
"""So many large files are opened in vain before the first look without that; and later."""


class OpenFirst:
    """Changing: ``_more``, how many more of the files found last are small than are not, from -MOST
    to MOST."""

    def __init__(self, cache: Cache, *, possible: bool) -> None:
        """``possible``: all that is found is copied by this node."""
        self._cache = cache
        self._possible = possible
        self._more = AT_FIRST

    @property
    def most_bytes(self) -> int:
        """Up to which size; 0: none."""
        if not self._possible or self._more <= 0:
            return 0
        rooms = self._cache.usage.room_for(0)[1]
        room = sum(one.room.bytes for one in rooms if one.out_of_service is None)
        return MOST_BYTES if room >= LITTLE_ROOM else 0

    def note_found(self, nodes: Iterable[Node | None]) -> None:
        """These were found, one after the other."""
        for node in nodes:
            if node is not None and node.stat.is_regular:
                more = self._more + (1 if 0 < node.stat.size <= MOST_BYTES else -1)
                self._more = max(-MOST, min(more, MOST))
