"""Comparing the index's records of a tier's directory with the files that lie there.

Pure: the caller reads both, and repairs what is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarchfs.types import Replica, ReplicaState, TierFile

Row = tuple[bytes, int, Replica]
"""A record: the name of its file, the inode number it belongs to, and the replica."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A file that no record knows."""

    file: TierFile


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A file that no record knows, one of several of its name. A name stands for one version of a
    file, so all of them but one are wrong, and none can be trusted."""

    file: TierFile


@dataclass(frozen=True, slots=True)
class MissingFile:
    """A record whose file is not there."""

    ino: int
    replica: Replica


@dataclass(frozen=True, slots=True)
class WrongSize:
    """A record whose file has another size."""

    ino: int
    replica: Replica
    file: TierFile


@dataclass(frozen=True, slots=True)
class WrongChecksumName:
    """A file that has a record's name but is not its file: it has another checksum, or is complete
    where the record is of a part."""

    ino: int
    replica: Replica
    file: TierFile


@dataclass(frozen=True, slots=True)
class WrongBlocks:
    """A record whose file occupies ``allocated_bytes``, which is not what the record says."""

    ino: int
    replica: Replica
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class NotSynced:
    """A durable record of a file whose mode does not say that its data are synced: it may be a
    later one, of which a power cut took the data."""

    ino: int
    replica: Replica


Finding = Orphan | Ambiguous | MissingFile | WrongSize | WrongChecksumName | WrongBlocks | NotSynced


def compare(rows: Sequence[Row], files: Sequence[TierFile]) -> list[Finding]:
    """What is wrong with the complete replicas of one fan-out directory, by rising name.

    Both sequences must be sorted by name, ``files`` by checksum within a name; a name has one
    record at most. Records of partial replicas may be among ``rows``: no complete file is theirs.
    """
    findings: list[Finding] = []
    at = 0
    for name, ino, replica in rows:
        before = at
        while at < len(files) and files[at].name < name:
            at += 1
        _add_unknown(findings, files[before:at])
        own = None
        while at < len(files) and files[at].name == name:
            file = files[at]
            at += 1
            if replica.state is not ReplicaState.PARTIAL and file.checksum == replica.checksum:
                own = file
            else:
                findings.append(WrongChecksumName(ino, replica, file))
        if replica.state is not ReplicaState.PARTIAL:
            _add_known(findings, ino, replica, own)
            if own is not None and replica.durable and not own.synced:
                findings.append(NotSynced(ino, replica))
    _add_unknown(findings, files[at:])
    return findings


def compare_parts(rows: Sequence[Row], parts: Sequence[TierFile]) -> list[Finding]:
    """What is wrong with the partial replicas of a tier: its records in state PARTIAL beside the
    files in its parts directory, both sorted by name. Only Orphan, Missing, WrongSize and
    WrongBlocks come out."""
    findings: list[Finding] = []
    at = 0
    for name, ino, replica in rows:
        while at < len(parts) and parts[at].name < name:
            findings.append(Orphan(parts[at]))
            at += 1
        own = None
        if at < len(parts) and parts[at].name == name:
            own = parts[at]
            at += 1
        _add_known(findings, ino, replica, own)
    findings += map(Orphan, parts[at:])
    return findings


def _add_known(findings: list[Finding], ino: int, replica: Replica, own: TierFile | None) -> None:
    if own is None:
        findings.append(MissingFile(ino, replica))
    elif own.size != replica.size:
        findings.append(WrongSize(ino, replica, own))
    elif own.allocated_bytes != replica.allocated_bytes:
        findings.append(WrongBlocks(ino, replica, own.allocated_bytes))


def _add_unknown(findings: list[Finding], files: Sequence[TierFile]) -> None:
    """Of neighbouring files of a directory, among them all of each name."""
    for at, file in enumerate(files):
        twin = (at > 0 and files[at - 1].name == file.name) or (
            at + 1 < len(files) and files[at + 1].name == file.name
        )
        findings.append(Ambiguous(file) if twin else Orphan(file))
