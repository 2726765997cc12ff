"""Copying ahead of a reader by what it has read: small files that lie beside those it opens.

A small file that is fetched when it is opened costs its reader more than the source alone would
have. One that was copied before, with others, costs next to nothing. Nobody knows what a job will
open. But a job that opened many small files opens more in the same directories. So as much is
copied ahead as it has opened, and no more until it opens some of that. However wrong the guess, the
source is asked for at most twice as much as the job asked for.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence

import trio

from monarchfs.cache.cache import Cache
from monarchfs.metadata.directories import Row
from monarchfs.metadata.tree import Tree
from monarchfs.prefetch.fetch import WHOLE_BYTES
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.scan import SELF, WANTED
from monarchfs.types import IndexWriteError, Lane, Node

log = logging.getLogger(__name__)

MANY = 100
"""A job that opened fewer small files than this may only have looked at some."""

SMALL_BYTES = WHOLE_BYTES
"""Larger files have readahead of their own."""

MOST_AHEAD = 20_000
"""How many files may wait to be opened (about 100 bytes each)."""

MOST_DIRECTORIES = 100_000
"""How many directories with opened files are remembered, each with how far it was walked (about 150
bytes each)."""

NAMES_TIMES = 4
"""The most names that are looked up for each file that was opened. Looked up in batches they cost
the source little; one by one they would cost a waiting reader much."""

BATCH = 64
"""Names examined without a checkpoint: less than a millisecond."""

LOOK_BATCH = 1000
"""Files whose opens are checked without a checkpoint: also less than a millisecond."""

LOOK_SECONDS, SELDOM_SECONDS = 0.05, 1.0
"""How often to check which of the files copied ahead were opened, while more are wanted: less often
the longer nothing was opened."""


class Allowance:
    """How many bytes may be copied ahead. Pure.

    Changing: the number and the bytes of the small files that were opened, each counted when it is
    opened from the source, or first after it was copied ahead; ``waiting``, by inode number, the
    sizes of those copied ahead, or about to be, that nobody has opened yet.
    """

    def __init__(self) -> None:
        self.opened_files = 0
        self.opened_bytes = 0
        self.waiting: dict[int, int] = {}
        self.waiting_bytes = 0

    @property
    def room(self) -> int:
        """How many more bytes may be copied; none if this is not positive."""
        if self.opened_files < MANY or len(self.waiting) >= MOST_AHEAD:
            return 0
        return self.opened_bytes - self.waiting_bytes

    @property
    def worth_while(self) -> bool:
        """Whether there is room for many at a time."""
        return 8 * self.room > self.opened_bytes and len(self.waiting) < MOST_AHEAD * 7 // 8

    def note_open(self, size: int) -> None:
        """A small file was opened, and had to be read from the source."""
        self.opened_files += 1
        self.opened_bytes += size

    def hit(self, ino: int) -> bool:
        """A local file was opened. Returns whether it was one of those waiting."""
        size = self.waiting.pop(ino, None)
        if size is None:
            return False
        self.waiting_bytes -= size
        self.note_open(size)
        return True

    def take_file(self, ino: int, size: int) -> None:
        """The file is copied ahead now."""
        self.waiting_bytes += size - self.waiting.get(ino, 0)
        self.waiting[ino] = size


class Walks:
    """Directories to walk, that of the last open first, and the small files that were found there.
    Pure.

    Changing: the cookie that the walk of each directory has reached; the directories that were
    walked to the end; the inode numbers and sizes of the files found in each.
    """

    def __init__(self) -> None:
        self._cookies: OrderedDict[int, int] = OrderedDict()
        self._ended: set[int] = set()
        self._found: OrderedDict[int, deque[tuple[int, int]]] = OrderedDict()
        self.found_files = 0

    def opened_in(self, directory: int) -> None:
        """Something was opened there."""
        if directory in self._found:
            self._found.move_to_end(directory)
        if directory not in self._ended:
            self._cookies.setdefault(directory, 0)
            self._cookies.move_to_end(directory)
            if len(self._cookies) > MOST_DIRECTORIES:
                self._cookies.popitem(last=False)

    def turn(self) -> tuple[int, int] | None:
        """The directory whose turn it is, and its cookie."""
        return next(reversed(self._cookies.items()), None)

    def reached(self, directory: int, cookie: int) -> None:
        if directory in self._cookies:
            self._cookies[directory] = cookie

    def end_walk(self, directory: int) -> None:
        """The directory is not walked any more."""
        self._cookies.pop(directory, None)
        if len(self._ended) >= MOST_DIRECTORIES:
            self._ended.clear()
        self._ended.add(directory)

    def found(self, directory: int, files: Sequence[tuple[int, int]]) -> None:
        """Small files, which may be copied ahead."""
        if files:
            self._found.setdefault(directory, deque()).extend(files)
            self.found_files += len(files)

    def take_files(self, count: int, size: int) -> list[tuple[int, int]]:
        """The next files found: at most ``count``, until they have ``size`` bytes."""
        files: list[tuple[int, int]] = []
        while self._found and len(files) < count and size > 0:
            directory = next(reversed(self._found))
            files.append(self._found[directory].popleft())
            size -= files[-1][1]
            if not self._found[directory]:
                del self._found[directory]
        self.found_files -= len(files)
        return files


class Ahead:
    """Constant: its parts. Changing: the allowance; ``names``, how many were looked up; the
    walks."""

    def __init__(self, tree: Tree, cache: Cache, jobs: CopyJobs) -> None:
        self.allowance = Allowance()
        self.names = 0
        self._walks = Walks()
        self._tree = tree
        self._cache = cache
        self._jobs = jobs
        self._news = trio.lowlevel.ParkingLot()

    def note_open(self, node: Node, local: bool) -> None:
        """A file was opened; ``local``: all of it was on this node. No checkpoint."""
        allowance = self.allowance
        if local:
            if not (allowance.waiting and allowance.hit(node.ino)):
                return
        elif 0 < node.stat.size <= SMALL_BYTES:
            # If it still waited for its copy, it is not counted as waiting any more.
            if not allowance.hit(node.ino):
                allowance.note_open(node.stat.size)
        else:
            return
        self._walks.opened_in(node.parent)
        self._news.unpark_all()

    async def run(self) -> None:
        """Have files copied ahead, for ever."""
        allowance, pause, more = self.allowance, LOOK_SECONDS, False
        while True:
            opened, moved = allowance.opened_files, False
            few, spare = opened < MANY, self._spare()
            if few or not (spare or self._walks.turn()):
                await self._news.park()
                await trio.sleep(LOOK_SECONDS)
                continue
            if spare and self._walks.found_files and (more or allowance.worth_while):
                moved, more = True, self._want_some()
                await trio.lowlevel.checkpoint()
            elif self._may_walk(opened) and (turn := self._walks.turn()):
                moved = await self._go_on(*turn, spare=spare)
            if not moved:
                await trio.sleep(pause)
                await self._check()
                longer = min(2 * pause, SELDOM_SECONDS)
                pause = longer if allowance.opened_files == opened else LOOK_SECONDS

    def _may_walk(self, opened: int) -> bool:
        return self.names < NAMES_TIMES * opened and self._walks.found_files < MOST_AHEAD

    async def _go_on(self, directory: int, cookie: int, *, spare: bool) -> bool:
        """Walk a batch of a directory. ``spare``: its files may be copied. Returns True."""
        walks = self._walks
        try:
            await self._tree.directories.open(directory, Lane.BACKGROUND)
            batch = self._tree.directories.entries(directory, cookie, BATCH)
            nodes = await self._find(directory, batch)
        except (OSError, IndexWriteError) as exc:
            # Readers that open something there get the error from the source.
            log.debug("nothing is copied ahead in directory inode %d: %s", directory, exc)
            walks.end_walk(directory)
            return True
        await trio.lowlevel.checkpoint()
        if spare:
            small = [
                node for node in nodes if _small(node) and self._cache.reservations.keeps(node)
            ]
            walks.found(directory, [(node.ino, node.stat.size) for node in small])
        if batch:
            walks.reached(directory, batch[-1][0].cookie)
        else:
            walks.end_walk(directory)
        return True

    async def _find(self, directory: int, batch: list[Row]) -> list[Node]:
        """The nodes of the entries, as far as they may be of use."""
        unknown = [
            row
            for row in batch
            if row[1] is None and row[0].type in WANTED and row[0].name not in SELF
        ]
        find_entries = self._tree.names.find_entries
        found = await find_entries(directory, unknown, Lane.BACKGROUND, publish=True)
        self.names += len(unknown)
        nodes = dict(zip((entry.name for entry, *_ in unknown), found, strict=True))
        known = [node or nodes.get(entry.name) for entry, node, *_ in batch]
        return [node for node in known if node is not None]

    def _want_some(self) -> bool:
        """Have some of the files found copied, unless they are here or on their way. Returns
        whether there is room for more."""
        found = self._walks.take_files(BATCH, self.allowance.room)
        held = self._cache.index.replicas.replicas_of([ino for ino, _ in found])
        for ino, size in found:
            if ino not in held and not self._jobs.pending(ino):
                self.allowance.take_file(ino, size)
                self._jobs.want(ino, Priority.SCANNED)
        return self.allowance.room > 0

    def _spare(self) -> bool:
        """Once half of all room is taken, the rest is kept for files that are opened."""
        rooms = [room for room in self._cache.usage.room_for(0)[1] if room.out_of_service is None]
        capacity = sum(room.capacity_bytes for room in rooms)
        return 2 * sum(room.room.bytes for room in rooms) > capacity

    async def _check(self) -> None:
        """Find files that were opened without a call of ``note_open``."""
        waiting = list(self.allowance.waiting)
        for at in range(0, len(waiting), LOOK_BATCH):
            for ino in filter(self._cache.readers.seen, waiting[at : at + LOOK_BATCH]):
                self.allowance.hit(ino)
            await trio.lowlevel.checkpoint()


def _small(node: Node) -> bool:
    return node.stat.is_regular and 0 < node.stat.size <= SMALL_BYTES
