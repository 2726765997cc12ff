"""Jobs that read, in imagined time: what a recording of them holds is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from typing import Any

from monarchfs.insight.recording import EVENT, AnsweredBy, Event, File, Kind, RecordingWriter

SOURCE = AnsweredBy.SOURCE
KIB, MIB = 1 << 10, 1 << 20
FACTS = {
    "source": "/lustre/images",
    "mount_point": "/mnt/images",
    "command": ["python", "train.py"],
    "data_path": "relay",
    "freshness": "open",
    "prefetch": "access",
    "policy": "keep",
    "tiers": [{"path": "/scratch", "capacity": 1 << 40}],
    "dropped": 0,
    "sampled": 1,
    "hidden": [],
    "gaps": [],
}

Answer = Callable[["Job", float, int, int], tuple[AnsweredBy, float]]
"""From the moment, the inode and the bytes: who answers, and after how many seconds."""


@dataclass
class Job:
    """``readers`` divide the files among them, in another order in each epoch, and compute for
    ``compute`` seconds after each file. With ``shared`` each of them reads all. The source takes
    ``asked`` seconds to look a name up, and as long to open a file of its own or to check one that
    is local; if ``immutable``, it looks up in the first epoch alone, and checks nothing."""

    answer: Answer
    files: dict[int, File] = field(default_factory=lambda: many_files(400, 100 * KIB))
    readers: int = 4
    epochs: int = 2
    compute: float = 0.0
    asked: float = 0.0
    immutable: bool = False
    shared: bool = False
    forks: bool = False
    request_bytes: int = 128 * KIB
    random: random.Random = field(default_factory=lambda: random.Random(7))
    resident: set[int] = field(default_factory=set)
    epoch: int = 0
    busy_until: float = 0.0
    begins: list[float] = field(default_factory=list)
    end: float = 0.0

    def events(self) -> list[Event]:
        found: list[Event] = []
        for number in range(self.epochs):
            self.epoch = number
            self.begins.append(self.end)
            first = 1000 + self.readers * number * self.forks
            order = self.random.sample(list(self.files), len(self.files))
            if self.shared:
                order = [ino for ino in order for _ in range(self.readers)]
            pids = range(first, first + self.readers)
            found += self._reads([(self.end, pid) for pid in pids], order)
            self.end = max(event.begin + event.duration for event in found)
        return sorted(found, key=lambda event: event.begin + event.duration)

    def _reads(self, free: list[tuple[float, int]], order: Sequence[int]) -> Iterable[Event]:
        heapify(free)
        files, at = iter(order), dict[int, tuple[int, int]]()
        while free:
            now, pid = free[0]
            ino, offset = at.get(pid) or (next(files, 0), 0)
            if not ino:
                heappop(free)
                continue
            left = self.files[ino].size - offset
            size = min(self.request_bytes, left)
            answered_by, seconds = self.answer(self, now, ino, size)
            for kind, by in self._asked(answered_by) if not offset else ():
                yield Event(now, self.asked, kind, by, ino, pid, 0, 0)
                now += self.asked
            yield Event(now, seconds, Kind.READ, answered_by, ino, pid, offset, size)
            at[pid] = ino, offset + size
            if size == left:
                del at[pid]
                seconds += self.compute * self.random.uniform(0.8, 1.2)
            heapreplace(free, (now + seconds, pid))

    def _asked(self, answered_by: AnsweredBy) -> Iterable[tuple[Kind, AnsweredBy]]:
        checks = not self.immutable
        if self.asked and (checks or not self.epoch):
            yield Kind.LOOKUP, SOURCE
        if self.asked and (checks or answered_by is SOURCE):
            yield Kind.OPEN, SOURCE if answered_by is SOURCE else AnsweredBy.CHECKED

    def record(self, path: Path, **facts: Any) -> Path:
        events = self.events()
        with path.open("wb") as stream:
            writer = RecordingWriter(stream, 1.7e9, FACTS | facts)
            writer.add_files(self.files)
            add_events(writer, events)
            writer.finish(self.end, {})
        return path


def add_events(writer: RecordingWriter, events: Iterable[Event], origin_ns: int = 0) -> None:
    """As the C part packs them."""
    for begin, duration, kind, answer, ino, pid, offset, size in events:
        moment = origin_ns + round(begin * 1e9)
        writer.add_packed(EVENT.pack(moment, ino, offset, duration, size, pid, kind, answer))


def many_files(count: int, size: int) -> dict[int, File]:
    return {100 + n: File(f"train/{n:04}.jpg", size) for n in range(count)}


def always(answered_by: AnsweredBy, seconds: float) -> Answer:
    return lambda job, _now, _ino, _size: (answered_by, seconds * job.random.uniform(0.8, 1.2))


def source_until_copied(fits: float, source: float) -> Answer:
    """The share ``fits`` of files is copied when it is read first. A tier answers in 1 ms."""

    def answer(job: Job, _now: float, ino: int, _size: int) -> tuple[AnsweredBy, float]:
        local = ino in job.resident and job.epoch > 0
        if len(job.resident) < fits * len(job.files):
            job.resident.add(ino)
        seconds = (0.001 if local else source) * job.random.uniform(0.8, 1.2)
        return AnsweredBy.TIER if local else AnsweredBy.SOURCE, seconds

    return answer


def bandwidth(bytes_per_second: float) -> Answer:
    """One read after the other is carried."""

    def answer(job: Job, now: float, _ino: int, size: int) -> tuple[AnsweredBy, float]:
        job.busy_until = max(now, job.busy_until) + size / bytes_per_second
        return AnsweredBy.SOURCE, job.busy_until - now

    return answer


def sizes_like(files: Mapping[int, File], *sizes: int) -> dict[int, File]:
    return {ino: File(file.path, sizes[ino % len(sizes)]) for ino, file in files.items()}
