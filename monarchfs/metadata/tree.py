"""The directory tree of one mount: names, attributes and listings."""

from __future__ import annotations

import trio

from monarchfs.cache.index.index import Index
from monarchfs.metadata.attributes import Attributes
from monarchfs.metadata.batches import BatchLookups
from monarchfs.metadata.directories import Directories
from monarchfs.metadata.freshness import FOREVER_NS, Freshness
from monarchfs.metadata.known import Entry, KnownMetadata, Missing
from monarchfs.metadata.names import Names
from monarchfs.metadata.recorder import Recorder
from monarchfs.metadata.shared_names import NamePeers, SharedNames
from monarchfs.metadata.sibling_names import NameThreads, SiblingNames
from monarchfs.metadata.stale_on_timeout import StaleOnTimeout
from monarchfs.metadata.statahead import Statahead
from monarchfs.metadata.unlisted import Unlisted
from monarchfs.metrics import Metrics
from monarchfs.source.source import Source
from monarchfs.types import Lane

__all__ = ["Entry", "Missing", "Tree"]


class Tree:
    """The parts, connected. ``known`` answers without waiting; ``names``, ``attributes`` and
    ``directories`` ask the source where they have to, ``batches`` whatever is known; ``recorder``
    records its answers; ``shared`` asks the job's other nodes."""

    def __init__(
        self,
        index: Index,
        source: Source,
        freshness: Freshness,
        metrics: Metrics,
        nursery: trio.Nursery,
        *,
        deadline: float,
        threads: NameThreads | None = None,
        peers: NamePeers | None = None,
    ) -> None:
        """``deadline``: seconds for which a revalidation waits for a source that does not answer,
        where something is known that can be served instead. ``peers``: with whom names are
        shared."""
        self.index = index
        self.freshness = freshness
        self.known = known = KnownMetadata(index, freshness)
        self._asking = asking = StaleOnTimeout(source, known, metrics, nursery, deadline)
        self.recorder = recorder = Recorder(known, metrics)
        self.siblings = SiblingNames(known, threads)
        self.shared = SharedNames(known, recorder, metrics, peers)
        self.batches = BatchLookups(source, known, recorder, self.siblings, self.shared)
        statahead = Statahead(nursery, index, self.batches)
        self.directories = Directories(source, known, recorder, asking, statahead, self.shared)
        self.names = Names(
            source,
            known,
            recorder,
            asking,
            self.batches,
            statahead,
            self.directories,
            Unlisted(nursery, known, recorder, self.directories),
            self.siblings,
        )
        self.attributes = Attributes(source, known, recorder, asking, self.names)

    async def list_for_peers(self, ino: int, lane: Lane) -> None:
        """Have a listing that ``shared`` knows, if it is short. No peer is asked.
        Raises OSError, and IndexWriteError."""
        directories = self.directories

        async def confirm_or_list() -> bool:
            known = self.shared.known_listing(ino, -FOREVER_NS) is not None
            if not (known and await directories.confirm(ino, lane)):
                await directories.list_again(ino, lane)
            return True

        await self._asking.run_once(self._asking.key(lane, "list", ino), confirm_or_list)
