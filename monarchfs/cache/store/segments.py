"""Files that hold many replicas: segments.

ext4 takes some ten times as long to make a file as to append to one. So small replicas lie as
*records* in segments: each begins at a multiple of ``SegmentFiles.align`` and is written whole,
without holes. Only the object that made a segment writes to it; others may read it and give room
back. When a record goes, its range is punched; the room is not used again.

The caller keeps this order:

    1. enter the segment in the index (``Allocator.place`` says which ones begin);
    2. write the records;
    3. commit the index records that make them resident;
    4. sync the data, then note them in the segment's list.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from monarchfs.cache.store import _records, listed, trials
from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store.allocator import ALIGN_BYTES, allocated
from monarchfs.cache.store.checksum import combine
from monarchfs.cache.store.directory import Directory, Remarks
from monarchfs.cache.store.listed import SEGMENT_NAME, SegmentLists, segment_name
from monarchfs.cache.store.read import read_digests, unpaced
from monarchfs.types import Data, ReplicaLost, TierFile


class ExtentTrees:
    """What the extents of segments take on the file system, beside the data.

    ext4 keeps four extents of a file in its inode. If there are more, the file pays a block for
    every 340. Gaps in a segment make extents. Only data on the disk have extents, so a segment is
    measured after a sync.

    Constant: the segments' directory, their alignment in bytes. Changing, under the lock: the
    segments that were written to or punched since they were measured; ``_blocks``, the bytes that
    each one's extents take, and their sum ``bytes``, which anybody may read. Thread-safe."""

    def __init__(self, files: Directory, align: int) -> None:
        self._files = files
        self._align = align
        self._lock = threading.Lock()
        self._changed: set[str] = set()
        self._blocks: dict[str, int] = {}
        self.bytes = 0

    def count(self) -> None:
        """Note which segments there are, for ``measure``. Raises OSError."""
        for entry in self._files.entries():
            if SEGMENT_NAME.fullmatch(entry.name):
                self.changed(entry.name)

    def changed(self, name: str) -> None:
        """A segment was written to or punched."""
        with self._lock:
            self._changed.add(name)

    def gone(self, name: str) -> None:
        """A segment was removed."""
        with self._lock:
            self._changed.discard(name)
            self._count(name, 0)

    def measure(self) -> None:
        """Look at each segment that changed. Blocks; raises OSError."""
        with self._lock:
            changed, self._changed = self._changed, set()
        for name in changed:
            try:
                taken = self._measured(name)
            except ReplicaLost:
                taken = 0
            with self._lock:
                self._count(name, taken)

    def _measured(self, name: str) -> int:
        fd = self._files.open(name, on_disk.READ)
        try:
            data = sum(allocated(end, self._align) - start for start, end in data_ranges(fd))
            return max(0, os.fstat(fd).st_blocks * 512 - data)
        finally:
            os.close(fd)

    def _count(self, name: str, taken: int) -> None:
        self.bytes += taken - self._blocks.pop(name, 0)
        if taken:
            self._blocks[name] = taken


def data_ranges(fd: int) -> list[tuple[int, int]]:
    """Start and end of each range of a file that has blocks (lseek(2), SEEK_DATA), rising."""
    ranges = []
    end = 0
    try:
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            ranges.append((start, end))
    except OSError as error:
        if error.errno != errno.ENXIO:  # no data behind ``end``
            raise
    return ranges


logger = logging.getLogger(__name__)

_DIRECTORY = "segments"
_OPEN = 64  # descriptors of segments that are kept
_TAKEN_AWAY = (-1, -1)  # no file's device and inode


@dataclass(slots=True)
class _OpenSegment:
    """An open segment. ``users``: calls that use it. ``gone``: the last of them closes it."""

    fd: int
    users: int = 0
    gone: bool = False


@dataclass(eq=False, slots=True)
class _MadeSegment:
    """One that this process made: its device and inode, and how far it was written."""

    identity: tuple[int, int]
    end: int = 0


class SegmentFiles:
    """The segments of one dataset on one tier.

    They lie in ``segments/``, each under its number as 16 hex digits (mode 0600), with a list of
    its replicas beside it (``lists``). Anything else that lies there is not ours: it is never
    followed, changed or removed. The directory is made for the first segment.

    Constant: ``path`` (for messages); ``memory_backed``; ``align``: records begin at multiples of
    it (4096, or the file system's block if larger). Changing, under ``_lock``: ``_held``, the open
    segments, the last used at the end; ``_made``, those that this object made.

    All methods block and raise OSError. Thread-safe.
    """

    def __init__(self, dir_fd: int, path: str, uid: int) -> None:
        """``dir_fd``, the dataset's directory in the tier, stays the caller's."""
        self.path = path
        self._lock = threading.Lock()
        self._held: OrderedDict[int, _OpenSegment] = OrderedDict()
        self._made: dict[int, _MadeSegment] = {}
        self.memory_backed = on_disk.is_in_memory(dir_fd)
        self.align = ALIGN_BYTES
        with suppress(OSError):  # the tier fails: nothing begins in it
            self.align = allocated(max(os.fstatvfs(dir_fd).f_frsize, ALIGN_BYTES))
        self._dir_fd = os.dup(dir_fd)
        self._files = Directory(self._dir_fd, _DIRECTORY, uid, Remarks(path))
        self.lists = SegmentLists(self._files)
        self.trees = ExtentTrees(self._files, self.align)

    def close(self) -> None:
        """Close all descriptors; no call may be under way any more."""
        with self._lock:
            for segment in list(self._held):
                self._let_go(segment)
        self._files.close()
        os.close(self._dir_fd)

    # Writing

    def write_each(self, records: Sequence[tuple[int, int, Data]]) -> list[int | OSError]:
        """Write each (segment, offset, data). Returns for each its checksum, or its error.

        Makes segments that this object has not made yet. Does not write to one that somebody else
        made (FileExistsError). Gives back the room of a record that was not written whole.
        """
        with ExitStack() as stack:
            opened: dict[int, int | OSError] = {}
            for segment in dict.fromkeys(segment for segment, _, _ in records):
                try:
                    opened[segment] = stack.enter_context(self._in_use(segment, to_write=True))
                except OSError as error:
                    opened[segment] = error.with_traceback(None)
            fds = [opened[segment] for segment, _, _ in records]
            wanted = [
                (fd, offset, data)
                for fd, (_, offset, data) in zip(fds, records, strict=True)
                if isinstance(fd, int)
            ]
            outcomes = iter(_records.put_each(wanted))
            results: list[int | OSError] = []
            for fd, (segment, offset, data) in zip(fds, records, strict=True):
                if isinstance(fd, OSError):
                    results.append(fd)
                    continue
                code, checksum = next(outcomes)
                results.append(checksum)
                if code:
                    file = segment_name(segment)
                    results[-1] = OSError(code, os.strerror(code), file)
                    length = allocated(memoryview(data).nbytes, self.align)
                    self._punch_after_failure(fd, file, offset, length)
            self._written(records, results)
        return results

    def _written(
        self, records: Sequence[tuple[int, int, Data]], results: Sequence[int | OSError]
    ) -> None:
        with self._lock:
            for (segment, offset, data), result in zip(records, results, strict=True):
                made = self._made.get(segment)
                if made is not None and isinstance(result, int):
                    made.end = max(offset + memoryview(data).nbytes, made.end)

    def punch(self, segment: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Give back the room of each (offset, length), which then reads as zeros.

        A missing segment is no error. If one range fails, the others are still tried, and the first
        error is raised.
        """
        if not ranges:
            return
        try:
            with self._in_use(segment) as fd:
                code = _records.punch(fd, ranges)
        except OSError as error:
            if _is_missing(error):
                return
            raise
        if code:
            raise OSError(code, os.strerror(code), segment_name(segment))

    def remove(self, segment: int) -> None:
        """Remove a segment and its list, if there are any. Nothing may write to it any more."""
        self._files.remove(segment_name(segment))
        with self._lock:
            # Only now: a descriptor that is opened before the removal would keep the room.
            self._made.pop(segment, None)
            self._let_go(segment)
        self.lists.remove(segment)
        self.trees.gone(segment_name(segment))

    # Reading

    def open(self, segment: int, end: int) -> int:
        """A new descriptor of a segment, for reading; the caller closes it.

        Raises ReplicaLost unless it is a regular file of ours, of at least ``end`` bytes.
        """
        return self._files.open(segment_name(segment), on_disk.READ, end=end)

    def verify(
        self,
        segment: int,
        offset: int,
        size: int,
        checksum: int,
        paced: Callable[[int], None] = unpaced,
    ) -> bool:
        """Whether a record's bytes, all read from the disk, still have its checksum. See
        ``ReplicaFiles.verify``."""
        fd, name = self.open(segment, offset + size), segment_name(segment)
        found = read_digests(
            fd, size, paced, memory_backed=self.memory_backed, name=name, base=offset
        )
        return combine(found) == checksum

    def blocks(self, segment: int) -> int:
        """Bytes of the blocks that a segment occupies; 0 where there is none."""
        st = self._files.stat(segment_name(segment))
        return 0 if st is None else st.st_blocks * 512

    def data_ranges(self, segment: int) -> list[tuple[int, int]]:
        """Start and end of each range with blocks (lseek(2), SEEK_DATA), rising; none if the
        segment is missing. The last range may end within a block, where the file ends."""
        try:
            fd = self._files.open(segment_name(segment), on_disk.READ)
        except ReplicaLost as error:
            if _is_missing(error):
                return []
            raise
        try:
            return data_ranges(fd)
        finally:
            os.close(fd)

    def found(self) -> list[int]:
        """The segments that lie there, by rising number."""
        return sorted(
            int(name, 16)
            for name in (entry.name for entry in self._files.entries())
            if SEGMENT_NAME.fullmatch(name) and int(name, 16) and self._files.stat(name) is not None
        )

    # The list beside a segment

    def noted(self, segment: int) -> list[TierFile]:
        """The replicas that a segment's list names, by rising offset; none without a list.

        Reads at most 4 MiB of the list. Does not read the data, which may be another's by now.
        """
        st = self._files.stat(segment_name(segment))
        if st is None:
            return []
        data, made_ns = self.lists.read(segment)
        return listed.sound(
            listed.rows(segment, data, made_ns), segment_bytes=st.st_size, align=self.align
        )

    def present(self, segment: int) -> list[TierFile]:
        """What is ``noted``, except what was given back since. Does not read the data."""
        data = self.data_ranges(segment)
        return [row for row in self.noted(segment) if within(data, row.offset, row.size)]

    def frees_punched(self) -> bool:
        """Whether the file system frees the blocks that ``punch`` takes out of a file, by trial."""
        return trials.frees_punched(self._files, self.path, self.align)

    # Descriptors

    @contextmanager
    def _in_use(self, segment: int, *, to_write: bool = False) -> Iterator[int]:
        """A segment's descriptor for writing or punching. Nobody closes it meanwhile.

        ``to_write``: makes the segment if needed, and refuses one that this object did not make or
        that was removed or truncated.
        """
        with self._lock:
            if to_write and segment not in self._made:
                self._make(segment)
            held = self._held.get(segment)
            if held is None:
                held = self._held[segment] = _OpenSegment(
                    self._files.open(segment_name(segment), on_disk.WRITE)
                )
            self._held.move_to_end(segment)
            if to_write:
                st, made = os.fstat(held.fd), self._made[segment]
                same = (st.st_dev, st.st_ino) == made.identity
                # A write past the end of a truncated segment would put zeros where records were.
                if not (st.st_nlink and same and st.st_size >= made.end):
                    self._let_go(segment)
                    made.identity = _TAKEN_AWAY  # its inode may be given out again
                    raise ReplicaLost(segment_name(segment), "Not the segment that was made")
            held.users += 1
            self._close_some()
        try:
            yield held.fd
        finally:
            self.trees.changed(segment_name(segment))
            with self._lock:
                held.users -= 1
                if held.gone and not held.users:
                    os.close(held.fd)

    def _make(self, segment: int) -> None:
        """Under the lock. Raises FileExistsError if there is one."""
        fd = self._files.create(segment_name(segment))
        st = os.fstat(fd)
        self._let_go(segment)
        self._held[segment] = _OpenSegment(fd)
        self._made[segment] = _MadeSegment((st.st_dev, st.st_ino))
        self._close_some()

    def _close_some(self) -> None:
        idle = [segment for segment, held in self._held.items() if not held.users]
        for segment in idle[: max(len(self._held) - _OPEN, 0)]:
            self._let_go(segment)

    def _let_go(self, segment: int) -> None:
        held = self._held.pop(segment, None)
        if held is not None:
            held.gone = True
            if not held.users:
                os.close(held.fd)

    def _punch_after_failure(self, fd: int, file: str, offset: int, length: int) -> None:
        code = _records.punch(fd, [(offset, length)]) if length else 0
        if code:
            logger.warning(
                "%s: could not give back %d bytes at %d of %s/%s: %s",
                self.path, length, offset, _DIRECTORY, file, os.strerror(code),
            )  # fmt: skip


def within(data: Sequence[tuple[int, int]], offset: int, size: int) -> bool:
    """Whether ``size`` bytes from ``offset`` on lie in one of these ``data_ranges``."""
    at = bisect_left(data, (offset + 1, 0)) - 1
    return at >= 0 and offset + size <= data[at][1]


def _is_missing(error: OSError) -> bool:
    """Whether a ReplicaLost says that there is no such file."""
    return isinstance(error.__cause__, FileNotFoundError)
