"""What stands in for the kernel and for the C part: a kernel that remembers what it was told to
forget, and threads of Python that read small files as a whole (as _misses.c does), on a source in
which a test puts faults."""

import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from monarchfs.core.misses import ARCHIVED, CHANGED, LEFT, Misses
from monarchfs.core.nonresident import NonresidentReads
from monarchfs.types import Archived, Lane, Node, Replica, SourceStat
from tests.support.faults import FaultySource


class RecordingKernel:
    def __init__(self) -> None:
        self.pages: list[int] = []
        self.attributes: list[int] = []
        self.entries: list[tuple[int, bytes]] = []
        self.pauses = 0

    def invalidate_inode(self, ino: int, *, attributes_only: bool = False) -> None:
        (self.attributes if attributes_only else self.pages).append(ino)

    async def forget_attributes(self, ino: int) -> None:
        self.attributes.append(ino)
        await trio.lowlevel.checkpoint()

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self.entries.append((parent, name))

    async def room(self) -> None:
        self.pauses += 1
        await trio.lowlevel.checkpoint()

    def clear(self) -> None:
        for told in (self.pages, self.attributes, self.entries):
            told.clear()


class NoReads:
    """The functions of the C part that ``NonresidentReads`` uses: all reads come to Python."""

    def nonresident_units(self) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., bool]:
        assert name.startswith("nonresident_")
        return lambda *_: False


class NoReaders:
    """Where all reads come to Python. As Readers."""

    def __init__(self) -> None:
        self.nonresident = NonresidentReads(NoReads())  # type: ignore[arg-type]
        self.uses = Counter[int]()

    def stored(self, replicas: Sequence[tuple[Node, Replica]]) -> None: ...
    def invalidate(self, ino: int) -> None: ...
    def expire(self, ino: int) -> None: ...
    def serve(self, tier_id: int, dir_fd: int | None) -> None: ...
    def catch_up(self) -> None: ...

    def try_remove(self, ino: int) -> bool:
        return not self.used(ino)

    def reading(self, ino: int) -> bool:
        return False

    def use(self, ino: int) -> None:
        self.uses[ino] += 1

    def unuse(self, ino: int) -> None:
        self.uses[ino] -= 1

    def used(self, ino: int) -> bool:
        return self.uses[ino] > 0

    def open_inodes(self) -> Sequence[int]:
        return [ino for ino in self.uses if self.used(ino)]

    def seen(self, ino: int) -> bool:
        return False

    def exclude(self, ino: int, *, excluded: bool) -> bool:
        return False


NOT_THERE = (FileNotFoundError, IsADirectoryError)

Event = tuple[int, int, bool, bytes | None, int, int]


@dataclass
class Entry:
    directory: int
    name: bytes
    version: tuple[int, int, int, int]
    state: str = "remote"
    held: bool = False


class WholeReads:
    """The functions of the C part that ``Misses`` uses, as far as nobody waits for a file.

    ``lent``: so many threads more than is said, because as many hang."""

    def __init__(self, posix: FaultySource) -> None:
        self.lent = 0
        self.count: Callable[[Lane, str, int, int, list[int]], None] = lambda *_: None
        self._posix = posix
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._entries: dict[int, Entry] = {}
        self._directories: dict[int, int] = {}
        self._queue: deque[int] = deque()
        self._events: list[Event] = []
        self._running = self._most = 0
        self._clock = trio.lowlevel.current_clock()
        self._closed = False

    def close(self) -> None:
        """What was hung is let go by now."""
        with self._lock:
            self._closed = True
            self._queue.clear()
        end = time.monotonic() + 10
        while self._running and time.monotonic() < end:
            time.sleep(0.001)
        for fd in (self._fd, *self._directories.values()):
            os.close(fd)

    @property
    def busy(self) -> bool:
        return self._running > 0 or len(self._queue) > 0

    def resident_has(self, _ino: int) -> bool:
        return False

    def misses_start(self, *_options: object) -> int:
        return self._fd

    def directories_put(self, number: int, _ino: int, fd: int, path: bytes) -> None:
        if number in self._directories:
            os.close(self._directories[number])
        self._directories[number] = os.dup(fd)

    def misses_put(self, ino: int, directory: int, name: bytes, *version: int) -> bool:
        source_ino, size, mtime_ns, ctime_ns, _fresh_until_ns = version
        entry = Entry(directory, name, (source_ino, size, mtime_ns, ctime_ns))
        self._entries.setdefault(ino, entry)
        return True

    def misses_has(self, ino: int) -> bool:
        return ino in self._entries

    def misses_exclude(self, ino: int, held: bool) -> bool:
        with self._lock:
            entry = self._entries.get(ino)
            if entry is None:
                return False
            entry.held = held
            if entry.state == "ahead":
                self._queue.remove(ino)
                entry.state = "remote"
            return entry.state != "remote"

    def misses_forget(self, inos: list[int]) -> None:
        with self._lock:
            for ino in inos:
                entry = self._entries.pop(ino, None)
                if entry is not None and entry.state == "ahead":
                    self._queue.remove(ino)
                    self._tell((ino, 0, False, None, LEFT, 0))

    def misses_forget_all(self) -> None:
        self.misses_forget(list(self._entries))

    def misses_fetch(self, inos: list[int], _until: list[int], threads: int) -> list[int]:
        self._posix.faults.meet("fetch")
        refused = []
        with self._lock:
            for ino in inos:
                entry = self._entries[ino]
                if entry.held:
                    refused.append(ino)
                    continue
                assert entry.state == "remote"
                entry.state = "ahead"
                self._queue.append(ino)
            self._most = threads
        self._start()
        return refused

    def misses_hurry(self, inos: list[int]) -> None:
        with self._lock:
            for ino in filter(self._queue.__contains__, inos):
                self._queue.remove(ino)
                self._queue.appendleft(ino)

    def lend(self) -> None:
        """Those that are reading now hang."""
        self.lent = self._running
        self._start()

    def misses_events(self) -> list[Event]:
        with self._lock:
            events, self._events = self._events, []
            if events:
                os.eventfd_read(self._fd)
        for _ino, _opens, _spared, data, _error, took_ns in events:
            if data is not None:
                self.count(Lane.BACKGROUND, "read", len(data), took_ns, [1])
        return events

    # -- the threads

    def _start(self) -> None:
        for _ in range(self._most):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self._running - self.lent >= self._most:
                    return
                ino = self._queue.popleft()
                entry = self._entries[ino]
                entry.state = "reading"
                self._running += 1
            began = self._clock.current_time()
            data, error = self._outcome(entry)
            with self._lock:
                self._running -= 1
                self.lent = min(self.lent, self._running)
                entry.state = "remote"
                if self._closed:
                    return
                took_ns = 1 + int((self._clock.current_time() - began) * 1e9)
                self._tell((ino, 0, False, data, error, took_ns))

    def _tell(self, event: Event) -> None:
        if not self._events:
            os.eventfd_write(self._fd, 1)
        self._events.append(event)

    def _outcome(self, entry: Entry) -> tuple[bytes | None, int]:
        try:
            data = self._read(entry)
        except NOT_THERE:
            return None, CHANGED
        except Archived:
            return None, ARCHIVED
        except OSError as error:
            return None, error.errno or errno.EIO
        return data, 0 if data is not None else CHANGED

    def _read(self, entry: Entry) -> bytes | None:
        """None: it has another version."""
        posix = self._posix
        posix.faults.meet("open")
        fd = os.open(
            entry.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._directories[entry.directory]
        )
        try:
            before = SourceStat.of(os.fstat(fd), posix.device).version
            if before[1:] != entry.version:
                return None
            if posix.has_layouts:
                posix.layout(fd)
            data, after = posix.read(fd, 0, before.size)
            return data if after == before and len(data) == after.size else None
        finally:
            os.close(fd)


class WholeReaders(NoReaders):
    """What the cache tells those threads."""

    misses: Misses

    def stored(self, replicas: Sequence[tuple[Node, Replica]]) -> None:
        self.misses.forget([node.ino for node, _replica in replicas])

    def expire(self, ino: int) -> None:
        self.misses.forget([ino])

    def exclude(self, ino: int, *, excluded: bool) -> bool:
        return self.misses.exclude(ino, excluded=excluded)
