"""Results of no measurement, of every shape that a report has to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import Kind, Missing, Point, Report, Result, Series, point

MACHINE = {"processors": 2, "memory_bytes": 24 << 30, "python": "3.0", "root": True}


def report() -> Report:
    found = Report("python -m bench.run", "quick", started="2000-01-02T03:04:05Z", commit="0123abc")
    found.machine = {"processor": "made up", "kernel": "0.0", **MACHINE}
    found.seconds = 754.0
    found.results = [training(), growth(), utilisation(), sweep(), table()]
    found.failed = [Missing("programs", "RuntimeError: it broke")]
    return found


def show(
    result: Result, plot: str, y: str, arms: Mapping[str, Mapping[Any, Any]], **more: Any
) -> None:
    """A series for each arm: by x a number, or those of several rounds."""
    for arm, values in arms.items():
        points = [
            point(x, value) if isinstance(value, Sequence) else Point(x, value)
            for x, value in values.items()
        ]
        described: dict[str, Any] = {"x": "", "kind": Kind.BARS, **more}
        result.series.append(Series(arm, y=y, points=points, plot=plot, **described))


def epochs(*times: float | Sequence[float]) -> dict[str, float | Sequence[float]]:
    return {f"epoch {number}": time for number, time in enumerate(times, 1)}


def training() -> Result:
    result = Result("monarch", "three epochs, by way to the data", seconds=312.0)
    direct, local, cold = [10.2, 9.8, 10.6], [3.8, 4.0, 3.9], [10.1, 10.3, 10.2]
    arms = {
        "parallel FS": epochs(direct, direct, direct),
        "monarchfs cold": epochs(cold, local, local),
        "all local": epochs(local, local, local),
    }
    for panel in ("LeNet", "ResNet-50"):
        show(result, "Epoch times, all data fits", "time (s)", arms, panel=panel)
    result.compare(
        *("AlexNet, epoch 1: monarchfs cold", "s", cold, direct),
        at_most=1.05,
        against="parallel FS",
        headline="First epoch, against the parallel file system",
        arm="monarchfs cold",
    )
    result.compare(
        *("AlexNet, epoch 2: monarchfs cold", "s", local, [3.9, 3.8, 3.9]),
        at_most=0.5,
        against="all local",
        why="half of nothing | is hard to reach",
        headline="Second epoch, against all local",
        arm="monarchfs cold",
    )
    result.figure("source bytes, epoch 1", 1.0, "x data", at_most=1.0, headline="First epoch reads")
    speeds = {"monarchfs cold": 6.0, "rclone": 2.0}
    shares = {
        arm: {n / 4: 100 - 100 * math.exp(-speed * n / 40) for n in range(1, 60)}
        for arm, speed in speeds.items()
    }
    over_time: dict[str, Any] = {"x": "time (s)", "kind": Kind.TIME, "marks": [0, 6, 10]}
    show(result, "Served locally over time", "opened locally (%)", shares, **over_time)
    result.notes = ["nothing was measured"]
    result.freshness = {"monarchfs cold": "immutable", "all local": "copied once"}
    result.leave_out("framework cache under torch", "torch has none")
    return result


def growth() -> Result:
    result = Result("growth", "from 1,000 to 1,000,000 files", seconds=100.0)
    lines: dict[str, Any] = {"x": "files", "kind": Kind.LINES, "log": "xy"}
    for panel, slowest in (("find", 90.0), ("stat", 0.3)):
        times = {
            arm: {10.0**power: [base, base * 1.1, slowest] for power in (3, 4, 5, 6)}
            for arm, base in {"direct": 2.0, "monarchfs cold": 2.1, "bindfs": 9.0}.items()
        }
        show(result, "Names, by number of files", "time (us)", times, panel=panel, **lines)
    lines |= {"x": "file size (bytes)", "log": "x"}
    speeds = {"direct": {4 << 10: 2.0, 256 << 10: 130, 16 << 20: 3000}}
    show(result, "Throughput by file size", "read (MB/s)", speeds, **lines)
    result.figure("memory of the worker", 312.0, "MB", values=[300.0, 312.0, 330.0])
    programs = {"second epoch": {"rclone": 3.4, "juicefs": 4.9, "bindfs": 6}}
    show(result, "Programs", "time (s)", programs)
    return result


def utilisation() -> Result:
    result = Result("dlio", "accelerator utilisation", seconds=65.0)
    arms = {"parallel FS": epochs(61.0, 60.0), "all local": epochs(98, 98)}
    show(result, "DLIO, unet3d", "accelerator utilisation (%)", arms, goal=96.0)
    result.figure("utilisation from epoch 2 on, all local less monarchfs", 1.0, "points", at_most=2)
    return result


def sweep() -> Result:
    """Lines with a goal, one line over time, bars of which some are left out or are nothing."""
    result = Result("first", "first epochs with little room", seconds=1.0)
    ratios = {name: {10: [0.98, 1.02], 56: [1, 1.04]} for name in ("fast", "busy", "crowded")}
    lines: dict[str, Any] = {"x": "room (%)", "kind": Kind.LINES, "goal": 1.05}
    show(result, "First epoch, to the parallel file system", "time (ratio)", ratios, **lines)
    show(result, "Some left out", "rate (1/s)", {"cp": {"0": 30.0, "1": 40_000.0}}, panel="10 KB")
    show(result, "Some left out", "rate (1/s)", {"cp": {"0": 3.0, "2": 0.0}}, panel="110 KB")
    over_time: dict[str, Any] = {"x": "time (s)", "kind": Kind.TIME}
    speeds = {"measured": {n / 4: 300 + n % 7 for n in range(50)}}
    show(result, "One alone", "bandwidth (MB/s)", speeds, **over_time)
    return result


def table() -> Result:
    """More rows than a table has: it is cut where they begin with the same."""
    result = Result("long", "many rows, numbers of every size", seconds=1.0)
    values = [0, 0.01234, 1.005, 12.34, 1_234_567, -5.5, 99.96, 1e-9]
    for case in ("LeNet", "AlexNet"):
        for arm in ("a", "b | c\nd < e"):
            for what, value in zip(("epoch 1", "epoch 2", "bytes", "opens"), values, strict=False):
                result.figure(f"{case}: {what}", value, "s", arm=arm)
        values = values[4:]
    result.rows[0].target, result.rows[0].holds = "<= 2", True
    return result
