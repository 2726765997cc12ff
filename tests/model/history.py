"""A source that is edited, and what it held when."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from monarchfs.types import FileType, SourceStat, SourceVersion
from tests.support.lookups import Hours
from tests.support.mirror import content

FOREVER = 1 << 62
TICKS_SECONDS = 0.05
"""The clock goes on by this much after an edit, so that the edited files are settled."""


class Name(NamedTuple):
    """What a name stands for: the st_ino and type of its file."""

    ino: int
    type: FileType


Attributes = tuple[SourceVersion, int, int, int, int]


def attributes(stat: SourceStat) -> Attributes:
    """Those that the mount must show."""
    return stat.version, stat.mode, stat.nlink, stat.uid, stat.gid


@dataclass
class Snapshot:
    """The source from one edit to the next; files by their st_ino."""

    start_ns: int
    end_ns: int = FOREVER
    directories: dict[int, dict[str, Name]] = field(default_factory=dict)
    stats: dict[int, SourceStat] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class File:
    """A regular file by itself, which outlives its names where somebody has it open."""

    content: bytes


class EditedSource:
    """Edits a directory tree, each edit under another version, and remembers all there was."""

    def __init__(self, root: Path, hours: Hours) -> None:
        self.root = root
        self.files: dict[int, File] = {}
        self.versions: dict[SourceVersion, bytes] = {}
        self.files_of: dict[SourceVersion, File] = {}
        self._hours = hours
        self._states: dict[SourceVersion, object] = {}
        self._seed = 0
        self._device = root.stat().st_dev
        self.snapshots = [self._look()]

    # -- what there is

    @property
    def now(self) -> Snapshot:
        return self.snapshots[-1]

    def within(self, start_ns: int) -> list[Snapshot]:
        """What was true at some time since then."""
        return [snapshot for snapshot in self.snapshots if snapshot.end_ns >= start_ns]

    def _paths(self, wanted: FileType) -> list[str]:
        def below(ino: int, prefix: str) -> Iterator[str]:
            for name, entry in sorted(self.now.directories[ino].items()):
                if entry.type is wanted:
                    yield prefix + name
                if entry.type is FileType.DIRECTORY:
                    yield from below(entry.ino, f"{prefix}{name}/")

        return list(below(self.root.stat().st_ino, ""))

    def file_paths(self) -> list[str]:
        return self._paths(FileType.REGULAR)

    def directory_paths(self) -> list[str]:
        return self._paths(FileType.DIRECTORY)

    def link_paths(self) -> list[str]:
        return self._paths(FileType.SYMLINK)

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.root / path)

    def file(self, path: str) -> File:
        return self.files[(self.root / path).lstat().st_ino]

    def _look(self) -> Snapshot:
        snapshot = Snapshot(time.time_ns())

        def look(path: Path) -> None:
            version, state = self._state(path)
            self._states[version] = state
            st = SourceStat.of(path.lstat(), self._device)
            snapshot.stats[st.ino] = st
            if st.is_directory:
                names = snapshot.directories[st.ino] = {}
                for child in path.iterdir():
                    child_st = child.lstat()
                    names[child.name] = Name(child_st.st_ino, FileType.of_mode(child_st.st_mode))
                    look(child)
            elif st.is_symlink:
                snapshot.contents[st.ino] = os.fsencode(os.readlink(path))
            elif st.is_regular:
                data = self.files[st.ino].content
                self.files_of[st.version] = self.files[st.ino]
                snapshot.contents[st.ino] = self.versions[st.version] = data

        look(self.root)
        for gone in self.files.keys() - snapshot.contents.keys():
            del self.files[gone]
        return snapshot

    # -- edits

    def fresh_data(self, size: int) -> bytes:
        """Bytes that differ at each place from those of any recent file."""
        self._seed += 1
        return content(size, self._seed)

    def edited(self, *, settled: bool = True) -> None:
        """To be called after each edit."""
        if settled:
            for path in (self.root, *self.root.rglob("*")):
                version, state = self._state(path)
                # An edit left the version as it was before, or came back to it, within a tick.
                if self._states.get(version, state) != state:
                    now = time.time_ns()
                    os.utime(path, ns=(now, now), follow_symlinks=False)
        self.now.end_ns = time.time_ns()
        if settled:
            self._hours.pass_by(TICKS_SECONDS)
        snapshot = self._look()
        snapshot.start_ns = self.now.end_ns
        self.snapshots.append(snapshot)

    def _state(self, path: Path) -> tuple[SourceVersion, object]:
        """A version, and what it is to stand for alone."""
        st = SourceStat.of(path.lstat(), self._device)
        if st.is_directory:
            return st.version, {child.name: child.lstat().st_ino for child in path.iterdir()}
        if st.is_symlink:
            return st.version, os.readlink(path)
        return st.version, self.files[st.ino].content if st.ino in self.files else None

    def create(self, path: str, size: int) -> None:
        target = self.root / path
        data = self.fresh_data(size)
        with open(target, "xb") as file:
            file.write(data)
        self.files[target.stat().st_ino] = File(data)

    def overwrite(self, path: str, offset: int = 0) -> None:
        """In place, to the same size."""
        file = self.file(path)
        data = file.content[:offset] + self.fresh_data(len(file.content))[offset:]
        with open(self.root / path, "r+b") as opened:
            opened.seek(offset)
            opened.write(data[offset:])
        file.content = data

    def append(self, path: str, size: int) -> None:
        file = self.file(path)
        file.content += self.fresh_data(size)
        with open(self.root / path, "ab") as opened:
            opened.write(file.content[-size:])

    def truncate(self, path: str, size: int) -> None:
        file = self.file(path)
        os.truncate(self.root / path, size)
        file.content = file.content[:size].ljust(size, b"\0")

    def replace(self, path: str, size: int) -> None:
        """By another file that is renamed over it."""
        staged = self.root / ".staged"
        data = self.fresh_data(size)
        staged.write_bytes(data)
        ino = staged.stat().st_ino
        staged.rename(self.root / path)
        self.files[ino] = File(data)

    def swap(self, first: str, second: str) -> None:
        """Two directories change places."""
        staged = self.root / ".staged"
        (self.root / first).rename(staged)
        (self.root / second).rename(self.root / first)
        staged.rename(self.root / second)
