"""Workers that were left behind: killed, and dead as soon as the kernel allows it."""

from __future__ import annotations

from monarchfs.supervisor.launch import WorkerProcess
from monarchfs.supervisor.mounted import Mounted
from monarchfs.supervisor.takeover import OrphanedWorker

DeadWorker = WorkerProcess | OrphanedWorker
"""One that was killed or ended, of this supervisor or of one that died."""


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
