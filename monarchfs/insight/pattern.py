"""What is read, and in which order."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from monarchfs.insight.fitting import Sizes
from monarchfs.insight.recording import Event, File, hashed, one_of
from monarchfs.insight.results import SOURCE, FilesOfEpoch, HotFile, Pattern

_MOST_STREAMS = 100_000
_MOST_COMPARED = 20_000
_NEAR_BYTES = 256 << 10
_HOTTEST = 5
_HOT = 3
"""Hot is a file that was read so many times as often as it is large, in each epoch."""


@dataclass(slots=True)
class _InEpoch:
    """A file's reads in this epoch."""

    pid: int
    bytes: int = 0
    reads: int = 0
    shared: bool = False
    source: bool = False


class PatternFinder:
    """Sequential is a read that goes on where the process's last one of the file ended, nearly so,
    because the kernel reads ahead with several requests at once; strided, one that follows at the
    distance at which the last one did."""

    def __init__(self, files: Mapping[int, File]) -> None:
        self.epochs: list[FilesOfEpoch] = []
        self._files = files
        self._streams: dict[tuple[int, int], tuple[int, int]] = {}
        self._one_of = one_of(len(files), _MOST_COMPARED)
        self._sequential = self._strided = self._reads = self._bytes = 0
        self._now: dict[int, _InEpoch] = {}
        self._orders: list[array[int]] = []
        self._hot: dict[int, HotFile] = {}
        self._alike: list[float] = []

    def add_read(self, event: Event) -> None:
        _begin, _duration, _kind, _answer, ino, pid, offset, size = event
        self._reads += 1
        self._bytes += size
        if len(self._streams) >= _MOST_STREAMS:
            self._streams.clear()
        stream = ino, pid
        end, last_gap = self._streams.get(stream, (0, 0))
        gap = offset - end
        if gap > 0 and gap == last_gap:
            self._strided += 1
        elif not offset or -_NEAR_BYTES <= gap <= _NEAR_BYTES:
            self._sequential += 1
        self._streams[stream] = offset + size, gap

    def add_file(self, cause: int, event: Event) -> None:
        """``event`` read some or all of a file."""
        ino, pid = event.ino, event.pid
        now = self._now.get(ino)
        if now is None:
            now = self._now[ino] = _InEpoch(pid)
        elif now.pid != pid:
            now.shared = True
        now.bytes += event.size
        now.reads += 1
        if cause == SOURCE:
            now.source = True

    def end_epoch(self) -> None:
        whole = shared = source = source_bytes = 0
        for ino, now in self._now.items():
            file = self._files.get(ino)
            size = file.size if file is not None else now.bytes
            whole += now.bytes >= size
            shared += now.shared
            source += now.source
            source_bytes += size * now.source
            if now.bytes >= _HOT * max(size, 1) and now.reads >= _HOT:
                self._add_hot(ino, file, now)
        self.epochs.append(FilesOfEpoch(len(self._now), whole, shared, source, source_bytes))
        order = (ino for ino in self._now if not hashed(ino) & self._one_of - 1)
        self._orders = [*self._orders[-1:], array("Q", order)]
        if len(self._orders) > 1 and (alike := _alike(*self._orders)) is not None:
            self._alike.append(alike)
        self._now.clear()

    def result(self, *, order_known: bool) -> Pattern:
        """``order_known``: whether each read of a file was recorded, in every epoch. If the page
        cache answered some, the order of the others says nothing."""
        reads = self._reads or 1
        random = self._reads - self._sequential - self._strided
        files = sum(epoch.read for epoch in self.epochs) or 1
        sizes = Sizes()
        for file in self._files.values():
            if not file.is_directory:
                sizes.add(file.size)
        return Pattern(
            self._sequential / reads,
            self._strided / reads,
            random / reads,
            sum(epoch.whole for epoch in self.epochs) / files,
            sum(self._alike) / len(self._alike) if self._alike and order_known else None,
            self._bytes / reads,
            sizes.to_json(),
            sorted(self._hot.values(), key=lambda hot: -hot.bytes)[:_HOTTEST],
        )

    def _add_hot(self, ino: int, file: File | None, now: _InEpoch) -> None:
        hot = self._hot.get(ino)
        if hot is None:
            path, size = file or (f"inode {ino}", 0)
            hot = self._hot[ino] = HotFile(path, size, 0, 0)
        hot.reads += now.reads
        hot.bytes += now.bytes


def _alike(before: array[int], after: array[int]) -> float | None:
    """Spearman's correlation of the places of files that both have."""
    common = set(before) & set(after)
    count = len(common)
    if count < 10:
        return None
    places = {ino: place for place, ino in enumerate(one for one in before if one in common)}
    inos = (ino for ino in after if ino in common)
    square = sum((places[ino] - place) ** 2 for place, ino in enumerate(inos))
    return 1 - 6 * square / (count * (count * count - 1))
