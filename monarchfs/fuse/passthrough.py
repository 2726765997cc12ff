"""Which opens make the kernel read the replica itself, and through which backing file.

The supervisor alone may register a backing file (``supervisor/backing.py``). So resident files are
offered to it before they are opened, in the background, and an open takes the id that is there; one
that finds none waits for it, while other requests go on. Where there are too many ids, the oldest
of those that no open uses is given back. An id keeps the blocks of its file occupied: it is given
back before the removal of a replica counts as done.

The C part (``core/_resident.h``) counts the opens of each inode, and holds every one to the
kernel's rule: what the first open was answered with, a backing id or none, all have until the last
release. So threads and Python may open the same inode.

A replica that shares its file with others is none to be passed through: the kernel would read that
file from its beginning. Such an inode is read through the daemon, and the threads answer its opens,
without an id.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import trio

from monarchfs.cache.accounts import ReplicaHolder
from monarchfs.cache.replicas import OpenReplica
from monarchfs.fs.files import FileHandle, Files
from monarchfs.fuse.relay import Relay
from monarchfs.fuse.session import hooks
from monarchfs.metrics import Metrics
from monarchfs.types import Replica, ReplicaState

Send = Callable[[dict[str, Any]], bool]
"""Sends the supervisor a message; whether that was possible at once."""

Offer = tuple[int, str, int]
"""A file: its tier's place among the tiers, its path there, its inode number."""

MOST_AT_ONCE = 32
"""Files in one message: as many as the supervisor takes."""


@dataclass(eq=False, slots=True)
class Question:
    """Constant: ``number``. Changing: the answer, complete once ``done`` is set: ``ids`` in the
    order of the files, 0 for those that were refused, and why the last one was."""

    number: int
    done: trio.Event = field(default_factory=trio.Event)
    ids: list[int] = field(default_factory=list)
    code: int = 0
    reason: str = ""


class BackingIds:
    """Requested from the supervisor, and released. Only the caller ever waits for an answer.

    Constant: how messages are sent. Changing: the questions that the supervisor has not
    answered, and the ids that could not be released so far."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._questions: dict[int, Question] = {}
        self._unsent: list[int] = []
        self._number = 0

    def ask(self, offers: Sequence[Offer]) -> Question | None:
        """Offer files, at most MOST_AT_ONCE. A caller that stops waiting calls ``drop``. None if
        the supervisor takes no message now."""
        question = self._next()
        message = {"event": "back", "number": question.number, "files": offers}
        if not self._send(message):
            return None
        self._questions[question.number] = question
        return question

    def drop(self, question: Question) -> None:
        """The caller no longer waits for the answer."""
        self._questions.pop(question.number, None)

    def release(self, ids: list[int]) -> trio.Event:
        """Set once the kernel has closed the files, but for opens of them; at once where that
        cannot be known."""
        question = self._next()
        self._unsent += ids
        message = {"event": "unback", "number": question.number, "ids": self._unsent}
        if self._send(message):
            self._unsent = []
            self._questions[question.number] = question
        else:
            question.done.set()
        return question.done

    def answered(self, number: int, ids: list[int], code: int, reason: str) -> None:
        """The supervisor's answer to either."""
        question = self._questions.pop(number, None)
        if question is None:
            if ids := [one for one in ids if one]:
                self.release(ids)
            return
        question.ids, question.code, question.reason = ids, code, reason
        question.done.set()

    def _next(self) -> Question:
        self._number += 1
        return Question(self._number)


log = logging.getLogger(__name__)

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

CLOSED_SECONDS = 0.25
"""So long after the last release the file of a replica that was removed may stay open."""


@dataclass(eq=False, slots=True)
class _Wait:
    """Opens of an inode wait for an id. Constant: the question, the replica's tier. Changing: how
    many opens do; whether the answer was taken."""

    question: Question
    tier: int
    opens: int = 0
    answered: bool = False


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


class Passthrough(ReplicaHolder):
    """All methods run on the event loop.

    Constant: its parts. Changing: ``possible``, whether files are offered; ids by inode, the oldest
    first; replicas that are going, but are held open while the kernel reads them; opens that wait;
    files that became resident; refusals in a row, by tier.
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
        """Without ``counts`` no inode ever gets an id."""
        self.possible = False
        self._counts = counts
        self._files = files
        self._places = {tier: place for place, tier in enumerate(files.cache.tiers)}
        self._backing = BackingIds(send)
        self.answered = self._backing.answered
        self._metrics = metrics
        self._most = 0
        self._crowded = False
        self._ids: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, OpenReplica | None] = {}
        self._relay = relay
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
        return len(self._ids)

    # -- what an open is answered with

    def decided(self, ino: int) -> bool:
        """Whether an open can be answered now; else ``decide`` has to find out. Holds until the
        next checkpoint."""
        if not self._counts or hooks.inode_decided(ino):
            return True
        self.closed(ino)
        if (withdrawn := self._ids.get(ino)) is not None:
            hooks.inode_back(ino, withdrawn)  # but its replica did not go
            return True
        if (wait := self._waits.get(ino)) is not None:
            return wait.answered
        if not self.possible or (self._crowded and self._files.size(ino) < SMALL_BYTES):
            return True
        record = self._files.cache.index.replicas.replica(ino)
        return record is not None and record.segment != 0

    async def decide(self, handle: FileHandle) -> None:
        """Ask for a backing id where an open needs one. Waits for the supervisor at most
        ANSWER_SECONDS. No checkpoint after the answer."""
        wait = self._waits.get(handle.ino)
        if wait is None and not self.decided(handle.ino):
            wait = self._ask(handle.replica)
        if wait is None:
            return
        wait.opens += 1
        try:
            with trio.move_on_after(ANSWER_SECONDS):
                await wait.question.done.wait()
            if not wait.answered:
                self._take_answer(wait, handle)
        finally:
            wait.opens -= 1
            if not wait.opens:
                del self._waits[handle.ino]
                self._backing.drop(wait.question)
                if not wait.answered and wait.question.ids:
                    self._backing.release(wait.question.ids)

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

    def _take_answer(self, wait: _Wait, handle: FileHandle) -> None:
        wait.answered = True
        replica, backing_id = handle.replica, next(iter(wait.question.ids), 0)
        self._judge(wait.tier, backing_id, wait.question)
        # It may have been dropped meanwhile, because it was corrupt, say.
        if backing_id and replica is not None and self._files.cache.gives(replica):
            self._keep(handle.ino, backing_id)
        elif backing_id:
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

    # -- ids

    def take_over(self, ino: int, backing_id: int) -> None:
        """An earlier worker has answered an open with this id, and it lasts."""
        self._ids[ino] = backing_id
        record = self._files.cache.accounts.state(ino)
        if record is None or record.state is not ReplicaState.RESIDENT or record.segment:
            hooks.inode_unback(ino, True)
            self._held[ino] = None

    def _keep(self, ino: int, backing_id: int) -> None:
        """The inode has an id from now on."""
        self._ids[ino] = backing_id
        hooks.inode_back(ino, backing_id)
        self._relay.offer(ino)
        if self.ids > self._most:
            self._release_one()

    def _release_one(self) -> None:
        """The oldest id that no open uses, if one is found soon."""
        for ino in list(islice(self._ids, LOOKED_AT)):
            if ino not in self._held and hooks.inode_unback(ino, False):
                self._backing.release([self._ids.pop(ino)])
                return
            self._ids.move_to_end(ino)

    def closed(self, ino: int) -> None:
        """An open of it may have ended: so a replica that is going may be closed."""
        if ino not in self._held or not hooks.inode_unback(ino, True):
            return
        replica = self._held.pop(ino)
        self._backing.release([self._ids.pop(ino)])
        if replica is not None:
            self._files.cache.release(replica)

    # -- replicas that come and go

    def stored(self, ino: int) -> None:
        """A file became resident."""
        if self.possible and not self._crowded:
            self._news.append(ino)
            self._wake.set()

    async def run(self) -> None:
        """Offer resident files before they are opened, and close those that go, for ever."""
        async with trio.open_nursery() as nursery:
            if self._counts:
                nursery.start_soon(self._close_held)
            if self.possible:
                nursery.start_soon(self._offer_resident)

    async def _close_held(self) -> None:
        """Threads do not say what they closed."""
        while True:
            await trio.sleep(CLOSED_SECONDS)
            for ino in list(self._held):
                self.closed(ino)

    async def _offer_resident(self) -> None:
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
        return ino in self._ids or ino in self._waits

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

    def withdraw(self, ino: int) -> None:
        """The replica of ``ino`` is going: no open gets its id, but where it is open with it. Then
        it is held open until that ends. No checkpoint."""
        if ino in self._ids and ino not in self._held and not hooks.inode_unback(ino, True):
            self._held[ino] = None  # before it is opened, which may find that it is lost
            self._held[ino] = self._files.resident(ino)

    def let_go(self, ino: int) -> trio.Event | None:
        """The replica of ``ino`` is being removed: set once the kernel does not keep it open for
        us any more. None where it does not, or has opens of it. No checkpoint."""
        self.withdraw(ino)
        if ino in self._held:
            # New opens of this inode would have to read what is no replica any more.
            self._files.invalidation.renumber(ino)
            return None
        backing_id = self._ids.pop(ino, None)
        return None if backing_id is None else self._backing.release([backing_id])
