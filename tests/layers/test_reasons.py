"""Why a file is not resident: every reason, brought about."""

from __future__ import annotations

import errno
import os

import pytest
import trio.testing

from monarchfs.cache import reasons as cache_reasons
from monarchfs.cache.reasons import Cause, ReasonLog
from monarchfs.fs import find
from monarchfs.fs import why as why_module
from monarchfs.fs.find import Finder
from monarchfs.fs.why import Why
from monarchfs.prefetch.copier import YOUNG_SECONDS
from monarchfs.prefetch.queue import CopyQueue, Priority
from monarchfs.prefetch.retries import RETRY_SECONDS
from monarchfs.types import EvictionPolicy, OperationError
from tests.support.lookups import OPEN, TTL, Hours
from tests.support.mirror import KIB, MIB, Area, Mirror, content, until


def why(mirror: Mirror) -> Why:
    finder = Finder(mirror.tree, [b"/mnt/here", os.fsencode(mirror.area.source)])
    return Why(
        *(mirror.tree, mirror.cache, mirror.reasons, finder),
        lambda: mirror.source.responding,
        mirror.metrics,
    )


async def told(mirror: Mirror, path: str) -> tuple[str | None, str]:
    """The cause and the sentence."""
    report = await why(mirror).report(path, {})
    assert report["reason"] == (mirror.reason(await mirror.ino(path)) or None) or (
        report["cause"] == "queued"
    ), "the attribute and the command say the same"
    return report["cause"], report["reason"] or ""


async def test_before_anybody_opened_it(files: Area) -> None:
    async with files.mount() as mirror:
        assert await told(mirror, "a") == ("not opened yet", "not opened yet")
    async with files.mount(keeps=False) as mirror:
        cause, sentence = await told(mirror, "a")
        assert (cause, "--prefetch none" in sentence) == ("nothing is copied", True)


async def test_a_resident_file_has_none(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.copied("a")
        mirror.cache.index.pin(ino)
        report = await why(mirror).report("a", {})
        assert (report["state"], report["cause"], report["reason"]) == ("resident", None, None)
        assert report["tier"] == mirror.tier.path
        assert report["local_bytes"] == report["size_bytes"] == 10
        assert report["allocated_bytes"] > 0
        assert 0 <= report["since_seconds_ago"] < 60
        assert report["pinned"]
        assert report["source_responding"]


async def test_files_that_wait_tell_their_turn(area: Area) -> None:
    for number in range(3):
        area.write(f"{number}", content(10, number))
    async with area.mount(copies=False) as mirror:
        for number in range(3):
            await mirror.want(f"{number}", Priority.SCANNED)
        await mirror.want("2", Priority.HINTED)
        assert await told(mirror, "2") == ("queued", "it waits to be copied: it is the next")
        assert (await told(mirror, "0"))[1].endswith("1 file goes before it")
        assert (await told(mirror, "1"))[1].endswith("2 files go before it")
        assert mirror.reason(await mirror.ino("1")) == "it waits to be copied"


async def test_one_that_is_copied_tells_how_far(area: Area) -> None:
    area.write("large", content(8 * MIB))
    async with area.mount(copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        await mirror.want("large")
        for _ in range(2):
            await gate.arrived()
            assert (await told(mirror, "large"))[0] == "being copied"
            gate.release()
        await gate.arrived()
        assert "of 8.0M (" in (await told(mirror, "large"))[1]
        assert 0 < (await why(mirror).report("large", {}))["local_bytes"] < 8 * MIB


async def test_no_room_and_by_how_much(area: Area) -> None:
    area.write("a", content(60 * KIB))
    area.write("b", content(60 * KIB))
    async with area.mount([100 * KIB]) as mirror:
        await mirror.copied("a")
        await mirror.read_file("b")
        await mirror.idle()
        cause, sentence = await told(mirror, "b")
        assert cause == "no room"
        assert sentence == (
            f"no room: it needs 64K, 24K short when it was wanted; {mirror.tier.path} has 40K of"
            " 100K left"
        )
        assert mirror.cache.evict(await mirror.ino("a"))
        await mirror.idle()
        cause, sentence = await told(mirror, "b")
        assert (cause, "there is now" in sentence) == ("no room", True)
        assert (await told(mirror, "a"))[0] == "evicted"


async def test_no_room_for_the_rest(area: Area) -> None:
    area.write("large", content(64 * MIB))
    async with area.mount([20 * MIB]) as mirror:
        await mirror.want("large")
        await mirror.settled()
        cause, sentence = await told(mirror, "large")
        assert cause == "no room"
        assert sentence.startswith("no room for the rest of it: it needs ")
        report = await why(mirror).report("large", {})
        assert (report["state"], report["tier"]) == ("partial", mirror.tier.path)
        assert 16 * MIB <= report["local_bytes"] < 20 * MIB


async def test_evicted_for_another(area: Area) -> None:
    for name in "ab":
        area.write(name, content(60 * KIB))
    async with area.mount([100 * KIB], eviction=EvictionPolicy.LRU) as mirror:
        await mirror.copied("a")
        await mirror.copied("b")
        assert await told(mirror, "a") == ("evicted", "evicted for another file (just now)")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
async def test_a_copy_that_failed(files: Area, clock: trio.testing.MockClock, code: int) -> None:
    async with files.mount(copy_workers=1) as mirror:
        mirror.posix.faults.fail("read", code)
        await mirror.want("a")
        await mirror.settled()
        cause, sentence = await told(mirror, "a")
        assert cause == "copying failed"
        assert sentence.startswith(f"copying failed: {os.strerror(code)} (just now")
        assert ("tried again in 1 s" in sentence) == (code == errno.EIO)
        if code == errno.EIO:
            await trio.testing.wait_all_tasks_blocked()  # in its sleep before the next try
            clock.jump(RETRY_SECONDS[0] + 0.01)
            await until(lambda: mirror.posix.faults.calls["read"] == 2, "the next try")
            await mirror.settled()
            assert "tried again in 5 s" in (await told(mirror, "a"))[1]
        mirror.posix.faults.end()
        await mirror.copied("a")
        assert await told(mirror, "a") == (None, "")
        assert len(mirror.cache.reasons) == 0


async def test_a_version_that_changed_under_the_copy(area: Area) -> None:
    area.write("large", content(8 * MIB))
    await area.settled()
    async with area.mount(mode=OPEN, copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        old = await mirror.ino("large")
        mirror.copier.jobs.want(old, Priority.SCANNED)
        await gate.arrived()
        gate.release()
        await gate.arrived()
        (area.source / "large").write_bytes(content(8 * MIB + 1, 2))
        gate.open()
        await mirror.idle()
        assert mirror.reason(old).startswith("it changed in the source while it was copied")
        cause, sentence = await told(mirror, "large")
        assert await mirror.ino("large") != old
        assert cause == "changed in the source"
        assert sentence.startswith("not opened yet since the version before changed")
        await area.settled()
        await mirror.copied("large")
        assert await told(mirror, "large") == (None, "")


async def test_one_that_is_too_young(
    area: Area, clock: trio.testing.MockClock, hours: Hours
) -> None:
    area.write("a", content(10))
    hours.pass_by(-10)  # its clock is ahead of ours
    async with area.mount(mode=TTL) as mirror:
        await mirror.want("a")
        await mirror.idle()
        cause, sentence = await told(mirror, "a")
        assert cause == "changed a moment ago"
        assert "may be changed again" in sentence
        assert f"tried again in {YOUNG_SECONDS:.0f} s" in sentence
        hours.pass_by(20)
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(YOUNG_SECONDS + 0.01)
        ino = await mirror.ino("a")
        await until(lambda: mirror.residency.state(ino) == "resident", "the next look")
        assert mirror.reason(ino) == ""


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_a_tier_that_fails(files: Area, code: int) -> None:
    async with files.mount() as mirror:
        mirror.tier.faults.fail("write_whole", code)
        mirror.tier.faults.fail("probe", code)
        await mirror.read_file("a")
        await mirror.idle()
        cause, sentence = await told(mirror, "a")
        assert cause in ("copying failed", "no tier in service")
        assert os.strerror(code) in sentence
        await mirror.read_file("d/b")
        await mirror.idle()
        cause, sentence = await told(mirror, "d/b")
        assert cause == "no tier in service"
        assert sentence.startswith(f"no tier is in service: {mirror.tier.path}: ")
        assert os.strerror(code) in sentence
        await mirror.mend()
        assert "when it was wanted" in (await told(mirror, "d/b"))[1]
        await mirror.copied("d/b")


async def test_a_tier_that_cannot_be_read(files: Area) -> None:
    async with files.mount() as mirror:
        await mirror.copied("a")
        await mirror.copied("d/b")
        mirror.tier.faults.fail("open_replica", errno.EIO)
        mirror.tier.faults.fail("probe", errno.EIO)
        assert await mirror.read_file("a") == content(10)
        cause, sentence = await told(mirror, "d/b")
        assert cause == "no tier in service"
        assert sentence.startswith(f"it is read from the source: {mirror.tier.path}: its disk")
        await mirror.mend()


async def test_a_replica_that_was_lost(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.copied("a")
        mirror.posix.faults.fail("read", errno.EACCES)
        mirror.tier.faults.fail("open_replica", errno.ESTALE, times=1)
        (await mirror.open("a")).release()
        await mirror.idle()
        assert (await told(mirror, "a"))[0] == "copying failed"
        mirror.posix.faults.end()
        await mirror.copied("a")
        mirror.cache.corrupt(ino)
        await mirror.idle()
        assert await told(mirror, "a") == ("copy lost", "its replica was corrupt (just now)")


async def test_a_directory_is_summed_up(files: Area) -> None:
    async with files.mount() as mirror:
        await mirror.copied("d/b")
        report = await why(mirror).report("", {})
        assert (report["type"], report["not_listed"]) == ("directory", 2)
        await mirror.tree.directories.open(1)
        await mirror.tree.directories.open(await mirror.ino("d"))
        await mirror.ino("d/c")
        report = await why(mirror).report("d", {})
        assert (report["files"], report["bytes"]) == (2, 50)
        assert (report["resident"], report["resident_bytes"], report["remote"]) == (1, 20, 1)
        assert (report["causes"], report["not_listed"]) == ({"not opened yet": 1}, 0)
        report = await why(mirror).report("", {})
        assert (report["directories"], report["not_looked_at"]) == (2, 1)


@pytest.mark.parametrize(
    ("link", "path", "found"),
    [
        ("d", "link/b", True),
        ("./d/../d", "link/b", True),
        ("/mnt/here/d", "link/b", True),
        ("d/b", "link", True),
        ("..", "link/d/b", False),
        ("/etc", "link/passwd", False),
        ("link", "link", False),
        ("nowhere", "link", False),
        ("d/b/c", "link", False),
    ],
)
async def test_links_are_followed_inside(files: Area, link: str, path: str, found: bool) -> None:
    (files.source / "link").symlink_to(link)
    async with files.mount() as mirror:
        if found:
            assert (await why(mirror).report(path, {}))["size_bytes"] == 20
        else:
            with pytest.raises(OperationError, match=f"^{path}: "):
                await why(mirror).report(path, {})


async def test_a_source_that_hangs_is_not_waited_for(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "FIND_SECONDS", 0.05)
    monkeypatch.setattr(why_module, "SOURCE_SECONDS", 0.05)
    await files.settled()
    async with files.mount(mode=OPEN) as mirror:
        await mirror.copied("a")
        gate = mirror.posix.faults.gate("found")
        report = await why(mirror).report("a", {})
        assert (report["state"], report["source_responding"]) == ("resident", False)
        with pytest.raises(OperationError, match="nothing is known of it here"):
            await why(mirror).report("d/b", {})
        finder = Finder(mirror.tree, [])
        with pytest.raises(OperationError, match="the source does not answer"):
            await finder.find("d/b")
        gate.open()


def test_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ReasonLog(kept=3)
    for ino in range(10):
        reasons.put(ino, Cause.FAILED, "it failed")
    assert len(reasons) == 3
    assert [reasons.get(ino) is None for ino in range(10)] == [True] * 7 + [False] * 3
    reasons.put(7, Cause.NO_ROOM, "no room", 5)
    reasons.put(10, Cause.FAILED, "it failed")
    kept = reasons.get(7)
    assert (reasons.get(8), kept and kept.missing_bytes) == (None, 5), "the oldest word goes"
    assert cache_reasons.REASONS_KEPT == 10_000


def test_the_turn_of_each_in_the_queue() -> None:
    queue = CopyQueue()
    for ino in range(6):
        queue.push(ino, Priority.SCANNED if ino % 2 else Priority.LISTED)
    queue.push(5, Priority.HINTED)
    queue.push(0, Priority.OPENED)
    order = []
    positions = {ino: queue.position(ino) for ino in range(7)}
    while (job := queue.pop()) is not None:
        order.append(job[0])
    assert {ino: place for ino, place in positions.items() if place is not None} == {
        ino: place for place, ino in enumerate(order)
    }
    assert positions[6] is None
