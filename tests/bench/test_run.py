"""The command: what is measured, shown, saved, and told by the exit code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import harness, run, suites
from bench.report import Result, load, save
from bench.task import Task
from tests.bench import made_up

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
