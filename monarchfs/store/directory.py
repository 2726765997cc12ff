"""One directory of files that are ours, below a directory that the caller opened."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress

from monarchfs.store import files as on_disk
from monarchfs.store.errors import ReplicaLost

logger = logging.getLogger(__name__)

_REMARKS = 100  # files that are not ours, in the log; more would add nothing


class Directory:
    """The directory ``name``, made for the first file. It is never one that is reached through a
    symbolic link; what lies in it and is not a regular file of ``uid`` is never followed, changed
    or removed.

    Constant: ``_parent``. Changing, under ``_lock``: ``_known``, the directory's descriptor, and
    those that it had before. None of them is closed before ``close``, because a thread may be using
    it.

    All methods block and raise OSError. Thread-safe.
    """

    def __init__(self, dir_fd: int, name: str, path: str, uid: int) -> None:
        """``dir_fd``, where it lies, stays the caller's; ``path`` is its, for messages."""
        self._name = name
        self._path = path
        self._uid = uid
        self._lock = threading.Lock()
        self._known: int | None = None
        self._retired: list[int] = []
        self._remarked: set[str] = set()
        self._parent = os.open(".", on_disk.DIRECTORY, dir_fd=dir_fd)

    def close(self) -> None:
        """Close all descriptors; no call may be under way any more."""
        with self._lock:
            known = [] if self._known is None else [self._known]
            for fd in (*known, *self._retired, self._parent):
                os.close(fd)
            self._known = None
            self._retired.clear()

    def create(self, file: str) -> int:
        """Make a file; its descriptor (O_RDWR). Raises FileExistsError if something is there."""
        directory = self._opened(create=True)
        try:
            return os.open(file, on_disk.CREATE, on_disk.NOT_SYNCED_MODE, dir_fd=directory)
        except FileNotFoundError:
            directory = self._opened(create=True, instead_of=directory)
            return os.open(file, on_disk.CREATE, on_disk.NOT_SYNCED_MODE, dir_fd=directory)

    def open(self, file: str, flags: int, end: int = 0) -> int:
        """Open a file. Raises ReplicaLost unless it is ours and has at least ``end`` bytes."""
        try:
            directory = self._opened()
        except OSError as error:
            raise on_disk.lost_or_same(file, error) from error
        fd = on_disk.open_ours(directory, file, flags, self._uid)
        if os.fstat(fd).st_size < end:
            os.close(fd)
            raise ReplicaLost(file, f"Ends before {end}")
        return fd

    def stat(self, file: str) -> os.stat_result | None:
        """Of a file of ours, else None."""
        try:
            st = os.stat(file, dir_fd=self._opened(), follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in on_disk.NOT_A_DIRECTORY:
                raise
            self._remark(self._name)
            return None
        if on_disk.is_ours(st, self._uid):
            return st
        self._remark(f"{self._name}/{file}")
        return None

    def remove(self, file: str) -> None:
        """Remove a file if it is ours; it is no error if there is none."""
        if self.stat(file) is not None:
            with suppress(FileNotFoundError):
                os.unlink(file, dir_fd=self._opened())

    def names(self) -> Iterator[str]:
        """What lies there, ours or not."""
        # Through a descriptor of its own: two listings must not share a position.
        try:
            fd = os.open(self._name, on_disk.DIRECTORY, dir_fd=self._parent)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in on_disk.NOT_A_DIRECTORY:
                raise
            self._remark(self._name)
            return
        try:
            with os.scandir(fd) as entries:
                yield from (entry.name for entry in entries)
        finally:
            os.close(fd)

    def _opened(self, *, create: bool = False, instead_of: int | None = None) -> int:
        """``instead_of`` is a descriptor of one that turned out to be deleted."""
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

    def _remark(self, place: str) -> None:
        if place not in self._remarked and len(self._remarked) < _REMARKS:
            self._remarked.add(place)
            logger.warning("%s/%s is not ours and stays as it is", self._path, place)
