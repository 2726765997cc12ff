"""Where the supervisor's log lines go."""

from __future__ import annotations

import logging
import os
import sys

from monarchfs.config import Config
from monarchfs.supervisor.storage import SUPERVISOR_LOG, open_log
from monarchfs.types import UsageError

_SYSLOG = "/dev/log"
_TIMED = "%(asctime)s %(levelname)s %(message)s"


def check_log_file(path: str) -> None:
    """Raises UsageError if the log file could not be written. Changes nothing."""
    target = path if os.path.lexists(path) else os.path.dirname(path)
    if os.path.isdir(path) or not os.access(target, os.W_OK):
        raise UsageError(f"log file {path} cannot be written: name another --log-file")


def log_to_stderr(level: str) -> None:
    """For the foreground, and for a daemon until it has told that it serves."""
    _install(logging.StreamHandler(sys.stderr), level, "monarchfs: %(message)s")


def log_as_daemon(config: Config, state_dir: int) -> None:
    """To the log file, else to syslog, else to a file in the state directory.

    Raises OSError if the file cannot be opened.
    """
    import logging.handlers  # only here, because loading it is slow

    if config.log_file is not None:
        # Opened again when it was rotated away.
        _install(logging.handlers.WatchedFileHandler(config.log_file), config.log_level, _TIMED)
        return
    if os.path.exists(_SYSLOG):
        syslog = logging.handlers.SysLogHandler(
            _SYSLOG, facility=logging.handlers.SysLogHandler.LOG_DAEMON
        )
        _install(syslog, config.log_level, f"monarchfs[{os.getpid()}]: %(message)s")
        return
    descriptor = open_log(state_dir, SUPERVISOR_LOG, config.user, truncate=False)
    _install(logging.StreamHandler(os.fdopen(descriptor, "a")), config.log_level, _TIMED)


def _install(handler: logging.Handler, level: str, line_format: str) -> None:
    handler.setFormatter(logging.Formatter(line_format))
    root = logging.getLogger()
    for previous in root.handlers[:]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(level.upper())
