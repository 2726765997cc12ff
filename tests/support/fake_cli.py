"""The command line with tests/support/fake_worker.py in the worker's place.

    python -I fake_cli.py MODE ARGUMENTS...

In these modes the worker is as in ``serve``: ``patient``, it is replaced when it has hung for
minutes; ``trying``, safe mode is left soon; ``starved``, after
the first worker eight cannot be started; ``unseen``, the kernel does not say who waits.
Needs the standard library only, so that any user's interpreter can run it.
"""

import errno
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

if __name__ == "__main__":
    from monarchfs.cli import main, mount
    from monarchfs.supervisor import restart_policy, vital_signs
    from monarchfs.supervisor.mounted import Mounted

    changed: Any = Mounted
    mode = sys.argv[1]
    if mode == "trying":
        restart_policy.RETRY_SECONDS = (0.5, 1.0, 600.0)
    if mode == "starved":
        restart_policy.LONGEST_NOT_STARTED_SECONDS = 0.01
        start, calls = Mounted._start, itertools.count()

        def refused_at_first(*arguments: Any) -> Any:
            if 1 <= next(calls) < 9:
                raise BlockingIOError(errno.EAGAIN, "no process")
            return start(*arguments)

        changed._start = refused_at_first
    if mode == "unseen":
        changed.waiting = lambda _mounted: None
    if mode == "patient":
        for limit in ("SILENT_SECONDS", "ASLEEP_SECONDS", "DEAD_SILENT_SECONDS", "STARVED_SECONDS"):
            setattr(vital_signs, limit, 300.0)
    mode = "serve" if mode in ("patient", "trying", "unseen") else mode
    worker = (sys.executable, "-I", str(HERE / "fake_worker.py"), mode)
    mount.mount_command = functools.partial(mount.mount_command, worker_command=worker)
    sys.exit(main.main(sys.argv[2:]))
