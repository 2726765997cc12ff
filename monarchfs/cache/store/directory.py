"""A directory of files that are ours."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress

from monarchfs.cache.store import files as on_disk
from monarchfs.types import ReplicaLost

logger = logging.getLogger(__name__)

_REMARKS = 100  # files that are not ours, in the log; more would add nothing


class Remarks:
    """Log messages about files below ``path`` that are not ours, once for each place."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._places: set[str] = set()

    def add(self, place: str) -> None:
        if place not in self._places and len(self._places) < _REMARKS:
            self._places.add(place)
            logger.warning("%s/%s is not ours and stays as it is", self._path, place)


class Directory:
    """The directory ``name``, made for the first file. It is never reached through a symbolic link.
    Only regular files of ``uid`` in it are ever followed, changed or removed.

    Changing, under ``_lock``: ``_known``, the directory's descriptor, and ``_retired``, those of
    deleted directories that it replaced. They stay open until ``close``: a thread may use them.

    All methods block and raise OSError. Thread-safe.
    """

    def __init__(self, parent_fd: int, name: str, uid: int, remarks: Remarks) -> None:
        """``parent_fd``, its parent, stays the caller's, and open until ``close``."""
        self._parent = parent_fd
        self._name = name
        self._uid = uid
        self._remarks = remarks
        self._lock = threading.Lock()
        self._known: int | None = None
        self._retired: list[int] = []

    def close(self) -> None:
        """Close all descriptors; no call may be under way any more."""
        with self._lock:
            for fd in (*([] if self._known is None else [self._known]), *self._retired):
                os.close(fd)
            self._known = None
            self._retired.clear()

    def make(self) -> None:
        """Make the directory before the first file."""
        self._opened(create=True)

    def create(self, file: str) -> int:
        """Make a file; returns its descriptor (O_RDWR). Raises FileExistsError."""
        directory = self._opened(create=True)
        try:
            return os.open(file, on_disk.CREATE, on_disk.NOT_SYNCED_MODE, dir_fd=directory)
        except FileNotFoundError:
            directory = self._opened(create=True, instead_of=directory)
            return os.open(file, on_disk.CREATE, on_disk.NOT_SYNCED_MODE, dir_fd=directory)

    def open(self, file: str, flags: int, *, end: int = 0, size: int | None = None) -> int:
        """Open a file. Raises ReplicaLost unless it is ours, and has at least ``end`` bytes and
        exactly ``size`` if that is given."""
        try:
            directory = self._opened()
        except OSError as error:
            raise on_disk.lost_or_same(file, error) from error
        fd = on_disk.open_ours(directory, file, flags, self._uid, size)
        if os.fstat(fd).st_size < end:
            os.close(fd)
            raise ReplicaLost(file, f"Ends before {end}")
        return fd

    def stat(self, file: str) -> os.stat_result | None:
        """The attributes of a file of ours, else None."""
        try:
            st = os.stat(file, dir_fd=self._opened(), follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in on_disk.NOT_A_DIRECTORY:
                raise
            self._remarks.add(self._name)
            return None
        if on_disk.is_ours(st, self._uid):
            return st
        self._remarks.add(f"{self._name}/{file}")
        return None

    def remove(self, file: str) -> None:
        """Remove a file if it is ours. A missing file is no error."""
        if self.stat(file) is not None:
            with suppress(FileNotFoundError):
                os.unlink(file, dir_fd=self._opened())

    def remove_after_failure(self, file: str) -> None:
        """``remove`` that raises nothing, because the caller raises an earlier error."""
        try:
            self.remove(file)
        except OSError as error:
            logger.warning("could not remove %s/%s: %s", self._name, file, error)

    def is_at(self, fd: int, file: str) -> bool:
        """Whether the open file ``fd`` has that name here. Raises ReplicaLost if nothing has."""
        try:
            st = os.stat(file, dir_fd=self._opened(), follow_symlinks=False)
        except OSError as error:
            raise on_disk.lost_or_same(file, error) from error
        return os.path.samestat(os.fstat(fd), st)

    def move_here(self, source: Directory, name: str, file: str) -> None:
        """Move ``name`` of another directory here, as ``file``. It replaces a file of ours. Raises
        FileExistsError if something else has that name."""
        directory = self._opened(create=True)
        try:
            self._move(source, name, directory, file)
        except FileNotFoundError:
            self._move(source, name, self._opened(create=True, instead_of=directory), file)

    def _move(self, source: Directory, name: str, directory: int, file: str) -> None:
        with suppress(FileNotFoundError):
            if not on_disk.is_ours(
                os.stat(file, dir_fd=directory, follow_symlinks=False), self._uid
            ):
                raise FileExistsError(errno.EEXIST, "Something that is not ours is there", file)
        os.rename(name, file, src_dir_fd=source._opened(), dst_dir_fd=directory)

    def ours(self) -> Iterator[tuple[str, os.stat_result]]:
        """The files that are ours."""
        for entry in self.entries():
            with suppress(FileNotFoundError):
                st = entry.stat(follow_symlinks=False)
                if on_disk.is_ours(st, self._uid):
                    yield entry.name, st

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """All entries, ours or not."""
        # Through a descriptor of its own: two listings must not share a position.
        try:
            fd = os.open(self._name, on_disk.DIRECTORY, dir_fd=self._parent)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in on_disk.NOT_A_DIRECTORY:
                raise
            self._remarks.add(self._name)
            return
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)

    def _opened(self, *, create: bool = False, instead_of: int | None = None) -> int:
        """``instead_of`` is the descriptor of a directory that turned out to be deleted: another
        program has cleaned the tier."""
        with self._lock:
            if self._known is not None and self._known != instead_of:
                return self._known
            if create:
                with suppress(FileExistsError):
                    os.mkdir(self._name, 0o700, dir_fd=self._parent)
            fd = os.open(self._name, on_disk.DIRECTORY, dir_fd=self._parent)
            if self._known is not None:
                self._retired.append(self._known)
            self._known = fd
            return fd
