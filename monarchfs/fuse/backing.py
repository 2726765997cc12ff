"""Backing ids in the worker: requested from the supervisor, and released. Only the supervisor may
make them (``supervisor/backing.py``). Nothing here waits for its answer, unless the caller does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

Send = Callable[[dict[str, Any]], bool]
"""Sends the supervisor a message; whether that was possible at once."""

Offer = tuple[int, str, int]
"""A file: its tier's place among the tiers, its path there, its inode number."""

MOST_AT_ONCE = 32
"""Files in one message: as many as the supervisor takes."""


@dataclass(eq=False, slots=True)
class Question:
    """Constant: ``number``. Changing: the answer, complete once ``done`` is set: ``ids`` in the
    order of the files, 0 for those that were refused, and why the last one was."""

    number: int
    done: trio.Event = field(default_factory=trio.Event)
    ids: list[int] = field(default_factory=list)
    code: int = 0
    reason: str = ""


class BackingIds:
    """Constant: how messages are sent. Changing: the questions that the supervisor has not
    answered, and the ids that could not be released so far."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._questions: dict[int, Question] = {}
        self._unsent: list[int] = []
        self._number = 0

    def ask(self, offers: Sequence[Offer]) -> Question | None:
        """Offer files, at most MOST_AT_ONCE. A caller that stops waiting calls ``drop``. None if
        the supervisor takes no message now."""
        question = self._next()
        message = {"event": "back", "number": question.number, "files": offers}
        if not self._send(message):
            return None
        self._questions[question.number] = question
        return question

    def drop(self, question: Question) -> None:
        """The caller no longer waits for the answer."""
        self._questions.pop(question.number, None)

    def release(self, ids: list[int]) -> trio.Event:
        """Set once the kernel has closed the files, but for opens of them; at once where that
        cannot be known."""
        question = self._next()
        self._unsent += ids
        message = {"event": "unback", "number": question.number, "ids": self._unsent}
        if self._send(message):
            self._unsent = []
            self._questions[question.number] = question
        else:
            question.done.set()
        return question.done

    def answered(self, number: int, ids: list[int], code: int, reason: str) -> None:
        """The supervisor's answer to either."""
        question = self._questions.pop(number, None)
        if question is None:
            if ids := [one for one in ids if one]:
                self.release(ids)
            return
        question.ids, question.code, question.reason = ids, code, reason
        question.done.set()

    def _next(self) -> Question:
        self._number += 1
        return Question(self._number)
