"""What an analysis found, as tables and sentences that text and page both show; and the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from monarchfs.insight.findings import percent
from monarchfs.insight.results import CAUSES, TIER, Analysis, Conclusion, Epoch
from monarchfs.insight.verdict import words_of
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import counted, format_bytes, format_seconds, in_columns

_MOST_LETTERS = 100


class Grid(NamedTuple):
    """``says`` explains it to whoever sees it for the first time."""

    title: str
    says: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def text_of(analysis: Analysis) -> str:
    """All of it, for people."""
    parts = (headline(analysis), analysis.verdict, grids(analysis), pattern_lines(analysis))
    return "\n".join(map(printable, lines_of(*parts)))


def lines_of(
    head: str, verdict: Conclusion, tables: Iterable[Grid], pattern: Iterable[str]
) -> Iterator[str]:
    yield from (head, "", *verdict.lines)
    yield from (f"Note: {one}" for one in verdict.reservations)
    for grid in tables:
        yield from ("", grid.title, *aligned(grid))
    yield from ("", "How files were read", *(f"  {line}" for line in pattern))


def aligned(grid: Grid) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    return (f"  {line}" for line in in_columns([grid.headings, *grid.rows], 1))


def headline(analysis: Analysis) -> str:
    facts = analysis.facts
    what = " ".join(map(str, facts.get("command") or ())) or "Recording"
    if len(what) > _MOST_LETTERS:
        what = what[:_MOST_LETTERS] + "..."
    return (
        f"{what}: {facts.get('source', '?')} at {facts.get('mount_point', '?')},"
        f" {format_seconds(analysis.seconds)},"
        f" {counted(analysis.events, 'event')}, {counted(len(analysis.epochs), 'epoch')}"
    )


def grids(analysis: Analysis) -> Iterator[Grid]:
    """Those that have rows."""
    made = (_epochs(analysis), _waiting(analysis), _latencies(analysis), _outcomes(analysis))
    yield from (grid for grid in (*made, _hot(analysis)) if grid.rows)


def pattern_lines(analysis: Analysis) -> Iterator[str]:
    """How the job reads, in sentences."""
    found, epochs = analysis.pattern, analysis.epochs
    kinds = {"sequential": found.sequential, "strided": found.strided, "random": found.random}
    within = ", ".join(
        f"{percent(share)} {name}" for name, share in kinds.items() if share >= 0.005
    )
    yield f"Reads within a file: {within or 'none'}; {format_bytes(found.read_bytes)} on average."
    yield f"{percent(found.whole_files)} of files were read whole in an epoch."
    sizes = [
        f"{counted(row['files'], 'file')} up to {format_bytes(row['up_to_bytes'])}"
        for row in found.sizes
        if row["files"]
    ]
    yield f"Sizes: {', '.join(sizes) or 'unknown'}."
    if found.order_alike is not None:
        alike = "the same" if found.order_alike > 0.95 else "partly the same"
        order = "another one" if found.order_alike < 0.3 else alike
        correlation = f"(rank correlation {found.order_alike:.2f})"
        yield f"The order of files is {order} in each epoch {correlation}."
    shared = sum(epoch.files.shared for epoch in epochs) / (sum(e.files.read for e in epochs) or 1)
    yield f"{percent(shared)} of files were read by more than one process in an epoch."


def _epochs(analysis: Analysis) -> Grid:
    return Grid(
        "Epochs",
        "An epoch begins where files are read again. Local is the share of bytes from tiers: what"
        " is in the daemon's memory the source or a peer gave a moment ago. Readers waited on"
        " average for so much of the time; all at once, or none of them.",
        (
            *("epoch", "time", "files", "read", "local", "not local"),
            *("readers", "waited", "all waited", "none waited", "while reading"),
        ),
        [_epoch(epoch) for epoch in analysis.epochs],
    )


def _epoch(epoch: Epoch) -> Sequence[str]:
    span, alive = epoch.span, epoch.span.with_readers or 1
    return (
        str(epoch.number),
        format_seconds(epoch.seconds),
        f"{epoch.files.read:,}",
        format_bytes(epoch.bytes),
        percent(epoch.hit_ratio),
        format_bytes(epoch.bytes - span.bytes[TIER]),
        f"{epoch.readers:.1f}",
        percent(epoch.waited_share),
        percent(span.all_waiting / alive),
        percent(span.idle / alive),
        f"{format_bytes(epoch.bandwidth)}/s",
    )


def _waiting(analysis: Analysis) -> Grid:
    rows = []
    for epoch in analysis.epochs:
        if epoch.number != analysis.verdict.epoch:
            continue
        for cause, seconds in enumerate(epoch.span.merged):
            if seconds:
                amount = epoch.span.bytes[cause]
                row = (
                    words_of(cause),
                    format_seconds(seconds),
                    percent(epoch.span.shared[cause] / (epoch.span.waiting or 1)),
                    format_bytes(amount) if amount else "-",
                    f"{format_bytes(amount / seconds)}/s" if amount else "-",
                )
                rows.append(row)
    return Grid(
        f"What was waited for in epoch {analysis.verdict.epoch}",
        "The time with at least one request waiting for this, its share of all waiting, and what"
        " it gave meanwhile.",
        ("waiting for", "time", "share", "bytes", "rate"),
        rows,
    )


def _latencies(analysis: Analysis) -> Grid:
    return Grid(
        "Requests",
        "How long they took: half of them at most the median, 99 of 100 at most p99.",
        ("answered by", "size", "requests", "median", "p90", "p99", "longest"),
        [
            (
                words_of(CAUSES.index(one.cause)),
                _size(one.up_to_bytes),
                f"{one.requests:,}",
                *map(_brief, (one.p50, one.p90, one.p99, one.most)),
            )
            for one in analysis.latencies
        ],
    )


def _brief(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else format_seconds(seconds)


def _size(up_to: int) -> str:
    if not up_to:
        return "names, opens"
    return f"up to {format_bytes(up_to)}" if up_to < 1 << 50 else "more"


def _outcomes(analysis: Analysis) -> Grid:
    return Grid(
        f"Other settings (estimates for epoch {analysis.verdict.epoch})",
        "The recording, replayed with other settings, by the rules that a mount follows. It is"
        " assumed that the job computes as before, and does not compute while all readers wait.",
        ("setting", "local", "an epoch", "the first epoch"),
        [
            (
                one.change,
                percent(one.hit_ratio),
                format_seconds(one.epoch_seconds),
                format_seconds(one.first_epoch_seconds),
            )
            for one in analysis.outcomes
        ],
    )


def _hot(analysis: Analysis) -> Grid:
    return Grid(
        "Hot files",
        "Files that were read several times over in one epoch.",
        ("file", "size", "reads", "read"),
        [
            (one.path, format_bytes(one.size), f"{one.reads:,}", format_bytes(one.bytes))
            for one in analysis.pattern.hot
        ],
    )
