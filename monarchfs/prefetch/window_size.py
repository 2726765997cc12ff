"""How far ahead of readers files are fetched, by how many threads, and what the window may take."""

from __future__ import annotations

from monarchfs.core.misses import Misses, WindowState
from monarchfs.metrics import NS, Metrics
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
    opens that agreed with an order since the last ``adapt``; the distance in bytes; ``threads``,
    how many files are fetched at once, and the best time for each; the states of the window when it
    was looked at last, for each purpose."""

    def __init__(self, misses: Misses, most_bytes: int, threads: int, governor: Governor) -> None:
        self.limit_bytes = 0
        self.agreed = 0
        self.distance = FIRST_DISTANCE
        self._misses = misses
        self._most_bytes = most_bytes
        self._governor = governor
        self.threads = min(8, threads)
        self._most_threads = threads
        self._best_seconds = 0.0
        self._memory = MemoryProbe()
        self._counted = self._adapted = self._told = WindowState()

    @property
    def used_bytes(self) -> int:
        """When ``count`` was called last."""
        return self._counted.bytes

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

    def tell_governor(self, now: float, readers: tuple[int, int]) -> None:
        """``readers``: as of ``Governor.record``."""
        state, before = self._misses.window_state(), self._told
        self._told = state
        if files := state.read - before.read:
            seconds = (state.took_ns - before.took_ns) / files / NS
            size = (state.read_bytes - before.read_bytes) // files
            self._governor.record(now, None, seconds, size, files, readers)

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
            self._adapt_threads((now.took_ns - before.took_ns) / files / NS, late=is_late)

    def _adapt_threads(self, seconds: float, *, late: bool) -> None:
        """More while readers have to wait, until the source takes longer for each file."""
        best = self._best_seconds
        # What was best a while ago may not come back.
        self._best_seconds = min(seconds, best * 1.02) if best else seconds
        if seconds > 3 * self._best_seconds + 0.002:
            self.threads = max(2, self.threads * 3 // 4)
        elif late:
            self.threads = min(self._most_threads, self.threads * 2)

    def count(self, metrics: Metrics) -> None:
        """Bring the metrics up to date."""
        now, before = self._misses.window_state(), self._counted
        self._counted = now
        metrics.window_files += now.read - before.read
        metrics.window_bytes += now.read_bytes - before.read_bytes
        metrics.window_hits += now.hits - before.hits
        metrics.window_hit_bytes += now.hit_bytes - before.hit_bytes
        metrics.window_wasted_bytes += now.wasted_bytes - before.wasted_bytes
