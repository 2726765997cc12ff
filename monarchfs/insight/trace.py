"""A recording as a trace that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, TextIO

from monarchfs.insight.epochs import in_order
from monarchfs.insight.recording import Recording
from monarchfs.insight.results import CAUSES, Epoch, cause_of


def write_trace(recording: Recording, epochs: Sequence[Epoch], stream: TextIO) -> None:
    """One event after the other: a trace may be larger than memory."""
    stream.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = ""
    for event in _events(recording, epochs):
        stream.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    stream.write("\n]}\n")


class _Lanes:
    """Requests of one process that overlap are shown in lanes below each other."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, int]] = []
        self._free: list[int] = []
        self._most = 0

    def take(self, begin: float, end: float) -> int:
        while self._busy and self._busy[0][0] <= begin:
            heappush(self._free, heappop(self._busy)[1])
        if not self._free:
            self._most += 1
        lane = heappop(self._free) if self._free else self._most
        heappush(self._busy, (end, lane))
        return lane


def _events(recording: Recording, epochs: Sequence[Epoch]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "the job"}}
    for epoch in epochs:
        begin, name = epoch.span.begin, f"epoch {epoch.number}"
        yield _complete(name, "epoch", 0, 0, begin, epoch.seconds) | {"args": epoch.to_json()}
    lanes: dict[int, _Lanes] = {}
    names = recording.facts.get("processes") or {}
    for event in in_order(recording.events):
        of_process = lanes.get(event.pid)
        if of_process is None:
            of_process = lanes[event.pid] = _Lanes()
            name = names.get(str(event.pid)) or ("the kernel" if not event.pid else "reader")
            yield {"ph": "M", "name": "process_name", "pid": event.pid, "args": {"name": name}}
        lane = of_process.take(event.begin, event.begin + event.duration)
        file = recording.files.get(event.ino)
        args = {"file": file.path if file else event.ino, "offset": event.offset}
        name, cause = event.kind.name.lower(), CAUSES[cause_of(event)]
        yield {
            **_complete(name, cause, event.pid, lane, event.begin, event.duration),
            "args": {**args, "size": event.size, "answered_by": event.source_of.name.lower()},
        }


def _complete(
    name: str, category: str, pid: int, lane: int, begin: float, seconds: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": lane,
        "ts": round(begin * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
    }
