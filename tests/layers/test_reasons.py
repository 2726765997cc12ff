"""Why a file is not resident: every reason, brought about."""

import errno
import os

import pytest

from monarchfs.fs import why as why_module
from monarchfs.fs.why import Why
from monarchfs.metadata import find
from monarchfs.metadata.find import Finder
from monarchfs.prefetch.queue import Priority
from monarchfs.types import OperationError
from tests.support.lookups import OPEN
from tests.support.mirror import KIB, MIB, Area, Mirror, content


def why(mirror: Mirror) -> Why:
    finder = Finder(mirror.tree, [b"/mnt/here", os.fsencode(mirror.area.source)])
    return Why(
        *(mirror.tree, mirror.cache, mirror.residency, finder, mirror.source, mirror.metrics),
    )


async def told(mirror: Mirror, path: str) -> tuple[str | None, str]:
    """The cause and the sentence."""
    report = await why(mirror).report(path, {})
    assert report["reason"] == (mirror.reason(await mirror.ino(path)) or None) or (
        report["cause"] == "queued"
    ), "the attribute and the command say the same"
    return report["cause"], report["reason"] or ""


async def says(mirror: Mirror, path: str, cause: str | None, *parts: str) -> None:
    """The cause, and what is in the sentence."""
    found, sentence = await told(mirror, path)
    assert found == cause, sentence
    for part in parts:
        assert part in sentence


async def test_before_anybody_opened_it(files: Area) -> None:
    async with files.mount() as mirror:
        assert await told(mirror, "a") == ("not opened yet", "not opened yet")
    async with files.mount(keeps=False) as mirror:
        await mirror.want("a")
        await mirror.settled()
        await says(mirror, "a", "nothing is copied", "--prefetch none")


async def test_files_that_wait_tell_their_turn(area: Area) -> None:
    names = area.write_files(3)
    async with area.mount(copies=False) as mirror:
        for name in names:
            await mirror.want(name, Priority.SCANNED)
        await mirror.want(names[2], Priority.HINTED)
        assert await told(mirror, names[2]) == ("queued", "it waits to be copied: it is the next")
        assert (await told(mirror, names[0]))[1].endswith("1 file goes before it")
        assert (await told(mirror, names[1]))[1].endswith("2 files go before it")
        assert mirror.reason(await mirror.ino(names[1])) == "it waits to be copied"


async def test_one_that_is_copied_tells_how_far(area: Area) -> None:
    area.write("large", content(8 * MIB))
    async with area.mount(copy_workers=1) as mirror:
        gate = mirror.posix.faults.gate("read")
        await mirror.want("large")
        for _ in range(2):
            await gate.arrived()
            await says(mirror, "large", "being copied")
            gate.release()
        await gate.arrived()
        await says(mirror, "large", "being copied", "of 8.0M (")
        assert 0 < (await why(mirror).report("large", {}))["local_bytes"] < 8 * MIB


async def test_no_room_and_by_how_much(area: Area) -> None:
    names = area.write_files(2, 60 * KIB)
    async with area.mount([100 * KIB]) as mirror:
        await mirror.copied(names[0])
        await mirror.read_file(names[1])
        await mirror.idle()
        sentence = "no room: it needs 64K, 24K short when it was wanted; "
        sentence += f"{mirror.tier.path} has 40K of 100K left"
        assert await told(mirror, names[1]) == ("no room", sentence)
        assert mirror.cache.evict(await mirror.ino(names[0]))
        await mirror.idle()
        await says(mirror, names[1], "no room", "there is now")
        await says(mirror, names[0], "evicted")


async def test_a_version_that_changed_under_the_copy(area: Area) -> None:
    area.write("large", content(2 * MIB))
    await area.settled()
    async with area.mount(mode=OPEN) as mirror:
        old = await mirror.ino("large")
        area.write("large", content(2 * MIB + 1, 2))
        mirror.copier.jobs.want(old, Priority.SCANNED)
        await mirror.settled()
        assert mirror.reason(old).startswith("it changed in the source while it was copied")
        before = "not opened yet since the version before changed"
        await says(mirror, "large", "changed in the source", before)
        assert await mirror.ino("large") != old
        await area.settled()
        await mirror.copied("large")
        assert await told(mirror, "large") == (None, "")


async def test_a_replica_that_was_lost(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.copied("a")
        mirror.posix.faults.fail("read", errno.EACCES)
        mirror.tier.faults.fail("open_replica", errno.ESTALE, times=1)
        (await mirror.open("a")).release()
        await mirror.idle()
        await says(mirror, "a", "copying failed")
        mirror.posix.faults.end()
        await mirror.copied("a")
        mirror.cache.accounts.corrupt(ino)
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


async def test_a_source_that_hangs(files: Area, monkeypatch: pytest.MonkeyPatch) -> None:
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
