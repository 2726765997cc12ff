"""The command line with tests/fake_worker.py in the worker's place.

    python -I fake_cli.py MODE ARGUMENTS...

Needs the standard library only, so that any user's interpreter can run it.
"""

import functools
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

if __name__ == "__main__":
    from monarchfs.cli import main, mount

    worker = (sys.executable, "-I", str(HERE / "fake_worker.py"), sys.argv[1])
    mount.mount_command = functools.partial(mount.mount_command, worker_command=worker)
    sys.exit(main.main(sys.argv[2:]))
