"""The command: what is measured, shown, saved, and told by the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import harness, run, suites
from bench.report import Result, load, save
from bench.task import Size, Task
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
    result.figure("rounds", task.rounds_or(1, 2), "", at_most=0)
    return result


def bad(task: Task) -> Result:
    (task.place / "data").write_text("x")
    raise RuntimeError("two\nlines")


def unusable(_task: Task) -> Result:
    raise harness.Unusable("no juice: apt-get install juice")


def interrupted(_task: Task) -> Result:
    raise KeyboardInterrupt


def half(task: Task) -> Result:
    result = Result("half", "works at first")
    task.keep(result)
    result.figure("something", 1.0, "s")
    raise KeyboardInterrupt


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    both, full = suites.BOTH, (Size.FULL,)
    registered = {
        name: suites.Measurement(name, f"is {name}", 1, 2, full if name == "bad" else both)
        for name in ("good", "bad", "unusable", "interrupted", "again", "half")
    }
    found = {
        one.__name__: SimpleNamespace(run=one, __name__=one.__name__)
        for one in (good, bad, unusable, interrupted, half)
    }
    found["again"] = found["good"]
    monkeypatch.setattr(suites, "MEASUREMENTS", registered)
    monkeypatch.setattr(run, "MEASUREMENTS", registered)
    monkeypatch.setattr(run, "import_module", found.__getitem__)
    monkeypatch.setattr(run, "check_fuse", lambda: None)


def command(tmp_path: Path, *words: str) -> int:
    places = ["--output", str(tmp_path / "out"), "--temp", str(tmp_path)]
    return run.main([*words, *places])


def saved(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "out").glob("*.json")
    return path


@pytest.mark.usefixtures("measurements")
def test_what_was_measured_is_saved_and_reported(tmp_path: Path) -> None:
    # The goal is missed, which is no failure of the measurement.
    assert command(tmp_path, "good", "again") == 0
    report = load(saved(tmp_path))
    assert [result.name for result in report.results] == ["good", "good"]
    assert report.results[0].rows[0].value == 1
    assert report.size == "quick"
    words = f"good again --output {tmp_path}/out --temp {tmp_path}"
    assert report.command == f"python -m bench.run {words}"
    text = saved(tmp_path).with_suffix(".md").read_text()
    assert "| rounds |" in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("measurements")
@pytest.mark.parametrize(
    ("words", "code", "rows", "failed"),
    [
        (["--full", "--rounds", "7", "good"], 0, [("rounds", 7)], []),
        (["--full", "good"], 0, [("rounds", 2)], []),
        (
            ["bad", "unusable", "good"],
            1,
            [("rounds", 1)],
            [("bad", "RuntimeError: two lines"), ("unusable", "no juice: apt-get install juice")],
        ),
        (["good", "interrupted", "again"], 130, [("rounds", 1)], [("interrupted", "interrupted")]),
        (["half"], 130, [("something", 1)], [("half", "interrupted")]),
    ],
)
def test_one_that_fails_is_reported_and_what_was_measured_is_kept(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    rows: list[tuple[str, float]],
    failed: list[tuple[str, str]],
) -> None:
    assert command(tmp_path, *words) == code
    report = load(saved(tmp_path))
    assert [(row.what, row.value) for result in report.results for row in result.rows] == rows
    assert [(one.what, one.why) for one in report.failed] == failed
    assert saved(tmp_path).with_suffix(".md").exists()
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


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["--rounds", "0"], ["--publish"], ["--compare", "a"], ["--rounds", "x"]],
)
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2


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
    assert run.main(["--report", str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_document_gets_headlines_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / run.PUBLISHED).write_text("a\n<!-- figures: begin -->\n<!-- figures: end -->\nb\n")
    run.publish(made_up.report(), tmp_path)
    text = (tmp_path / run.PUBLISHED).read_text()
    assert "| First epoch reads |" in text
    assert text.endswith("<!-- figures: end -->\nb\n")
    assert (tmp_path / "docs" / run.PUBLISHED_PICTURE).stat().st_size > 1000


def test_a_signal_leaves_nothing_behind_but_what_was_measured(tmp_path: Path) -> None:
    program = (
        "import sys, time, types\n"
        "from bench import run\n"
        "from tests.bench.test_run import good\n"
        "def wait(task):\n"
        "    (task.place / 'data').write_text('x')\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
        "run.check_fuse = lambda: None\n"
        "ways = {'bench.names': good, 'bench.epochs': wait}\n"
        "run.import_module = lambda name: types.SimpleNamespace(run=ways[name])\n"
        "sys.exit(run.main(sys.argv[1:]))\n"
    )
    words = ["names", "epochs", "--output", str(tmp_path / "out"), "--temp", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=harness.REPOSITORY,
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline() not in ("waiting\n", ""):
            pass
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert [result.name for result in load(saved(tmp_path)).results] == ["good"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
