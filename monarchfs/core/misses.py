"""Small files that the C part opens and reads in the source by itself (_misses.c), for readers and
to be copied ahead of them: it has to be told what they are.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import NamedTuple, Protocol

from monarchfs.types import DirRef, Node

MOST_BYTES = 1 << 20
"""As in _misses.h: larger files are read here, unless they are in the window."""

MEMORY_BYTES = 64 << 20
"""For files that were read, and are open or not in a tier yet."""

MOST_DIRECTORIES = 4096
"""As in _directories.h; or an eighth of the descriptors that the process may have, if fewer."""

_TIMES = range(-(1 << 63), 1 << 63)
"""Of nanoseconds: the years from 1678 to 2262."""

CHANGED, ARCHIVED, LEFT = -1, -2, -3
"""As in _misses.h."""


class Served(NamedTuple):
    """A file was read, or opened: ``opens`` times. ``spared``: a peer gave the bytes, and the
    source was not asked. ``data``: all of its bytes, where they are to be kept. Neither: ``error``
    says why, an errno, CHANGED (it has another version), ARCHIVED, or LEFT: nothing is wrong with
    it. ``took_ns`` in the source. ``from_window``: it was read into the window before it was
    opened, because there was no room for it in a tier."""

    ino: int
    opens: int
    spared: bool
    data: memoryview | None
    error: int
    took_ns: int
    from_window: bool = False


class WindowState(NamedTuple):
    """As in _misses.h."""

    bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    took_ns: int = 0
    waited: int = 0
    hits: int = 0
    hit_bytes: int = 0
    wasted: int = 0
    wasted_bytes: int = 0


class Places(Protocol):
    """Where files lie in the source."""

    def dirref(self, ino: int) -> DirRef | None: ...

    def node(self, ino: int) -> Node | None: ...


class Misses:
    """Constant: the C part, and who knows. Changing: ``_directories``, the number under which it
    has a directory, by inode number of the mount, the one that was used least recently first;
    ``_free``, numbers below the highest one that stand for nothing."""

    def __init__(
        self,
        hooks: ModuleType,
        places: Places,
        opened_directory: Callable[[DirRef], AbstractContextManager[int] | None],
        may_serve: Callable[[Node], bool],
        fresh_until: Callable[[Node], int],
        *,
        shares: bool = False,
    ) -> None:
        """``opened_directory`` gives a descriptor of a directory without waiting, if there is one;
        ``may_serve`` tells whether the bytes of a node are to be had from the source alone, and its
        version tells them from later ones; until the time ``fresh_until`` (time.time_ns()) the
        source need not be asked for the version of bytes that are here, or that other nodes have
        (``shares``)."""
        self.events_fd = -1
        self._hooks = hooks
        self._places = places
        self._opened_directory = opened_directory
        self._may_serve = may_serve
        self._fresh_until = fresh_until
        self._shares = shares
        self._directories: OrderedDict[int, int] = OrderedDict()
        self._free: list[int] = []
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST_DIRECTORIES if most < 0 else max(1, min(MOST_DIRECTORIES, most // 8))

    def start(self, device: int, *, keeps: bool, layouts: bool, nice: int = 0) -> None:
        """``device`` is st_dev of the source; ``keeps``: the bytes that readers want are told;
        ``layouts``: its files may lie in an archive; ``nice``: the priority of those who read what
        nobody waits for. Before the session's threads; raises OSError."""
        self.events_fd = self._hooks.misses_start(MEMORY_BYTES, device, keeps, layouts, nice)

    def offer(self, node: Node) -> bool:
        """Have the C part serve a node, if that is possible; whether it does. 1 us where it knows
        the node, 10 us else. No checkpoint; raises nothing."""
        if self.events_fd < 0 or node.stat.size > MOST_BYTES or self._hooks.resident_has(node.ino):
            return False
        known: bool = self._hooks.misses_has(node.ino)
        return known or self._put(node)

    def _put(self, node: Node, most_bytes: int = MOST_BYTES) -> bool:
        stat = node.stat
        if (
            not stat.is_regular
            or not 0 < stat.size <= most_bytes
            or stat.device  # another file system, mounted below the source
            or stat.mtime_ns not in _TIMES
            or stat.ctime_ns not in _TIMES
            or not self._may_serve(node)
        ):
            return False
        number = self.enter_directory(node.parent)
        if number is None:
            return False
        version = stat.ino, stat.size, stat.mtime_ns, stat.ctime_ns
        # Of a larger one other nodes have spans, which are not asked for by this name.
        shared = self._shares and stat.size <= MOST_BYTES
        replica = (stat.version.replica_name,) if shared else ()
        fresh_until = self._fresh_until(node)
        return bool(
            self._hooks.misses_put(node.ino, number, node.name, *version, fresh_until, *replica)
        )

    def enter_directory(self, ino: int) -> int | None:
        """Have the C part know an open directory of the source: the number that it has there. None
        if it would have to be opened first. No checkpoint; raises nothing."""
        number = self._directories.get(ino)
        if number is not None:
            self._directories.move_to_end(ino)
            return number
        ref = self._places.dirref(ino)
        opened = None if ref is None else self._opened_directory(ref)
        if ref is None or opened is None:
            return None
        if self._free:
            number = self._free.pop()
        elif len(self._directories) < self._most:
            number = len(self._directories)
        else:
            _ino, number = self._directories.popitem(last=False)
        try:
            with opened as descriptor:
                self._hooks.directories_put(number, ino, descriptor, ref.path)
        except OSError:  # no descriptor is left
            self._free.append(number)
            return None
        self._directories[ino] = number
        return number

    def unopened(self, nodes: Iterable[Node]) -> list[DirRef]:
        """Their directories, as far as ``offer`` would need those to be opened in the source."""
        parents = {node.parent for node in nodes} - self._directories.keys()
        refs = [ref for ino in parents if (ref := self._places.dirref(ino)) is not None]
        return [ref for ref in refs if not self._is_open(ref)]

    def _is_open(self, ref: DirRef) -> bool:
        if (opened := self._opened_directory(ref)) is None:
            return False
        with opened:
            return True

    def fetch(self, nodes: Sequence[Node], threads: int) -> list[int]:
        """Have files for which there is room, and no replica, read by at most so many threads,
        behind all that readers wait for; ``served`` tells of each. Those of which it will not."""
        inos, fresh_until, refused = self._offer_each(nodes, MOST_BYTES)
        return [*refused, *self._hooks.misses_fetch(inos, fresh_until, threads)]

    def hurry(self, inos: list[int]) -> None:
        """Somebody waits for these, of what is to be fetched."""
        self._hooks.misses_hurry(inos)

    def window(self, nodes: Sequence[Node], threads: int, most_bytes: int) -> list[int]:
        """Have files of up to ``most_bytes`` read into the window by at most so many threads, until
        a reader has opened, read and closed them. Those that are not. Their directories must be
        open (``unopened``)."""
        inos, fresh_until, refused = self._offer_each(nodes, most_bytes)
        return [*refused, *self._hooks.misses_window(inos, fresh_until, threads)]

    def _offer_each(
        self, nodes: Sequence[Node], most_bytes: int
    ) -> tuple[list[int], list[int], set[int]]:
        """The numbers of those that the C part knows, until when each is fresh, and the others."""
        has = self._hooks.misses_has
        offered = [
            node
            for node in nodes
            if node.stat.size <= most_bytes and (has(node.ino) or self._put(node, most_bytes))
        ]
        inos = [node.ino for node in offered]
        refused = {node.ino for node in nodes}.difference(inos)
        return inos, list(map(self._fresh_until, offered)), refused

    def window_drop(self, inos: list[int]) -> None:
        """Give up those of the window that nobody has opened."""
        self._hooks.misses_window_drop(inos)

    def window_limit(self, size: int) -> None:
        """What the window may take; 0: nothing more."""
        self._hooks.misses_window_limit(size)

    def window_state(self) -> WindowState:
        return WindowState(*self._hooks.misses_window_state())

    @property
    def source_seconds(self) -> float:
        """What the source takes for a small file, on average; 0: not known."""
        return int(self._hooks.misses_source_ns()) / 1e9

    @property
    def reads_headers(self) -> bool:
        """Whether readers read only the headers of files (of HEADER_FILE_BYTES or more)."""
        return bool(self._hooks.misses_headers())

    def forget(self, inos: list[int]) -> None:
        """Each is resident, or another version: it is served otherwise from now on. Who has it open
        goes on reading what is in memory."""
        self._hooks.misses_forget(inos)

    def forget_all(self) -> None:
        """Directories have moved, perhaps."""
        self._directories.clear()
        self._free.clear()
        self._hooks.misses_forget_all()

    def exclude(self, ino: int, *, excluded: bool) -> bool:
        """Python begins to read the file from the source, or ends. True if it is being read here or
        was and ``served`` will tell of it; if false, a fetch that was asked for does not happen."""
        return bool(self._hooks.misses_exclude(ino, excluded))

    def served(self) -> list[Served]:
        """What was served since this was called last, oldest first."""
        found = []
        for ino, opens, spared, data, error, *rest in self._hooks.misses_events():
            if error and error != LEFT:
                self._failed(ino)
            bytes_ = None if data is None else memoryview(data)
            found.append(Served(ino, opens, spared, bytes_, error, *rest))
        return found

    def _failed(self, ino: int) -> None:
        """Its directory may be another one by now."""
        node = self._places.node(ino)
        if node is not None and (number := self._directories.pop(node.parent, None)) is not None:
            self._free.append(number)
