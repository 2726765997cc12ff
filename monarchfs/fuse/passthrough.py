"""Which opens make the kernel read the replica itself, and through which backing file.

The supervisor alone may register a backing file. So resident files are offered to it before they
are opened, in the background, and an open takes the id that is there; one that finds none waits for
it, while other requests go on. Ids that no open uses are kept, and the least recently used given
back where there are too many. An id keeps the blocks of its file occupied: it is given back before
the removal of a replica counts as done.

An inode that is not open, and for which there is an id, is lent to the threads of the C part
(``core/_backed.c``): they answer its opens. Whoever has to know how often it is open, or has
something else in mind with it, takes it back first, with the opens that there are.

A replica that shares its file with others is none to be passed through: the kernel would read that
file from its beginning. Such an inode is read through the daemon, and the threads answer its opens,
without an id.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import trio

from monarchfs.cache.replicas import OpenReplica
from monarchfs.fs.files import FileHandle, Files
from monarchfs.fuse.backing import MOST_AT_ONCE, BackingIds, Offer, Question, Send
from monarchfs.fuse.iomodes import CACHED, IoModes
from monarchfs.fuse.relay import Relay
from monarchfs.fuse.session import hooks
from monarchfs.metrics import Metrics
from monarchfs.types import Replica, ReplicaState

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_SECONDS = 1.0
"""A supervisor that takes longer is not waited for: the daemon reads the file."""

MOST_REFUSALS = 3
"""In a row; then files of that tier are offered no more."""

_PASSING = frozenset((errno.ENOSPC, errno.ENOENT, errno.ESTALE))
"""Refusals that say nothing of the tier: the files that are open leave no room for this one, or it
was removed, or replaced, meanwhile."""

SMALL_BYTES = 1 << 20
"""As in store/allocator.py. Where there are more files than ids, those below are not worth the wait
for one at each open."""

LOOKED_AT = 64
"""So many replicas are looked at before others may run, some tenths of a millisecond."""

NEWS_SECONDS = 0.2
"""So long files that became resident are gathered before they are offered."""


@dataclass(eq=False, slots=True)
class _Wait:
    """Opens of an inode wait for an id. Constant: the question, the replica's tier. Changing: how
    many opens do; the answer, CACHED for a refusal, None before."""

    question: Question
    tier: int
    answer: int | None = None
    opens: int = 0


def kernel_reads(files: int, size: int, *, free_opens: bool) -> bool:
    """Whether the kernel should read replicas itself, where both are possible: what ``--data-path
    auto`` chooses, before the first open, because a mount whose opens cost nothing cannot have the
    kernel read a backing file: it is named in the answer to an open. ``files`` and ``size`` are of
    the complete replicas that an earlier mount left.

    ``free_opens``: without passthrough, opens would not reach the daemon. That is best for files
    that are small on average: most of them share a file with others, which the kernel cannot read
    by itself, and opening them costs nothing then. Larger ones are read faster, and without taking
    memory twice, from the replica itself. So is a dataset of which nothing is known yet.
    """
    return not free_opens or files == 0 or size >= files * SMALL_BYTES


class Passthrough:
    """All methods run on the event loop.

    Constant: its parts, ``counts``. Changing: ``possible``, whether files are offered; the modes of
    open inodes; replicas that are held open because the kernel reads them; ids that no open uses,
    and those of inodes that are lent; opens that wait; files that became resident; refusals in a
    row, by tier.
    """

    def __init__(
        self,
        files: Files,
        send: Send,
        metrics: Metrics,
        relay: Relay,
        *,
        counts: bool,
    ) -> None:
        """Without ``counts`` all inodes are in one mode, the daemon's, and none is remembered."""
        self.possible = False
        self.counts = counts
        self._files = files
        self._places = {tier: place for place, tier in enumerate(files.cache.tiers)}
        self._backing = BackingIds(send)
        self.answered = self._backing.answered
        self._metrics = metrics
        self._most = 0
        self._crowded = False
        self._modes = IoModes()
        self._held: dict[int, OpenReplica | None] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._relay = relay
        self._delegated: OrderedDict[int, int] = OrderedDict()
        self._waits: dict[int, _Wait] = {}
        self._news: list[int] = []
        self._wake = trio.Event()
        self._refusals: dict[int, int] = {}

    def limit_ids(self, most: int) -> None:
        """At most so many ids may be there at once; 0: the daemon answers all reads. After what an
        earlier worker opened was taken over, before the first request."""
        self._most = most
        self.possible = most > 0

    @property
    def data_path(self) -> str:
        """Who reads resident files, for people."""
        return "passthrough" if self.possible else "relay"

    @property
    def ids(self) -> int:
        """How many backing files the kernel keeps open for this worker."""
        return len(self._held) + len(self._idle) + len(self._delegated)

    # -- what an open is answered with

    def known(self, ino: int) -> int | None:
        """The backing id to answer an open with, CACHED for none; None where ``decided`` has to
        find out. Holds until the next checkpoint."""
        if not self.counts:
            return CACHED
        self._look_for_cached(ino)
        if (mode := self._modes.get(ino)) is not None:
            return mode
        if (wait := self._waits.get(ino)) is not None:
            return wait.answer
        if (unused := self._idle.get(ino, self._delegated.get(ino))) is not None:
            return unused
        if not self.possible or (self._crowded and self._files.size(ino) < SMALL_BYTES):
            return CACHED
        record = self._files.cache.index.replicas.replica(ino)
        return CACHED if record is not None and record.segment else None

    def _look_for_cached(self, ino: int) -> None:
        """Who opened it before it was resident, without Python, sets the mode."""
        if self._modes.get(ino) is None:
            for _ in range(hooks.backed_cached(ino)):
                self._modes.note_open(ino, CACHED)

    async def decided(self, handle: FileHandle, open_it: Callable[[int], T]) -> T:
        """Call ``open_it``, which must not wait, with the backing id for ``handle``, or CACHED.
        Waits for the supervisor at most ANSWER_SECONDS; raises what ``open_it`` raises."""
        wait = self._waits.get(handle.ino)
        if wait is None and self.known(handle.ino) is None:
            wait = self._ask(handle.replica)
        if wait is None:
            return open_it(self.known(handle.ino) or CACHED)
        wait.opens += 1
        try:
            with trio.move_on_after(ANSWER_SECONDS):
                await wait.question.done.wait()
            if wait.answer is None:
                self._take_answer(wait, handle.replica)
            return open_it(self.known(handle.ino) or CACHED)
        finally:
            wait.opens -= 1
            if not wait.opens:
                self._end_wait(handle.ino, wait)

    def _ask(self, replica: OpenReplica | None) -> _Wait | None:
        if replica is None or not self._wanted(replica):
            return None
        if self.ids >= self._most:
            self._release_one()
        question = self._backing.ask([self._offer_of(replica)])
        if question is None:
            self._metrics.backing_refused += 1
            return None
        wait = self._waits[replica.ino] = _Wait(question, replica.tier)
        return wait

    def _offer_of(self, replica: OpenReplica) -> Offer:
        return self._places[replica.tier], replica.path, os.fstat(replica.fd).st_ino

    def _wanted(self, replica: OpenReplica) -> bool:
        return (
            self.possible
            and not replica.bad
            and not replica.in_segment
            and self._refusals.get(replica.tier, 0) < MOST_REFUSALS
        )

    def _take_answer(self, wait: _Wait, replica: OpenReplica | None) -> None:
        question = wait.question
        backing_id = next(iter(question.ids), CACHED)
        self._judge(wait.tier, backing_id, question)
        # It may have been dropped meanwhile, because it was corrupt, say.
        sound = replica is not None and self._files.cache.gives(replica)
        wait.answer = backing_id if sound else CACHED

    def _end_wait(self, ino: int, wait: _Wait) -> None:
        """All opens that waited are answered, or were given up."""
        del self._waits[ino]
        self._backing.drop(wait.question)
        mode = self._modes.get(ino)
        for backing_id in filter(None, wait.question.ids):
            if backing_id != mode:
                self._backing.release([backing_id])

    def _judge(self, tier: int, backing_id: int, question: Question) -> None:
        """Count an answer for a file of a tier; one that refuses them all is left alone."""
        if backing_id:
            self._refusals[tier] = 0
            return
        self._metrics.backing_refused += 1
        if question.code in _PASSING:
            return
        refusals = self._refusals[tier] = self._refusals.get(tier, 0) + 1
        if refusals == MOST_REFUSALS:
            tiers = self._files.cache.tiers
            reason = question.reason or "the supervisor does not answer"
            log.warning("tier %s: the kernel does not read it: %s", tiers[tier].path, reason)
            self.possible = any(self._refusals.get(t, 0) < MOST_REFUSALS for t in tiers)

    # -- opens, told by the table of handles

    def note_open(self, handle: FileHandle, mode: int) -> None:
        """An open is about to be answered, or was by an earlier worker."""
        if mode != CACHED:
            self._metrics.passthrough_opens += 1
        if not self.counts:
            return
        self.reclaim(handle.ino)
        if not self._modes.note_open(handle.ino, mode) or mode == CACHED:
            return
        ino, replica, cache = handle.ino, handle.replica, self._files.cache
        if (idle := self._idle.pop(ino, mode)) != mode:
            self._backing.release([idle])
        self._held[ino] = replica
        if replica is not None:
            cache.share(replica)
            if not cache.gives(replica):  # dropped between the opens that waited for its id
                self._files.invalidation.renumber(ino)

    def closed(self, ino: int) -> None:
        """An open was released, and its handle is about to be."""
        if not self.counts:
            return
        mode = self._modes.closed(ino)
        if mode is None or mode == CACHED:
            return
        replica, cache = self._held.pop(ino), self._files.cache
        if ino not in self._waits:  # else who waits has the same id, and is about to use it
            if replica is not None and cache.gives(replica):
                self._keep(ino, mode)
            else:
                self._backing.release([mode])
        if replica is not None:
            cache.release(replica)

    def _keep(self, ino: int, backing_id: int) -> None:
        """An id that no open uses."""
        self._look_for_cached(ino)
        alone = self._modes.get(ino) is None and ino not in self._waits
        if alone and self._relay.delegate(ino, backing_id):
            self._delegated[ino] = backing_id
        else:
            self._idle[ino] = backing_id
        if self.ids > self._most:
            self._release_one()

    def reclaim(self, ino: int) -> None:
        """Take a delegated inode back, with its opens. The cache calls this, too, before it checks
        whether ``ino`` is open. No checkpoint."""
        if (backing_id := self._delegated.pop(ino, None)) is None:
            return
        opens = hooks.backed_reclaim(ino)
        for _ in range(opens):
            self._modes.note_open(ino, backing_id)
        if opens:
            self._held[ino] = self._files.resident(ino)
        else:
            self._idle[ino] = backing_id

    def _release_one(self) -> None:
        """An id that no open uses: the one that has been so for longest, or was lent first."""
        while self._delegated and not self._idle:
            self.reclaim(next(iter(self._delegated)))
        if self._idle:
            self._backing.release([self._idle.popitem(last=False)[1]])

    # -- replicas that come and go

    def stored(self, ino: int) -> None:
        """A file became resident."""
        if self.possible and not self._crowded:
            self._news.append(ino)
            self._wake.set()

    async def run(self) -> None:
        """Offer resident files before they are opened, for ever."""
        if not self.possible:
            return
        index = self._files.cache.index
        resident = sum(totals.resident for totals in index.replicas.tier_totals().values())
        self._crowded = resident - index.segments.segment_replicas() > self._most
        await self._offer(index.replicas.all())
        while True:
            await self._wake.wait()
            await trio.sleep(NEWS_SECONDS)
            self._wake = trio.Event()
            news, self._news = self._news, []
            await self._offer((ino, index.replicas.replica(ino)) for ino in news)

    async def _offer(self, records: Iterable[tuple[int, Replica | None]]) -> None:
        for batch in self._batches(records):
            try:
                if batch:
                    await self._offer_batch(batch)
                else:
                    await trio.lowlevel.checkpoint()
            finally:
                for replica in batch:
                    self._files.cache.release(replica)

    def _batches(
        self, records: Iterable[tuple[int, Replica | None]]
    ) -> Iterator[list[OpenReplica]]:
        """Replicas to be offered at once; none where others may run first."""
        batch: list[OpenReplica] = []
        for count, (ino, record) in enumerate(records, 1):
            if count % LOOKED_AT == 0:
                yield batch
                batch = []
            if record is None or record.state is not ReplicaState.RESIDENT or record.segment:
                continue
            if self.ids + len(batch) >= self._most:
                self._crowded = True
                break
            if self._has(ino):
                continue
            replica = self._files.resident(ino)
            if replica is None:
                continue
            batch.append(replica)
            if len(batch) == MOST_AT_ONCE:
                yield batch
                batch = []
        if batch:
            yield batch

    def _has(self, ino: int) -> bool:
        """Whether there is an id for it, or somebody waits for one."""
        return (
            ino in self._delegated or ino in self._idle or ino in self._held or ino in self._waits
        )

    async def _offer_batch(self, batch: list[OpenReplica]) -> None:
        wanted = [replica for replica in batch if self._wanted(replica)]
        question = self._backing.ask(list(map(self._offer_of, wanted))) if wanted else None
        if question is None:
            await trio.sleep(NEWS_SECONDS)
            return
        try:
            with trio.move_on_after(ANSWER_SECONDS):
                await question.done.wait()
        finally:
            self._backing.drop(question)
        for replica, backing_id in zip(wanted, question.ids, strict=False):
            self._judge(replica.tier, backing_id, question)
            ino, gives = replica.ino, self._files.cache.gives(replica)
            if backing_id and (not gives or self._has(ino)):
                self._backing.release([backing_id])
            elif backing_id:
                self._keep(ino, backing_id)

    def let_go(self, ino: int) -> trio.Event | None:
        """The replica of ``ino`` is being removed: set once the kernel does not keep it open for
        us any more. None where it does not, or has opens of it. No checkpoint."""
        self.reclaim(ino)
        if ino in self._held:
            # New opens of this inode would have to read what is no replica any more.
            self._files.invalidation.renumber(ino)
            return None
        idle = self._idle.pop(ino, None)
        return None if idle is None else self._backing.release([idle])
