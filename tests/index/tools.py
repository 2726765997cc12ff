"""What the tests of the index share."""

import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monarchfs.cache.index import Index
from monarchfs.types import (
    ROOT_INO,
    FileType,
    Listing,
    Node,
    Replica,
    ReplicaState,
    SourceStat,
    SourceVersion,
    TierFile,
)
from tests.support.indexing import record_found

NOW = 1_700_000_000_000_000_000
ROOT_SOURCE_INO = 2
SEGMENT = 0x8000_0000_0000_0001
FILE = stat.S_IFREG | 0o640
DIRECTORY = stat.S_IFDIR | 0o755


def source_stat(ino: int, *, mode: int = FILE, version: int = 0, device: int = 0) -> SourceStat:
    return SourceStat(
        device, ino, 1000 + version, NOW + version, NOW + version, NOW, mode, 1, 7, 8, 0, 2, 4096
    )


def name_of(number: int) -> bytes:
    return SourceVersion(0, number, 100, NOW, NOW).replica_name


def replica(
    number: int, tier: int = 0, allocated: int = 4096, state: ReplicaState = ReplicaState.RESIDENT
) -> Replica:
    """The ``number``-th replica: its name differs from those of the others."""
    whole = Replica(tier, state, name_of(number), 100, allocated, False, NOW, 2**64 - 1 - number)
    if state is not ReplicaState.PARTIAL:
        return whole
    return whole._replace(
        checksum=0, chunk_bytes=65536, present=b"\1\0\1" * 40, digests=bytes(range(8)) * 60
    )


def shared(number: int, offset: int, segment: int = SEGMENT) -> Replica:
    """One that shares its file with others."""
    return replica(number)._replace(segment=segment, offset=offset)


def tier_file(number: int, *, synced: bool = True, allocated: int = 4096) -> TierFile:
    return TierFile(name_of(number), 2**64 - 1 - number, 100, allocated, synced)


def open_index(directory: Path, map_bytes: int = 1 << 30, *, trust: bool = False) -> Index:
    return Index.open(
        str(directory), source_id="lustre:/data", map_bytes=map_bytes, trust_after_kill=trust
    )


def found(index: Index, name: bytes, ino: int, version: int = 0, parent: int = ROOT_INO) -> Node:
    return record_found(index, parent, name, source_stat(ino, version=version), b"", NOW + version)


def rooted(directory: Path) -> Index:
    index = open_index(directory)
    index.nodes.record_root(source_stat(ROOT_SOURCE_INO, mode=DIRECTORY), NOW)
    return index


def add_listing(index: Index, parent: int, *names: tuple[bytes, int]) -> None:
    sequence = index.listings.begin_listing()
    index.listings.add_entries(
        parent, sequence, [(n, FileType.REGULAR, i, 0) for n, i in names], NOW
    )
    finish_listing(index, parent, sequence)


def finish_listing(index: Index, parent: int, sequence: int, *, lists_all: bool = True) -> None:
    for _ in index.listings.finish_listing(parent, sequence, Listing(NOW, NOW, NOW, lists_all)):
        pass


def names_in(index: Index, parent: int) -> list[bytes]:
    return [dirent.name for dirent, _ in index.listings.entries(parent, 2, 1000)]


@contextmanager
def scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="monarchfs-index-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
