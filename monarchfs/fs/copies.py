"""What the file system needs of the part that copies files."""

from __future__ import annotations

from typing import Protocol

from monarchfs.cache.readers import NonresidentReads
from monarchfs.cache.replicas import OpenReplica
from monarchfs.types import Data, Node, SourceStat

__all__ = ["Copies", "NonresidentReads", "OpenReplica", "PartialFile"]


class PartialFile(Protocol):
    """A file that is not resident (yet). Methods that are not async have no checkpoint."""

    @property
    def partial(self) -> bool: ...

    @property
    def arriving(self) -> bool:
        """Whether all of it was fetched, and only its storing is left."""

    @property
    def replica(self) -> OpenReplica | None:
        """The replica that has all of its bytes by now."""

    @property
    def local_bytes(self) -> int: ...

    def start_filling(self) -> bool: ...

    def allow_direct_reads(self) -> None:
        """Threads of the C part may read it from the source, if nothing of it is kept."""

    def on_readahead(self, first: int, last: int) -> None:
        """A thread of the C part has read the chunks [first, last)."""

    async def read(self, offset: int, size: int) -> Data: ...

    async def current(self) -> SourceStat:
        """The attributes that the open source file has now. Raises as ``read``."""

    def outdated(self) -> None:
        """The source holds another version. Unless all of this one is local, none of its bytes may
        be served any more, and reads show the source as it is."""

    def release(self) -> None: ...


class PartialFiles(Protocol):
    """Those that are read from the source or copied (``monarchfs.prefetch``)."""

    def get(self, ino: int) -> PartialFile | None: ...

    async def open(self, node: Node) -> PartialFile: ...

    async def open_as_is(self, node: Node) -> PartialFile: ...


class CopyOrder(Protocol):
    """What waits to be copied."""

    def __contains__(self, ino: int) -> bool: ...

    def position(self, ino: int) -> int | None: ...


class Delays(Protocol):
    """What is tried again later."""

    def due_in(self, ino: int) -> float | None: ...


class Jobs(Protocol):
    """What is to be copied, and is (``monarchfs.prefetch``)."""

    @property
    def keeps(self) -> bool: ...

    @property
    def queue(self) -> CopyOrder: ...

    @property
    def retries(self) -> Delays: ...

    def opened(self, ino: int) -> None: ...

    def copying(self, ino: int) -> bool: ...


class Copies(Protocol):
    """The part that copies files (``monarchfs.prefetch``)."""

    @property
    def files(self) -> PartialFiles: ...

    @property
    def jobs(self) -> Jobs: ...

    @property
    def held_back(self) -> str | None:
        """Why what nobody has open is copied slowly now; None where nothing is held back."""
