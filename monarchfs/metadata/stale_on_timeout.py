"""Questions to the source: asked once for all callers that want the same, with a limited wait."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import TypeVar

import trio

from monarchfs.metadata.known import Entry, KnownMetadata
from monarchfs.metrics import Metrics
from monarchfs.source.layout import ATTRIBUTE, parse
from monarchfs.source.single_flight import SingleFlight
from monarchfs.source.source import Source
from monarchfs.types import FreshnessMode, IndexWriteError, Lane, SourceChanged

log = logging.getLogger(__name__)

Key = tuple[object, ...]

GRACE_SECONDS = 0.05
"""Where something hangs and nobody knows why, a caller waits this long: enough for a server that is
well."""

PROBE_SECONDS = 10.0
"""After this time one file of a target that hangs is asked about, then after twice as long each
time: should the calls that hang never return, the target is found to be back all the same."""

MOST_UNEXPLAINED = 256
"""Calls that hang, each in a thread, and not because of a target: no more are made."""


class Unanswered:
    """Questions that were waited for in vain and are still being asked; each ends when it is
    answered. One about a file that lies on one storage target alone shows that this hangs. True if
    there are any.

    Changing: ``_questions``, each with its target (None: unknown); ``_counts``, how many a target
    has; ``_hanging``, targets with the time of the next probe and the seconds until the one after
    it.
    """

    def __init__(self) -> None:
        self._questions: dict[Key, int | None] = {}
        self._counts: Counter[int | None] = Counter()
        self._hanging: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._questions)

    def __contains__(self, key: Key) -> bool:
        return key in self._questions

    def add(self, key: Key, targets: Collection[int] | None) -> None:
        """A caller waited as long as it should; ``targets`` have the file, if it is one."""
        if key in self._questions:
            return
        target = next(iter(targets)) if targets and len(targets) == 1 else None
        self._questions[key] = target
        self._counts[target] += 1
        if target is not None and target not in self._hanging:
            log.warning("storage target %d of the source does not answer", target)
            self._hanging[target] = trio.current_time() + PROBE_SECONDS, 2 * PROBE_SECONDS

    def answered(self, key: Key) -> None:
        """Or it failed: the source said something."""
        if key not in self._questions:
            return
        target = self._questions.pop(key)
        self._counts[target] -= 1
        if target is not None:
            self.alive((target,))

    def alive(self, targets: Collection[int] | None) -> None:
        """A file on all of these was answered for."""
        for target in targets or ():
            if self._hanging.pop(target, None) is not None:
                log.info("storage target %d of the source answers", target)

    def patience(self, key: Key, targets: Collection[int] | None, deadline: float) -> float:
        """For how many seconds to wait for a question, at most ``deadline``; 0: do not ask."""
        if key in self._questions:
            return 0.0
        now = trio.current_time()
        for target in targets or ():
            if target in self._hanging:
                probe_at, pause = self._hanging[target]
                if now < probe_at:
                    return 0.0
                self._hanging[target] = now + pause, 2 * pause
                return min(GRACE_SECONDS, deadline)
        if not self._unexplained:
            return deadline
        return 0.0 if self.full else min(GRACE_SECONDS, deadline)

    @property
    def full(self) -> bool:
        """Whether so many calls hang that no more are made."""
        return self._unexplained >= MOST_UNEXPLAINED

    @property
    def _unexplained(self) -> int:
        return len(self) - sum(self._counts[target] for target in self._hanging)


T = TypeVar("T")

NOT_RESPONDING_SECONDS = 0.001
"""A caller waits this long for a source that does not answer anybody."""

LAYOUT_SECONDS = 0.05
"""And this long to hear where a file lies, from a metadata server that is well."""

LAYOUTS_KEPT = 30_000


class StaleOnTimeout:
    """Constant: its parts. ``deadline``: seconds that a revalidation waits for the source where
    something is known that can be served instead. Changing: ``_waiting``, the question and the
    seconds of each who waits; ``_layouts``, the storage targets of inodes, while something
    hangs."""

    def __init__(
        self,
        source: Source,
        known: KnownMetadata,
        metrics: Metrics,
        nursery: trio.Nursery,
        deadline: float,
    ) -> None:
        self._source = source
        self._known = known
        self._freshness = known.freshness
        self._metrics = metrics
        self._deadline = deadline
        self._flights: SingleFlight = SingleFlight(nursery)
        self._under_way: set[Key] = set()
        self._waiting: dict[trio.CancelScope, tuple[Key, float]] = {}
        self._unanswered = Unanswered()
        self._layouts: dict[int, frozenset[int]] = {}

    @property
    def hanging(self) -> bool:
        """Whether a question has been waited for in vain, and has no answer yet."""
        return bool(self._unanswered)

    def key(self, lane: Lane, *key: object) -> Key:
        """Of a question: a reader does not wait for one that was asked for nobody, and may wait
        for peers and for a thread; the other way round it is one."""
        return key if lane is Lane.DEMAND or key in self._under_way else (*key, lane)

    def heard(self, *key: object) -> None:
        """A part of the answer came, for any lane: the seconds count from now on."""
        self._unanswered.answered(key)
        for scope, (asked, seconds) in self._waiting.items():
            if asked[: len(key)] == key:
                scope.deadline = trio.current_time() + seconds

    async def run_once(self, key: Key, fetch: Callable[[], Awaitable[T]]) -> T:
        """The answer of one call of ``fetch`` for all callers with the same ``key``. Raises what it
        raises."""

        async def run() -> T:
            self._under_way.add(key)
            try:
                return await fetch()
            finally:
                self._under_way.discard(key)
                self._unanswered.answered(key)

        if self._freshness.mode is FreshnessMode.OPEN and key in self._under_way:
            # The source may have answered before the change that this caller has to see.
            with suppress(OSError, IndexWriteError):
                await self._flights.run_once(key, run)
        return await self._flights.run_once(key, run)

    async def ask(
        self,
        key: Key,
        fetch: Callable[[], Awaitable[T]],
        fallback: T | None,
        *,
        even_open: bool = False,
    ) -> T:
        """``run_once``; or ``fallback``, if the mount's promise allows that, where the source does
        not answer in time or the answer cannot be recorded. What hangs is waited for once: who asks
        for the same, or for a file on the same storage target, has ``fallback`` at once. Raises
        OSError."""
        if fallback is None or not (self._freshness.serves_stale or even_open):
            try:
                return await self.run_once(key, fetch)
            except IndexWriteError as exc:
                raise OSError(errno.EIO, f"what was found cannot be recorded: {exc}") from exc
        targets: frozenset[int] | None = None
        seconds, responding = self._deadline, self._source.responding
        if self._unanswered:
            if responding and key not in self._unanswered:
                targets = await self._targets(fallback)
            seconds = self._unanswered.patience(key, targets, seconds)
        if not responding:
            # It is asked all the same, because the answer serves later callers.
            seconds = min(seconds, NOT_RESPONDING_SECONDS)
        if seconds > 0:
            with trio.move_on_after(seconds) as scope:
                self._waiting[scope] = key, seconds
                try:
                    result = await self.run_once(key, fetch)
                    self._unanswered.alive(targets)
                    return result
                except IndexWriteError as exc:
                    log.warning("what was found cannot be recorded: %s", exc)
                finally:
                    del self._waiting[scope]
            if targets is None and responding and key in self._under_way:
                targets = await self._targets(fallback)
            if key in self._under_way:
                self._unanswered.add(key, targets)
        self._metrics.stale_answers += 1
        return fallback

    async def _targets(self, known: object) -> frozenset[int] | None:
        """The storage targets that have a file; None for what is none, and where the source does
        not say."""
        if (
            not (isinstance(known, Entry) and known.node.stat.is_regular)
            or not self._source.has_layouts
            or self._unanswered.full
        ):
            return None
        ino = known.node.ino
        if not self._unanswered:
            self._layouts.clear()
        if (targets := self._layouts.get(ino)) is not None:
            return targets

        async def fetch() -> frozenset[int]:
            source, place = self._source, self._known.place(ino)
            layout = parse(
                await source.call(Lane.DEMAND, source.posix.getxattr, *place, ATTRIBUTE, None)
            )
            return frozenset() if layout is None else layout.targets

        key = "layout", ino
        with trio.move_on_after(LAYOUT_SECONDS), suppress(OSError, SourceChanged):
            targets = await self.run_once(key, fetch)
            if len(self._layouts) >= LAYOUTS_KEPT:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[ino] = targets
            return targets
        if key in self._under_way:
            self._unanswered.add(key, None)
        return None
