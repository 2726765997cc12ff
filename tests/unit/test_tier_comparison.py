"""What the index says beside what lies in a tier: the merge against a look-up of each name."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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
from monarchfs.types import Replica, ReplicaState, TierFile


def replica(name: bytes, **other: Any) -> Replica:
    one = Replica(1, ReplicaState.RESIDENT, name, 10, 4096, True, 0, 7)
    return one._replace(**other)


def file(name: bytes, **other: Any) -> TierFile:
    return TierFile(name, 7, 10, 4096, True)._replace(**other)


def test_each_kind() -> None:
    rows = [(name, 20 + n, replica(name)) for n, name in enumerate((b"b", b"c", b"d", b"e", b"f"))]
    files = [
        file(b"a"),
        file(b"c", size=9, allocated_bytes=0),
        file(b"d", checksum=6),
        file(b"d"),
        file(b"e", allocated_bytes=8192),
        file(b"f", synced=False),
        file(b"g", checksum=1),
        file(b"g", checksum=2),
    ]
    assert compare(rows, files) == [
        Orphan(files[0]),
        MissingFile(20, rows[0][2]),
        WrongSize(21, rows[1][2], files[1]),
        WrongChecksumName(22, rows[2][2], files[2]),
        WrongBlocks(23, rows[3][2], 8192),
        NotSynced(24, rows[4][2]),
        Ambiguous(files[6]),
        Ambiguous(files[7]),
    ]


def test_parts() -> None:
    part = replica(b"b", state=ReplicaState.PARTIAL, checksum=0)
    own = file(b"b", checksum=0, synced=False)
    assert compare_parts([(b"b", 20, part)], [own]) == []
    stray = file(b"a", checksum=0)
    assert compare_parts([(b"b", 20, part)], [stray]) == [Orphan(stray), MissingFile(20, part)]
    grown = own._replace(allocated_bytes=8192)
    assert compare_parts([(b"b", 20, part)], [grown]) == [WrongBlocks(20, part, 8192)]
    short = own._replace(size=3)
    assert compare_parts([(b"b", 20, part)], [short]) == [WrongSize(20, part, short)]


# Few names and values, so that they meet.
names = st.integers(0, 12).map(lambda n: bytes([n]) * 16)
records = st.builds(
    Replica,
    tier=st.just(1),
    state=st.sampled_from(ReplicaState),
    name=st.just(b""),
    size=st.integers(0, 1),
    allocated_bytes=st.sampled_from([0, 4096]),
    durable=st.booleans(),
    created_ns=st.just(0),
    checksum=st.integers(0, 2),
)
rows_of_names = st.dictionaries(names, records).map(
    lambda found: [
        (name, 100 + name[0], one._replace(name=name)) for name, one in sorted(found.items())
    ]
)
files_of_names = st.dictionaries(
    st.tuples(names, st.integers(0, 2)),
    st.tuples(st.integers(0, 1), st.sampled_from([0, 4096]), st.booleans()),
).map(
    lambda found: [
        TierFile(name, checksum, size, allocated, synced)
        for (name, checksum), (size, allocated, synced) in sorted(found.items())
    ]
)


def expected(rows: list[Row], files: list[TierFile]) -> set[Finding]:
    """The same by looking up each name, without any order."""
    lying: dict[bytes, list[TierFile]] = defaultdict(list)
    for one in files:
        lying[one.name].append(one)
    found: set[Finding] = set()
    for name, ino, record in rows:
        here = lying.pop(name, [])
        complete = record.state is not ReplicaState.PARTIAL
        own = [one for one in here if complete and one.checksum == record.checksum]
        found |= {WrongChecksumName(ino, record, one) for one in here if one not in own}
        if complete and not own:
            found.add(MissingFile(ino, record))
        for one in own:
            if one.size != record.size:
                found.add(WrongSize(ino, record, one))
            elif one.allocated_bytes != record.allocated_bytes:
                found.add(WrongBlocks(ino, record, one.allocated_bytes))
            if record.durable and not one.synced:
                found.add(NotSynced(ino, record))
    for here in lying.values():
        found |= {Orphan(one) if len(here) == 1 else Ambiguous(one) for one in here}
    return found


@given(rows_of_names, files_of_names)
def test_the_merge_finds_what_looking_up_finds(rows: list[Row], files: list[TierFile]) -> None:
    found = compare(rows, files)
    assert len(found) == len(set(found))
    assert set(found) == expected(rows, files)


@given(rows_of_names, files_of_names)
def test_every_file_and_record_of_parts_is_accounted_for(
    rows: list[Row], files: list[TierFile]
) -> None:
    parts = [one for one in files if one.checksum == 0]
    partial = [(n, i, r._replace(state=ReplicaState.PARTIAL)) for n, i, r in rows]
    found = compare_parts(partial, parts)
    here, recorded = {one.name for one in parts}, {name for name, _, _ in partial}
    orphans = {one.file.name for one in found if isinstance(one, Orphan)}
    missing = {one.replica.name for one in found if isinstance(one, MissingFile)}
    assert (orphans, missing) == (here - recorded, recorded - here)
    matched = [one for one in found if isinstance(one, (WrongSize, WrongBlocks))]
    assert len(found) == len(orphans) + len(missing) + len(matched)
    agreeing = {one.name: one for one in parts}
    for name, ino, record in partial:
        if name in agreeing:
            own = agreeing[name]
            wrong = (own.size, own.allocated_bytes) != (record.size, record.allocated_bytes)
            assert wrong == any(one.ino == ino for one in matched)
