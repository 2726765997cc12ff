"""What processes, or directories, ask of a mount just now: the events of one interval, added up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add

from monarchfs.insight.recording import EVENT, HANDED, AnsweredBy, File, Kind

KEPT_FILES = 200_000
"""Twice as many as the worker remembers that it has told of (``worker.recording.MOST_KNOWN``)."""

_OPEN, _READ = int(Kind.OPEN), int(Kind.READ)
_ANSWERS = len(AnsweredBy)
_MEMORY, _KERNEL = int(AnsweredBy.MEMORY), int(AnsweredBy.KERNEL)
_BRINGS = (AnsweredBy.SOURCE, AnsweredBy.PEER, AnsweredBy.WAITED)
"""Opens with which a small file came."""

_TOOK_BITS = 40
_MOST_TOOK = (1 << _TOOK_BITS) - 1
_UNKNOWN = "?"


@dataclass(slots=True)
class LiveRates:
    """Of a process or a directory in one interval; per second. ``waiting`` is the share of the time
    with at least one request under way, at most 1; ``waited_seconds`` has all of a request's time
    in the interval in which it was answered. ``answered`` are shares of reads by where the bytes
    come from; an open that hands the file to the kernel counts as one."""

    reads: float
    opens: float
    lookups: float
    bytes: float
    waiting: float
    waited_seconds: float
    answered: Mapping[AnsweredBy, float]


@dataclass(slots=True)
class _Sum:
    """``spans``: when requests were under way: the beginning, shifted by _TOOK_BITS, and how long,
    in ns. As numbers they take a third of the memory of pairs."""

    kinds: list[int] = field(default_factory=lambda: [0] * (max(Kind) + 1))
    answered: list[int] = field(default_factory=lambda: [0] * _ANSWERS)
    bytes: int = 0
    spans: list[int] = field(default_factory=list)

    def add(self, other: _Sum) -> None:
        self.kinds = [*map(add, self.kinds, other.kinds)]
        self.answered = [*map(add, self.answered, other.answered)]
        self.bytes += other.bytes
        self.spans += other.spans


class Interval:
    """Adds up events by process, or by directory. Changing: the sums; which files are known; who
    brought files with their opens; until when each one's waiting was counted in the interval
    before."""

    def __init__(self, *, by_directory: bool) -> None:
        self._by_directory = by_directory
        self._sums: dict[int, _Sum] = {}
        self._directories: dict[int, str] = {0: _UNKNOWN}
        self._opened: dict[int, int] = {}
        self._until: dict[int | str, int] = {}

    def know(self, files: Mapping[int, File]) -> None:
        """Files that events name, before or after those."""
        known = self._directories
        for ino, file in files.items():
            known.pop(ino, None)  # the newest are last
            known[ino] = os.path.dirname(file.path.rstrip("/")) or "."
        for ino in list(islice(known, max(0, len(known) - KEPT_FILES))):
            del known[ino]

    def add(self, events: bytes, sample: int) -> None:
        """Packed events (EVENT), one of so many."""
        sums, opened = self._sums, self._opened
        for begin, ino, _offset, took, size, pid, kind, by in EVENT.iter_unpack(events):
            if kind > _READ:
                continue  # nobody waits for a close
            by = by if by < _ANSWERS else 0  # of a later release
            key = ino if self._by_directory else pid
            one = sums.get(key)
            if one is None:
                one = sums[key] = _Sum()
            one.kinds[kind] += sample
            one.bytes += size * sample
            if kind == _OPEN:
                opened.pop(ino, None)
                if by in HANDED:
                    one.answered[_KERNEL] += sample
                elif by in _BRINGS:
                    opened[ino] = by
            elif kind == _READ:
                # What the open brought is in memory.
                origin = opened.get(ino, by) if by == _MEMORY else by
                one.answered[origin] += sample
            one.spans.append(begin << _TOOK_BITS | min(int(took * 1e9), _MOST_TOOK))

    def close(self, seconds: float) -> dict[int | str, LiveRates]:
        """The interval took so long; the next one begins. By process, or by directory."""
        by_key: dict[int | str, _Sum] = {}
        for number, one in self._sums.items():
            key = self._directories.get(number, _UNKNOWN) if self._by_directory else number
            if key in by_key:
                by_key[key].add(one)
            else:
                by_key[key] = one
        self._sums = {}
        if len(self._opened) > KEPT_FILES:
            self._opened.clear()
        until, self._until = self._until, {}
        found = {}
        for key, one in by_key.items():
            spans = list(_merged(one.spans))
            self._until[key] = max(until.get(key, 0), spans[-1][1])
            found[key] = _activity(one, seconds, _waited(spans, until.get(key, 0)))
        return found


def _activity(one: _Sum, seconds: float, waited: float) -> LiveRates:
    answers = sum(one.answered)
    scale = sum(one.kinds) / len(one.spans)  # more than 1 if sampled
    return LiveRates(
        one.kinds[Kind.READ] / seconds,
        one.kinds[Kind.OPEN] / seconds,
        one.kinds[Kind.LOOKUP] / seconds,
        one.bytes / seconds,
        min(1.0, scale * waited / seconds),
        scale * waited,
        {by: one.answered[by] / answers for by in AnsweredBy if one.answered[by]},
    )


def _merged(spans: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The same time, from when to when, without overlaps and in order."""
    at = until = 0
    for span in sorted(spans):
        begin = span >> _TOOK_BITS
        end = begin + (span & _MOST_TOOK)
        if begin > until:
            if until:
                yield at, until
            at, until = begin, end
        elif end > until:
            until = end
    yield at, until


def _waited(spans: Sequence[tuple[int, int]], after: int) -> float:
    """Seconds in them, without what was before ``after``."""
    return sum(max(0, end - max(begin, after)) for begin, end in spans) * 1e-9
