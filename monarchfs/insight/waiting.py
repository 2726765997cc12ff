"""Who waits when, and for what: one sweep over the requests, in the order of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

from monarchfs.insight.epochs import ReaderLife
from monarchfs.insight.latencies import LogHistogram
from monarchfs.insight.recording import Event
from monarchfs.insight.results import CAUSES, CHECKS, NAMES, SOURCE, Span

_ALIVE, _WAITING = len(CAUSES), len(CAUSES) + 1
_BITS = 20
_SHIFTS = [_BITS * digit for digit in range(len(CAUSES) + 2)]
_UNIT = [1 << shift for shift in _SHIFTS]
_MOST = (1 << _BITS) - 1


class SourceLoad:
    """Least squares of how long reads of the source take, by the bytes that are under way."""

    def __init__(self) -> None:
        self._count = 0
        self._load = self._seconds = self._square = self._product = 0.0

    def add(self, load: float, seconds: float) -> None:
        self._count += 1
        self._load += load
        self._seconds += seconds
        self._square += load * load
        self._product += load * seconds

    def share(self) -> float | None:
        """The part of the time that grows with the load; None where all loads are alike."""
        if not self._count or not self._seconds:
            return None
        load, seconds = self._load / self._count, self._seconds / self._count
        variance = self._square / self._count - load * load
        if variance <= 0.01 * load * load:
            return None
        slope = (self._product / self._count - load * seconds) / variance
        return min(1.0, max(0.0, slope * load / seconds))


@dataclass(slots=True)
class _WaitingReader:
    """``ended``: when its last request did, while none is under way."""

    under_way: int = 0
    ended: float | None = None


class Sweep:
    """Adds up ``Span``s between ``edges``. Requests have to begin in order.

    What is under way makes a state: a number with a digit for each cause, one for the readers that
    live and one for those that wait. The time in each state is added up, and divided only at the
    end of a span, because the same few states come again and again.
    """

    def __init__(self, edges: Sequence[float], readers: Mapping[int, ReaderLife]) -> None:
        self.spans = [Span(begin, end) for begin, end in pairwise(edges)]
        self.gaps = LogHistogram()
        self.load = SourceLoad()
        self._readers = {pid: _WaitingReader() for pid in readers}
        self._number, self._now, self._end = 0, edges[0], edges[1]
        self._coming = [(reader.begin, _ALIVE, pid, 1) for pid, reader in readers.items()]
        self._coming += [(reader.end, _ALIVE, pid, -1) for pid, reader in readers.items()]
        heapify(self._coming)
        self._state = self._source_bytes = 0
        self._seconds: defaultdict[int, float] = defaultdict(float)

    def add(self, cause: int, origin: int, event: Event, moved: int) -> None:
        """``origin``: where the bytes come from; ``moved``: how many the answer brought."""
        begin, duration, _kind, _answer, _ino, pid, _offset, size = event
        self._pass(begin)
        span = self.spans[self._number]
        span.requests += 1
        span.bytes[origin] += size
        if cause == SOURCE:
            self._source_bytes += moved
            if moved:
                self.load.add(self._source_bytes, duration)
        self._state += _UNIT[cause]
        if (reader := self._readers.get(pid)) is not None:
            if not reader.under_way:
                self._state += _UNIT[_WAITING]
                if reader.ended is not None:
                    self.gaps.add(begin - reader.ended)
            reader.under_way += 1
        heappush(self._coming, (begin + duration, cause, pid, moved))

    def finish(self) -> list[Span]:
        self._pass(self.spans[-1].end)
        self._divide()
        return self.spans

    def _pass(self, moment: float) -> None:
        """Time goes by until ``moment``."""
        coming = self._coming
        while coming and coming[0][0] <= moment:
            at, what, pid, size = heappop(coming)
            if at > self._now:
                self._account(at)
            if what == _ALIVE:
                self._state += size * _UNIT[_ALIVE]
                continue
            self._state -= _UNIT[what]
            if what == SOURCE:
                self._source_bytes -= size
            if (reader := self._readers.get(pid)) is not None:
                reader.under_way -= 1
                if not reader.under_way:
                    reader.ended = at
                    self._state -= _UNIT[_WAITING]
        if moment > self._now:
            self._account(moment)

    def _account(self, moment: float) -> None:
        while moment >= self._end and self._number + 1 < len(self.spans):
            self._seconds[self._state] += self._end - self._now
            self._now = self._end
            self._divide()
            self._number += 1
            self._end = self.spans[self._number].end
        self._seconds[self._state] += moment - self._now
        self._now = moment

    def _divide(self) -> None:
        """What the times in all states mean for the span that ends."""
        span = self.spans[self._number]
        for state, seconds in self._seconds.items():
            *under_way, alive, waiting = (state >> shift & _MOST for shift in _SHIFTS)
            _add_requests(span, under_way, seconds)
            if alive:
                span.with_readers += seconds
                span.reader_seconds += seconds * alive
                span.waited += seconds * min(1.0, waiting / alive)
                span.idle += seconds * (not waiting)
                span.all_waiting += seconds * (waiting >= alive)
        self._seconds.clear()


def _add_requests(span: Span, under_way: Sequence[int], seconds: float) -> None:
    if everything := sum(under_way):
        span.waiting += seconds
        span.reading += seconds * (everything > under_way[NAMES] + under_way[CHECKS])
        for cause, count in enumerate(under_way):
            span.merged[cause] += seconds * (count > 0)
            span.shared[cause] += seconds * count / everything
