"""Which worker serves a mount, and who follows it: when it dies, hangs, or is to be replaced.

The supervisor keeps all that a worker needs to take over: the kernel's FUSE_INIT request, which the
successor's libfuse answers once more (nobody wants that answer), the mounted descriptor, the table
of open files. When the successor serves, the kernel is asked to hand out again what the dead one
had taken and not answered (``protocol.RESEND``). Nothing here waits: a start goes on in steps.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from monarchfs.supervisor.launch import WorkerProcess
from monarchfs.supervisor.messages import (
    Back,
    Failed,
    MalformedMessage,
    Ready,
    StatusReport,
    Unback,
)
from monarchfs.supervisor.reaper import Reaper
from monarchfs.supervisor.restart_policy import Follows, RestartPolicy, WorkerLife
from monarchfs.supervisor.stacks import describe_threads
from monarchfs.supervisor.standby import Candidate, Standby
from monarchfs.supervisor.startup import SOON_SECONDS, Mounted, Start, Startup, WorkerOwner
from monarchfs.supervisor.watchdog import Watchdog
from monarchfs.supervisor.worker_logging import WorkerLogging
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
_CLOSED_SECONDS = 1.0


class Phase(Enum):
    """``SERVING``: a worker answers. ``HUNG``: it does not, and writes down where it is.
    ``LEAVING``: it was told to, for another one. ``ENDING``: it was killed. ``PAUSING``: there is
    none. ``STARTING``: there is one that does not serve yet. ``ENDED``: there will be no other."""

    SERVING = 1
    HUNG = 2
    LEAVING = 3
    ENDING = 4
    PAUSING = 5
    STARTING = 6
    ENDED = 7


class Death(NamedTuple):
    """``when`` is a time.time()."""

    why: str
    when: float


class Failover:
    """Constant: the mount, how a worker is started. Changing: ``worker``, the one that serves or
    the last that did or tried; ``phase``; what is left of earlier ones; how they died."""

    def __init__(
        self,
        worker: WorkerProcess,
        start: Start,
        mounted: Mounted,
        restarts: int,
        worker_log: WorkerLogging,
    ) -> None:
        """``worker`` serves, after ``restarts`` others."""
        self.worker = worker
        self.phase = Phase.SERVING
        self.restarts = restarts
        self.last_death: Death | None = None
        self._start_worker = start
        self._mount = mounted
        self._worker_log = worker_log
        self._restart_policy = RestartPolicy()
        self._startup: Startup | None = None
        self._reaper = Reaper(mounted)
        self._standby = Standby(self._start_ahead, self._reaper.add)
        self._candidate: Candidate | None = None
        self._then: Callable[[str | None], None] | None = None
        self._trying = False
        self._retry_at = 0.0
        self._until = 0.0
        self._why = ""
        self._words = ""
        self._closed_at: float | None = None
        self._begin_life(time.monotonic())

    def attach(self, owner: WorkerOwner) -> None:
        """From now on the owner's loop calls ``tick``, at ``next_tick`` at the latest."""
        self._owner = owner
        owner.watch(self.worker.channel, self._on_message)

    @property
    def serves(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def not_understood(self) -> int:
        """How much of what its workers said made no sense."""
        return self._worker_log.not_understood

    @property
    def safe(self) -> bool:
        """Whether the worker, if there is one, leaves out all but the source."""
        return self._restart_policy.safe

    @property
    def retry_seconds(self) -> float | None:
        """In how many seconds safe mode is left for a try; None outside of it."""
        return max(0.0, self._retry_at - time.monotonic()) if self.safe else None

    @property
    def trouble(self) -> str | None:
        """Why no worker serves now; None where one does."""
        if self.phase is Phase.SERVING:
            return None
        if self.phase is Phase.HUNG:
            return self._why
        died = None if self.phase is Phase.LEAVING else self.last_death
        return died.why if died else "the worker is being replaced"

    @property
    def next_tick(self) -> float:
        """A time.monotonic()."""
        now = time.monotonic()
        goes = self.phase in (Phase.LEAVING, Phase.ENDING) or self._closed_at is not None
        if goes or self._reaper.waits:
            return now + SOON_SECONDS
        times = [now + self._watchdog.pause_seconds]
        if self._loads_ahead:
            times.append(self._standby.at)
        if self.phase in (Phase.HUNG, Phase.PAUSING):
            times.append(self._until)
        if self._startup is not None:
            times.append(self._startup.next_tick)
        return min(times)

    # -- what the owner asks for

    def replace(self, then: Callable[[str | None], None], seconds: float) -> None:
        """Have another worker take this one's place. ``then`` is called once, with None when it
        serves, or why not. Where the installed program cannot do it, the old one goes on."""
        if self._then is not None or self.phase is not Phase.SERVING:
            then("the worker is being replaced already: see monarchfs status")
            return
        try:
            worker = self._start_ahead()
        except OperationError as error:
            then(f"the installed program cannot take over: {error}")
            return
        self._standby.drop()  # of the release that was installed before, perhaps
        self._then = then
        self._candidate = Candidate(worker, self._owner, seconds)

    def tick(self) -> None:
        """Go on with what is due."""
        now = time.monotonic()
        self._worker_log.tick()
        self._reaper.tick(self.worker if self.phase is Phase.SERVING else None)
        if self._candidate is not None and self.phase is Phase.SERVING:
            self._consider(self._candidate, now)
        if self.phase in (Phase.SERVING, Phase.STARTING) and self._has_ended(now):
            self._died(f"the worker {self.worker.describe_end()}{self._words}", now)
            return
        match self.phase:
            case Phase.SERVING:
                if self._loads_ahead:
                    self._standby.tick(self._owner, now)
                if self.safe and self._candidate is None and now >= self._retry_at:
                    self._try_whole_worker(now)
                self._look(now)
            case Phase.HUNG if now >= self._until:
                for line in describe_threads(self.worker.pid):
                    log.warning("%s", line)
                self._kill(Phase.ENDING, now)
            case Phase.LEAVING if self.worker.is_gone():
                self._succeed()
            case Phase.LEAVING if now >= self._until:
                log.warning("the worker took longer than %g s to leave", LEAVE_SECONDS)
                self._kill(Phase.ENDING, now)
            case Phase.ENDING if self.worker.is_gone() or now >= self._until:
                if self._candidate is not None and self._candidate.loaded:
                    self._succeed()
                else:
                    self._died(self._why, now)
            case Phase.PAUSING if now >= self._until:
                self._start(now)
            case Phase.STARTING:
                self._go_on_starting(now)

    def close(self, patience: float = 1.0) -> None:
        """End the worker (see ``WorkerProcess.end``), and what was to follow it."""
        self._drop_candidate()
        if (standby := self._standby.drop()) is not None:
            standby.wait_gone(1.0)  # it has the mount's descriptor
        self._answer("the mount has ended")
        if self.phase not in (Phase.PAUSING, Phase.ENDED):
            self.worker.end(patience)

    # -- a worker's life

    def _begin_life(self, now: float) -> None:
        self._served_at: float | None = now
        self._answered = self._mount.vitals()[1]
        self._watchdog = Watchdog(self.worker, self._mount, now)
        self._standby.wanted_from(now, soon=self.restarts > 0)

    @property
    def _loads_ahead(self) -> bool:
        return self.serves and not self.safe and self._candidate is None

    def _start_ahead(self) -> WorkerProcess:
        return self._start_worker(restarts=self.restarts + 1, safe=False, waits=True)

    def _look(self, now: float) -> None:
        why = self._watchdog.look(now)
        if why is None:
            return
        log.error("the worker hangs: %s; it is replaced", why)
        self._why = f"the worker hung: {why}"
        if self._served_at is not None:
            # What it did not do at the end was no life.
            self._served_at += self._watchdog.silent_seconds
        self._until, self.phase = now + _STACKS_SECONDS, Phase.HUNG
        self._owner.silenced()
        # faulthandler writes its stacks into its log.
        self.worker.process.send_signal(STACKS_SIGNAL)

    def _try_whole_worker(self, now: float) -> None:
        log.info("safe mode: trying a whole worker")
        self._retry_at = now + self._restart_policy.retry_seconds  # where it cannot be loaded
        self.replace(self._tried, TRY_SECONDS)
        self._trying = self._candidate is not None

    def _tried(self, error: str | None) -> None:
        if error is not None:
            seconds = self._restart_policy.retry_seconds
            log.warning("no whole worker serves: %s; safe mode for %g s more", error, seconds)

    def _kill(self, phase: Phase, now: float) -> None:
        self.worker.kill()
        self._until, self.phase = now + _KILLED_SECONDS, phase

    def _has_ended(self, now: float) -> bool:
        if self.worker.is_gone():
            return True
        if self._closed_at is not None and now >= self._closed_at + _CLOSED_SECONDS:
            # It has nothing more to say to us; it may be unable to end.
            self.worker.kill()
            self._closed_at = now
        return False

    def _died(self, why: str, now: float) -> None:
        served_at, self._served_at = self._served_at, None
        self._mount.resend()  # for the kernel to show whether there is anything
        life = WorkerLife(
            None if served_at is None else now - served_at,
            self._mount.vitals()[1] != self._answered,
            bool(self._mount.waiting()),
            self.worker.was_killed,
        )
        self.last_death = Death(why, time.time())
        if self.worker.crashed:
            self._mount.mark_suspect()
        was_safe = self.safe
        verdict = self._restart_policy.died(life)
        self._owner.silenced()
        self._leave_behind()
        self._drop_candidate()
        self._answer(f"{why}; another one takes its place: see monarchfs status")
        if verdict.follows is Follows.END:
            self.phase = Phase.ENDED
            self._owner.deserted(why)
            return
        if self.safe and not was_safe:
            # One of the dead may have left it damaged, whatever it died of.
            self._mount.mark_suspect()
            self._retry_at = now + self._restart_policy.retry_seconds
            log.error(
                "%s, as those before it: the next one only serves the source; a whole one is tried"
                " in %g s",
                *(why, self._restart_policy.retry_seconds),
            )
        elif life.killed:
            # By the user, perhaps, again and again.
            self._worker_log.say(logging.ERROR, f"{why}: starting another one")
        else:
            log.error("%s: starting another one", why)
        self.restarts += 1
        self._until, self.phase = now + verdict.pause_seconds, Phase.PAUSING
        if not verdict.pause_seconds:
            self._start(now)

    def _leave_behind(self) -> None:
        self._owner.unwatch(self.worker.channel)
        self._owner.unwatch(self.worker.init)
        self.worker.channel.close()
        self.worker.init.close()
        self._reaper.add(self.worker)
        self._closed_at, self._words, self._startup = None, "", None

    def _start(self, now: float) -> None:
        standby = None if self.safe else self._standby.take()
        if standby is not None:
            self._have_begin(standby)
            return
        self._standby.drop()
        try:
            worker = self._start_worker(restarts=self.restarts, safe=self.safe, waits=False)
        except OperationError as error:
            self._not_started(str(error), now)
            return
        self._begin(worker)

    def _not_started(self, why: str, now: float) -> None:
        verdict = self._restart_policy.died(WorkerLife(None, False, True))
        self.last_death = Death(why, time.time())
        log.error("%s", why)
        if verdict.follows is Follows.END:
            self.phase = Phase.ENDED
            self._owner.deserted(why)
        else:
            self._until, self.phase = now + max(verdict.pause_seconds, 0.5), Phase.PAUSING

    def _have_begin(self, worker: WorkerProcess) -> None:
        worker.channel.send({"do": "begin", "restarts": self.restarts})
        self._begin(worker)

    def _begin(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.phase = Phase.STARTING
        self._owner.watch(worker.channel, self._on_message)
        self._startup = Startup(worker, self._mount, self._owner, self._reaper.all_quiet)

    def _go_on_starting(self, now: float) -> None:
        assert self._startup is not None
        self._startup.tick(now)
        if self._startup.failed is not None:
            self._why = f"the new worker {self._startup.failed}"
            self._startup = None
            self._kill(Phase.ENDING, now)
        elif self._startup.serves:
            self._reaper.overtaken(hurried=self._startup.was_hurried)
            self._startup = None
            self.phase = Phase.SERVING
            self._begin_life(now)
            self._worker_log.say(logging.INFO, f"worker {self.worker.pid} serves")
            self._answer(None)

    def _on_message(self) -> None:
        try:
            message = self.worker.channel.receive(0)
        except (TimeoutError, BlockingIOError):
            return
        except MalformedMessage:
            self._owner.silenced()  # it may have been the answer that somebody waits for
            return
        except OSError as broken:
            self._worker_log.drop(str(broken.strerror))
            return
        match message:
            case None:
                # Whether it is dead the ticks will see; the channel has nothing more to say.
                self._owner.unwatch(self.worker.channel)
                self._closed_at = time.monotonic()
            case Ready() if self._startup is not None:
                self._startup.ready()
                self._go_on_starting(time.monotonic())
            case StatusReport(number, report, dropped):
                if dropped:
                    self._worker_log.drop("a part of its status", dropped)
                if self.phase is Phase.SERVING:
                    self._owner.reported(number, report)
            case Failed(error):
                self._worker_log.say(logging.ERROR, f"worker: {error}")
                self._words = f" ({error})"
            case Back() | Unback():
                reply = self._mount.backing.answer(message)
                if not self.worker.channel.send(reply):
                    self._mount.backing.close(reply["ids"])

    # -- a worker that is replaced on purpose

    def _consider(self, candidate: Candidate, now: float) -> None:
        candidate.tick(now)
        if candidate.refused is not None:
            log.error("the installed program cannot take over: %s", candidate.refused)
            self._drop_candidate()
            why = f"cannot take over, and the old one goes on: {candidate.refused}"
            self._answer(f"the installed program {why}")
        elif candidate.loaded:
            log.info("worker %d takes the place of %d", candidate.worker.pid, self.worker.pid)
            self._until, self.phase = now + LEAVE_SECONDS, Phase.LEAVING
            self._owner.silenced()
            self.worker.channel.send({"do": "leave"})

    def _succeed(self) -> None:
        """The old one has left."""
        candidate, self._candidate = self._candidate, None
        assert candidate is not None
        if self.worker.crashed:
            self._mount.mark_suspect()
        self._leave_behind()
        if self._trying:
            self._restart_policy.tried()
        else:
            self._restart_policy.replaced()
        self._trying = False
        self.restarts += 1
        self._served_at = None
        candidate.unwatch()
        self._have_begin(candidate.worker)

    def _drop_candidate(self) -> None:
        candidate, self._candidate, self._trying = self._candidate, None, False
        if candidate is not None:
            candidate.drop()
            self._reaper.add(candidate.worker)

    def _answer(self, error: str | None) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(error)
