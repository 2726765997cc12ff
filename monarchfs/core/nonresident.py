"""What the threads of the C part may answer about files that are not resident (_nonresident.c)."""

from __future__ import annotations

from types import ModuleType

from monarchfs.types import SourceVersion

NO_CHUNK = (1 << 64) - 1


class NonresidentReads:
    """The threads' reads of files that are not resident (yet). An inode number is one version of
    one file. Descriptors stay the caller's. No method has a checkpoint, or waits.

    Constant: the C part; ``units``, how a ``Unit`` answers readers that wait for its bytes."""

    def __init__(self, hooks: ModuleType) -> None:
        self._hooks = hooks
        self.units: object = hooks.nonresident_units()

    def source(self, ino: int, fd: int, version: SourceVersion) -> bool:
        """Threads may read from the source what is not kept of the file, as long as the source has
        this version. Whether they will. The source is not asked now."""
        times = version.mtime_ns, version.ctime_ns
        if any(not -(1 << 63) <= time_ns < 1 << 63 for time_ns in times):
            return False  # a year beyond 2262, or before 1678: they know no such version
        return bool(self._hooks.nonresident_source(ino, fd, version.size, *times))

    def no_source(self, ino: int) -> None:
        """Ends ``source``. Reads under way are still answered."""
        self._hooks.nonresident_no_source(ino)

    def fill(self, ino: int, size: int, chunk_bytes: int, states: bytes) -> bool:
        """The file is being copied, and somebody reads it; ``states`` as of ``ChunkMap``. Whether
        threads answer."""
        return bool(self._hooks.nonresident_fill(ino, size, chunk_bytes, states))

    def part(self, ino: int, fd: int) -> None:
        """The part file; called before the first chunk is present."""
        self._hooks.nonresident_part(ino, fd)

    def chunks(self, ino: int, first: int, last: int, state: bytes) -> None:
        """The chunks [first, last) are in that state now."""
        self._hooks.nonresident_chunks(ino, first, last, state[0])

    def ahead(self, ino: int, chunk: int | None) -> None:
        """Report the next read that reaches this chunk; None: report none."""
        self._hooks.nonresident_ahead(ino, NO_CHUNK if chunk is None else chunk)

    def stop(self, ino: int) -> None:
        """The file must not be read any more. Reads under way are still answered."""
        self._hooks.nonresident_stop(ino)

    def used(self, ino: int) -> bool:
        """Whether the file was read since the last call."""
        return bool(self._hooks.nonresident_used(ino))
