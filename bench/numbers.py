"""Figures as people read them."""

from __future__ import annotations


def number(value: float) -> str:
    """Three digits that count, and no more zeros than needed."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return (
        f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
        if abs(value) >= 1
        else f"{value:.2g}"
    )


def short(value: float, binary: bool = False) -> str:
    """For ticks: 1,000,000 is 1M, or 1024 is 1 Ki."""
    if not binary and 1000 <= abs(value) < 1_000_000:
        return f"{value:,.0f}"
    base, units = (1024, ("", " Ki", " Mi", " Gi")) if binary else (1000, ("", "k", "M", "G"))
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{value:g}{unit}"
        value /= base
    return f"{value:g}{units[-1]}"
