"""Logs of Darshan: what a job read, file by file, whether or not a mount was used.

Its modules see a read where it happens: POSIX and STDIO see the bytes of MPI-IO and HDF5, too. So
those two count only for files that the first two do not know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from monarchfs.system.bounded import Tell, bounded_talk
from monarchfs.types import OperationError

_VERSION = re.compile(rb"\d\.\d+\0")
"""How a log begins."""

_COMPLAINT = re.compile(rb"^Error: (.*)", re.MULTILINE)
"""What its library says on standard error."""

_SILENCE_SECONDS = 60.0
_A_MESSAGE = 8
"""Records: paths may be long."""

_REMEDY = "pip install 'darshan>=3.4'"


@dataclass(slots=True)
class FileReads:
    """All reads of a file. ``extent``: up to the last byte that was read. ``sized`` reads have a
    known size, and of these ``small`` ones are below 100 KB; ``sequential`` ones began behind the
    one before. ``first``: when, in seconds since 1970."""

    path: str
    opens: int = 0
    reads: int = 0
    bytes: int = 0
    extent: int = 0
    read_seconds: float = 0.0
    meta_seconds: float = 0.0
    sized: int = 0
    small: int = 0
    sequential: int = 0
    first: float = 0.0

    @property
    def once(self) -> int:
        """The bytes without those that were read again, at most."""
        return min(self.bytes, self.extent)

    @property
    def worth_copying(self) -> bool:
        """Whether a copy of all of it would read at most twice what the job did."""
        return 2 * self.once >= self.extent

    @property
    def seconds(self) -> float:
        return self.read_seconds + self.meta_seconds

    def add(self, other: FileReads) -> None:
        self.opens += other.opens
        self.reads += other.reads
        self.bytes += other.bytes
        self.read_seconds += other.read_seconds
        self.meta_seconds += other.meta_seconds
        self.sized += other.sized
        self.small += other.small
        self.sequential += other.sequential
        self.extent = max(self.extent, other.extent)
        self.first = min(self.first, other.first)


@dataclass(slots=True)
class JobReads:
    """What one or several logs of a job say. ``process_seconds``: how long the processes that read
    ran, added up. ``partial``: Darshan had no memory for some files."""

    commands: list[str] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0
    processes: int = 0
    readers: int = 0
    process_seconds: float = 0.0
    partial: bool = False
    files: dict[str, FileReads] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    mounts: dict[str, str] = field(default_factory=dict)


class _Module(NamedTuple):
    """``prefix`` of its counters, and those that count opens and reads."""

    name: str
    prefix: str
    opens: Sequence[str]
    reads: Sequence[str]


_MODULES = (
    _Module("POSIX", "POSIX", ("OPENS",), ("READS",)),
    _Module("STDIO", "STDIO", ("OPENS",), ("READS",)),
    _Module(
        "MPI-IO",
        "MPIIO",
        ("INDEP_OPENS", "COLL_OPENS"),
        ("INDEP_READS", "COLL_READS", "SPLIT_READS", "NB_READS"),
    ),
    _Module("H5D", "H5D", ("OPENS",), ("READS",)),
)
_LOWER = ("POSIX", "STDIO")
_SMALL = ("SIZE_READ_0_100", "SIZE_READ_100_1K", "SIZE_READ_1K_10K", "SIZE_READ_10K_100K")


def read_logs(paths: Sequence[str]) -> JobReads:
    """Raises OperationError for what is no log, and where pydarshan is missing; OSError."""
    for path in paths:
        with Path(path).open("rb") as stream:
            if not _VERSION.match(stream.read(8)):
                raise OperationError(f"{path}: not a log of Darshan")
    if find_spec("darshan") is None:
        raise OperationError(f"logs of Darshan need pydarshan: {_REMEDY}")
    job = JobReads()
    for path in paths:
        _read_log(job, path)
    return job


def _read_log(job: JobReads, path: str) -> None:
    """In a child: Darshan's library dies of some logs that were cut off."""
    known: set[str] = set()
    ranks: set[int] = set()

    def heard(records: list[list[Any]]) -> None:
        for layer, rank, written, *numbers in records:
            reads = FileReads(*numbers)
            if layer not in _LOWER and reads.path in known:
                continue
            if layer in _LOWER:
                known.add(reads.path)
            if written:
                job.written.add(reads.path)
            if reads.reads:
                ranks.add(rank)
                job.files.setdefault(reads.path, FileReads(reads.path, first=reads.first)).add(
                    reads
                )

    about = bounded_talk(
        lambda tell: _tell_log(path, tell),
        silence=_SILENCE_SECONDS,
        overdue=f"{path}: pydarshan cannot read this log; is it whole?",
        heard=heard,
    )
    seconds = about["seconds"]
    readers = about["processes"] if -1 in ranks else len(ranks)
    job.commands.append(about["command"])
    job.begun = min(job.begun or about["begun"], about["begun"])
    job.ended = max(job.ended, about["begun"] + seconds)
    job.processes += about["processes"]
    job.partial |= about["partial"]
    job.mounts |= about["mounts"]
    job.readers += readers
    job.process_seconds += readers * seconds


def _tell_log(path: str, tell: Tell) -> dict[str, Any]:
    """Tells the records of files; what the log says of the job. Raises OperationError."""
    said = os.memfd_create("stderr")
    os.dup2(said, 2)  # its library ends a log that is cut off early, and says so there alone
    try:
        from darshan.backend import cffi_backend as darshan

        log = darshan.log_open(path)
        if log["handle"] == darshan.ffi.NULL:
            raise ValueError("its library refuses it")
        about = darshan.log_get_job(log)
        begun = about["start_time_sec"] + about["start_time_nsec"] * 1e-9
        names = darshan.log_get_name_records(log)
        modules = darshan.log_get_modules(log)
        for module in _MODULES:
            if module.name in modules:
                records = _records(darshan, log, module, names, begun)
                while batch := list(islice(records, _A_MESSAGE)):
                    tell(batch)
        if complaint := _COMPLAINT.search(os.pread(said, 1 << 16, 0)):
            raise ValueError(complaint[1].decode(errors="replace"))
        return {
            "command": darshan.log_get_exe(log),
            "begun": begun,
            "seconds": float(about["run_time"]),
            "processes": int(about["nprocs"]),
            "partial": any(modules[name]["partial_flag"] for name in modules),
            "mounts": dict(darshan.log_get_mounts(log)),
        }
    except (ImportError, KeyError, RuntimeError, ValueError) as error:
        raise OperationError(f"{path}: pydarshan cannot read this log: {error}") from None


def _records(
    darshan: Any, log: Any, module: _Module, names: Mapping[int, str], begun: float
) -> Iterator[list[Any]]:
    """Of each file: module, rank (-1: all of them), whether it was written, and FileReads."""
    cut = len(module.prefix) + 1
    whole = [name[cut:] for name in darshan.counter_names(module.name)]
    parts = [name[cut:] for name in darshan.fcounter_names(module.name)]
    while (record := darshan.log_get_record(log, module.name, dtype="numpy")) is not None:
        counters = dict(zip(whole, record["counters"].tolist(), strict=True))
        counters |= zip(parts, record["fcounters"].tolist(), strict=True)
        name = names.get(record["id"], "")
        path = name.rpartition(":")[0] if module.name == "H5D" else name
        if path.startswith("/"):
            reads = _reads(path, counters, module, begun)
            written = counters.get("BYTES_WRITTEN", 0) > 0
            yield [module.name, int(record["rank"]), written, *astuple(reads)]


def _reads(path: str, counters: Mapping[str, float], module: _Module, begun: float) -> FileReads:
    """What is unknown is below 0 in the log."""

    def number(*names: str) -> int:
        return int(sum(max(0, counters.get(name, 0)) for name in names))

    size = number("BYTES_READ")
    reads = number(*module.reads)
    last = counters.get("MAX_BYTE_READ")
    return FileReads(
        path,
        number(*module.opens),
        reads,
        size,
        size if last is None else int(max(-1, last)) + 1,
        max(0.0, counters.get("F_READ_TIME", 0.0)),
        max(0.0, counters.get("F_META_TIME", 0.0)),
        reads if "SEQ_READS" in counters else 0,
        number(*_SMALL),
        number("SEQ_READS"),
        begun + max(0.0, counters.get("F_READ_START_TIMESTAMP", 0.0)),
    )
