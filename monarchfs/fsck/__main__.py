"""``python -I -m monarchfs.fsck TASK``: started by ``monarchfs fsck``, as the cache's owner.

TASK is a JSON object with the fields of ``check.Task``, the state directory being a descriptor that
is inherited. On standard output comes what ``report.Report`` describes, and at the end either
``{"report": {...}}`` or ``{"failed": "one line"}``.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from types import FrameType

from monarchfs.fsck.check import CacheCheck, Task
from monarchfs.fsck.report import FsckReport
from monarchfs.system.limits import explained
from monarchfs.types import MonarchError


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="monarchfs: %(message)s")
    signal.signal(signal.SIGTERM, _end)
    fields = json.loads(arguments[0])
    task = Task(**{**fields, "tiers": tuple(fields["tiers"])})
    report = FsckReport(sys.stdout)
    try:
        report.send({"report": CacheCheck(task, report).run()})
    except BrokenPipeError:
        _fall_silent()
        return 1
    except (MonarchError, OSError) as error:
        failed = explained(error) if isinstance(error, OSError) else str(error)
        report.send({"failed": failed})
        return 1
    return 0


def _end(_number: int, _frame: FrameType | None) -> None:
    """Ends in the orderly way: the index is closed."""
    _fall_silent()
    sys.exit(1)


def _fall_silent() -> None:
    """Nobody listens any more. What is not written yet would fail, or wait, at the very end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
