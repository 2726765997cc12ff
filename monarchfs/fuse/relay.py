"""Reads that Python does not see: what the threads of the C part (_relay.c) answer themselves.

Without the C part all reads come to Python.
"""

from __future__ import annotations

from types import ModuleType

from monarchfs.fs.files import FileHandle
from monarchfs.metrics import Metrics


class Relay:
    """Constant: the C part. Changing: ``_counted``, what the metrics know of."""

    def __init__(self, hooks: ModuleType | None, metrics: Metrics) -> None:
        self._hooks = hooks
        self._metrics = metrics
        self._counted = (0, 0, 0, 0, (0,) * (len(metrics.requests.read_local.counts)))

    def opened(self, number: int, handle: FileHandle) -> None:
        """Reads of this handle are answered from its replica from now on, if it has one. (What is
        known already is not changed.)"""
        if self._hooks is not None and (replica := handle.replica) is not None and not replica.bad:
            self._hooks.relay(number, replica.fd, replica.size)

    def closed(self, number: int) -> None:
        """To be called before the handle is released."""
        if self._hooks is not None:
            self._hooks.end_relay(number)

    def forget(self, fd: int) -> None:
        """The replica behind this descriptor is not to be read any more: Python decides."""
        if self._hooks is not None:
            self._hooks.forget_relayed(fd)

    def count(self) -> None:
        """Bring the metrics up to date."""
        if self._hooks is None:
            return
        _reads, relayed, _queued, total_ns, took = now = self._hooks.relay_counts()
        _reads, relayed_before, _queued, total_before, took_before = self._counted
        self._counted = now
        self._metrics.relayed_bytes += relayed - relayed_before
        durations = self._metrics.requests.read_local
        durations.total_ns += total_ns - total_before
        for bucket in range(len(durations.counts)):
            durations.counts[bucket] += took[bucket] - took_before[bucket]
