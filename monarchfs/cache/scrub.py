"""Reading replicas again in the background, to find bytes that a disk has damaged."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable

import trio

from monarchfs.cache.accounts import Accounts
from monarchfs.cache.store.tier import Tier
from monarchfs.system.threads import run_sync
from monarchfs.types import Replica, ReplicaLost, ReplicaState

log = logging.getLogger(__name__)

PAUSE_SECONDS = 60.0
"""Between two rounds over everything."""


class Stopped(Exception):
    """The mount ends."""


class Scrub:
    """Compares all complete replicas with their checksums, for ever, at a limited rate.

    Constant: its parts, ``rate`` in bytes a second. Changing: ``checked_bytes``.
    """

    def __init__(self, accounts: Accounts, rate: int) -> None:
        self.rate = rate
        self._accounts = accounts
        self._index = accounts.index
        self._tiers = accounts.all_tiers
        self._metrics = accounts.metrics
        self._stopping = False

    async def run(self) -> None:
        try:
            while True:
                for tier in self._tiers.by_id.values():
                    await self.round(tier)
                await trio.sleep(PAUSE_SECONDS)
        finally:
            self._stopping = True

    async def round(self, tier: Tier) -> None:
        """Each replica of a tier once, in the order of their names."""
        after = b""
        while rows := self._index.replicas.names(tier.id, b"", after, 64):
            after = rows[-1][0]
            for _name, ino in rows:
                record = self._index.replicas.replica(ino)
                if record is None or record.state is ReplicaState.PARTIAL:
                    continue
                if record != self._accounts.bad.get(ino):
                    await self._check(tier, ino, record)

    async def _check(self, tier: Tier, ino: int, record: Replica) -> None:
        if not self._tiers.readable(tier.id):
            await trio.sleep(PAUSE_SECONDS)
            return
        try:
            sound = await run_sync(
                tier.verify_complete,
                record,
                self._pacer(),
                abandon_on_cancel=True,
            )
        except ReplicaLost:
            sound = False
        except Stopped:
            return
        except OSError as exc:
            self._tiers.failed(tier, "scrubbing", exc, reading=True)
            if exc.errno != errno.EIO:
                return
            sound = False  # perhaps only a part of the disk is bad: this one is not tried again
        self._metrics.scrubbed_bytes += record.size
        # It may have gone, or have moved, meanwhile.
        if not sound and self._index.replicas.replica(ino) == record:
            log.warning("tier %s: replica of inode %d is corrupt: dropped", tier.path, ino)
            self._accounts.corrupt(ino)

    def _pacer(self) -> Callable[[int], None]:
        """A function that limits the rate by sleeping, in the thread that reads."""

        def paced(size: int) -> None:
            if self._stopping:
                raise Stopped
            time.sleep(size / self.rate)

        return paced
