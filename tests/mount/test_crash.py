"""SIGKILL at every step of what is recorded and stored, and what the next mount makes of it.

Each test has a process of its own die at a named point: before or after a call of the index or of
a tier. A process that has imported everything is asked for those, because it forks in no time.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from monarchfs.cache import moves
from monarchfs.cache import segments as sharing
from monarchfs.cache.cache import Cache
from monarchfs.index import Index
from monarchfs.store.replica_files import ReplicaFiles
from monarchfs.store.segment_lists import SegmentLists
from monarchfs.store.segments import SegmentFiles
from monarchfs.store.tier import Tier
from monarchfs.types import ROOT_INO
from tests.support import on_disk
from tests.support.lookups import names
from tests.support.mirror import ALL_ROOM, KIB, MIB, Area, Mirror, content, until
from tests.support.mounting import REPOSITORY

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
    **{"index": Index, "tier": Tier, "cache": Cache, "moves": moves},
    **{"files": ReplicaFiles, "segments": SegmentFiles, "lists": SegmentLists, "sharing": sharing},
}

Crash = tuple[str, str, int]
"""The call, ``before`` or ``after`` it, and the how many-th of them."""


def crashes(**times: int) -> list[Crash]:
    """Of each of these calls, the first ones."""
    return [
        (call.replace("__", "."), when, nth)
        for call, count in times.items()
        for nth in range(1, count + 1)
        for when in ("before", "after")
    ]


def named(crash: Crash) -> str:
    return "-".join(map(str, crash))


# -- in the process that dies


def die_at(crash: Crash) -> None:
    """Have this process killed there."""
    call, when, nth = crash
    owner, name = OWNERS[call.split(".")[0]], call.split(".")[1]
    original = getattr(owner, name)
    calls = 0

    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls == nth
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
        await mirror.cache.sync()
        await read_some(mirror)
        mirror.cache.drop(await mirror.ino("d/part"), "for the test")
        mirror.cache.drop(await mirror.ino("small"), "for the test")
        await mirror.idle()
        await read_some(mirror)
        assert await mirror.read_file("small") == FILES["small"]
        await mirror.idle()
        mirror.cache.drop(await mirror.ino("fast"), "for the test")
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
        path, boot_id, shares, call, when, nth = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            logging.disable()
            try:
                die_at((call, when, int(nth)))
                trio.run(work, known_area(Path(path)), boot_id.encode(), shares == "True")
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


# -- in the tests

Kill = Callable[..., None]


@pytest.fixture(scope="module")
def kill() -> Iterator[Kill]:
    """Runs ``work`` in a process that dies there."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.mount.test_crash"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        stdin, stdout = server.stdin, server.stdout
        assert stdin is not None
        assert stdout is not None

        def ask(area: Area, boot_id: bytes, crash: Crash, *, shares: bool = False) -> None:
            words = (str(area.path), boot_id.decode(), str(shares), *map(str, crash))
            print(*words, sep="\t", file=stdin, flush=True)
            assert int(stdout.readline()) == -signal.SIGKILL, "it did not get there"

        yield ask
        stdin.close()


@pytest.fixture
def area(tmp_path: Path) -> Area:
    """With two files in the fast tier, synced."""
    return prepared(tmp_path, shares=False)


@pytest.fixture
def shared(tmp_path: Path) -> Area:
    """The same where small copies share files."""
    return prepared(tmp_path, shares=True)


def prepared(path: Path, *, shares: bool) -> Area:
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
        await until(lambda: not any_gaps(mirror), "what was left in segments to be given back")
        await mirror.idle()
        mirror.check_books()
        nothing_left_in_segments(mirror)
        assert mirror.index.journal() == []
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
        assert mirror.index.journal() == []
        assert mirror.metrics.tier_errors == 0


def any_gaps(mirror: Mirror) -> bool:
    """Whether a segment may have bytes without a record, before this mount has made any."""
    return any(any(mirror.index.segments(tier.id).values()) for tier in mirror.tiers)


def nothing_left_in_segments(mirror: Mirror) -> None:
    """Each segment has a record, each list a segment, and nothing else lies there."""
    for tier in mirror.tiers:
        recorded = {r.segment for _, r in mirror.index.replicas() if r.tier == tier.id} - {0}
        assert set(tier.segments.found()) == recorded == mirror.index.segments(tier.id).keys()
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


WORK = crashes(
    index__begin_copies=7,
    index__put_replica=10,
    index__drop_replicas=3,
    index__file_gone=2,
    index__mark_durable=1,
    index__sync=1,
    index__begin_listing=1,
    index__add_entries=1,
    index__finish_listing=1,
    index__record_found_each=1,
    files__create_part=2,
    files__write=1,
    files__write_unit=2,
    files__write_whole=6,
    files__finish_part=2,
    files__remove=2,
    files__remove_part=1,
    files__mark_synced=1,
    tier__sync=1,
    cache__suspend=2,
    moves___copy=1,
)


@pytest.mark.parametrize("crash", WORK, ids=named)
def test_killed_at_work(area: Area, tmp_path: Path, kill: Kill, crash: Crash) -> None:
    kill(area, b"first boot", crash)
    check(area, tmp_path, crash)


SHARED_WORK = crashes(
    index__begin_segments=2,
    index__put_replica=4,
    index__put_replicas=5,
    index__drop_replicas=3,
    index__mark_durable=2,
    index__sync=4,
    index__segment_clean=1,
    segments___make=2,
    segments__write_each=8,
    segments__punch=3,
    lists__append=4,
    tier__sync=4,
    moves___read=1,
    sharing___punch_gaps=1,
)


@pytest.mark.parametrize("crash", SHARED_WORK, ids=named)
def test_killed_at_work_on_shared_files(
    shared: Area, tmp_path: Path, kill: Kill, crash: Crash
) -> None:
    kill(shared, b"first boot", crash, shares=True)
    check(shared, tmp_path, crash)


@pytest.mark.smoke
@pytest.mark.parametrize("nth", [1, 3, 6])
@pytest.mark.parametrize("indexed", [True, False])
def test_killed_amid_a_record(
    shared: Area, tmp_path: Path, kill: Kill, nth: int, indexed: bool
) -> None:
    """A part of it is written, and no record knows it."""
    crash = ("segments.write_each", "after", nth)
    kill(shared, b"first boot", crash, shares=True)
    newest = max(on_disk.segments(shared.path), key=lambda path: path.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size - 5000)
    if not indexed:
        shutil.rmtree(shared.state / "index")
    check(shared, tmp_path, crash, kept=indexed)


@pytest.mark.parametrize(
    ("first", "crash"),
    [
        (("segments.write_each", "after", 8), crash)
        for crash in crashes(
            sharing___punch_gaps=2,
            segments__punch=1,
            index__segment_clean=2,
            segments__frees_punched=2,
        )
    ]
    + [
        (("segments._make", "after", 2), crash)
        for crash in crashes(segments__remove=1, index__segment_gone=1)
    ],
    ids=str,
)
def test_killed_while_it_gives_back_what_a_crash_left(
    shared: Area, tmp_path: Path, kill: Kill, first: Crash, crash: Crash
) -> None:
    kill(shared, b"first boot", first, shares=True)
    kill(shared, b"first boot", crash, shares=True)
    check(shared, tmp_path, crash)


@pytest.mark.parametrize(
    "crash",
    crashes(index__file_gone=1, files__discard=1),
    ids=named,
)
def test_killed_while_it_clears_up_after_a_crash(
    area: Area, tmp_path: Path, kill: Kill, crash: Crash
) -> None:
    kill(area, b"first boot", ("index.put_replica", "before", 3))
    kill(area, b"first boot", crash)
    check(area, tmp_path, crash)


@pytest.mark.parametrize(
    "crash",
    crashes(
        index__begin_boot=1,
        index__drop_replicas=2,
        index__file_gone=2,
        files__discard=2,
        index__meta_put=2,
    ),
    ids=named,
)
def test_killed_while_it_clears_up_after_a_reboot(
    area: Area, tmp_path: Path, kill: Kill, crash: Crash
) -> None:
    kill(area, b"first boot", ("tier.sync", "before", 1))
    kill(area, b"second boot", crash)
    check(area, tmp_path, crash)


@pytest.mark.parametrize(
    "crash",
    crashes(index__record_found_files=2, index__claim=2, index__meta_put=2),
    ids=named,
)
def test_killed_while_a_new_index_finds_what_is_there(
    area: Area, tmp_path: Path, kill: Kill, crash: Crash
) -> None:
    kill(area, b"first boot", ("files.mark_synced", "after", 1))
    shutil.rmtree(area.state / "index")
    kill(area, b"first boot", crash)
    check(area, tmp_path, crash, kept=False)


@pytest.mark.parametrize(
    ("first", "crash"),
    [
        (("lists.append", "before", 1), crash)
        for crash in crashes(segments__remove=1, index__segment_gone=1, segments__data_ranges=2)
    ]
    + [
        (("index.sync", "after", 4), crash)
        for crash in crashes(sharing___punch_gaps=1, segments__punch=1, index__segment_clean=1)
    ]
    + [
        (("lists.append", "after", 2), crash)
        for crash in crashes(index__begin_boot=1, index__drop_replicas=2, index__meta_put=2)
    ],
    ids=str,
)
def test_killed_while_it_clears_up_shared_files_after_a_reboot(
    shared: Area, tmp_path: Path, kill: Kill, first: Crash, crash: Crash
) -> None:
    kill(shared, b"first boot", first, shares=True)
    kill(shared, b"second boot", crash, shares=True)
    check(shared, tmp_path, crash)


@pytest.mark.parametrize(
    "crash",
    crashes(
        index__begin_segments=2, index__record_found_files=2, index__claim=2, index__meta_put=2
    ),
    ids=named,
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_a_new_index_finds_shared_files(
    shared: Area, tmp_path: Path, kill: Kill, when: str, crash: Crash
) -> None:
    kill(shared, b"first boot", ("lists.append", when, 2), shares=True)
    shutil.rmtree(shared.state / "index")
    kill(shared, b"first boot", crash, shares=True)
    check(shared, tmp_path, crash, kept=False)


@pytest.mark.parametrize("crash", crashes(files__remove=2), ids=named)
def test_killed_while_a_new_index_removes_what_was_not_synced(
    area: Area, tmp_path: Path, kill: Kill, crash: Crash
) -> None:
    kill(area, b"first boot", ("files.mark_synced", "before", 1))
    shutil.rmtree(area.state / "index")
    kill(area, b"first boot", crash)
    check(area, tmp_path, crash, kept=False)


if __name__ == "__main__":
    serve()
