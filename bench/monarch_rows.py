"""What the runs of MONARCH's experiment come to: figures, goals and series."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench.arms import COLD, DIRECT, LOCAL, WARM
from bench.monarch_runs import Measured, Run
from bench.report import Kind, Result, Series, point
from bench.sampling import share_series

FIRST_EPOCH = 1.05
LATER_EPOCHS = 1.03
STILL_READ = 0.46
# More than the dataset's bytes by what is read ahead and thrown away before anybody used it.
READ_ONCE = 1.005


class Case(NamedTuple):
    """``what`` was run, whether the dataset ``fits``, its bytes, and whether its figures belong
    into the headlines."""

    what: str
    fits: bool
    size: int
    headline: bool = False


def rows(result: Result, case: Case, runs: Mapping[str, Sequence[Run]]) -> None:
    """``runs`` by the arms' names, round by round."""

    def compare(
        arm: str,
        what: str,
        unit: str,
        value: Callable[[Run], float],
        *,
        against: str = DIRECT.name,
        at_most: float | None = None,
        why: str = "",
        headline: bool = False,
    ) -> None:
        result.compare(
            *(f"{case.what}: {what}", unit, list(map(value, runs[arm]))),
            list(map(value, runs[against])),
            at_most=at_most,
            against=against,
            arm=arm,
            why=why,
            headline=f"{case.what}: {what}, {arm}" if headline and case.headline else "",
        )

    for arm in runs:
        if arm == DIRECT.name:
            continue
        ours, cold = arm in (COLD.name, WARM.name), arm == COLD.name
        goal = FIRST_EPOCH if cold else None
        why = busy(runs[arm], runs[DIRECT.name], case.size) if cold else ""
        compare(arm, "epoch 1", "s", first_seconds, at_most=goal, why=why, headline=cold)
        if ours and LOCAL.name in runs:
            to, what = LOCAL.name, "epoch 2 and on"
            compare(
                *(arm, what, "s", later_seconds), against=to, at_most=LATER_EPOCHS, headline=cold
            )
        compare(arm, "all epochs", "s", Run.seconds, headline=ours)
        ready = [run.ready_seconds for run in runs[arm]]
        if any(ready):
            what = f"{case.what}: before the job"
            result.figure(what, statistics.median(ready), "s", values=ready, arm=arm)
        if arm == LOCAL.name:
            continue
        for later, epochs in enumerate(("epoch 1", "epoch 2 and on")):
            most = STILL_READ if ours and later and not case.fits else None
            for what, unit, value in (
                ("bytes read", "B", read_bytes),
                ("operations", "", operations),
            ):
                shown = most is not None and cold
                compare(
                    *(arm, f"{epochs}, {what}", unit, value(later)), at_most=most, headline=shown
                )
        if cold:
            read = [run.epochs[0].counts.read_bytes / case.size for run in runs[arm]]
            what = f"{case.what}: epoch 1, bytes read"
            result.figure(
                *(what, statistics.median(read), "x data"),
                at_most=READ_ONCE,
                values=read,
                arm=arm,
                headline=f"{what}, {arm}" if case.headline else "",
            )
            used = [run.epochs[0].daemon_seconds / (case.size / 1e9) for run in runs[arm]]
            what = f"{case.what}: epoch 1, processor time of the daemons a GB"
            result.figure(what, statistics.median(used), "s", values=used, arm=arm)
    series(result, case, runs)


def busy(runs: Sequence[Run], plain: Sequence[Run], size: int) -> str:
    """Why a first epoch takes longer, as far as this machine's processors tell."""

    def idle(some: Sequence[Run]) -> float:
        return statistics.median(run.epochs[0].idle_share for run in some)

    used = statistics.median(run.epochs[0].daemon_seconds for run in runs) / (size / 1e9)
    return (
        f"the daemons took {used:.1f} s of processor time a GB; the machine's processors were"
        f" {idle(runs):.0%} idle, {idle(plain):.0%} without the mount"
    )


def first_seconds(run: Run) -> float:
    return run.epochs[0].epoch.seconds


def later_seconds(run: Run) -> float:
    return run.seconds(1)


def read_bytes(later: int) -> Callable[[Run], float]:
    """Of the first epoch (0) or of all later ones (1)."""
    return lambda run: sum(measured.counts.read_bytes for measured in _epochs(run, later))


def operations(later: int) -> Callable[[Run], float]:
    """The same, of operations."""
    return lambda run: sum(measured.counts.operations for measured in _epochs(run, later))


def _epochs(run: Run, later: int) -> list[Measured]:
    return run.epochs[1:] if later else run.epochs[:1]


def series(result: Result, case: Case, runs: Mapping[str, Sequence[Run]]) -> None:
    """Bars of the epochs by arm, what each reads, and what the mount serves locally over time: one
    picture of each for all cases that fit, and for those that do not."""
    panel, _, fits = case.what.rpartition(", ")
    for arm, each in runs.items():
        epochs = range(len(each[0].epochs))
        result.series.append(
            Series(
                *(arm, "", "time of an epoch (s)"),
                [
                    point(f"epoch {n + 1}", [run.epochs[n].epoch.seconds for run in each])
                    for n in epochs
                ],
                Kind.BARS,
                plot=f"Epoch times, {fits}",
                panel=panel,
            )
        )
        result.series.append(
            Series(
                *(arm, "", "read of the parallel FS (x data)"),
                [
                    point(
                        f"epoch {n + 1}",
                        [run.epochs[n].counts.read_bytes / case.size for run in each],
                    )
                    for n in epochs
                ],
                Kind.BARS,
                plot=f"Read of the parallel file system, {fits}",
                panel=panel,
            )
        )
        if each[-1].samples:
            seconds = [measured.epoch.seconds for measured in each[-1].epochs]
            began = [sum(seconds[:number]) for number in epochs]
            plot = f"Served locally, {fits}"
            samples = each[-1].samples
            result.series.append(share_series(arm, samples, plot, epochs=began, panel=panel))


def first_epoch_rows(
    result: Result, profile: str, share: float, size: int, runs: Mapping[str, Sequence[Run]]
) -> None:
    """Of a first epoch with local storage for ``share`` of the dataset of ``size`` bytes."""
    cold, plain = runs[COLD.name], runs[DIRECT.name]
    what = f"first epoch alone, {profile}, {share:.0%} fits"
    ratios = [first_seconds(a) / first_seconds(b) for a, b in zip(cold, plain, strict=True)]
    result.compare(
        *(f"{what}: time", "s", list(map(first_seconds, cold)), list(map(first_seconds, plain))),
        at_most=FIRST_EPOCH,
        against=DIRECT.name,
        arm=COLD.name,
        why=busy(cold, plain, size),
    )
    read = [run.epochs[0].counts.read_bytes / size for run in cold]
    result.figure(
        f"{what}: bytes read",
        *(statistics.median(read), "x data"),
        at_most=READ_ONCE,
        values=read,
        arm=COLD.name,
    )
    plot = "First epoch through an empty cache, to the parallel file system alone"
    for known in result.series:
        if known.plot == plot and known.name == profile:
            known.points.append(point(100 * share, ratios))
            return
    result.series.append(
        Series(
            *(profile, "room for the dataset (%)", "time (ratio)"),
            [point(100 * share, ratios)],
            plot=plot,
            goal=FIRST_EPOCH,
        )
    )
