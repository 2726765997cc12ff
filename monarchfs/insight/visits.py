"""Each file's opens and reads in each epoch: what they cost, and would have cost elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from monarchfs.insight.estimates import RELAY_BYTES_PER_SECOND
from monarchfs.insight.latencies import SIZES, Latencies, size_class
from monarchfs.insight.recording import HANDED, AnsweredBy, Event, File, Kind, hashed, one_of
from monarchfs.insight.results import CHECKS, ELSEWHERE, SourceLimits

_MOST_FILES = 20_000
_ENOUGH = 20
_SLOW = 10
"""So many times the median is slow."""
_AROUND_SECONDS = 0.01
"""A reader whose next request comes later did something else."""


@dataclass(slots=True)
class Visit:
    """``local`` and ``remote`` are the seconds of its opens and reads if these are answered from a
    tier, or from elsewhere: measured if they were, else expected. ``checks`` of the local ones were
    for opens that asked the source. ``remote_bytes`` came from elsewhere. ``unseen`` is what the
    kernel's own reads of the file may have taken."""

    epoch: int
    ino: int
    size: int
    begin: float
    bytes: int = 0
    remote_bytes: int = 0
    measured: float = 0.0
    local: float = 0.0
    remote: float = 0.0
    checks: float = 0.0
    unseen: float = 0.0


@dataclass(slots=True)
class _FileSeen:
    """``visit``: the last one, of a file whose visits are collected. ``named``: a look-up gave its
    number."""

    ino: int
    visit: Visit | None = None
    named: bool = False
    source_reads: int = 0
    slow_reads: int = 0


@dataclass(slots=True)
class LookUps:
    """The seconds of an epoch's look-ups; ``again`` of those that asked the source for a name that
    it had been asked for before. ``around`` is the time from these, and from checks of local files,
    to the same reader's next request: what they cost besides."""

    seconds: float = 0.0
    again: float = 0.0
    around: float = 0.0


class _MeanVisit:
    """What a visit takes, by the bytes that it reads. Those after the first epoch count, where
    there are enough: in the first one files are copied meanwhile."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[int, bool], list[float]] = defaultdict(lambda: [0.0] * 4)

    def add(self, visit: Visit) -> None:
        for later in {False, visit.epoch > 1}:
            sums = self._sums[visit.bytes.bit_length(), later]
            sums[0] += 1
            sums[1] += visit.measured
            sums[2] += visit.checks
            sums[3] += visit.unseen

    def of(self, visit: Visit) -> tuple[float, float, float] | None:
        """The seconds, those of checks among them, and those not seen; None where too few visits
        were alike."""
        for later in (True, False):
            count, seconds, checks, unseen = self._sums[visit.bytes.bit_length(), later]
            if count >= _ENOUGH:
                return seconds / count, checks / count, unseen / count
        return None


class Visits:
    """Collects visits, of at most 20,000 files: one of ``one_of``; and all look-ups, by epoch. And
    finds out whether what was slow in the source was slow again."""

    def __init__(self, files: Mapping[int, File], latencies: Latencies) -> None:
        self.one_of = one_of(len(files), _MOST_FILES)
        self.all: list[Visit] = []
        self._files = files
        self._local, self._remote = latencies.expected(True), latencies.expected(False)
        self._slow = [
            _SLOW * one.percentile(50) if (one := latencies.source(number)) else float("inf")
            for number in range(len(SIZES))
        ]
        self._seen: dict[int, _FileSeen] = {}
        self.look_ups: defaultdict[int, LookUps] = defaultdict(LookUps)
        self._asked: dict[int, float] = {}
        self._slow_files: list[_FileSeen] = []
        self._slow_seconds = self._source_seconds = 0.0
        self._source_reads = 0

    def add(self, epoch: int, origin: int, event: Event, moved: int) -> None:
        begin, duration, kind, answer, ino, pid, offset, read = event
        ended = self._asked.pop(pid, None)
        if ended is not None and ended < begin < ended + _AROUND_SECONDS:
            self.look_ups[epoch].around += begin - ended
        seen = self._seen.get(ino)
        if seen is None:
            seen = self._seen[ino] = _FileSeen(ino)
        if kind is Kind.LOOKUP:
            self._look_up(seen, self.look_ups[epoch], origin, event)
            return
        of_class = size_class(moved)
        if answer is AnsweredBy.SOURCE and moved:
            self._count_source(seen, duration, duration > self._slow[of_class])
        if hashed(ino) & self.one_of - 1:
            return
        visit = seen.visit
        if visit is None or visit.epoch != epoch:
            file = self._files.get(ino)
            size = file.size if file is not None else offset + read
            visit = seen.visit = Visit(epoch, ino, size, begin)
            self.all.append(visit)
        visit.bytes += read
        visit.measured += duration
        if answer in (AnsweredBy.CHECKED, AnsweredBy.CHECKED_KERNEL):
            visit.checks += duration
            self._asked[pid] = begin + duration
        if answer in HANDED:
            visit.unseen += read / RELAY_BYTES_PER_SECOND
        if origin in ELSEWHERE:
            visit.remote_bytes += read
            visit.remote += duration
            visit.local += min(duration, self._local[of_class])
        else:
            visit.local += duration
            reads = max(1, read >> 20) if answer in HANDED else int(kind is Kind.READ)
            visit.remote += max(duration, reads * self._remote[of_class])

    def finish(self) -> None:
        """Whole visits were measured as well: better than the sum of reads that are alike."""
        local, remote = _MeanVisit(), _MeanVisit()
        for visit in self.all:
            if not visit.remote_bytes:
                local.add(visit)
            elif visit.remote_bytes >= visit.bytes:
                remote.add(visit)
        for visit in self.all:
            if visit.remote_bytes and (mean := local.of(visit)):
                visit.local, visit.checks = min(visit.measured, mean[0] + mean[2]), mean[1]
            if visit.remote_bytes < visit.bytes and (mean := remote.of(visit)):
                visit.remote = max(visit.measured, mean[0] - visit.unseen)

    def _look_up(self, seen: _FileSeen, look_ups: LookUps, origin: int, event: Event) -> None:
        look_ups.seconds += event.duration
        if seen.named and origin == CHECKS:
            look_ups.again += event.duration
            self._asked[event.pid] = event.begin + event.duration
        seen.named = event.ino != 0

    def source_limits(
        self, load_share: float | None, bytes_per_second: float, median: float
    ) -> SourceLimits:
        """What was slow was slow again if of the other reads of files with a slow one at least a
        third were slow, too."""
        slow = self._slow_files
        reads = sum(seen.slow_reads for seen in slow)
        others = sum(seen.source_reads for seen in slow) - len(slow)
        example = ""
        if slow:
            ino = max(slow, key=lambda seen: seen.slow_reads).ino
            file = self._files.get(ino)
            example = file.path if file is not None else f"inode {ino}"
        return SourceLimits(
            load_share,
            bytes_per_second,
            median,
            reads / self._source_reads,
            self._slow_seconds / (self._source_seconds or 1),
            len(slow),
            others >= 4 and (reads - len(slow)) * 3 >= others,
            example,
        )

    def _count_source(self, seen: _FileSeen, duration: float, slow: bool) -> None:
        self._source_reads += 1
        self._source_seconds += duration
        seen.source_reads += 1
        if slow:
            if not seen.slow_reads:
                self._slow_files.append(seen)
            seen.slow_reads += 1
            self._slow_seconds += duration
