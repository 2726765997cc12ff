"""Where copies lie on the disk: in files of their own, or in segments beside others."""

import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import NamedTuple

from monarchfs.cache.store import listed
from monarchfs.types import TierFile

SEGMENT = re.compile(r"[0-9a-f]{16}")


class Place(NamedTuple):
    path: Path
    offset: int


def is_segment(path: Path) -> bool:
    return path.parent.name == "segments" and SEGMENT.fullmatch(path.name) is not None


def segments(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if is_segment(path))


def own_files(directory: Path) -> list[Path]:
    """All complete copies below a directory that lie in files of their own."""
    pattern = re.compile(r"[0-9a-f]{2}/[0-9a-f]+\.[0-9a-f]{16}")
    return sorted(p for p in directory.rglob("*") if pattern.fullmatch("/".join(p.parts[-2:])))


def noted(segment: Path) -> list[TierFile]:
    """What the list beside a segment says: what was synced there, gone or not."""
    beside = segment.with_name(segment.name + ".list")
    data = beside.read_bytes() if beside.exists() else b""
    return listed.rows(int(segment.name, 16), data, 0)


def places(directory: Path, data: bytes) -> list[Place]:
    """Where these bytes lie whole below a directory."""
    found = []
    for path in own_files(directory):
        if path.stat().st_size == len(data) and path.read_bytes() == data:
            found.append(Place(path, 0))
    for path in segments(directory):
        found += [Place(path, offset) for offset in _records(path, data)]
    return found


def _records(segment: Path, data: bytes) -> list[int]:
    if segment.stat().st_size == 0:
        return []
    found = []
    with open(segment, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
        offset = text.find(data)
        while offset >= 0:
            if offset % 4096 == 0:
                found.append(offset)
            offset = text.find(data, offset + 1)
    return found


def cached_pages(fd: int) -> list[int]:
    """The pages of a file that the kernel has in memory (mincore(2): asking loads none)."""
    size = os.fstat(fd).st_size
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(view))
        assert libc.mincore(address, ctypes.c_size_t(size), pages) == 0, ctypes.get_errno()
        del view
    return [number for number, page in enumerate(pages.raw) if page & 1]


def spoil(place: Place, offset: int = 0, data: bytes | None = None) -> None:
    """Change one byte of a copy, or write ``data`` there; the file keeps its mode and times."""
    st = place.path.stat()
    place.path.chmod(st.st_mode | 0o200)
    with open(place.path, "r+b") as file:
        at = place.offset + offset
        if data is None:
            file.seek(at)
            data = bytes(byte ^ 1 for byte in file.read(1))
        file.seek(at)
        file.write(data)
    place.path.chmod(st.st_mode & 0o7777)
    os.utime(place.path, ns=(st.st_atime_ns, st.st_mtime_ns))


def lose_what_was_not_noted(segment: Path, *, cut: bool) -> None:
    """What a power cut may do to a segment, and to its list if ``cut``."""
    kept = [(row.offset, row.size) for row in noted(segment)]
    data = segment.read_bytes()
    size = max((offset + size for offset, size in kept), default=0) if cut else len(data)
    os.truncate(segment, 0)
    with open(segment, "r+b") as file:
        for offset, length in kept:
            if (record := data[offset : offset + length]).strip(b"\0"):
                file.seek(offset)
                file.write(record)
        file.truncate(size)
    if cut and (beside := segment.with_name(segment.name + ".list")).exists():
        os.truncate(beside, beside.stat().st_size // 2)
