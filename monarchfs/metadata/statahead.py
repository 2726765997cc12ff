"""Asking the source about the names that a reader of a directory will probably want next.

``ls -l`` asks for one name after the other: each costs a call of a thread, a transaction and a
round trip to the server. So a name that has to be asked for is asked for with those that follow it
in the listing, more each time, as Lustre's statahead and the kernel's readahead do: hundreds go to
a few threads, and their answers come back in batches. For a job that opens files in no order, all
names are asked for, from the directory's first one on, once it asked for so many that it seems to
want them all.

In the listing's order: if a name that has to be asked for is the next one after the last such
name, those after it are asked for with it, twice as many each time. Nothing is asked ahead while a
batch hangs, in a directory where one found nothing, nor with ``open``, which promises the state of
the moment. A directory that is opened again in the last quarter of its ttl is asked for anew, so
that it is known after the ttl.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import trio

from monarchfs.cache.index.index import Index
from monarchfs.types import Dirent, IndexWriteError, Node

BATCH, BATCH_FAR = 64, 8
"""Names of one call of a thread: they are asked for one after the other. Where the source is far
away, several threads wait for it at once; elsewhere a call costs more than the names."""

MOST_AHEAD = 1024
"""Names asked for ahead of a reader."""

RENEWED = 256
"""Names of a renewed directory that are asked for at a time: half of the batches."""

RANDOM_AHEAD = 256
"""Names that each one brings of a reader that does not take them in the listing's order."""

RANDOM_FEW, RANDOM_PART, RANDOM_PART_FAR = 3, 16, 8
"""A reader that asked for more than RANDOM_FEW names, and for one in RANDOM_PART of the
directory's, is taken to want all of them. If the source is far away, RANDOM_PART_FAR counts: if the
reader wants only a few, the others delay its own calls there."""

FAR_SECONDS = 0.0002
"""A source that takes longer for a name is far away."""

MOST_COUNTED = 1 << 18
"""Names of a directory are counted up to this, to know when that is: 60 ms of the event loop."""

MOST_LOOKED_AT = 512
"""Entries looked at for one name that is asked for: two milliseconds of the event loop."""

MOST_BATCHES = 8
"""Batches under way, of all directories."""

PATIENCE_SECONDS = 1.0
"""A reader waits this long for a batch that brings nothing. Then it asks the source itself, and
nothing is asked ahead, in any directory, until the batch returns: others may have names that hang,
too, and each would be waited for as long."""

PAUSE_SECONDS = 10.0
"""Nothing is asked ahead in a directory for this long after a batch that found nothing."""

DIRECTORIES_KEPT = 30_000
"""Some 500 bytes each; of more, those used least recently are forgotten."""

_FAR = 1 << 63


class Questions(Protocol):
    """What is asked about the names in a directory."""

    @property
    def name_seconds(self) -> float:
        """What the source takes for a name, on average; 0: that is not known."""

    def lacks(self, dirent: Dirent, node: Node | None) -> bool:
        """Whether the source has to be asked about an entry."""

    async def ask_ahead(self, parent: int, names: list[bytes]) -> tuple[Collection[bytes], int]:
        """Ask about these, in their order; returns those for which it recorded an answer, one at
        least, and how many it found. Raises OSError and IndexWriteError."""


@dataclass(eq=False, slots=True)
class _Batch:
    """Changing: ``names`` without an answer yet; ``waiters`` for the next answers; ``runs``,
    whether it counts as one of ``MOST_BATCHES``."""

    names: list[bytes]
    waiters: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    runs: bool = False


@dataclass(eq=False, slots=True)
class _Readahead:
    """What was asked for in one directory. Changing: all. ``coming`` are the batches by name.
    ``end`` is the cookie up to which names were looked at, ``half`` the one from which the next
    names are due, ``size`` how many were asked for last; before ``paused_until`` (trio's clock)
    no more are asked for. ``began_ns`` is when somebody began to go through the directory, or it
    was renewed.

    For a reader in no order: ``missed``, the names that it asked for and nobody had asked for
    ahead; ``names``, how many there are, and ``counted``, up to how many that was looked at;
    ``swept``, the cookie up to which all
    were asked for ahead, from the first one on; that begins anew after ``sweeps_again``."""

    coming: dict[bytes, _Batch] = field(default_factory=dict)
    began_ns: int = 0
    end: int = 0
    half: int = _FAR
    size: int = 1
    paused_until: float = 0.0
    missed: int = 0
    names: int = 0
    counted: int = 0
    swept: int = 0
    sweeps_again: float = field(default_factory=lambda: trio.current_time() + PAUSE_SECONDS)

    def pause(self) -> None:
        self.size, self.paused_until = 1, trio.current_time() + PAUSE_SECONDS


class Statahead:
    """Constant: its parts. Changing: ``_stuck``, batches that took too long."""

    def __init__(self, nursery: trio.Nursery, index: Index, questions: Questions) -> None:
        self._nursery = nursery
        self._listings = index.listings
        self._rows = index.listings.entries
        self._questions = questions
        self._batches = trio.CapacityLimiter(MOST_BATCHES)
        self._readaheads: OrderedDict[int, _Readahead] = OrderedDict()
        self._stuck: set[_Batch] = set()

    async def bring(self, parent: int, dirent: Dirent) -> None:
        """The name has to be asked for: wait for a batch that asks for it and for others.

        Returns at once where there is no such batch, and when it failed or takes too long. The
        caller then looks whether the name is known, and asks for it if not.
        """
        ahead = self._readahead(parent)
        if dirent.name not in ahead.coming:
            ahead.missed += 1
            if self._paused(ahead) or not self._follows(parent, ahead, dirent):
                ahead.end, ahead.half = dirent.cookie, _FAR
                if not self._paused(ahead):
                    self._scatter(parent, ahead, dirent)
        elif dirent.cookie >= ahead.half and not self._paused(ahead):
            ahead.size = min(2 * ahead.size, MOST_AHEAD)
            self._start(parent, ahead, ahead.end, ahead.size)
        while (batch := ahead.coming.get(dirent.name)) is not None:
            with trio.move_on_after(PATIENCE_SECONDS) as scope:
                await batch.waiters.park()
            if scope.cancelled_caught and ahead.coming.get(dirent.name) is batch:
                self._stuck.add(batch)
                self._end(ahead, batch)

    def missed(self, parent: int) -> int:
        """A name without an entry had to be asked for; returns how many of them there were."""
        ahead = self._readahead(parent)
        ahead.missed += 1
        return ahead.missed

    def gone_through_before(self, parent: int, before_ns: int) -> bool:
        """Whether somebody went through the directory, or it was renewed, by ``before_ns``."""
        ahead = self._readaheads.get(parent)
        return ahead is not None and ahead.size >= BATCH and ahead.began_ns <= before_ns

    def renew(self, parent: int, before_ns: int) -> None:
        """Ask for what was asked for by ``before_ns`` in a directory, in the background."""
        ahead = self._readahead(parent)
        ahead.began_ns = time.time_ns()
        self._nursery.start_soon(self._renew, parent, ahead, before_ns)

    async def _renew(self, parent: int, ahead: _Readahead, before_ns: int) -> None:
        after = 0
        while not self._paused(ahead) and (rows := self._rows(parent, after, RENEWED)):
            after = rows[-1][0].cookie
            names = [
                dirent.name
                for dirent, node in rows
                if node is not None
                and min(dirent.checked_ns, node.fetched_ns) <= before_ns
                and dirent.name not in ahead.coming
            ]
            async with trio.open_nursery() as nursery:
                for batch in self._batches_for(ahead, names):
                    nursery.start_soon(self._run, parent, ahead, batch)

    def _paused(self, ahead: _Readahead) -> bool:
        return bool(self._stuck) or trio.current_time() < ahead.paused_until

    def _batches_for(self, ahead: _Readahead, names: list[bytes]) -> list[_Batch]:
        size = BATCH_FAR if self._far else BATCH
        batches = [_Batch(names[at : at + size]) for at in range(0, len(names), size)]
        for batch in batches:
            ahead.coming.update(dict.fromkeys(batch.names, batch))
        return batches

    def _readahead(self, parent: int) -> _Readahead:
        ahead = self._readaheads.get(parent)
        if ahead is None:
            ahead = self._readaheads[parent] = _Readahead()
            if len(self._readaheads) > DIRECTORIES_KEPT:
                self._readaheads.popitem(last=False)
        self._readaheads.move_to_end(parent)
        return ahead

    def _follows(self, parent: int, ahead: _Readahead, dirent: Dirent) -> bool:
        """Whether the name is the next one in the listing's order; then it is asked for with those
        that follow."""
        if ahead.missed == 1:
            return False
        following = self._rows(parent, ahead.end, 1)
        if following and following[0][0].cookie == dirent.cookie:
            if ahead.size == 1:
                ahead.began_ns = time.time_ns()
            ahead.size = min(2 * ahead.size, MOST_AHEAD)
        else:
            # Who goes through it again begins with the size of last time.
            first = self._rows(parent, 0, 1) if ahead.size > 1 else []
            if not first or first[0][0].cookie != dirent.cookie:
                return False
            ahead.began_ns = time.time_ns()
        self._start(parent, ahead, dirent.cookie - 1, ahead.size)
        return True

    def _scatter(self, parent: int, ahead: _Readahead, dirent: Dirent) -> None:
        """Ask for the next names of the sweep, if all seem to be wanted. The caller asks for the
        name itself: it does not wait for those that it may never want."""
        if not self._wants_all(parent, ahead):
            return
        names: list[bytes] = []
        looked_at, more = 0, True
        while more and len(names) < RANDOM_AHEAD and looked_at < MOST_LOOKED_AT:
            rows = self._rows(parent, ahead.swept, BATCH)
            for row in rows:
                ahead.swept, name = row[0].cookie, row[0].name
                asked = name in ahead.coming or name == dirent.name
                if not asked and self._questions.lacks(*row):
                    names.append(name)
                    if len(names) == RANDOM_AHEAD:
                        break
            looked_at += len(rows)
            if len(rows) < BATCH and len(names) < RANDOM_AHEAD:
                more = trio.current_time() >= ahead.sweeps_again
                if more:
                    ahead.swept, ahead.sweeps_again = 0, trio.current_time() + PAUSE_SECONDS
        self._send(parent, ahead, names)

    def _wants_all(self, parent: int, ahead: _Readahead) -> bool:
        """Whether a reader in no order asked for a large part of the directory's names."""
        if ahead.missed <= RANDOM_FEW or self._listings.listing(parent) is None:
            return False
        part = (RANDOM_PART_FAR if self._far else RANDOM_PART) * ahead.missed
        if part >= ahead.names == ahead.counted < MOST_COUNTED:
            ahead.counted = min(4 * part, MOST_COUNTED)
            ahead.names = self._listings.count_entries(parent, ahead.counted)
        return part >= ahead.names

    @property
    def _far(self) -> bool:
        return self._questions.name_seconds > FAR_SECONDS

    def _start(self, parent: int, ahead: _Readahead, after: int, size: int) -> None:
        """Of the next ``size`` entries, ask for those that have to be asked for, if several do."""
        lacking: list[bytes] = []
        rows = self._rows(parent, after, size)
        for dirent, node in rows:
            if dirent.name not in ahead.coming and self._questions.lacks(dirent, node):
                lacking.append(dirent.name)
        if rows:
            ahead.end = rows[-1][0].cookie
            ahead.half = rows[len(rows) // 2][0].cookie
        if len(lacking) > 1:
            self._send(parent, ahead, lacking)

    def _send(self, parent: int, ahead: _Readahead, names: list[bytes]) -> None:
        for batch in self._batches_for(ahead, names):
            self._nursery.start_soon(self._run, parent, ahead, batch)

    async def _run(self, parent: int, ahead: _Readahead, batch: _Batch) -> None:
        # After an error each waiting reader asks the source itself, and gets its own error.
        try:
            await self._batches.acquire_on_behalf_of(batch)
            batch.runs = True
            while batch not in self._stuck and batch.names:
                done, found = await self._questions.ask_ahead(parent, batch.names)
                if not found:
                    ahead.pause()
                for name in done:
                    ahead.coming.pop(name, None)
                batch.names = [name for name in batch.names if name not in done]
                batch.waiters.unpark_all()
        except (OSError, IndexWriteError):
            ahead.pause()
        finally:
            self._end(ahead, batch)
            self._stuck.discard(batch)

    def _end(self, ahead: _Readahead, batch: _Batch) -> None:
        """Nobody waits for the batch any more, and another one may run."""
        for name in batch.names:
            if ahead.coming.get(name) is batch:
                del ahead.coming[name]
        batch.waiters.unpark_all()
        if batch.runs:
            batch.runs = False
            self._batches.release_on_behalf_of(batch)
