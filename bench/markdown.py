"""The report that people read, and the figures in docs/BENCHMARKS.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench.numbers import number
from bench.plots import Picture
from bench.progress import clock
from bench.report import Report, Result, Row
from bench.suites import MEASUREMENTS
from bench.task import Size

LONG_TABLE = 12
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def document(report: Report, pictures: Sequence[Picture]) -> str:
    """All of it. The pictures lie beside it."""
    rows = [row for result in report.results for row in result.rows]
    goals = [row for row in rows if row.holds is not None]
    reached = sum(row.holds is True for row in goals)
    names = ", ".join(result.name for result in report.results) or "nothing"
    lines = [
        f"# Benchmarks of monarchfs, {report.started[:10]}",
        "",
        f"Measured: {names}. Sizes: {report.size}; it took {clock(report.seconds)} minutes. Goals"
        f" reached: {reached} of {len(goals)}.",
        "",
        "Each figure is compared with the same work done otherwise in the same run, pair by pair; a"
        " ratio is the median of those of the pairs, with the least and the most in brackets."
        " Absolute speeds are this machine's. [docs/BENCHMARKS.md](../../docs/BENCHMARKS.md) says"
        " what each measurement is, and how the emulated parallel file system works.",
        "",
    ]
    headlines = [row for row in rows if row.headline]
    if headlines:
        lines += ["## Headlines", "", *table(headlines, headline=True), *reasons(headlines), ""]
    if report.failed:
        lines += ["## Not measured", ""]
        lines += [f"- **{one.what}**: {cell(one.why)}" for one in report.failed] + [""]
    for result in report.results:
        mine = [picture for picture in pictures if picture.result == result.name]
        lines += section(result, mine, report.size)
    return "\n".join([*lines, *machine(report), ""])


def section(result: Result, pictures: Iterable[Picture], size: str) -> list[str]:
    known = MEASUREMENTS.get(result.name)
    heading = title(known.what if known else result.name)
    lines = [f"## {heading}", "", f"*{sentence(result.title)}*", ""]
    for picture in pictures:
        lines += [f"![{picture.title}]({picture.svg.name})", ""]
    lines += figures_of(result)
    if result.freshness:
        lines += ["| way to the data | what is read is |", "|---|---|"]
        lines += [f"| {cell(arm)} | {cell(how)} |" for arm, how in result.freshness.items()] + [""]
    if result.missing:
        lines += ["Left out:", ""]
        lines += [f"- {cell(one.what)}: {cell(one.why)}" for one in result.missing] + [""]
    if result.notes:
        lines += ["How:", "", *(f"- {cell(note)}" for note in result.notes), ""]
    target = "bench-full" if size == Size.FULL.value else "bench"
    return [
        *lines,
        f"Again: `make {target} ARGS={result.name}` (it took {clock(result.seconds)} minutes)",
        "",
    ]


def figures_of(result: Result) -> list[str]:
    """Where there are many, those with goals, and all behind a click."""
    lines: list[str] = []
    parts = groups(result.rows)
    goals = [row for row in result.rows if row.holds is not None]
    folded = len(parts) > 1 and bool(goals)
    if folded:
        lines += [*table(goals), *reasons(goals), ""]
        lines += [f"<details><summary>All {len(result.rows)} figures</summary>", ""]
    for heading, rows in parts.items():
        lines += [*([f"**{cell(heading)}**", ""] if heading else []), *table(rows)]
        lines += [*([] if folded else reasons(rows)), ""]
    return [*lines, *(["</details>", ""] if folded else [])]


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Where a table would be long: by what stands before the first colon, which goes then, and in
    a group what belongs together side by side. The rows are copies then."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.what.partition(": ")[0], []).append(row)
    if len(rows) <= LONG_TABLE or len(found) < 2 or min(map(len, found.values())) < 2:
        return {"": list(rows)} if rows else {}
    for heading, some in found.items():
        some[:] = [replace(row, what=row.what[len(heading) + 2 :] or row.what) for row in some]
        places = list(dict.fromkeys(row.what for row in some))
        some.sort(key=lambda row: places.index(row.what))
    return found


def table(rows: Sequence[Row], *, headline: bool = False) -> list[str]:
    arms = any(row.arm for row in rows)
    lines = [
        f"| |{' way |' if arms else ''} measured | against | ratio | goal | |",
        f"|---|{'---|' if arms else ''}---:|---:|---:|---|---|",
    ]
    for row in rows:
        name = row.headline if headline else row.what
        if arms:
            # The next column says it.
            name = (
                f"{cell(name.replace(f', {row.arm}', '') if row.arm else name)} | {cell(row.arm)}"
            )
        else:
            name = cell(name)
        other = "" if row.other is None else f"{quantity(row.other, row.unit)}, {cell(row.against)}"
        verdict = "" if row.holds is None else "reached" if row.holds else "**missed**"
        lines.append(
            f"| {name} | {measured(row)} | {other} | {ratio(row)} | {cell(row.target)} |"
            f" {verdict} |"
        )
    return lines


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why goals were missed, as far as it is known."""
    missed = [row for row in rows if row.holds is False and row.why]
    return [
        *([""] if missed else []),
        *(f"- Missed: {cell(_name(row))}: {cell(row.why)}" for row in missed),
    ]


def _name(row: Row) -> str:
    name = row.headline or row.what
    return f"{name} ({row.arm})" if row.arm and row.arm not in name else name


def measured(row: Row) -> str:
    found = row.value_spread if row.other is None else None
    spread = f" ({number(found.low)}..{number(found.high)})" if found is not None else ""
    return quantity(row.value, row.unit) + spread


def ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    found = row.ratio_spread
    if found is None or found.rounds == 1:
        return f"{row.ratio:.2f}"
    return f"{row.ratio:.2f} ({found.low:.2f}..{found.high:.2f})"


def quantity(value: float, unit: str) -> str:
    if unit == "B" and abs(value) >= 1e6:
        value, unit = (value / 1e9, "GB") if abs(value) >= 1e9 else (value / 1e6, "MB")
    return f"{number(value)} {cell(unit)}".rstrip()


def cell(text: str) -> str:
    """On one line, and without what would end the cell of a table."""
    text = " ".join(text.split()).replace("<=", "≤").replace(">=", "≥")
    return text.replace("|", "\\|").replace("<", "&lt;")


def title(text: str) -> str:
    text = cell(text)
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    return title(text) + ("" if text.endswith((".", "?")) else ".")


def machine(report: Report) -> list[str]:
    facts = report.machine
    target = "bench-full" if report.size == Size.FULL.value else "bench"
    commit = report.commit.rstrip("+")
    changed = " (with changes that are in no commit)" if report.commit.endswith("+") else ""
    return [
        "## The machine, and how to repeat this",
        "",
        "| | |",
        "|---|---|",
        f"| processor | {cell(str(facts.get('processor', '')))} x {facts.get('processors', '')} |",
        f"| memory | {facts.get('memory_bytes', 0) / 2**30:.1f} GiB |",
        f"| kernel | Linux {cell(str(facts.get('kernel', '')))} |",
        f"| Python | {cell(str(facts.get('python', '')))} |",
        f"| user | {'root' if facts.get('root') else 'not root'} |",
        f"| begun | {report.started} |",
        f"| commit | {commit or 'unknown'}{changed} |",
        "",
        "```",
        *([f"git checkout {commit}"] if commit and "," not in commit else []),
        "make setup",
        *(line.replace("python ", ".venv/bin/python ", 1) for line in report.command.splitlines()),
        "```",
        "",
        f"`make {target}` makes all measurements of this size. Figures as JSON:"
        f" [{report.stem}.json]({report.stem}.json).",
    ]


def targets(report: Report) -> list[str]:
    """Of the Makefile, by which the results were made."""
    sizes = report.size.split(", ")
    return [f"bench{'-full' if size == Size.FULL.value else ''}" for size in sorted(sizes)]


def figures(report: Report, picture: str | None) -> str:
    """For docs/BENCHMARKS.md: the headlines, and the ``picture`` (a path from there). ValueError if
    there are no headlines."""
    rows = [row for result in report.results for row in result.rows if row.headline]
    if not rows:
        raise ValueError("these results have no headlines: nothing to publish")
    facts = report.machine
    target = " and ".join(f"`make {target}`" for target in targets(report))
    user = "root" if facts.get("root") else "an ordinary user"
    kernel = ".".join(str(facts.get("kernel", "")).split(".")[:2])
    commands = len(report.command.splitlines())
    runs = "one run" if commands == 1 else f"{commands} runs"
    about = (
        f"From {runs} of {target} on {report.started[:10]}, as {user} on a machine with"
        f" {facts.get('processors')} processors and Linux {cell(kernel)}. The parallel file system"
        " is emulated ([how](#the-emulated-parallel-file-system)). Each figure is compared with the"
        " same work done otherwise in the same run; in brackets the least and the most of the"
        " rounds."
    )
    lines = [textwrap.fill(about, 100), "", *table(rows, headline=True), *reasons(rows)]
    if picture is not None:
        lines += ["", f"![Epoch times by way to the data]({picture})"]
    return "\n".join(lines)


def put_between_marks(text: str, figures: str) -> str:
    """``text`` with what is between the two marks replaced. ValueError without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"
