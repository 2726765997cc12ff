"""Workers that were left behind: killed, and dead as soon as the kernel allows it."""

from __future__ import annotations

from monarchfs.supervisor.launch import WorkerProcess
from monarchfs.supervisor.startup import Mounted


class Reaper:
    """Reaps dead workers now and then; one that cannot die holds nobody up. Nothing here waits.

    Changing: the workers that are not reaped yet; those among them that may still take requests
    from the kernel while another one serves.
    """

    def __init__(self, mounted: Mounted) -> None:
        self._mounted = mounted
        self._left: list[WorkerProcess] = []
        self._unquiet: list[WorkerProcess] = []

    def add(self, worker: WorkerProcess) -> None:
        """It was killed, or ended."""
        self._left.append(worker)

    def all_quiet(self) -> bool:
        """Whether none of them can take a request any more."""
        return all(worker.is_quiet() for worker in self._left)

    def overtaken(self, *, hurried: bool) -> None:
        """Another one serves; ``hurried``: before all of these were quiet."""
        self._unquiet = list(self._left) if hurried else []

    def tick(self, serving: WorkerProcess | None) -> None:
        """Reap those that ended. If one ended that still ran when its successor came, have the
        kernel repeat the requests it took, if there is a worker to answer them."""
        self._left[:] = [worker for worker in self._left if worker.process.poll() is None]
        unquiet = [worker for worker in self._unquiet if not worker.is_quiet()]
        if len(unquiet) < len(self._unquiet) and serving is not None:
            self._mounted.resend()
            if self._mounted.journal:
                serving.channel.send({"do": "again"})
        self._unquiet = unquiet

    @property
    def waits(self) -> bool:
        """Whether ``tick`` may soon have requests repeated."""
        return bool(self._unquiet)
