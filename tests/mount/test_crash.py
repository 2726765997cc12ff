"""SIGKILL at every step of what is recorded and stored, and what the next mount makes of it.

Each test has a process of its own die at a named point: before or after a call of the index or of
a tier. A process that has imported everything is asked for those, because it forks in no time.
"""

import itertools
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from monarchfs.cache import accounts
from monarchfs.cache import segments as sharing
from monarchfs.cache.index.environment import Environment
from monarchfs.cache.index.listings import Listings
from monarchfs.cache.index.meta import Meta
from monarchfs.cache.index.nodes import NodeTables
from monarchfs.cache.index.replicas import Replicas
from monarchfs.cache.index.segments import Segments
from monarchfs.cache.store.listed import SegmentLists
from monarchfs.cache.store.replica_files import ReplicaFiles
from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.writer import CopyWriter
from monarchfs.types import ROOT_INO
from tests.support import on_disk
from tests.support.lookups import names
from tests.support.mirror import ALL_ROOM, KIB, MIB, Area, Mirror, content, until
from tests.support.mounting import REPOSITORY
from tests.support.programs import Running

TIERS = (400_000, ALL_ROOM)
FILES = {
    "kept": content(50_000, 1),
    "fast": content(260_000, 2),
    "small": content(60_000, 3),
    "slow": content(250_000, 4),
    "large": content(MIB + MIB // 2 + 5, 5),
    "d/part": content(3 * MIB, 6),
    "empty": b"",
    **{f"g{number}": content(9000 + number, 10 + number) for number in range(4)},
}

OWNERS: dict[str, Any] = {
    **{"environment": Environment, "nodes": NodeTables, "listings": Listings, "meta": Meta},
    **{"replicas": Replicas, "noted": Segments, "tier": Tier, "writer": CopyWriter},
    **{"moves": accounts},
    **{"files": ReplicaFiles, "segments": SegmentFiles, "lists": SegmentLists, "sharing": sharing},
}

Crash = tuple[str, str, int]
"""The call, ``before`` or ``after`` it, and the how many-th of them."""


def crashes(text: str) -> list[Crash]:
    """Before each of the first calls, and after the last: ``tier.sync*4`` are four. What is so
    after one of them is so before what comes next."""
    counted = [word.partition("*")[::2] for word in text.split()]
    found = []
    for call, count in counted:
        last = int(count or 1)
        found += [(call, "before", nth) for nth in range(1, last + 1)]
        found.append((call, "after", last))
    return found


# -- in the process that dies


def die_at(crash: Crash) -> None:
    """Have this process killed there."""
    call, when, nth = crash
    owner, name = OWNERS[call.split(".")[0]], call.split(".")[1]
    original, calls = getattr(owner, name), itertools.count(1)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        mine = next(calls) == nth
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if isinstance(result, Iterator):
            result = iter(list(result))
        if mine and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, hooked)


def known_area(path: Path) -> Area:
    """An area whose directories are there, or come to be."""
    area = Area.__new__(Area)
    area.path, area.source, area.state = path, path / "source", path / "state"
    return area


async def work(area: Area, boot_id: bytes, shares: bool) -> None:
    """A mount in which everything happens that leaves a trace."""
    async with area.mount(TIERS, copies=False, boot_id=boot_id, shares=shares) as mirror:
        await mirror.idle()
        await names(mirror, ROOT_INO)
        for path in ("small", "slow", "large", "empty"):
            assert await mirror.read_file(path) == FILES[path]
            await mirror.idle()
        await mirror.cache.accounts.sync()
        await read_some(mirror)
        mirror.cache.accounts.drop(await mirror.ino("d/part"), "for the test")
        mirror.cache.accounts.drop(await mirror.ino("small"), "for the test")
        await mirror.idle()
        await read_some(mirror)
        assert await mirror.read_file("small") == FILES["small"]
        await mirror.idle()
        mirror.cache.accounts.drop(await mirror.ino("fast"), "for the test")
        await mirror.idle()
        assert await mirror.read_file("slow") == FILES["slow"]
        await until(lambda: mirror.metrics.replicas_moved == 1, "the move")
        await mirror.idle()
        mirror.copier.together.value = 4
        for number in range(4):
            await mirror.want(f"g{number}")
        mirror.start_copying()
        await mirror.idle()


async def read_some(mirror: Mirror) -> None:
    """Leave a part of a large file behind."""
    handle = await mirror.open("d/part")
    data = await mirror.read(handle, 2 * MIB, 100 * KIB)
    assert data == FILES["d/part"][2 * MIB : 2 * MIB + 100 * KIB]
    handle.release()
    await mirror.idle()


def serve() -> None:
    """Fork for each line of standard input, and answer how that process ended."""
    for line in sys.stdin:
        path, boot_id, shares, crash = json.loads(line)
        pid = os.fork()
        if pid == 0:
            logging.disable()
            try:
                die_at(crash)
                trio.run(work, known_area(Path(path)), boot_id.encode(), shares)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


# -- in the tests

Kill = Callable[..., None]


@pytest.fixture(scope="module")
def kill() -> Iterator[Kill]:
    """Runs ``work`` in a process that dies there."""
    with Running([sys.executable, "-m", "tests.mount.test_crash"], cwd=REPOSITORY) as server:

        def ask(area: Area, boot_id: bytes, crash: Crash, *, shares: bool = False) -> None:
            server.tell(json.dumps((str(area.path), boot_id.decode(), shares, crash)))
            assert int(server.line()) == -signal.SIGKILL, "it did not get there"

        yield ask
        server.stdin.close()


def prepared(path: Path, *, shares: bool) -> Area:
    """With two files in the fast tier, synced; ``shares``: small copies share files."""
    area = Area(path)
    for name, data in FILES.items():
        area.write(name, data)

    async def prepare() -> None:
        async with area.mount(TIERS, shares=shares) as mirror:
            await mirror.copied("kept")
            await mirror.copied("fast")

    trio.run(prepare)
    return area


async def comes_up(area: Area, boot_id: bytes, *, kept: bool = True) -> None:
    """The books are right, the bytes too, and what was resident is not read again."""
    async with area.mount(TIERS, boot_id=boot_id) as mirror:
        await until(lambda: not any(left_in_segments(mirror)), "segments to give back what is left")
        await mirror.idle()
        mirror.check_books()
        nothing_left_in_segments(mirror)
        assert mirror.index.replicas.journal() == []
        resident = {
            path for path in FILES if mirror.residency.state(await mirror.ino(path)) == "resident"
        }
        assert not kept or "kept" in resident
        for path in sorted(resident):
            assert await mirror.read_file(path) == FILES[path], path
        assert mirror.posix.reads == []
        for path, data in FILES.items():
            assert await mirror.read_file(path) == data, path
        await mirror.idle()
        await mirror.settled()
        assert mirror.index.replicas.journal() == []
        assert mirror.metrics.tier_errors == 0


def left_in_segments(mirror: Mirror) -> Iterator[bool]:
    """Of each segment, whether it has what no record has."""
    for tier in mirror.tiers:
        yield from mirror.index.segments.segments(tier.id).values()


def nothing_left_in_segments(mirror: Mirror) -> None:
    """Each segment has a record, each list a segment, and nothing else lies there."""
    for tier in mirror.tiers:
        recorded = {r.segment for _, r in mirror.index.replicas.all() if r.tier == tier.id} - {0}
        assert mirror.index.segments.segments(tier.id).keys() == recorded
        assert set(tier.segments.found()) == recorded
        files = {path.name.removesuffix(".list") for path in Path(tier.path).glob("segments/*")}
        assert files == {f"{segment:016x}" for segment in recorded}


def lose_what_was_not_synced(area: Area, *, zeros: bool) -> None:
    """What a restart of the machine may do to it."""
    for tier in area.path.glob("tier*"):
        for segment in on_disk.segments(tier):
            on_disk.lose_what_was_not_noted(segment, cut=not zeros)
        for path in tier.rglob("*"):
            if path.parent.name == "segments" or not path.is_file():
                continue
            if path.stat().st_mode & 0o777 != 0o400:
                size = path.stat().st_size
                os.truncate(path, 0)
                os.truncate(path, size if zeros else size // 2)


def check(area: Area, tmp_path: Path, crash: Crash, *, kept: bool = True) -> None:
    """The next mount; and, of the same remains, the next one after a restart of the machine."""
    restarted = known_area(tmp_path / "restarted")
    for directory in ("state", "tier1", "tier2"):
        shutil.copytree(area.path / directory, restarted.path / directory)
    restarted.source = area.source
    lose_what_was_not_synced(restarted, zeros=crash[2] % 2 == 1)
    trio.run(partial(comes_up, restarted, b"another boot", kept=kept))
    trio.run(partial(comes_up, area, b"first boot", kept=kept))


class Mounts(NamedTuple):
    """What happens before the mount of another crash: at ``first`` the one before was killed (None:
    it was not), then the machine went down or not, and the index was lost or not."""

    crashes: list[Crash]
    first: Crash | None = None
    shares: bool = False
    reboots: bool = False
    keeps_index: bool = True


MOUNTS = {
    "at work": Mounts(
        crashes(
            "replicas.begin_copies*7 replicas.put_replica*10 replicas.drop_replicas*3 "
            "replicas.file_gone*2 replicas.mark_durable environment.sync listings.begin_listing "
            "listings.add_entries listings.finish_listing nodes.record_found_each "
            "files.create_part*2 files.write files.write_unit*2 files.write_whole*6 "
            "files.finish_part*2 files.remove*2 files.remove_part files.mark_synced tier.sync "
            "writer.suspend*2 moves._copy"
        )
    ),
    "at work on shared files": Mounts(
        crashes(
            "noted.begin_segments*2 replicas.put_replica*4 replicas.put_replicas*5 "
            "replicas.drop_replicas*3 replicas.mark_durable*2 environment.sync*4 "
            "noted.segment_clean segments._make*2 segments.write_each*8 segments.punch*3 "
            "lists.append*4 tier.sync*4 moves._read sharing._punch_gaps"
        ),
        shares=True,
    ),
    "while it gives back what a crash left": Mounts(
        crashes(
            "sharing._punch_gaps*2 segments.punch noted.segment_clean*2 segments.frees_punched*2"
        ),
        first=("segments.write_each", "after", 8),
        shares=True,
    ),
    "while it gives back a new segment": Mounts(
        crashes("segments.remove noted.segment_gone"),
        first=("segments._make", "after", 2),
        shares=True,
    ),
    "while it clears up after a crash": Mounts(
        crashes("replicas.file_gone files.discard"), first=("replicas.put_replica", "before", 3)
    ),
    "while it clears up after a reboot": Mounts(
        crashes(
            "replicas.begin_boot replicas.drop_replicas*2 replicas.file_gone*2 files.discard*2 "
            "meta.put*2"
        ),
        first=("tier.sync", "before", 1),
        reboots=True,
    ),
    "while a new index finds what is there": Mounts(
        crashes("replicas.record_found_files*2 replicas.claim*2 meta.put*2"),
        first=("files.mark_synced", "after", 1),
        keeps_index=False,
    ),
    "while a new index removes what was not synced": Mounts(
        crashes("files.remove*2"), first=("files.mark_synced", "before", 1), keeps_index=False
    ),
    "while it removes a segment without a list after a reboot": Mounts(
        crashes("segments.remove noted.segment_gone segments.data_ranges*2"),
        first=("lists.append", "before", 1),
        shares=True,
        reboots=True,
    ),
    "while it punches gaps after a reboot": Mounts(
        crashes("sharing._punch_gaps segments.punch noted.segment_clean"),
        first=("environment.sync", "after", 4),
        shares=True,
        reboots=True,
    ),
    "while it drops records after a reboot": Mounts(
        crashes("replicas.begin_boot replicas.drop_replicas*2 meta.put*2"),
        first=("lists.append", "after", 2),
        shares=True,
        reboots=True,
    ),
    **{
        f"while a new index finds shared files, killed {when} noting them": Mounts(
            crashes(
                "noted.begin_segments*2 replicas.record_found_files*2 replicas.claim*2 meta.put*2"
            ),
            first=("lists.append", when, 2),
            shares=True,
            keeps_index=False,
        )
        for when in ("before", "after")
    },
}


@pytest.mark.parametrize(
    ("name", "crash"),
    [(name, crash) for name, mounts in MOUNTS.items() for crash in mounts.crashes],
    ids=str,
)
def test_killed(tmp_path: Path, kill: Kill, name: str, crash: Crash) -> None:
    mounts = MOUNTS[name]
    area = prepared(tmp_path, shares=mounts.shares)
    if mounts.first is not None:
        kill(area, b"first boot", mounts.first, shares=mounts.shares)
    if not mounts.keeps_index:
        shutil.rmtree(area.state / "index")
    boot_id = b"second boot" if mounts.reboots else b"first boot"
    kill(area, boot_id, crash, shares=mounts.shares)
    check(area, tmp_path, crash, kept=mounts.keeps_index)


@pytest.mark.smoke
@pytest.mark.parametrize("nth", [1, 3, 6])
@pytest.mark.parametrize("indexed", [True, False])
def test_killed_amid_a_record(tmp_path: Path, kill: Kill, nth: int, indexed: bool) -> None:
    """A part of it is written, and no record knows it."""
    area = prepared(tmp_path, shares=True)
    crash = ("segments.write_each", "after", nth)
    kill(area, b"first boot", crash, shares=True)
    newest = max(on_disk.segments(area.path), key=lambda path: path.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size - 5000)
    if not indexed:
        shutil.rmtree(area.state / "index")
    check(area, tmp_path, crash, kept=indexed)


if __name__ == "__main__":
    serve()
