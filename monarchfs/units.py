"""Sizes and times as people read them."""

from __future__ import annotations


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
    """A length of time in its largest unit: ``3 s``, ``12 min``, ``5 h``, ``2 days``."""
    seconds = max(0.0, seconds)
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
