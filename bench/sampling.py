"""What a mount served locally, sample by sample, while a job runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.harness import repeated
from bench.processes import Daemon
from bench.report import Kind, Point, Series
from monarchfs.types import OperationError

PERIOD_SECONDS = 0.25
WINDOW_SECONDS = 1.0


class Sample(NamedTuple):
    """``local`` and ``source``: the sizes of all files opened so far that were local then, and that
    were not, in bytes; ``seconds`` since the first sample."""

    seconds: float
    local: int
    source: int


def served_by(mountpoint: Path) -> Callable[[], tuple[int, int]]:
    """What the daemon of that mount says of the files opened so far: local and source bytes."""
    daemon = Daemon(mountpoint)

    def ask() -> tuple[int, int]:
        served = daemon.status()["served"]
        return served["local_file_bytes"], served["source_file_bytes"]

    return ask


@contextmanager
def sampled(
    ask: Callable[[], tuple[int, int]], seconds: float = PERIOD_SECONDS
) -> Iterator[list[Sample]]:
    """``ask``, every so many seconds while the block runs, at its beginning and at its end. The
    list is complete after the block. A worker that is being replaced gives no sample."""
    samples: list[Sample] = []
    began = time.monotonic()

    def take() -> None:
        try:
            local, source = ask()
        except OperationError:
            return
        samples.append(Sample(time.monotonic() - began, local, source))

    take()
    with repeated(take, seconds):
        yield samples
    take()


def local_shares(samples: Sequence[Sample], window: float = WINDOW_SECONDS) -> list[Point]:
    """For each sample the share of what was opened in the ``window`` seconds before it, in percent.
    Times in which nothing was opened have no point; nor has what a replaced worker counted anew."""
    points: list[Point] = []
    first = 0
    for now in samples:
        while now.seconds - samples[first].seconds > window:
            first += 1
        local = now.local - samples[first].local
        source = now.source - samples[first].source
        if local < 0 or source < 0 or local + source == 0:
            continue
        points.append(Point(now.seconds, 100 * local / (local + source)))
    return points


def share_series(
    arm: str, samples: Sequence[Sample], plot: str, *, epochs: Sequence[float] = (), panel: str = ""
) -> Series:
    """``epochs``: when each began, in seconds since the first sample."""
    return Series(
        *(arm, "time (s)", "opened from local storage (%)", local_shares(samples), Kind.TIME),
        plot=plot,
        panel=panel,
        marks=list(epochs),
    )
