"""For ``bench.trace``: notes when which thread of a worker enters which function of ours."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType


def trace_worker(package: str, directory: str) -> None:
    """From now on, if this is a worker's process: functions in files below ``package`` are noted in
    a file in ``directory``."""
    if "monarchfs.worker" not in sys.orig_argv:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    file = os.open(os.path.join(directory, f"{os.getpid()}.python"), flags, 0o666)
    skipped = len(package) + 1

    def enter(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_name[0] != "<":
            name = getattr(code, "co_qualname", code.co_name)
            thread, path = threading.get_native_id(), code.co_filename[skipped:]
            line = f"{time.monotonic_ns()} {thread} {path} {name}\n"
            os.write(file, line.encode())

    threading.setprofile(enter)
    sys.setprofile(enter)
