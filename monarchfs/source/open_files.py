"""The blocking functions on open files of the source, for threads; see ``posix``."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from monarchfs.core.units import Unit
from monarchfs.source.direct import DirectDescriptor, DirectReads
from monarchfs.source.layout import ATTRIBUTE, Layout, parse
from monarchfs.system.file_system_type import LUSTRE, file_system_type
from monarchfs.types import Archived, SourceChanged, SourceStat, SourceVersion


class OpenFiles:
    """Constant: ``device``, st_dev of the source's root; how direct reads went so far. Descriptors
    are those from ``PosixSource.open``. Thread-safe."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._direct = DirectReads()

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
        """Where the file's bytes are, as far as that is known. Raises Archived, OSError."""
        try:
            layout = parse(self._layout_value(fd))
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise
            return None
        if layout is not None and layout.released:
            raise Archived(errno.ENODATA, "its bytes are in the archive (HSM)")
        return layout

    def _layout_value(self, fd: int) -> bytes:
        """Lustre answers this from what the client has in memory of an open file."""
        return os.getxattr(fd, ATTRIBUTE)

    def _device(self, st: os.stat_result) -> int:
        return 0 if st.st_dev == self.device else st.st_dev


def knows_layouts(root_fd: int) -> bool:
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
