"""Epochs: where a job begins to read again what it has read. And who reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from monarchfs.insight.recording import HANDED, Event, Kind

_SLACK_EVENTS = 1 << 15
_MOST_KEYS = 1 << 17
_MOST_EVIDENCE = 32
_AT_ONCE = 16
"""What is read again after fewer other reads is still being read."""
_OPEN = -1
"""In place of an offset, in blocks: opening a file and then reading it is not reading it twice. An
open that hands the file to the kernel is all that is seen of its reads."""
_MINOR_SHARE = 0.1
"""An epoch with a smaller share of the next one's files is its beginning: a job reads its
configuration twice. A reader with a smaller share of the busiest one's requests is none."""


def in_order(events: Iterable[Event]) -> Iterator[Event]:
    """``events`` by their begin. They are recorded when they end, by several threads."""
    events, kept = iter(events), list[Event]()
    while block := list(islice(events, 4 * _SLACK_EVENTS)):
        kept += block
        kept.sort(key=itemgetter(0))
        if len(kept) > _SLACK_EVENTS:
            yield from kept[:-_SLACK_EVENTS]
            del kept[:-_SLACK_EVENTS]
    yield from kept


@dataclass(slots=True)
class ReaderLife:
    """A process that reads, from its first request to the end of its last."""

    begin: float
    end: float
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Overview:
    """``begins`` of the epochs; ``end`` of the last request."""

    begins: list[float]
    readers: dict[int, ReaderLife]
    events: int
    end: float


class EpochFinder:
    """Finds where epochs begin, from what is read when.

    An epoch may begin where something is read again. It does begin there if, from then on, more is
    read again than for the first time. What counts as read again was read long before (a file is
    often read in pieces, or twice in turn), by the same process or by one that did not live yet:
    processes that each read everything make no epochs for each other, unlike those that divide it
    anew each time. Each thing counts once, so that a few hot files make no epoch. Of very many
    things, a part by their hash is looked at.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, int]] = {}
        self._born: dict[int, int] = {}
        self._first_by: Counter[int] = Counter()
        self._again = 0
        self._found: list[tuple[float, int]] = []
        self._mask = self._visit = self._first = self._distinct = 0
        self._pending: tuple[int, float] | None = None
        self._candidate: tuple[int, float] | None = None
        self._score = self._since = 0

    def add(self, begin: float, key: tuple[int, int], pid: int) -> None:
        """``key``: the inode and the place that are read."""
        born = self._born.setdefault(pid, self._visit)
        if self._mask and hash(key) & self._mask:
            return
        self._visit += 1
        last, by = self._last.get(key, (-1, pid))
        self._last[key] = (self._visit, pid)
        if not self._found:
            self._found.append((begin, 0))
        if last < self._first:
            self._distinct += 1
            self._first_by[pid] += 1
            self._first_time()
        elif self._visit - last > max(_AT_ONCE, self._distinct // 8):
            self._read_again(begin, last, by == pid or born >= last or self._divided(by))
            self._again += self._candidate is None
        else:
            self._read_again(begin, last, False)
        if len(self._last) > _MOST_KEYS:
            self._look_at_half()

    def begins(self) -> list[float]:
        found = [*self._found[:-1], *((begin, self._distinct) for begin, _ in self._found[-1:])]
        kept: list[tuple[float, int]] = []
        for begin, things in reversed(found):
            if kept and things < kept[-1][1] * _MINOR_SHARE:
                kept[-1] = (begin, kept[-1][1])
            else:
                kept.append((begin, things))
        return [begin for begin, _ in reversed(kept)]

    def _first_time(self) -> None:
        self._pending = None
        if self._candidate is not None:
            self._since += 1
            self._score -= 1
            if self._score < 0:
                self._candidate = None
                self._again += self._since

    def _read_again(self, begin: float, last: int, counts: bool) -> None:
        if self._candidate is None:
            self._pending = self._pending or (self._visit, begin)
            if not counts:
                return
            self._candidate, self._pending = self._pending, None
            self._score, self._since = 0, self._visit - self._candidate[0]
        elif last >= self._candidate[0]:
            return
        self._since += 1
        self._score += counts
        if self._score >= min(_MOST_EVIDENCE, max(1, self._distinct // 20)):
            self._found[-1] = (self._found[-1][0], self._distinct)
            self._first, moment = self._candidate
            self._found.append((moment, 0))
            self._distinct, self._candidate = self._since, None
            self._again = 0
            self._first_by.clear()

    def _divided(self, by: int) -> bool:
        """Whether processes divided among them what was read in this epoch: before the candidate
        nearly nothing was read again, and ``by`` is not the one that read nearly all."""
        mine, all_of_them = self._first_by[by], self._first_by.total()
        return self._again * 10 <= self._distinct and mine * 4 <= all_of_them * 3

    def _look_at_half(self) -> None:
        self._mask = self._mask * 2 + 1
        self._last = {k: v for k, v in self._last.items() if not hash(k) & self._mask}
        self._distinct //= 2
        self._since //= 2
        self._again //= 2


def survey(events: Iterable[Event]) -> Overview:
    """Epochs and readers of ``events``, which are in order."""
    finder, readers = EpochFinder(), dict[int, ReaderLife]()
    count, last = 0, 0.0
    for begin, duration, kind, answer, ino, pid, offset, _size in events:
        count += 1
        end = begin + duration
        if end > last:
            last = end
        if kind is Kind.RELEASE:
            continue
        reader = readers.get(pid)
        if reader is None:
            reader = readers[pid] = ReaderLife(begin, end)
        if kind is not Kind.LOOKUP:
            place = _OPEN if kind is Kind.OPEN and answer not in HANDED else offset >> 12
            finder.add(begin, (ino, place), pid)
            reader.requests += 1
        if end > reader.end:
            reader.end = end
    most = max((reader.requests for reader in readers.values()), default=0)
    busy = {p: r for p, r in readers.items() if p and r.requests >= most * _MINOR_SHARE}
    return Overview(finder.begins(), busy or readers, count, last)
