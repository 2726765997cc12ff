"""One finding, and what findings together mean. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

Value = str | int | float | bool | list[str] | None


class Severity(Enum):
    """``PROBLEM``: mounting will fail; ``WARNING``: it will not be what it could be."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """``detail`` and ``remedy`` are for people, one line each; ``numbers`` for programs, with units
    in their names. Names of checks are stable; a tier's has its path in ``numbers``."""

    name: str
    state: Severity
    detail: str
    remedy: str = ""
    numbers: Mapping[str, Value] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        numbers = fields.pop("numbers")
        return {**fields, "state": self.state.value, **numbers}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Check:
        numbers = dict(fields)
        name, state, detail, remedy = map(numbers.pop, ("name", "state", "detail", "remedy"))
        return cls(name, Severity(state), detail, remedy, numbers)


Probe = Callable[[], Iterable[Check]]
"""Asks the machine, and may hang."""


Step = str | Check
"""What is done now, for people; or what was found."""


# The three kinds; ``numbers`` by name.


def ok(name: str, detail: str, remedy: str = "", /, **numbers: Value) -> Check:
    return Check(name, Severity.OK, detail, remedy, numbers)


def warning(name: str, detail: str, remedy: str = "", /, **numbers: Value) -> Check:
    return Check(name, Severity.WARNING, detail, remedy, numbers)


def problem(name: str, detail: str, remedy: str = "", /, **numbers: Value) -> Check:
    return Check(name, Severity.PROBLEM, detail, remedy, numbers)


def from_error(name: str, error: Exception) -> Check:
    """The problem that one of our errors describes, whose texts end with the remedy."""
    return problem(name, *split_remedy(str(error)))


def split_remedy(text: str) -> tuple[str, str]:
    """``what is wrong: what to do`` at the last colon that is not inside parentheses."""
    depth = 0
    for at in range(len(text) - 2, 0, -1):
        depth += {")": 1, "(": -1}.get(text[at + 1], 0)
        if depth == 0 and text[at] == ":" and text[at + 1] == " ":
            return text[:at], text[at + 2 :]
    return text, ""
