"""Having files copied before anybody opens them."""

import errno
import os
from collections.abc import Sequence

import pytest
import trio

from monarchfs.prefetch import warm as warm_module
from monarchfs.prefetch.warm import WarmCounts, Warming, What
from monarchfs.types import ROOT_INO, EvictionPolicy, Node, OperationError
from monarchfs.worker import commands
from tests.support.lookups import OPEN
from tests.support.mirror import KIB, MIB, Area, Mirror, content, until


def root(mirror: Mirror) -> Node:
    found = mirror.index.nodes.node(ROOT_INO)
    assert found is not None
    return found


def warming(mirror: Mirror) -> Warming:
    return Warming(mirror.tree, mirror.xattrs, mirror.cache, mirror.copier.jobs, mirror.nursery)


async def warmed(mirror: Mirror, *paths: str, what: What = What.COPY) -> WarmCounts:
    """What a request for these paths comes to, or for all."""
    nodes = [await mirror.node(path) for path in paths] or [root(mirror)]
    warm = warming(mirror).start(what, nodes)
    with trio.fail_after(1000):
        await warm.done.wait()
    counts = warm.counts
    assert warm.outstanding == {}
    if what is What.COPY:
        assert counts.walked
        assert counts.files == counts.resident + counts.refused + counts.failed
    return counts


def tree(area: Area, directories: int = 3, files: int = 5) -> int:
    for directory in range(directories):
        for number in range(files):
            area.write(f"{directory}/below/{number}", content(10 + number, directory))
    return directories * files


@pytest.mark.parametrize("keeps", [True, False])
async def test_all_of_it(area: Area, keeps: bool) -> None:
    """Also where nothing else is copied."""
    files = tree(area)
    (area.source / "link").symlink_to("0")
    os.mkfifo(area.source / "fifo")
    (area.source / "empty").touch()
    async with area.mounted(keeps=keeps) as mirror:
        counts = await warmed(mirror)
        assert (counts.files, counts.directories) == (files + 1, 7)
        assert (counts.resident, counts.copied) == (files + 1, files + 1)
        assert counts.resident_bytes == counts.copied_bytes == counts.bytes
        read = len(mirror.posix.reads)
        again = await warmed(mirror)
        assert (again.resident, again.copied) == (files + 1, 0)
        assert len(mirror.posix.reads) == read, "nothing is read twice"


async def test_a_request_outlives_its_process(area: Area) -> None:
    files = tree(area)
    async with area.mount() as mirror:
        requests = warming(mirror)
        gate = mirror.posix.faults.gate("read")
        requests.start(What.COPY, [root(mirror)])
        await gate.arrived()
    async with area.mount() as mirror:
        requests = warming(mirror)
        requests.resume()
        await mirror.idle()
        await until(lambda: len(list(mirror.index.replicas.all())) == files, "all to be copied")
        await until(lambda: not requests._under_way, "the request to end")
        again = warming(mirror)
        again.resume()
        assert not again._under_way, "what has ended is not begun again"
        again.start(What.COPY, [await mirror.node("0")])
        again.forget()


async def test_a_look_at_what_is_there(area: Area) -> None:
    files = tree(area)
    area.write("large", content(24 * MIB))
    async with area.mount([20 * MIB], partial_min_bytes=MIB) as mirror:
        await mirror.copied("0/below/0")
        await mirror.want("large")
        await mirror.settled()
        counts = await warmed(mirror, what=What.CHECK)
        assert (counts.resident, counts.partial, counts.remote) == (1, 1, files - 1)
        assert counts.local_bytes > 10 * MIB
        assert mirror.metrics.copies_completed == 1


async def test_paths_that_meet(area: Area) -> None:
    tree(area, 1, 3)
    os.link(area.source / "0/below/0", area.source / "other name")
    os.link(area.source / "0/below/0", area.source / "0/below/beside it")
    async with area.mount() as mirror:
        counts = await warmed(mirror, "0", "0/below/1", "other name")
        assert counts.files == counts.resident == 6
        assert mirror.metrics.copies_completed == 3


async def test_no_room_is_no_failure(area: Area) -> None:
    for number in range(4):
        area.write(f"{number}", content(60 * KIB, number))
    area.write("small", content(8 * KIB))
    async with area.mounted([140 * KIB]) as mirror:
        counts = await warmed(mirror)
        assert (counts.resident, counts.refused, counts.refused_bytes) == (3, 2, 120 * KIB)
        assert counts.short_bytes == (2 * 64 - 140) * KIB + mirror.placement.ledger(1).usage[0]


async def test_others_go_for_what_was_asked_for_but_not_its_own(area: Area) -> None:
    for name in ("old/0", "new/1", "new/2", "new/3", "new/4"):
        area.write(name, content(60 * KIB))
    async with area.mounted([140 * KIB], eviction=EvictionPolicy.LRU) as mirror:
        for name in ("old/0", "new/4", "old/0"):
            await mirror.copied(name)
        counts = await warmed(mirror, "new/4", "new/1")
        assert (counts.resident, counts.copied) == (2, 1)
        assert await mirror.state("old/0") == "remote", "it went"
        counts = await warmed(mirror, "new")
        assert (counts.resident, counts.refused, mirror.metrics.evictions_policy) == (2, 2, 1)
        await warmed(mirror, "new/4", "new/3")
        counts = await warmed(mirror)
        assert counts.resident == len(list(mirror.index.replicas.all())) == 2


async def test_what_fails_is_told(area: Area) -> None:
    files = tree(area)
    async with area.mount(copy_workers=1) as mirror:
        mirror.posix.faults.fail("read", errno.EACCES, times=2)
        counts = await warmed(mirror)
        assert (counts.failed, counts.resident) == (2, files - 2)
        assert counts.error.endswith(": copying failed: Permission denied")
        assert counts.error.split(":")[0].count("/") == 2


async def test_a_directory_that_cannot_be_listed(area: Area) -> None:
    files = tree(area)
    async with area.mount() as mirror:
        bad = await mirror.ino("1/below")
        opened = mirror.tree.directories.open

        async def fail(ino: int, *arguments: object) -> None:
            if ino == bad:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            await opened(ino, *arguments)  # type: ignore[arg-type]

        mirror.tree.directories.open = fail  # type: ignore[method-assign, assignment]
        warm = warming(mirror).start(What.COPY, [root(mirror)])
        await warm.done.wait()
        assert (warm.counts.resident, warm.counts.failed) == (files - 5, 1)
        assert warm.counts.error == "1/below: Permission denied"


async def test_a_file_that_changes_meanwhile_is_copied_as_it_is_then(area: Area) -> None:
    area.write("large", content(8 * MIB))
    await area.settled()
    async with area.mount(mode=OPEN, copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        warm = warming(mirror).start(What.COPY, [await mirror.node("large")])
        await gate.arrived()
        gate.release()
        await gate.arrived()
        (area.source / "large").write_bytes(content(MIB, 2))
        await area.settled()
        gate.open()
        await warm.done.wait()
        assert (warm.counts.files, warm.counts.copied, warm.counts.failed) == (1, 1, 0)
        assert warm.counts.bytes == warm.counts.resident_bytes == MIB
        assert await mirror.read_file("large") == content(MIB, 2)


async def test_memory_does_not_grow(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_module, "OUTSTANDING_MOST", 4)
    monkeypatch.setattr(warm_module, "BATCH", 2)
    files = tree(area, 4, 20)
    most = 0
    async with area.mount(copy_workers=1) as mirror:
        warm = warming(mirror).start(What.COPY, [root(mirror)])

        def look(_inos: Sequence[int]) -> None:
            nonlocal most
            most = max(most, len(warm.outstanding))

        mirror.copier.jobs.on_step.add(look)
        await warm.done.wait()
        assert warm.counts.copied == files
        # Each of the walkers may have looked before the others put theirs in.
        assert 1 <= most <= 4 + warm_module.WALKERS * 2


async def test_who_waits_where_nothing_moves(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "STILL_SECONDS", 0.1)
    monkeypatch.setattr(commands, "FOLLOW_SECONDS", 0.02)
    area.write("a", content(10))
    async with area.mount() as mirror:
        gate = mirror.posix.faults.gate("read")
        warm = warming(mirror).start(What.COPY, [await mirror.node("a")])
        so_far: dict[str, object] = {}
        assert not await commands._follow(warm, so_far)
        assert (so_far["files"], so_far["resident"]) == (1, 0)
        gate.open()
        assert await commands._follow(warm, so_far)
        assert so_far["resident"] == 1, "it went on"


async def test_too_many_at_once(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_module, "WARMS_MOST", 2)
    tree(area)
    async with area.mount() as mirror:
        gate = mirror.posix.faults.gate("found_each")
        requests, nodes = warming(mirror), [root(mirror)]
        warms = [requests.start(What.COPY, nodes) for _ in range(2)]
        with pytest.raises(OperationError, match="2 warm requests are under way"):
            requests.start(What.COPY, nodes)
        gate.open()
        for warm in warms:
            await warm.done.wait()
            assert warm.counts.resident == warm.counts.files == 15
        await requests.start(What.CHECK, nodes).done.wait()
