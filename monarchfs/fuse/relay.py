"""What the threads of the C part (_relay.c) may answer: opens and reads of resident files.

Python tells them which files those are, and hears what they opened. In safe mode all requests
come to Python.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Collection, Sequence

import trio

from monarchfs.core.misses import Misses
from monarchfs.core.nonresident import NonresidentReads
from monarchfs.fs.files import Files
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.session import hooks
from monarchfs.metadata.freshness import OPEN_ATTRIBUTES_SECONDS
from monarchfs.metadata.tree import Entry
from monarchfs.metrics import Histogram, Metrics
from monarchfs.types import FreshnessMode, Lane, Node, Replica, ReplicaState

MOST_TIERS = 64
"""As in _resident.h; what further tiers hold is read by Python."""

MOST_OPEN_FILES = 4096
"""So many replicas the threads keep open, or a quarter of the descriptors that the process may
have, whatever is less."""

CATCH_UP_SECONDS = 0.25
"""How late policies hear of what was opened, at most; before they choose they are told."""

WALK_BATCH, WALK_SECONDS = 64, 0.01
"""So many replicas are looked up at once, about a millisecond; and then none for so long."""

LONG_NS = 1_000_000_000
"""A request that has been waiting for so long is Python's from then on."""

MOST_LEFT = 256
"""Where so many requests wait in Python, it gets no more opens than it must."""


class Relay:
    """See ``cache.readers.Readers``.

    Constant: ``free_opens``, whether the kernel is told not to say what it opens; ``direct``,
    whether its page cache is passed by; ``mode``, when the source is asked again. Changing: the
    tiers' numbers in the C part.
    """

    def __init__(
        self,
        *,
        free_opens: bool,
        direct: bool = False,
        mode: FreshnessMode = FreshnessMode.IMMUTABLE,
    ) -> None:
        self.free_opens = free_opens
        self.direct = direct
        self.mode = mode
        self.nonresident = NonresidentReads(hooks)
        self._tiers: dict[int, int] = {}
        self._files: Files | None = None
        self._opens_here = True
        self.misses: Misses | None = None
        self._interrupts: Interrupts | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait in the C part for bytes of the source."""
        return hooks.waiting_leave_older(0, 0)

    @property
    def waits(self) -> bool:
        """Whether any does, that has not been waiting for long."""
        return hooks.waiting_any_since(time.monotonic_ns() - LONG_NS)

    def begin(
        self,
        files: Files,
        *,
        lasting_ns: int,
        tells: bool,
        opens_here: bool = True,
        misses: Misses | None = None,
        interrupts: Interrupts,
    ) -> None:
        """Those who need the relay to be made come now: ``misses`` where threads open files of the
        source, ``interrupts`` knows the requests that wait in Python. Opens are good for at most
        ``lasting_ns``; ``tells``: policies want to hear of them; not ``opens_here``: Python answers
        them, because it matters how, but those of what lies in a segment. Once; raises OSError."""
        self._files, self.misses = files, misses
        self._interrupts = interrupts
        self._opens_here = opens_here
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = MOST_OPEN_FILES if most < 0 else max(1, min(MOST_OPEN_FILES, most // 4))
        hooks.resident_start(count, os.geteuid(), lasting_ns, self.free_opens, tells)
        hooks.answer_opens(opens_here, self.direct)

    def offer(self, ino: int, *, seen: bool = False) -> bool:
        """Have the threads answer for ``ino`` if it is resident; whether they do. ``seen``: it
        counts as opened. About 10 us."""
        files = self._files
        return files is not None and self._offer_recorded(
            files, ino, files.cache.index.replicas.replica(ino), seen
        )

    def _offer_recorded(
        self,
        files: Files,
        ino: int,
        record: Replica | None,
        seen: bool = False,
        *,
        opens_too: bool = False,
    ) -> bool:
        """``opens_too``: only if opens need not be asked about now."""
        if record is None or record.state is not ReplicaState.RESIDENT:
            return False
        node = files.cache.index.nodes.node(ino)
        return node is not None and self._offer(files, node, record, seen, opens_too)

    def _offer(
        self, files: Files, node: Node, record: Replica, seen: bool, opens_too: bool
    ) -> bool:
        tier = self._tiers.get(record.tier)
        # What is outdated may be read from the source as it is, by some.
        if tier is None or node.outdated or record == files.cache.accounts.bad.get(node.ino):
            return False
        replica = (tier, record.name, record.checksum, record.size)
        opens_until = files.racy_opens.opens_until(node)
        if opens_too and opens_until <= time.time_ns():
            return False
        place = (record.segment, record.offset)
        return hooks.resident_put(node.ino, *replica, opens_until, seen, *place)

    def opens(self, ino: int) -> bool:
        """``offer``, for an open: whether the threads may answer it."""
        files = self._files
        if files is None:
            return False
        record = files.cache.index.replicas.replica(ino)
        if not (self._opens_here or (record and record.segment) or hooks.inode_decided(ino)):
            return False
        return self._offer_recorded(files, ino, record, opens_too=True)

    def misses_open(self, ino: int) -> bool:
        """Whether the threads open and read it in the source, as of now."""
        files = self._files
        if files is None or self.misses is None:
            return False
        node = files.cache.index.nodes.node(ino)
        return node is not None and self.misses.offer(node)

    def found(self, node: Node) -> None:
        """A name was looked up, and the source asked if it was time: it may be opened next."""
        files = self._files
        if self.mode is FreshnessMode.TTL and files is not None and hooks.resident_has(node.ino):
            hooks.resident_renew(node.ino, files.racy_opens.opens_until(node))
        elif self.misses is not None:
            self.misses.offer(node)

    def asked(self, parent: int, name: bytes, entry: Entry) -> None:
        """The source was asked about the name: ``found``. Where it is asked each time, the threads
        do that from now on, for as long as it says the same."""
        node = entry.node
        self.found(node)
        if (
            self.mode is FreshnessMode.OPEN
            and self.misses is not None
            and entry.attr_timeout >= OPEN_ATTRIBUTES_SECONDS  # its timestamps are not racy
            and (node.stat.is_regular or node.stat.is_directory)
            and not node.stat.device
            and self.misses.enter_directory(parent) is not None
        ):
            hooks.names_put(parent, name, 0.0, True, node)

    def name_known(self, parent: int, name: bytes, entry: Entry) -> None:
        """The threads answer those who look it up, for as long as the kernel may keep the answer.
        Names of directories, whose attributes change, are left out."""
        node, seconds, _ = entry
        if self.misses is not None and seconds > 0 and not node.stat.is_directory:
            hooks.names_put(parent, name, seconds, False, node)

    def known(self, parent: int, name: bytes, entry: Entry) -> None:
        """``name_known`` and ``found``."""
        self.name_known(parent, name, entry)
        self.found(entry.node)

    # -- as Readers

    invalidate = staticmethod(hooks.resident_stop)
    try_remove = staticmethod(hooks.resident_retire)
    reading = staticmethod(hooks.resident_reading)
    use = staticmethod(hooks.resident_use)
    unuse = staticmethod(hooks.resident_unuse)
    used = staticmethod(hooks.resident_used)
    seen = staticmethod(hooks.resident_seen)

    def stored(self, replicas: Sequence[tuple[Node, Replica]]) -> None:
        files = self._files
        for node, replica in replicas:
            # Whoever has it open was counted then.
            if files is None or not self._offer(
                files, node, replica, self.used(node.ino), opens_too=False
            ):
                self.invalidate(node.ino)
        if self.misses is not None:
            self.misses.forget([node.ino for node, _replica in replicas])

    def expire(self, ino: int) -> None:
        hooks.resident_expire(ino)
        if self.misses is not None:
            self.misses.forget([ino])

    def exclude(self, ino: int, *, excluded: bool) -> bool:
        return self.misses is not None and self.misses.exclude(ino, excluded=excluded)

    def serve(self, tier_id: int, dir_fd: int | None) -> None:
        number = self._tiers.setdefault(tier_id, len(self._tiers))
        if number < MOST_TIERS:
            hooks.resident_tier(number, -1 if dir_fd is None else dir_fd)
        else:
            del self._tiers[tier_id]

    def catch_up(self) -> None:
        files = self._files
        if files is None:
            return
        while inos := hooks.resident_opened():
            for ino in inos:
                files.opened_by_threads(ino)

    # -- tasks

    async def run(self) -> None:
        """Tell policies what was opened, and take over reads of a source that hangs, and what a
        worker that had been killed let go of since, for ever."""
        while True:
            self.catch_up()
            hooks.take_again()  # nothing without a journal; microseconds
            self._leave_long()
            await trio.sleep(CATCH_UP_SECONDS)

    def _leave_long(self) -> None:
        """Give what takes long to Python, which knows what to do about it. Opens that wait for a
        thread may go on waiting in C, where they take a hundredth of the memory."""
        waiting = 0 if self._interrupts is None else self._interrupts.waiting
        most = max(0, MOST_LEFT - waiting)
        hooks.waiting_leave_older(time.monotonic_ns() - LONG_NS, most)

    async def walk(self) -> None:
        """Offer what is resident already, as long as there is room."""
        if self._files is None:
            return
        for count, (ino, record) in enumerate(self._files.cache.index.replicas.all(), 1):
            if record.state is ReplicaState.RESIDENT and not hooks.resident_has(ino):
                self.offer(ino)
            if hooks.resident_full():
                return
            if count % WALK_BATCH == 0:
                await trio.sleep(WALK_SECONDS)

    def open_inodes(self) -> Collection[int]:
        return [ino for _number, ino, _unique, _backing_id in hooks.table_list()]


def count_threads(metrics: Metrics) -> list[tuple[Lane, str, int, int, list[int]]]:
    """Bring the metrics up to date with what the threads have done (_counts.h). Returns their calls
    of the source since the last call, for ``Source.count_elsewhere``."""
    more, took = hooks.counts_take()
    requests = metrics.requests
    metrics.relayed_bytes += more["answered_bytes"]
    metrics.source_opens += more["untold_opens"]
    metrics.local_opens += more["resident_opens"]
    metrics.local_file_bytes += more["resident_bytes"]
    metrics.passthrough_opens += more["backed_opens"]
    metrics.thread_wait_ns += took["open_source"][0] + took["read_source"][0]
    metrics.source_wait_ns += more["source_ns"]
    metrics.memory_wait_ns += more["memory_ns"]
    metrics.tier_wait_ns += more["tier_ns"]
    metrics.peer_wait_ns += more["peer_ns"]
    metrics.copy_wait_ns += more["copy_ns"]
    _add(requests.lookup_local, *took["lookup"])
    _add(requests.lookup_source, *took["lookup_source"])
    _add(requests.open_local, *took["open_local"])
    _add(requests.read_local, *took["read_local"])
    _add(requests.open_source, *took["open_source"])
    _add(requests.read_source, *took["read_source"])
    bounds = len(requests.read_source.counts)
    return [
        (lane, function, size, took[name][0], took[name][1][:bounds])
        for lane, function, name, size in (
            (Lane.DEMAND, "read", "source", more["source_bytes"]),
            (Lane.BACKGROUND, "read", "ahead", more["ahead_bytes"]),
            (Lane.DEMAND, "stat", "stat", 0),
        )
    ]


def _add(durations: Histogram, total_ns: int, counts: list[int]) -> None:
    durations.total_ns += total_ns
    for bucket in range(len(durations.counts)):
        durations.counts[bucket] += counts[bucket]
