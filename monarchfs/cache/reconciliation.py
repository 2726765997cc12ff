"""Comparing a tier's files with the index's records, while the mount serves.

Done where the records may be wrong: a new index, a reboot, a tier whose directory is another one
than before. Until it is done the tier takes nothing, because files that are not counted could make
it overflow. What is recorded is served meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from monarchfs.cache import tier_comparison as found
from monarchfs.cache.index.index import Index
from monarchfs.cache.index.meta import stock
from monarchfs.cache.placement.events import Action, Loaded, PlacementEvent
from monarchfs.cache.readers import Readers
from monarchfs.cache.removals import Removals
from monarchfs.cache.segments import SegmentRecords
from monarchfs.cache.store.files import FAN_OUTS
from monarchfs.cache.store.segments import within
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.tier_comparison import Finding, Row
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.cache.tiers import Outage, Tiers
from monarchfs.metrics import Metrics
from monarchfs.system.listeners import Listeners
from monarchfs.types import (
    IndexWriteError,
    Replica,
    ReplicaLost,
    ReplicaState,
    TierFile,
    TierTotals,
)

log = logging.getLogger(__name__)

BATCH = 256
"""Records without a checkpoint: some milliseconds."""

QUIET_SECONDS = 0.05
"""Between two looks whether the copies into a tier have ended."""
SAMPLED = 8


class Reconciliation:
    """Constant: its parts. Changing: ``running``, the tiers that are being reconciled; ``lost``, by
    tier, the records that turned out to have no file meanwhile; ``_failed``, the tiers that could
    not be."""

    def __init__(
        self,
        index: Index,
        tiers: Tiers,
        handle: Callable[[PlacementEvent], list[Action]],
        metrics: Metrics,
        threads: TierThreads,
        nursery: trio.Nursery,
        segments: SegmentRecords,
        removals: Removals,
        readers: Readers,
        on_done: Listeners[[]],
    ) -> None:
        """``on_done`` is called when a tier was reconciled, or could not be."""
        self._index = index
        self._tiers = tiers
        self._handle = handle
        self._metrics = metrics
        self._threads = threads
        self._nursery = nursery
        self._segments = segments
        self._removals = removals
        self._readers = readers
        self._on_done = on_done
        self._dropping = trio.Lock()
        self.running: set[int] = set()
        self._failed: set[int] = set()
        self.lost: Counter[int] = Counter()
        self._found: Counter[int] = Counter()
        self._removed: Counter[int] = Counter()

    def recover(self) -> None:
        """End what a crash interrupted: the files of copies and removals that were under way.

        Blocks for the disk; there are as many as were under way. At the start of a mount.
        """
        for tier_id, name in self._index.replicas.journal():
            tier = self._tiers.by_id.get(tier_id)
            if tier is None:
                continue
            try:
                if not self._kept_part(tier, name):
                    tier.files.discard(name)
                self._index.replicas.file_gone(tier_id, name)
            except OSError as exc:
                self._tiers.failed(tier, "removing what a crash left", exc)
            except IndexWriteError as exc:
                log.warning("the journal keeps an entry: %s", exc)

    def _kept_part(self, tier: Tier, name: bytes) -> bool:
        """Whether the file is a part whose progress was recorded; its blocks are counted anew."""
        ino = self._index.replicas.owner(tier.id, name)
        record = None if ino is None else self._index.replicas.part(ino)
        if ino is None or record is None or record.state is not ReplicaState.PARTIAL:
            return False
        part = next((part for part in tier.files.parts() if part.name == name), None)
        if part is None:
            self._index.replicas.drop_replicas([ino])
            return False
        self._index.replicas.put_replica(ino, record._replace(allocated_bytes=part.allocated_bytes))
        return True

    def needed(self, tier: Tier, *, rebooted: bool) -> bool:
        """Whether the records of a tier may be wrong. Blocks for the disk, no longer than for an
        empty tier. Raises OSError of the tier, IndexWriteError."""
        right = not rebooted and self._index.meta.get(stock(tier.id)) == _right(tier)
        if right and not self._was_cleaned(tier):
            return False
        known = self._index.replicas.tier_totals().get(tier.id, TierTotals())
        if any(known) or tier.files.parts() or tier.segments.found():
            return True
        if any(tier.files.complete(n) for n in range(FAN_OUTS)):
            return True
        self._index.meta.put(stock(tier.id), _right(tier))
        return False

    def _was_cleaned(self, tier: Tier) -> bool:
        """Whether something removed what the tier held (what cleans a node after a job, say).

        Looks at a few, which stand for all: names are hashes. Raises OSError of the tier.
        """
        for _name, ino in self._index.replicas.names(tier.id, b"", b"", SAMPLED):
            record = self._index.replicas.replica(ino)
            if record is None:
                continue
            try:
                if record.state is ReplicaState.PARTIAL:
                    fd = tier.files.open_part(record.name, record.size)
                else:
                    fd = tier.open_complete(record)
            except ReplicaLost as exc:
                log.debug("tier %s: what it held is not there: %s", tier.path, exc)
                return True
            os.close(fd)
        return False

    def begin_tier(self, tier: Tier) -> None:
        """Reconcile the tier in the background. Until that is done its records are not to be
        trusted, also by the next mount."""
        self._tiers.begin_outage(tier.id, Outage.RECONCILIATION, "what it holds is to be looked at")
        try:
            self._index.meta.suspect(tier.id)
        except IndexWriteError as exc:
            log.warning("tier %s is not marked as suspect: %s", tier.path, exc)
        if tier.id not in self.running:
            self.running.add(tier.id)
            self._nursery.start_soon(self._run, tier)

    def retry(self, tier: Tier) -> None:
        """It works again: reconcile it if that failed."""
        if tier.id in self._failed:
            self.begin_tier(tier)

    async def _run(self, tier: Tier) -> None:
        directory = -1
        try:
            while directory != tier.dir_fd:  # else another one has taken its place meanwhile
                directory = tier.dir_fd
                self._failed.discard(tier.id)
                try:
                    await self._reconcile(tier, directory)
                    await self.settle(tier)
                except (OSError, IndexWriteError) as exc:
                    # It stays out of service: what it holds is not known.
                    self._failed.add(tier.id)
                    reason = f"what it holds could not be looked at: {exc}"
                    self._tiers.begin_outage(tier.id, Outage.RECONCILIATION, reason)
                    log.warning("tier %s: %s", tier.path, exc)
        finally:
            self.running.discard(tier.id)
            self._on_done()

    async def settle(self, tier: Tier) -> None:
        """Give back room in segments that a crash left without records. Raises nothing."""
        try:
            await self._segments.settle(tier)
        except OSError as exc:
            self._tiers.failed(tier, "giving back what a crash left", exc)
        except IndexWriteError as exc:
            log.warning("tier %s: the next mount looks at its segments: %s", tier.path, exc)

    async def _reconcile(self, tier: Tier, directory: int) -> None:
        """Put the records of a tier right, by this directory. Raises OSError of the tier,
        IndexWriteError."""
        reason = "what it holds is being looked at"
        self._tiers.begin_outage(tier.id, Outage.RECONCILIATION, reason)
        # Copies into a directory whose place this one took were given up.
        while not self._tiers.quiet(tier.id):  # noqa: ASYNC110
            await trio.sleep(QUIET_SECONDS)
        await self._drop_lost()
        partial: list[Row] = []
        for fan_out in range(FAN_OUTS):
            files = await self._threads.run(tier.files.complete, fan_out)
            rows = await self._rows(tier, bytes([fan_out]))
            partial += [row for row in rows if row[2].state is ReplicaState.PARTIAL]
            await self._mend(tier, found.compare(rows, files))
            await trio.lowlevel.checkpoint()
        findings = found.compare_parts(partial, await self._threads.run(tier.files.parts))
        for finding in findings:
            if isinstance(finding, found.Orphan):
                await self._threads.run(tier.files.remove_part, finding.file.name)
        await self._mend(tier, [f for f in findings if not isinstance(f, found.Orphan)])
        await self._look_at_segments(tier)
        if directory != tier.dir_fd:
            return
        self.load(tier)
        self._index.meta.put(stock(tier.id), _right(tier))
        self._tiers.end_outage(tier.id, Outage.RECONCILIATION)
        self._log_findings(tier)

    def _log_findings(self, tier: Tier) -> None:
        """One line, however many files."""
        lost, found = self.lost.pop(tier.id, 0), self._found.pop(tier.id, 0)
        removed = self._removed.pop(tier.id, 0)
        parts = [
            *([f"{lost} copies are not there any more"] if lost else ()),
            *([f"{found} are there of which no record knew"] if found else ()),
            *([f"{removed} were removed because they cannot be trusted"] if removed else ()),
        ]
        if parts:
            log.warning("tier %s was looked at: %s", tier.path, "; ".join(parts))

    async def _drop_lost(self) -> None:
        """Forget what a reboot took: replicas whose data were never synced."""
        # This drops the records of all tiers: no other tier is counted before.
        async with self._dropping:
            while lost := self._index.replicas.lost_in_reboot(BATCH):
                for ino, record in lost:
                    await self._drop(ino, record)
                self._metrics.replicas_lost += len(lost)
                self.lost.update(record.tier for _, record in lost)
                await trio.lowlevel.checkpoint()

    async def _drop(self, ino: int, record: Replica) -> None:
        now = self._index.replicas.replica(ino)
        if now is None:
            self._index.replicas.drop_replicas([ino])
        elif (now.tier, now.name) == (record.tier, record.name):
            return  # copied anew meanwhile
        tier = self._tiers.by_id.get(record.tier)
        if record.segment:
            return  # a gap from now on
        if tier is not None:
            try:
                await self._threads.run(tier.files.discard, record.name)
            except OSError as exc:
                # The journal keeps it for the next mount. This may be another tier.
                self._tiers.failed(tier, "removing what a reboot took", exc)
                return
        self._index.replicas.file_gone(record.tier, record.name)

    async def _rows(self, tier: Tier, prefix: bytes) -> list[Row]:
        """The records of files of a fan-out directory."""
        rows: list[Row] = []
        after = b""
        while names := self._index.replicas.names(tier.id, prefix, after, BATCH):
            records = self._index.replicas.replicas_of([ino for _, ino in names])
            for name, ino in names:
                record = records.get(ino)
                if record is not None and not record.segment:
                    rows.append((name, ino, record))
            after = names[-1][0]
            await trio.lowlevel.checkpoint()
        return rows

    async def _mend(self, tier: Tier, findings: list[Finding]) -> None:
        journal = {name for tier_id, name in self._index.replicas.journal() if tier_id == tier.id}
        orphans: list[TierFile] = []
        for finding in findings:
            match finding:
                case found.Orphan(file=file):
                    if file.name not in journal:
                        orphans.append(file)
                case (
                    found.MissingFile(ino=ino, replica=replica)
                    | found.WrongSize(ino=ino, replica=replica)
                    | found.NotSynced(ino=ino, replica=replica)
                ):
                    now = self._index.replicas.replica(ino)
                    if now is None or (now.tier, now.name) != (tier.id, replica.name):
                        continue  # a reader found out first, and may have copied it elsewhere
                    self._forget_lost(tier, ino)
                    await self._threads.run(tier.files.discard, replica.name)
                    self._index.replicas.file_gone(tier.id, replica.name)
                case found.WrongChecksumName(file=file) | found.Ambiguous(file=file):
                    self._removed[tier.id] += 1
                    await self._threads.run(tier.files.remove, file.name, file.checksum)
                case found.WrongBlocks(ino=ino, allocated_bytes=allocated):
                    if (record := self._index.replicas.part(ino)) is not None:
                        self._index.replicas.put_replica(
                            ino, record._replace(allocated_bytes=allocated)
                        )
        await self._adopt(tier, orphans)

    def _forget_lost(self, tier: Tier, ino: int) -> None:
        """Nobody has read it: ``Tier.open_complete`` finds what is lost, and threads that were told
        of it do not read the tier yet."""
        self._metrics.replicas_lost += 1
        self.lost[tier.id] += 1
        self._index.replicas.drop_replicas([ino])
        self._readers.invalidate(ino)

    async def _adopt(self, tier: Tier, orphans: list[TierFile]) -> None:
        """Count complete files that no record knows: whoever opens their version has them."""
        proven: list[TierFile] = []
        for file in orphans:
            if file.synced or tier.memory_backed:
                proven.append(file)
                continue
            # Without a record nobody knows whether a reboot came before its data reached the disk.
            self._removed[tier.id] += 1
            await self._threads.run(tier.files.remove, file.name, file.checksum)
        await self._record_found(tier, proven)

    async def _record_found(self, tier: Tier, files: Sequence[TierFile]) -> None:
        for at in range(0, len(files), BATCH):
            inos = self._index.replicas.record_found_files(tier.id, files[at : at + BATCH])
            self._found[tier.id] += len(inos)
            await trio.lowlevel.checkpoint()

    async def _look_at_segments(self, tier: Tier) -> None:
        """Forget records whose bytes are not there; take over segments that are not known."""
        known = self._index.segments.segments(tier.id)
        for segment in known:
            # In this order: what is recorded has its bytes.
            records = self._index.segments.segment_records(tier.id, segment)
            data = await self._threads.run(_data_ranges, tier, segment)
            for at in range(0, len(records), BATCH):
                offsets = {ino: offset for offset, ino in records[at : at + BATCH]}
                for ino, record in self._index.replicas.replicas_of(list(offsets)).items():
                    still = (record.segment, record.offset) == (segment, offsets[ino])
                    if still and not within(data, record.offset, record.size):
                        self._forget_lost(tier, ino)
                await trio.lowlevel.checkpoint()
        for segment in await self._threads.run(tier.segments.found):
            if segment not in known:
                await self._adopt_segment(tier, segment)

    async def _adopt_segment(self, tier: Tier, segment: int) -> None:
        """Count what a segment's list says lies in it, and does."""
        sound, rows = await self._threads.run(_sound, tier, segment)
        self._removed[tier.id] += rows - len(sound)
        if not sound:
            await self._threads.run(tier.segments.remove, segment)
            return
        self._index.segments.begin_segments(tier.id, [segment])
        await self._record_found(tier, sound)

    def load(self, tier: Tier) -> None:
        """Tell placement what the tier holds, by the records and what counts without one."""
        totals = self._index.replicas.tier_totals().get(tier.id, TierTotals())
        files = totals.resident + totals.partial + totals.found
        others = self._removals.counted(tier.id)
        size = totals.allocated_bytes + sum(record.allocated_bytes for record in others)
        self._handle(Loaded(tier.id, files + len(others), size))


def _data_ranges(tier: Tier, segment: int) -> list[tuple[int, int]]:
    """Where a segment has data; nowhere, where something else lies in its place. For a thread."""
    try:
        return tier.segments.data_ranges(segment)
    except ReplicaLost as exc:
        log.debug("tier %s: %s", tier.path, exc)
        return []


def _sound(tier: Tier, segment: int) -> tuple[list[TierFile], int]:
    """Those rows of a segment's list whose bytes have their checksum; how many rows it has. For a
    thread."""
    rows = tier.segments.noted(segment)
    sound = []
    for row in rows:
        try:
            if tier.segments.verify(segment, row.offset, row.size, row.checksum):
                sound.append(row)
        except ReplicaLost as exc:
            log.debug("tier %s: %s", tier.path, exc)
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            # The disk does not give this one back: the others may be sound.
            log.warning("tier %s: %s", tier.path, exc)
    return sound, len(rows)


def _right(tier: Tier) -> bytes:
    """The mark of right records. It names the directory: another owner's has another name."""
    return b"right " + os.fsencode(os.path.basename(tier.directory or ""))
