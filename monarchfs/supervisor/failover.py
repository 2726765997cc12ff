"""Which worker serves a mount, and which follows when that dies, hangs, or is to be replaced.

The supervisor keeps all that a worker needs to take over: the kernel's FUSE_INIT request, the
mounted descriptor, the table of open files. Nothing waits here, but who mounts waits for the first
worker (``serve_first``): what is due goes on in ``tick``.

======== ======================================= ================================================
phase    the worker                              what follows
======== ======================================= ================================================
SERVING  answers requests                        HUNG; LEAVING, where another one is to serve
HUNG     does not, and logs its stacks           ENDING, soon
LEAVING  was told to, for another one            ENDING, if it takes too long; STARTING the other
ENDING   was killed                              STARTING the other, if there is one; else a death
PAUSING  is dead                                 STARTING the next one
STARTING answers FUSE_INIT again: the kernel has QUIETING, when it did; ENDING, if it takes too
         an answer, so this one is dropped       long, but for the check of its index
QUIETING waits until those before it run no      JOINING, soon in any case: the kernel is asked to
         more: nobody would answer what they     repeat what they took and did not answer
         take now                                (``protocol.RESEND``)
JOINING  was told to serve                       SERVING, when it says so; ENDING, if it takes too
                                                 long
ENDED    is dead, and there will be no other
======== ======================================= ================================================

The mount begins with a worker that is STARTING; the kernel gets its answer to FUSE_INIT, amended.
If this one fails, so does the mount.

A worker that dies by itself while it serves, or begins to, is followed as `RestartPolicy` says: by
PAUSING or ENDED.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from monarchfs.fuse.protocol import ProtocolError, parse_init_reply
from monarchfs.supervisor.launch import WorkerProcess, describe_threads
from monarchfs.supervisor.messages import (
    Back,
    Failed,
    MalformedMessage,
    Ready,
    StatusReport,
    Unback,
    WorkerLoaded,
)
from monarchfs.supervisor.mounted import Mounted
from monarchfs.supervisor.reports import Reports
from monarchfs.supervisor.restart_policy import RestartPolicy
from monarchfs.supervisor.takeover import OrphanedWorker
from monarchfs.supervisor.vital_signs import VitalSigns
from monarchfs.types import OperationError

log = logging.getLogger(__name__)

TRY_SECONDS = 60.0
"""How long a worker may take to load that is to end safe mode."""

LEAVE_SECONDS = 5.0
"""How long a worker that is replaced on purpose may take to put things aside."""

STACKS_SIGNAL = signal.SIGUSR1
"""What has a worker write its threads' stacks into its log."""

_STACKS_SECONDS = 0.3
_KILLED_SECONDS = 2.0
_QUIET_SECONDS = 1.0
"""So long those before it may take to stop running."""

_LOAD_SECONDS, _LOAD_SOON_SECONDS = 1.0, 0.1
"""When the next worker is loaded, after one has begun to serve. Soon, if the one before it has died
as well: that may go on."""

_LOAD_AGAIN_SECONDS = 60.0
_LOOK_SECONDS, _SILENT_LOOK_SECONDS = 0.5, 0.25
_SOON_SECONDS = 0.01
LARGEST_INIT = 1 << 18
"""What is read from /dev/fuse at once: the kernel wants room for a full request."""


DeadWorker = WorkerProcess | OrphanedWorker
"""One that was killed or ended, of this supervisor or of one that died."""


class Phase(Enum):
    """As the table above says."""

    SERVING = 1
    HUNG = 2
    LEAVING = 3
    ENDING = 4
    PAUSING = 5
    STARTING = 6
    QUIETING = 7
    JOINING = 8
    ENDED = 9


_BEGINNING = frozenset({Phase.STARTING, Phase.QUIETING, Phase.JOINING})
_LIVING = _BEGINNING | {Phase.SERVING}
_IMPATIENT = frozenset({Phase.LEAVING, Phase.ENDING, Phase.QUIETING})


class Failover:
    """Constant: the mount; the loop's ``selector``; ``reports``, of workers. Changing: ``worker``,
    the one that serves or the last that did or tried, and its vital signs; ``phase``, and until
    when that lasts; ``last_death``, why and when (time.time()); ``why_replaced``, for the log;
    earlier workers (``reaper`` has those that are left); whether the first one is awaited.

    ``_next`` is the worker that comes next: a standby, loaded ahead because loading takes most of a
    start; or, where ``_then`` is to be told the outcome, one that was asked to take the place of
    the one that serves. On trial, that is to end safe mode."""

    def __init__(
        self,
        mounted: Mounted,
        *,
        restarts: int = 0,
        orphans: Sequence[DeadWorker] | None = None,
    ) -> None:
        """Starts a worker, after ``restarts`` others: the mount's first one, which `serve_first`
        waits for, or that which follows ``orphans``, workers of an earlier supervisor. The loop
        calls what is registered with ``selector``, and has to call ``tick``, at ``next_tick`` at
        the latest. Raises OperationError if its program cannot be run."""
        self.selector = selectors.DefaultSelector()
        self.reports = Reports()
        self.worker = mounted.start_worker(restarts=restarts)
        self.phase = Phase.STARTING
        self.restarts = restarts
        self.last_death: tuple[str, float] | None = None
        self.why_replaced = ""
        self.reaper = Reaper(mounted)
        self._mount = mounted
        self._log = mounted.worker_log
        self._is_first = orphans is None
        self._init_answered = orphans is not None
        self._restart_policy = RestartPolicy()
        self._until = 0.0
        self._ready_by = 0.0
        self._beats = 0
        self._hurried = False
        self._retry_at = 0.0
        self._vital_signs: VitalSigns | None = None
        self._answered_before = 0
        self._next = NextWorker(mounted, self.selector, self.reaper)
        self._load_at = 0.0
        self._then: Callable[[str | None], None] | None = None
        self._on_trial = False
        for orphan in orphans or ():
            self.reaper.add(orphan)
        self._begin(self.worker, waits=False)

    @property
    def serves(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def retry_seconds(self) -> float | None:
        """In how many seconds a whole worker is tried; None outside of safe mode."""
        safe = self._restart_policy.safe
        return max(0.0, self._retry_at - time.monotonic()) if safe else None

    @property
    def trouble(self) -> str:
        """Why no worker serves now."""
        if self.phase is Phase.HUNG:
            return self.why_replaced
        if self.phase is Phase.LEAVING or self.last_death is None:
            return "the worker is being replaced"
        return self.last_death[0]

    @property
    def next_tick(self) -> float:
        """A time.monotonic()."""
        now = time.monotonic()
        ends = self.phase in _LIVING and self.worker.channel.closed_at is not None
        if self.phase in _IMPATIENT or ends or self.reaper.waits:
            return now + _SOON_SECONDS
        silent = self._vital_signs is not None and self._vital_signs.silent_seconds
        times = [now + (_SILENT_LOOK_SECONDS if silent else _LOOK_SECONDS), self._until]
        if self._loads_ahead:
            times.append(self._load_at if self._next.worker is None else math.inf)
        return min(times)

    def tick(self) -> None:
        """Go on with what is due."""
        now = time.monotonic()
        self._log.tick()
        self.reaper.tick(self.worker if self.serves else None)
        if self.serves and self._is_to_leave(now):
            log.info("another worker takes the place of worker %d", self.worker.pid)
            self._enter(Phase.LEAVING, now + LEAVE_SECONDS)
            self.reports.give_up()
            self.worker.channel.send({"do": "leave"})
        if self.phase in _LIVING and self.worker.has_ended(now):
            self._died(f"the worker {self.worker.describe_end()}", now)
            return
        if self.phase is Phase.STARTING:
            self._see_check(now)
        match self.phase:
            case Phase.SERVING:
                self._load_ahead(now)
                if self.retry_seconds == 0 and self._then is None:
                    self._try_whole_worker(now)
                self._check_worker(now)
            case Phase.HUNG if now >= self._until:
                for line in describe_threads(self.worker.pid):
                    log.warning("%s", line)
                self._kill(now)
            case Phase.LEAVING if self.worker.is_gone():
                self._succeed()
            case Phase.LEAVING if now >= self._until:
                log.warning("the worker took longer than %g s to leave", LEAVE_SECONDS)
                self._kill(now)
            case Phase.ENDING if self.worker.is_gone() or now >= self._until:
                if self._then is not None and self._next.loaded:
                    self._succeed()
                else:
                    self._died(self.why_replaced, now)
            case Phase.PAUSING if now >= self._until:
                self._start(now)
            case Phase.QUIETING:
                self._join(now)
            case Phase.STARTING | Phase.JOINING if now >= self._until:
                self._refuse("did not become ready in time", now)

    def close(self, patience: float) -> None:
        """End the worker (see ``WorkerProcess.end``), and what was to follow it."""
        if (dropped := self._next.drop()) is not None:
            dropped.wait_gone(1.0)  # it has the mount's descriptor
        self._answer("the mount has ended")
        if self.phase not in (Phase.PAUSING, Phase.ENDED):
            self.worker.stop(patience)

    def _enter(self, phase: Phase, until: float = math.inf) -> None:
        self.phase, self._until = phase, until

    # -- the first worker

    def serve_first(self, deadline: float, goes_on: Callable[[], object]) -> None:
        """Waits until a worker serves. Raises OperationError, for who mounts, if none does by
        ``deadline`` (time.monotonic()). While one checks its index, that is put off, and
        ``goes_on`` called; it may raise OperationError, too."""
        beats = self._beats
        while not self.serves:
            now = time.monotonic()
            if self._beats != beats:
                beats, deadline = self._beats, now + self._mount.config.start_timeout_seconds
                goes_on()
            if now >= deadline:
                late = "answer FUSE_INIT" if self.phase is Phase.STARTING else "become ready"
                self._failed(f"the worker did not {late} in time")
            for key, _ in self.selector.select(max(0.0, min(deadline, self.next_tick) - now)):
                key.data()
            self.tick()

    def _failed(self, why: str) -> None:
        """Raises OperationError, unless the first worker died of a signal that a damaged index
        causes: then there is a second one, which checks the index, and can do without."""
        error = self._mount.cannot_serve(why)
        if self.worker.crashed:
            self._mount.mark_suspect()
        if self.restarts or not self.worker.crashed:
            raise error
        log.warning("%s: starting another one", error)
        self._leave_behind()
        self.restarts = 1
        self._begin(self._mount.start_worker(restarts=1), waits=False)

    # -- a worker's beginning

    def _start(self, now: float) -> None:
        safe = self._restart_policy.safe
        # Even one that is still being loaded: a new one would take longer.
        if not safe and self._next.is_usable:
            self._begin(self._next.take(), waits=True)
            return
        self._next.drop()
        try:
            worker = self._mount.start_worker(restarts=self.restarts, safe=safe)
        except OperationError as error:
            self.last_death = (str(error), time.time())
            self._log.say(logging.ERROR, str(error))
            self._enter(Phase.PAUSING, now + self._restart_policy.not_started())
            return
        self._begin(worker, waits=False)

    def _begin(self, worker: WorkerProcess, *, waits: bool) -> None:
        """``waits``: it is loaded, or will be soon, and begins when it is told to."""
        if waits:
            worker.channel.send({"do": "begin", "restarts": self.restarts})
        self.worker = worker
        self._beats = self._mount.vitals()[0]
        self._hurried = False
        self._ready_by = time.monotonic() + self._mount.config.start_timeout_seconds
        self._enter(Phase.STARTING, self._ready_by)
        self.selector.register(worker.channel, selectors.EVENT_READ, self._on_message)
        self.selector.register(worker.init, selectors.EVENT_READ, self._on_init)
        worker.init.setblocking(False)
        try:
            worker.init.send(self._mount.handover.init_request)
        except OSError as error:
            log.debug("the new worker takes no FUSE_INIT: %s", error)  # it is dead, as will be seen

    def _see_check(self, now: float) -> None:
        """A worker that is not told to serve yet beats only while it checks its index: for as long
        as that goes on, it may take its time."""
        beats, _answered, _stuck_since = self._mount.vitals()
        if beats != self._beats:
            self._beats = beats
            self._ready_by = self._until = now + self._mount.config.start_timeout_seconds

    def _on_init(self) -> None:
        try:
            reply = self.worker.init.recv(LARGEST_INIT)
        except BlockingIOError:
            return
        except OSError:
            reply = b""
        unwatch(self.selector, self.worker.init)
        if not reply or self.phase is not Phase.STARTING:
            return  # it is going to be gone
        now = time.monotonic()
        try:
            if self._init_answered:
                parse_init_reply(reply)
            else:
                self._mount.answer_init(reply)
                self._init_answered = True
        except ProtocolError as error:
            self._refuse(f"answers FUSE_INIT wrongly: {error}", now)
            return
        except (OperationError, OSError) as error:
            self._failed(str(error))
            return
        self._enter(Phase.QUIETING, now + _QUIET_SECONDS)
        self._join(now)

    def _join(self, now: float) -> None:
        quiet = self.reaper.all_quiet()
        if not quiet and now < self._until:
            return
        self._hurried = not quiet
        self._enter(Phase.JOINING, self._ready_by)
        self._mount.resend()
        self._mount.backing.close_unused()
        self.worker.channel.send({"do": "serve", "backing_ids": self._mount.backing.most})

    def _refuse(self, why: str, now: float) -> None:
        self.why_replaced = f"the new worker {why}"
        self._kill(now)

    def _begin_life(self, now: float) -> None:
        self._vital_signs = VitalSigns(now)
        _beats, self._answered_before, _stuck_since = self._mount.vitals()
        self._load_at = now + (_LOAD_SOON_SECONDS if self.restarts else _LOAD_SECONDS)

    def _on_message(self) -> None:
        try:
            message = self.worker.channel.receive(0)
        except (TimeoutError, BlockingIOError):
            return
        except MalformedMessage as malformed:
            self.reports.give_up()  # it may have been the answer that somebody waits for
            if self._is_first:
                self._failed(f"the worker speaks nonsense: {malformed}")
            return
        except OSError as broken:
            self._log.drop(str(broken.strerror))
            return
        now = time.monotonic()
        match message:
            case None:
                # Whether it is dead the ticks will see; the channel has nothing more to say.
                unwatch(self.selector, self.worker.channel)
            case Ready() if self.phase in _BEGINNING and self._init_answered:
                self.reaper.overtaken(hurried=self._hurried)
                self._enter(Phase.SERVING)
                self._begin_life(now)
                if not self._is_first:
                    self._log.say(logging.INFO, f"worker {self.worker.pid} serves")
                self._is_first = False
                self._answer(None)
            case StatusReport(number, report, dropped):
                if dropped:
                    self._log.drop("a part of its status", dropped)
                if self.serves:
                    self.reports.arrived(number, report, now)
            case Failed(error) if self._is_first:
                self._failed(error)
            case Failed(error):
                self._log.say(logging.ERROR, f"worker: {error}")
                self.worker.error = error
            case Back() | Unback():
                reply = self._mount.backing.answer(message)
                if not self.worker.channel.send(reply):
                    self._mount.backing.close(reply["ids"])

    # -- its end

    def _check_worker(self, now: float) -> None:
        signs = self._vital_signs
        assert signs is not None
        beats, _answered, stuck_since = self._mount.vitals()
        waiting = self._mount.waiting()
        # Only where it is silent, because it takes a file of /proc for each thread.
        activity = self.worker.activity() if beats == signs.beats else None
        why = signs.check(now, beats, waiting, stuck_since, activity)
        if why is None:
            return
        log.error("the worker hangs: %s; it is replaced", why)
        self.why_replaced = f"the worker hung: {why}"
        self._enter(Phase.HUNG, now + _STACKS_SECONDS)
        self.reports.give_up()
        # faulthandler writes its stacks into its log.
        self.worker.process.send_signal(STACKS_SIGNAL)

    def _kill(self, now: float) -> None:
        self.worker.kill()
        self._enter(Phase.ENDING, now + _KILLED_SECONDS)

    def _died(self, why: str, now: float) -> None:
        if self._is_first:
            self._failed(f"{why} while it started")
            return
        self._mount.resend()  # for the kernel to show whether there is anything
        killed = self.worker.was_killed
        self.last_death = (why, time.time())
        if self.worker.crashed:
            self._mount.mark_suspect()
        policy = self._restart_policy
        was_safe, pause = policy.safe, self._judged(killed, now)
        self._leave_behind()
        if self._then is not None:
            self._next.drop()
        self._answer(f"{why}; another one takes its place: see monarchfs status")
        if pause is None:
            self._enter(Phase.ENDED)
            self.reports.give_up()
            return
        if policy.safe and not was_safe:
            # One of the dead may have left it damaged, whatever it died of.
            self._mount.mark_suspect()
            self._retry_at = now + policy.retry_seconds
            log.error(
                "%s, as those before it: the next one only serves the source; a whole one is tried"
                " in %g s",
                why,
                policy.retry_seconds,
            )
        elif killed or self.worker.lacked:
            # Again and again, perhaps.
            self._log.say(logging.ERROR, f"{why}: starting another one")
        else:
            log.error("%s: starting another one", why)
        self.restarts += 1
        self._enter(Phase.PAUSING, now + pause)
        self.reports.give_up()  # only now: who waits is answered at once, with what stands here
        if not pause:
            self._start(now)

    def _judged(self, killed: bool, now: float) -> float | None:
        """What the restart policy says of the worker's life, now that it has ended."""
        signs, self._vital_signs = self._vital_signs, None
        if signs is None and self.worker.lacked:
            return self._restart_policy.not_started()
        if signs is None:
            return self._restart_policy.died(None, answered=False, waited=True, killed=killed)
        return self._restart_policy.died(
            signs.lived_seconds(now),
            answered=self._mount.vitals()[1] != self._answered_before,
            waited=bool(self._mount.waiting()),
            killed=killed,
        )

    def _leave_behind(self) -> None:
        unwatch(self.selector, self.worker.channel)
        unwatch(self.selector, self.worker.init)
        self.worker.channel.close()
        self.worker.init.close()
        self.reaper.add(self.worker)

    # -- the standby

    @property
    def _loads_ahead(self) -> bool:
        wanted = self._mount.config.standby and not self._restart_policy.safe
        return wanted and self.serves and self._then is None

    def _load_ahead(self, now: float) -> None:
        """Load the standby, if it is time."""
        if not self._loads_ahead:
            return
        if (worker := self._next.worker) is not None:
            self._next.tick(now)
            if self._next.refused is None:
                return
            log.warning("no worker could be loaded ahead: %s", self._next.refused)
            if worker.was_killed:
                self._load_at = now + _LOAD_SECONDS
            self._next.drop()
        if now >= self._load_at:
            self._load_at = now + _LOAD_AGAIN_SECONDS
            try:
                self._next.load(_LOAD_AGAIN_SECONDS)
            except OperationError as error:
                log.warning("no worker could be loaded ahead: %s", error)

    # -- a worker that is replaced on purpose

    def replace(
        self, then: Callable[[str | None], None], seconds: float, *, trial: bool = False
    ) -> None:
        """Have another worker take this one's place. ``then`` is called once, with None when it
        serves, or with the reason why not: then the old one goes on. A ``trial`` is to end safe
        mode."""
        if self._then is not None or not self.serves:
            then("the worker is being replaced already: see monarchfs status")
            return
        try:
            self._next.load(seconds)
        except OperationError as error:
            then(f"the installed program cannot take over: {error}")
            return
        self._then, self._on_trial = then, trial

    def _try_whole_worker(self, now: float) -> None:
        log.info("safe mode: trying a whole worker")
        seconds = self._restart_policy.retry_seconds
        self._retry_at = now + seconds  # where it cannot be loaded

        def tried(error: str | None) -> None:
            if error is not None:
                log.warning("no whole worker serves: %s; safe mode for %g s more", error, seconds)

        self.replace(tried, TRY_SECONDS, trial=True)

    def _is_to_leave(self, now: float) -> bool:
        """Whether another worker can take over now; one that cannot is dropped, and the old one
        goes on."""
        if self._then is None:
            return False
        self._next.tick(now)
        refused = self._next.refused
        if refused is None:
            return self._next.loaded
        log.error("the installed program cannot take over: %s", refused)
        self._next.drop()
        why = f"cannot take over, and the old one goes on: {refused}"
        self._answer(f"the installed program {why}")
        return False

    def _succeed(self) -> None:
        """The old one has left."""
        if self.worker.crashed:
            self._mount.mark_suspect()
        self._leave_behind()
        if self._on_trial:
            self._restart_policy.tried()
        else:
            self._restart_policy.replaced()
        self.restarts += 1
        self._vital_signs = None
        self._begin(self._next.take(), waits=True)

    def _answer(self, error: str | None) -> None:
        """Tell the outcome to who asked, once."""
        then, self._then = self._then, None
        if then is not None:
            then(error)


class NextWorker:
    """The worker that comes next, loaded while another one serves. That shows whether the installed
    program can be loaded, and understands this one; it has touched nothing yet.

    Changing: ``worker``, None if there is none; whether it is ``loaded``; ``refused``, why it
    cannot take over.
    """

    def __init__(self, mounted: Mounted, selector: selectors.BaseSelector, reaper: Reaper) -> None:
        self.worker: WorkerProcess | None = None
        self.loaded = False
        self.refused: str | None = None
        self._mount = mounted
        self._selector = selector
        self._reaper = reaper
        self._until = 0.0

    def load(self, seconds: float) -> None:
        """Start one, which may take ``seconds`` to load. Raises OperationError."""
        # It is told later how many were before it.
        worker = self._mount.start_worker(restarts=1, waits=True)
        self.drop()  # of the release that was installed before, perhaps
        self.worker, self.loaded, self.refused = worker, False, None
        self._until = time.monotonic() + seconds
        self._selector.register(worker.channel, selectors.EVENT_READ, self._on_message)

    @property
    def is_usable(self) -> bool:
        """Whether it can take over, now or soon."""
        return self.worker is not None and self.refused is None and not self.worker.is_gone()

    def tick(self, now: float) -> None:
        """See whether it ended, or says nothing in time."""
        if self.worker is None or self.loaded or self.refused is not None:
            return
        if self.worker.is_gone():
            self.refused = f"it {self.worker.describe_end()}"
        elif now >= self._until:
            self.refused = "it said nothing in time"

    def take(self) -> WorkerProcess:
        """It is the caller's from now on."""
        worker, self.worker, self.loaded = self.worker, None, False
        assert worker is not None
        unwatch(self._selector, worker.channel)
        return worker

    def drop(self) -> WorkerProcess | None:
        """Kill it, if there is one; which that was."""
        if self.worker is None:
            return None
        worker = self.take()
        worker.kill()
        worker.channel.close()
        worker.init.close()
        self._reaper.add(worker)
        return worker

    def _on_message(self) -> None:
        if self.worker is None:
            return  # dropped meanwhile
        try:
            message = self.worker.channel.receive(0)
        except (TimeoutError, BlockingIOError):
            return
        except (OSError, MalformedMessage) as nonsense:
            self.refused = f"it speaks nonsense: {nonsense}"
            return
        match message:
            case WorkerLoaded():
                unwatch(self._selector, self.worker.channel)
                self.loaded = True
            case Failed(error):
                self.refused = error
            case None:
                unwatch(self._selector, self.worker.channel)  # the tick sees how it ended


class Reaper:
    """Reaps dead workers now and then; one that cannot die holds nobody up. Nothing here waits.

    Changing: the workers that are not reaped yet; those among them that were there when the one
    that serves came, and those of these that may still take requests from the kernel.
    """

    def __init__(self, mounted: Mounted) -> None:
        self._mounted = mounted
        self._left: list[DeadWorker] = []
        self._overtaken: list[DeadWorker] = []
        self._unquiet: list[DeadWorker] = []

    def add(self, worker: DeadWorker) -> None:
        """It was killed, or ended."""
        self._left.append(worker)

    def all_quiet(self) -> bool:
        """Whether none of them can take a request any more."""
        return all(worker.is_quiet() for worker in self._left)

    def overtaken(self, *, hurried: bool) -> None:
        """Another one serves; ``hurried``: before all of these were quiet."""
        self._overtaken = [worker for worker in self._left if not worker.reaped]
        self._unquiet = list(self._left) if hurried else []

    def tick(self, serving: WorkerProcess | None) -> None:
        """Reap those that ended. If one has stopped that was there when its successor came, have
        the kernel repeat the requests it took, if there is a worker to answer them; once more when
        it is gone. One that hung was quiet, but perhaps within read(2) of a request: the kernel
        repeats only what was read (fuse_resend in fs/fuse/dev.c)."""
        self._left[:] = [worker for worker in self._left if not worker.reaped]
        unquiet = [worker for worker in self._unquiet if not worker.is_quiet()]
        overtaken = [worker for worker in self._overtaken if not worker.reaped]
        stopped = len(unquiet) < len(self._unquiet) or len(overtaken) < len(self._overtaken)
        if stopped and serving is not None:
            self._mounted.resend()
            if self._mounted.journal:
                serving.channel.send({"do": "again"})
        self._unquiet, self._overtaken = unquiet, overtaken

    def pids(self, worker: WorkerProcess) -> list[int]:
        """Of ``worker`` and of those that were left behind, as far as this process started them and
        has not reaped them: so these numbers mean nobody else. Reaps nothing."""
        own = [one for one in (worker, *self._left) if isinstance(one, WorkerProcess)]
        return list(dict.fromkeys(one.pid for one in own if one.process.returncode is None))

    @property
    def waits(self) -> bool:
        """Whether ``tick`` may soon have requests repeated."""
        return bool(self._unquiet)


def unwatch(selector: selectors.BaseSelector, what: Any) -> None:
    """The selector no longer has it; nothing where it has not, or where that is closed."""
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(what)
