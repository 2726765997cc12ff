"""``make bench`` and ``make bench-full``: measures, and writes figures, a report and plots.

    python -m bench.run [--full] [NAME...]     all of a suite, or the measurements named
    python -m bench.run --list
    python -m bench.run --report RESULTS.json... [--publish]
    python -m bench.run --compare BEFORE.json AFTER.json

Each measurement works in a directory of its own, which is gone afterwards, also after Ctrl-C; what
was measured until then is kept. Every speed is compared with the same work done in the same run.
Exit codes: 0, measured (goals that were missed are in the report); 1, something could not be
measured; 2, usage; 130, interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench import comparison
from bench.harness import REPOSITORY, Unusable, check_fuse, workplace
from bench.progress import Progress, clock
from bench.report import Missing, Report, Result, load, merged, print_result, save
from bench.suites import MEASUREMENTS, suite
from bench.task import Size, Task

RESULTS = REPOSITORY / "bench" / "results"
INTERRUPTED = "interrupted"
PUBLISHED = "docs/BENCHMARKS.md"
PUBLISHED_PLOT, PUBLISHED_PANELS, PUBLISHED_PICTURE = "monarch", 3, "images/epochs.svg"


def measure(name: str, arguments: argparse.Namespace, progress: Progress, report: Report) -> Result:
    """Runs one measurement in a directory of its own; its result is in the report then, also what
    there is of it when something is raised, which may be anything."""
    module = import_module(MEASUREMENTS[name].module)
    started = time.perf_counter()
    kept: list[Result] = []
    try:
        with workplace(f"bench-{name}", arguments.temp) as place:
            task = Task(place, arguments.size, arguments.rounds, progress.say, kept.append)
            result = module.run(task)
        if not isinstance(result, Result):
            raise TypeError(f"{module.__name__}.run returned {result!r}")
        kept = [result]
    finally:
        for result in kept[-1:]:
            result.seconds = time.perf_counter() - started
            if result.rows or result.missing:
                report.results.append(result)
    return result


def reason(error: BaseException) -> str:
    """One line."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED
        case ModuleNotFoundError():
            return f"{error.name} is not installed: run make setup"
        case Unusable():
            return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def measure_all(
    names: Sequence[str], arguments: argparse.Namespace, report: Report, path: Path
) -> None:
    """Fills the report, and saves it as ``path`` after each measurement. KeyboardInterrupt is
    raised again."""
    began = time.perf_counter()
    with Progress(len(names)) as progress:
        for name in names:
            progress.begin(name, MEASUREMENTS[name].minutes(arguments.size))
            try:
                result = measure(name, arguments, progress, report)
            except (Exception, KeyboardInterrupt) as error:
                report.failed.append(Missing(name, reason(error)))
                progress.end()
                if isinstance(error, KeyboardInterrupt):
                    raise
                if not isinstance(error, Unusable | ModuleNotFoundError):
                    traceback.print_exc()
                print(f"bench: {name}: {reason(error)}", file=sys.stderr)
            else:
                progress.end()
                print_result(result)
            finally:
                report.seconds = time.perf_counter() - began
                save(report, path)


def write_report(report: Report, folder: Path) -> Path:
    """The report and its pictures; its path."""
    # Only now: it takes a second to load.
    from bench import markdown, plots

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.stem}.md"
    path.write_text(markdown.document(report, plots.save_all(report, folder)), encoding="utf-8")
    return path


def publish(report: Report, root: Path = REPOSITORY) -> None:
    """Put the headlines into docs/BENCHMARKS.md, and the first panels of the first plot. Raises
    ValueError if it has no place for them."""
    from bench import markdown, plots

    document = root / PUBLISHED
    series = next((one.series for one in report.results if one.name == PUBLISHED_PLOT), [])
    pictures = list(plots.plots(series).items())[:1]
    figures = markdown.figures(report, PUBLISHED_PICTURE if pictures else None)
    text = markdown.put_between_marks(document.read_text(encoding="utf-8"), figures)
    for title, some in pictures:
        panels = list(dict.fromkeys(one.panel for one in some))[:PUBLISHED_PANELS]
        shown = [one for one in some if one.panel in panels]
        plots.save_svg(plots.draw(title, shown), document.parent / PUBLISHED_PICTURE)
    document.write_text(text, encoding="utf-8")


def from_saved(arguments: argparse.Namespace) -> int:
    """What is asked of results that were saved. Raises OSError and ValueError."""
    if arguments.compare:
        print("\n".join(comparison.show(*map(load, arguments.compare))))
        return 0
    report = merged([load(path) for path in arguments.report])
    folder = arguments.output or arguments.report[0].parent
    print(write_report(report, folder))
    if arguments.publish:
        publish(report)
        print(f"{REPOSITORY / PUBLISHED}")
    return 0


def show_list() -> None:
    width = max(map(len, MEASUREMENTS))
    for name, one in MEASUREMENTS.items():
        suites = ", ".join(size.value for size in one.suites)
        print(
            f"{name:<{width}}  {one.quick_minutes:>3g} min, full {one.full_minutes:>3g} min"
            f"  {suites:<11}  {one.what}"
        )


def build_parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="bench.run", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument(
        "--full",
        dest="size",
        action="store_const",
        const=Size.FULL,
        default=Size.QUICK,
        help="full sizes, and without names everything there is (make bench-full)",
    )
    parser.add_argument("--output", type=Path, help="where results are written (bench/results)")
    parser.add_argument("--temp", help="where data and replicas lie (default: $TMPDIR)")
    parser.add_argument("--rounds", type=int, help="how often each is measured, at least 1")
    parser.add_argument("--list", action="store_true", help="which measurements there are")
    parser.add_argument(
        "--report",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="write the report of saved results again, of several runs as one",
    )
    parser.add_argument(
        "--publish", action="store_true", help="with --report: into docs/BENCHMARKS.md too"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "AFTER"),
        help="the ratios of two results",
    )
    return parser


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    arguments = parser.parse_args(words)
    unknown = set(arguments.names) - set(MEASUREMENTS)
    if unknown:
        parser.error(f"no measurement {', '.join(unknown)}: there are {', '.join(MEASUREMENTS)}")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    if arguments.publish and arguments.report is None:
        parser.error("--publish goes with --report RESULTS.json")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.list:
        show_list()
        return 0
    if arguments.compare or arguments.report:
        try:
            return from_saved(arguments)
        except (OSError, ValueError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    names = arguments.names or suite(arguments.size)
    folder = arguments.output or RESULTS
    words = sys.argv[1:] if words is None else words
    report = Report(shlex.join(["python", "-m", "bench.run", *words]), arguments.size.value)
    code = 0
    try:
        check_fuse()
        measure_all(names, arguments, report, folder / f"{report.stem}.json")
    except Unusable as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted; everything is unmounted and removed", file=sys.stderr)
        code = 130
    print(
        f"\n{folder / report.stem}.json\n{write_report(report, folder)} ({clock(report.seconds)})"
    )
    return code or int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
