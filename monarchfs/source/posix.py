"""The blocking functions on the source, for threads.

Everything is relative to one directory descriptor, which the caller opened before a mount could
cover the source's path. No symbolic link is followed and the root is never left (see ``dirs``).
Functions raise OSError with the source's errno, and SourceChanged where the directory that a DirRef
means is not at its path any more. Any of them may block for as long as the source does.
"""

from __future__ import annotations

import errno
import math
import os
import stat as stat_module
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, TypeVar

from monarchfs.core.units import Unit
from monarchfs.source._stats import stat_each, take_stale
from monarchfs.source.direct import DirectDescriptor, DirectReads
from monarchfs.source.dirs import DirHandle, DirHandles, check_name
from monarchfs.source.layout import ATTRIBUTE, Layout, parse
from monarchfs.system.file_system_type import IN_MEMORY, LUSTRE, file_system_type
from monarchfs.types import (
    Archived,
    DirectoryChanged,
    DirRef,
    FileType,
    SourceChanged,
    SourceStat,
    SourceVersion,
)

# Not O_NOATIME: sites purge their scratch file systems by access time.
# O_NONBLOCK: should the file have become a FIFO meanwhile, opening it must not wait for a writer.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LINK_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


MOST_NAME_BYTES = 255
"""Longer names, which some FUSE file systems have, are not mirrored: they are no use to most
programs (NAME_MAX in limits.h)."""


ACCESS_ACL = b"system.posix_acl_access"

_BY_CASE = frozenset({0xEF53, 0x58465342, 0xF2F52010, *IN_MEMORY})
"""ext2 to ext4, xfs, f2fs, tmpfs: directories that find names in any case may be among theirs."""
_LISTS_ALL = _BY_CASE | {LUSTRE, 0x9123683E, 0x73717368, 0xE0F5E1E2}
"""f_type (statfs(2)) of those whose listings have all names that a look-up finds: these, Lustre
(but for .lustre), btrfs, squashfs, erofs. Not so those with snapshots that no listing shows (NFS,
ZFS, GPFS, Ceph), automounts, and those that find names in any case (SMB, FAT); what user-space file
systems do (FUSE) nobody knows."""


class SourceEntry(NamedTuple):
    """One name of a directory. ``type`` is UNKNOWN where the source would not say.

    ``ino`` is d_ino and ``device`` the directory's st_dev. Often these are the entry's st_ino and
    st_dev, but nothing follows from that: they are others where a file system is mounted or a
    subvolume of btrfs begins, and, in an overlay of several file systems, may be another file's
    (readdir(3), Documentation/filesystems/overlayfs.rst).
    """

    name: bytes
    type: FileType
    ino: int
    device: int


T = TypeVar("T")
U = TypeVar("U")
Found = tuple[SourceStat, bytes]
FoundEach = list[Found | OSError]
AttributeNames = list[bytes]
AttributeNamesEach = list[AttributeNames | OSError]
Batch = list[SourceEntry]
Batches = Generator[Batch, None, None]


class PosixSource:
    """The source below ``root_fd``, which stays the caller's. Thread-safe.

    All fields are constant (the cache of directories has its own lock) but ``_kinds``, f_type of
    statfs(2) by device, and how direct reads went so far. ``root`` is the DirRef of the root,
    ``device`` its st_dev; ``has_layouts`` says that files may have a Lustre layout.
    """

    def __init__(
        self,
        root_fd: int,
        max_directories: int = 512,
        *,
        root: tuple[int, int] | None = None,
        has_layouts: bool | None = None,
    ) -> None:
        """``root`` is what fstat(2) says of the root, (st_dev, st_ino); for those who know that,
        and ``has_layouts``, because the source might not answer now."""
        if root is None:
            st = os.fstat(root_fd)
            root = st.st_dev, st.st_ino
        self.device, ino = root
        self.root = DirRef(b"", ino)
        self._root_fd = root_fd
        self._kinds: dict[int, int] = {}
        self._dirs = DirHandles(root_fd, ino, self.device, max_directories)
        self._direct = DirectReads()
        self.has_layouts = _knows_layouts(root_fd) if has_layouts is None else has_layouts

    def opened_directory(self, directory: DirRef) -> DirHandle | None:
        """A descriptor (O_PATH) of a directory, for ``with``, if it is open already: the source is
        not asked."""
        return self._dirs.known(directory)

    def open_directory(self, directory: DirRef) -> None:
        """Open it for a while, for ``opened_directory``. Raises OSError, SourceChanged."""
        with self._dirs.acquire(directory):
            return

    def stat(self, directory: DirRef, name: bytes) -> SourceStat:
        """lstat(2) of an entry, or of the directory itself where ``name`` is empty."""
        with self._dirs.acquire(directory) as fd:
            if name:
                check_name(name)
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            else:
                st = os.fstat(fd)
        return SourceStat.of(st, self.device)

    def readlink(self, directory: DirRef, name: bytes) -> bytes:
        check_name(name)
        with self._dirs.acquire(directory) as fd:
            return os.readlink(name, dir_fd=fd)

    def found(self, directory: DirRef, name: bytes) -> Found:
        """The attributes of an entry and, of a symbolic link, its target (else ``b""``).

        Both are of the same inode: the link is opened, and asked through its descriptor
        (readlink(2) with an empty path). A directory is opened, too: what is in it can be asked
        for from then on, also where another one takes its place at once. Raises OSError
        ENAMETOOLONG for a name of more than MOST_NAME_BYTES that the source has.
        """
        check_name(name)
        with (parent := self._dirs.acquire(directory)) as dir_fd:
            st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            if len(name) > MOST_NAME_BYTES:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
            if stat_module.S_ISDIR(st.st_mode):
                st = self._opened_directory(parent, name, st)
                return SourceStat.of(st, self.device), b""
            if not stat_module.S_ISLNK(st.st_mode):
                return SourceStat.of(st, self.device), b""
            fd = os.open(name, _LINK_FLAGS, dir_fd=dir_fd)
            try:
                st = os.fstat(fd)
                is_link = stat_module.S_ISLNK(st.st_mode)
                target = os.readlink(b"", dir_fd=fd) if is_link else b""
            finally:
                os.close(fd)
        return SourceStat.of(st, self.device), target

    def _opened_directory(
        self, parent: DirHandle, name: bytes, seen: os.stat_result
    ) -> os.stat_result:
        """The attributes of a directory that stays open for a while; ``seen`` where it cannot be
        opened, because it is gone, say."""
        try:
            with self._dirs.open(parent, name) as fd:
                return os.fstat(fd)
        except (OSError, SourceChanged):
            return seen

    def found_each(
        self,
        directory: DirRef,
        names: Sequence[bytes],
        seconds: float = math.inf,
        opens_bytes: int = 0,
    ) -> FoundEach:
        """``found`` of each name, in order: one call of a thread instead of many.

        An OSError stands where ``found`` would have raised it; SourceChanged is raised. After
        ``seconds`` no further name is asked for: the answers are of the first names. Files of at
        most ``opens_bytes`` (0: none) are opened for that, and stay open for a while, for the
        threads that read small files (``_opened.h``).
        """
        until = time.monotonic() + seconds
        with (handle := self._dirs.acquire(directory)) as fd:
            answers = stat_each(fd, self.device, names, until, opens_bytes)
            if errno.ENOENT in answers and handle.is_gone(errno.ENOENT):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        results: FoundEach = []
        for name, answer in zip(names, answers, strict=False):
            if isinstance(answer, tuple) and len(name) <= MOST_NAME_BYTES:
                results.append((SourceStat(*answer), b""))
            elif isinstance(answer, int) and answer != errno.ESTALE:
                results.append(OSError(answer, os.strerror(answer), name))
            elif not results or time.monotonic() <= until:
                results += _each(partial(self.found, directory), [name], math.inf)
            else:
                break
        return results

    def opened_each(
        self, directory: DirRef, names: Sequence[bytes], seconds: float, opens_bytes: int
    ) -> FoundEach:
        """``found_each`` with ``opens_bytes``: it is counted as opens, by its name."""
        return self.found_each(directory, names, seconds, opens_bytes)

    def stale_descriptors(self, seconds: float) -> Iterator[int]:
        """Those that ``opened_each`` opened longer ago; whoever asks closes them."""
        while (fd := take_stale(seconds)) >= 0:
            yield fd

    def open(self, directory: DirRef, name: bytes) -> tuple[int, SourceStat]:
        """Open a regular file for reading; the caller closes the descriptor.

        Raises OSError ELOOP for a symbolic link, EISDIR for a directory and ENXIO for anything else
        that is not a regular file.
        """
        check_name(name)
        with self._dirs.acquire(directory) as dir_fd:
            fd = _open_file(name, dir_fd)
        try:
            st = os.fstat(fd)
            if stat_module.S_ISDIR(st.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
            if not stat_module.S_ISREG(st.st_mode):
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), name)
            # Lustre's reads honour O_NONBLOCK: one that meets a conflicting lock fails with EAGAIN.
            os.set_blocking(fd, True)
        except BaseException:
            os.close(fd)
            raise
        return fd, SourceStat.of(st, self.device)

    def list(self, directory: DirRef, batch: int) -> Batches:
        """All entries but ``.``, ``..`` and those of more than MOST_NAME_BYTES, in the directory's
        order, ``batch`` at a time.

        Costs no stat(2) for regular files, directories and links of a source that tells types
        (d_type); other entries are asked for one by one. Nothing is opened before the first batch
        is taken; a caller that stops early closes the iterator. A batch of fewer is the last one,
        and with it nothing is open any more.
        """
        with (handle := self._dirs.acquire(directory)) as path_fd:
            # The descriptor in hand, not its path, and not ".", which needs search permission that
            # readdir(3) does not (proc(5), /proc/pid/fd: opening it opens the same file again).
            fd = os.open(_proc_path(path_fd, b""), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                device = self._device(os.fstat(fd))
                entries: Batch = []
                with os.scandir(fd) as scan:
                    for entry in scan:
                        kind = _type_of(entry)
                        name = os.fsencode(entry.name)
                        if kind is None or len(name) > MOST_NAME_BYTES:
                            continue
                        entries.append(SourceEntry(name, kind, entry.inode(), device))
                        if len(entries) >= batch:
                            yield entries
                            entries = []
            finally:
                os.close(fd)
            if not entries and handle.is_gone(errno.ENOENT):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if entries:
            yield entries

    def known_to_list_all(self, directory: DirRef) -> bool | None:
        """``lists_all`` where the file system's kind decides; None where the source is to be
        asked."""
        if directory.path.partition(b"/")[0] == b".lustre":
            return False  # in .lustre/fid any file's identifier is a name
        kind = self._kinds.get(directory.device)
        return None if kind is None or kind in _BY_CASE else kind in _LISTS_ALL

    def lists_all(self, directory: DirRef, name: bytes) -> bool:
        """Whether a listing of the directory has all names that a look-up finds.

        ``name`` is a listed one with letters, if there is one: where it is found with small letters
        in place of capitals and the other way round, so are others.
        """
        with self._dirs.acquire(directory) as fd:
            kind = self._kinds[directory.device] = file_system_type(fd)
            if kind not in _BY_CASE or not name:
                return kind in _LISTS_ALL
            try:
                other = os.stat(name.swapcase(), dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return True
            return not os.path.samestat(other, os.stat(name, dir_fd=fd, follow_symlinks=False))

    def touch(self, directory: DirRef, name: bytes) -> None:
        """Read a byte of a regular file as any reader would, for its access time. Raises as
        ``open``, and Archived."""
        fd, _st = self.open(directory, name)
        try:
            self.layout(fd)
            # From the server: some file systems do not report reads of cached bytes to it.
            os.posix_fadvise(fd, 0, 1, os.POSIX_FADV_DONTNEED)
            os.pread(fd, 1, 0)
        finally:
            self.close(fd)

    def getxattr(
        self,
        directory: DirRef,
        name: bytes,
        attribute: bytes,
        version: SourceVersion | None = None,
    ) -> bytes:
        """Of an entry (not followed), or of the directory itself where ``name`` is empty. Raises
        SourceChanged if the entry had another ``version`` by then, whatever the answer was."""
        with self._asked(directory, name, version) as path:
            return os.getxattr(path, attribute, follow_symlinks=not name)

    def listxattr(
        self, directory: DirRef, name: bytes, version: SourceVersion | None = None
    ) -> AttributeNames:
        """As ``getxattr``. An access ACL is among them also where the file system does not list it
        (SMB): who may read what goes by it."""
        with self._asked(directory, name, version) as path:
            names = [os.fsencode(one) for one in os.listxattr(path, follow_symlinks=not name)]
            if ACCESS_ACL not in names and _has_acl(path, not name):
                names.append(ACCESS_ACL)
        return names

    def listxattr_each(
        self,
        directory: DirRef,
        entries: Sequence[tuple[bytes, SourceVersion | None]],
        seconds: float = math.inf,
    ) -> AttributeNamesEach:
        """``listxattr`` of each name and version, as ``found_each``; OSError ESTALE for another
        version."""

        def ask(entry: tuple[bytes, SourceVersion | None]) -> AttributeNames:
            try:
                return self.listxattr(directory, *entry)
            except DirectoryChanged:
                raise
            except SourceChanged as error:
                raise OSError(errno.ESTALE, str(error)) from None

        return _each(ask, entries, seconds)

    def access(
        self, directory: DirRef, name: bytes, mask: int, version: SourceVersion | None = None
    ) -> bool:
        """Whether the source lets this process (its real ids, which are its effective ones) do what
        ``mask`` asks. The source decides, with its ACLs. Raises what lstat(2) raises, and as
        ``getxattr``.
        """
        with self._asked(directory, name, version) as path:
            # access(2), not faccessat2(2), which came with Linux 5.8 and is forbidden in some
            # containers. So it follows a link. It says "no" to every errno: lstat(2) lets a missing
            # file or a failing source show.
            mode = os.lstat(path).st_mode if name else stat_module.S_IFDIR
            if stat_module.S_ISLNK(mode):
                return True
            if stat_module.S_ISREG(mode) and mode & 0o111 and os.geteuid() == 0 and mask & os.X_OK:
                # The kernel lets root run what anybody may, by CAP_DAC_OVERRIDE, which this process
                # does not have. What it may read at all, root may run.
                mask = mask & ~os.X_OK | os.R_OK
            return os.access(path, mask)

    @contextmanager
    def _asked(
        self, directory: DirRef, name: bytes, version: SourceVersion | None
    ) -> Iterator[bytes]:
        """A path for a call by name; the version is compared after it."""
        with self._dirs.acquire(directory) as fd:
            try:
                yield _proc_path(fd, name)
            finally:
                if version is not None:
                    now = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if SourceStat.of(now, self.device).version != version:
                        raise SourceChanged("it changed before it was asked about")

    def statvfs(self) -> os.statvfs_result:
        return os.fstatvfs(self._root_fd)

    # -- open files: descriptors from ``open``

    def fstat(self, fd: int) -> SourceStat:
        """The attributes that the file behind a descriptor from ``open`` has now."""
        return SourceStat.of(os.fstat(fd), self.device)

    def close(self, fd: int) -> None:
        """Close a descriptor from ``open``; a network file system may tell its server."""
        os.close(fd)

    def read(self, fd: int, offset: int, size: int) -> tuple[bytes, SourceVersion]:
        """``size`` bytes (fewer only at the end of the file), and the version seen *after* them.

        Bytes that were read while the version was V before and is V now are V's.
        """
        data = os.pread(fd, size, offset)
        st = os.fstat(fd)
        if len(data) < size and offset + len(data) < st.st_size:
            data, st = _read_on(fd, offset, size, data)
        # The mount's own pages or a tier have the bytes: they shall not be in memory twice.
        if data:
            _advise(fd, offset, len(data), os.POSIX_FADV_DONTNEED)
        return data, SourceVersion(
            self._device(st), st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
        )

    def read_for_reader(self, fd: int, offset: int, size: int) -> tuple[bytes, SourceVersion]:
        """``read`` of what is not kept: the kernel may read ahead of a sequential reader."""
        _advise(fd, 0, 0, os.POSIX_FADV_NORMAL)
        return self.read(fd, offset, size)

    def read_once(self, fd: int, offset: int, size: int) -> tuple[bytes, SourceVersion]:
        """``read`` of what is kept, without the kernel's readahead. Another call may be fetching
        what follows; and where memory is short, readahead pages are dropped and read twice. Calls
        for one file run side by side, so this holds until ``read_for_reader``."""
        _advise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return self.read(fd, offset, size)

    def read_unit(self, fd: int, direct: DirectDescriptor, unit: Unit) -> int:
        """``read_once`` of a unit; returns its bytes. ``direct`` is of the same file. Raises
        SourceChanged if the file has another version now; blocks that came before are good."""
        if not self._direct.read(unit, fd, direct):
            raise SourceChanged("it changed while it was read")
        return unit.read_bytes

    def layout(self, fd: int) -> Layout | None:
        return read_layout(fd)

    def _device(self, st: os.stat_result) -> int:
        return 0 if st.st_dev == self.device else st.st_dev


def read_layout(fd: int) -> Layout | None:
    """Where an open file's bytes are, as far as that is known: Lustre answers from what the client
    has in memory of it. Raises Archived, OSError."""
    try:
        layout = parse(os.getxattr(fd, ATTRIBUTE))
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return None
    if layout is not None and layout.released:
        raise Archived(errno.ENODATA, "its bytes are in the archive (HSM)")
    return layout


def _has_acl(path: bytes, follow: bool) -> bool:
    """Raises OSError where the source does not say."""
    try:
        os.getxattr(path, ACCESS_ACL, follow_symlinks=follow)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _each(ask: Callable[[U], T], names: Sequence[U], seconds: float) -> list[T | OSError]:
    """What ``ask`` answers or raises for each name, until ``seconds`` have passed."""
    end = time.monotonic() + seconds
    results: list[T | OSError] = []
    for name in names:
        try:
            results.append(ask(name))
        except OSError as error:
            results.append(error.with_traceback(None))
        if time.monotonic() > end:
            break
    return results


def _open_file(name: bytes, dir_fd: int) -> int:
    try:
        return os.open(name, _OPEN_FLAGS, dir_fd=dir_fd)
    except BlockingIOError:
        # Someone holds a lease on it (fcntl(2), F_SETLEASE): wait, as any other reader would.
        if not stat_module.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            raise
        return os.open(name, _OPEN_FLAGS & ~os.O_NONBLOCK, dir_fd=dir_fd)


def _proc_path(dir_fd: int, name: bytes) -> bytes:
    """A path for the calls that take no directory descriptor; files need not be readable."""
    if not name:
        return b"/proc/self/fd/%d" % dir_fd
    check_name(name)
    return b"/proc/self/fd/%d/%s" % (dir_fd, name)


def _type_of(entry: os.DirEntry[str]) -> FileType | None:
    """The entry's type; None if it vanished meanwhile. A DirEntry asks at most once (lstat)."""
    try:
        if entry.is_file(follow_symlinks=False):
            return FileType.REGULAR
        if entry.is_dir(follow_symlinks=False):
            return FileType.DIRECTORY
        if entry.is_symlink():
            return FileType.SYMLINK
        return FileType.of_mode(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None
    except PermissionError:
        # A directory that may be read but not searched: its names are all there is to know.
        return FileType.UNKNOWN


def _knows_layouts(root_fd: int) -> bool:
    """Whether files below the directory may have a layout."""
    try:
        os.getxattr(b"/proc/self/fd/%d" % root_fd, ATTRIBUTE)
    except OSError as error:
        # Lustre alone has attributes whose names begin like this one. It may fail, or be down.
        return error.errno == errno.ENODATA or _is_lustre(root_fd)
    return True


def _is_lustre(fd: int) -> bool:
    """True also where that is not known."""
    try:
        return file_system_type(fd) == LUSTRE
    except OSError:
        return True


def _advise(fd: int, offset: int, size: int, advice: int) -> None:
    """posix_fadvise(2), which is advice: no read fails because it was not taken."""
    with suppress(OSError):
        os.posix_fadvise(fd, offset, size, advice)


def _read_on(fd: int, offset: int, size: int, data: bytes) -> tuple[bytes, os.stat_result]:
    """Go on after a short read that was not the end of the file."""
    parts = [data]
    have = len(data)
    while have < size:
        data = os.pread(fd, size - have, offset + have)
        if not data:
            break
        parts.append(data)
        have += len(data)
    return b"".join(parts), os.fstat(fd)
