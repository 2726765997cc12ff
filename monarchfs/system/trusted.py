"""Paths that nobody but root can change: only there does root make, write or give away anything.

Who can write to a directory on the way could put a symbolic link there between any two system
calls. So a path is walked from / one name at a time, each looked up in the open directory before
it, and every directory on the way has to be root's alone. A link is followed where root made it.

Directories count as root's alone if they belong to root and others may not write to them, or if
they are sticky (as /tmp is): there nobody else can rename or remove what is root's.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40
"""As path_resolution(7) has it."""

log = logging.getLogger(__name__)


class Untrusted(OSError):
    """Others than root can change the path; ``strerror`` says where."""

    def __init__(self, where: str) -> None:
        super().__init__(errno.EPERM, f"others than root can change {where}")


@dataclass(frozen=True, slots=True)
class TrustedPath:
    """Where a path ends: ``name``, which need not exist and is no link, in the open directory
    ``directory`` (O_PATH). To be closed."""

    directory: int
    name: str

    def close(self) -> None:
        os.close(self.directory)

    @property
    def shared(self) -> bool:
        """Whether others than root may put things of their own there."""
        st = os.fstat(self.directory)
        return bool(st.st_mode & 0o022) or st.st_uid not in _roots()

    def make(self, mode: int) -> bool:
        """Makes the directory, with exactly this mode; whether it was missing. Raises OSError. For
        processes of one thread (umask)."""
        before = os.umask(0)
        try:
            os.mkdir(self.name, mode, dir_fd=self.directory)
        except FileExistsError:
            return False
        finally:
            os.umask(before)
        return True

    def open(self, flags: int, mode: int = 0o666) -> int:
        """A descriptor for what lies there. Raises OSError, ELOOP or ENOTDIR for a link."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self.name, flags, mode, dir_fd=self.directory)


@contextmanager
def place_of(path: str, *, alone: bool = True) -> Iterator[TrustedPath]:
    """Where ``path`` (absolute) ends. Blocks as long as the file system does.

    Raises Untrusted, or OSError where a directory on the way is missing. With ``alone`` False
    others may change directories on the way, and only links of theirs are refused: without one they
    can lead root to nothing but directories that they can move there.
    """
    with closing(_walk(path, alone)) as place:
        yield place


def open_directory(path: str, *, alone: bool = True) -> int:
    """The directory ``path`` itself, of which the same holds, as a place (O_PATH)."""
    with place_of(path + "/.", alone=alone) as place:
        return os.dup(place.directory)


def make_directories(
    path: str, mode: int, undo: ExitStack | None = None, *, alone: bool = True
) -> None:
    """Makes the directory ``path``, and those above it, where they are missing; one that is there
    keeps its mode. ``undo`` removes what was made, if it is empty then. Raises as `open_directory`
    would afterwards."""
    try:
        os.close(open_directory(path, alone=alone))
    except FileNotFoundError:
        if path == os.path.dirname(path):
            raise
        make_directories(os.path.dirname(path), 0o755, undo, alone=alone)
        with place_of(path, alone=alone) as place:
            if place.make(mode) and undo is not None:
                undo.callback(remove_if_empty, path)
        os.close(open_directory(path, alone=alone))


def remove_if_empty(path: str) -> None:
    """Removes a directory that `make_directories` made, if it is empty; trouble is logged."""
    try:
        with place_of(path, alone=False) as place:
            os.rmdir(place.name, dir_fd=place.directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            log.warning("cannot remove %s: %s", path, error.strerror)


def _walk(path: str, alone: bool) -> TrustedPath:
    names, links = path.split("/")[::-1], 0
    with ExitStack() as undo:
        place = _Stepping(undo)
        while True:
            if alone and not place.trusted:
                raise Untrusted(place.path)
            name = names.pop()
            if name in ("", "."):
                if names:
                    continue
                name = "."
            target = place.link(name) if name not in (".", "..") else None
            if target is not None:
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                names += target.split("/")[::-1]
                if target.startswith("/"):
                    place.go("/")
            elif names or name == "..":
                place.go(name)
                if not names:
                    names = ["."]
            else:
                undo.pop_all()
                return TrustedPath(place.descriptor, name)


class _Stepping:
    """The directory that a walk has come to, and whether all on the way to it is root's alone."""

    def __init__(self, undo: ExitStack) -> None:
        self._roots = _roots()
        self.descriptor = os.open("/", _PLACE)
        undo.callback(lambda: os.close(self.descriptor))
        self.trusted = self._is_roots()

    @property
    def path(self) -> str:
        return os.readlink(f"/proc/self/fd/{self.descriptor}")

    def go(self, name: str) -> None:
        before = self.descriptor
        self.descriptor = os.open(name, _PLACE, dir_fd=before)
        os.close(before)
        self.trusted = self._is_roots() and (self.trusted or name == "/")

    def link(self, name: str) -> str | None:
        """Where the symbolic link ``name`` leads; None for what is none, or not there."""
        try:
            st = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISLNK(st.st_mode):
            return None
        if not self.trusted or st.st_uid not in self._roots:
            raise Untrusted(os.path.join(self.path, name))
        return os.readlink(name, dir_fd=self.descriptor)

    def _is_roots(self) -> bool:
        st = os.fstat(self.descriptor)
        safe = not st.st_mode & 0o022 or bool(st.st_mode & stat.S_ISVTX)
        return safe and st.st_uid in self._roots


def _roots() -> set[int]:
    """Root is who owns /, too: in a user namespace that does not map it, it has another number."""
    return {0, os.stat("/").st_uid}
