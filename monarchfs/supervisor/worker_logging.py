"""What workers cause to be written: log lines about them, and, while the supervisor is in the
foreground, what they write to standard error. Both are limited, and what is left out is counted.

Their output goes where the supervisor's own lines go, perhaps a journal or root's terminal. So it
passes through a pipe, line by line, and printable.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from contextlib import suppress

from monarchfs.supervisor.messages import printable
from monarchfs.system.logs import write_at_once

log = logging.getLogger(__name__)

_LOG_LINES_PER_SECOND = 0.2
_LOG_LINES_AT_ONCE = 20
_OUTPUT_LINES_PER_SECOND = 20.0
_OUTPUT_LINES_AT_ONCE = 2000
"""The stacks of a hundred threads."""

_QUIET_SECONDS = 1.0
"""Without a refused line; then what was left out is counted."""

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MOST_LINE = 4096
_TURNS = 16


class Throttle:
    """A token bucket. Pure. Changing: how many lines are allowed now; ``left_out`` since the last
    one. Times never go back."""

    def __init__(self, per_second: float, at_once: int) -> None:
        self.left_out = 0
        self._per_second = per_second
        self._most = at_once
        self._tokens = float(at_once)
        self._at: float | None = None
        self._refused_at = -_QUIET_SECONDS

    def allow(self, now: float) -> bool:
        """Whether one more line may be said. A line that may not is counted."""
        if self._take(now):
            return True
        self.left_out += 1
        self._refused_at = now
        return False

    def take_for_count(self, now: float) -> bool:
        """Whether to say now how many lines were left out. While lines still come, the next of them
        that may be said brings the count: a count alone would take its turn."""
        is_quiet = now - self._refused_at >= _QUIET_SECONDS
        return self.left_out > 0 and is_quiet and self._take(now)

    def take_left_out(self) -> int:
        """How many lines were left out; they are told of now."""
        count, self.left_out = self.left_out, 0
        return count

    def _take(self, now: float) -> bool:
        if self._at is not None:
            gained = (now - self._at) * self._per_second
            self._tokens = min(float(self._most), self._tokens + gained)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class WorkerLogging:
    """Of one mount, for all of its workers. Changing: ``not_understood``, how many messages and
    values were dropped."""

    def __init__(self) -> None:
        self.not_understood = 0
        self._throttle = Throttle(_LOG_LINES_PER_SECOND, _LOG_LINES_AT_ONCE)

    def say(self, level: int, line: str) -> None:
        """A log line that a worker caused, unless there are too many. Its words are printable."""
        if self._throttle.allow(time.monotonic()):
            self._count()
            log.log(level, "%s", line)

    def drop(self, why: str, count: int = 1) -> None:
        """Something was not understood."""
        self.not_understood += count
        self.say(logging.WARNING, f"the worker speaks nonsense: {why}")

    def tick(self) -> None:
        """Say how many lines were left out, once no more come."""
        if self._throttle.take_for_count(time.monotonic()):
            self._count()

    def _count(self) -> None:
        if count := self._throttle.take_left_out():
            log.warning("%d more lines about workers were left out", count)


class WorkerOutput:
    """One pipe for all workers of a mount. Neither end blocks: a worker loses what finds no room in
    the pipe, so a supervisor that is stopped stops no worker.

    Constant: ``end``, what workers inherit. Changing: the beginning of a line; how many lines were
    left out.
    """

    def __init__(self) -> None:
        self._reading, self.end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with suppress(OSError):  # pipe-user-pages-soft (pipe(7)): more of it is lost then
            fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._throttle = Throttle(_OUTPUT_LINES_PER_SECOND, _OUTPUT_LINES_AT_ONCE)
        self._begun = b""

    def fileno(self) -> int:
        return self._reading

    def pass_on(self) -> bool:
        """Write what came to standard error; whether there was anything."""
        try:
            part = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._begun = (self._begun + part).split(b"\n")
        if len(self._begun) > _MOST_LINE:
            lines.append(self._begun)
            self._begun = b""
        now = time.monotonic()
        self._write("".join(self._line(line, now) for line in lines))
        return bool(part)

    def tick(self) -> None:
        """Say how many lines were left out, once no more come."""
        if self._throttle.take_for_count(time.monotonic()):
            self._write(self._count())

    def close(self) -> None:
        """Write what is left; there are no workers any more. Their last line is shown even if they
        said too much before."""
        turns = 0
        while turns < _TURNS and self.pass_on():
            turns += 1
        rest, self._begun = self._begun, b""
        self._write(self._count() + (self._shown(rest) if rest else ""))
        os.close(self._reading)
        os.close(self.end)

    def _line(self, line: bytes, now: float) -> str:
        if not self._throttle.allow(now):
            return ""
        return self._count() + self._shown(line)

    @staticmethod
    def _shown(line: bytes) -> str:
        return f"{printable(line.decode(errors='replace'), _MOST_LINE)}\n"

    def _count(self) -> str:
        count = self._throttle.take_left_out()
        return f"monarchfs: {count} more lines of workers were left out\n" if count else ""

    def _write(self, text: str) -> None:
        content, done = text.encode(), 0
        with suppress(OSError):  # nobody reads
            done = write_at_once(sys.stderr.fileno(), content)
        self._throttle.left_out += content[done:].count(b"\n")
