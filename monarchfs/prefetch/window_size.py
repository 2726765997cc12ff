"""How far ahead of readers files are fetched, by how many threads, and what the window may take."""

from __future__ import annotations

from monarchfs.core.misses import Misses, WindowState
from monarchfs.metrics import NS, Metrics
from monarchfs.prefetch.fetch_threads import FetchThreads
from monarchfs.prefetch.governor import Governor
from monarchfs.system.memory import MemoryProbe

FIRST_DISTANCE = 16 << 20
"""How far ahead of readers files are fetched, until one had to wait."""

SHARE_OF_FILE = 4
"""A file may take this part of the window; larger ones are left to readahead."""

SHARE_OF_MEMORY = 4
"""The window may take this part of the memory that is left."""

ADAPT_FILES = 32
"""Distance and threads change after so many files were opened or fetched."""


class WindowSize:
    """Constant: the window in the C part, what it may take at most; who hears of all reads, and
    says how much is allowed. Changing: ``limit_bytes``, what the window may take now; ``agreed``,
    opens that agreed with an order since the last ``adapt``; the distance in bytes; the threads;
    the states of the window when it was looked at last, for each purpose."""

    def __init__(self, misses: Misses, most_bytes: int, threads: int, governor: Governor) -> None:
        self.limit_bytes = 0
        self.agreed = 0
        self.distance = FIRST_DISTANCE
        self._misses = misses
        self._most_bytes = most_bytes
        self._governor = governor
        self._threads = FetchThreads(threads)
        self._memory = MemoryProbe()
        self._counted = self._adapted = self._told = WindowState()

    @property
    def used_bytes(self) -> int:
        """When ``count`` was called last."""
        return self._counted.bytes

    @property
    def threads(self) -> int:
        return self._threads.count

    @property
    def most_of_file(self) -> int:
        """How large a file in the window may be."""
        return self.limit_bytes // SHARE_OF_FILE

    def distance_of_each(self, orders: int) -> int:
        """How many bytes may be ahead of the readers of each order, if so many are followed."""
        most = max(self.limit_bytes, FIRST_DISTANCE)
        share = int(min(self.distance, most) * self._governor.share)
        return max(FIRST_DISTANCE, share) // max(1, orders)

    def look_for_room(self) -> bool:
        """Set the limit by the memory that is left. Whether memory has become short: what nobody
        has opened should be given up."""
        left = self._memory.read().available_bytes + self._misses.window_state().bytes
        self.set_limit(min(self._most_bytes, left // SHARE_OF_MEMORY))
        return self._misses.window_state().bytes > 2 * self.limit_bytes

    def set_limit(self, size: int) -> None:
        if size != self.limit_bytes:
            self.limit_bytes = size
            self._misses.window_limit(size)

    def tell_governor(self, now: float) -> None:
        state, before = self._misses.window_state(), self._told
        self._told = state
        if files := state.read - before.read:
            seconds = (state.took_ns - before.took_ns) / files / NS
            size = (state.read_bytes - before.read_bytes) // files
            self._governor.record(now, None, seconds, size, files)

    def adapt(self) -> None:
        """Change distance and threads by whether readers had to wait."""
        now, before = self._misses.window_state(), self._adapted
        files, hits = now.read - before.read, now.hits - before.hits
        if files + self.agreed < ADAPT_FILES:
            return
        late = self.agreed - hits + now.waited - before.waited
        is_late = 16 * late > self.agreed
        self.agreed, self._adapted = 0, now
        if is_late:
            self.distance = min(2 * self.distance, max(self.limit_bytes, FIRST_DISTANCE))
        if files:
            self._threads.adapt((now.took_ns - before.took_ns) / files / NS, late=is_late)

    def count(self, metrics: Metrics) -> None:
        """Bring the metrics up to date."""
        now, before = self._misses.window_state(), self._counted
        self._counted = now
        metrics.window_files += now.read - before.read
        metrics.window_bytes += now.read_bytes - before.read_bytes
        metrics.window_hits += now.hits - before.hits
        metrics.window_hit_bytes += now.hit_bytes - before.hit_bytes
        metrics.window_wasted_bytes += now.wasted_bytes - before.wasted_bytes
