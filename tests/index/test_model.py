"""The index against a model, across reopening, kills, reboots; what the model does not walk."""

import errno
import shutil
import stat
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from monarchfs.cache.cache import purge
from monarchfs.cache.index import Index, problems
from monarchfs.types import (
    ROOT_INO,
    DirRef,
    FileType,
    IndexUnusable,
    Listing,
    Node,
    Replica,
    ReplicaState,
    SourceStat,
    TierFile,
    TierTotals,
)
from monarchfs.worker.opening import _numbers_stay
from tests.index import tools
from tests.index.tools import found
from tests.support.indexing import record_found

PARENTS = st.sampled_from([ROOT_INO, 1000, 1001])
NAMES = st.sampled_from([b"a", b"b", b"\xff\xfe", b"z" * 255])
SOURCE_INOS = st.integers(10, 14)
VERSIONS = st.integers(0, 2)
MODES = st.sampled_from([tools.FILE, tools.DIRECTORY])
INOS = st.integers(16, 24)
"""Numbers that the first names, cookies and listings get: some stand for something, some not."""
TIERS = st.integers(0, 1)
COPIES = st.integers(0, 4)
SEGMENTS = st.integers(1, 2)
SHARED = st.tuples(SEGMENTS, st.integers(0, 3).map(lambda n: n * 4096))
"""A segment and an offset in it."""

Place = tuple[int, bytes]


class IndexMachine(RuleBasedStateMachine):
    """The index does what dictionaries would. No number ever stands for two inodes, no cookie for
    two names."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="monarchfs-index-"))
        self.index = tools.open_index(self.directory)
        self.nodes: dict[int, Node] = {}
        self.by_source: dict[int, int] = {}
        # What the name stands for (0: nobody asked), type, when, what is shown.
        self.names: dict[tuple[int, bytes], tuple[int, FileType, int, int]] = {}
        self.listed_names: set[tuple[int, bytes]] = set()
        self.cookies: dict[tuple[int, bytes], int] = {}
        # With each, the boot it was recorded in.
        self.replicas: dict[int, tuple[Replica, int]] = {}
        self.journal: set[Place] = set()
        self.segments: dict[tuple[int, int], bool] = {}
        self.stale: dict[int, int] = {}
        self.pins: set[int] = set()
        self.boot = 0
        self.given: set[int] = set()
        self.given_cookies: set[int] = set()
        # What others may have seen and not been told to forget.
        self.shown: dict[tuple[int, bytes], Node] = {}
        self.listen()
        self.index.replicas.begin_boot(b"boot 0")

    def listen(self) -> None:
        self.index.environment.on_name = lambda *place: self.shown.pop(place, None)
        self.index.environment.on_node = self.changes

    def changes(self, ino: int) -> None:
        self.shown = {place: node for place, node in self.shown.items() if node.ino != ino}

    @initialize()
    def root(self) -> None:
        root = tools.source_stat(tools.ROOT_SOURCE_INO, mode=tools.DIRECTORY)
        self.nodes[ROOT_INO] = self.index.nodes.record_root(root, tools.NOW)

    def new(self, number: int) -> None:
        assert number >= 16
        assert number not in self.given
        self.given.add(number)

    def name_now(
        self, parent: int, name: bytes, type_: FileType, ino: int, now: int, shown: int
    ) -> None:
        dirent = self.index.nodes.dirent(parent, name)
        assert dirent is not None
        if (parent, name) not in self.cookies:
            assert dirent.cookie >= 16
            assert dirent.cookie not in self.given_cookies
            self.given_cookies.add(dirent.cookie)
        self.cookies[parent, name] = dirent.cookie
        before = self.names.get((parent, name))
        if before is not None and ino and before[0] in self.pins and before[0] != ino:
            old = self.nodes.get(before[0])
            if old is None or (old.parent, old.name) == (parent, name):
                self.pins.remove(before[0])
                self.pins.add(ino)
        self.names[parent, name] = (ino, type_, now, shown)

    def outdate(self, ino: int, now: int) -> None:
        if not self.nodes[ino].outdated:
            self.nodes[ino] = self.nodes[ino]._replace(outdated=True)
            self.stale[ino] = now

    @rule(parent=PARENTS, name=NAMES, ino=SOURCE_INOS, version=VERSIONS, mode=MODES, now=VERSIONS)
    def found(self, parent: int, name: bytes, ino: int, version: int, mode: int, now: int) -> None:
        wanted = tools.source_stat(ino, mode=mode, version=version)
        node = record_found(self.index, parent, name, wanted, b"", now)
        number = self.by_source.get(ino)
        known = None if number is None else self.nodes.get(number)
        if known is not None and not self.same(known.stat, wanted):
            self.outdate(known.ino, now)
            number = None
            if known.ino in self.pins:
                self.pins.remove(known.ino)
                self.pins.add(node.ino)
        if number is None:
            self.new(node.ino)
        else:
            assert node.ino == number
        assert node == Node(node.ino, wanted, parent, name, now, False, b"")
        self.nodes[node.ino] = node
        self.stale.pop(node.ino, None)
        self.by_source[ino] = node.ino
        self.name_now(parent, name, FileType.of_mode(mode), node.ino, now, node.ino)

    @staticmethod
    def same(known: SourceStat, now: SourceStat) -> bool:
        if known.is_directory or now.is_directory:
            return known.is_directory and now.is_directory
        return known.version == now.version

    @rule(parent=PARENTS, name=NAMES)
    def missing(self, parent: int, name: bytes) -> None:
        self.index.nodes.record_missing(parent, [name])
        self.names.pop((parent, name), None)
        self.cookies.pop((parent, name), None)
        self.listed_names.discard((parent, name))

    @rule(
        parent=PARENTS,
        found=st.dictionaries(NAMES, st.tuples(SOURCE_INOS, MODES)),
        now=VERSIONS,
        lists_all=st.booleans(),
    )
    def listed(
        self, parent: int, found: dict[bytes, tuple[int, int]], now: int, lists_all: bool
    ) -> None:
        sequence = self.index.listings.begin_listing()
        self.new(sequence)
        for name, (ino, mode) in found.items():
            type_ = FileType.of_mode(mode)
            self.index.listings.add_entries(parent, sequence, [(name, type_, ino, 0)], now)
            self.listed_names.add((parent, name))
            before = self.names.get((parent, name))
            if before is not None and (known := self.nodes.get(before[0])) is not None:
                checked = before[2]
                if FileType.of_mode(known.stat.mode) != type_ or known.stat.ino != ino:
                    checked = 0
                elif checked and (known.parent, known.name) == (parent, name):
                    checked = now
                self.name_now(parent, name, type_, known.ino, checked, known.ino)
                continue
            dirent = self.index.nodes.dirent(parent, name)
            assert dirent is not None
            number = self.by_source.get(ino)
            if number is None:
                self.new(dirent.shown_ino)
                self.by_source[ino] = number = dirent.shown_ino
            self.name_now(parent, name, type_, 0, now, number)
        listing = Listing(now, now, now, lists_all)
        for _ in self.index.listings.finish_listing(parent, sequence, listing):
            pass
        assert self.index.listings.listing(parent) == listing
        for key in [k for k in self.names if k[0] == parent and k[1] not in found]:
            if lists_all or key in self.listed_names:
                del self.names[key], self.cookies[key]
                self.listed_names.discard(key)

    @rule(number=INOS, now=VERSIONS)
    def mark_outdated(self, number: int, now: int) -> None:
        self.index.nodes.mark_outdated(number, now)
        if number in self.nodes:
            self.outdate(number, now)

    @rule(before=st.integers(0, 3))
    def purge(self, before: int) -> None:
        gone = [i for i, ns in self.stale.items() if ns < before and i not in self.replicas]
        # A call may stop where the last one began.
        purged = [self.index.nodes.purge_outdated(before, 1000) for _ in range(2)]
        assert sum(purged) == len(gone)
        for ino in gone:
            node = self.nodes.pop(ino)
            if self.by_source.get(node.stat.ino) == ino:
                del self.by_source[node.stat.ino]
            del self.stale[ino]
            self.pins.discard(ino)

    # Pins.

    @rule(ino=INOS)
    def pin(self, ino: int) -> None:
        if ino in self.given:
            self.index.pins.pin(ino)
            self.pins.add(ino)

    @rule(ino=INOS)
    def unpin(self, ino: int) -> None:
        self.index.pins.unpin(ino)
        self.pins = {pin for pin in self.pins if ino not in self.climb(pin)}

    # Replicas.

    def counts(self, ino: int) -> bool:
        record, boot = self.replicas[ino]
        return record.durable or boot == self.boot

    def owner(self, tier: int, name: bytes) -> int | None:
        for ino, (record, _) in self.replicas.items():
            if (record.tier, record.name) == (tier, name):
                return ino
        return None

    def put(self, ino: int, record: Replica) -> None:
        owner = self.owner(record.tier, record.name)
        if owner is not None:
            self.forget(owner, lies_there=bool(record.segment))
        if ino in self.replicas:
            self.forget(ino, lies_there=True)
        self.replicas[ino] = (record, self.boot)

    def forget(self, ino: int, *, lies_there: bool) -> None:
        record, _ = self.replicas.pop(ino)
        if record.segment:
            self.segments[record.tier, record.segment] = True
        elif lies_there:
            self.journal.add((record.tier, record.name))

    def is_free(self, tier: int, segment: int, offset: int) -> bool:
        """Whether something may be put there: a place in a known segment is used once."""
        return (tier, segment) in self.segments and not any(
            (record.tier, record.segment, record.offset) == (tier, segment, offset)
            for record, _ in self.replicas.values()
        )

    @rule(tier=TIERS, copy=COPIES)
    def begin_copy(self, tier: int, copy: int) -> None:
        self.index.replicas.begin_copies([(16, tier, tools.name_of(copy))])
        self.journal.add((tier, tools.name_of(copy)))

    @rule(tier=TIERS, copy=COPIES)
    def file_gone(self, tier: int, copy: int) -> None:
        self.index.replicas.file_gone(tier, tools.name_of(copy))
        self.journal.discard((tier, tools.name_of(copy)))

    @rule(ino=INOS, tier=TIERS, copy=COPIES, size=st.integers(0, 10**12), in_flight=st.booleans())
    def put_replica(self, ino: int, tier: int, copy: int, size: int, in_flight: bool) -> None:
        state = ReplicaState.PARTIAL if size % 2 else ReplicaState.RESIDENT
        record = tools.replica(copy, tier, size, state)
        self.index.replicas.put_replica(ino, record, in_flight)
        self.put(ino, record)
        if not in_flight:
            self.journal.discard((tier, tools.name_of(copy)))

    @rule(ino=INOS)
    def drop_replica(self, ino: int) -> None:
        self.index.replicas.drop_replicas([ino])
        if ino in self.replicas:
            self.forget(ino, lies_there=True)

    # Those that share a file.

    @rule(tier=TIERS, segments=st.sets(SEGMENTS, min_size=1))
    def begin_segments(self, tier: int, segments: set[int]) -> None:
        self.index.segments.begin_segments(tier, sorted(segments))
        self.segments |= dict.fromkeys(((tier, segment) for segment in segments), True)

    @rule(tier=TIERS, segment=SEGMENTS)
    def segment_clean(self, tier: int, segment: int) -> None:
        self.index.segments.segment_clean(tier, segment)
        if (tier, segment) in self.segments:
            self.segments[tier, segment] = False

    @rule(tier=TIERS, segment=SEGMENTS)
    def segment_gone(self, tier: int, segment: int) -> None:
        if not self.index.segments.segment_records(tier, segment):
            self.index.segments.segment_gone(tier, segment)
            self.segments.pop((tier, segment), None)

    @rule(
        tier=TIERS,
        several=st.dictionaries(INOS, st.tuples(COPIES, st.none() | SHARED), max_size=4),
        together=st.booleans(),
    )
    def put_several(
        self, tier: int, several: dict[int, tuple[int, tuple[int, int] | None]], together: bool
    ) -> None:
        records: list[tuple[int, Replica]] = []
        taken = set()
        copies = set()
        for ino, (copy, place) in several.items():
            if copy in copies:
                continue
            copies.add(copy)
            record = tools.replica(copy, tier)
            if place is not None:
                if place in taken or not self.is_free(tier, *place):
                    continue
                taken.add(place)
                record = record._replace(segment=place[0], offset=place[1])
            records.append((ino, record))
        if together:
            self.index.replicas.put_replicas(records)
        for ino, record in records:
            if not together:
                self.index.replicas.put_replica(ino, record)
            self.put(ino, record)
            if not record.segment:
                self.journal.discard((tier, record.name))

    @rule(tier=TIERS, copies=st.dictionaries(COPIES, SHARED), synced=st.booleans())
    def found_in_segments(
        self, tier: int, copies: dict[int, tuple[int, int]], synced: bool
    ) -> None:
        places = {place: copy for copy, place in copies.items() if self.is_free(tier, *place)}
        rows = [
            tools.tier_file(copy, synced=synced)._replace(segment=place[0], offset=place[1])
            for place, copy in places.items()
        ]
        self.found_are(tier, rows)

    @rule(inos=st.sets(INOS))
    def mark_durable(self, inos: set[int]) -> None:
        self.index.replicas.mark_durable(inos)
        for ino in inos & set(self.replicas):
            record, boot = self.replicas[ino]
            if self.counts(ino):
                self.replicas[ino] = (record._replace(durable=True), boot)

    @rule(tier=TIERS, copies=st.sets(COPIES), synced=st.booleans())
    def found_files(self, tier: int, copies: set[int], synced: bool) -> None:
        self.found_are(tier, [tools.tier_file(copy, synced=synced) for copy in sorted(copies)])

    def found_are(self, tier: int, files: list[TierFile]) -> None:
        """Which of them are known is decided first: a new number may be one that had a replica."""
        unknown = [
            file
            for file in files
            if (tier, file.name) not in self.journal and self.owner(tier, file.name) is None
        ]
        numbers = self.index.replicas.record_found_files(tier, files)
        for ino, file in zip(numbers, unknown, strict=True):
            self.new(ino)
            self.put(ino, Replica.found(tier, file))

    @rule(ino=INOS, copy=COPIES)
    def claim(self, ino: int, copy: int) -> None:
        expected = None
        if ino not in self.replicas or not self.counts(ino):
            for tier in (1, 0):
                owner = self.owner(tier, tools.name_of(copy))
                if owner is None or not self.counts(owner):
                    continue
                record, _ = self.replicas[owner]
                outdated = owner in self.nodes and self.nodes[owner].outdated
                if record.state is ReplicaState.FOUND or (
                    record.state is ReplicaState.RESIDENT and outdated
                ):
                    expected = record._replace(state=ReplicaState.RESIDENT)
        assert self.index.replicas.claim(ino, tools.name_of(copy), 100) == expected
        if expected is not None:
            self.put(ino, expected)

    @rule(limit=st.integers(1, 3))
    def drop_lost(self, limit: int) -> None:
        lost = {}
        while batch := self.index.replicas.lost_in_reboot(limit):
            assert len(batch) <= limit
            for ino, record in batch:
                lost[ino] = record
                self.drop_replica(ino)
        assert not any(not self.counts(ino) for ino in self.replicas)
        for record in lost.values():
            assert not record.durable

    @rule(clean=st.booleans(), reboots=st.booleans())
    def reopen(self, clean: bool, reboots: bool) -> None:
        self.index.close(clean=clean)
        self.index = tools.open_index(self.directory, trust=True)
        self.listen()
        self.boot += reboots
        assert self.index.replicas.begin_boot(b"boot %d" % self.boot) == reboots

    @invariant()
    def agrees(self) -> None:
        assert self.index.nodes.count_nodes() == len(self.nodes)
        for ino, node in self.nodes.items():
            assert self.index.nodes.node(ino) == node
        seen = {}
        for parent in (ROOT_INO, 1000, 1001):
            entries = self.index.listings.entries(parent, 2, 100)
            cookies = [dirent.cookie for dirent, _ in entries]
            assert cookies == sorted(cookies)
            for dirent, listed in entries:
                assert self.index.nodes.dirent(parent, dirent.name) == dirent
                assert listed == self.nodes.get(dirent.ino)
                assert self.cookies[parent, dirent.name] == dirent.cookie
                _cookie, name, type_, ino, checked_ns, shown = dirent
                seen[parent, name] = (ino, type_, checked_ns, shown)
            shown_rows = [row for row in entries if (parent, row[0].name) in self.listed_names]
            assert self.index.listings.entries(parent, 2, 100, only_listed=True) == shown_rows
            assert self.index.listings.entries(parent, 2, 2, only_listed=True) == shown_rows[:2]
        assert seen == self.names
        self.replicas_agree()
        assert self.index.pins.pins() == sorted(self.pins)
        for ino in self.nodes:
            assert self.index.pins.pinned(ino) == bool(self.pins & self.climb(ino))

    @invariant()
    def what_others_have_seen_holds(self) -> None:
        for place, node in self.shown.items():
            assert self.names[place][0] == node.ino
            assert self.nodes[node.ino] == node
        for place, (ino, *_) in self.names.items():
            if (known := self.nodes.get(ino)) is not None and not known.outdated:
                self.shown[place] = known

    def replicas_agree(self) -> None:
        counting = {i: record for i, (record, _) in self.replicas.items() if self.counts(i)}
        heads = {i: one._replace(present=b"", digests=b"") for i, one in counting.items()}
        assert dict(self.index.replicas.all()) == heads
        for ino in self.replicas:
            assert self.index.replicas.replica(ino) == heads.get(ino)
            assert self.index.replicas.part(ino) == counting.get(ino)
        assert set(self.index.replicas.journal()) == self.journal
        self.segments_agree()
        totals: dict[int, TierTotals] = {}
        for record, _ in self.replicas.values():
            state = record.state
            known = totals.get(record.tier, TierTotals())
            totals[record.tier] = TierTotals(
                known.resident + (state is ReplicaState.RESIDENT),
                known.partial + (state is ReplicaState.PARTIAL),
                known.found + (state is ReplicaState.FOUND),
                known.allocated_bytes + record.allocated_bytes,
            )
        assert self.index.replicas.tier_totals() == totals
        for tier in (0, 1):
            of_tier = {i: record for i, record in counting.items() if record.tier == tier}
            names = sorted((record.name, ino) for ino, record in of_tier.items())
            assert self.index.replicas.names(tier, b"", b"", 100) == names
            goes = [
                ino
                for ino, record in sorted(of_tier.items())
                if record.state is ReplicaState.FOUND
                or (ino in self.nodes and self.nodes[ino].outdated)
            ]
            assert self.index.replicas.outdated_replicas(tier, 100) == goes

    def segments_agree(self) -> None:
        for tier in (0, 1):
            known = {segment: dirty for (t, segment), dirty in self.segments.items() if t == tier}
            assert self.index.segments.segments(tier) == known
            for segment in (1, 2, 3):
                assert self.index.segments.segment_records(tier, segment) == sorted(
                    (record.offset, ino)
                    for ino, (record, _) in self.replicas.items()
                    if (record.tier, record.segment) == (tier, segment)
                )
        sharing = sum(1 for record, _ in self.replicas.values() if record.segment)
        assert self.index.segments.segment_replicas() == sharing

    def climb(self, ino: int) -> set[int]:
        """It, and all above it."""
        climbed: set[int] = set()
        while ino not in climbed:
            climbed.add(ino)
            if ino == ROOT_INO or ino not in self.nodes:
                break
            ino = self.nodes[ino].parent
        return climbed

    def teardown(self) -> None:
        self.index.close()
        lines = problems(str(self.directory))
        shutil.rmtree(self.directory)
        assert lines == []


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# What the model does not walk.


def directory_found(index: Index, parent: int, name: bytes, source_ino: int) -> int:
    return record_found(
        index, parent, name, tools.source_stat(source_ino, mode=tools.DIRECTORY), b"", tools.NOW
    ).ino


def test_equal_source_numbers_on_two_devices_are_two_files(index: Index) -> None:
    a = found(index, b"a", 10)
    b = record_found(index, ROOT_INO, b"b", tools.source_stat(10, device=77), b"", tools.NOW)
    assert a.ino != b.ino


def test_a_link_of_any_century_with_the_longest_target(index: Index) -> None:
    link, target = tools.source_stat(10, mode=stat.S_IFLNK | 0o777), b"../" + b"t" * 4092
    for ns in (-(2**80), -1, 0, 2**63 - 1, 2**63, 16_725_225_600 * 10**9, 2**90):
        far = link._replace(mtime_ns=ns, ctime_ns=ns + 1, atime_ns=-ns)
        node = record_found(index, ROOT_INO, b"l", far, target, tools.NOW)
        assert index.nodes.node(node.ino) == node
        assert (node.stat, node.target) == (far, target)
        assert record_found(index, ROOT_INO, b"l", far, target, tools.NOW) == node


def test_a_broken_or_circular_chain_has_no_path_and_an_end(index: Index) -> None:
    assert index.nodes.dirref(directory_found(index, 500, b"o", 40)) is None
    outer = directory_found(index, ROOT_INO, b"o", 41)
    inner = directory_found(index, outer, b"i", 42)
    directory_found(index, inner, b"o", 41)
    assert index.nodes.dirref(inner) is None
    pinned = found(index, b"pinned", 10).ino
    index.pins.pin(pinned)
    assert not index.pins.pinned(inner)
    index.pins.unpin(inner)
    assert index.pins.pins() == [pinned]


def test_the_root_found_below_itself_stays_the_root(index: Index) -> None:
    root = tools.source_stat(tools.ROOT_SOURCE_INO, mode=tools.DIRECTORY)
    assert record_found(index, ROOT_INO, b"again", root, b"", tools.NOW) == index.nodes.node(
        ROOT_INO
    )
    assert index.nodes.node(ROOT_INO) == Node(ROOT_INO, root, ROOT_INO, b"", tools.NOW, False, b"")
    assert index.nodes.dirref(ROOT_INO) == DirRef(b"", tools.ROOT_SOURCE_INO)


def test_the_root_may_change_but_another_one_is_another_source(index: Index) -> None:
    changed = tools.source_stat(tools.ROOT_SOURCE_INO, mode=tools.DIRECTORY, version=4)
    assert index.nodes.record_root(changed, tools.NOW + 1).stat == changed
    assert index.nodes.node(ROOT_INO) == index.nodes.record_root(changed, tools.NOW + 1)
    with pytest.raises(IndexUnusable, match="another source"):
        index.nodes.record_root(tools.source_stat(3, mode=tools.DIRECTORY), tools.NOW)


def test_xattrs_and_their_errors_are_remembered(index: Index) -> None:
    ino = found(index, b"a", 10).ino
    known: dict[bytes, bytes | int] = {
        b"user." + b"x" * 250: b"",
        b"user.big": bytes(65536),
        b"security.selinux": errno.ENODATA,
        b"": b"user.big\0",
    }
    for name, value in known.items():
        index.xattrs.put_xattr(ino, name, value)
    for name, value in known.items():
        assert index.xattrs.xattr(ino, name) == value
    assert index.xattrs.xattr(ino, b"user.other") is None


def test_a_name_found_while_a_listing_runs_outlives_it(index: Index) -> None:
    found(index, b"before", 10)
    sequence = index.listings.begin_listing()
    found(index, b"meanwhile", 11)
    index.listings.add_entries(ROOT_INO, sequence, [(b"seen", FileType.REGULAR, 12, 0)], tools.NOW)
    tools.finish_listing(index, ROOT_INO, sequence)
    assert tools.names_in(index, ROOT_INO) == [b"meanwhile", b"seen"]


def test_a_name_found_while_a_listing_runs_that_has_it_is_a_listed_one(index: Index) -> None:
    """Where listings lack names that look-ups find, those are not shown."""
    sequence = index.listings.begin_listing()
    for name, ino in ((b"a", 10), (b".snapshot", 11)):
        found(index, name, ino)
    index.listings.add_entries(ROOT_INO, sequence, [(b"a", FileType.REGULAR, 10, 0)], tools.NOW)
    tools.finish_listing(index, ROOT_INO, sequence, lists_all=False)
    shown = index.listings.entries(ROOT_INO, 2, 10, only_listed=True)
    assert [dirent.name for dirent, _node in shown] == [b"a"]


def test_two_listings_at_once_remove_only_what_neither_saw(index: Index) -> None:
    tools.add_listing(index, ROOT_INO, (b"a", 10), (b"gone", 11))
    first, second = index.listings.begin_listing(), index.listings.begin_listing()
    a = [(b"a", FileType.REGULAR, 10, 0)]
    index.listings.add_entries(ROOT_INO, second, a, tools.NOW)
    index.listings.add_entries(ROOT_INO, first, a, tools.NOW)
    for sequence in (second, first):
        tools.finish_listing(index, ROOT_INO, sequence)
    assert tools.names_in(index, ROOT_INO) == [b"a"]


def test_finishing_a_long_listing_goes_in_steps_and_may_be_left_off(index: Index) -> None:
    tools.add_listing(index, ROOT_INO, *((b"%d" % i, 100 + i) for i in range(2000)))
    sequence = index.listings.begin_listing()
    steps = index.listings.finish_listing(ROOT_INO, sequence, Listing(*3 * (tools.NOW + 1,), True))
    next(steps)
    assert 0 < len(index.listings.entries(ROOT_INO, 2, 3000)) < 2000
    assert index.listings.listing(ROOT_INO) == Listing(tools.NOW, tools.NOW, tools.NOW, True)
    assert len(list(steps)) >= 2
    assert index.listings.entries(ROOT_INO, 2, 10) == []
    assert index.listings.listing(ROOT_INO) == Listing(*3 * (tools.NOW + 1,), True)


def test_a_directory_of_unknown_types_keeps_the_types_that_are_known(index: Index) -> None:
    record_found(index, ROOT_INO, b"d", tools.source_stat(20, mode=tools.DIRECTORY), b"", tools.NOW)
    sequence = index.listings.begin_listing()
    rows = [(b"d", FileType.UNKNOWN, 20, 0), (b"e", FileType.UNKNOWN, 21, 0)]
    index.listings.add_entries(ROOT_INO, sequence, rows, tools.NOW)
    types = {d.name: d.type for d, _ in index.listings.entries(ROOT_INO, 2, 10)}
    assert types == {b"d": FileType.DIRECTORY, b"e": FileType.UNKNOWN}


def test_a_name_seen_after_a_crash_is_removed_by_a_later_listing(tmp_path: Path) -> None:
    """Numbers leap after a crash, and names are dated by them: the leap is recorded with it."""
    index = tools.open_index(tmp_path)
    tools.add_listing(index, ROOT_INO, (b"a", 10), (b"b", 11))
    found(index, b"a", 10)
    index.close(clean=False)
    index = tools.open_index(tmp_path, trust=True)
    found(index, b"a", 10)
    index.close()
    index = tools.open_index(tmp_path)
    tools.add_listing(index, ROOT_INO, (b"b", 11))
    assert tools.names_in(index, ROOT_INO) == [b"b"]
    index.close()


def test_a_pin_holds_all_below_a_directory(index: Index) -> None:
    outer = directory_found(index, ROOT_INO, b"o", 20)
    inner = directory_found(index, outer, b"i", 21)
    file, beside = found(index, b"f", 10, parent=inner).ino, found(index, b"g", 11).ino
    every = (outer, inner, file, beside)
    assert not index.pins.pinned(file)
    index.pins.pin(outer)
    index.pins.pin(outer)
    assert [index.pins.pinned(ino) for ino in every] == [True, True, True, False]
    assert index.pins.pins() == [outer]
    index.pins.pin(file)
    index.pins.unpin(file)
    assert (index.pins.pins(), index.pins.pinned(file)) == ([outer], True)
    index.pins.pin(file)
    index.pins.pin(beside)
    index.pins.unpin(outer)
    assert [index.pins.pinned(ino) for ino in every] == [False] * 3 + [True]
    index.pins.pin(ROOT_INO)
    assert index.pins.pinned(beside)


def test_a_pin_goes_with_the_file_and_with_the_name(index: Index) -> None:
    index.pins.pin(found(index, b"a", 10).ino)
    newer = found(index, b"a", 10, version=1)
    assert index.pins.pins() == [newer.ino]
    # Also where the change was noticed under the file's other name.
    newest = found(index, b"b", 10, version=2)
    assert index.pins.pins() == [newest.ino]
    tools.add_listing(index, ROOT_INO, (b"b", 11))
    assert index.pins.pins() == [newest.ino]
    other = found(index, b"b", 11)
    assert index.pins.pins() == [other.ino]


@pytest.mark.parametrize("listed", [None, FileType.REGULAR, FileType.UNKNOWN])
def test_a_purged_number_never_stands_for_anything_again(
    index: Index, listed: FileType | None
) -> None:
    old = found(index, b"a", 10)
    index.xattrs.put_xattr(old.ino, b"user.a", b"1")
    index.nodes.mark_outdated(old.ino, tools.NOW)
    assert index.nodes.purge_outdated(tools.NOW + 1, 10) == 1
    assert index.xattrs.xattr(old.ino, b"user.a") is None
    if listed is not None:
        sequence = index.listings.begin_listing()
        index.listings.add_entries(ROOT_INO, sequence, [(b"a", listed, 10, 0)], tools.NOW)
        dirent = index.nodes.dirent(ROOT_INO, b"a")
        assert dirent is not None
        assert (dirent.ino, dirent.shown_ino == old.ino) == (0, False)
    assert found(index, b"a", 10).ino != old.ino
    assert index.nodes.node(old.ino) is None


def test_purging_gets_to_the_end_in_steps(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a directory with many names, and past those that stay."""
    directory = directory_found(index, ROOT_INO, b"d", 300)
    tools.add_listing(index, directory, *((b"%d" % i, 400 + i) for i in range(50)))
    index.nodes.mark_outdated(directory, tools.NOW)
    assert index.nodes.purge_outdated(tools.NOW + 5, 20) == 0
    assert len(tools.names_in(index, directory)) == 30
    nodes = [found(index, b"%d" % i, 10 + i) for i in range(200)]
    for i, node in enumerate(nodes):
        index.nodes.mark_outdated(node.ino, tools.NOW + (0 if i >= 180 else 10))
    monkeypatch.setattr("monarchfs.cache.cache.PURGE_BATCH", 3)
    trio.run(purge, index, tools.NOW + 5)
    assert index.nodes.count_nodes() == 181
    assert (tools.names_in(index, directory), index.listings.listing(directory)) == ([], None)


def test_names_come_in_order_and_by_prefix(index: Index) -> None:
    inos = {tools.name_of(n): found(index, b"%d" % n, 100 + n).ino for n in range(600)}
    index.replicas.put_replicas([(ino, tools.replica(n, 2)) for n, ino in enumerate(inos.values())])
    index.replicas.put_replica(5000, tools.replica(700, 1))
    index.replicas.put_replica(5001, tools.replica(701, 3))
    paged: list[tuple[bytes, int]] = []
    while rows := index.replicas.names(2, b"", paged[-1][0] if paged else b"", 7):
        paged += rows
    assert paged == sorted(inos.items())
    for first in range(256):
        of_prefix = [(n, i) for n, i in sorted(inos.items()) if n[0] == first]
        assert index.replicas.names(2, bytes([first]), b"", 10_000) == of_prefix
        after = of_prefix[0][0] if of_prefix else b""
        assert index.replicas.names(2, bytes([first]), after, 10_000) == of_prefix[1:]
    # A few of them, of perhaps millions, tell whether the source keeps its inode numbers.
    index.replicas.all = None  # type: ignore[assignment, method-assign]
    for more in (0, 1):
        source = Mock(stat=lambda _, name, more=more: tools.source_stat(100 + int(name) + more))
        assert _numbers_stay(index, source) is not bool(more)


def test_what_a_reboot_took_is_told_until_it_was_dropped(tmp_path: Path) -> None:
    index = tools.open_index(tmp_path)
    index.replicas.begin_boot(b"one")
    index.replicas.put_replicas([(ino, tools.replica(ino)) for ino in range(20, 29)])
    index.replicas.mark_durable(range(20, 25))
    # Whoever was told of them died before they were dropped.
    for boot_id, told, drops in ((b"one", 0, 0), (b"two", 2, 0), (b"two", 4, 4), (b"two", 0, 0)):
        index.close(clean=False)
        index = tools.open_index(tmp_path, trust=True)
        assert index.replicas.begin_boot(boot_id) is (told == 2)
        index.replicas.mark_durable([25] if told else [])
        left = range(20, 29) if boot_id == b"one" else range(20, 25)
        assert [ino for ino, _ in index.replicas.all()] == list(left)
        lost = [ino for ino, _ in index.replicas.lost_in_reboot(told or 9)]
        assert lost == list(range(25, 25 + told))
        index.replicas.drop_replicas(lost[:drops])
        assert not drops or index.replicas.lost_in_reboot(9) == []
    assert len(index.replicas.journal()) == 4
    index.close()


def test_a_found_file_is_claimed_once(index: Index) -> None:
    (unused,) = index.replicas.record_found_files(2, [tools.tier_file(1)])
    claimed = tools.replica(1, 2)._replace(durable=True, created_ns=0)
    for ino, number, size in ((600, 2, 100), (600, 1, 101), (600, 1, 100), (601, 1, 100)):
        expected = claimed if (ino, number, size) == (600, 1, 100) else None
        assert index.replicas.claim(ino, tools.name_of(number), size) == expected
    assert dict(index.replicas.all()) == {600: claimed}
    assert index.replicas.owner(2, tools.name_of(1)) == 600
    assert index.replicas.replica(unused) is None


def test_a_partial_replica_without_a_chunk_yet(index: Index) -> None:
    empty = tools.replica(1, state=ReplicaState.PARTIAL)._replace(present=b"", digests=b"")
    index.replicas.put_replica(20, empty)
    assert index.replicas.part(20) == empty


@pytest.mark.parametrize("shares", [True, False])
def test_two_numbers_of_one_version_that_come_together(index: Index, shares: bool) -> None:
    """The later one has the replica, as where they come one after the other."""
    index.segments.begin_segments(0, [tools.SEGMENT])
    made = (tools.shared(1, 4096 * n) if shares else tools.replica(1) for n in range(2))
    several = list(enumerate(made, 20))
    index.replicas.put_replicas(several)
    assert dict(index.replicas.all()) == dict(several[1:])
    assert index.replicas.tier_totals() == {0: TierTotals(1, 0, 0, 4096)}
