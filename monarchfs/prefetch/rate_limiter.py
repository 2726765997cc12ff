"""How much of the source is asked for by copies that nobody waits for. Pure; seconds and bytes.

A thousand nodes begin a job in the same second, and each of them would copy as fast as it can. So
what nobody has open keeps to a rate, if one is set, and steps back when the source gets slow: then
others want it, too.
"""

from __future__ import annotations

import math

BURST_SECONDS = 0.5
"""What was left over in this time may be taken at once."""

SLOW_TIMES = 2.0
"""The source is slow where a read takes so many times longer than our own reads side by side could
have made it: as many of them as there may be, and each the best that was seen."""

RECOVER_SECONDS = 1.0
"""One more at a time is tried after this long without a slow one."""

_WEIGHT = 0.25
"""Of the newest read in the average."""
_FADE = 1.002
"""The best is forgotten a little with each read: a source can become another."""


class RateLimiter:
    """Constant: the rate, how many reads may be under way. Changing: how many that are; the debt in
    bytes, and as of when; ``slots``, how many may be now; of each size of read (by powers of four)
    how long the best and the average took."""

    def __init__(self, rate: int, most: int) -> None:
        """``rate`` in bytes a second, 0 for any; ``most`` reads at once."""
        self.slots = most
        self._most = most
        self._rate = rate
        self._under_way = 0
        self._debt = 0.0
        self._debt_at = 0.0
        self._best: dict[int, float] = {}
        self._average: dict[int, float] = {}
        self._calm_since = 0.0
        self._rest_until = 0.0

    def wait(self, now: float) -> float | None:
        """Seconds until another read may begin; None: when one has ended."""
        if self._under_way >= self.slots:
            return None
        behind = self._owed(now) / self._rate - BURST_SECONDS if self._rate else 0.0
        return max(0.0, behind, self._rest_until - now)

    def room(self, now: float) -> float:
        """How many bytes may be under way before the next read has to wait for the rate."""
        return BURST_SECONDS * self._rate - self._owed(now) if self._rate else math.inf

    def began(self, now: float, size: int) -> None:
        """A read of ``size`` bytes, or a little less, was begun."""
        self._under_way += 1
        self._debt = self._owed(now) + size
        self._debt_at = now

    def ended(self) -> None:
        """It has ended, or hangs: others may begin."""
        self._under_way -= 1

    def record_latency(self, now: float, seconds: float, size: int) -> None:
        """The source has just taken so long for a read."""
        kind = size.bit_length() // 2
        best = self._best[kind] = min(self._best.get(kind, seconds) * _FADE, seconds)
        average = self._average.get(kind, seconds)
        average = self._average[kind] = average + _WEIGHT * (seconds - average)
        if average > SLOW_TIMES * self._most * best:
            self.slots = max(1, self.slots // 2)
            self._average[kind] = best  # judged anew, with fewer of our own
            self._calm_since = now
            if self.slots == 1:
                self._rest_until = now + seconds
        elif self.slots < self._most and now - self._calm_since >= RECOVER_SECONDS:
            self.slots += 1
            self._calm_since = now

    def _owed(self, now: float) -> float:
        return max(0.0, self._debt - (now - self._debt_at) * self._rate)


class AdaptiveSize:
    """How much is asked for at once, so that it takes about so long. Changing: ``value``."""

    def __init__(self, value: int, least: int, most: int, short: float, long: float) -> None:
        """What takes less than ``short`` seconds is too little, more than ``long`` too much."""
        self.value = value
        self._least = least
        self._most = most
        self._short = short
        self._long = long

    def record_latency(self, seconds: float) -> None:
        """So long, just now."""
        if seconds < self._short:
            self.value = min(2 * self.value, self._most)
        elif seconds > self._long:
            self.value = max(self.value // 2, self._least)
