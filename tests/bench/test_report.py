"""What is measured, saved, compared, and told by the exit code; reports and pictures."""

import signal
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image as mpimg
import pytest

from bench import harness, markdown, plots, plotstyle, run, suites
from bench.report import Kind, Missing, Point, Report, Result, Series, load, point, save
from bench.task import Task
from tests.support.golden import Golden

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def good(task: Task) -> Result:
    assert list(task.place.iterdir()) == []
    (task.place / "data").write_text("x")
    task.say("working")
    result = Result("good", "works")
    # The goal is missed, which is no failure of the measurement.
    result.figure("rounds", task.rounds_or(1, 2), "", at_most=0)
    return result


def bad(task: Task) -> Result:
    (task.place / "data").write_text("x")
    raise RuntimeError("two\nlines")


def unusable(_task: Task) -> Result:
    raise harness.Unusable("no juice: apt-get install juice")


def half(task: Task) -> Result:
    result = Result("half", "works at first")
    task.keep(result)
    result.figure("something", 1.0, "s")
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("it went on")


@pytest.fixture
def _measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {one.__name__: one for one in (good, bad, unusable, half)}
    registered = {name: suites.Measurement(name, f"is {name}", 1, 2, suites.BOTH) for name in found}
    monkeypatch.setattr(suites, "MEASUREMENTS", registered)
    monkeypatch.setattr(run, "MEASUREMENTS", registered)
    monkeypatch.setattr(run, "import_module", lambda name: SimpleNamespace(run=found[name]))
    monkeypatch.setattr(run, "check_fuse", lambda: None)


ROUNDS = ("rounds", 1)


@pytest.mark.usefixtures("_measurements")
@pytest.mark.parametrize(
    ("words", "code", "rows", "failed"),
    [
        ("good half bad", 130, [ROUNDS, ("something", 1)], [("half", "interrupted")]),
        ("--full --rounds 7 good", 0, [("rounds", 7)], []),
        (
            "bad unusable good",
            1,
            [ROUNDS],
            [("bad", "RuntimeError: two lines"), ("unusable", "no juice: apt-get install juice")],
        ),
    ],
)
def test_what_was_measured_is_saved_and_what_failed_is_told(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    code: int,
    rows: list[tuple[str, float]],
    failed: list[tuple[str, str]],
) -> None:
    words = f"{words} --output {tmp_path}/out --temp {tmp_path}"
    assert run.main(words.split()) == code
    (path,) = (tmp_path / "out").glob("*.json")
    report = load(path)
    assert [(row.what, row.value) for result in report.results for row in result.rows] == rows
    assert [(one.what, one.why) for one in report.failed] == failed
    assert report.size == ("full" if "--full" in words else "quick")
    assert report.command == f"python -m bench.run {words}"
    assert f"| {rows[0][0]} |" in path.with_suffix(".md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert capsys.readouterr().err.count("Traceback") == (code == 1)


def test_the_list_names_every_one_and_each_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(suites.MEASUREMENTS)
    for measurement in suites.MEASUREMENTS.values():
        assert callable(import_module(measurement.module).run)


def test_saved_results_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    saved_report = report_of_nothing()
    saved_report.results = [growth()]
    saved_report.results[0].rows[0].headline = "DLIO"
    save(saved_report, path)
    assert load(path) == saved_report
    assert run.main(["--report", str(path), str(path)]) == 0
    report = Path(capsys.readouterr().out.strip())
    assert report.parent == tmp_path
    assert "## Headlines" in report.read_text()
    assert len(list(tmp_path.glob("*.svg"))) == len(list(tmp_path.glob("*.png"))) == 1
    assert run.main(["--compare", str(path), str(path)]) == 0
    assert "| 1.00 |\n" in capsys.readouterr().out
    for name, content in (("none", None), ("older", '{"schema": 99}')):
        path = tmp_path / f"{name}.json"
        if content is not None:
            path.write_text(content)
        assert run.main(["--report", str(path)]) == 1
        said = capsys.readouterr().err
        assert (said.count("\n"), str(path) in said) == (1, True)


def test_the_document_gets_headlines_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    before = (harness.REPOSITORY / run.PUBLISHED).read_text()
    (tmp_path / run.PUBLISHED).write_text(before)
    run.publish(report_of_nothing(), tmp_path)
    text = (tmp_path / run.PUBLISHED).read_text()
    assert "| First epoch reads |" in text
    end = "<!-- figures: end -->"
    assert text.partition(end)[1:] == before.partition(end)[1:] != ("", "")
    assert (tmp_path / "docs" / run.PUBLISHED_PICTURE).stat().st_size > 1000


MACHINE = {"processors": 2, "memory_bytes": 24 << 30, "python": "3.0", "root": True}


def report_of_nothing() -> Report:
    """Results of no measurement, of every shape that a report has to show."""
    found = Report("python -m bench.run", "quick", started="2000-01-02T03:04:05Z", commit="0123abc")
    found.machine = {"processor": "made up", "kernel": "0.0", **MACHINE}
    found.seconds = 754.0
    found.results = [training(), growth(), table()]
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


def training() -> Result:
    result = Result("monarch", "three epochs, by way to the data", seconds=312.0)
    direct, local, cold = [10.2, 9.8, 10.6], [3.8, 4.0, 3.9], [10.1, 10.3, 10.2]
    arms = {
        "parallel FS": {"epoch 1": direct, "epoch 2": direct},
        "monarchfs cold": {"epoch 1": cold, "epoch 2": local},
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
    shares = {arm: {n / 4: 100 - 100 / n for n in range(1, 60)} for arm in arms}
    over_time: dict[str, Any] = {"x": "time (s)", "kind": Kind.TIME, "marks": [0, 6, 10]}
    show(result, "Served locally over time", "opened locally (%)", shares, **over_time)
    result.notes = ["nothing was measured"]
    result.freshness = {"monarchfs cold": "immutable", "all local": "copied once"}
    result.leave_out("framework cache under torch", "torch has none")
    return result


def growth() -> Result:
    result = Result("growth", "from 1,000 to 1,000,000 files", seconds=100.0)
    lines: dict[str, Any] = {"x": "files", "kind": Kind.LINES, "log": "xy", "goal": 1.05}
    times = {
        arm: {10.0**power: [base, base * 1.1, 0.3] for power in (3, 4, 5, 6)}
        for arm, base in {"direct": 2.0, "monarchfs cold": 2.1}.items()
    }
    for panel in ("find", "stat"):
        show(result, "Names, by number of files", "time (us)", times, panel=panel, **lines)
    result.figure("memory of the worker", 312.0, "MB", values=[300, 312, 330], at_least=1)
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
    return result


def test_a_ratio_is_of_neighbouring_runs() -> None:
    result = Result("a", "")
    # Each pair 2:1, while the machine gets slower: the medians' ratio would be another one.
    result.compare("speed", "s", [2, 20, 6], [1, 10, 3.0], at_most=2, against="x", headline="h")
    (row,) = result.rows
    assert (row.ratio, row.ratio_spread) == (2.0, (2.0, 2.0, 2.0, 3))
    assert (row.value, row.other, row.target, row.holds) == (6, 3, "ratio <= 2", True)
    assert row.value_spread == (6, 2, 20, 3)


def test_the_report_and_its_pictures(tmp_path: Path, golden: Golden) -> None:
    """Goals reached and missed, numbers of each size, a table that is cut, cells with marks of
    Markdown, what is missing, what failed."""
    pictures = plots.save_all(report_of_nothing(), tmp_path)
    golden("bench-report.md", markdown.document(report_of_nothing(), pictures))
    golden("bench-figures.md", markdown.figures(report_of_nothing(), "docs/images/a.svg") + "\n")
    assert len(pictures) == 3
    for picture in pictures:
        assert xml.parse(picture.svg).getroot().tag.endswith("svg")
        pixels = mpimg.imread(picture.png)
        assert pixels.shape[1] == plotstyle.WIDTH_INCHES * plotstyle.DOTS_PER_INCH
        assert pixels.std() > 0.05
