"""Files with holes: their copies reserve and use about their blocks, never more than there is."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from monarchfs.prefetch.queue import Priority
from monarchfs.store.checksum import combine, digests
from monarchfs.types import ReplicaState, SourceStat
from tests.support.mirror import KIB, MIB, Area, Mirror, content

SIZE = 64 * MIB
DATA = content(300 * KIB, 5)


def make_sparse(area: Area, name: str, pieces: list[tuple[int, bytes]], size: int = SIZE) -> bytes:
    """A file with ``pieces`` at their offsets; its bytes."""
    path = area.source / name
    with path.open("wb") as opened:
        opened.truncate(size)
        for offset, data in pieces:
            opened.seek(offset)
            opened.write(data)
    return path.read_bytes()


def occupied(mirror: Mirror) -> int:
    total = 0
    for path in Path(mirror.tier.path).rglob("*"):
        with suppress(FileNotFoundError):  # it has its final name now
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


def watch_capacity(mirror: Mirror, capacity: int) -> None:
    """After each write the tier holds no more."""

    def look() -> None:
        assert occupied(mirror) <= capacity

    mirror.tier.faults.before("after_write", look)


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source says of each large file that it occupies next to nothing."""
    few = property(lambda stat: min(stat.size, 64 * KIB))
    monkeypatch.setattr(SourceStat, "occupied_bytes", few)


async def test_it_is_placed_by_its_blocks(area: Area) -> None:
    data = make_sparse(area, "f", [(0, DATA), (40 * MIB + 5, DATA), (SIZE - 10, b"the end..")])
    async with area.mounted([2 * MIB]) as mirror:
        watch_capacity(mirror, 2 * MIB)
        ino = await mirror.copied("f")
        record = mirror.replica(ino)
        assert record.allocated_bytes == occupied(mirror) < MIB
        assert await mirror.read_file("f") == data
        assert not mirror.posix.reads
    async with area.mount([2 * MIB]) as again:
        assert await again.read_file("f") == data
        assert not again.posix.reads


async def test_holes_are_not_read(area: Area) -> None:
    """Of a file of a terabyte, the blocks around what it has."""
    size, far = 1 << 40, (1 << 39) + 5
    path = area.source / "f"
    with path.open("wb") as opened:
        opened.truncate(size)
        for at in (3 * MIB, far):
            opened.seek(at)
            opened.write(DATA[:4096])
    async with area.mounted([2 * MIB]) as mirror:
        watch_capacity(mirror, 2 * MIB)
        with trio.fail_after(30):
            await mirror.want("f")
            await mirror.idle()
        assert mirror.residency.state(await mirror.ino("f")) == "resident"
        assert sum(read.size for read in mirror.posix.reads) <= 4 * 256 * KIB
        assert occupied(mirror) < MIB
        handle = await mirror.open("f")
        for at in (0, 3 * MIB, far, size - 4096):
            found = await mirror.read(handle, at, 4096)
            assert found == (DATA[:4096] if at in (3 * MIB, far) else bytes(4096))
        handle.release()


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_between_holes_is_copied(area: Area, seed: int) -> None:
    """Extents of any size, at any offset, in a file whose end may be a hole; its checksum is that
    of a copy made of all its bytes."""
    rng = random.Random(seed)
    size = rng.choice([20 * MIB, 20 * MIB + 1, 20 * MIB - 5000])
    pieces = [
        (rng.randrange(size - 400 * KIB), content(rng.choice([1, 5000, 300 * KIB]), n))
        for n in range(rng.randrange(12))
    ]
    data = make_sparse(area, "f", pieces, size)
    async with area.mounted([64 * MIB], copy_workers=rng.choice([1, 4])) as mirror:
        await mirror.want("f")
        await mirror.idle()
        record = mirror.replica(await mirror.ino("f"))
        assert record.checksum == combine(digests(data))
        assert await mirror.read_file("f") == data
        most = sum(len(piece) + 3 * 256 * KIB for _at, piece in pieces)
        assert sum(read.size for read in mirror.posix.reads) <= most


async def test_many_fit_where_their_sizes_would_not(area: Area) -> None:
    for number in range(12):
        make_sparse(area, f"f{number}", [(number * 5 * MIB, DATA)])
    async with area.mounted([6 * MIB], copy_workers=8) as mirror:
        watch_capacity(mirror, 6 * MIB)
        for number in range(12):
            await mirror.want(f"f{number}", Priority.SCANNED)
        await mirror.idle()
        for number in range(12):
            assert mirror.residency.state(await mirror.ino(f"f{number}")) == "resident"


@pytest.mark.usefixtures("lying")
async def test_one_that_turns_out_to_have_more_blocks_asks_for_more_room(area: Area) -> None:
    area.write("f", content(9 * MIB + 5))
    async with area.mounted([10 * MIB]) as mirror:
        watch_capacity(mirror, 10 * MIB)
        await mirror.copied("f")


@pytest.mark.usefixtures("lying")
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "scanned"])
async def test_and_ends_as_no_room_where_there_is_none(area: Area, opened: bool) -> None:
    data = area.write("f", content(9 * MIB + 5))
    async with area.mounted([4 * MIB]) as mirror:
        watch_capacity(mirror, 4 * MIB)
        if opened:
            assert await mirror.read_file("f", 300_000) == data
        else:
            await mirror.want("f")
        await mirror.idle()
        ino = await mirror.ino("f")
        record = mirror.replica(ino)
        assert record.state is ReplicaState.PARTIAL
        assert 2 * MIB <= record.allocated_bytes <= 4 * MIB
        assert mirror.reason(ino).startswith("no room for the rest")
        await mirror.settled()
        assert await mirror.read_file("f", 300_000) == data
    async with area.mount([16 * MIB]) as roomy:
        await roomy.want("f")
        await roomy.settled()
        assert roomy.residency.state(await roomy.ino("f")) == "resident"
        assert roomy.bytes_read("f") <= len(data) - 2 * MIB
        assert await roomy.read_file("f") == data


@pytest.mark.usefixtures("lying")
async def test_the_promise_holds_for_many_at_once(area: Area) -> None:
    for number in range(8):
        area.write(f"f{number}", content(2 * MIB, number))
    area.write("small", content(100 * KIB, 9))
    async with area.mounted([7 * MIB], copy_workers=8) as mirror:
        watch_capacity(mirror, 7 * MIB)
        for number in range(8):
            await mirror.want(f"f{number}")
        await mirror.idle()
        reasons = [mirror.reason(await mirror.ino(f"f{number}")) for number in range(8)]
        assert any(reason.startswith("no room") for reason in reasons), reasons


async def test_a_suspended_replica_goes_on_in_as_little_room(area: Area) -> None:
    data = make_sparse(area, "f", [(0, DATA), (40 * MIB, DATA)])
    async with area.mount([MIB], copies=False) as mirror:
        handle = await mirror.open("f")
        assert await mirror.read(handle, 0, 1000) == data[:1000]
        assert await mirror.read(handle, 20 * MIB, 1000) == bytes(1000)
        handle.release()
        await mirror.settled()
        assert mirror.residency.state(await mirror.ino("f")) == "partial"
    async with area.mount([MIB]) as again:
        watch_capacity(again, MIB)
        await again.want("f")
        await again.settled()
        assert again.residency.state(await again.ino("f")) == "resident"
        assert await again.read_file("f") == data
