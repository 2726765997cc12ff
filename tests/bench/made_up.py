"""Results of no measurement, of every shape that a report has to show."""

from __future__ import annotations

import math
import random

from bench.report import Kind, Missing, Point, Report, Result, Series, point

ARMS = {
    "parallel FS": (10.0, 10.0, 10.0),
    "framework cache": (10.4, 4.1, 4.0),
    "monarchfs cold": (10.1, 4.0, 4.0),
    "monarchfs warm": (4.1, 4.0, 4.0),
    "all local": (4.0, 3.9, 3.9),
}
MODELS = {"LeNet": 0.6, "AlexNet": 1.0, "ResNet-50": 4.0}
SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)


def report() -> Report:
    found = Report("python -m bench.run", "quick", started="2000-01-02T03:04:05Z", commit="0123abc")
    found.machine |= {"processor": "made up", "kernel": "0.0", "python": "3.0"}
    found.seconds = 754.0
    found.results = [training(), growth(), utilisation(), sweep(), table()]
    found.failed = [Missing("programs", "RuntimeError: it broke")]
    return found


def training() -> Result:
    rng = random.Random(1)
    result = Result("monarch", "three epochs, by way to the data", seconds=312.0)
    measured: dict[tuple[str, str, int], list[float]] = {}
    for model, factor in MODELS.items():
        for arm, times in ARMS.items():
            points = []
            for epoch, time in enumerate(times, 1):
                values = [time * factor * rng.uniform(0.95, 1.08) for _ in range(5)]
                measured[model, arm, epoch] = values
                points.append(point(f"epoch {epoch}", values))
            result.series.append(
                Series(
                    *(arm, "", "time (s)", points, Kind.BARS),
                    plot="Epoch times, all data fits",
                    panel=model,
                )
            )
    result.compare(
        *("AlexNet, epoch 1: monarchfs cold", "s"),
        *(measured["AlexNet", "monarchfs cold", 1], measured["AlexNet", "parallel FS", 1]),
        at_most=1.05,
        against="parallel FS",
        arm="monarchfs cold",
        headline="First epoch, against the parallel file system",
    )
    result.compare(
        *("AlexNet, epoch 2: monarchfs cold", "s"),
        *(measured["AlexNet", "monarchfs cold", 2], measured["AlexNet", "all local", 2]),
        at_most=0.5,
        against="all local",
        arm="monarchfs cold",
        why="half of nothing | is hard to reach",
        headline="Second epoch, against all local",
    )
    result.figure("source bytes, epoch 1", 1.0, "x data", at_most=1.0, headline="First epoch reads")
    for arm, reads in {"parallel FS": (1, 1, 1), "monarchfs cold": (1, 0.44, 0.44)}.items():
        bars = [Point(f"epoch {number}", value) for number, value in enumerate(reads, 1)]
        result.series.append(
            Series(
                arm,
                "",
                "read of the source (x data)",
                bars,
                Kind.BARS,
                plot="Source bytes, 56% fits",
            )
        )
    for arm, slope in {"monarchfs cold": 6.0, "monarchfs warm": 1000.0, "rclone": 2.0}.items():
        samples = [Point(n / 4, 100 - 100 * math.exp(-slope * n / 40)) for n in range(1, 60)]
        result.series.append(
            Series(
                *(arm, "time (s)", "opened from local storage (%)", samples, Kind.TIME),
                plot="Served locally over time",
                marks=[0, 6, 10],
            )
        )
    result.notes = ["nothing was measured"]
    result.freshness = {"monarchfs cold": "immutable", "all local": "copied once"}
    result.leave_out("framework cache under torch", "torch has none")
    return result


def growth() -> Result:
    result = Result("growth", "from 1,000 to 1,000,000 files", seconds=100.0)
    for arm, base in {
        "direct": 2.0,
        "monarchfs cold": 2.1,
        "monarchfs warm": 2.05,
        "bindfs": 9.0,
    }.items():
        for plot, y, factor in (
            ("find", "time a file (us)", 1.0),
            ("stat", "time a file (us)", 0.3),
        ):
            points = [
                point(10.0**power, [base * factor * (1 + power / 20) * f for f in (0.9, 1, 1.2)])
                for power in (3, 4, 5, 6)
            ]
            result.series.append(
                Series(
                    *(arm, "files", y, points, Kind.LINES),
                    plot="Names, by number of files",
                    panel=plot,
                    log="xy",
                )
            )
        speeds = [Point(size, min(6000 / base, size / 2000 / base)) for size in SIZES]
        result.series.append(
            Series(
                *(arm, "file size (bytes)", "read (MB/s)", speeds),
                plot="Throughput by file size",
                log="x",
            )
        )
    result.figure(
        "memory of the worker, per million files", 312.0, "MB", values=[300.0, 312.0, 330.0]
    )
    programs = [
        Point(name, value) for name, value in (("rclone", 3.4), ("juicefs", 4.9), ("bindfs", 6))
    ]
    result.series.append(
        Series("second epoch", "", "time (s)", programs, Kind.BARS, plot="Programs")
    )
    return result


def utilisation() -> Result:
    result = Result("dlio", "accelerator utilisation", seconds=65.0)
    for arm, values in {
        "parallel FS": (61.0, 60.0),
        "monarchfs cold": (62, 97),
        "all local": (98, 98),
    }.items():
        points = [Point(f"epoch {number}", value) for number, value in enumerate(values, 1)]
        result.series.append(
            Series(
                *(arm, "", "accelerator utilisation (%)", points, Kind.BARS),
                plot="DLIO, unet3d",
                goal=96.0,
            )
        )
    result.figure("utilisation from epoch 2 on, all local less monarchfs", 1.0, "points", at_most=2)
    return result


def sweep() -> Result:
    """Lines with a goal, one line over time, bars of which some are left out or are nothing."""
    result = Result("first", "first epochs with little room", seconds=1.0)
    for number, profile in enumerate(("fast", "busy", "crowded")):
        points = [point(room, [0.98 + number / 50, 1.0 + number / 60]) for room in (10, 56, 100)]
        result.series.append(
            Series(
                *(profile, "room for the data (%)", "time (ratio)", points),
                plot="First epoch, to the parallel file system",
                goal=1.05,
            )
        )
    for panel, rates in (("10 KB", (30.0, 40_000.0, None)), ("110 KB", (3.0, None, 0.0))):
        found = [Point(str(n), rate) for n, rate in enumerate(rates) if rate is not None]
        bars = Series("cp -r", "", "rate (1/s)", found, Kind.BARS, "Some left out", panel)
        result.series.append(bars)
    speeds = [Point(n / 4, 300 + n % 7) for n in range(50)]
    result.series.append(
        Series("measured", "time (s)", "bandwidth (MB/s)", speeds, Kind.TIME, plot="One alone")
    )
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
