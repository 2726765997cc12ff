"""Events of a part, for parts that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Listeners(Generic[P]):
    """Calls those who listen, in the order in which they were added. They raise nothing and have
    no checkpoint."""

    def __init__(self) -> None:
        self._functions: list[Callable[P, object]] = []

    def add(self, function: Callable[P, object]) -> None:
        self._functions.append(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in self._functions:
            function(*args, **kwargs)
