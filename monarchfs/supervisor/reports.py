"""What the worker reports: asked for, kept, and passed on to whoever wants a status.

The worker may hang. So its last report is kept; who asks gets that one, marked as old, if no newer
one comes in time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from monarchfs.config import Config
from monarchfs.supervisor.failover import Failover, Phase
from monarchfs.supervisor.startup import Mounted

ANSWER_SECONDS = 1.5
"""How long a worker may take to answer before it counts as not answering."""

_EVERY_SECONDS = 10.0
_MOST_WAITING = 128


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A client that waits for the answer to question ``number`` or a later one, so that the report
    has the effect of what it did before."""

    number: int
    deadline: float
    connection: socket.socket


class Reports:
    """Times are time.monotonic(). Nothing here blocks.

    Constant: how the worker is asked and a client answered. Changing: the ``latest`` report (empty
    before the first) and when it came; questions without an answer; who waits for one.
    """

    def __init__(self, ask: Callable[[int], bool], reply: Callable[[socket.socket], None]) -> None:
        """``ask`` sends the worker a question with this number, and returns whether it could;
        ``reply`` answers a client with what is known then, and closes the connection."""
        self.latest: Mapping[str, Any] = {}
        self.came = 0.0
        self._ask = ask
        self._reply = reply
        self._number = 0
        self._asked = float("-inf")
        self._unanswered: dict[int, float] = {}
        self._waiting: list[_Waiting] = []

    def overdue(self, now: float) -> bool:
        """Whether the worker has left a question unanswered for ANSWER_SECONDS."""
        oldest = next(iter(self._unanswered.values()), now)
        return now - oldest >= ANSWER_SECONDS

    def want(self, connection: socket.socket, now: float) -> None:
        """Answer a client with a new report, or with the last one if none comes in time."""
        if self.overdue(now) or len(self._waiting) >= _MOST_WAITING or not self._put(now):
            self._reply(connection)
        else:
            self._waiting.append(_Waiting(self._number, now + ANSWER_SECONDS, connection))

    def arrived(self, number: int, report: Mapping[str, Any], now: float) -> None:
        """The worker's answer to a question."""
        self.latest, self.came = report, now
        self._unanswered = {n: when for n, when in self._unanswered.items() if n > number}
        self._answer([one for one in self._waiting if one.number <= number])

    def tick(self, now: float) -> None:
        """Stop waiting where it is time; ask now and then, so that the last report is recent."""
        self._answer([one for one in self._waiting if one.deadline <= now])
        if not self._unanswered and now - self._asked >= _EVERY_SECONDS:
            self._put(now)

    def give_up(self) -> None:
        """No worker is left that could answer."""
        self._unanswered.clear()
        self._answer(list(self._waiting))

    @property
    def deadlines(self) -> list[float]:
        """When ``tick`` has somebody to answer."""
        return [one.deadline for one in self._waiting]

    def _put(self, now: float) -> bool:
        self._asked = now
        # A worker that takes no more questions is as good as one that does not answer them.
        self._number += 1
        self._unanswered[self._number] = now
        return self._ask(self._number)

    def _answer(self, clients: list[_Waiting]) -> None:
        for client in clients:
            self._waiting.remove(client)
            self._reply(client.connection)


def status_of(
    config: Config, reports: Reports, failover: Failover, started: float, mounted: Mounted
) -> dict[str, Any]:
    """What the worker last reported, and what only the supervisor knows. ``started`` is when that
    began."""
    now = time.monotonic()
    last, death, retry_seconds = reports.latest, failover.last_death, failover.retry_seconds
    worker = {
        **last.get("worker", {}),
        "pid": failover.worker.pid,
        "restarts": failover.restarts,
        "not_understood": failover.log.not_understood,
        "error": None,
        "last_death": death and {"why": death.why, "unix_seconds": round(death.when, 3)},
        "retry_seconds": None if retry_seconds is None else round(retry_seconds, 3),
    }
    known = {
        "state": "starting",
        **last,
        "source": config.source,
        "mountpoint": config.mountpoint,
        "age_seconds": round(now - reports.came, 3) if last else None,
        "uptime_seconds": round(now - started, 3),
        "worker": worker,
        "peer_server": mounted.peer_server and {"pid": mounted.peer_server.pid},
        "passthrough": {**last.get("passthrough", {}), "registered": len(mounted.backing)},
    }
    if not failover.serves:
        worker["error"] = _trouble_of(failover)
        known["state"] = "down" if failover.phase is Phase.ENDED else "restarting"
        if failover.phase in (Phase.ENDED, Phase.PAUSING):
            worker["pid"] = None
    elif reports.overdue(now) or not last:
        known["state"] = "worker not answering"
    elif retry_seconds is not None:
        known["state"] = "safe mode"
        worker["error"] = (
            "the workers before it died one after the other, so it only serves the source: a whole"
            f" one is tried in {retry_seconds:.0f} s, and by"
            f" monarchfs restart {config.mountpoint} at once"
        )
    return known


def _trouble_of(failover: Failover) -> str:
    """Why no worker serves now."""
    if failover.phase is Phase.HUNG:
        return failover.why_replaced
    died = None if failover.phase is Phase.LEAVING else failover.last_death
    return died.why if died else "the worker is being replaced"
