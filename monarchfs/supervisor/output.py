"""What workers write to standard error while the supervisor is in the foreground.

It goes where the supervisor's own lines go, perhaps a journal or root's terminal. So it passes
through a pipe, line by line, printable, and with a limit.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress

from monarchfs.supervisor.messages import printable
from monarchfs.supervisor.worker_logging import Throttle

LINES_PER_SECOND = 20.0
LINES_AT_ONCE = 2000
"""The stacks of a hundred threads."""

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MOST_LINE = 4096
_TURNS = 16


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
        self._throttle = Throttle(LINES_PER_SECOND, LINES_AT_ONCE)
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
        if not self._throttle.take(now):
            return ""
        return self._count() + self._shown(line)

    @staticmethod
    def _shown(line: bytes) -> str:
        return f"{printable(line.decode(errors='replace'), _MOST_LINE)}\n"

    def _count(self) -> str:
        count, self._throttle.left_out = self._throttle.left_out, 0
        return f"monarchfs: {count} more lines of workers were left out\n" if count else ""

    def _write(self, text: str) -> None:
        try:
            os.write(sys.stderr.fileno(), text.encode())
        except OSError:
            self._throttle.left_out += text.count("\n")  # no room, or nobody reads
