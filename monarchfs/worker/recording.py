"""The command ``record``: what the mount answers, event by event, to one client: to ``monarchfs
record``, or ``monarchfs top``.

The C part notes the events (core/_record.c). Here they are drained, and inode numbers get their
paths, a few at a time, so that this stays small beside the mount's own work. A client that is slow
loses events; the mount does not wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import ModuleType
from typing import Any

import trio

from monarchfs.cache.index.index import Index
from monarchfs.control import messages
from monarchfs.insight.recording import EVENT, MOST_SAMPLE, File
from monarchfs.types import ROOT_INO, FreshnessMode, OperationError
from monarchfs.worker.composition import Composition

TICK_SECONDS = 0.1
"""So often the ring is drained. It has room for 65,536 events."""

MOST_PARTS = 16
"""So many times 8,192 events are taken in one go: more than the ring has."""

QUIET_SECONDS = 1.0
"""A client hears at least once in this time."""

NAMES_A_TICK = 200
"""Paths cost some 4 us each; the rest of them comes at the end."""

RATE_SECONDS = 1.0
"""How often the sample is fitted to the rate that a client asked for."""

MOST_KNOWN = 100_000
"""A client that asked for a rate may stay for days: once there were so many files, it hears again
of files and processes."""

_WORDS, _SHORTS = EVENT.size // 8, EVENT.size // 4
_INO, _PID = 1, 8
"""Where they are among the words of 8, and of 4, bytes of an event."""


class Recordings:
    """Constant: the C part, the mount's parts. Changing: whether somebody records."""

    def __init__(self, hooks: ModuleType, parts: Composition) -> None:
        self._hooks = hooks
        self._parts = parts
        self._busy = False

    async def answer(self, request: Mapping[str, Any], stream: trio.SocketStream) -> dict[str, Any]:
        """Send events until the client says no more; the result. Raises OperationError."""
        sample = request.get("sample", 1)
        if not isinstance(sample, int) or not 0 < sample <= MOST_SAMPLE or sample & (sample - 1):
            raise OperationError(f"sample must be a power of two of at most {MOST_SAMPLE}")
        rate = request.get("rate", 0)
        if not isinstance(rate, int) or rate < 0:
            raise OperationError("rate must be a number of events a second")
        if not self._parts.relays:
            raise OperationError("this mount is in safe mode: see monarchfs status")
        if self._busy:
            raise OperationError(
                "this mount is being recorded already (monarchfs record or top): wait until that"
                " has ended"
            )
        self._busy = True
        try:
            begun, origin_ns = time.time(), self._hooks.record_begin(sample)
            head = {"begun": begun, "origin_ns": origin_ns, "facts": _facts(self._parts)}
            recorder = _EventStream(self._hooks, self._parts.index, stream, sample, rate)
            async with trio.open_nursery() as nursery:
                ended = trio.Event()
                nursery.start_soon(_wait_for_end, stream, ended)
                # A client that is gone gets no reply either.
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await stream.send_all(messages.encode_progress(head))
                    await recorder.follow(ended)
                    self._hooks.record_end()
                    await recorder.finish()
                nursery.cancel_scope.cancel()
            return recorder.result
        finally:
            self._hooks.record_end()
            self._busy = False


def _facts(parts: Composition) -> dict[str, Any]:
    """What a recording says of the mount."""
    config = parts.config
    ttl = f"={config.freshness.ttl_seconds:g}" if config.freshness.mode is FreshnessMode.TTL else ""
    return {
        "source": config.source,
        "mount_point": config.mountpoint,
        "data_path": parts.data_path,
        "freshness": f"{config.freshness.mode.value}{ttl}",
        "prefetch": config.prefetch.value,
        "policy": config.evict.value,
        "tiers": [
            {"path": tier["path"], "capacity": tier["capacity_bytes"]}
            for tier in parts.cache.usage.report()
        ],
        "hidden": [
            *([] if parts.relay.direct else ["reads"]),
            *(["opens"] if parts.relay.free_opens else []),
            "lookups",
        ],
    }


async def _wait_for_end(stream: trio.SocketStream, ended: trio.Event) -> None:
    """The client says so by closing its side."""
    with suppress(trio.BrokenResourceError):  # it is gone: the next line to it fails
        while await stream.receive_some(64):
            pass
    ended.set()


class _EventStream:
    """One recording. Changing: ``sample``; numbers whose path is still to be told; what is known
    of processes and directories; since when so many events came."""

    def __init__(
        self, hooks: ModuleType, index: Index, stream: trio.SocketStream, sample: int, rate: int
    ) -> None:
        """``rate``: so many events a second are wanted; 0: all of them."""
        self._hooks = hooks
        self._index = index
        self._stream = stream
        self._sample, self._least_sample = sample, sample
        self._rate = rate
        self._lost = 0
        self._since, self._events = trio.current_time(), 0
        self._paths = _Paths(index)
        self._processes = {0}
        self._told = 0.0

    async def follow(self, ended: trio.Event) -> None:
        while not ended.is_set():
            with trio.move_on_after(TICK_SECONDS):
                await ended.wait()
            await self._drain(NAMES_A_TICK)

    async def finish(self) -> None:
        await self._drain(NAMES_A_TICK)
        while self._paths.any:
            await self._send(b"", NAMES_A_TICK)

    @property
    def result(self) -> dict[str, Any]:
        return {"lost": self._lost, "sampled": self._sample}

    async def _drain(self, names: int) -> None:
        lost_before = self._lost
        for _part in range(MOST_PARTS):
            events, self._lost = self._hooks.record_drain()
            now = trio.current_time()
            if events or self._paths.any or now - self._told > QUIET_SECONDS:
                self._told = now
                self._events += len(events) // EVENT.size
                await self._send(events, names)
            if not events:
                break
            names = 0
        if self._lost > lost_before:
            self._change_sample(self._sample * 2)
        elif self._rate and trio.current_time() - self._since >= RATE_SECONDS:
            self._fit_sample()

    def _fit_sample(self) -> None:
        """So that events and new files come no faster than wanted."""
        now = trio.current_time()
        seconds, events = now - self._since, self._events
        self._since, self._events = now, 0
        most_files = NAMES_A_TICK / TICK_SECONDS
        load = max(events / self._rate, self._paths.take_fresh() / most_files) / seconds
        sample = self._sample
        while load > 1 and sample < MOST_SAMPLE:
            sample, load = sample * 2, load / 2
        if load < 0.25 and sample > self._least_sample:
            sample //= 2
        if sample > self._sample or self._paths.known > MOST_KNOWN:
            # Of those that wait to be told most are not in the sample any more.
            self._paths, self._processes = _Paths(self._index), {0}
        self._change_sample(sample)

    def _change_sample(self, sample: int) -> None:
        if sample != self._sample and sample <= MOST_SAMPLE:
            self._sample = sample
            self._hooks.record_sample(sample)

    async def _send(self, events: bytes, names: int) -> None:
        self._paths.want(events)
        fresh = set(memoryview(events).cast("I")[_PID::_SHORTS]) - self._processes
        self._processes |= fresh
        head = {
            "bytes": len(events),
            "lost": self._lost,
            "sampled": self._sample,
            # Without those that have ended.
            "processes": {number: name for number in fresh if (name := _name_of(number))},
            "files": self._paths.some(names),
        }
        await self._stream.send_all(messages.encode_progress(head) + events)


def _name_of(process: int) -> str:
    try:
        with open(f"/proc/{process}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


class _Paths:
    """The paths of inode numbers, each once. Changing: which are still to be told, and how many are
    new."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._seen: set[int] = {0}
        self._wanted: dict[int, None] = {}
        self._fresh = 0
        self._directories: dict[int, bytes] = {ROOT_INO: b""}

    @property
    def any(self) -> bool:
        return bool(self._wanted)

    def want(self, events: bytes) -> None:
        fresh = set(memoryview(events).cast("Q")[_INO::_WORDS]) - self._seen
        self._seen |= fresh
        self._fresh += len(fresh)
        self._wanted.update(dict.fromkeys(fresh))

    @property
    def known(self) -> int:
        return len(self._seen)

    def take_fresh(self) -> int:
        """How many are new since this was asked."""
        fresh, self._fresh = self._fresh, 0
        return fresh

    def some(self, most: int) -> dict[int, File]:
        """So many of them. What the index does not know is left out."""
        inos = list(islice(self._wanted, most))
        for ino in inos:
            del self._wanted[ino]
        return dict(self._files(inos))

    def _files(self, inos: Sequence[int]) -> Iterator[tuple[int, File]]:
        for ino, node in self._index.nodes.nodes_of(inos).items() if inos else ():
            path = os.fsdecode(self._directory(node.parent) + node.name)
            directory = node.stat.is_directory
            yield ino, File(f"{path}/", 0) if directory else File(path, node.stat.size)

    def _directory(self, ino: int) -> bytes:
        """With a slash, unless it is the root."""
        known = self._directories.get(ino)
        if known is None:
            ref = self._index.nodes.dirref(ino)
            known = self._directories[ino] = b"" if ref is None else ref.path + b"/"
        return known
