"""How much of the source is asked for by copies that nobody waits for. Pure; seconds and bytes.

A thousand nodes begin a job in the same second, and each of them would copy as fast as it can. So
what nobody has open keeps to a rate, if one is set. (``governor`` steps back when the source gets
slow.)
"""

from __future__ import annotations

import math

BURST_SECONDS = 0.5
"""What was left over in this time may be taken at once."""


class RateLimiter:
    """Constant: the rate. Changing: the debt in bytes, and as of when."""

    def __init__(self, rate: int) -> None:
        """``rate`` in bytes a second, 0 for any."""
        self._rate = rate
        self._debt = 0.0
        self._debt_at = 0.0

    def wait(self, now: float) -> float:
        """Seconds until another read may begin."""
        return max(0.0, self._owed(now) / self._rate - BURST_SECONDS) if self._rate else 0.0

    def room(self, now: float) -> float:
        """How many bytes may be under way before the next read has to wait for the rate."""
        return BURST_SECONDS * self._rate - self._owed(now) if self._rate else math.inf

    def began(self, now: float, size: int) -> None:
        """A read of ``size`` bytes, or a little less, was begun."""
        self._debt = self._owed(now) + size
        self._debt_at = now

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
