"""LogHistogram, counted in classes a fifth wide: percentiles of any number in little memory."""

from __future__ import annotations

from collections import Counter
from math import frexp, ldexp

_STEPS = 4
"""Classes from one power of two to the next."""
_LEAST = 1e-9


class LogHistogram:
    __slots__ = ("classes", "count", "most", "total")

    def __init__(self) -> None:
        self.classes: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.most = 0.0

    def add(self, seconds: float) -> None:
        mantissa, exponent = frexp(seconds or _LEAST)
        self.classes[exponent * _STEPS + int(mantissa * 2 * _STEPS)] += 1
        self.count += 1
        self.total += seconds
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


def _end(number: int) -> float:
    exponent, step = divmod(number, _STEPS)
    return ldexp((step + 1 + _STEPS) / (2 * _STEPS), exponent - 1)
