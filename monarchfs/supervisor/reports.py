"""What the worker reports: asked for, kept, and passed on to whoever wants a status.

The worker may hang. So its last report is kept; who asks gets that one, marked as old, if no newer
one comes in time.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from monarchfs.supervisor.channel import WorkerChannel
from monarchfs.system.listeners import Listeners

ANSWER_SECONDS = 1.5
"""How long a worker may take to answer before it counts as not answering."""

_EVERY_SECONDS = 10.0
_MOST_WAITING = 128


class Reports:
    """Times are time.monotonic(). Nothing here blocks.

    Changing: the ``latest`` report (empty before the first) and when it came; questions without an
    answer; who waits for one. ``due``: a client is to be answered now, with what is known.
    """

    def __init__(self) -> None:
        self.due: Listeners[[socket.socket]] = Listeners()
        self.latest: Mapping[str, Any] = {}
        self.came = 0.0
        self._number = 0
        self._asked = float("-inf")
        self._unanswered: dict[int, float] = {}
        # Each with a question, the answer to which, or to a later one, has the effect of what the
        # client did before; and until when it waits.
        self._waiting: dict[socket.socket, tuple[int, float]] = {}

    def overdue(self, now: float) -> bool:
        """Whether the worker has left a question unanswered for ANSWER_SECONDS."""
        oldest = next(iter(self._unanswered.values()), now)
        return now - oldest >= ANSWER_SECONDS

    def want(self, connection: socket.socket, channel: WorkerChannel, now: float) -> None:
        """Answer a client with a new report of the worker at ``channel``, or with the last one if
        none comes in time."""
        busy = self.overdue(now) or len(self._waiting) >= _MOST_WAITING
        if busy or not self._ask(channel, now):
            self.due(connection)
        else:
            self._waiting[connection] = (self._number, now + ANSWER_SECONDS)

    def arrived(self, number: int, report: Mapping[str, Any], now: float) -> None:
        """The worker's answer to a question."""
        self.latest, self.came = report, now
        self._unanswered = {n: when for n, when in self._unanswered.items() if n > number}
        self._answer([one for one, (asked, _) in self._waiting.items() if asked <= number])

    def tick(self, channel: WorkerChannel, now: float) -> None:
        """Stop waiting where it is time; ask now and then, so that the last report is recent."""
        self._answer([one for one, (_, until) in self._waiting.items() if until <= now])
        if not self._unanswered and now - self._asked >= _EVERY_SECONDS:
            self._ask(channel, now)

    def give_up(self) -> None:
        """No worker is left that could answer."""
        self._unanswered.clear()
        self._answer(list(self._waiting))

    @property
    def deadlines(self) -> list[float]:
        """When ``tick`` has somebody to answer."""
        return [until for _, until in self._waiting.values()]

    def _ask(self, channel: WorkerChannel, now: float) -> bool:
        self._asked = now
        # A worker that takes no more questions is as good as one that does not answer them.
        self._number += 1
        self._unanswered[self._number] = now
        return channel.send({"do": "status", "number": self._number})

    def _answer(self, clients: list[socket.socket]) -> None:
        for client in clients:
            del self._waiting[client]
            self.due(client)
