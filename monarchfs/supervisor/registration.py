"""The mount's entry in the runtime directory: a control socket and a description beside it."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack, nullcontext, suppress

from monarchfs.config import Config, User
from monarchfs.control.peers import short_socket_path
from monarchfs.control.registration import (
    Registration,
    own_mount_namespace,
    registration_stem,
)
from monarchfs.supervisor.channel import refuse_descriptors
from monarchfs.supervisor.identity import acting_as
from monarchfs.system.process_stat import start_ticks
from monarchfs.system.trusted import make_directories
from monarchfs.types import OperationError, UsageError

_BACKLOG = 64
_NOGROUP = 65534


def check_runtime_dir(path: str) -> None:
    """Raises UsageError if others could put sockets into ``path``, as far as it exists yet."""
    for directory in (os.path.dirname(path), path):
        try:
            _refuse_unsafe(directory, os.lstat(directory))
        except FileNotFoundError:
            continue


def open_runtime_dir(path: str, undo: ExitStack) -> None:
    """Makes the runtime directory and the one above it where they are missing."""
    try:
        if os.geteuid() == 0:
            make_directories(path, 0o755, undo)
        else:
            for directory in (os.path.dirname(path), path):
                with suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
                    undo.callback(_remove_directory, directory)
    except OSError as error:
        raise OperationError(
            f"cannot make {path} for the control socket: {error.strerror}"
        ) from None
    check_runtime_dir(path)


class ControlSocket:
    """The listening socket and its registration; removed by `close`."""

    def __init__(self, config: Config, started_ns: int, connection: int) -> None:
        self.stem = registration_stem(config.runtime_dir, config.mountpoint, connection)
        self.registration = Registration(
            mountpoint=config.mountpoint,
            mount_namespace=own_mount_namespace(),
            source=config.source,
            uid=config.user.uid,
            supervisor_pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()) or 0,
            state_dir=config.state_dir,
            started_ns=started_ns,
            connection=connection,
        )
        self._inode = 0
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        refuse_descriptors(self.listener)
        try:
            self._listen(config.user.uid, config.user.gid)
            self._register()
        except OSError as error:
            self.close()
            raise OperationError(
                f"cannot make the control socket in {config.runtime_dir}: {error.strerror}"
            ) from None

    def close(self) -> None:
        """Stops listening and removes both files, unless a later mount replaced them."""
        self.listener.close()
        path = self.stem + ".sock"
        try:
            if os.lstat(path).st_ino == self._inode:
                os.unlink(path)
                os.unlink(self.stem + ".json")
        except FileNotFoundError:
            pass

    def _listen(self, uid: int, gid: int) -> None:
        path = self.stem + ".sock"
        remove_registration(self.stem)
        before = os.umask(0o177)
        try:
            with short_socket_path(path) as short:
                self.listener.bind(short)
                self._inode = os.lstat(short).st_ino
                if os.geteuid() != uid:
                    # Only root can put anything there (`open_runtime_dir`).
                    os.lchown(short, uid, gid)
        finally:
            os.umask(before)
        self.listener.listen(_BACKLOG)
        self.listener.setblocking(False)

    def _register(self) -> None:
        path = self.stem + ".json"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path + ".new", flags, 0o644)
        with open(descriptor, "w") as file:
            # Readable for the mount's user also where the umask is strict.
            os.fchmod(descriptor, 0o644)
            file.write(self.registration.to_json())
        os.rename(path + ".new", path)


def remove_registration(stem: str, owner_uid: int | None = None) -> None:
    """Removes the files of a registration, if they are there, with the rights of ``owner_uid``,
    where given (`unlink_as`)."""
    for suffix in (".sock", ".json"):
        unlink_as(os.geteuid() if owner_uid is None else owner_uid, stem + suffix)


def unlink_as(uid: int, path: str) -> None:
    """Removes a file, if it is there; root does it with the rights of ``uid``, whose directory it
    is and may be a link to one of root's by now. Raises OSError."""
    user = User(str(uid), uid, _NOGROUP, ())
    with acting_as(user) if os.geteuid() == 0 != uid else nullcontext():
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


def _refuse_unsafe(path: str, st: os.stat_result) -> None:
    # A sticky directory of root's, such as /tmp, keeps our entries safe from others.
    open_to_others = st.st_mode & 0o022 and not st.st_mode & stat.S_ISVTX
    own = st.st_uid == os.geteuid() or st.st_uid == 0
    if not stat.S_ISDIR(st.st_mode) or not own or open_to_others:
        raise UsageError(
            f"{path} is not a directory that only you can change: remove it, or set"
            " XDG_RUNTIME_DIR to one"
        )


def _remove_directory(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        return  # another mount uses it by now
