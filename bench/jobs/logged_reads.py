"""A job for bench/insight.py: processes that read all files of a directory, and log their calls.

``python -m bench.jobs.logged_reads ROOT LOG EPOCHS READERS COMPUTE``; a reader computes for COMPUTE
seconds after each file. LOG gets, for each epoch, when it began and ended and each call (begin,
end, bytes, reader), in seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

from bench.harness import drop_caches, forget_pages

_BLOCK = 1 << 20
Call = tuple[float, float, int, int]


def read_file(path: str, reader: int, buffer: bytearray) -> list[Call]:
    calls = []
    begin = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        calls.append((begin, time.monotonic(), 0, reader))
        forget_pages(file.fileno())
        while True:
            begin = time.monotonic()
            count = file.readinto(buffer)
            if not count:
                return calls
            calls.append((begin, time.monotonic(), count, reader))


def compute(seconds: float) -> None:
    """As an accelerator: the processor is free."""
    if seconds:
        time.sleep(seconds)


def read_epochs(
    paths: list[str], epochs: int, readers: int, reader: int, seconds: float, barrier: Barrier
) -> list[list[Call]]:
    """The calls of one reader, by epoch."""
    buffer, found = bytearray(_BLOCK), []
    for epoch in range(epochs):
        order = random.Random(epoch).sample(paths, len(paths))
        barrier.wait()
        calls: list[Call] = []
        for path in order[reader::readers]:
            calls += read_file(path, reader, buffer)
            compute(seconds)
        found.append(calls)
        barrier.wait()
    return found


def _run(
    log: str,
    paths: list[str],
    epochs: int,
    readers: int,
    reader: int,
    pause: float,
    barrier: Barrier,
) -> None:
    found = read_epochs(paths, epochs, readers, reader, pause, barrier)
    Path(log).write_text(json.dumps(found))


def main(root: str, log: str, epochs: int, readers: int, seconds: float) -> None:
    paths = sorted(os.path.join(place, name) for place, _, names in os.walk(root) for name in names)
    context = get_context("fork")
    barrier = context.Barrier(readers + 1)
    logs = [f"{log}.{reader}" for reader in range(readers)]
    tasks = [
        (name, paths, epochs, readers, reader, seconds, barrier) for reader, name in enumerate(logs)
    ]
    processes = [context.Process(target=_run, args=task) for task in tasks]
    for process in processes:
        process.start()
    spans = []
    for _epoch in range(epochs):
        drop_caches()
        begin = time.monotonic()
        barrier.wait()
        barrier.wait()
        spans.append((begin, time.monotonic()))
    for process in processes:
        process.join()
    by_reader = [json.loads(Path(name).read_text()) for name in logs]
    found = [
        {"begin": begin, "end": end, "calls": [call for one in by_reader for call in one[epoch]]}
        for epoch, (begin, end) in enumerate(spans)
    ]
    Path(log).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
