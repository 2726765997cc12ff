"""One tier: what the index says of its files, what lies there, and how the two are made to agree.

What is put right is put right in an order that leaves something to be found by the next check, and
nothing to be believed, if this process ends half-way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from monarchfs.cache import tier_comparison as found
from monarchfs.cache.tier_comparison import Finding, Row
from monarchfs.fsck.report import FindingKind, FsckReport
from monarchfs.index import Index
from monarchfs.store.allocator import allocated
from monarchfs.store.errors import ReplicaLost
from monarchfs.store.tier import Tier
from monarchfs.types import ROOT_INO, Replica, ReplicaState, TierFile, TierTotals

FAN_OUTS = 256
_BATCH = 1024
_DEEPEST = 4096


class TierCheck:
    """Constant: its parts, what to do. Changing: counts of what was seen; ``gap_bytes`` of segments
    belong to no record."""

    def __init__(
        self, index: Index, tier: Tier, report: FsckReport, *, repair: bool, checksum: bool
    ) -> None:
        self._index = index
        self._tier = tier
        self._report = report
        self._repair = repair
        self._checksum = checksum
        self.checked_files = 0
        self.checked_bytes = 0
        self.gap_bytes = 0

    def run(self) -> None:
        """All of the tier. Raises OSError of the tier, IndexUnusable, IndexWriteError."""
        # What a crash interrupted first: no record may vouch for those files.
        self._end_journal()
        totals = self._index.replicas.tier_totals().get(self._tier.id, TierTotals())
        to_read = totals.allocated_bytes if self._checksum else 0
        partial_rows: list[Row] = []
        for fan_out in range(FAN_OUTS):
            rows = [row for row in self._rows(bytes([fan_out])) if not row[2].segment]
            partial_rows += [
                (name, ino, record._replace(present=b"", digests=b""))
                for name, ino, record in rows
                if record.state is ReplicaState.PARTIAL
            ]
            self._check_fan_out(rows, self._tier.files.complete(fan_out), to_read)
            if not to_read:
                self._report.progress(f"comparing {self._tier.path}", fan_out + 1, FAN_OUTS)
        parts = self._tier.files.parts()
        for finding in found.compare_parts(partial_rows, parts):
            self._handle_part(finding)
        for segment in self._index.segments.segments(self._tier.id):
            self._check_segment(segment, to_read)
        self._handle_unknown_segments()

    # -- the steps

    def _end_journal(self) -> None:
        entries = [name for tier, name in self._index.replicas.journal() if tier == self._tier.id]
        for name in entries:
            ino = self._index.replicas.owner(self._tier.id, name)
            recorded = ino is not None and self._index.replicas.replica(ino) is not None

            def end(name: bytes = name, recorded: bool = recorded) -> None:
                # What a record says ought to be there is compared next.
                if not recorded:
                    self._tier.files.discard(name)
                self._index.replicas.file_gone(self._tier.id, name)

            done = "the record stands" if recorded else "removed what there was of it"
            place, detail = self._place(name), "copying it was cut off"
            self._found(FindingKind.INTERRUPTED, place, detail, done, end)

    def _check_fan_out(self, rows: list[Row], files: list[TierFile], to_read: int) -> None:
        gone = set()
        orphans = []
        for finding in found.compare(rows, files):
            if isinstance(finding, found.Orphan):
                orphans.append(finding.file)
            else:
                self._handle(finding)
            if isinstance(finding, (found.MissingFile, found.WrongSize)):
                gone.add(finding.ino)
        self._handle_orphans(orphans)
        if self._checksum:
            for _name, ino, record in rows:
                if ino not in gone and record.state is not ReplicaState.PARTIAL:
                    self._verify(ino, record)
                    self._report.progress(f"reading {self._tier.path}", self.checked_bytes, to_read)

    def _check_segment(self, segment: int, to_read: int) -> None:
        """Its records: bytes that no record has are given back by the next mount."""
        try:
            data = self._tier.segments.data_ranges(segment)
        except ReplicaLost:
            data = []  # something else lies in its place
        align = self._tier.segments.align
        self.gap_bytes += sum(allocated(stop, align) - start for start, stop in data)
        for offset, ino in self._index.segments.segment_records(self._tier.id, segment):
            record = self._index.replicas.replica(ino)
            if record is None:
                continue
            end = offset + record.size
            if not any(start <= offset and end <= stop for start, stop in data):
                self._handle(found.MissingFile(ino, record))
                continue
            self.gap_bytes -= record.allocated_bytes
            if self._checksum:
                self._verify(ino, record)
                self._report.progress(f"reading {self._tier.path}", self.checked_bytes, to_read)

    def _handle_unknown_segments(self) -> None:
        known = self._index.segments.segments(self._tier.id)
        for segment in self._tier.segments.found():
            if segment in known:
                continue
            sound = rows = self._tier.segments.noted(segment)
            if self._repair or self._checksum:
                named = [(row, Replica.found(self._tier.id, row)) for row in rows]
                sound = [row for row, replica in named if self._reads_right(replica)]
            place = f"{self._tier.path}: segments/{segment:016x}"
            done = None
            if self._repair and sound:
                self._index.segments.begin_segments(self._tier.id, [segment])
                self._index.replicas.record_found_files(self._tier.id, sound)
                done = "recorded as found"
            elif self._repair:
                self._tier.segments.remove(segment)
                done = "removed"
            detail = f"no record knows it; its list has {len(rows)} copies"
            if len(sound) < len(rows):
                detail += f", {len(rows) - len(sound)} of which are not what it says"
            self._report.found(FindingKind.ORPHAN, place, detail, done)

    def _found(
        self, kind: FindingKind, what: str, detail: str, done: str, repair: Callable[[], object]
    ) -> None:
        """Report a finding, and repair it if that is to be done; ``done`` says how."""
        if self._repair:
            repair()
        self._report.found(kind, what, detail, done if self._repair else None)

    def _handle(self, finding: Finding) -> None:
        files = self._tier.files
        match finding:
            case found.Ambiguous(file=file) | found.WrongChecksumName(file=file):
                kind, detail = FindingKind.EXTRA_FILE, "not the copy that is recorded"
                if isinstance(finding, found.Ambiguous):
                    kind, detail = FindingKind.AMBIGUOUS, "one of several of this name"
                what, done = self._place(file.name, file.checksum), "removed"
                repair = partial(files.remove, file.name, file.checksum)
            case found.MissingFile(ino=ino, replica=record):
                kind, detail = FindingKind.MISSING, "its copy is not there"
                what, done = self._path(ino, record), "forgotten"
                repair = partial(self._forget, ino, record)
            case found.WrongSize(ino=ino, replica=record, file=file):
                kind = FindingKind.WRONG_SIZE
                detail = f"its copy has {file.size} bytes instead of {record.size}"
                what, done = self._path(ino, record), "removed"
                repair = partial(self._forget, ino, record)
            case found.WrongBlocks(ino=ino, replica=record, allocated_bytes=allocated):
                kind = FindingKind.WRONG_BLOCKS
                detail = f"its copy occupies {allocated} bytes, recorded {record.allocated_bytes}"
                what, done = self._path(ino, record), "recorded"
                right = record._replace(allocated_bytes=allocated)
                repair = partial(self._index.replicas.put_replica, ino, right)
            case found.NotSynced(ino=ino, replica=record):
                kind, detail = FindingKind.NOT_SYNCED, "its copy is not marked as synced"
                what, done = self._path(ino, record), "marked"
                repair = partial(self._mark_synced, [(record.name, record.checksum)])
            case found.Orphan(file=file):  # of a part; others are handled together
                kind, detail = FindingKind.ORPHAN_PART, "no record knows it"
                what, done = f"{self._tier.path}: parts/{file.name.hex()}", "removed"
                repair = partial(files.remove_part, file.name)
        self._found(kind, what, detail, done, repair)

    def _mark_synced(self, replicas: list[tuple[bytes, int]]) -> None:
        self._tier.sync()
        self._tier.files.mark_synced(replicas)

    def _handle_part(self, finding: Finding) -> None:
        if isinstance(finding, found.WrongBlocks):
            # The slim row has lost the map of what is there.
            record = self._index.replicas.replica(finding.ino)
            if record is None:
                return
            finding = found.WrongBlocks(finding.ino, record, finding.allocated_bytes)
        self._handle(finding)

    def _handle_orphans(self, files: list[TierFile]) -> None:
        """Files that no record knows are recorded, if their bytes can be believed: whether a reboot
        came before they were synced, nobody knows any more."""
        synced: list[TierFile] = []
        proven: list[TierFile] = []
        for file in files:
            doubtful = not (file.synced or self._tier.memory_backed)
            sound = True
            if self._checksum or (doubtful and self._repair):
                sound = self._reads_right(Replica.found(self._tier.id, file))
            place, detail = self._place(file.name, file.checksum), "no record knows it"
            if sound:
                kept = proven if doubtful else synced
                repair = partial(kept.append, file)
                self._found(FindingKind.ORPHAN, place, detail, "recorded as found", repair)
            else:
                detail += ", and its bytes are not what its name says"
                remove = partial(self._tier.files.remove, file.name, file.checksum)
                self._found(FindingKind.CORRUPT, place, detail, "removed", remove)
        if proven:
            self._mark_synced([(file.name, file.checksum) for file in proven])
            synced += [file._replace(synced=True) for file in proven]
        if synced:
            self._index.replicas.record_found_files(self._tier.id, synced)

    def _verify(self, ino: int, record: Replica) -> None:
        if self._reads_right(record):
            return
        what, detail = self._path(ino, record), "its copy has other bytes than it had"
        self._found(FindingKind.CORRUPT, what, detail, "removed", lambda: self._forget(ino, record))

    def _reads_right(self, replica: Replica) -> bool:
        self.checked_files += 1
        try:
            return self._tier.verify_complete(replica, self._count)
        except OSError:  # lost, or the disk does not give it back: as good as gone
            return False

    def _count(self, count: int) -> None:
        self.checked_bytes += count

    # -- what the steps need

    def _rows(self, prefix: bytes) -> Iterator[Row]:
        after = b""
        while names := self._index.replicas.names(self._tier.id, prefix, after, _BATCH):
            for name, ino in names:
                record = self._index.replicas.replica(ino)
                if record is not None:
                    yield name, ino, record
            after = names[-1][0]

    def _forget(self, ino: int, record: Replica) -> None:
        """The record and its file: in this order, so that no record is ever without its file."""
        self._index.replicas.drop_replica(ino)
        if record.segment:
            return  # the next mount gives its room back
        if record.state is ReplicaState.PARTIAL:
            self._tier.files.remove_part(record.name)
        else:
            self._tier.files.remove(record.name, record.checksum)
        self._index.replicas.file_gone(self._tier.id, record.name)

    def _path(self, ino: int, record: Replica) -> str:
        """The source file's, relative to the source; where it has none, the copy's."""
        if (path := source_path(self._index, ino)) is not None:
            return path
        if record.segment:
            return f"{self._tier.path}: segments/{record.segment:016x} at {record.offset}"
        return self._place(record.name, record.checksum)

    def _place(self, name: bytes, checksum: int | None = None) -> str:
        suffix = "" if checksum is None else f".{checksum:016x}"
        return f"{self._tier.path}: {name[:1].hex()}/{name.hex()}{suffix}"


def source_path(index: Index, ino: int) -> str | None:
    """Where a file was seen in the source (os.fsdecode)."""
    names: list[bytes] = []
    while ino != ROOT_INO:
        node = index.nodes.node(ino)
        if node is None or len(names) == _DEEPEST:
            return None
        names.append(node.name)
        ino = node.parent
    return os.fsdecode(b"/".join(reversed(names))) or None


def forget_lost(index: Index, report: FsckReport) -> None:
    """Forget the records of replicas that a reboot may have taken. Their files are then orphans,
    and treated as such. Raises IndexWriteError."""
    while lost := index.replicas.lost_in_reboot(_BATCH):
        for ino, record in lost:
            what = source_path(index, ino) or record.name.hex()
            index.replicas.drop_replica(ino)
            if not record.segment:
                index.replicas.file_gone(record.tier, record.name)
            detail = "its copy was not synced before the machine went down"
            report.found(FindingKind.LOST_IN_REBOOT, what, detail, "forgotten")
