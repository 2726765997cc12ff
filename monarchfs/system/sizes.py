"""Numbers, sizes, times and tables as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def format_bytes(count: float) -> str:
    """A number of bytes in powers of 1024, as ``--tier`` takes it."""
    for unit in ("", "K", "M", "G", "T"):
        if count < 1024:
            return (
                f"{count:.0f}{unit or ' bytes'}"
                if count >= 10 or not unit
                else f"{count:.1f}{unit}"
            )
        count /= 1024
    return f"{count:.1f}P"


def format_seconds(seconds: float) -> str:
    """A duration in its two largest units: ``3 d 4 h``, ``2 min 5 s``, ``1.5 s``, ``12 ms``."""
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2g} s"
    left = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    shown = parts[:2]
    return " ".join(shown[:1] if len(shown) > 1 and shown[1].startswith("0 ") else shown)


def format_count(count: float) -> str:
    """``1,234,567``."""
    return f"{count:,.0f}"


def counted(count: int, one: str, many: str = "") -> str:
    """``1 file``, ``1,234 files``."""
    return f"{count:,} {plural(count, one, many)}"


def plural(count: int, one: str, many: str = "") -> str:
    return one if count == 1 else many or f"{one}s"


def in_columns(rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """The lines of a table: the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]
        yield "  ".join(cells).rstrip()
