"""What the threads of the C part may answer about files that are not resident (_nonresident.c)."""

from __future__ import annotations

from types import ModuleType

from monarchfs.cache.readers import NonresidentReads
from monarchfs.types import SourceVersion

NO_CHUNK = (1 << 64) - 1


class NonResidentFiles(NonresidentReads):
    """Constant: the C part."""

    def __init__(self, hooks: ModuleType) -> None:
        self._hooks = hooks
        self.units = hooks.nonresident_units()

    def source(self, ino: int, fd: int, version: SourceVersion) -> bool:
        times = version.mtime_ns, version.ctime_ns
        if any(not -(1 << 63) <= time_ns < 1 << 63 for time_ns in times):
            return False  # a year beyond 2262, or before 1678: they know no such version
        return bool(self._hooks.nonresident_source(ino, fd, version.size, *times))

    def no_source(self, ino: int) -> None:
        self._hooks.nonresident_no_source(ino)

    def fill(self, ino: int, size: int, chunk_bytes: int, states: bytes) -> bool:
        return bool(self._hooks.nonresident_fill(ino, size, chunk_bytes, states))

    def part(self, ino: int, fd: int) -> None:
        self._hooks.nonresident_part(ino, fd)

    def chunks(self, ino: int, first: int, last: int, state: bytes) -> None:
        self._hooks.nonresident_chunks(ino, first, last, state[0])

    def ahead(self, ino: int, chunk: int | None) -> None:
        self._hooks.nonresident_ahead(ino, NO_CHUNK if chunk is None else chunk)

    def stop(self, ino: int) -> None:
        self._hooks.nonresident_stop(ino)

    def used(self, ino: int) -> bool:
        return bool(self._hooks.nonresident_used(ino))
