"""The command line with tests/support/fake_worker.py in the worker's place.

    python -I fake_cli.py MODE ARGUMENTS...

In mode ``patient`` the worker is as in ``serve``, and replaced when it has hung for minutes.
Needs the standard library only, so that any user's interpreter can run it.
"""

import functools
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

if __name__ == "__main__":
    from monarchfs.cli import main, mount
    from monarchfs.supervisor import vital_signs

    mode = sys.argv[1]
    if mode == "patient":
        mode = "serve"
        for limit in ("SILENT_SECONDS", "ASLEEP_SECONDS", "DEAD_SILENT_SECONDS", "STARVED_SECONDS"):
            setattr(vital_signs, limit, 300.0)
    worker = (sys.executable, "-I", str(HERE / "fake_worker.py"), mode)
    mount.mount_command = functools.partial(mount.mount_command, worker_command=worker)
    sys.exit(main.main(sys.argv[2:]))
