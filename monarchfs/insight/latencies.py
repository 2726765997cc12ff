"""How long requests take, by what they wait for and how much they read."""

from __future__ import annotations

from monarchfs.insight.estimates import RELAY_BYTES_PER_SECOND, RELAY_FILES_PER_SECOND
from monarchfs.insight.histogram import LogHistogram
from monarchfs.insight.recording import Event, Kind
from monarchfs.insight.results import CAUSES, ELSEWHERE, LOCAL, SOURCE, Latency

SIZES = (4 << 10, 64 << 10, 1 << 20, 1 << 62)
_SMALL, _MIDDLE, _LARGE, _ = SIZES
_ENOUGH = 20


def size_class(size: int) -> int:
    return (size > _SMALL) + (size > _MIDDLE) + (size > _LARGE)


class Latencies:
    """Histograms by cause and class of sizes."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[int, int], LogHistogram] = {}
        self._bytes: dict[tuple[int, int], int] = {}

    def add(self, cause: int, event: Event, moved: int) -> None:
        """``moved``: the bytes that the answer brought."""
        data = moved if cause == SOURCE else event.kind is Kind.READ
        key = cause, size_class(moved) if data else -1
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = LogHistogram()
            self._bytes[key] = 0
        histogram.add(event.duration)
        self._bytes[key] += moved

    def rows(self) -> list[Latency]:
        return [
            Latency(
                CAUSES[cause],
                SIZES[of_class] if of_class >= 0 else 0,
                found.count,
                self._bytes[cause, of_class],
                found.mean,
                found.percentile(50),
                found.percentile(90),
                found.percentile(99),
                found.most,
                found.rows(),
            )
            for (cause, of_class), found in sorted(self._histograms.items())
        ]

    def source(self, of_class: int) -> LogHistogram | None:
        return self._histograms.get((SOURCE, of_class))

    def expected(self, local: bool) -> list[float]:
        """The seconds that a read takes, by class of sizes, from memory and tiers or from
        elsewhere; where too few were seen, from the mean of all, or what the program can do."""
        causes = LOCAL if local else ELSEWHERE
        seen = {
            key: one for key, one in self._histograms.items() if key[0] in causes and key[1] >= 0
        }
        seconds = sum(one.total for one in seen.values())
        amount = sum(self._bytes[key] for key in seen)
        count = sum(one.count for one in seen.values())
        means = []
        for number, size in enumerate((SIZES[0], SIZES[1] // 2, SIZES[2] // 4, SIZES[2])):
            mine = [one for key, one in seen.items() if key[1] == number]
            total = sum(one.count for one in mine)
            if total >= _ENOUGH:
                means.append(sum(one.total for one in mine) / total)
            elif count >= _ENOUGH:
                means.append(seconds * max(1 / count, size / max(amount, size * count)))
            else:
                means.append(1 / RELAY_FILES_PER_SECOND + size / RELAY_BYTES_PER_SECOND)
        return means
