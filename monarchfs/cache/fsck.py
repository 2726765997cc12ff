"""``python -I -m monarchfs.cache.fsck TASK``: checks a cache that no mount uses, the index first,
then each tier that it knows. ``monarchfs fsck`` starts it, and holds the state directory's lock.

It is a process of its own, and runs as the user whose cache it is, because a damaged index can end
whoever opens it by a signal, and because root must not touch what a user could have put there.

TASK is a JSON object with the arguments of `CacheCheck`, the state directory being a descriptor
that is inherited. On standard output comes what `FsckReport` describes, and at the end either
``{"report": {...}}`` or ``{"failed": "one line"}``.

What is put right is put right in an order that leaves something to be found by the next check, and
nothing to be believed, if this process ends half-way.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from monarchfs.cache import tier_comparison as comparison
from monarchfs.cache.index import Index, LastClose, last_close, problems, remove_aside, set_aside
from monarchfs.cache.store.allocator import allocated
from monarchfs.cache.store.files import FAN_OUTS
from monarchfs.cache.store.segments import within
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.tier_comparison import Finding, Row
from monarchfs.system.limits import explained
from monarchfs.types import (
    ROOT_INO,
    IndexUnusable,
    MonarchError,
    Replica,
    ReplicaLost,
    ReplicaState,
    TierFile,
    TierTotals,
)

MOST_LINES = 100
"""Findings of one kind that are reported one by one; the others are only counted."""

_PROGRESS_SECONDS = 0.2
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ASIDE = re.compile(r"index\.bad-[0-9]+")
_BATCH = 1024
_DEEPEST = 4096


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="monarchfs: %(message)s")
    signal.signal(signal.SIGTERM, _end)
    report = FsckReport(sys.stdout)
    try:
        report.send({"report": CacheCheck(report, **json.loads(arguments[0])).run()})
    except BrokenPipeError:
        _fall_silent()
        return 1
    except (MonarchError, OSError) as error:
        failed = explained(error) if isinstance(error, OSError) else str(error)
        report.send({"failed": failed})
        return 1
    return 0


def _end(_number: int, _frame: FrameType | None) -> None:
    """Ends in the orderly way: the index is closed."""
    _fall_silent()
    sys.exit(1)


def _fall_silent() -> None:
    """Nobody listens any more. What is not written yet would fail, or wait, at the very end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


class FindingKind(Enum):
    """What can be found; the value is its name in ``--json``."""

    INDEX_MISSING = "index_missing"
    INDEX_DAMAGED = "index_damaged"
    INDEX_FOREIGN = "index_foreign"
    INDEX_SET_ASIDE = "index_set_aside"
    TIER_GONE = "tier_gone"
    TIER_FAILED = "tier_failed"
    INTERRUPTED = "interrupted"
    LOST_IN_REBOOT = "lost_in_reboot"
    ORPHAN = "orphan"
    AMBIGUOUS = "ambiguous"
    ORPHAN_PART = "orphan_part"
    EXTRA_FILE = "extra_file"
    MISSING = "missing"
    WRONG_SIZE = "wrong_size"
    CORRUPT = "corrupt"
    WRONG_BLOCKS = "wrong_blocks"
    NOT_SYNCED = "not_synced"


NOTES = frozenset(
    {
        FindingKind.INDEX_SET_ASIDE,
        FindingKind.LOST_IN_REBOOT,
        FindingKind.WRONG_BLOCKS,
        FindingKind.NOT_SYNCED,
    }
)
"""What is worth a line, but happens where all is well: a file system may give a file blocks, or
take them back, after it was written; a reboot takes what was not synced."""


class FsckReport:
    """Changing: the counts. ``output`` gets one JSON object a line:

    ``{"finding": {"kind", "what", "detail", "done"}}``, at most MOST_LINES of a kind; ``what`` is
    the source file's path or, where no record knows one, a place in the tier;
    ``{"progress": {"text", "done", "of"}}`` now and then.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._counts: Counter[FindingKind] = Counter()
        self._repaired: Counter[FindingKind] = Counter()
        self._next_progress = 0.0

    def found(self, kind: FindingKind, what: str, detail: str, done: str | None = None) -> None:
        """One finding; ``done`` says how it was put right, if it was."""
        self._counts[kind] += 1
        if done is not None:
            self._repaired[kind] += 1
        if self._counts[kind] <= MOST_LINES:
            finding = {"kind": kind.value, "what": what, "detail": detail, "done": done}
            self.send({"finding": finding})

    def progress(self, text: str, done: int, of: int) -> None:
        """How far it is, in whatever unit ``of`` has."""
        now = time.monotonic()
        if now >= self._next_progress:
            self._next_progress = now + _PROGRESS_SECONDS
            self.send({"progress": {"text": text, "done": done, "of": of}})

    def summary(self) -> dict[str, Any]:
        """The counts: of each kind, of what was repaired, and whether nothing wrong is left."""
        return {
            "findings": {
                kind.value: self._counts[kind] for kind in FindingKind if self._counts[kind]
            },
            "repaired": self._repaired.total(),
            "clean": all(
                self._counts[kind] == self._repaired[kind]
                for kind in FindingKind
                if kind not in NOTES
            ),
        }

    def send(self, message: Mapping[str, Any]) -> None:
        """One message. Raises BrokenPipeError when nobody listens any more."""
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()


class CacheCheck:
    """Constant: what to check. Changing: what was seen."""

    def __init__(
        self,
        report: FsckReport,
        *,
        state: int,
        dataset_id: str,
        directories: Mapping[str, str],
        tiers: Sequence[str],
        repair: bool,
        checksum: bool,
    ) -> None:
        """``state`` is the open state directory, locked by who started this; ``directories`` are
        the names of the dataset's directories by their tiers' paths; ``tiers`` are the paths of
        those of the last mount, for where the index does not know."""
        self._report = report
        self._directory = f"/proc/self/fd/{state}"
        self._dataset_id, self._directories = dataset_id, directories
        self._tier_paths = tiers
        self._repair, self._checksum = repair, checksum
        self._tiers: list[dict[str, Any]] = []
        self._checked: Counter[str] = Counter(checked_files=0, checked_bytes=0)

    def run(self) -> dict[str, Any]:
        """The keys of ``--json`` but ``state_dir``. Raises OSError of the state directory,
        IndexWriteError, IndexUnusable."""
        self._clear_set_aside()
        found, index = self._open_index()
        if index is None:
            for path in self._tier_paths:
                self._only_count(path)
        else:
            clean = False
            try:
                self._check_tiers(index)
                clean = True
            finally:
                index.close(clean=clean)
        return {
            "index": found,
            "tiers": self._tiers,
            **self._checked,
            **self._report.summary(),
        }

    # -- the index

    def _open_index(self) -> tuple[str, Index | None]:
        """How it was found, and the open index; None if it cannot be used, nor is replaced."""
        self._report.progress("checking the index", 0, 1)
        if last_close(self._directory) is LastClose.NEW:
            return "missing", self._replaced(FindingKind.INDEX_MISSING, "it is not there")
        wrong = problems(self._directory)
        if wrong:
            return "damaged", self._replaced(FindingKind.INDEX_DAMAGED, "; ".join(wrong))
        try:
            return "clean", self._open()
        except IndexUnusable as error:
            return "foreign", self._replaced(FindingKind.INDEX_FOREIGN, str(error))

    def _replaced(self, kind: FindingKind, detail: str) -> Index | None:
        if not self._repair:
            self._report.found(kind, "index", detail)
            return None
        aside = set_aside(self._directory)
        index = self._open()
        for path in self._tier_paths:
            index.meta.tier_number(path)
        done = "made a new one" + (f", kept it as {os.path.basename(aside)}" if aside else "")
        self._report.found(kind, "index", detail, done)
        return index

    def _open(self) -> Index:
        return Index.open(self._directory, source_id=self._dataset_id, trust_after_kill=True)

    def _clear_set_aside(self) -> None:
        """Indexes that were set aside earlier: nobody needs them but who wants to know why."""
        for name in sorted(os.listdir(self._directory)):
            if _ASIDE.fullmatch(name):
                removed = self._repair and remove_aside(self._directory, name)
                done = "removed" if removed else None
                self._report.found(FindingKind.INDEX_SET_ASIDE, name, "set aside earlier", done)

    # -- the tiers

    def _check_tiers(self, index: Index) -> None:
        if self._repair:
            index.replicas.begin_boot(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip())
            forget_lost(index, self._report)
        for number, path in sorted(index.meta.tier_paths().items()):
            seen = self._check_tier(index, number, path)
            totals = index.replicas.tier_totals().get(number, TierTotals())
            self._tiers.append(
                {
                    "path": path,
                    **seen,
                    "files": totals.resident + totals.partial + totals.found,
                    **totals._asdict(),
                }
            )

    def _check_tier(self, index: Index, number: int, path: str) -> dict[str, Any]:
        """Whether the tier is there, and what is in it beside replicas."""
        try:
            tier = self._open_tier(path, number)
        except OSError as error:
            # One that an earlier mount had and that holds nothing is missed by nobody.
            if number in index.replicas.tier_totals():
                detail = f"cannot be opened, what is recorded of it stays: {error.strerror}"
                self._report.found(FindingKind.TIER_GONE, path, detail)
            self._left(index, number)
            return {"present": False}
        check = TierCheck(index, tier, self._report, repair=self._repair, checksum=self._checksum)
        try:
            check.run()
            tier.segments.lists.count()
            tier.segments.trees.count()
            tier.segments.trees.measure()
        except OSError as error:
            self._report.found(FindingKind.TIER_FAILED, path, f"{error.strerror}: left as it is")
            self._left(index, number)
        finally:
            overhead = tier.overhead_bytes
            tier.close()
            self._checked["checked_files"] += check.checked_files
            self._checked["checked_bytes"] += check.checked_bytes
        return {"present": True, "overhead_bytes": overhead, "gap_bytes": check.gap_bytes}

    def _left(self, index: Index, number: int) -> None:
        """The next mount has to look for what a reboot left in the tier: its records are gone."""
        if self._repair:
            index.meta.suspect(number)

    def _only_count(self, path: str) -> None:
        """What lies in a tier of which nothing is known."""
        files = allocated = 0
        present = True
        try:
            tier = self._open_tier(path, 0)
            try:
                for fan_out in range(FAN_OUTS):
                    here = tier.files.complete(fan_out)
                    files += len(here)
                    allocated += sum(file.allocated_bytes for file in here)
                for segment in tier.segments.found():
                    files += len(tier.segments.noted(segment))
                    allocated += tier.segments.blocks(segment)
            finally:
                tier.close()
        except OSError:
            present = False
        self._tiers.append(
            {"path": path, "present": present, "files": files, "allocated_bytes": allocated}
        )

    def _open_tier(self, path: str, number: int) -> Tier:
        """Raises OSError, also for a directory that is not ours alone, or not known."""
        if path not in self._directories:
            raise FileNotFoundError(0, "the state directory does not say which directory", path)
        name = os.path.join(path, self._directories[path])
        directory = os.open(name, _DIRECTORY)
        try:
            st = os.fstat(directory)
            if st.st_uid != os.geteuid() or st.st_mode & 0o022:
                raise PermissionError(0, "it is open to others", name)
            return Tier(directory, path, number)
        finally:
            os.close(directory)


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
            partial_rows += [row for row in rows if row[2].state is ReplicaState.PARTIAL]
            self._check_fan_out(rows, self._tier.files.complete(fan_out), to_read)
            if not to_read:
                self._report.progress(f"comparing {self._tier.path}", fan_out + 1, FAN_OUTS)
        parts = self._tier.files.parts()
        for finding in comparison.compare_parts(partial_rows, parts):
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
        for finding in comparison.compare(rows, files):
            if isinstance(finding, comparison.Orphan):
                orphans.append(finding.file)
            else:
                self._handle(finding)
            if isinstance(finding, (comparison.MissingFile, comparison.WrongSize)):
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
            if not within(data, offset, record.size):
                self._handle(comparison.MissingFile(ino, record))
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
            case comparison.Ambiguous(file=file) | comparison.WrongChecksumName(file=file):
                kind, detail = FindingKind.EXTRA_FILE, "not the copy that is recorded"
                if isinstance(finding, comparison.Ambiguous):
                    kind, detail = FindingKind.AMBIGUOUS, "one of several of this name"
                what, done = self._place(file.name, file.checksum), "removed"
                repair = partial(files.remove, file.name, file.checksum)
            case comparison.MissingFile(ino=ino, replica=record):
                kind, detail = FindingKind.MISSING, "its copy is not there"
                what, done = self._path(ino, record), "forgotten"
                repair = partial(self._forget, ino, record)
            case comparison.WrongSize(ino=ino, replica=record, file=file):
                kind = FindingKind.WRONG_SIZE
                detail = f"its copy has {file.size} bytes instead of {record.size}"
                what, done = self._path(ino, record), "removed"
                repair = partial(self._forget, ino, record)
            case comparison.WrongBlocks(ino=ino, replica=record, allocated_bytes=allocated):
                kind = FindingKind.WRONG_BLOCKS
                detail = f"its copy occupies {allocated} bytes, recorded {record.allocated_bytes}"
                what, done = self._path(ino, record), "recorded"
                right = record._replace(allocated_bytes=allocated)
                repair = partial(self._index.replicas.put_replica, ino, right)
            case comparison.NotSynced(ino=ino, replica=record):
                kind, detail = FindingKind.NOT_SYNCED, "its copy is not marked as synced"
                what, done = self._path(ino, record), "marked"
                repair = partial(self._mark_synced, [(record.name, record.checksum)])
                if self._repair and not self._reads_right(record):
                    done, repair = "removed", partial(self._forget, ino, record)
            case comparison.Orphan(file=file):  # of a part; others are handled together
                kind, detail = FindingKind.ORPHAN_PART, "no record knows it"
                what, done = f"{self._tier.path}: parts/{file.name.hex()}", "removed"
                repair = partial(files.remove_part, file.name)
        self._found(kind, what, detail, done, repair)

    def _mark_synced(self, replicas: list[tuple[bytes, int]]) -> None:
        self._tier.sync()
        self._tier.files.mark_synced(replicas)

    def _handle_part(self, finding: Finding) -> None:
        if isinstance(finding, comparison.WrongBlocks):
            # With the map of what is there.
            record = self._index.replicas.part(finding.ino)
            if record is None:
                return
            finding = comparison.WrongBlocks(finding.ino, record, finding.allocated_bytes)
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
        self._index.replicas.drop_replicas([ino])
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
            index.replicas.drop_replicas([ino])
            if not record.segment:
                index.replicas.file_gone(record.tier, record.name)
            detail = "its copy was not synced before the machine went down"
            report.found(FindingKind.LOST_IN_REBOOT, what, detail, "forgotten")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
