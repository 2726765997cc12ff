"""Asking the source about the names that follow, for whoever goes through a directory.

``ls -l`` asks for one name after the other: a thread's call, a transaction and a round trip to
the server each. So a name that has to be asked for brings those that follow it in the listing, more
each time, as Lustre's statahead and the kernel's readahead do: hundreds go to a few threads, and
their answers come back in batches. A job that opens files in no order brings others, too, from the
directory's first on: which ones does not matter, as long as there are not many more than it wants.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import trio

from monarchfs.types import Dirent, IndexWriteError, Node

AT_ONCE = 64
"""Names of one call of a thread."""

MOST_AHEAD = 1024
"""Names asked for ahead of a reader."""

RENEWED_AT_ONCE = 256
"""Names of a directory that is renewed: half of the batches that there may be."""

RANDOM_MOST = 256
"""The same, where he does not take them in the listing's order."""

RANDOM_SHARE = 2
"""Who takes them in no order has one asked for with each, for each so many that he asked for."""

RANDOM_FIRST = 8
"""Where they are more than ``RANDOM_APART``, he waits for a batch of so many, his own among them;
the others may take longer."""

RANDOM_APART = 32

RANDOM_FEW, RANDOM_PART = 3, 16
"""Who asked for more names than the first, and for one of so many of the directory's, is about to
ask for all."""

MOST_COUNTED = RANDOM_PART * RANDOM_MOST
"""Names of a directory, to know when that is."""

MOST_LOOKED_AT = 512
"""Entries, for one name that is asked for: two milliseconds of the event loop."""

ERRANDS = 8
"""At once, of all directories."""

PATIENCE_SECONDS = 1.0
"""A reader waits so long for a batch that brings nothing. Then he asks for himself, and nothing
is asked ahead in that directory until the batch returns."""

REST_SECONDS = 10.0
"""So long nothing is asked ahead in a directory after a batch that found nothing."""

DIRECTORIES_KEPT = 30_000
"""Some 500 bytes each. Who takes files of more directories than these in no order is forgotten
before he comes again."""

_FAR = 1 << 63

Row = tuple[Dirent, Node | None]


class _Batch:
    """Changing: ``names``, those on their way; ``changes``, set and replaced with each batch of
    answers; ``runs``, whether it counts as one of ``ERRANDS``."""

    __slots__ = ("changes", "names", "runs")

    def __init__(self, names: list[bytes]) -> None:
        self.names = names
        self.changes = trio.Event()
        self.runs = False

    def tell(self) -> None:
        self.changes.set()
        self.changes = trio.Event()


class _Window:
    """What was asked for in one directory. Changing: all. ``end`` is the cookie up to which names
    were looked at, ``half`` the one from which the next window is due, ``size`` the last one's;
    before ``rests_until`` (trio's clock) there is no next one. ``began_ns`` is when somebody began
    to go through it, or it was renewed.

    For who goes in no order: ``missed``, how many names had to be asked for when he came to them;
    ``names``, how many there are, as far as counted; ``swept``, the cookie up to which all were
    asked for ahead, from the first on, and not before ``sweeps_again`` from the first on again."""

    __slots__ = (
        "began_ns",
        "coming",
        "end",
        "half",
        "missed",
        "names",
        "rests_until",
        "size",
        "stuck",
        "sweeps_again",
        "swept",
    )

    def __init__(self) -> None:
        self.coming: dict[bytes, _Batch] = {}
        self.stuck: list[_Batch] = []
        self.end = self.missed = self.began_ns = self.names = self.swept = 0
        self.half = _FAR
        self.size = 1
        self.rests_until = 0.0
        self.sweeps_again = trio.current_time() + REST_SECONDS

    @property
    def rests(self) -> bool:
        return bool(self.stuck) or trio.current_time() < self.rests_until

    def rest(self) -> None:
        self.size, self.rests_until = 1, trio.current_time() + REST_SECONDS


class Statahead:
    """Constant: its parts. ``rows`` (directory, after this cookie, at most so many) gives entries
    in the listing's order, ``count`` (directory, at most so many) how many there are; ``lacks``
    says whether an entry has to be asked for; ``ask`` asks the source about names of a directory
    and returns for how many, from the first on, it recorded an answer, and how many of them it
    found. It raises OSError and IndexWriteError."""

    def __init__(
        self,
        nursery: trio.Nursery,
        rows: Callable[[int, int, int], list[Row]],
        count: Callable[[int, int], int],
        lacks: Callable[[Dirent, Node | None], bool],
        ask: Callable[[int, list[bytes]], Awaitable[tuple[int, int]]],
    ) -> None:
        self._nursery = nursery
        self._rows = rows
        self._count = count
        self._lacks = lacks
        self._ask = ask
        self._batches = trio.CapacityLimiter(ERRANDS)
        self._windows: OrderedDict[int, _Window] = OrderedDict()

    async def bring(self, parent: int, dirent: Dirent) -> None:
        """The name has to be asked for: wait for a batch that does, with names that follow.

        It returns at once where there is none, or when that failed or takes too long: the caller
        looks whether he knows now, and asks for himself if not.
        """
        window = self._window(parent)
        if dirent.name not in window.coming:
            window.missed += 1
            if window.rests or not self._follows(parent, window, dirent):
                window.end, window.half = dirent.cookie, _FAR
                if not window.rests:
                    self._scatter(parent, window, dirent)
        elif dirent.cookie >= window.half and not window.rests:
            window.size = min(2 * window.size, MOST_AHEAD)
            self._start(parent, window, window.end, window.size)
        while (batch := window.coming.get(dirent.name)) is not None:
            with trio.move_on_after(PATIENCE_SECONDS) as scope:
                await batch.changes.wait()
            if scope.cancelled_caught and window.coming.get(dirent.name) is batch:
                window.stuck.append(batch)
                self._end(window, batch)

    def missed(self, parent: int) -> int:
        """A name had to be asked for of which there is no entry; how many such names there were
        since the directory was not thought of."""
        window = self._window(parent)
        window.missed += 1
        return window.missed

    def gone_through_before(self, parent: int, before_ns: int) -> bool:
        """Whether somebody went through the directory, or it was renewed, then at the latest."""
        window = self._windows.get(parent)
        return window is not None and window.size >= AT_ONCE and window.began_ns <= before_ns

    def renew(self, parent: int, due: Callable[[Dirent, Node | None], bool]) -> None:
        """Ask for all entries of a directory that are ``due``, while nobody waits for them."""
        window = self._window(parent)
        window.began_ns = time.time_ns()
        self._nursery.start_soon(self._renew, parent, window, due)

    async def _renew(
        self, parent: int, window: _Window, due: Callable[[Dirent, Node | None], bool]
    ) -> None:
        after = 0
        while not window.rests and (rows := self._rows(parent, after, RENEWED_AT_ONCE)):
            after = rows[-1][0].cookie
            names = [row[0].name for row in rows if due(*row) and row[0].name not in window.coming]
            async with trio.open_nursery() as nursery:
                for batch in self._batches_for(window, names):
                    nursery.start_soon(self._run, parent, window, batch)

    def _batches_for(self, window: _Window, names: list[bytes]) -> list[_Batch]:
        batches = [_Batch(names[at : at + AT_ONCE]) for at in range(0, len(names), AT_ONCE)]
        for batch in batches:
            window.coming.update(dict.fromkeys(batch.names, batch))
        return batches

    def _window(self, parent: int) -> _Window:
        window = self._windows.get(parent)
        if window is None:
            window = self._windows[parent] = _Window()
            if len(self._windows) > DIRECTORIES_KEPT:
                self._windows.popitem(last=False)
        self._windows.move_to_end(parent)
        return window

    def _follows(self, parent: int, window: _Window, dirent: Dirent) -> bool:
        """Whether it is the next one in the listing's order; then those that follow are asked for
        with it."""
        if window.missed == 1:
            return False
        following = self._rows(parent, window.end, 1)
        if following and following[0][0].cookie == dirent.cookie:
            if window.size == 1:
                window.began_ns = time.time_ns()
            window.size = min(2 * window.size, MOST_AHEAD)
        else:
            # A later turn begins as the last one ended.
            first = self._rows(parent, 0, 1) if window.size > 1 else []
            if not first or first[0][0].cookie != dirent.cookie:
                return False
            window.began_ns = time.time_ns()
        self._start(parent, window, dirent.cookie - 1, window.size)
        return True

    def _scatter(self, parent: int, window: _Window, dirent: Dirent) -> None:
        """Others are asked for with it, if that is worth while: the next ones from the first on."""
        if (size := min(window.missed // RANDOM_SHARE, RANDOM_MOST)) < 1:
            return
        if window.missed > RANDOM_FEW:
            if not window.names:
                window.names = self._count(parent, MOST_COUNTED)
            if RANDOM_PART * window.missed >= window.names:
                size = RANDOM_MOST
        names = [dirent.name]
        looked_at, more = 0, True
        while more and len(names) < size and looked_at < MOST_LOOKED_AT:
            limit = min(size, AT_ONCE)
            rows = self._rows(parent, window.swept, limit)
            for row in rows:
                window.swept, name = row[0].cookie, row[0].name
                if name not in window.coming and name != names[0] and self._lacks(*row):
                    names.append(name)
                    if len(names) == size:
                        break
            looked_at += len(rows)
            if len(rows) < limit and len(names) < size:
                more = trio.current_time() >= window.sweeps_again
                if more:
                    window.swept, window.sweeps_again = 0, trio.current_time() + REST_SECONDS
        if len(names) > 1:
            first = RANDOM_FIRST if len(names) > RANDOM_APART else len(names)
            self._send(parent, window, names[:first])
            self._send(parent, window, names[first:])

    def _start(self, parent: int, window: _Window, after: int, size: int) -> None:
        """Ask for those of ``size`` entries that have to be asked for, if there are several."""
        lacking: list[bytes] = []
        rows = self._rows(parent, after, size)
        for dirent, node in rows:
            if dirent.name not in window.coming and self._lacks(dirent, node):
                lacking.append(dirent.name)
        if rows:
            window.end = rows[-1][0].cookie
            window.half = rows[len(rows) // 2][0].cookie
        if len(lacking) > 1:
            self._send(parent, window, lacking)

    def _send(self, parent: int, window: _Window, names: list[bytes]) -> None:
        for batch in self._batches_for(window, names):
            self._nursery.start_soon(self._run, parent, window, batch)

    async def _run(self, parent: int, window: _Window, batch: _Batch) -> None:
        # Who waits asks for himself, and meets the error, if it is still one.
        try:
            await self._batches.acquire_on_behalf_of(batch)
            batch.runs = True
            while batch not in window.stuck and batch.names:
                done, found = await self._ask(parent, batch.names)
                if not found:
                    window.rest()
                for name in batch.names[:done]:
                    window.coming.pop(name, None)
                del batch.names[:done]
                batch.tell()
        except (OSError, IndexWriteError):
            window.rest()
        finally:
            self._end(window, batch)
            if batch in window.stuck:
                window.stuck.remove(batch)

    def _end(self, window: _Window, batch: _Batch) -> None:
        """Nobody waits for it any more, and its place is for another one."""
        for name in batch.names:
            if window.coming.get(name) is batch:
                del window.coming[name]
        batch.tell()
        if batch.runs:
            batch.runs = False
            self._batches.release_on_behalf_of(batch)
