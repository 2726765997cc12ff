"""Whether the kernel may keep its pages of a file whose timestamps are racy.

The kernel may have read a file in the tick of its last change. Such pages may be older than the
file, and no version tells.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from monarchfs.metadata.freshness import SURELY_SETTLED_NS, Freshness
from monarchfs.types import Node

KEPT = 10_000
"""Inodes that are remembered."""


class RacyOpens:
    """Changing: ``_inodes`` that were opened in the tick of their last change, with its time;
    ``_forgotten``, the first and last of the times of those that were too many to remember."""

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness
        self._inodes: OrderedDict[int, int] = OrderedDict()
        self._forgotten: tuple[int, int] | None = None

    def take_over(self, since_ns: int, now_ns: int) -> None:
        """Another process opened files between these times; which ones is not known."""
        self._forgotten = since_ns - SURELY_SETTLED_NS, now_ns

    def keeps_pages(self, node: Node) -> bool:
        """For an open of ``node``: whether what the kernel has read of it before is what it would
        read now. An inode number is one version; but see ``SourceVersion.past_racy_window``."""
        ino, ctime_ns = node.ino, node.stat.ctime_ns
        if self._freshness.past_racy_window(ctime_ns, time.time_ns()):
            return self._inodes.pop(ino, None) is None and not self._may_be_forgotten(ctime_ns)
        self._inodes[ino] = ctime_ns
        if len(self._inodes) > KEPT:
            old_ns = self._inodes.popitem(last=False)[1]
            first, last = self._forgotten or (old_ns, old_ns)
            self._forgotten = min(first, old_ns), max(last, old_ns)
        return False

    def possible(self, node: Node) -> bool:
        """Whether the file may have been opened in the tick of its last change."""
        return node.ino in self._inodes or self._may_be_forgotten(node.stat.ctime_ns)

    def _may_be_forgotten(self, ctime_ns: int) -> bool:
        return self._forgotten is not None and self._forgotten[0] <= ctime_ns <= self._forgotten[1]

    def opens_until(self, node: Node) -> int:
        """The time (time.time_ns) until which others may open a resident file without asking here;
        0: they may not. ``node`` is as the index has it."""
        now_ns = time.time_ns()
        if not node.stat.is_regular or self.possible(node):
            return 0
        if not self._freshness.past_racy_window(node.stat.ctime_ns, now_ns):
            return 0
        return self._freshness.opens_until(node, now_ns)
