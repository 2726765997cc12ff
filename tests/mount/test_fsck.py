"""``monarchfs fsck``: each thing that can be wrong is found, put right, and gone afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli.main import main
from monarchfs.config import User
from monarchfs.index import Index
from monarchfs.store.checksum import checksum
from monarchfs.store.tier import Tier
from monarchfs.supervisor.lock import Holder, InUse, read_holder, take_lock, write_holder
from monarchfs.types import ROOT_INO, Replica, ReplicaState, SourceStat, TierFile
from tests.support import surroundings
from tests.support.fake_mounts import NOBODY, interpreter_for
from tests.support.indexing import record_found
from tests.support.mounting import MONARCHFS, requires_root, run, wait_for

DATASET = "0123456789abcdef"
NOW = 1_700_000_000_000_000_000
ME = User("me", os.geteuid(), os.getegid(), tuple(os.getgroups()))
SIZE = 5000
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def source_stat(ino: int, mode: int = stat.S_IFREG | 0o644, size: int = SIZE) -> SourceStat:
    return SourceStat(0, ino, size, NOW, NOW, NOW, mode, 1, 0, 0, 0, 8, 4096)


def content(number: int) -> bytes:
    return (b"%d " % number) * SIZE


@dataclass
class Cache:
    """A state directory and a tier, as a mount leaves them."""

    path: Path

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def dataset(self) -> Path:
        return self.path / "tier" / DATASET

    def make(self) -> None:
        self.state.mkdir(mode=0o700)
        self.dataset.mkdir(parents=True, mode=0o700)
        with self.locked() as lock:
            write_holder(lock, self.holder)

    @property
    def holder(self) -> Holder:
        return Holder(1, "/mnt/data", "/lustre/data", DATASET, (f"{self.path}/tier",))

    @contextmanager
    def locked(self) -> Iterator[int]:
        with ExitStack() as cleanup:
            state = os.open(self.state, os.O_RDONLY | os.O_DIRECTORY)
            cleanup.callback(os.close, state)
            lock = take_lock(state, ME)
            cleanup.callback(os.close, lock)
            yield lock

    @contextmanager
    def open(self, boot: bytes = BOOT_ID) -> Iterator[tuple[Index, Tier]]:
        index = Index.open(str(self.state), source_id=DATASET, trust_after_kill=True)
        tier = None
        try:
            index.replicas.begin_boot(boot)
            directory = os.open(self.dataset, os.O_RDONLY | os.O_DIRECTORY)
            try:
                tier = Tier(
                    directory, f"{self.path}/tier", index.meta.tier_number(f"{self.path}/tier")
                )
            finally:
                os.close(directory)
            yield index, tier
        finally:
            if tier is not None:
                tier.close()
            index.close()

    def fill(
        self,
        count: int,
        *,
        synced: bool = True,
        boot: bytes = BOOT_ID,
        names: bytes = b"f%d",
    ) -> None:
        """``count`` resident files below ``dir`` in the source."""
        with self.open(boot) as (index, tier):
            index.tree.record_root(source_stat(2, stat.S_IFDIR | 0o755), NOW)
            parent = record_found(
                index, ROOT_INO, b"dir", source_stat(3, stat.S_IFDIR | 0o755), b"", NOW
            )
            for number in range(count):
                data = content(number)[:SIZE]
                node = record_found(
                    index, parent.ino, names % number, source_stat(100 + number), b"", NOW
                )
                name = node.stat.version.replica_name
                index.replicas.begin_copy(node.ino, tier.id, name)
                allocated, total = tier.files.write_whole(name, data)
                index.replicas.put_replica(
                    node.ino,
                    Replica(
                        tier.id, ReplicaState.RESIDENT, name, SIZE, allocated, False, NOW, total
                    ),
                )
            if synced:
                self.mark_synced(index, tier)

    def mark_synced(self, index: Index, tier: Tier) -> None:
        tier.sync()
        records = list(index.replicas.all())
        index.replicas.mark_durable(ino for ino, _ in records)
        tier.files.mark_synced((record.name, record.checksum) for _, record in records)

    def resident(self) -> list[tuple[int, Replica]]:
        with self.open() as (index, _tier):
            return list(index.replicas.all())

    def files(self) -> list[Path]:
        """The complete replicas."""
        return sorted(self.dataset.glob("??/*"))

    def everything(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.dataset.rglob("*") if path.is_file()}


@dataclass
class Outcome:
    code: int
    report: dict[str, Any]


Fsck = Callable[..., Outcome]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = Cache(tmp_path)
    made.make()
    return made


@pytest.fixture
def fsck(cache: Cache, capfd: pytest.CaptureFixture[str]) -> Fsck:
    def check(*options: str) -> Outcome:
        capfd.readouterr()
        code = main(["fsck", str(cache.state), "--json", *options])
        captured = capfd.readouterr()
        assert captured.err == ""
        return Outcome(code, json.loads(captured.out))

    return check


# Replicas that share a file.

SEGMENT = 0x5E6
SHARE = 8192
"""What each of them takes."""


def fill_segment(cache: Cache, count: int, *, synced: bool = True, boot: bytes = BOOT_ID) -> None:
    """``count`` resident files of the source that lie in one file."""
    with cache.open(boot) as (index, tier):
        index.tree.record_root(source_stat(2, stat.S_IFDIR | 0o755), NOW)
        index.segments.begin_segments(tier.id, [SEGMENT])
        rows = []
        for number in range(count):
            file, at = source_stat(500 + number), number * SHARE
            node = record_found(index, ROOT_INO, b"s%d" % number, file, b"", NOW)
            data = content(number)[:SIZE]
            assert tier.segments.write_each([(SEGMENT, at, data)]) == [checksum(data)]
            name = node.stat.version.replica_name
            rows.append(TierFile(name, checksum(data), SIZE, SHARE, synced, NOW, SEGMENT, at))
            found = Replica.found(tier.id, rows[-1])
            index.replicas.put_replica(node.ino, found._replace(state=ReplicaState.RESIDENT))
        if synced:
            tier.sync()
            tier.segments.lists.append(SEGMENT, rows)


def segment_of(cache: Cache) -> Path:
    return cache.dataset / "segments" / f"{SEGMENT:016x}"


def offsets(cache: Cache) -> list[int]:
    return sorted(record.offset for _, record in cache.resident() if record.segment)


def marked(cache: Cache) -> dict[int, bool]:
    """The segments, and whether the next mount gives back what no record has."""
    with cache.open() as (index, tier):
        return index.segments.segments(tier.id)


@pytest.mark.smoke
@pytest.mark.parametrize("shared", [0, 3])
def test_nothing_is_wrong(
    cache: Cache, fsck: Fsck, capfd: pytest.CaptureFixture[str], shared: int
) -> None:
    cache.fill(5)
    if shared:
        fill_segment(cache, shared)
    before, files = cache.everything(), 5 + shared
    allocated = sum(record.allocated_bytes for _, record in cache.resident())
    for options in ((), ("--checksum",), ("--repair",), ("--repair", "--checksum")):
        done = fsck(*options)
        assert done.code == 0
        read = files if "--checksum" in options else 0
        (tier,) = done.report.pop("tiers")
        assert done.report == {
            "state_dir": str(cache.state),
            "index": "clean",
            "checked_files": read,
            "checked_bytes": read * SIZE,
            "findings": {},
            "repaired": 0,
            "clean": True,
        }
        assert (tier.pop("overhead_bytes") > 0, tier.pop("gap_bytes")) == (shared > 0, 0)
        assert tier == {
            "path": f"{cache.path}/tier",
            "present": True,
            "files": files,
            "resident": files,
            "partial": 0,
            "found": 0,
            "allocated_bytes": allocated,
        }
    assert cache.everything() == before
    assert main(["fsck", str(cache.state)]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"tier {cache.path}/tier: {files} files, {allocated >> 10}K",
        f"{cache.state}: nothing wrong",
    ]
    with cache.locked() as lock:
        assert read_holder(lock) == cache.holder, "the lock says what it said before"


# Each changes a cache of nine files, four of which share one, and says what is found by a look.
Damage = Callable[[Cache], None]


def orphan(cache: Cache) -> None:
    with cache.open() as (_index, tier):
        _, total = tier.files.write_whole(b"o" * 16, b"of an index that is gone")
        tier.sync()
        tier.files.mark_synced([(b"o" * 16, total)])


def orphan_not_synced(cache: Cache) -> None:
    with cache.open() as (_index, tier):
        tier.files.write_whole(b"o" * 16, b"of an index that is gone")


def ambiguous(cache: Cache) -> None:
    with cache.open() as (_index, tier):
        tier.files.write_whole(b"o" * 16, b"one")
        tier.files.write_whole(b"o" * 16, b"two")


def orphan_part(cache: Cache) -> None:
    with cache.open() as (_index, tier):
        os.close(tier.files.create_part(b"p" * 16, 1 << 20))


def extra_file(cache: Cache) -> None:
    (_, record) = cache.resident()[0]
    with cache.open() as (_index, tier):
        tier.files.write_whole(record.name, b"another copy of that version")


def missing(cache: Cache) -> None:
    cache.files()[2].unlink()


def missing_directory(cache: Cache) -> None:
    shutil.rmtree(cache.files()[2].parent)


def wrong_size(cache: Cache) -> None:
    cache.files()[2].chmod(0o600)
    os.truncate(cache.files()[2], SIZE - 1)
    cache.files()[2].chmod(0o400)


def interrupted(cache: Cache) -> None:
    with cache.open() as (index, tier):
        index.replicas.begin_copy(12345, tier.id, b"i" * 16)
        fd = tier.files.create_part(b"i" * 16, 1 << 20)
        tier.files.write(fd, 0, b"x" * (128 << 10))
        os.close(fd)


def interrupted_removal(cache: Cache) -> None:
    ((ino, _), *_) = cache.resident()
    with cache.open() as (index, _tier):
        index.replicas.drop_replica(ino)


def partial(cache: Cache, size: int = 1 << 20) -> tuple[int, Replica]:
    """A replica in part, whose second half is there."""
    with cache.open() as (index, tier):
        node = record_found(index, ROOT_INO, b"big", source_stat(50, size=size), b"", NOW)
        name = node.stat.version.replica_name
        fd = tier.files.create_part(name, size)
        digests = bytes(8 * 4) + tier.files.write(fd, 512 << 10, b"y" * (512 << 10))
        record = Replica(
            *(tier.id, ReplicaState.PARTIAL, name, size, tier.files.allocated(fd), True, NOW, 0),
            *(128 << 10, bytes(4) + b"\1" * 4, digests),
        )
        os.close(fd)
        index.replicas.put_replica(node.ino, record)
        return node.ino, record


def missing_part(cache: Cache) -> None:
    partial(cache)
    (part,) = (cache.dataset / "parts").iterdir()
    part.unlink()


def short_part(cache: Cache) -> None:
    partial(cache)
    (part,) = (cache.dataset / "parts").iterdir()
    os.truncate(part, 1000)


def finished_part(cache: Cache) -> None:
    """A crash between the rename and the record."""
    partial(cache)
    (part,) = (cache.dataset / "parts").iterdir()
    (cache.dataset / part.name[:2]).mkdir(exist_ok=True)
    part.rename(cache.dataset / part.name[:2] / f"{part.name}.{7:016x}")


def lost_segment(cache: Cache) -> None:
    segment_of(cache).unlink()


def lost_segments(cache: Cache) -> None:
    shutil.rmtree(segment_of(cache).parent)


def short_segment(cache: Cache) -> None:
    os.truncate(segment_of(cache), 2 * SHARE + SIZE - 1)


def hole(cache: Cache) -> None:
    with cache.open() as (_index, tier):
        tier.segments.punch(SEGMENT, [(SHARE, 4096)])


DAMAGES: list[tuple[Damage, dict[str, int], int]] = [
    (orphan, {"orphan": 1}, 10),
    (orphan_not_synced, {"orphan": 1}, 10),
    (ambiguous, {"ambiguous": 2}, 9),
    (orphan_part, {"orphan_part": 1}, 9),
    (extra_file, {"extra_file": 1}, 9),
    (missing, {"missing": 1}, 8),
    (missing_directory, {"missing": 1}, 8),
    (wrong_size, {"wrong_size": 1}, 8),
    (interrupted, {"interrupted": 1, "orphan_part": 1}, 9),
    (interrupted_removal, {"interrupted": 1, "orphan": 1}, 8),
    (missing_part, {"missing": 1}, 9),
    (short_part, {"wrong_size": 1}, 9),
    (finished_part, {"extra_file": 1, "missing": 1}, 9),
    (lost_segment, {"missing": 4}, 5),
    (lost_segments, {"missing": 4}, 5),
    (short_segment, {"missing": 2}, 7),
    (hole, {"missing": 1}, 8),
]


@pytest.mark.parametrize(
    ("damage", "findings", "left"), DAMAGES, ids=[damage.__name__ for damage, *_ in DAMAGES]
)
def test_damage_is_found_and_put_right(
    cache: Cache, fsck: Fsck, damage: Damage, findings: dict[str, int], left: int
) -> None:
    cache.fill(5)
    fill_segment(cache, 4)
    damage(cache)
    before = cache.everything()
    looked = fsck()
    assert (looked.code, looked.report["findings"]) == (1, findings)
    assert (looked.report["repaired"], looked.report["clean"]) == (0, False)
    assert cache.everything() == before, "a look must not change anything"
    repaired = fsck("--repair")
    assert repaired.code == 0
    # What a crash interrupted is cleared by the journal, and no orphan any more.
    assert sum(repaired.report["findings"].values()) == repaired.report["repaired"] > 0
    assert repaired.report["tiers"][0]["files"] == left
    again = fsck("--checksum")
    assert (again.code, again.report["findings"]) == (0, {})
    assert again.report["checked_files"] == left
    assert marked(cache) == {SEGMENT: True}
    assert_exact(cache)


def assert_exact(cache: Cache) -> None:
    """Every file has a record, every record its file, and the totals are what lies there."""
    with cache.open() as (index, tier):
        files = {file.name: file for xx in range(256) for file in tier.files.complete(xx)}
        parts = {file.name: file for file in tier.files.parts()}
        known = {record.name: record for _, record in index.replicas.all() if not record.segment}
        assert known.keys() == files.keys() | parts.keys()
        sharing = [record for _, record in index.replicas.all() if record.segment]
        assert {record.segment for record in sharing} <= index.segments.segments(tier.id).keys()
        assert set(tier.segments.found()) <= index.segments.segments(tier.id).keys()
        assert all(tier.verify_complete(record) for record in sharing)
        assert index.replicas.journal() == []
        both = {**files, **parts}
        assert {n: r.allocated_bytes for n, r in known.items()} == {
            name: file.allocated_bytes for name, file in both.items()
        }
        if known or sharing:
            totals = index.replicas.tier_totals()[tier.id]
            own = sum(file.allocated_bytes for file in both.values())
            assert totals.allocated_bytes == own + sum(r.allocated_bytes for r in sharing)


def spoil(path: Path, at: int = 1000) -> None:
    """Other bytes, and nothing else that could be noticed."""
    st = path.stat()
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    path.chmod(st.st_mode & 0o777)


def spoil_shared(cache: Cache, number: int) -> None:
    spoil(segment_of(cache), number * SHARE + 1000)


def spoil_own(cache: Cache, number: int) -> None:
    spoil(cache.files()[number])


@pytest.mark.parametrize("spoil_one", [spoil_own, spoil_shared])
def test_bytes_are_looked_at_only_if_asked_to(
    cache: Cache, fsck: Fsck, spoil_one: Callable[[Cache, int], None]
) -> None:
    cache.fill(4)
    fill_segment(cache, 4)
    spoil_one(cache, 2)
    assert fsck().code == 0
    looked = fsck("--checksum")
    assert (looked.code, looked.report["findings"]) == (1, {"corrupt": 1})
    assert looked.report["checked_bytes"] == 8 * SIZE
    assert (len(cache.files()), len(offsets(cache))) == (4, 4)
    assert fsck("--checksum", "--repair").code == 0
    shared = [0, SHARE, 3 * SHARE] if spoil_one is spoil_shared else offsets(cache)
    assert offsets(cache) == shared
    assert len(cache.files()) + len(shared) == len(cache.resident()) == 7
    assert marked(cache) == {SEGMENT: True}
    assert fsck("--checksum").report["findings"] == {}
    assert_exact(cache)


def test_a_link_in_the_place_of_a_segment(cache: Cache, capfd: pytest.CaptureFixture[str]) -> None:
    fill_segment(cache, 3)
    outside = segment_of(cache).rename(cache.path / "outside")
    segment_of(cache).symlink_to(outside)
    before = outside.read_bytes()
    for options, code in (((), 1), (("--repair",), 0), ((), 0)):
        assert main(["fsck", str(cache.state), *options]) == code
        assert "is not ours and stays as it is" in capfd.readouterr().err
    assert cache.resident() == []
    assert segment_of(cache).is_symlink()
    assert outside.read_bytes() == before


@pytest.mark.parametrize("whole", [True, False])
def test_a_segment_that_no_record_knows_is_taken_over(
    cache: Cache, fsck: Fsck, whole: bool
) -> None:
    cache.fill(2)
    fill_segment(cache, 4)
    spoil_shared(cache, 1)
    if whole:
        with cache.open() as (index, tier):
            for _, ino in index.segments.segment_records(tier.id, SEGMENT):
                index.replicas.drop_replica(ino)
            index.segments.segment_gone(tier.id, SEGMENT)
    else:
        shutil.rmtree(cache.state / "index")
    gone = {} if whole else {"index_missing": 1}
    looked = fsck()
    assert (looked.code, looked.report["findings"]) == (1, {"orphan": 1} if whole else gone)
    repaired = fsck("--repair")
    assert repaired.code == 0
    assert repaired.report["findings"] == {"orphan": 1 if whole else 3, **gone}
    assert offsets(cache) == [0, 2 * SHARE, 3 * SHARE]
    assert marked(cache) == {SEGMENT: True}
    assert fsck("--checksum").report["findings"] == {}
    assert_exact(cache)
    with cache.open() as (index, tier):
        index.tree.record_root(source_stat(2, stat.S_IFDIR | 0o755), NOW)
        for number, there in enumerate((True, False, True, True)):
            file = source_stat(500 + number)
            node = record_found(index, ROOT_INO, b"s%d" % number, file, b"", NOW)
            claimed = index.replicas.claim(node.ino, file.version.replica_name, SIZE)
            assert (claimed is not None) == there
            if claimed is not None:
                assert claimed.durable
                fd = tier.open_complete(claimed)
                assert os.pread(fd, SIZE, claimed.offset) == content(number)[:SIZE]
                os.close(fd)


@pytest.mark.parametrize("list_is", ["missing", "of nothing that is there"])
def test_a_segment_of_which_nothing_is_known_is_removed(
    cache: Cache, fsck: Fsck, list_is: str
) -> None:
    cache.fill(2)
    fill_segment(cache, 2)
    if list_is == "missing":
        segment_of(cache).with_suffix(".list").unlink()
    else:
        spoil_shared(cache, 0)
        spoil_shared(cache, 1)
    with cache.open() as (index, tier):
        for _, ino in index.segments.segment_records(tier.id, SEGMENT):
            index.replicas.drop_replica(ino)
        index.segments.segment_gone(tier.id, SEGMENT)
    assert fsck().report["findings"] == fsck("--checksum").report["findings"] == {"orphan": 1}
    assert segment_of(cache).exists()
    assert fsck("--repair").code == 0
    assert list(segment_of(cache).parent.iterdir()) == []
    assert fsck("--checksum").report["findings"] == {}
    assert_exact(cache)


@pytest.mark.parametrize("spoilt", [False, True])
def test_an_orphan_that_was_not_synced_must_prove_itself(
    cache: Cache, fsck: Fsck, spoilt: bool
) -> None:
    cache.fill(1)
    orphan_not_synced(cache)
    (path,) = [path for path in cache.files() if path.name.startswith("6f6f")]
    if spoilt:
        spoil(path, 0)
    assert fsck().report["findings"] == {"orphan": 1}
    done = fsck("--repair")
    assert (done.code, done.report["findings"]) == (0, {"corrupt" if spoilt else "orphan": 1})
    found = [record.durable for _, record in cache.resident() if record.state is ReplicaState.FOUND]
    assert (path.exists(), found) == ((False, []) if spoilt else (True, [True]))
    assert {path.stat().st_mode & 0o777 for path in cache.files()} == {0o400}
    assert_exact(cache)


def test_what_is_only_noted(cache: Cache, fsck: Fsck) -> None:
    cache.fill(3)
    cache.files()[0].chmod(0o600)
    (_, (ino, record), _) = cache.resident()
    with cache.open() as (index, _tier):
        index.replicas.put_replica(ino, record._replace(allocated_bytes=1 << 20))
    noted = fsck()
    assert (noted.code, noted.report["clean"]) == (0, True)
    assert noted.report["findings"] == {"not_synced": 1, "wrong_blocks": 1}
    assert fsck("--repair").report["repaired"] == 2
    assert fsck().report["findings"] == {}
    assert_exact(cache)


def test_the_map_of_a_part_survives_a_repair(cache: Cache, fsck: Fsck) -> None:
    cache.fill(1)
    ino, record = partial(cache)
    with cache.open() as (index, _tier):
        index.replicas.put_replica(ino, record._replace(allocated_bytes=1))
    assert fsck("--repair").report["findings"] == {"wrong_blocks": 1}
    with cache.open() as (index, _tier):
        assert index.replicas.replica(ino) == record
    assert fsck("--checksum").report["findings"] == {}


def test_after_a_reboot(cache: Cache, fsck: Fsck) -> None:
    """What was never synced may have its size and not its data; what was marked as synced, though
    its record does not say so, is as good as any. Nothing tells that of what shares a file."""
    cache.fill(4, synced=False, boot=b"an earlier boot")
    fill_segment(cache, 3, synced=False, boot=b"an earlier boot")
    good, bad, synced, _ = cache.files()
    spoil(bad)
    synced.chmod(0o400)
    done = fsck("--repair")
    assert done.code == 0
    assert done.report["findings"] == {"lost_in_reboot": 7, "orphan": 3, "corrupt": 1}
    assert (good.exists(), bad.exists(), synced.exists()) == (True, False, True)
    assert [record.state for _, record in cache.resident()] == [ReplicaState.FOUND] * 3
    assert (offsets(cache), marked(cache)) == ([], {SEGMENT: True})
    assert fsck("--checksum").report["findings"] == {}
    assert_exact(cache)


def scribble(cache: Cache) -> None:
    data = cache.state / "index" / "data.mdb"
    with open(data, "r+b") as file:
        for page in range(2, data.stat().st_size // 4096, 2):
            file.seek(page * 4096)
            file.write(b"\xa5" * 4096)


def cut(cache: Cache) -> None:
    os.truncate(cache.state / "index" / "data.mdb", 3 * 4096)


def remove(cache: Cache) -> None:
    shutil.rmtree(cache.state / "index")


def replace(cache: Cache) -> None:
    """By that of another source."""
    Index.open(str(cache.path), source_id="another").close()
    shutil.rmtree(cache.state / "index")
    (cache.path / "index").rename(cache.state / "index")


@pytest.mark.parametrize(
    ("damage", "found"),
    [(scribble, "damaged"), (cut, "damaged"), (remove, "missing"), (replace, "foreign")],
)
def test_an_index_that_cannot_be_used(cache: Cache, fsck: Fsck, damage: Damage, found: str) -> None:
    cache.fill(20)
    damage(cache)
    before = cache.everything()
    looked = fsck()
    assert (looked.code, looked.report["index"]) == (1, found)
    assert looked.report["findings"] == {f"index_{found}": 1}
    assert looked.report["tiers"][0]["files"] == 20
    assert (cache.state / "index").exists() is (found != "missing")
    repaired = fsck("--repair")
    assert (repaired.code, repaired.report["index"]) == (0, found)
    assert repaired.report["findings"] == {f"index_{found}": 1, "orphan": 20}
    assert (cache.state / "index.bad-1").is_dir() is (found != "missing")
    assert cache.everything() == before
    assert_claimed_by_name(cache, 20)
    again = fsck("--repair")
    assert (again.code, again.report["index"]) == (0, "clean")
    assert again.report["findings"] == ({} if found == "missing" else {"index_set_aside": 1})
    assert not (cache.state / "index.bad-1").exists()
    assert_exact(cache)


def assert_claimed_by_name(cache: Cache, count: int) -> None:
    """The next mount gets its replicas back, without the source."""
    with cache.open() as (index, _tier):
        index.tree.record_root(source_stat(2, stat.S_IFDIR | 0o755), NOW)
        for number in range(count):
            node = record_found(
                index, ROOT_INO, b"f%d" % number, source_stat(100 + number), b"", NOW
            )
            claimed = index.replicas.claim(node.ino, node.stat.version.replica_name, SIZE)
            assert claimed is not None
            assert claimed.durable


def test_a_suspect_index_is_cleared_of_suspicion(cache: Cache, fsck: Fsck) -> None:
    cache.fill(2)
    (cache.state / "suspect").touch()
    assert fsck().code == 0
    assert not (cache.state / "suspect").exists()


def test_what_is_not_ours_is_left_alone(cache: Cache, fsck: Fsck) -> None:
    cache.fill(2)
    directory = cache.files()[0].parent
    outside = cache.path / "outside"
    outside.mkdir()
    (outside / "data.mdb").write_text("somebody's")
    name = f"{directory.name}{'0' * 30}.{'0' * 16}"
    (directory / name).symlink_to(outside / "data.mdb")
    (directory / "README").write_text("by hand")
    if os.geteuid() == 0:
        planted = directory / f"{directory.name}{'3' * 30}.{'0' * 16}"
        planted.write_text("by nobody")
        shutil.chown(planted, NOBODY)
    os.mkfifo(directory / f"{directory.name}{'1' * 30}.{'0' * 16}")
    (cache.dataset / "parts" / ("2" * 32)).mkdir()
    (cache.state / "index.bad-1").symlink_to(outside)
    (cache.state / "index.bad-2").mkdir()
    (cache.state / "index.bad-2" / "mine").write_text("by hand")
    before = sorted(map(str, cache.path.rglob("*")))
    done = fsck("--repair")
    assert (done.code, done.report["findings"]) == (0, {"index_set_aside": 2})
    assert done.report["repaired"] == 0
    assert sorted(map(str, cache.path.rglob("*"))) == before
    assert (outside / "data.mdb").read_text() == "somebody's"


@pytest.mark.parametrize("link", [False, True])
def test_a_tier_that_is_not_there(cache: Cache, fsck: Fsck, link: bool) -> None:
    """Also behind a link."""
    cache.fill(3)
    cache.dataset.rename(cache.path / "elsewhere")
    if link:
        cache.dataset.symlink_to(cache.path / "elsewhere")
    for options in ((), ("--repair",)):
        done = fsck(*options)
        assert (done.code, done.report["findings"]) == (1, {"tier_gone": 1})
        (tier,) = done.report["tiers"]
        assert (tier["present"], tier["files"]) == (False, 3)
    if link:
        cache.dataset.unlink()
    (cache.path / "elsewhere").rename(cache.dataset)
    assert fsck("--checksum").report["findings"] == {}


def test_a_tier_that_was_never_used_is_not_missed(cache: Cache, fsck: Fsck) -> None:
    cache.fill(1)
    with cache.open() as (index, _tier):
        index.meta.tier_number("/no/such/tier")
    done = fsck("--repair")
    assert (done.code, done.report["findings"]) == (0, {})
    assert [tier["present"] for tier in done.report["tiers"]] == [True, False]


@pytest.mark.smoke
def test_for_people(cache: Cache, capfd: pytest.CaptureFixture[str]) -> None:
    """A name cannot command the terminal."""
    cache.fill(130, names=b"a\n\x1b[2J\xff%d")
    for path in cache.files()[:120]:
        path.unlink()
    assert main(["fsck", str(cache.state)]) == 1
    captured = capfd.readouterr()
    assert captured.err == ""
    *findings, rest, tier, summary = captured.out.splitlines()
    assert len(findings) == 100
    assert all(line.startswith(r"missing: dir/a\n\x1b[2J\udcff") for line in findings)
    assert all(line.endswith(": its copy is not there") for line in findings)
    assert rest == "missing: and 20 more"
    assert tier.startswith(f"tier {cache.path}/tier: 130 files, ")
    assert summary == (f"{cache.state}: 120 found (missing 120), 0 put right: run it with --repair")
    assert main(["fsck", str(cache.state), "--repair"]) == 0
    repaired = capfd.readouterr().out
    assert "its copy is not there: forgotten\n" in repaired
    assert repaired.endswith("120 found (missing 120), 120 put right\n")


# Who may, and when.


@pytest.mark.smoke
def test_what_is_refused(cache: Cache, capfd: pytest.CaptureFixture[str]) -> None:
    cache.fill(1)

    def refused(*words: str) -> None:
        assert main(["fsck", str(cache.state), "--repair"]) == 1
        captured = capfd.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        for word in ("monarchfs: ", *words):
            assert word in captured.err

    with cache.locked():
        mounted = "is in use by the mount of /lustre/data on /mnt/data"
        refused(mounted, "monarchfs umount /mnt/data")
    cache.state.chmod(0o777)
    refused("can be written by others", f"chmod 700 {cache.state}")
    cache.state.chmod(0o1777)
    refused("it is no state directory")  # all share it: nobody is told to close it
    cache.state.chmod(0o700)
    for text in ("", "junk", '{"pid": 1, "mountpoint": "", "source": "", "tiers": 3}'):
        (cache.state / "lock").write_text(text)
        refused("does not say", "mount it once")


def test_who_comes_while_it_is_checked_is_told(cache: Cache) -> None:
    with cache.locked() as lock:
        write_holder(lock, Holder(77, "/mnt", "/src", DATASET, (), checking=True))
        with pytest.raises(InUse, match=r"monarchfs fsck \(process 77\)"), cache.locked():
            pass


@pytest.fixture
def open_cache() -> Iterator[Cache]:
    """Below a directory that everybody may enter."""
    interpreter_for(NOBODY)
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    path.chmod(0o755)
    made = Cache(path)
    made.make()
    made.fill(3)
    yield made
    shutil.rmtree(path)


@pytest.fixture
def users_cache(open_cache: Cache) -> Cache:
    owner = pwd.getpwnam(NOBODY)
    for top in (open_cache.state, open_cache.dataset):
        for entry in (top, *top.rglob("*")):
            os.chown(entry, owner.pw_uid, owner.pw_gid)
    return open_cache


@requires_root
def test_root_checks_as_the_owner(users_cache: Cache, capfd: pytest.CaptureFixture[str]) -> None:
    private = users_cache.path / "private"
    private.write_text("of root")
    private.chmod(0o600)
    victim = users_cache.files()[0]
    kept = victim.read_bytes()
    victim.unlink()
    os.link(private, victim)  # as its user could, of a file of theirs
    assert main(["fsck", str(users_cache.state), "--repair", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["findings"] == {"missing": 1}
    assert private.read_text() == "of root"
    assert kept not in users_cache.everything().values()
    nobody = pwd.getpwnam(NOBODY).pw_uid
    for directory in (users_cache.state, users_cache.dataset):
        owners = {p.lstat().st_uid for p in directory.rglob("*") if p != victim}
        assert owners == {nobody}
    assert main(["fsck", str(users_cache.state), "--checksum"]) == 0


@requires_root
def test_a_user_cannot_check_anothers(open_cache: Cache) -> None:
    open_cache.state.chmod(0o755)
    done = run("fsck", str(open_cache.state), user=NOBODY)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "belongs to" in done.stderr


def test_interrupted_in_the_middle(cache: Cache, fsck: Fsck) -> None:
    """Ctrl-C reaches the command, which ends the check in order; what was done stays done."""
    # Names that take much room when they are printed: more than the pipe holds, which nobody reads.
    cache.fill(300, names=b"\1" * 240 + b"%d")
    for path in cache.files():
        path.unlink()
    command = [*MONARCHFS, "fsck", str(cache.state), "--repair"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)

        def is_full() -> bool:
            (waiting,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
            return bool(waiting > size - 8192)

        wait_for(is_full, "the command to be held up")
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=20)
    assert (process.returncode, complaint) == (-signal.SIGINT, b"monarchfs: interrupted\n")
    with cache.locked() as held:
        assert read_holder(held) == cache.holder
    left = fsck("--repair")
    assert left.code == 0
    assert left.report["findings"]["missing"] < 300
    assert fsck().report["findings"] == {}
    assert_exact(cache)


def test_a_bar_on_a_terminal_and_nothing_of_it_in_the_output(cache: Cache) -> None:
    cache.fill(1)
    terminal, end = surroundings.open_terminal()
    try:
        done = subprocess.run(
            [*MONARCHFS, "fsck", str(cache.state), "--json"],
            stdout=subprocess.PIPE,
            stderr=end,
            check=False,
        )
        shown = os.read(terminal, 1 << 16).decode()
    finally:
        os.close(end)
        os.close(terminal)
    assert json.loads(done.stdout)["clean"]
    assert "[------------------------]   0% checking the index" in shown
    assert shown.endswith("\r\033[K"), "the line is taken away at the end"
