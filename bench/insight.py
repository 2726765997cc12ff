"""What `monarchfs analyze` says, against what is so: its figures against the job's own log of its
calls, and its estimates against the same job with the changed mount."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import REPOSITORY, Mount, Unusable, memory_place, monarchfs, write_random
from bench.pfs import PROFILES, ParallelFileSystem, Profile
from bench.report import Result
from bench.task import Task
from monarchfs.insight.analysis import analyze
from monarchfs.insight.recording import open_recording
from monarchfs.insight.results import Analysis, Epoch, Outcome

EPOCHS, READERS = 3, 4
FITS = 0.56
NEAR = 0.2
"""The goal: estimates are off by less."""

KIB, MIB = 1 << 10, 1 << 20
SLOW = PROFILES["busy"].quiet()
NARROW = Profile("narrow", 60e6, 0.2e-3, 0.2e-3)
"""Bandwidth is its limit."""


@dataclass(frozen=True)
class Data:
    files: int
    size: int

    @property
    def bytes(self) -> int:
        return self.files * -(-self.size // 4096) * 4096


SMALL, LARGE = Data(600, 110_000), Data(40, 4 * MIB)


@dataclass(frozen=True)
class Setting:
    """A mount: the share of the data that its tier has room for, and other options."""

    fits: float
    options: tuple[str, ...] = ("--freshness", "immutable")


ALL_FIT = Setting(1.2)


@dataclass(frozen=True)
class Case:
    """``change`` begins the name of the estimate; ``first``: it is of the first epoch that the
    estimate speaks."""

    name: str
    change: str
    changed: Setting = ALL_FIT
    before: Setting = Setting(FITS)
    data: Data = SMALL
    profile: Profile = SLOW
    compute: float = 0.0
    first: bool = False
    goal: float | None = NEAR


OPEN = ("--freshness", "open")
CASES = (
    Case("all fits, no computing", " more on ", goal=None),
    Case("all fits", " more on ", compute=0.001),
    Case("all fits, half computing", " more on ", compute=0.004),
    Case("all fits, bandwidth", " more on ", data=LARGE, profile=NARROW, compute=0.01),
    Case("78% fits", " more on ", Setting(0.78), compute=0.001),
    Case(
        *("lru", "--evict lru", Setting(FITS, ("--freshness", "immutable", "--evict", "lru"))),
        compute=0.001,
    ),
    Case(
        *("prefetch all, first epoch", "--prefetch all"),
        Setting(1.2, ("--freshness", "immutable", "--prefetch", "all")),
        ALL_FIT,
        compute=0.004,
        first=True,
        goal=None,
    ),
    Case("immutable", "--freshness immutable", ALL_FIT, Setting(1.2, OPEN), compute=0.001),
)
QUICK = ("all fits", "all fits, half computing", "immutable")


@dataclass
class Measured:
    """Of a case's rounds."""

    ratios: list[float] = field(default_factory=list)
    as_it_was: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def union(intervals: Iterable[Sequence[float]]) -> float:
    """The time that lies in at least one of them."""
    total, reached = 0.0, float("-inf")
    for begin, end, *_ in sorted(intervals, key=lambda one: one[0]):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def logged(epoch: dict[str, Any]) -> tuple[float, float]:
    """By the job's own log: the readers' share of time in calls, from the first to the last of
    each, and bytes a second while at least one of them waited."""
    calls = epoch["calls"]
    by_reader = [[c for c in calls if c[3] == reader] for reader in range(READERS)]
    lived = sum(max(c[1] for c in mine) - min(c[0] for c in mine) for mine in by_reader)
    return sum(map(union, by_reader)) / lived, sum(c[2] for c in calls) / union(calls)


class Run:
    """One job over one mount, recorded. ``seconds`` of its epochs are the job's own."""

    def __init__(self, pfs: ParallelFileSystem, place: Path, setting: Setting, case: Case) -> None:
        size = f"{int(case.data.bytes * setting.fits) >> 10}K"
        log, file = place / "calls", place / "recording"
        job = [sys.executable, "-m", "bench.jobs.logged_reads"]
        with (
            memory_place() as memory,
            Mount(pfs.path, place, *setting.options, tier=memory, size=size) as mount,
        ):
            words = [mount.path, log, EPOCHS, READERS, case.compute]
            command = ["env", f"PYTHONPATH={REPOSITORY}", *job, *map(str, words)]
            monarchfs("record", str(mount.path), "-o", str(file), "--", *command)
        self.log = json.loads(log.read_text())
        self.seconds = [epoch["end"] - epoch["begin"] for epoch in self.log]
        self.found: Analysis = analyze(open_recording(file))
        shutil.rmtree(place)
        if len(self.found.epochs) != EPOCHS:
            raise ValueError(f"{len(self.found.epochs)} epochs were found, not {EPOCHS}")

    @property
    def last(self) -> Epoch:
        return self.found.epochs[-1]

    def outcome(self, change: str, fits: float | None = None) -> Outcome:
        """With several of a name, the one that makes so much local."""
        of_name = [one for one in self.found.outcomes if change in one.change]
        wanted = 1.0 if fits is None else min(1.0, fits)
        return min(of_name, key=lambda one: abs(one.hit_ratio - wanted))


def measure(pfs: ParallelFileSystem, place: Path, case: Case, measured: Measured) -> None:
    before = Run(pfs, place / "before", case.before, case)
    after = Run(pfs, place / "after", case.changed, case)
    estimate = before.outcome(case.change, case.changed.fits)
    if case.first:
        measured.ratios.append(estimate.first_epoch_seconds / after.seconds[0])
    else:
        measured.ratios.append(estimate.epoch_seconds / after.seconds[-1])
    measured.as_it_was.append(before.outcome("as it was").epoch_seconds / before.seconds[-1])
    waited, rate = logged(before.log[-1])
    measured.waited.append(before.last.waited_share / waited)
    measured.rates.append(before.last.bytes / before.last.span.waiting / rate)


def run(task: Task) -> Result:
    if os.geteuid() != 0:
        raise Unusable("kernel caches have to be dropped between epochs: run as root")
    result = Result("insight", "what analyze says, against what is so")
    cases = [case for case in CASES if not task.quick or case.name in QUICK]
    for case in cases:
        backing, measured = task.place / "data", Measured()
        with memory_place() as memory:
            backing = memory / "data"
            rng = random.Random(1)
            for number in range(case.data.files):
                write_random(backing / f"{number % 8}" / f"{number:04}", case.data.size, rng)
            with ParallelFileSystem(backing, task.place / "pfs", case.profile) as pfs:
                for number in range(task.rounds_or(1, 3)):
                    task.say(f"{case.name}, round {number + 1}")
                    measure(pfs, task.place, case, measured)
        _show(result, case, measured)
        task.keep(result)
    result.notes = [
        "prefetch all: the mount begins to copy at once, the estimate assumes with the first read",
        "no computing: with all files local the processors are the limit, which no recording shows",
        f"{EPOCHS} epochs, {READERS} readers, files in another order in each epoch; kernel caches"
        f" dropped before each; {FITS:.0%} of the data fit the tier, if nothing else is said",
        "estimate / real: what the recording of the job says the last epoch (or the first) would"
        " take with the change, by what it took when the job was run so",
        "by the job's log: what analyze says by what the job's own log of its calls gives",
    ]
    return result


def _show(result: Result, case: Case, measured: Measured) -> None:
    middle = statistics.median
    off = max(middle(measured.ratios), 1 / middle(measured.ratios)) - 1
    result.figure(
        f"{case.name}: estimate / real", middle(measured.ratios), "x", values=measured.ratios
    )
    result.figure(f"{case.name}: off by", off, "x", at_most=case.goal)
    result.figure(f"{case.name}: as it was / real", middle(measured.as_it_was), "x")
    for what, ratios in (("waiting", measured.waited), ("bandwidth", measured.rates)):
        difference = 100 * (middle(ratios) - 1)
        result.figure(f"{case.name}: {what}, but by the job's log", difference, "%")
