"""What an analysis finds: plain values, which `--json`, the text and the page show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Any

from monarchfs.insight.recording import AnsweredBy, Event, File, Kind

CAUSES = ("source", "checks", "memory", "tier", "peer", "copy", "names", "unknown")
"""What a request waits for: ``checks`` are look-ups and opens that asked the source for names and
attributes, not for data; ``memory`` is that of the daemon, ``copy`` one that is under way,
``names`` are look-ups and opens that were answered on the node."""
SOURCE, CHECKS, MEMORY, TIER, PEER, COPY, NAMES, UNKNOWN = range(len(CAUSES))
LOCAL = (MEMORY, TIER)
ELSEWHERE = (SOURCE, PEER, COPY)
_MOST_WITH_OPEN = 1 << 20

_OF_ANSWER = [UNKNOWN] * len(AnsweredBy)
_OF_ANSWER[AnsweredBy.SOURCE] = SOURCE
_OF_ANSWER[AnsweredBy.MEMORY] = MEMORY
_OF_ANSWER[AnsweredBy.TIER] = TIER
_OF_ANSWER[AnsweredBy.PEER] = PEER
_OF_ANSWER[AnsweredBy.WAITED] = COPY
_OF_ANSWER[AnsweredBy.CHECKED] = _OF_ANSWER[AnsweredBy.CHECKED_KERNEL] = CHECKS


def cause_of(event: Event) -> int:
    """Small files come with the open, so an open waits for who gives the data."""
    cause = _OF_ANSWER[event.source_of]
    if event.kind is Kind.LOOKUP and cause == SOURCE:
        return CHECKS
    return cause if event.kind is Kind.READ or cause in (*ELSEWHERE, CHECKS) else NAMES


def moved_bytes(event: Event, files: Mapping[int, File]) -> int:
    """What the answer to a read, or to an open by the source, moved."""
    if event.kind is Kind.OPEN and event.source_of is AnsweredBy.SOURCE:
        file = files.get(event.ino)
        return file.size if file is not None and file.size <= _MOST_WITH_OPEN else 0
    return event.size


def none_each() -> list[float]:
    return [0.0] * len(CAUSES)


@dataclass(slots=True)
class Span:
    """What happened between two moments. Lists are by cause.

    ``waiting`` is the time with at least one request under way, ``shared`` the same divided among
    the causes, ``merged`` the time with at least one of that cause. Of the time with readers, in
    ``all_waiting`` all of them waited, in ``idle`` none. ``waited`` adds up the share of readers
    that waited: 1 s in which two of four did counts 0.5 s.
    """

    begin: float
    end: float
    waiting: float = 0.0
    shared: list[float] = field(default_factory=none_each)
    merged: list[float] = field(default_factory=none_each)
    reading: float = 0.0
    all_waiting: float = 0.0
    idle: float = 0.0
    with_readers: float = 0.0
    waited: float = 0.0
    reader_seconds: float = 0.0
    requests: int = 0
    bytes: list[float] = field(default_factory=none_each)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def add(self, other: Span) -> None:
        """``other`` follows."""
        self.end = other.end
        self.waiting += other.waiting
        self.reading += other.reading
        self.all_waiting += other.all_waiting
        self.idle += other.idle
        self.with_readers += other.with_readers
        self.waited += other.waited
        self.reader_seconds += other.reader_seconds
        self.requests += other.requests
        self.shared = [*map(add, self.shared, other.shared)]
        self.merged = [*map(add, self.merged, other.merged)]
        self.bytes = [*map(add, self.bytes, other.bytes)]


@dataclass(frozen=True, slots=True)
class FilesOfEpoch:
    """How many files were read, whole, by several processes, at least in part from the source."""

    read: int
    whole: int
    shared: int
    source: int
    source_bytes: int


@dataclass(slots=True)
class Epoch:
    number: int
    span: Span
    files: FilesOfEpoch

    @property
    def seconds(self) -> float:
        return self.span.seconds

    @property
    def bytes(self) -> int:
        return int(sum(self.span.bytes))

    @property
    def hit_ratio(self) -> float:
        """The share of bytes that came from a tier: those in memory the source or a peer gave."""
        return self.span.bytes[TIER] / (self.bytes or 1)

    @property
    def readers(self) -> float:
        """How many there were, on average over the time when there were any."""
        return self.span.reader_seconds / (self.span.with_readers or 1)

    @property
    def waited_share(self) -> float:
        return self.span.waited / (self.span.with_readers or 1)

    @property
    def bandwidth(self) -> float:
        """Bytes a second while at least one read was under way."""
        return self.bytes / (self.span.reading or 1)

    def to_json(self) -> dict[str, Any]:
        span = self.span
        return {
            "number": self.number,
            "begin": span.begin,
            "seconds": self.seconds,
            "requests": span.requests,
            "files": self.files.read,
            "whole_files": self.files.whole,
            "shared_files": self.files.shared,
            "source_files": self.files.source,
            "bytes": self.bytes,
            "bytes_from": dict(zip(CAUSES, map(int, span.bytes), strict=True)),
            "hit_ratio": self.hit_ratio,
            "bytes_per_second_while_reading": self.bandwidth,
            "waiting_seconds": span.waiting,
            "waiting_seconds_for": dict(zip(CAUSES, span.shared, strict=True)),
            "merged_seconds_for": dict(zip(CAUSES, span.merged, strict=True)),
            "readers": self.readers,
            "readers_waited_share": self.waited_share,
            "all_waiting_seconds": span.all_waiting,
            "all_idle_seconds": span.idle,
        }


@dataclass(slots=True)
class Latency:
    """Requests of one cause and class of sizes (0: opens and look-ups). ``histogram`` has
    (seconds up to, requests)."""

    cause: str
    up_to_bytes: int
    requests: int
    bytes: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float
    histogram: list[tuple[float, int]]


@dataclass(slots=True)
class HotFile:
    path: str
    size: int
    reads: int
    bytes: int


@dataclass(slots=True)
class Pattern:
    """Shares are of reads. ``order_alike`` compares each epoch's order of files with the one
    before: 1 is the same, about 0 another one; None where it is not known."""

    sequential: float
    strided: float
    random: float
    whole_files: float
    order_alike: float | None
    read_bytes: float
    sizes: list[dict[str, int]]
    hot: list[HotFile]


@dataclass(slots=True)
class SourceLimits:
    """How the source's answers took their time. ``load_share`` is the part of a read's time that
    grows with the bytes under way: near 1 bandwidth is the limit, near 0 latency; None where always
    as many were under way. A read is slow
    that took ten times the median. ``same_files``: what was slow was slow again."""

    load_share: float | None
    bytes_per_second: float
    median: float
    slow_share_of_reads: float
    slow_share_of_time: float
    slow_files: int
    same_files: bool
    example: str


@dataclass(slots=True)
class Outcome:
    """What a replay expects of other settings, for the epoch of the verdict and for the first."""

    change: str
    hit_ratio: float
    epoch_seconds: float
    first_epoch_seconds: float


@dataclass(slots=True)
class Conclusion:
    """``kind``: "input-bound", "mixed", "compute-bound", or "unknown"."""

    kind: str
    epoch: int
    lines: list[str]
    reservations: list[str]


@dataclass(slots=True)
class Analysis:
    """``timeline`` divides the recording into equal spans, ``gaps`` are the pauses between the
    requests of one reader: (seconds up to, how many)."""

    facts: dict[str, Any]
    begun: float
    seconds: float
    events: int
    epochs: list[Epoch]
    timeline: list[Span]
    latencies: list[Latency]
    gaps: list[tuple[float, int]]
    pattern: Pattern
    source: SourceLimits | None
    outcomes: list[Outcome]
    verdict: Conclusion
