"""How many files to fetch at once: more while readers have to wait, until the source takes longer
for each. Pure."""

from __future__ import annotations


class FetchThreads:
    """Changing: ``count``, how many files are fetched at once, and the best time (``_best``)."""

    def __init__(self, most: int) -> None:
        self.count = min(8, most)
        self._most = most
        self._best = 0.0

    def adapt(self, seconds: float, *, late: bool) -> None:
        """``seconds``: what a file took of late; ``late``: readers had to wait."""
        # What was best a while ago may not come back.
        self._best = min(seconds, self._best * 1.02) if self._best else seconds
        if seconds > 3 * self._best + 0.002:
            self.count = max(2, self.count * 3 // 4)
        elif late:
            self.count = min(self._most, self.count * 2)
