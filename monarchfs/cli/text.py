"""Numbers and names as people read them."""

from __future__ import annotations

from monarchfs.system.escaping import printable as printable


def format_count(count: float) -> str:
    """``1,234,567``."""
    return f"{count:,.0f}"


def counted(count: int, one: str) -> str:
    """``1 file``, ``1,234 files``."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def labelled(label: str, text: str) -> str:
    """A line below a heading: what it is about, then the text."""
    return f"  {label:<9} {text}"


def format_share(part: float, whole: float) -> str:
    """Per cent; ``-`` of nothing. 100% only of all, 0% only of nothing."""
    if whole <= 0:
        return "-"
    percent = 100 * part / whole
    if 0 < part < whole:
        percent = min(max(percent, 0.1), 99.9)
    return f"{percent:.1f}%" if 0 < percent < 100 else f"{percent:.0f}%"


def renumbered_text(files: int) -> str:
    """What a source does that gives its files other inode numbers."""
    return (
        f"the source changes inode numbers: {files:,} unchanged files were taken for others, and"
        " are copied again (TROUBLESHOOTING, Speed)"
    )
