"""Makes the frozen files anew: ``python -m tests.formats.make``. docs/FORMATS.md has the formats.

The program itself writes all of them. What they hold stands here under names, by which the tests
expect it. Releases of zlib compress to different bytes, so nothing is compressed.
"""

import ast
import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lmdb

import monarchfs
from monarchfs.cache.index import Index
from monarchfs.cache.index.environment import DATABASES
from monarchfs.cache.index.recovery import mark_closed
from monarchfs.cache.store.checksum import checksum
from monarchfs.config import Config, User
from monarchfs.config.model import Descriptors
from monarchfs.config.places import DefaultPlaces, build_config
from monarchfs.config.settings import Settings
from monarchfs.control.registration import Registration
from monarchfs.fuse import requests
from monarchfs.fuse.handle_table import HandleTable, make_memory, make_table
from monarchfs.fuse.protocol import IN_HEADER
from monarchfs.fuse.session import hooks
from monarchfs.insight.recording import AnsweredBy, Event, File, Kind, RecordingWriter
from monarchfs.metrics import Metrics
from monarchfs.metrics.persistent import PersistentCounts
from monarchfs.peers.nodes import Peers, parse_nodes
from monarchfs.slurm.caches import close_cache
from monarchfs.slurm.records import write_record
from monarchfs.slurm.shares import record_of, share_key
from monarchfs.slurm.site import Site
from monarchfs.supervisor.directories import Holder, TierOwner, write_holder, write_owner
from monarchfs.supervisor.directories import write_record as write_tiers
from monarchfs.supervisor.mounted import Mounted
from monarchfs.supervisor.takeover import Handover
from monarchfs.types import ReplicaState, SourceVersion, TierFile
from monarchfs.worker.kept_hints import KeptHints, KeptOrder
from tests.index.tools import DIRECTORY, NOW, add_listing, open_index, replica, scratch, source_stat
from tests.store.tools import open_tier
from tests.support.indexing import record_found
from tests.support.jobs import add_events

FROZEN = Path(__file__).with_name("frozen")
ALICE = User("alice", 1000, 1001, (4, 5))


def user() -> User:
    return User("", os.geteuid(), os.getegid())


def written(path: Path, write: Callable[[int], object]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    write(descriptor)
    os.close(descriptor)


# Binary files as text: a line for each 32 bytes that are not 0.


def dump(data: bytes) -> str:
    rows = ((at, data[at : at + 32]) for at in range(0, len(data), 32))
    lines = [f"{at:08x} {row.hex(' ', 8)}" for at, row in rows if any(row)]
    return "\n".join([f"{len(data):08x} bytes", *lines, ""])


def load(text: str) -> bytearray:
    head, *lines = text.splitlines()
    data = bytearray(int(head[:8], 16))
    for line in lines:
        at, row = int(line[:8], 16), bytes.fromhex(line[9:])
        data[at : at + len(row)] = row
    return data


# The index

DIR, LISTED, CHANGED, PINNED, LINK, FAR = range(20, 26)
"""Inode numbers in the source; those of the mount begin with 16, in this order. Names, too."""
OLD, NEW = source_stat(CHANGED), source_stat(CHANGED, version=1)
LINK_STAT = source_stat(LINK, mode=stat.S_IFLNK | 0o777)
FAR_STAT = source_stat(FAR, device=7)._replace(mtime_ns=-(1 << 70), ctime_ns=1 << 65)
OWN_FILE = replica(1, tier=1)._replace(durable=True)
PART = replica(2, tier=1, state=ReplicaState.PARTIAL)
SMALL = replica(3, tier=1)._replace(segment=2**64 - 1, offset=8192)
MOVED = replica(4, tier=2)
FOUND = TierFile(b"found".ljust(16, b"."), 5, 100, 4096, True, NOW)
LONG_KEY = b"long" * 200


def fill(index: Index) -> None:
    index.replicas.begin_boot(b"boot 1")
    index.meta.tier_number("/tier")
    index.nodes.record_root(source_stat(2, mode=DIRECTORY), NOW)
    found = {
        one: record_found(index, 1, b"%d" % one, source_stat(one, mode=DIRECTORY), b"", NOW).ino
        for one in (DIR, LISTED)
    }
    attributes = {CHANGED: OLD, PINNED: source_stat(PINNED), LINK: LINK_STAT, FAR: FAR_STAT}
    for one, known in attributes.items():
        target = b"../target" if one == LINK else b""
        found[one] = record_found(index, found[DIR], b"%d" % one, known, target, NOW).ino
    index.replicas.put_replica(found[PINNED], MOVED)
    index.replicas.begin_boot(b"boot 2")
    index.replicas.put_replica(found[CHANGED], OWN_FILE)
    newer = record_found(index, found[DIR], b"%d" % CHANGED, NEW, b"", NOW + 1).ino
    index.replicas.put_replica(newer, PART)
    index.segments.begin_segments(1, [7, SMALL.segment])
    index.segments.segment_clean(1, 7)
    index.replicas.put_replicas([(found[FAR], SMALL)])
    index.replicas.record_found_files(1, [FOUND])
    index.replicas.begin_copies([(found[LISTED], 1, b"copy".ljust(16, b"."))])
    index.replicas.drop_replicas([found[PINNED]])
    index.replicas.put_replica(found[PINNED], MOVED._replace(tier=3, durable=True))
    add_listing(index, found[LISTED], (b"only listed", 30), (b"other", 31))
    index.xattrs.put_xattr(found[DIR], b"user.a", b"value")
    index.xattrs.put_xattr(found[DIR], b"user.b", 61)
    index.pins.pin(found[PINNED])
    index.meta.put(b"key", b"value")
    index.meta.put(LONG_KEY, b"long")
    assert index.replicas.lost_in_reboot(10) == []  # notes that it looked for them


def make_index(to: Path) -> None:
    with scratch() as state:
        index = open_index(state)
        fill(index)
        index.close()
        with lmdb.open(str(state / "index"), max_dbs=16, lock=False, readonly=True) as env:
            tables = [(name, env.open_db(name, create=False)) for name in DATABASES]
            with env.begin() as txn:
                rows = [
                    f"{name.decode()} {key.hex()} {value.hex()}\n"
                    for name, table in tables
                    for key, value in txn.cursor(table)
                ]
    (to / "index.txt").write_text("".join(rows))


def load_index(text: str, state: Path) -> None:
    """As a state directory has it, of which nobody knows how it was closed."""
    (state / "index").mkdir()
    with lmdb.open(str(state / "index"), max_dbs=16, lock=False) as env:
        tables = {name.decode(): env.open_db(name) for name in DATABASES}
        with env.begin(write=True) as txn:
            for row in text.splitlines():
                name, key, value = row.split(" ")
                txn.put(bytes.fromhex(key), bytes.fromhex(value), db=tables[name])


# State directory and tier

HOLDER = Holder(17, "/mnt", "/data", "0123456789abcdef", ("/tier",), checking=True)
TIERS = {"/tier": "0123456789abcdef-fedcba9876543210"}
OWNER = TierOwner("/data", 1000, "/state")
ORDER = KeptOrder("stream/\udcff", b"a\0b\n", 17, None)
WEIGHTS = {16: 0.5, 17: 2.0}
INDEX_FILE = b"as long as this"


def make_state(to: Path) -> None:
    state = to / "state"
    (state / "index").mkdir(parents=True)
    descriptor = os.open(state, os.O_RDONLY)
    write_tiers(descriptor, user(), TIERS)
    os.close(descriptor)
    written(state / "lock", lambda lock: write_holder(lock, HOLDER))
    said = KeptHints(str(state), NOW)
    said.keep_order(ORDER)
    said.keep_weights([(16, 9.0), (17, 2.0)], replace=True)
    said.keep_weights([(16, 0.5)], replace=False)
    data = place_index_file(state)
    mark_closed(str(state))
    data.unlink()


def place_index_file(state: Path) -> Path:
    data = state / "index" / "data.mdb"
    data.write_bytes(INDEX_FILE)
    os.utime(data, ns=(NOW, NOW))
    return data


SEGMENT = 0xFEDCBA9876543210
RECORDS = {0: b"first", 4096: b"second" * 1000, 12288: b"\0third"}
OWN, PART_BYTES = b"a file of its own", b"a part"
NAMES = [SourceVersion(0, ino, 100, -NOW, 1 << 65).replica_name for ino in range(5)]
IN_SEGMENT = [
    TierFile(name, checksum(data), len(data), -(-len(data) // 4096) * 4096, True, 0, SEGMENT, at)
    for name, (at, data) in zip(NAMES, RECORDS.items(), strict=False)
]


def make_tier(to: Path) -> None:
    path = to / "tier"
    path.mkdir()
    written(path / "owner", lambda owner: write_owner(owner, OWNER))
    tier = open_tier(path)
    tier.segments.write_each([(SEGMENT, offset, data) for offset, data in RECORDS.items()])
    tier.segments.lists.append(SEGMENT, IN_SEGMENT[:2])
    tier.segments.lists.append(SEGMENT, IN_SEGMENT[2:])
    tier.files.write_whole(NAMES[3], OWN)
    tier.files.mark_synced([(NAMES[3], checksum(OWN))])
    part = tier.files.create_part(NAMES[4], len(PART_BYTES))
    tier.files.write(part, 0, PART_BYTES)
    os.close(part)
    tier.close()


# What workers leave to the next one

HANDLES = [(16, 100, 0), (2**40, 102, 5)]
"""Inode number, number of the OPEN, backing id; the first handle is the second of its slot."""


def make_handles(to: Path) -> None:
    memory = make_table(4)
    table, c_part = HandleTable(memory, hooks), ctypes.PyDLL(hooks.__file__)
    table.end_handle(table.add(99, 98)[0])
    for ino, unique, backing_id in HANDLES:
        if backing_id:
            hooks.inode_back(ino, backing_id)
        table.opened(table.add(ino, unique)[0], accepted=True)
    table.enter_worker(2)
    table.beat()
    table.numbers, table.has_layouts, table.kernel_reads = 1000, True, False
    table.note_moved(NOW)
    for thread, since in ((0, 30), (1, 40)):
        c_part.table_busy(thread, ctypes.c_uint64(since))
        c_part.table_answered()
    table.close()
    hooks.inode_unback(HANDLES[1][0], False)
    (to / "handles.txt").write_text(dump(os.pread(memory, 1 << 20, 0)))
    os.close(memory)


REQUESTS = [
    IN_HEADER.pack(44, 1, unique, 16, 1000, 1001, 17, 0, 0) + b"abc\0" for unique in (200, 202)
]
"""The first waits in a buffer, the second in an entry."""
LOCKS = slice(16, 3584)


def make_journal(to: Path) -> None:
    with patch.object(requests, "ENTRIES", 256):
        memory = requests.make_journal()
    in_a_worker(memory, *REQUESTS)
    data = bytearray(os.pread(memory, 1 << 24, 0))
    os.close(memory)
    data[LOCKS] = bytes(LOCKS.stop - LOCKS.start)  # they are the C library's, and made anew
    (to / "requests.txt").write_text(dump(bytes(data)))


def in_a_worker(memory: int, *requests: bytes) -> str:
    program = str(Path(__file__).with_name("journal.py"))
    left = [request.hex() for request in requests]
    command = [sys.executable, program, str(hooks.__file__), str(memory), *left]
    return subprocess.check_output(command, pass_fds=[memory], text=True)


def parts_counted() -> tuple[dict[str, object], Metrics]:
    metrics = Metrics()
    metrics.errors_of_tier("/tier")
    return {"mount": metrics}, metrics


def make_counts(to: Path) -> None:
    memory = make_memory("frozen", 4096)
    parts, metrics = parts_counted()
    kept = PersistentCounts(memory, parts)
    kept.save()
    metrics.local_opens = 3
    metrics.requests.read_local.observe(20_000)
    metrics.tier_failed("/tier", 28)
    kept.save()
    (to / "counts.txt").write_text(dump(os.pread(memory, 4096, 0)))
    os.close(memory)


# Between a supervisor and its workers, standbys and clients

SETTINGS = Settings(peers=("a", "b"), peer_key="/key", log_file="/log")
PEERS = Peers(tuple(parse_nodes(("a", "b=2"), 9466)), 1, "secret", "pin")
HANDOVER_FDS = Descriptors(10, 11, 12, (13, 14), 15, 16, 17, metrics=18, peers=19)
REGISTRATION = Registration("/mnt/\udcff", 4026531840, "/data", 1000, 17, 123, "/state", NOW, 44)


def config() -> Config:
    places = DefaultPlaces("/cache", "/run/x")
    return build_config(SETTINGS, source="/s", mountpoint="/m", user=ALICE, places=places)


def handover() -> Handover:
    return Handover(
        *(config(), HANDOVER_FDS, (20, 21), 5, b"\0\xff init", 1, (2, 3), 44),
        *(PEERS.to_message(), "a:9466"),
    )


def key_by_key(message: dict[str, Any]) -> str:
    """A line for each key."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in message.items()]
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def make_protocol(to: Path) -> None:
    said: list[dict[str, Any]] = []

    def spawn(_user: User, words: list[str], _inherited: list[int], **_: int) -> Mock:
        memory = int(words[words.index("--bootstrap-fd") + 1])
        said.append(json.loads(os.pread(memory, 1 << 20, 0)))
        return Mock(pid=1)

    mounted = Mounted(handover(), [], Mock(), Mock(), Mock(peers=PEERS), Mock(end=2))
    with patch("monarchfs.supervisor.mounted.spawn_as", spawn):
        worker = mounted.start_worker(restarts=3, safe=True, waits=True)
    worker.init.close()
    worker.channel.close()
    said[0]["fds"] |= {"init": 22, "channel": 23}
    (to / "bootstrap.json").write_text(key_by_key(said[0]))
    (to / "handover.json").write_text(key_by_key(handover().to_json()))
    (to / "registration.json").write_text(REGISTRATION.to_json())
    (to / "channel.txt").write_text("".join(sorted(channel_messages())))


def channel_messages() -> set[str]:
    """The messages of the channel, and their keys, by the places where they are made."""
    found = set()
    for package in ("supervisor", "worker", "fuse"):
        for path in (Path(monarchfs.__file__).parent / package).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Dict):
                    continue
                keys = [key.value if isinstance(key, ast.Constant) else "**" for key in node.keys]
                if keys and keys[0] in ("do", "event"):
                    found.add(f"{keys[0]} {ast.unparse(node.values[0])}: {keys[1:]}\n")
    return found


# Recordings, snapshots, and what Slurm's prolog and epilog keep

FACTS = {"source": "/data", "data_path": "relay", "sampled": 1}
FILES = {16: File("a", 5000), 17: File("d/\udcff", 1 << 40), 18: File("d/", 0)}
EVENTS = [
    Event(1.5, 0.25, Kind.LOOKUP, AnsweredBy.SOURCE, 16, 7, 0, 0),
    Event(2.5, 0.5, Kind.OPEN, AnsweredBy.CHECKED, 16, 7, 0, 0),
    Event(3.5, 0.125, Kind.READ, AnsweredBy.TIER, 16, 7, 0, 5000),
    Event(4.0, 1.0, Kind.READ, AnsweredBy.PEER, 17, 8, 1 << 40, 131072),
    Event(6.0, 0.0, Kind.RELEASE, AnsweredBy.UNKNOWN, 16, 0, 0, 0),
]


def make_recording(to: Path) -> None:
    with (to / "recording").open("wb") as stream:
        writer = RecordingWriter(stream, 1e9, FACTS | {"dropped": 0}, NOW)
        add_events(writer, EVENTS[:3], NOW)
        writer.flush()
        writer.add_files(FILES)
        add_events(writer, EVENTS[3:], NOW)
        writer.finish(7.5, {"dropped": 3})


CACHE_KEY = share_key("/data", ALICE)
STATUS = {"tiers": [{"path": f"/tier/{CACHE_KEY}", "used_bytes": 4096}]}


def make_slurm(to: Path) -> None:
    (to / "slurm" / CACHE_KEY).mkdir(parents=True)
    record = {**record_of("/data", ALICE), "used": None, "granted": {"/tier": 1 << 30}}
    write_record(str(to / "slurm" / CACHE_KEY / "cache.json"), record, mode=0o644)
    with patch("time.time", lambda: 1e9):
        close_cache(Site(cache_dir=str(to)), CACHE_KEY, STATUS)


MAKERS = (
    make_index, make_state, make_tier, make_handles, make_journal, make_counts, make_protocol,
    make_recording, make_slurm,
)  # fmt: skip


def make_all(to: Path) -> None:
    compress = zlib.compress
    with patch("zlib.compress", lambda data, _level=-1: compress(data, 0)):
        for make in MAKERS:
            make(to)


def content(of: Path) -> dict[str, list[str]]:
    """The lines of each file, with bytes that are no text escaped."""
    files = (path for path in of.rglob("*") if path.is_file())
    return {
        str(path.relative_to(of)): ascii(path.read_bytes())[2:-1].split("\\n") for path in files
    }


if __name__ == "__main__":
    shutil.rmtree(FROZEN, ignore_errors=True)
    FROZEN.mkdir()
    make_all(FROZEN)
    for name in content(FROZEN):
        (FROZEN / name).chmod(0o644)
