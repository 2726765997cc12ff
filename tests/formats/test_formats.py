"""Files made by an earlier version are read as they were written, and today's are the same.

See ``make`` for what they hold, and docs/FORMATS.md for the formats.
"""

import ctypes
import importlib
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

import pytest

from monarchfs.cache.index import LastClose, last_close, problems
from monarchfs.cache.index.recovery import mark_open
from monarchfs.control.registration import decode_registration
from monarchfs.fuse.handle_table import (
    HandleTable,
    Vitals,
    make_memory,
    make_table,
    open_slots,
    read_vitals,
)
from monarchfs.fuse.protocol import IN_HEADER
from monarchfs.fuse.session import hooks
from monarchfs.insight.analysis import analyze
from monarchfs.insight.recording import EVENT, open_recording
from monarchfs.metrics.persistent import PersistentCounts
from monarchfs.peers.nodes import Peers
from monarchfs.slurm.caches import CacheShare, read_cache
from monarchfs.slurm.site import Site
from monarchfs.supervisor.directories import read_holder, read_owner, read_record_of
from monarchfs.supervisor.takeover import Handover
from monarchfs.types import Listing, Replica, TierTotals
from monarchfs.worker.bootstrap import Bootstrap
from monarchfs.worker.kept_hints import KeptHints
from tests.formats import make
from tests.formats.make import FROZEN, load
from tests.index.tools import NOW, open_index
from tests.store.tools import open_tier
from tests.support.mounting import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "FORMATS.md").read_text()
MODULES = (
    *("config.model", "fuse.handle_table", "fuse.requests", "insight.recording"),
    *("cache.index.records", "cache.store.listed", "metrics.persistent"),
    *("slurm.report", "worker.kept_hints"),
)
VERSION = re.compile(r"_?(?:[A-Z]+_)?(?:VERSION|MAGIC)")


@pytest.fixture
def memory() -> Iterator[list[int]]:
    opened: list[int] = []
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def in_memory(name: str, memory: list[int]) -> int:
    data = load((FROZEN / name).read_text())
    memory.append(make_memory("frozen", len(data)))
    os.pwrite(memory[-1], data, 0)
    return memory[-1]


def test_today_the_same_is_written(tmp_path: Path) -> None:
    make.make_all(tmp_path)
    frozen, today = make.content(FROZEN), make.content(tmp_path)
    lines = [
        line[:500]
        for name in sorted(frozen.keys() | today.keys())
        for line in unified_diff(frozen.get(name, []), today.get(name, []), name, name, n=0)
    ]
    assert not lines, "\n".join(["today's program writes something else:", *lines])


def test_the_document_has_each_version_and_layout() -> None:
    for name in MODULES:
        for what, value in vars(importlib.import_module(f"monarchfs.{name}")).items():
            if isinstance(value, struct.Struct):
                assert f"`{value.format}`" in DOCUMENT, f"{name}.{what}"
            elif VERSION.fullmatch(what):
                is_text = isinstance(value, bytes) or value > 1 << 32
                shown = f'"{bytes_of(value).decode()}"' if is_text else value
                assert f"`{what} = {shown}`" in DOCUMENT, f"{name}.{what}"


def bytes_of(value: int | bytes) -> bytes:
    return value.to_bytes(8, "little") if isinstance(value, int) else value


def test_the_index(tmp_path: Path) -> None:
    make.load_index((FROZEN / "index.txt").read_text(), tmp_path)
    assert problems(str(tmp_path)) == []
    mark_open(str(tmp_path))
    index = open_index(tmp_path)
    nodes = index.nodes.nodes_of(range(30))
    stats = {18: make.OLD, 20: make.LINK_STAT, 21: make.FAR_STAT, 22: make.NEW}
    assert list(nodes) == [1, *range(16, 23)]
    assert {ino: nodes[ino].stat for ino in stats} == stats
    assert [ino for ino, node in nodes.items() if node.outdated] == [18]
    assert (nodes[20].target, nodes[20].parent, nodes[20].name) == (b"../target", 16, b"24")
    listing = [(e.name, e.ino, e.shown_ino) for e, _ in index.listings.entries(17, 2, 9)]
    assert listing == [(b"only listed", 0, 25), (b"other", 0, 26)]
    assert index.listings.listing(17) == Listing(NOW, NOW, NOW, True)
    assert [(e.name, e.ino) for e, _ in index.listings.entries(16, 2, 1)] == [(b"22", 22)]
    replicas = {18: make.OWN_FILE, 19: make.MOVED._replace(tier=3, durable=True), 21: make.SMALL}
    replicas |= {22: make.PART, 23: Replica.found(1, make.FOUND)}
    assert {ino: index.replicas.part(ino) for ino, _ in index.replicas.all()} == replicas
    assert index.replicas.journal() == [(1, b"copy............"), (2, make.MOVED.name)]
    assert (index.replicas.under_way(), index.replicas.lost_in_reboot(9)) == ([17], [])
    assert index.segments.segments(1) == {7: False, make.SMALL.segment: True}
    assert index.segments.segment_records(1, make.SMALL.segment) == [(8192, 21)]
    assert index.replicas.tier_totals() == {
        1: TierTotals(2, 1, 1, 16384),
        3: TierTotals(1, 0, 0, 4096),
    }
    assert index.replicas.outdated_replicas(1, 9) == [18, 23]
    assert (index.meta.tier_paths(), index.replicas.begin_boot(b"boot 2")) == ({1: "/tier"}, False)
    assert [index.xattrs.xattr(16, n) for n in (b"user.a", b"user.b", b"")] == [b"value", 61, None]
    assert (index.pins.pins(), index.pins.pinned(19)) == ([19], True)
    assert [index.meta.get(key) for key in (b"key", make.LONG_KEY)] == [b"value", b"long"]
    assert index.nodes.purge_outdated(NOW + 1, 9) == 0
    index.close()


def test_the_state_directory(tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(FROZEN / "state", state)
    with (state / "lock").open() as lock:
        assert read_holder(lock.fileno()) == make.HOLDER
    assert read_record_of(str(state), make.user()) == make.TIERS
    make.place_index_file(state)
    assert last_close(str(state)) is LastClose.CLEAN
    said = KeptHints(str(state), NOW)
    assert (said.orders(), said.weights()) == ([make.ORDER], make.WEIGHTS)


def test_a_tier(tmp_path: Path) -> None:
    shutil.copytree(FROZEN / "tier", tmp_path / "tier")
    (own_file,) = (tmp_path / "tier").glob("??/*")
    own_file.chmod(0o400)
    with (tmp_path / "tier/owner").open() as owner:
        assert read_owner(owner.fileno()) == make.OWNER
    tier = open_tier(tmp_path / "tier")
    assert tier.segments.found() == [make.SEGMENT]
    assert [row._replace(made_ns=0) for row in tier.segments.noted(make.SEGMENT)] == make.IN_SEGMENT
    for row in make.IN_SEGMENT:
        assert tier.segments.verify(make.SEGMENT, row.offset, row.size, row.checksum)
    (own,) = tier.files.complete(make.NAMES[3][0])
    assert (own.name, own.size, own.synced) == (make.NAMES[3], len(make.OWN), True)
    assert tier.files.verify(own.name, own.checksum, own.size)
    assert [(p.name, p.size) for p in tier.files.parts()] == [(make.NAMES[4], len(make.PART_BYTES))]
    tier.close()


def test_open_files(memory: list[int]) -> None:
    table = in_memory("handles.txt", memory)
    assert [slot[1:] for slot in open_slots(table)] == make.HANDLES
    assert read_vitals(table) == Vitals(1, 2, 40)
    worker = HandleTable(table, hooks)
    assert [slot[1:] for slot in worker] == make.HANDLES
    assert [worker.numbers, worker.moved_ns, worker.has_layouts, worker.kernel_reads] == [
        *(1000, NOW, True, False)
    ]
    worker.close()
    memory.append(make_table())
    assert os.fstat(memory[-1]).st_size == 4096 + 32 * 2**20


def test_requests_without_an_answer(memory: list[int]) -> None:
    taken = make.in_a_worker(in_memory("requests.txt", memory)).split()
    assert sorted(map(bytes.fromhex, taken)) == sorted(make.REQUESTS)


def test_counts(memory: list[int]) -> None:
    parts, metrics = make.parts_counted()
    PersistentCounts(in_memory("counts.txt", memory), parts).restore()
    assert (metrics.local_opens, metrics.requests.read_local.total_ns) == (3, 20_000)
    assert metrics.tier_errors_by["/tier"].by_name["ENOSPC"] == 1


def test_what_processes_tell_each_other(memory: list[int]) -> None:
    memory.append(os.open(FROZEN / "bootstrap.json", os.O_RDONLY))
    told = Bootstrap.read(os.dup(memory[-1]))
    assert (told.config, told.fds.tiers, told.channel_fd) == (make.config(), (13, 14), 23)
    assert (told.restarts, told.safe, told.waits, told.source_root) == (3, True, True, (2, 3))
    message, expected = json.loads((FROZEN / "handover.json").read_text()), make.handover()
    handed = Handover.from_json(message, expected.all_descriptors)
    assert replace(handed, peers=expected.peers) == expected
    for peers in (told.peers, handed.peers):
        assert peers is not None
        assert Peers.from_message(peers) == make.PEERS
    assert decode_registration((FROZEN / "registration.json").read_bytes(), 0) == make.REGISTRATION


def test_a_recording() -> None:
    recording = open_recording(FROZEN / "recording")
    assert [e._replace(begin=round(e.begin, 6)) for e in recording.events] == make.EVENTS
    assert (recording.begun, recording.seconds, recording.complete) == (1e9, 7.5, True)
    assert (recording.facts, recording.files) == (make.FACTS | {"dropped": 3}, make.FILES)
    assert analyze(recording).events == len(make.EVENTS)


def test_an_event_of_the_c_part_is_one_of_a_recording() -> None:
    c_part, event, lost = ctypes.PyDLL(hooks.__file__), bytes(EVENT.size), ctypes.c_uint64()
    assert c_part.record_begin(ctypes.c_uint64(0), 1) == 0
    nobody = 1 << 30  # above all numbers of processes
    request = IN_HEADER.pack(44, 1, 200, 16, 1000, 1001, nobody, 0, 0) + b"abc\0"
    c_part.record_request(request, ctypes.c_size_t(44), ctypes.c_uint64(5))
    found = ctypes.c_uint64(16)
    c_part.record_answer(ctypes.c_uint64(200), 4, 0, ctypes.byref(found), ctypes.c_size_t(8))
    assert c_part.record_drain(event, ctypes.c_size_t(1), ctypes.byref(lost)) == 1
    c_part.record_end()
    begin, ino, offset, _took, *rest = EVENT.unpack(event)
    assert (begin, ino, offset, rest) == (5, 16, 0, [0, nobody, 1, 4])


def test_a_cache_of_slurm() -> None:
    assert read_cache(Site(cache_dir=str(FROZEN)), make.CACHE_KEY) == CacheShare(
        *(make.CACHE_KEY, "/data", 1000, "alice", {"/tier": 1 << 30}, {"/tier": 4096}, 1e9)
    )
