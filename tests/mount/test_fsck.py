"""``monarchfs fsck``: each thing that can be wrong is found, put right, and gone afterwards."""

import fcntl
import json
import os
import pwd
import shutil
import signal
import stat
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cache.index import Index
from monarchfs.cache.store.checksum import checksum
from monarchfs.cache.store.tier import Tier
from monarchfs.cli.main import main
from monarchfs.config import User
from monarchfs.supervisor import directories
from monarchfs.types import ROOT_INO, Replica, ReplicaState, SourceStat, TierFile
from tests.support import on_disk
from tests.support.fake_mounts import NOBODY, interpreter_for
from tests.support.indexing import record_found
from tests.support.mounting import MONARCHFS, assert_one_line, requires_root, run, wait_for
from tests.support.programs import Running

DATASET = "0123456789abcdef"
NOW = 1_700_000_000_000_000_000
ME = User("me", os.geteuid(), os.getegid(), tuple(os.getgroups()))
SIZE = 5000
DIRECTORY = stat.S_IFDIR | 0o755
SEGMENT = 0x5E6
SHARE = 8192
"""What a copy takes that lies in a segment."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def source_stat(ino: int, mode: int = stat.S_IFREG | 0o644, size: int = SIZE) -> SourceStat:
    return SourceStat(0, ino, size, NOW, NOW, NOW, mode, 1, 0, 0, 0, 8, 4096)


def data_of(number: int) -> bytes:
    return ((b"%d " % number) * SIZE)[:SIZE]


class Cache:
    """A state directory and a tier, as a mount leaves them."""

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, path / "state"
        self.dataset = path / "tier" / f"{DATASET}-{DATASET}"
        self.segment = self.dataset / "segments" / f"{SEGMENT:016x}"
        self.holder = directories.Holder(1, "/mnt/data", "/lustre/data", DATASET, (f"{path}/tier",))
        self.state.mkdir(mode=0o700)
        self.dataset.mkdir(parents=True, mode=0o700)
        with self.locked() as (state, lock):
            directories.write_holder(lock, self.holder)
            directories.write_record(state, ME, {f"{path}/tier": self.dataset.name})

    @contextmanager
    def locked(self) -> Iterator[tuple[int, int]]:
        with ExitStack() as cleanup:
            state = os.open(self.state, os.O_RDONLY | os.O_DIRECTORY)
            cleanup.callback(os.close, state)
            lock = directories.take_lock(state, ME)
            cleanup.callback(os.close, lock)
            yield state, lock

    @contextmanager
    def open(self, boot: bytes = BOOT_ID) -> Iterator[tuple[Index, Tier]]:
        with ExitStack() as cleanup:
            index = Index.open(str(self.state), source_id=DATASET, trust_after_kill=True)
            cleanup.callback(index.close)
            index.replicas.begin_boot(boot)
            directory = os.open(self.dataset, os.O_RDONLY | os.O_DIRECTORY)
            cleanup.callback(os.close, directory)
            tier = Tier(directory, f"{self.path}/tier", index.meta.tier_number(f"{self.path}/tier"))
            cleanup.callback(tier.close)
            yield index, tier

    def fill(
        self,
        own: int = 0,
        shared: int = 0,
        *,
        synced: bool = True,
        boot: bytes = BOOT_ID,
        names: bytes = b"f%d",
    ) -> None:
        """So many resident files below ``dir`` in the source, whose copies are files of their own,
        and so many at its top whose copies lie in one segment."""
        with self.open(boot) as (index, tier):
            index.nodes.record_root(source_stat(2, DIRECTORY), NOW)
            parent = record_found(index, ROOT_INO, b"dir", source_stat(3, DIRECTORY), b"", NOW).ino
            files, rows = [], []
            for number in range(own):
                file = source_stat(100 + number)
                name = file.version.replica_name
                allocated, total = tier.files.write_whole(name, data_of(number))
                row = TierFile(name, total, SIZE, allocated, synced, NOW)
                files.append((parent, names % number, file, row))
            if shared:
                index.segments.begin_segments(tier.id, [SEGMENT])
            for number in range(shared):
                file, at, data = source_stat(500 + number), number * SHARE, data_of(number)
                assert tier.segments.write_each([(SEGMENT, at, data)]) == [checksum(data)]
                name, total = file.version.replica_name, checksum(data)
                rows.append(TierFile(name, total, SIZE, SHARE, synced, NOW, SEGMENT, at))
                files.append((ROOT_INO, b"s%d" % number, file, rows[-1]))
            for directory, called, file, row in files:
                ino = record_found(index, directory, called, file, b"", NOW).ino
                record = Replica.found(tier.id, row)._replace(state=ReplicaState.RESIDENT)
                index.replicas.put_replica(ino, record)
            if synced:
                tier.sync()
                tier.files.mark_synced((row.name, row.checksum) for *_, row in files[:own])
                if rows:
                    tier.segments.lists.append(SEGMENT, rows)

    def claimed(self, names: bytes, first: int, count: int) -> list[Replica | None]:
        """What the next mount gets back of so many files, without their bytes."""
        found = []
        with self.open() as (index, _tier):
            index.nodes.record_root(source_stat(2, DIRECTORY), NOW)
            for number in range(count):
                file = source_stat(first + number)
                node = record_found(index, ROOT_INO, names % number, file, b"", NOW)
                found.append(index.replicas.claim(node.ino, file.version.replica_name, SIZE))
        return found

    def resident(self) -> list[tuple[int, Replica]]:
        with self.open() as (index, _tier):
            return list(index.replicas.all())

    def offsets(self) -> list[int]:
        """Of copies in the segment."""
        return sorted(record.offset for _, record in self.resident() if record.segment)

    def marked(self) -> dict[int, bool]:
        """The segments, and whether the next mount gives back what no record has."""
        with self.open() as (index, tier):
            return index.segments.segments(tier.id)

    def files(self) -> list[Path]:
        """The complete replicas in files of their own."""
        return sorted(self.dataset.glob("??/*"))

    def everything(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.dataset.rglob("*") if path.is_file()}


Fsck = Callable[..., dict[str, Any]]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


@pytest.fixture
def fsck(cache: Cache, capfd: pytest.CaptureFixture[str]) -> Fsck:
    """The report; ``code`` is the exit code."""

    def check(*options: str, code: int = 0) -> dict[str, Any]:
        capfd.readouterr()
        assert main(["fsck", str(cache.state), "--json", *options]) == code
        captured = capfd.readouterr()
        assert captured.err == ""
        report: dict[str, Any] = json.loads(captured.out)
        return report

    return check


@pytest.mark.smoke
@pytest.mark.parametrize("shared", [0, 3])
def test_all_is_well(
    cache: Cache, fsck: Fsck, capfd: pytest.CaptureFixture[str], shared: int
) -> None:
    cache.fill(5, shared)
    before, files = cache.everything(), 5 + shared
    allocated = sum(record.allocated_bytes for _, record in cache.resident())
    (cache.state / "suspect").touch()
    for options in ((), ("--checksum",), ("--repair",), ("--repair", "--checksum")):
        report = fsck(*options)
        assert not (cache.state / "suspect").exists(), "it is cleared of suspicion"
        read = files if "--checksum" in options else 0
        (tier,) = report.pop("tiers")
        assert report == {
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
    with cache.locked() as (_, lock):
        assert directories.read_holder(lock) == cache.holder, "the lock says what it said before"


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


def spoil(path: Path, at: int = 1000) -> None:
    """Other bytes, and nothing else that could be noticed."""
    on_disk.spoil(on_disk.Place(path, at))


def spoil_shared(cache: Cache, number: int) -> None:
    spoil(cache.segment, number * SHARE + 1000)


def forget_segment(index: Index, tier: Tier) -> None:
    """No record knows of it."""
    for _, ino in index.segments.segment_records(tier.id, SEGMENT):
        index.replicas.drop_replicas([ino])
    index.segments.segment_gone(tier.id, SEGMENT)


def do_damage(cache: Cache, how: str) -> None:
    """To a cache of nine files, four of which share one."""
    file = cache.files()[2]
    if "part of a file" in how:
        partial(cache)
        (part,) = (cache.dataset / "parts").iterdir()
    with cache.open() as (index, tier):
        match how:
            case "an orphan that was not synced":
                tier.files.write_whole(b"o" * 16, b"of an index that is gone")
            case "two orphans of one version":
                tier.files.write_whole(b"o" * 16, b"one")
                tier.files.write_whole(b"o" * 16, b"two")
            case "a file is gone":
                file.unlink()
            case "a file is shorter":
                file.chmod(0o600)
                os.truncate(file, SIZE - 1)
                file.chmod(0o400)
            case "an interrupted copy":
                index.replicas.begin_copies([(12345, tier.id, b"i" * 16)])
                fd = tier.files.create_part(b"i" * 16, 1 << 20)
                tier.files.write(fd, 0, b"x" * (128 << 10))
                os.close(fd)
            case "an interrupted removal":
                ino, _ = next(iter(index.replicas.all()))
                index.replicas.drop_replicas([ino])
            case "part of a file is shorter":
                os.truncate(part, 1000)
            case "part of a file, then killed":  # between the rename and the record
                (cache.dataset / part.name[:2]).mkdir(exist_ok=True)
                part.rename(cache.dataset / part.name[:2] / f"{part.name}.{7:016x}")
            case "the segment is shorter":
                os.truncate(cache.segment, 2 * SHARE + SIZE - 1)
            case "a hole in the segment":
                tier.segments.punch(SEGMENT, [(SHARE, 4096)])
            case "other bytes in a file":
                spoil(file)
            case "other bytes in the segment":
                spoil_shared(cache, 2)
            case "an orphan that was not synced, with other bytes":
                tier.files.write_whole(b"o" * 16, b"of an index that is gone")
                (orphan,) = (path for path in cache.files() if path.name.startswith("6f6f"))
                spoil(orphan, 0)
            case "a segment that no record knows, without a list":
                cache.segment.with_suffix(".list").unlink()
                forget_segment(index, tier)
            case "a segment that no record knows, with other bytes":
                for number in range(4):
                    spoil_shared(cache, number)
                forget_segment(index, tier)
            case _:
                raise AssertionError(how)


CORRUPT, ORPHAN = {"corrupt": 1}, {"orphan": 1}
DAMAGES: list[tuple[str, dict[str, int], int]] = [
    ("an orphan that was not synced", ORPHAN, 10),
    ("an orphan that was not synced, with other bytes", ORPHAN, 9),
    ("two orphans of one version", {"ambiguous": 2}, 9),
    ("a file is gone", {"missing": 1}, 8),
    ("a file is shorter", {"wrong_size": 1}, 8),
    ("an interrupted copy", {"interrupted": 1, "orphan_part": 1}, 9),
    ("an interrupted removal", {"interrupted": 1, "orphan": 1}, 8),
    ("part of a file is shorter", {"wrong_size": 1}, 9),
    ("part of a file, then killed", {"extra_file": 1, "missing": 1}, 9),
    ("the segment is shorter", {"missing": 2}, 7),
    ("a hole in the segment", {"missing": 1}, 8),
    ("other bytes in a file", CORRUPT, 8),
    ("other bytes in the segment", CORRUPT, 8),
    ("a segment that no record knows, without a list", ORPHAN, 5),
    ("a segment that no record knows, with other bytes", ORPHAN, 5),
]


@pytest.mark.parametrize(("damage", "findings", "left"), DAMAGES, ids=[row[0] for row in DAMAGES])
def test_damage_is_found_and_put_right(
    cache: Cache, fsck: Fsck, damage: str, findings: dict[str, int], left: int
) -> None:
    """Bytes are looked at only if that is asked for, and those of an orphan that was not synced."""
    cache.fill(5, 4)
    do_damage(cache, damage)
    before = cache.everything()
    options = ("--checksum",) if findings == CORRUPT else ()
    if options:
        assert fsck()["clean"]
    looked = fsck(*options, code=1)
    assert (looked["findings"], looked["repaired"], looked["clean"]) == (findings, 0, False)
    assert looked["checked_bytes"] == (9 * SIZE if options else 0)
    assert cache.everything() == before, "a look must not change anything"
    repaired = fsck("--repair", *options)
    # What a crash interrupted is cleared by the journal, and no orphan any more.
    assert sum(repaired["findings"].values()) == repaired["repaired"] > 0
    if "orphan that was not synced" in damage:
        assert repaired["findings"] == (CORRUPT if "other bytes" in damage else ORPHAN)
    assert repaired["tiers"][0]["files"] == left
    assert {path.stat().st_mode & 0o777 for path in cache.files()} == {0o400}
    again = fsck("--checksum")
    assert (again["findings"], again["checked_files"]) == ({}, left)
    assert cache.marked() == ({} if "no record knows" in damage else {SEGMENT: True})
    assert cache.marked() or list(cache.segment.parent.iterdir()) == []
    found = [record.durable for _, record in cache.resident() if record.state is ReplicaState.FOUND]
    assert found == [True] * (left - 9)
    assert_exact(cache)


def assert_well(cache: Cache, fsck: Fsck) -> None:
    assert fsck("--checksum")["findings"] == {}
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
        assert all(known[name].allocated_bytes == both[name].allocated_bytes for name in known)
        if known or sharing:
            totals = index.replicas.tier_totals()[tier.id]
            own = sum(file.allocated_bytes for file in both.values())
            assert totals.allocated_bytes == own + sum(r.allocated_bytes for r in sharing)


def test_a_link_in_the_place_of_a_segment(cache: Cache, capfd: pytest.CaptureFixture[str]) -> None:
    cache.fill(0, 3)
    outside = cache.segment.rename(cache.path / "outside")
    cache.segment.symlink_to(outside)
    before = outside.read_bytes()
    for options, code in (((), 1), (("--repair",), 0), ((), 0)):
        assert main(["fsck", str(cache.state), *options]) == code
        assert "is not ours and stays as it is" in capfd.readouterr().err
    assert cache.resident() == []
    assert cache.segment.is_symlink()
    assert outside.read_bytes() == before


@pytest.mark.parametrize("whole", [True, False])
def test_a_segment_without_a_record_is_taken_over(cache: Cache, fsck: Fsck, whole: bool) -> None:
    cache.fill(2, 4)
    spoil_shared(cache, 1)
    if whole:
        with cache.open() as (index, tier):
            forget_segment(index, tier)
    else:
        shutil.rmtree(cache.state / "index")
    gone = {} if whole else {"index_missing": 1}
    assert fsck(code=1)["findings"] == ({"orphan": 1} if whole else gone)
    assert fsck("--repair")["findings"] == {"orphan": 1 if whole else 3, **gone}
    assert cache.offsets() == [0, 2 * SHARE, 3 * SHARE]
    assert cache.marked() == {SEGMENT: True}
    assert_well(cache, fsck)
    claimed = cache.claimed(b"s%d", 500, 4)
    with cache.open() as (_index, tier):
        for number, one in enumerate(claimed):
            assert (one is None) == (number == 1)
            if one is not None:
                assert one.durable
                fd = tier.open_complete(one)
                assert os.pread(fd, SIZE, one.offset) == data_of(number)
                os.close(fd)


def test_what_is_only_noted(cache: Cache, fsck: Fsck) -> None:
    """The map of a part survives that. A power cut may have taken the bytes of what is not marked
    as synced."""
    cache.fill(3)
    *unmarked, (ino, record) = cache.resident()
    fine, bad = (next(cache.dataset.glob(f"??/{one.name.hex()}*")) for _, one in unmarked)
    for path in (fine, bad):
        path.chmod(0o600)
    spoil(bad)
    part, recorded = partial(cache)
    with cache.open() as (index, _tier):
        index.replicas.put_replica(ino, record._replace(allocated_bytes=1 << 20))
        index.replicas.put_replica(part, recorded._replace(allocated_bytes=1))
    noted = fsck()
    assert (noted["clean"], noted["findings"]) == (True, {"not_synced": 2, "wrong_blocks": 2})
    assert fsck("--repair")["repaired"] == 4
    assert (fine.exists(), bad.exists()) == (True, False)
    with cache.open() as (index, _tier):
        assert index.replicas.part(part) == recorded
    assert_well(cache, fsck)


def test_after_a_reboot(cache: Cache, fsck: Fsck) -> None:
    """What was never synced may have its size and not its data; what was marked as synced, though
    its record does not say so, is as good as any. Nothing tells that of what shares a file."""
    cache.fill(4, 3, synced=False, boot=b"an earlier boot")
    good, bad, synced, _ = cache.files()
    spoil(bad)
    synced.chmod(0o400)
    assert fsck("--repair")["findings"] == {"lost_in_reboot": 7, "orphan": 3, "corrupt": 1}
    assert (good.exists(), bad.exists(), synced.exists()) == (True, False, True)
    assert [record.state for _, record in cache.resident()] == [ReplicaState.FOUND] * 3
    assert (cache.offsets(), cache.marked()) == ([], {SEGMENT: True})
    assert_well(cache, fsck)


@pytest.mark.parametrize(
    ("damage", "found"), [("scribble", "damaged"), ("remove", "missing"), ("replace", "foreign")]
)
def test_an_index_that_cannot_be_used(cache: Cache, fsck: Fsck, damage: str, found: str) -> None:
    cache.fill(20)
    directory, there = cache.state / "index", found != "missing"
    if damage == "scribble":
        with open(directory / "data.mdb", "r+b") as index_file:
            for at in range(2 * 4096, os.fstat(index_file.fileno()).st_size, 2 * 4096):
                index_file.seek(at)
                index_file.write(b"\xa5" * 4096)
    else:
        shutil.rmtree(directory)
        if damage == "replace":
            Index.open(str(cache.state), source_id="another").close()
    before = cache.everything()
    looked = fsck(code=1)
    assert (looked["index"], looked["findings"]) == (found, {f"index_{found}": 1})
    assert looked["tiers"][0]["files"] == 20
    assert directory.exists() is there
    repaired = fsck("--repair")
    assert (repaired["index"], repaired["findings"]) == (found, {f"index_{found}": 1, "orphan": 20})
    assert (cache.state / "index.bad-1").is_dir() is there
    assert cache.everything() == before
    claimed = cache.claimed(b"f%d", 100, 20)
    assert [one is not None and one.durable for one in claimed] == [True] * 20
    again = fsck("--repair")
    assert (again["index"], again["findings"]) == ("clean", {"index_set_aside": 1} if there else {})
    assert not (cache.state / "index.bad-1").exists()
    assert_exact(cache)


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
    report = fsck("--repair")
    assert (report["findings"], report["repaired"]) == ({"index_set_aside": 2}, 0)
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
        report = fsck(*options, code=1)
        assert report["findings"] == {"tier_gone": 1}
        (tier,) = report["tiers"]
        assert (tier["present"], tier["files"]) == (False, 3)
    if link:
        cache.dataset.unlink()
    (cache.path / "elsewhere").rename(cache.dataset)
    # One that was never used is not missed.
    with cache.open() as (index, _tier):
        index.meta.tier_number("/no/such/tier")
        assert index.meta.get(b"stock:1") == b"", "the next mount looks at it"
    report = fsck("--checksum")
    assert report["findings"] == {}
    assert [tier["present"] for tier in report["tiers"]] == [True, False]


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


@pytest.mark.smoke
def test_what_is_refused(cache: Cache, capfd: pytest.CaptureFixture[str]) -> None:
    cache.fill(1)

    def refused(*words: str) -> None:
        command = ["fsck", str(cache.state), "--repair"]
        done = subprocess.CompletedProcess(command, main(command), *capfd.readouterr())
        assert_one_line(done, 1, *words)

    with cache.locked():
        refused("is in use by the mount of /lustre/data on /mnt/data", "monarchfs umount /mnt/data")
    cache.state.chmod(0o777)
    refused("can be written by others", f"chmod 700 {cache.state}")
    cache.state.chmod(0o1777)
    refused("it is no state directory")  # all share it: nobody is told to close it
    cache.state.chmod(0o700)
    for text in ("", "junk", '{"pid": 1, "mountpoint": "", "source": "", "tiers": 3}'):
        (cache.state / "lock").write_text(text)
        refused("does not say", "mount it once")
    with cache.locked() as (_, lock):
        directories.write_holder(
            lock, directories.Holder(77, "/mnt", "/src", DATASET, (), checking=True)
        )
        with (
            pytest.raises(directories.InUse, match=r"monarchfs fsck \(process 77\)"),
            cache.locked(),
        ):
            pass


@requires_root
def test_whose_cache_it_is(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A user cannot check another's, and root checks as the owner."""
    interpreter_for(NOBODY)
    place.chmod(0o755)
    cache = Cache(place)
    cache.fill(3)
    cache.state.chmod(0o755)
    assert_one_line(run("fsck", str(cache.state), user=NOBODY), 1, "belongs to")
    nobody = pwd.getpwnam(NOBODY).pw_uid
    cache.state.chmod(0o700)
    for top in (cache.state, cache.dataset):
        for entry in (top, *top.rglob("*")):
            shutil.chown(entry, NOBODY, pwd.getpwnam(NOBODY).pw_gid)
    private = place / "private"
    private.write_text("of root")
    private.chmod(0o600)
    victim = cache.files()[0]
    kept = victim.read_bytes()
    victim.unlink()
    os.link(private, victim)  # as its user could, of a file of theirs
    assert main(["fsck", str(cache.state), "--repair", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["findings"] == {"missing": 1}
    assert private.read_text() == "of root"
    assert kept not in cache.everything().values()
    for top in (cache.state, cache.dataset):
        assert {p.lstat().st_uid for p in top.rglob("*") if p != victim} == {nobody}
    assert main(["fsck", str(cache.state), "--checksum"]) == 0


def test_interrupted_in_the_middle(cache: Cache, fsck: Fsck) -> None:
    """Ctrl-C reaches the command, which ends the check in order; what was done stays done."""
    # Names that take much room when they are printed: more than the pipe holds, which nobody reads.
    cache.fill(300, names=b"\1" * 240 + b"%d")
    for path in cache.files():
        path.unlink()
    command = [*MONARCHFS, "fsck", str(cache.state), "--repair"]
    with Running(command, stderr=subprocess.PIPE) as process:
        pipe = process.stdout.fileno()
        size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)

        def is_full() -> bool:
            (waiting,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
            return bool(waiting > size - 8192)

        wait_for(is_full, "the command to be held up")
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=20)
    assert (process.returncode, complaint) == (-signal.SIGINT, "monarchfs: interrupted\n")
    with cache.locked() as (_, held):
        assert directories.read_holder(held) == cache.holder
    assert fsck("--repair")["findings"]["missing"] < 300
    assert_well(cache, fsck)
