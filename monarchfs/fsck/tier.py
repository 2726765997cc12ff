"""One tier: what the index says of its files, what lies there, and how the two are made to agree.

What is put right is put right in an order that leaves something to be found by the next check, and
nothing to be believed, if this process ends half-way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from monarchfs.cache.tier_comparison import (
    Ambiguous,
    Finding,
    MissingFile,
    NotSynced,
    Orphan,
    Row,
    WrongBlocks,
    WrongChecksumName,
    WrongSize,
    compare,
    compare_parts,
)
from monarchfs.fsck.report import FindingKind, FsckReport
from monarchfs.index import Index
from monarchfs.store.errors import ReplicaLost
from monarchfs.store.tier import Tier
from monarchfs.types import ROOT_INO, Replica, ReplicaState, TierFile, TierTotals

FAN_OUTS = 256
_BATCH = 1024
_DEEPEST = 4096


class TierCheck:
    """Constant: its parts, what to do. Changing: counts of what was seen."""

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

    def run(self) -> None:
        """All of the tier. Raises OSError of the tier, IndexUnusable, IndexWriteError."""
        # What a crash interrupted first: no record may vouch for those files.
        self._end_journal()
        totals = self._index.tier_totals().get(self._tier.id, TierTotals())
        to_read = totals.allocated_bytes if self._checksum else 0
        partial: list[Row] = []
        for fan_out in range(FAN_OUTS):
            rows = [row for row in self._rows(bytes([fan_out])) if not row[2].segment]
            partial += [
                (name, ino, record._replace(present=b"", digests=b""))
                for name, ino, record in rows
                if record.state is ReplicaState.PARTIAL
            ]
            self._check_fan_out(rows, self._tier.files.complete(fan_out), to_read)
            if not to_read:
                self._report.progress(f"comparing {self._tier.path}", fan_out + 1, FAN_OUTS)
        parts = self._tier.files.parts()
        for finding in compare_parts(partial, parts):
            self._handle_part(finding)
        for segment in self._index.segments(self._tier.id):
            self._check_segment(segment, to_read)
        self._handle_unknown_segments()

    # -- the steps

    def _end_journal(self) -> None:
        entries = [name for tier, name in self._index.journal() if tier == self._tier.id]
        for name in entries:
            done = None
            if self._repair:
                ino = self._index.owner(self._tier.id, name)
                if ino is None or self._index.replica(ino) is None:
                    self._tier.files.discard(name)
                    done = "removed what there was of it"
                else:
                    # Its record says what ought to be there; the comparison does the rest.
                    done = "the record stands"
                self._index.file_gone(self._tier.id, name)
            self._report.found(
                FindingKind.INTERRUPTED, self._place(name), "copying it was cut off", done
            )

    def _check_fan_out(self, rows: list[Row], files: list[TierFile], to_read: int) -> None:
        gone = set()
        orphans = []
        for finding in compare(rows, files):
            if isinstance(finding, Orphan):
                orphans.append(finding.file)
            else:
                self._handle(finding)
            if isinstance(finding, (MissingFile, WrongSize)):
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
        for offset, ino in self._index.segment_records(self._tier.id, segment):
            record = self._index.replica(ino)
            if record is None:
                continue
            end = offset + record.size
            if not any(start <= offset and end <= stop for start, stop in data):
                self._handle(MissingFile(ino, record))
            elif self._checksum:
                self._verify(ino, record)
                self._report.progress(f"reading {self._tier.path}", self.checked_bytes, to_read)

    def _handle_unknown_segments(self) -> None:
        known = self._index.segments(self._tier.id)
        for segment in self._tier.segments.found():
            if segment in known:
                continue
            sound = rows = self._tier.segments.noted(segment)
            if self._repair or self._checksum:
                found = [(row, Replica.found(self._tier.id, row)) for row in rows]
                sound = [row for row, replica in found if self._reads_right(replica)]
            place = f"{self._tier.path}: segments/{segment:016x}"
            done = None
            if self._repair and sound:
                self._index.begin_segments(self._tier.id, [segment])
                self._index.record_found_files(self._tier.id, sound)
                done = "recorded as found"
            elif self._repair:
                self._tier.segments.remove(segment)
                done = "removed"
            detail = f"no record knows it; its list has {len(rows)} copies"
            if len(sound) < len(rows):
                detail += f", {len(rows) - len(sound)} of which are not what it says"
            self._report.found(FindingKind.ORPHAN, place, detail, done)

    def _handle(self, finding: Finding) -> None:
        done = None
        match finding:
            case Ambiguous(file=file):
                if self._repair:
                    self._tier.files.remove(file.name, file.checksum)
                    done = "removed"
                place = self._place(file.name, file.checksum)
                self._report.found(
                    FindingKind.AMBIGUOUS, place, "one of several of this name", done
                )
            case MissingFile(ino=ino, replica=record):
                what = self._path(ino, record)
                if self._repair:
                    self._forget(ino, record)
                    done = "forgotten"
                self._report.found(FindingKind.MISSING, what, "its copy is not there", done)
            case WrongSize(ino=ino, replica=record, file=file):
                what = self._path(ino, record)
                if self._repair:
                    self._forget(ino, record)
                    done = "removed"
                detail = f"its copy has {file.size} bytes instead of {record.size}"
                self._report.found(FindingKind.WRONG_SIZE, what, detail, done)
            case WrongChecksumName(ino=ino, file=file):
                if self._repair:
                    self._tier.files.remove(file.name, file.checksum)
                    done = "removed"
                place = self._place(file.name, file.checksum)
                self._report.found(
                    FindingKind.EXTRA_FILE, place, "not the copy that is recorded", done
                )
            case WrongBlocks(ino=ino, replica=record, allocated_bytes=allocated):
                if self._repair:
                    self._index.put_replica(ino, record._replace(allocated_bytes=allocated))
                    done = "recorded"
                detail = f"its copy occupies {allocated} bytes, recorded {record.allocated_bytes}"
                self._report.found(FindingKind.WRONG_BLOCKS, self._path(ino, record), detail, done)
            case NotSynced(ino=ino, replica=record):
                if self._repair:
                    self._tier.sync()
                    self._tier.files.mark_synced([(record.name, record.checksum)])
                    done = "marked"
                detail = "its copy is not marked as synced"
                self._report.found(FindingKind.NOT_SYNCED, self._path(ino, record), detail, done)

    def _handle_part(self, finding: Finding) -> None:
        if isinstance(finding, Orphan):
            done = None
            if self._repair:
                self._tier.files.remove_part(finding.file.name)
                done = "removed"
            place = f"{self._tier.path}: parts/{finding.file.name.hex()}"
            self._report.found(FindingKind.ORPHAN_PART, place, "no record knows it", done)
        elif isinstance(finding, WrongBlocks):
            # The slim row has lost the map of what is there.
            record = self._index.replica(finding.ino)
            if record is not None:
                self._handle(WrongBlocks(finding.ino, record, finding.allocated_bytes))
        else:
            self._handle(finding)

    def _handle_orphans(self, files: list[TierFile]) -> None:
        """Files that no record knows are recorded, if their bytes can be believed: whether a reboot
        came before they were synced, nobody knows any more."""
        found: list[TierFile] = []
        proven: list[TierFile] = []
        for file in files:
            doubtful = not (file.synced or self._tier.memory_backed)
            sound = True
            if self._checksum or (doubtful and self._repair):
                sound = self._reads_right(Replica.found(self._tier.id, file))
            place = self._place(file.name, file.checksum)
            if not sound:
                done = None
                if self._repair:
                    self._tier.files.remove(file.name, file.checksum)
                    done = "removed"
                detail = "no record knows it, and its bytes are not what its name says"
                self._report.found(FindingKind.CORRUPT, place, detail, done)
                continue
            (proven if doubtful else found).append(file)
            done = "recorded as found" if self._repair else None
            self._report.found(FindingKind.ORPHAN, place, "no record knows it", done)
        if self._repair and proven:
            self._tier.sync()
            self._tier.files.mark_synced([(file.name, file.checksum) for file in proven])
            found += [file._replace(synced=True) for file in proven]
        if self._repair and found:
            self._index.record_found_files(self._tier.id, found)

    def _verify(self, ino: int, record: Replica) -> None:
        if self._reads_right(record):
            return
        what, done = self._path(ino, record), None
        if self._repair:
            self._forget(ino, record)
            done = "removed"
        self._report.found(FindingKind.CORRUPT, what, "its copy has other bytes than it had", done)

    def _reads_right(self, replica: Replica) -> bool:
        self.checked_files += 1
        try:
            return self._tier.verify_complete(replica, self._count)
        except ReplicaLost:
            return False
        except OSError:
            return False  # the disk does not give it back: as good as gone

    def _count(self, count: int) -> None:
        self.checked_bytes += count

    # -- what the steps need

    def _rows(self, prefix: bytes) -> Iterator[Row]:
        after = b""
        while names := self._index.names(self._tier.id, prefix, after, _BATCH):
            for name, ino in names:
                record = self._index.replica(ino)
                if record is not None:
                    yield name, ino, record
            after = names[-1][0]

    def _forget(self, ino: int, record: Replica) -> None:
        """The record and its file: in this order, so that no record is ever without its file."""
        self._index.drop_replica(ino)
        if record.segment:
            return  # the next mount gives its room back
        if record.state is ReplicaState.PARTIAL:
            self._tier.files.remove_part(record.name)
        else:
            self._tier.files.remove(record.name, record.checksum)
        self._index.file_gone(self._tier.id, record.name)

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
        node = index.node(ino)
        if node is None or len(names) == _DEEPEST:
            return None
        names.append(node.name)
        ino = node.parent
    return os.fsdecode(b"/".join(reversed(names))) or None


def forget_lost(index: Index, report: FsckReport) -> None:
    """Forget the records of replicas that a reboot may have taken. Their files are then orphans,
    and treated as such. Raises IndexWriteError."""
    while lost := index.lost_in_reboot(_BATCH):
        for ino, record in lost:
            what = source_path(index, ino) or record.name.hex()
            index.drop_replica(ino)
            if not record.segment:
                index.file_gone(record.tier, record.name)
            detail = "its copy was not synced before the machine went down"
            report.found(FindingKind.LOST_IN_REBOOT, what, detail, "forgotten")
