"""What a measurement is given. It is a module with ``run(task: Task) -> Result``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from bench.report import Result


class Size(Enum):
    """How much work a measurement does. ``QUICK`` is for ``make bench``, which takes a quarter of
    an hour in all; ``FULL`` for ``make bench-full``, and for one that is run by name."""

    QUICK = "quick"
    FULL = "full"


def _silent(_text: str) -> None:
    pass


def _forget(_result: Result) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Task:
    """``place`` is an empty directory of the measurement's own, removed afterwards; ``rounds`` is
    how many rounds somebody asked for. ``say`` shows in a few words what is being done now:
    ``task.say("round 2 of 5, all local")``; it costs nothing to call it often. What is in a result
    that was given to ``keep`` is saved even if the measurement fails or is interrupted."""

    place: Path
    size: Size = Size.FULL
    rounds: int | None = None
    say: Callable[[str], None] = _silent
    keep: Callable[[Result], None] = _forget

    @property
    def quick(self) -> bool:
        return self.size is Size.QUICK

    def rounds_or(self, quick: int, full: int) -> int:
        """What was asked for, or what the measurement takes at this size."""
        return self.rounds or (quick if self.quick else full)
