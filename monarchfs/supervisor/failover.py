"""Which worker serves a mount, and which follows when that dies, hangs, or is to be replaced.

The supervisor keeps all that a worker needs to take over: the kernel's FUSE_INIT request, the
mounted descriptor, the table of open files. The next worker's libfuse answers FUSE_INIT again, and
that answer is dropped. When the worker serves, the kernel repeats the requests that the dead one
left without an answer (``protocol.RESEND``). Nothing here waits: a start goes on in steps.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from monarchfs.supervisor.launch import WorkerLauncher, WorkerProcess
from monarchfs.supervisor.messages import (
    Back,
    Failed,
    MalformedMessage,
    Ready,
    StatusReport,
    Unback,
)
from monarchfs.supervisor.reaper import DeadWorker, Reaper
from monarchfs.supervisor.restart_policy import Follows, RestartPolicy, WorkerLife
from monarchfs.supervisor.stacks import describe_threads
from monarchfs.supervisor.standby import Candidate, Replacement, Standby
from monarchfs.supervisor.startup import SOON_SECONDS, Mounted, Startup, WorkerOwner
from monarchfs.supervisor.watchdog import LOOK_SECONDS, Watchdog
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


class Phase(Enum):
    """``SERVING``: a worker answers. ``HUNG``: it does not, and logs its stacks. ``LEAVING``: it
    was told to, for another one. ``ENDING``: it was killed. ``PAUSING``: there is none.
    ``STARTING``: one does not serve yet. ``ENDED``: there will be no other."""

    SERVING = 1
    HUNG = 2
    LEAVING = 3
    ENDING = 4
    PAUSING = 5
    STARTING = 6
    ENDED = 7


_LIVING = frozenset({Phase.SERVING, Phase.STARTING})


class Death(NamedTuple):
    """``when`` is a time.time()."""

    why: str
    when: float


class Failover:
    """Constant: the mount, how a worker is started. Changing: ``worker``, the one that serves or
    the last that did or tried; ``phase``; ``why_replaced``, for the log; earlier workers, and how
    they died (``reaper`` has those that are left)."""

    def __init__(
        self,
        worker: WorkerProcess,
        launcher: WorkerLauncher,
        mounted: Mounted,
        restarts: int,
        owner: WorkerOwner,
        orphans: Sequence[DeadWorker] | None = None,
    ) -> None:
        """``worker`` serves, after ``restarts`` others; or, with ``orphans``, it was just started:
        these workers of an earlier supervisor served until then. The owner's loop has to call
        ``tick``, at ``next_tick`` at the latest."""
        self.worker = worker
        self.phase = Phase.SERVING
        self.restarts = restarts
        self.last_death: Death | None = None
        self.why_replaced = ""
        self.log = launcher.worker_log
        self._launcher = launcher
        self._mount = mounted
        self._owner = owner
        self._restart_policy = RestartPolicy()
        self._startup: Startup | None = None
        self.reaper = Reaper(mounted)
        # One that waits is told later how many were before it.
        self._start_ahead = partial(launcher.start, restarts=1, waits=True)
        self._standby = Standby(self._start_ahead, self.reaper.add)
        self._replacement = Replacement(self.reaper.add)
        self._retry_at = 0.0
        self._until = 0.0
        self._watchdog: Watchdog | None = None
        if orphans is None:
            self._begin_life(time.monotonic())
            owner.watch(worker.channel, self._on_message)
        else:
            for orphan in orphans:
                self.reaper.add(orphan)
            self._begin(worker, waits=False)

    @property
    def serves(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def retry_seconds(self) -> float | None:
        """In how many seconds a whole worker is tried; None outside of safe mode."""
        safe = self._restart_policy.safe
        return max(0.0, self._retry_at - time.monotonic()) if safe else None

    @property
    def next_tick(self) -> float:
        """A time.monotonic()."""
        now = time.monotonic()
        goes = self.phase in (Phase.LEAVING, Phase.ENDING)
        ends = self.phase in _LIVING and self.worker.channel.closed_at is not None
        if goes or ends or self.reaper.waits:
            return now + SOON_SECONDS
        pause = LOOK_SECONDS if self._watchdog is None else self._watchdog.pause_seconds
        times = [now + pause]
        if self._loads_ahead:
            times.append(self._standby.at)
        if self.phase in (Phase.HUNG, Phase.PAUSING):
            times.append(self._until)
        if self._startup is not None:
            times.append(self._startup.next_tick)
        return min(times)

    # -- what the owner asks for

    def replace(
        self, then: Callable[[str | None], None], seconds: float, *, trial: bool = False
    ) -> None:
        """Have another worker take this one's place. ``then`` is called once, with None when it
        serves, or with the reason why not: then the old one goes on. A ``trial`` is to end safe
        mode."""
        if self._replacement.under_way or not self.serves:
            then("the worker is being replaced already: see monarchfs status")
            return
        try:
            worker = self._start_ahead()
        except OperationError as error:
            then(f"the installed program cannot take over: {error}")
            return
        self._standby.drop()  # of the release that was installed before, perhaps
        self._replacement.begin(Candidate(worker, self._owner, seconds), then, trial)

    def tick(self) -> None:
        """Go on with what is due."""
        now = time.monotonic()
        self.log.tick()
        self.reaper.tick(self.worker if self.serves else None)
        if self.serves and self._replacement.tick(now):
            log.info("another worker takes the place of worker %d", self.worker.pid)
            self._until, self.phase = now + LEAVE_SECONDS, Phase.LEAVING
            self._owner.silenced()
            self.worker.channel.send({"do": "leave"})
        if self.phase in _LIVING and self.worker.has_ended(now):
            self._died(f"the worker {self.worker.describe_end()}", now)
            return
        match self.phase:
            case Phase.SERVING:
                if self._loads_ahead:
                    self._standby.tick(self._owner, now)
                if self.retry_seconds == 0 and not self._replacement.under_way:
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
                if self._replacement.loaded:
                    self._succeed()
                else:
                    self._died(self.why_replaced, now)
            case Phase.PAUSING if now >= self._until:
                self._start(now)
            case Phase.STARTING:
                self._go_on_starting(now)

    def close(self, patience: float = 1.0) -> None:
        """End the worker (see ``WorkerProcess.end``), and what was to follow it."""
        self._replacement.drop()
        if (standby := self._standby.drop()) is not None:
            standby.wait_gone(1.0)  # it has the mount's descriptor
        self._replacement.answer("the mount has ended")
        if self.phase not in (Phase.PAUSING, Phase.ENDED):
            self.worker.end(patience)

    # -- a worker's life

    def _begin_life(self, now: float) -> None:
        self._watchdog = Watchdog(self.worker, self._mount, now)
        self._standby.wanted_from(now, soon=self.restarts > 0)

    @property
    def _loads_ahead(self) -> bool:
        if not self._launcher.config.standby:
            return False
        safe = self._restart_policy.safe
        return self.serves and not safe and not self._replacement.under_way

    def _check_worker(self, now: float) -> None:
        assert self._watchdog is not None
        why = self._watchdog.check(now)
        if why is None:
            return
        log.error("the worker hangs: %s; it is replaced", why)
        self.why_replaced = f"the worker hung: {why}"
        self._until, self.phase = now + _STACKS_SECONDS, Phase.HUNG
        self._owner.silenced()
        # faulthandler writes its stacks into its log.
        self.worker.process.send_signal(STACKS_SIGNAL)

    def _kill(self, now: float) -> None:
        self.worker.kill()
        self._until, self.phase = now + _KILLED_SECONDS, Phase.ENDING

    def _died(self, why: str, now: float) -> None:
        self._mount.resend()  # for the kernel to show whether there is anything
        watchdog, self._watchdog = self._watchdog, None
        never = WorkerLife(None, False, True, self.worker.was_killed)
        life = never if watchdog is None else watchdog.life(now)
        self.last_death = Death(why, time.time())
        if self.worker.crashed:
            self._mount.mark_suspect()
        policy = self._restart_policy
        was_safe = policy.safe
        verdict = policy.died(life)
        self._leave_behind()
        self._replacement.drop()
        self._replacement.answer(f"{why}; another one takes its place: see monarchfs status")
        if verdict.follows is Follows.END:
            self.phase = Phase.ENDED
            self._owner.silenced()
            self._owner.deserted(why)
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
        elif life.killed:
            # By the user, perhaps, again and again.
            self.log.say(logging.ERROR, f"{why}: starting another one")
        else:
            log.error("%s: starting another one", why)
        self.restarts += 1
        self._until, self.phase = now + verdict.pause_seconds, Phase.PAUSING
        self._owner.silenced()  # only now: who waits is answered at once, with what stands here
        if not verdict.pause_seconds:
            self._start(now)

    def _leave_behind(self) -> None:
        self._owner.unwatch(self.worker.channel)
        self._owner.unwatch(self.worker.init)
        self.worker.channel.close()
        self.worker.init.close()
        self.reaper.add(self.worker)
        self._startup = None

    def _start(self, now: float) -> None:
        safe = self._restart_policy.safe
        standby = None if safe else self._standby.take()
        if standby is not None:
            self._begin(standby, waits=True)
            return
        self._standby.drop()
        try:
            worker = self._launcher.start(restarts=self.restarts, safe=safe)
        except OperationError as error:
            self._not_started(str(error), now)
            return
        self._begin(worker, waits=False)

    def _not_started(self, why: str, now: float) -> None:
        verdict = self._restart_policy.died(WorkerLife(None, False, True))
        self.last_death = Death(why, time.time())
        log.error("%s", why)
        if verdict.follows is Follows.END:
            self.phase = Phase.ENDED
            self._owner.deserted(why)
        else:
            self._until, self.phase = now + max(verdict.pause_seconds, 0.5), Phase.PAUSING

    def _begin(self, worker: WorkerProcess, *, waits: bool) -> None:
        """``waits``: it is loaded, or will be soon, and begins when it is told to."""
        if waits:
            worker.channel.send({"do": "begin", "restarts": self.restarts})
        self.worker = worker
        self.phase = Phase.STARTING
        self._owner.watch(worker.channel, self._on_message)
        self._startup = Startup(worker, self._mount, self._owner, self.reaper.all_quiet)

    def _go_on_starting(self, now: float) -> None:
        assert self._startup is not None
        self._startup.tick(now)
        if self._startup.failed is not None:
            self.why_replaced = f"the new worker {self._startup.failed}"
            self._startup = None
            self._kill(now)
        elif self._startup.serves:
            self.reaper.overtaken(hurried=self._startup.was_hurried)
            self._startup = None
            self.phase = Phase.SERVING
            self._begin_life(now)
            self.log.say(logging.INFO, f"worker {self.worker.pid} serves")
            self._replacement.answer(None)

    def _on_message(self) -> None:
        try:
            message = self.worker.channel.receive(0)
        except (TimeoutError, BlockingIOError):
            return
        except MalformedMessage:
            self._owner.silenced()  # it may have been the answer that somebody waits for
            return
        except OSError as broken:
            self.log.drop(str(broken.strerror))
            return
        match message:
            case None:
                # Whether it is dead the ticks will see; the channel has nothing more to say.
                self._owner.unwatch(self.worker.channel)
            case Ready() if self._startup is not None:
                self._startup.serves = True
                self._go_on_starting(time.monotonic())
            case StatusReport(number, report, dropped):
                if dropped:
                    self.log.drop("a part of its status", dropped)
                if self.serves:
                    self._owner.reported(number, report)
            case Failed(error):
                self.log.say(logging.ERROR, f"worker: {error}")
                self.worker.error = error
            case Back() | Unback():
                reply = self._mount.backing.answer(message)
                if not self.worker.channel.send(reply):
                    self._mount.backing.close(reply["ids"])

    # -- a worker that is replaced on purpose

    def _try_whole_worker(self, now: float) -> None:
        log.info("safe mode: trying a whole worker")
        seconds = self._restart_policy.retry_seconds
        self._retry_at = now + seconds  # where it cannot be loaded

        def tried(error: str | None) -> None:
            if error is not None:
                log.warning("no whole worker serves: %s; safe mode for %g s more", error, seconds)

        self.replace(tried, TRY_SECONDS, trial=True)

    def _succeed(self) -> None:
        """The old one has left."""
        worker = self._replacement.take()
        if self.worker.crashed:
            self._mount.mark_suspect()
        self._leave_behind()
        if self._replacement.trial:
            self._restart_policy.tried()
        else:
            self._restart_policy.replaced()
        self.restarts += 1
        self._watchdog = None
        self._begin(worker, waits=True)
