"""How many reads of the source may be under way that nobody waits for. Pure; seconds and bytes.

Other jobs use the source as well. When it gets slower than usual, copying gives way: the number of
copies at once is halved (multiplicative decrease), and grows by one at a time (additive increase)
when it is as fast as usual again. So the nodes of a job share what is left without knowing of each
other. Readers' own reads are never held back.

"Slower than usual" means both: a read takes longer than the best that was seen of its kind, and the
source gives us less in all than the best that was seen. Our own reads, however many, make each
other slow; but then the source gives as much as ever. That is pressure only where they queue
for longer than two reads take: more reads at once than that bring nothing.

The best is forgotten after a while, as a source can become another. Reads that are made while many
of our own are under way would then show our own queue as the best. So now and then one read is made
at a time.

A thousand nodes begin a job in the same second, and each of them would copy as fast as it can. So
these reads also keep to a rate, if one is set.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

SLOW_TIMES = 1.4
"""The source is slow where it takes so many times longer, and gives as many times less."""

SLOW_ROUNDS = 2
"""It has to be for so many rounds: a machine may be busy for a moment."""

QUEUE_TIMES = 2.5
"""Our own reads may make a read take so many times longer."""

ROUND_SECONDS = 0.5
ROUND_READS = 4
"""What at least so many reads took in so much time is judged together."""

PERIOD_ROUNDS, PERIODS = 10, 12
"""The best of the last minute of reading counts. They are counted in rounds: while nothing is
read, nothing is forgotten."""

PROBE_ROUNDS = PERIOD_ROUNDS * PERIODS // 2
PROBE_READS = 3
MOST_REST_SECONDS = 1.0

LARGE_BYTES = 256 << 10
"""Larger reads are compared by their bandwidth, others with those of about their size."""


BURST_SECONDS = 0.5
"""What was left over of the rate in this time may be taken at once."""

FIRST_SECONDS = 0.3
RETRY_SECONDS, MOST_RETRY_SECONDS = 2.0, 60.0
"""More is tried so long after the first reads; again so long after it slowed readers, twice as long
each time."""

VERY_SLOW_TIMES = 3.0
"""One round that is so much slower counts as two."""

LEARNS_ALONE, LEARNS_BESIDE = 0.1, 0.02
"""How much a round changes what readers' reads take as a rule: one with a single copy beside them,
and one with more."""


class Lowest:
    """The lowest value of some time. Changing: ``value`` (infinite before the first); the lowest of
    each period."""

    def __init__(self) -> None:
        self.value = math.inf
        self._periods: deque[float] = deque([math.inf], maxlen=PERIODS)

    def see(self, value: float) -> None:
        self._periods[-1] = min(self._periods[-1], value)
        self.value = min(self.value, value)

    def next_period(self) -> None:
        self._periods.append(math.inf)
        lowest = min(self._periods)
        self.value = lowest if lowest < math.inf else self.value


@dataclass(slots=True)
class Round:
    """Reads that are judged together: since when; seconds of each, by kind; their number and bytes,
    and readers' number and bytes at its begin."""

    began: float
    readers: tuple[int, int]
    seconds: dict[int, list[float]]
    reads: int = 0
    bytes: int = 0


class TargetLimit:
    """What may be under way of one storage target, or of a source without known ones.

    Constant: ``floor`` and ``most``, the least and the most reads at once; below 1, a single one
    has pauses. Changing: ``size``, how many may be now; how many are; until when none may begin;
    ``pressure``, how many times slower than usual the source is; ``slowed``, what that was when
    ``size`` was halved last, until it has grown back; the usual; the round; whether the number
    still doubles, as at the beginning (``_starts``).
    """

    def __init__(self, floor: float, most: int) -> None:
        self.size = float(most) if floor >= most else 1.0
        self.pressure = 1.0
        self.slowed: float | None = None
        self._floor = floor
        self._most = most
        self._under_way = 0
        self._rest_until = 0.0
        self._usual: dict[int, Lowest] = {}
        self._read_cost, self._byte_cost = Lowest(), Lowest()
        self._round: Round | None = None
        self._rounds = self._low_at = 0
        self._starts = True
        self._slow_rounds = 0
        self._alone = -1
        """While probing: how many reads were made alone; else -1."""

    @property
    def share(self) -> float:
        """How much of ``most`` is allowed."""
        return 1.0 if self._starts else min(1.0, self.size / self._most)

    def wait(self, now: float) -> float | None:
        """Seconds until another read may begin; None: when one has ended."""
        if self._under_way >= (1 if self._alone >= 0 else max(1, int(self.size))):
            return None
        return max(0.0, self._rest_until - now)

    def began(self) -> None:
        self._under_way += 1

    def ended(self, now: float, seconds: float) -> None:
        """A read that took so long has ended, or hangs: another may begin."""
        self._under_way -= 1
        if self.size < 1:
            self._rest_until = now + min(seconds * (1 / self.size - 1), MOST_REST_SECONDS)

    def record(
        self, now: float, seconds: float, size: int, count: int, readers: tuple[int, int]
    ) -> None:
        """The source has just taken so long for each of ``count`` reads of ``size`` bytes, one
        after the other. ``readers``: how many reads were made for readers until now, and their
        bytes."""
        if self._floor >= self._most:
            return
        if self._round is None:
            self._round = Round(now - seconds * count, readers, {})
        seen = self._round
        seen.reads += count
        seen.bytes += size * count
        if self._alone >= 0:
            self._alone += self._under_way <= 1
            if self._alone <= 1:
                return  # it began beside others
        kind, measured = _kind(seconds, size)
        seen.seconds.setdefault(kind, []).append(measured)
        if self._alone >= 0:
            if self._alone > PROBE_READS:
                self._take_usual(seen)
                self._alone, self._round = -1, None
                self._low_at = self._rounds
        elif self._is_over(seen, now):
            self._judge(seen, now, readers)

    def _is_over(self, seen: Round, now: float) -> bool:
        reads = sum(map(len, seen.seconds.values()))
        return reads >= ROUND_READS and (self._starts or now - seen.began >= ROUND_SECONDS)

    def _judge(self, seen: Round, now: float, readers: tuple[int, int]) -> None:
        elapsed = max(now - seen.began, 1e-9)
        reads = seen.reads + readers[0] - seen.readers[0]
        size = seen.bytes + readers[1] - seen.readers[1]
        if elapsed >= ROUND_SECONDS:
            self._rounds += 1
            self._read_cost.see(elapsed / reads)
            self._byte_cost.see(elapsed / max(size, 1))
            if self._rounds % PERIOD_ROUNDS == 0:
                for lowest in (self._read_cost, self._byte_cost, *self._usual.values()):
                    lowest.next_period()
        longer = self._take_usual(seen)
        less = math.inf
        if self._rounds:
            less = elapsed / max(reads * self._read_cost.value, size * self._byte_cost.value)
        self.pressure = min(longer, less) if self._rounds else 1.0
        self._change(longer)
        if self.size <= 1:
            self._low_at = self._rounds
        elif self._rounds - self._low_at >= PROBE_ROUNDS:
            self._alone = 0
        self._round = Round(now, readers, {})

    def _take_usual(self, seen: Round) -> float:
        """How many times longer than usual the reads took, those of the commonest kind."""
        for kind, seconds in seen.seconds.items():
            self._usual.setdefault(kind, Lowest()).see(median(seconds))
        kind, seconds = max(seen.seconds.items(), key=lambda item: len(item[1]))
        return median(seconds) / self._usual[kind].value

    def _change(self, longer: float) -> None:
        slow = self.pressure > SLOW_TIMES
        self._slow_rounds = self._slow_rounds + 1 if slow else 0
        if self._slow_rounds >= SLOW_ROUNDS:
            self.size = max(self._floor, self.size / 2)
            self.slowed = self.pressure
            self._starts = False
        elif slow:
            return
        elif longer > QUEUE_TIMES:
            self.size = max(min(self.size, 2.0), self.size - 1)
            self.slowed, self._starts = None, False
        else:
            self.size = min(self._most, self.size * 2 if self._starts else self.size + 1)
            if self.size == self._most:
                self.slowed, self._starts = None, False


def _kind(seconds: float, size: int) -> tuple[int, float]:
    """What a read is compared with, and its measure for that."""
    if size >= LARGE_BYTES:
        return -1, seconds / size
    return size.bit_length() // 2, seconds


class Governor:
    """Constant: the least and the most reads at once. Changing: the limit of each storage target
    (None: not known, or there are none)."""

    def __init__(self, most: int, floor: float) -> None:
        """``most`` reads at once of each target, ``floor`` of that at least (0 to 1; with 1 nothing
        is ever held back)."""
        self._most = most
        self._floor = floor * most
        self._limits: dict[int | None, TargetLimit] = {None: TargetLimit(self._floor, most)}

    def limit(self, target: int | None) -> TargetLimit:
        limit = self._limits.get(target)
        if limit is None:
            limit = self._limits[target] = TargetLimit(self._floor, self._most)
        return limit

    def wait(self, now: float, target: int | None) -> float | None:
        """Seconds until another read of the target may begin; None: when one has ended."""
        return self.limit(target).wait(now)

    def rest(self, now: float) -> float:
        """Seconds until a read may begin that may not now; infinite where one has to end first."""
        waits = (limit.wait(now) for limit in self._limits.values())
        return min((wait for wait in waits if wait), default=math.inf)

    def record(
        self,
        now: float,
        target: int | None,
        seconds: float,
        size: int,
        count: int,
        readers: tuple[int, int],
    ) -> None:
        """As ``TargetLimit.record``."""
        if target is not None:
            readers = 0, 0  # which targets readers' reads went to is not known
        self.limit(target).record(now, seconds, size, count, readers)

    @property
    def share(self) -> float:
        """How much of all its reads the target that is held back most may be given, 0 to 1."""
        return min(limit.share for limit in self._limits.values())

    @property
    def pressure(self) -> float:
        """How many times slower than usual the slowest target is."""
        return max(limit.pressure for limit in self._limits.values())

    @property
    def reason(self) -> str | None:
        """Why something is held back; None where nothing is."""
        held = [(one.slowed, target) for target, one in self._limits.items() if one.slowed]
        if not held:
            return None
        times, target = max(held, key=lambda one: one[0])
        what = "the source" if target is None else f"storage target {target}"
        return f"{what} was {times:.1f} times slower than usual"


class BesideReaders:
    """How many brief fetches of large files may be under way while readers wait for the source: as
    many as do not make their reads slower. None: then one at a time goes on, and has a rest after
    it. The most: then they need not be brief.

    Constant: the most. Changing: ``at_once``; what a reader's read takes as a rule; how many rounds
    were slow by now; when more is tried, and how long after the next failure that will be.
    """

    def __init__(self, most: int) -> None:
        self.at_once = 0
        self._most = most
        self._usual = 0.0
        self._slow_rounds = 0
        self._retry_at = math.inf
        self._retry_seconds = RETRY_SECONDS

    def record(self, now: float, seconds: float) -> None:
        """What readers' reads have taken, on average, with so many beside them."""
        if math.isinf(self._retry_at):
            self._retry_at, self._usual = now + FIRST_SECONDS, seconds
        if seconds * VERY_SLOW_TIMES < self._usual:
            self._usual = seconds  # readers ask for less at once now
        # Reads differ: of what few of them took, the least says nothing.
        alone = self.at_once == 0 or seconds < self._usual
        self._usual += (seconds - self._usual) * (LEARNS_ALONE if alone else LEARNS_BESIDE)
        times = seconds / self._usual
        self._slow_rounds += (times > SLOW_TIMES) + (times > VERY_SLOW_TIMES)
        if times <= SLOW_TIMES:
            self._slow_rounds = 0
        if self._slow_rounds >= SLOW_ROUNDS:
            self._slow_rounds = 0
            if self.at_once:
                self._retry_at = now + self._retry_seconds
                self._retry_seconds = min(2 * self._retry_seconds, MOST_RETRY_SECONDS)
            self.at_once //= 2
        elif not self._slow_rounds and now >= self._retry_at and not self.free:
            self.at_once = min(max(1, 2 * self.at_once), self._most)
            if self.at_once == self._most:
                self._retry_seconds = RETRY_SECONDS

    @property
    def free(self) -> bool:
        """Whether readers do not notice."""
        return self.at_once == self._most


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
