"""Copies go by where Lustre has the bytes, and bring nothing back from tape."""

import errno
import os
from collections import Counter

import pytest
import trio
import trio.testing

from monarchfs.prefetch import copier
from monarchfs.prefetch.governor import TargetLimit
from monarchfs.prefetch.queue import Priority
from monarchfs.source.layout import ATTRIBUTE
from monarchfs.types import Lane
from tests.support.layouts import RELEASED, plain
from tests.support.mirror import MIB, Area, Mirror, content


def give_layouts(
    mirror: Mirror, layouts: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the source were on Lustre. The dictionary may be changed later."""
    real = os.getxattr

    def getxattr(file: int | bytes, asked: bytes, *, follow_symlinks: bool = True) -> bytes:
        if not isinstance(file, int):
            return real(file, asked, follow_symlinks=follow_symlinks)
        assert asked == ATTRIBUTE
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        if name not in layouts:
            raise OSError(errno.ENODATA, "no layout")
        return layouts[name]

    mirror.posix.has_layouts = mirror.source.has_layouts = True
    monkeypatch.setattr(os, "getxattr", getxattr)


TAPED = plain([], pattern=RELEASED)
both_sizes = pytest.mark.parametrize("size", [1000, 3 * MIB])


@both_sizes
@pytest.mark.parametrize("priority", [Priority.SCANNED, Priority.HINTED])
async def test_what_is_on_tape_stays_there(
    area: Area, size: int, priority: Priority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until somebody brings it back: then it is copied as any other."""
    area.write("taped", content(size))
    area.write("other", content(size, 2))
    layouts = {"taped": TAPED}
    async with area.mount() as mirror:
        give_layouts(mirror, layouts, monkeypatch)
        for name in ("taped", "other"):
            await mirror.want(name, priority)
        await mirror.settled()
        assert mirror.bytes_read("taped") == 0
        assert await mirror.state("taped") == "remote"
        assert await mirror.state("other") == "resident"
        assert "archive" in mirror.reason(await mirror.ino("taped"))
        assert mirror.metrics.copies_failed == 0
        layouts["taped"] = plain([1])
        await mirror.want("taped")
        await mirror.settled()
        assert await mirror.state("taped") == "resident"
        assert await mirror.read_file("taped") == content(size)


async def test_a_reader_recalls_what_the_copier_is_about_to_leave_there(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of it is kept."""
    area.write("taped", content(3 * MIB))
    read: list[bytes] = []
    async with area.mounted() as mirror, trio.open_nursery() as readers:
        give_layouts(mirror, {"taped": TAPED}, monkeypatch)
        gate = mirror.posix.faults.gate("layout")
        await mirror.want("taped")
        await gate.arrived()
        handle = await mirror.open("taped")

        async def reader() -> None:
            read.append(await mirror.read(handle, 0, 3 * MIB))
            handle.release()

        readers.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        gate.open()
        await mirror.settled()
        assert await mirror.state("taped") == "resident"
    assert read == [content(3 * MIB)]


async def test_a_read_ends_where_a_stripe_does(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    area.write("striped", content(16 * MIB))
    async with area.mount(copy_workers=1) as mirror:
        mirror.copier.unit_bytes.value = 4 * MIB
        give_layouts(mirror, {"striped": plain([3, 1, 4], 2 * MIB)}, monkeypatch)
        await mirror.want("striped")
        await mirror.settled()
        later = [read for read in mirror.posix.reads if read.offset >= 4 * MIB]
        assert later
        for read in later:
            assert read.offset // (2 * MIB) == (read.offset + read.size - 1) // (2 * MIB)
        assert await mirror.read_file("striped") == content(16 * MIB)


async def test_copies_go_over_all_the_targets(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six large files, three on each of two targets, both are asked at any time."""
    monkeypatch.setattr(copier, "MAX_UNIT_BYTES", MIB)
    names = area.write_files(6, 8 * MIB)
    async with area.mount(copy_workers=2) as mirror:
        give_layouts(mirror, {name: plain([int(name > names[2])]) for name in names}, monkeypatch)
        fills = []
        for name in names:
            fill = await mirror.copier.files.open(await mirror.node(name))
            remote = fill.copy.remote
            remote.layout = mirror.posix.layout(await remote.open(Lane.BACKGROUND))
            fills.append(fill)
        gate = mirror.posix.faults.gate("read")
        await mirror.want_each(names)
        seen: Counter[tuple[int | None, ...]] = Counter()
        for number in range(20):
            await gate.arrived(2)
            await trio.testing.wait_all_tasks_blocked()
            under_way = [fetch.target for fill in fills for fetch in fill._fetches]
            seen[tuple(sorted(t for t in under_way if t is not None))] += 1
            gate.release(number % 2)
        gate.open()
        for fill in fills:
            fill.copy.release()
        await mirror.settled()
        assert seen[(0, 1)] > 15


async def test_a_file_on_tape_is_not_touched(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    area.write("taped", content(1000))
    async with area.mount() as mirror:
        give_layouts(mirror, {"taped": TAPED}, monkeypatch)
        place = mirror.tree.known.place(await mirror.ino("taped"))
        before = (area.source / "taped").stat().st_atime_ns
        with pytest.raises(OSError, match="archive"):
            await mirror.source.call(Lane.BACKGROUND, mirror.posix.touch, *place)
        assert (area.source / "taped").stat().st_atime_ns == before


async def test_a_slow_target_alone_gives_way(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window of one read for target 0, and of four for the other one."""
    monkeypatch.setattr(copier, "MAX_UNIT_BYTES", MIB)
    monkeypatch.setattr(TargetLimit, "record", lambda *_: None)
    names = area.write_files(6, 8 * MIB)
    layouts = {name: plain([number % 2]) for number, name in enumerate(names)}
    async with area.mount(copy_workers=4, floor=0.25) as mirror:
        give_layouts(mirror, layouts, monkeypatch)
        for target, slots in ((None, 4), (0, 1), (1, 4)):
            mirror.copier.governor.limit(target).size = slots
        gate = mirror.posix.faults.gate("read")
        await mirror.want_each(names)
        most: Counter[int] = Counter()
        for number in range(40):
            await gate.arrived(1)
            await trio.testing.wait_all_tasks_blocked()
            under_way = Counter(
                fetch.target for fill in mirror.copier.jobs.background for fetch in fill._fetches
            )
            for target in (0, 1):
                most[target] = max(most[target], under_way[target])
            gate.release(number % gate.waiting)
        gate.open()
        await mirror.settled()
        assert most[0] == 1
        assert most[1] > 1
