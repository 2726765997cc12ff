"""Two results side by side: what a change did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.numbers import number
from bench.report import Report, Result, Row


class Change(NamedTuple):
    """One figure of both. ``factor`` is after over before: of the ratios where there are any,
    because they do not depend on the machine's speed, else of the figures; None if it was 0."""

    name: str
    what: str
    before: Row
    after: Row
    factor: float | None


def changes(before: Report, after: Report) -> Iterator[Change]:
    """Of the figures that both have, in the order of the later one."""
    old = {_key(result, row): row for result in before.results for row in result.rows}
    for result in after.results:
        for row in result.rows:
            earlier = old.get(_key(result, row))
            if earlier is not None:
                what = f"{row.what}, {row.arm}" if row.arm else row.what
                yield Change(result.name, what, earlier, row, _factor(earlier, row))


def _key(result: Result, row: Row) -> tuple[str, ...]:
    return result.name, row.what, row.arm, row.against, row.unit


def _factor(before: Row, after: Row) -> float | None:
    old, new = before.value, after.value
    if before.ratio is not None and after.ratio is not None:
        old, new = before.ratio, after.ratio
    return new / old if old else None


def show(before: Report, after: Report) -> list[str]:
    """A table in Markdown, and what only one of both has."""
    found = list(changes(before, after))
    lines = [
        f"Before: {before.started}, {before.commit or 'unknown commit'}, sizes {before.size};"
        f" after: {after.started}, {after.commit or 'unknown commit'}, sizes {after.size}.",
        "`change` is after / before, of the ratios where there are any.",
        "",
        "| | before | after | ratio before | ratio after | change |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        ratios = [
            "" if row.ratio is None else f"{row.ratio:.2f}" for row in (one.before, one.after)
        ]
        figures = [f"{number(row.value)} {row.unit}".rstrip() for row in (one.before, one.after)]
        factor = "" if one.factor is None else f"{one.factor:.2f}"
        cells = [f"{one.name}: {one.what}", *figures, *ratios, factor]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for when, report in (("before", before), ("after", after)):
        total = sum(len(result.rows) for result in report.results)
        if total != len(found):
            lines += ["", f"Only {when}: {total - len(found)} of {total} figures."]
    return lines
