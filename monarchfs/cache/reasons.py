"""Why files are not resident: what is remembered for people."""

from __future__ import annotations

import time
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from monarchfs.types import Node

REASONS_KEPT = 10_000
"""The newest ones are kept: about 300 bytes each."""


class Cause(Enum):
    """In two or three words, to be counted by."""

    NO_ROOM = "no room"
    NO_TIER = "no tier in service"
    FAILED = "copying failed"
    ARCHIVED = "in the archive"
    CHANGED = "changed in the source"
    YOUNG = "changed a moment ago"
    EVICTED = "evicted"
    LOST = "copy lost"
    UNRECORDED = "not recorded"
    FOREIGN = "kept by its owner"


class Reason(NamedTuple):
    """``text`` is a sentence without the file's name; ``at_ns`` the time of the wall clock.
    ``missing_bytes``, of NO_ROOM: how much more room would have been enough."""

    cause: Cause
    text: str
    at_ns: int
    missing_bytes: int = 0


_Place = tuple[int, bytes]


class ReasonLog:
    """The last reason of each inode number, and of each name whose file changed: the new version
    has another number."""

    def __init__(self, kept: int = REASONS_KEPT) -> None:
        self._kept = kept
        self._by_key: OrderedDict[int | _Place, Reason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def put(self, ino: int, cause: Cause, text: str, missing_bytes: int = 0) -> None:
        self._put(ino, Reason(cause, text, time.time_ns(), missing_bytes))

    def put_changed(self, node: Node, text: str) -> None:
        """For a version that the source no longer has."""
        reason = Reason(Cause.CHANGED, text, time.time_ns())
        self._put(node.ino, reason)
        self._put((node.parent, node.name), reason)

    def _put(self, key: int | _Place, reason: Reason) -> None:
        self._by_key[key] = reason
        self._by_key.move_to_end(key)
        if len(self._by_key) > self._kept:
            self._by_key.popitem(last=False)

    def get(self, ino: int) -> Reason | None:
        return self._by_key.get(ino)

    def of_earlier_version(self, node: Node) -> Reason | None:
        """What became of the copy of the version that had the node's name before."""
        return self._by_key.get((node.parent, node.name))

    def forget(self, node: Node) -> None:
        """It is resident."""
        if self._by_key:
            self._by_key.pop(node.ino, None)
            self._by_key.pop((node.parent, node.name), None)
