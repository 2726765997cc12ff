"""Where the supervisor's log lines go."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

from monarchfs.config import Config, User
from monarchfs.supervisor.directories import SUPERVISOR_LOG, open_log
from monarchfs.supervisor.identity import (
    acting_as,
    may_access,
    open_file_as,
    regular,
    roots_place,
)
from monarchfs.system.escaping import OneLine
from monarchfs.system.logs import BoundedLog, Lossy, keep_small, suspend, write_at_once
from monarchfs.system.trusted import TrustedPath, Untrusted
from monarchfs.types import UsageError

_SYSLOG = "/dev/log"
_TIMED = "%(asctime)s %(levelname)s %(message)s"


def check_log_file(path: str, user: User) -> None:
    """Raises UsageError if the log file could not be written. Changes nothing."""
    try:
        os.close(_open_log_file(path, user, make=False))
    except FileNotFoundError:
        reason = None if _may_make(path, user) else "its directory is missing, or not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        reason = None
    if reason is not None:
        raise _not_writable(path, reason)


def _not_writable(path: str, reason: str | None) -> UsageError:
    return UsageError(f"log file {path} cannot be written: {reason}: name another --log-file")


def log_to_stderr(level: str) -> None:
    """For the foreground, and for a daemon until it has told that it serves."""
    _install(ToStderr(), level, "monarchfs: %(message)s")


def log_as_daemon(config: Config, state_dir: int) -> None:
    """To the log file, else to syslog, else to a file in the state directory. Raises UsageError if
    the file cannot be opened."""
    if config.log_file is not None:
        try:
            handler = log_file_handler(config.log_file, config.user)
        except OSError as error:
            raise _not_writable(config.log_file, error.strerror) from None
        _install(handler, config.log_level, _TIMED)
        return
    if os.path.exists(_SYSLOG):
        _install(
            syslog_handler(_SYSLOG), config.log_level, f"monarchfs[{os.getpid()}]: %(message)s"
        )
        return
    descriptor = open_log(state_dir, SUPERVISOR_LOG, config.user, truncate=False)
    as_owner = partial(acting_as, config.user)
    log = BoundedLog(state_dir, SUPERVISOR_LOG, os.fdopen(descriptor, "a"), as_owner)
    _install(log, config.log_level, _TIMED)


class ToStderr(Lossy):
    """Nobody may read there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
            if write_at_once(sys.stderr.fileno(), line) < len(line):
                self.handleError(record)
        except (OSError, ValueError):
            self.handleError(record)


def syslog_handler(path: str) -> logging.Handler:
    """Nobody may read there. Raises OSError if there is nothing of that name."""
    import logging.handlers  # only here, because loading it is slow

    class ToSyslog(Lossy, logging.handlers.SysLogHandler):
        socket: Any

        def _connect_unixsocket(self, address: str) -> None:
            super()._connect_unixsocket(address)  # type: ignore[misc]
            self.socket.setblocking(False)

    return ToSyslog(path, facility=ToSyslog.LOG_DAEMON)


def log_file_handler(path: str, user: User) -> logging.Handler:
    """Writes to a file, opened again when others rotated it away or it has become too large. Raises
    OSError if it cannot be opened now; while it cannot later, lines are lost."""
    import logging.handlers

    class Watched(logging.handlers.WatchedFileHandler):
        opened = False

        def _open(self) -> TextIO:  # type: ignore[override]
            try:
                descriptor = _open_log_file(path, user, make=True)
                self.opened = True
            except OSError:
                if not self.opened:
                    raise
                descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            # A buffer would keep a line for which the disk has no room, and raise that on close.
            return io.TextIOWrapper(os.fdopen(descriptor, "ab", buffering=0), write_through=True)

        def emit(self, record: logging.LogRecord) -> None:
            try:
                super().emit(record)
                if self.stream is not None:
                    descriptor = self.stream.fileno()
                    keep_small(descriptor, partial(_put_aside, path, descriptor, user))
            except (OSError, ValueError):  # of a look at the file, or of its end
                if self.stream is not None and self.stream.closed:
                    self.stream = None
                self.handleError(record)

    return Watched(path)


def _put_aside(path: str, descriptor: int, user: User) -> None:
    """As root or as the user, as `_open_log_file`. Raises OSError."""
    with roots_place(path, user, alone=True) as place:
        if place is not None:
            _refuse_others(place)
            suspend(place.name, place.directory, descriptor)
            return
    with acting_as(user):
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            suspend(os.path.basename(path), directory, descriptor)
        finally:
            os.close(directory)


def _refuse_others(place: TrustedPath) -> None:
    """What root's log would replace must not be somebody else's."""
    with suppress(FileNotFoundError):
        st = os.stat(place.name + ".1", dir_fd=place.directory, follow_symlinks=False)
        if st.st_uid != os.geteuid() and place.shared:
            raise PermissionError(errno.EPERM, "others have put something there")


def _open_log_file(path: str, user: User, *, make: bool) -> int:
    """A file for appending: as root where only root could have put it there, else as the mount's
    user, whose link or file it may be. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT if make else 0)
    with roots_place(path, user, alone=user.uid != 0) as place:
        if place is not None:
            descriptor = place.open(flags)
            st = os.fstat(descriptor)
            if not place.shared or (st.st_uid == 0 and st.st_nlink == 1):
                return regular(descriptor)
            os.close(descriptor)
            if user.uid == 0:
                raise Untrusted(path)
    return open_file_as(user, path, flags, 0o666)


def _may_make(path: str, user: User) -> bool:
    """Whether `_open_log_file` could make the file."""
    directory = os.path.dirname(path)
    try:
        with roots_place(path, user, alone=user.uid != 0) as place:
            if place is not None:
                return os.access(directory, os.W_OK | os.X_OK)
    except OSError:
        return False
    with acting_as(user):
        return may_access(directory, os.W_OK | os.X_OK)


def _install(handler: logging.Handler, level: str, line_format: str) -> None:
    handler.setFormatter(OneLine(line_format))
    root = logging.getLogger()
    for previous in root.handlers[:]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(level.upper())
