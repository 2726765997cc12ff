"""What is measured, saved, sampled, compared, and told by the exit code; reports and pictures."""

from __future__ import annotations

import signal
import threading
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image as mpimg
import pytest

from bench import comparison, harness, markdown, plots, plotstyle, run, suites
from bench.report import Kind, Missing, Report, Result, load, merged, save
from bench.sampling import sampled, share_series
from bench.task import Task
from monarchfs.types import OperationError
from tests.bench import made_up
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


def interrupted(_task: Task) -> Result:
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("it went on")


def half(task: Task) -> Result:
    result = Result("half", "works at first")
    task.keep(result)
    result.figure("something", 1.0, "s")
    raise KeyboardInterrupt


@pytest.fixture
def _measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {one.__name__: one for one in (good, bad, unusable, interrupted, half)}
    registered = {name: suites.Measurement(name, f"is {name}", 1, 2, suites.BOTH) for name in found}
    monkeypatch.setattr(suites, "MEASUREMENTS", registered)
    monkeypatch.setattr(run, "MEASUREMENTS", registered)
    monkeypatch.setattr(run, "import_module", lambda name: SimpleNamespace(run=found[name]))
    monkeypatch.setattr(run, "check_fuse", lambda: None)


def saved(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "out").glob("*.json")
    return path


ROUNDS = ("rounds", 1)


@pytest.mark.usefixtures("_measurements")
@pytest.mark.parametrize(
    ("words", "code", "rows", "failed"),
    [
        ("good half", 130, [ROUNDS, ("something", 1)], [("half", "interrupted")]),
        ("--full --rounds 7 good", 0, [("rounds", 7)], []),
        ("--full good", 0, [("rounds", 2)], []),
        (
            "bad unusable good",
            1,
            [ROUNDS],
            [("bad", "RuntimeError: two lines"), ("unusable", "no juice: apt-get install juice")],
        ),
        ("good interrupted half", 130, [ROUNDS], [("interrupted", "interrupted")]),
    ],
)
def test_what_was_measured_is_saved_and_what_failed_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    code: int,
    rows: list[tuple[str, float]],
    failed: list[tuple[str, str]],
) -> None:
    words = f"{words} --output {tmp_path}/out --temp {tmp_path}"
    assert run.main(words.split()) == code
    report = load(saved(tmp_path))
    assert [(row.what, row.value) for result in report.results for row in result.rows] == rows
    assert [(one.what, one.why) for one in report.failed] == failed
    assert report.size == ("full" if "--full" in words else "quick")
    assert report.command == f"python -m bench.run {words}"
    assert f"| {rows[0][0]} |" in saved(tmp_path).with_suffix(".md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert capsys.readouterr().err.count("Traceback") == ("bad" in words)


def test_the_list_names_every_measurement_and_each_can_be_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(suites.MEASUREMENTS)
    for measurement in suites.MEASUREMENTS.values():
        assert callable(import_module(measurement.module).run)


def test_saved_results_make_reports_and_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    saved_report = made_up.report()
    saved_report.results = [made_up.utilisation()]
    saved_report.results[0].rows[0].headline = "DLIO"
    save(saved_report, path)
    assert run.main(["--report", str(path)]) == 0
    report = Path(capsys.readouterr().out.strip())
    assert report.parent == tmp_path
    assert "## Headlines" in report.read_text()
    assert len(list(tmp_path.glob("*.svg"))) == len(list(tmp_path.glob("*.png"))) == 1
    assert run.main(["--compare", str(path), str(path)]) == 0
    assert "| 1.00 |\n" in capsys.readouterr().out
    for name, content in (("none", None), ("list", "[]"), ("older", '{"schema": 99}')):
        path = tmp_path / f"{name}.json"
        if content is not None:
            path.write_text(content)
        assert run.main(["--report", str(path)]) == 1
        said = capsys.readouterr().err
        assert (said.count("\n"), str(path) in said) == (1, True)


def test_the_document_gets_headlines_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / run.PUBLISHED).write_text("a\n<!-- figures: begin -->\n<!-- figures: end -->\nb\n")
    run.publish(made_up.report(), tmp_path)
    text = (tmp_path / run.PUBLISHED).read_text()
    assert "| First epoch reads |" in text
    assert text.endswith("<!-- figures: end -->\nb\n")
    assert (tmp_path / "docs" / run.PUBLISHED_PICTURE).stat().st_size > 1000
    (tmp_path / run.PUBLISHED).write_text((harness.REPOSITORY / run.PUBLISHED).read_text())
    run.publish(made_up.report(), tmp_path)
    (tmp_path / run.PUBLISHED).write_text("no marks")
    with pytest.raises(ValueError, match="figures: begin"):
        run.publish(made_up.report(), tmp_path)


# The report


def test_a_saved_report_is_the_same_when_loaded(tmp_path: Path) -> None:
    report = made_up.report()
    save(report, tmp_path / "new" / "a.json")
    assert load(tmp_path / "new" / "a.json") == report
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_ratio_is_of_neighbouring_runs() -> None:
    result = Result("a", "")
    # Each pair 2:1, while the machine gets slower: the medians' ratio would be another one.
    result.compare("speed", "s", [2, 20, 6], [1, 10, 3.0], at_most=2, against="x", headline="h")
    (row,) = result.rows
    assert (row.ratio, row.ratio_spread) == (2.0, (2.0, 2.0, 2.0, 3))
    assert (row.value, row.other, row.target, row.holds) == (6, 3, "ratio <= 2", True)
    assert row.value_spread == (6, 2, 20, 3)


@pytest.mark.parametrize(
    ("bounds", "target", "holds"),
    [
        ({"at_most": 3}, "<= 3", True),
        ({"at_most": 2.9}, "<= 2.9", False),
        ({"at_least": 3}, ">= 3", True),
        ({"at_least": 3.1}, ">= 3.1", False),
        ({}, "", None),
    ],
)
def test_goals(bounds: dict[str, float], target: str, holds: bool | None) -> None:
    result = Result("a", "")
    result.figure("x", 3.0, "s", **bounds)  # type: ignore[arg-type]
    result.compare("y", "s", [6.0], [2.0], **bounds)  # type: ignore[arg-type]
    assert [row.holds for row in result.rows] == [holds, holds]
    assert [row.target for row in result.rows] == [target, target and f"ratio {target}"]


def test_several_runs_make_one_report() -> None:
    first, second = made_up.report(), made_up.report()
    first.results, second.results = first.results[:2], second.results[1:3]
    second.failed[0] = Missing(first.results[0].name, "it broke later")
    second.command, second.commit = "python -m bench.run growth", "4567def"
    second.results[0].title = "later"
    report = merged([first, second])
    assert [result.name for result in report.results] == ["monarch", "growth", "dlio"]
    assert report.results[1].title == "later"
    assert [one.what for one in report.failed] == ["programs"]
    assert (report.stem, report.commit, report.size) == (first.stem, "0123abc, 4567def", "quick")
    assert ".venv/bin/python -m bench.run growth\n" in markdown.document(report, [])
    assert merged([first]) == first


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[plots.Picture]:
    return plots.save_all(made_up.report(), tmp_path_factory.mktemp("pictures"))


def test_the_report(pictures: list[plots.Picture], golden: Golden) -> None:
    """Goals reached and missed, numbers of each size, a table that is cut, cells with marks of
    Markdown, what is missing, what failed."""
    golden("bench-report.md", markdown.document(made_up.report(), pictures))
    golden("bench-figures.md", markdown.figures(made_up.report(), "docs/images/a.svg") + "\n")
    nothing = Report("python -m bench.run", "quick", commit="")
    assert "Measured: nothing." in markdown.document(nothing, [])
    with pytest.raises(ValueError, match="no headlines"):
        markdown.figures(nothing, None)


def test_a_comparison_is_of_ratios_where_there_are_any() -> None:
    before, after = made_up.report(), made_up.report()
    row = after.results[0].rows[0]
    assert row.ratio is not None
    row.ratio *= 2
    row.value *= 50  # a slower machine: no matter
    # The same by another way is another figure.
    before.results[0].rows.append(replace(row, arm="rclone", ratio=77))
    after.results[0].rows.append(replace(row, what="new"))
    after.results[1].rows[0].value *= 3
    factors = {one.what: one.factor for one in comparison.changes(before, after)}
    assert factors[f"{row.what}, {row.arm}"] == pytest.approx(2)
    assert factors[after.results[1].rows[0].what] == pytest.approx(3)
    assert "new" not in factors
    text = "\n".join(comparison.show(before, after))
    assert "Only after: 1 of" in text
    assert "Only before: 1 of" in text


# Pictures.


def test_pictures_are_files_with_something_in_them(pictures: list[plots.Picture]) -> None:
    titles = [title for one in made_up.report().results for title in plots.plots(one.series)]
    assert len(pictures) == len(titles)
    for picture in pictures:
        assert xml.parse(picture.svg).getroot().tag.endswith("svg")
        pixels = mpimg.imread(picture.png)
        assert pixels.shape[1] == plotstyle.WIDTH_INCHES * plotstyle.DOTS_PER_INCH
        assert pixels.std() > 0.05


def test_samples_are_taken_until_the_block_ends() -> None:
    counts = {"local": 0}
    enough = threading.Event()

    def ask() -> tuple[int, int]:
        counts["local"] += 1
        if counts["local"] == 2:
            raise OperationError("being replaced")
        if counts["local"] > 4:
            enough.set()
        return counts["local"], 0

    with sampled(ask, 0.01) as samples:
        assert enough.wait(30)
    assert [sample.local for sample in samples] == [1, *range(3, counts["local"] + 1)]
    assert sorted(samples) == samples
    series = share_series("arm", samples, "plot", epochs=[0.0])
    assert series.kind is Kind.TIME
    assert {p.y for p in series.points} == {100.0}
