"""The bugs. They were chosen by what is promised (docs/SEMANTICS.md), before it was known which of
them are found. None is a matter of taste: each breaks what a user would notice.

They stand in table.txt, each in lines of its own: its name and what goes wrong; the file; what the
file has once, with "-", and what becomes of that, with "+" (parts of lines will do); the tests that
should find it.
"""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """``old``, which ``file`` has once, becomes ``new``. ``breaks`` says what goes wrong then;
    ``tests``, arguments for pytest, are those that should find it."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


def _mutant(lines: list[str]) -> Mutant:
    name, _, breaks = lines[0].partition(": ")
    if wrong := [line for line in lines[2:] if not line.startswith(("-", "+", "tests/"))]:
        raise ValueError(f"{name}: {wrong[0]!r} is no line of a bug")

    def all_with(mark: str) -> list[str]:
        return [line.removeprefix(mark) for line in lines[2:] if line.startswith(mark)]

    tests = tuple("tests/" + test for test in all_with("tests/"))
    return Mutant(name, lines[1], "\n".join(all_with("-")), "\n".join(all_with("+")), breaks, tests)


_BLOCKS = Path(__file__).with_suffix(".txt").read_text().split("\n\n")
MUTANTS = tuple(_mutant(block.splitlines()) for block in _BLOCKS if not block.startswith("#"))
