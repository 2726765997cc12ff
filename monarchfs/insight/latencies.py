"""How long requests take, by what they wait for and how much they read."""

from __future__ import annotations

from collections import Counter
from math import frexp, ldexp

from monarchfs.insight.estimates import RELAY_BYTES_PER_SECOND, RELAY_FILES_PER_SECOND
from monarchfs.insight.recording import Event, Kind
from monarchfs.insight.results import CAUSES, ELSEWHERE, LOCAL, SOURCE, Latency

SIZES = (4 << 10, 64 << 10, 1 << 20, 1 << 62)
_SMALL, _MIDDLE, _LARGE, _ = SIZES
_ENOUGH = 20
_STEPS = 4
"""Classes of a histogram from one power of two to the next."""
_LEAST = 1e-9


def size_class(size: int) -> int:
    return (size > _SMALL) + (size > _MIDDLE) + (size > _LARGE)


class LogHistogram:
    """Counted in classes a fifth wide: percentiles of any number in little memory."""

    __slots__ = ("bytes", "classes", "count", "most", "total")

    def __init__(self) -> None:
        self.classes: Counter[int] = Counter()
        self.count = self.bytes = 0
        self.total = self.most = 0.0

    def add(self, seconds: float, moved: int = 0) -> None:
        """``moved``: the bytes that came meanwhile."""
        mantissa, exponent = frexp(seconds or _LEAST)
        self.classes[exponent * _STEPS + int(mantissa * 2 * _STEPS)] += 1
        self.count += 1
        self.total += seconds
        self.bytes += moved
        if seconds > self.most:
            self.most = seconds

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The upper end of the class in which it lies, but no more than the most."""
        left = self.count * percent / 100
        for number in sorted(self.classes):
            left -= self.classes[number]
            if left <= 0:
                return min(_end(number), self.most)
        return self.most

    def rows(self) -> list[tuple[float, int]]:
        """(seconds up to, how many), a class for each power of two."""
        by_exponent: Counter[int] = Counter()
        for number, count in self.classes.items():
            by_exponent[number // _STEPS] += count
        return [(ldexp(1.0, one - 1), by_exponent[one]) for one in sorted(by_exponent)]


class Latencies:
    """Histograms by cause and class of sizes."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[int, int], LogHistogram] = {}

    def add(self, cause: int, event: Event, moved: int) -> None:
        """``moved``: the bytes that the answer brought."""
        data = moved if cause == SOURCE else event.kind is Kind.READ
        key = cause, size_class(moved) if data else -1
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = LogHistogram()
        histogram.add(event.duration, moved)

    def rows(self) -> list[Latency]:
        return [
            Latency(
                CAUSES[cause],
                SIZES[of_class] if of_class >= 0 else 0,
                found.count,
                found.bytes,
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
        amount = sum(one.bytes for one in seen.values())
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


def _end(number: int) -> float:
    exponent, step = divmod(number, _STEPS)
    return ldexp((step + 1 + _STEPS) / (2 * _STEPS), exponent - 1)
