"""What this node copies from the source for all nodes of the job, and keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import trio

from monarchfs.peers.ownership import Ownership
from monarchfs.prefetch.spans import SPAN_BYTES

TAKEN_SECONDS = 60.0
"""How long this node copies a span for peers after it was last asked for it."""


class NodeShare:
    """What this node owns, and what peers want of it because it stands in for an owner. It reads
    both from the source, and asks no peer, so that no want goes from node to node.

    Constant: ``ownership``. Changing: ``_wanted``, the small files that peers wait for now; when
    each span of a large file was last wanted, and each large file; ``taken``, how often a span was
    taken over."""

    def __init__(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self.taken = 0
        self._wanted: Counter[bytes] = Counter()
        self._spans: dict[tuple[bytes, int], float] = {}
        self._files: dict[bytes, float] = {}

    def owns_some(self, name: bytes, size: int) -> bool:
        """Whether this node owns a span of the file, at least, or copies it for its peers."""
        spans = range(-(-size // SPAN_BYTES) or 1)
        taken = self.copies(name) or _is_young(self._files.get(name))
        return taken or any(self.ownership.owns(name, span) for span in spans)

    def copies(self, name: bytes) -> bool:
        """Whether peers wait for this replica now: this node reads and keeps it as its own."""
        return name in self._wanted

    def begin_copies(self, names: Sequence[bytes]) -> None:
        """Peers wait for these from now on."""
        self._wanted.update(names)

    def end_copies(self, names: Sequence[bytes]) -> None:
        self._wanted -= Counter(names)

    def take_span(self, name: bytes, span: int) -> None:
        """A peer wants a span of which another node is the owner."""
        self.taken += not self.has_span(name, span)
        self._spans[name, span] = self._files[name] = trio.current_time()

    def has_span(self, name: bytes, span: int) -> bool:
        """Whether a peer wanted it lately."""
        return _is_young(self._spans.get((name, span)))


def _is_young(wanted: float | None) -> bool:
    return wanted is not None and trio.current_time() - wanted < TAKEN_SECONDS
