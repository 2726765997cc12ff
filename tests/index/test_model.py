"""The index against a model, across reopening, kills and reboots."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from monarchfs.cache.index import problems
from monarchfs.types import (
    ROOT_INO,
    FileType,
    Listing,
    Node,
    Replica,
    ReplicaState,
    SourceStat,
    TierFile,
    TierTotals,
)
from tests.index.tools import (
    DIRECTORY,
    FILE,
    NOW,
    ROOT_SOURCE_INO,
    name_of,
    open_index,
    replica,
    source_stat,
    tier_file,
)
from tests.support.indexing import record_found

PARENTS = st.sampled_from([ROOT_INO, 1000, 1001])
NAMES = st.sampled_from([b"a", b"b", b"\xff\xfe", b"z" * 255])
SOURCE_INOS = st.integers(10, 14)
VERSIONS = st.integers(0, 2)
MODES = st.sampled_from([FILE, DIRECTORY])
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
        self.index = open_index(self.directory)
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
        root = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY)
        self.nodes[ROOT_INO] = self.index.nodes.record_root(root, NOW)

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
        wanted = source_stat(ino, mode=mode, version=version)
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
        sequence = self.index.listings.begin_listing(parent)
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
        purged = 0
        # A call may stop where the last one began.
        for _ in range(2):
            purged += self.index.nodes.purge_outdated(before, 1000)
        assert purged == len(gone)
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
        self.index.replicas.begin_copy(16, tier, name_of(copy))
        self.journal.add((tier, name_of(copy)))

    @rule(tier=TIERS, copy=COPIES)
    def file_gone(self, tier: int, copy: int) -> None:
        self.index.replicas.file_gone(tier, name_of(copy))
        self.journal.discard((tier, name_of(copy)))

    @rule(ino=INOS, tier=TIERS, copy=COPIES, size=st.integers(0, 10**12), in_flight=st.booleans())
    def put_replica(self, ino: int, tier: int, copy: int, size: int, in_flight: bool) -> None:
        state = ReplicaState.PARTIAL if size % 2 else ReplicaState.RESIDENT
        record = replica(copy, tier, size, state)
        self.index.replicas.put_replica(ino, record, in_flight)
        self.put(ino, record)
        if not in_flight:
            self.journal.discard((tier, name_of(copy)))

    @rule(ino=INOS)
    def drop_replica(self, ino: int) -> None:
        self.index.replicas.drop_replica(ino)
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
            record = replica(copy, tier)
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
            tier_file(copy, synced=synced)._replace(segment=place[0], offset=place[1])
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
        self.found_are(tier, [tier_file(copy, synced=synced) for copy in sorted(copies)])

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
                owner = self.owner(tier, name_of(copy))
                if owner is None or not self.counts(owner):
                    continue
                record, _ = self.replicas[owner]
                outdated = owner in self.nodes and self.nodes[owner].outdated
                if record.state is ReplicaState.FOUND or (
                    record.state is ReplicaState.RESIDENT and outdated
                ):
                    expected = record._replace(state=ReplicaState.RESIDENT)
        assert self.index.replicas.claim(ino, name_of(copy), 100) == expected
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
        self.index = open_index(self.directory, trust=True)
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
        assert dict(self.index.replicas.all()) == counting
        for ino in self.replicas:
            assert self.index.replicas.replica(ino) == counting.get(ino)
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
