"""What the random walks of ``tests/model`` found, step by step."""

from __future__ import annotations

import shutil
from pathlib import Path

from monarchfs.types import ROOT_INO, FreshnessMode
from tests.support.lookups import Hours, names
from tests.support.mirror import Area, content
from tests.support.open_directories import close_directories
from tests.support.runner import open_path, retried, walk


async def test_directories_that_moved_twice_are_found_at_the_second_try(
    area: Area, hours: Hours
) -> None:
    """The way to a file was known from before two moves, one of its directories by another name:
    asking again along that name alone left the rest of the way as it was."""
    source = area.source
    area.write("x/z/a", content(10, 1))
    area.write("y/a", content(20, 2))
    area.write("w/z/a", content(30, 3))
    async with area.mount(mode=FreshnessMode.TTL, ttl=60) as mirror:
        await walk(mirror, "x/z")
        swap(source / "x/z", source / "y")
        hours.pass_by(1)
        assert await walk(mirror, "y") is not None
        swap(source / "y", source / "x/z")
        swap(source / "x", source / "w")
        hours.pass_by(1)
        close_directories(mirror.posix)
        handle = await retried(open_path, mirror, "x/z/a")
        assert handle is not None
        assert await mirror.read(handle, 0, 100) == content(30, 3)
        handle.release()
        await mirror.settled()


async def test_a_tier_that_was_cleaned_between_two_mounts_is_empty(area: Area) -> None:
    """What an epilogue script removes went on occupying the tier's capacity in the books."""
    for name in "ab":
        area.write(name, content(200_000))
    async with area.mount([300_000]) as mirror:
        await mirror.copied("a")
    shutil.rmtree(area.tier(1))
    async with area.mount([300_000]) as mirror:
        await mirror.idle()
        mirror.check_books()
        assert mirror.placement.ledger(1).usage[0] == 0
        await mirror.copied("b")
        await mirror.settled()


def swap(first: Path, second: Path) -> None:
    """Two directories change places."""
    staged = first.parent / "staged"
    first.rename(staged)
    second.rename(first)
    staged.rename(second)


async def test_a_file_in_a_directory_that_moved_is_found_at_the_second_try(
    area: Area, hours: Hours
) -> None:
    """Its directory was found at the second try only, and what lay in it before with it."""
    source = area.source
    area.write("x/c", content(10, 1))
    area.write("x/e", content(20, 2))
    area.write("y/e", content(30, 3))
    hours.pass_by(2)
    async with area.mount(mode=FreshnessMode.TTL, ttl=60) as mirror:
        for path in ("x/c", "x/e", "y/e"):
            assert await walk(mirror, path) is not None
        (source / "x/e").unlink()
        (source / "x/c").rename(source / "y/e")
        hours.pass_by(1)
        (source / "y").rename(source / "x/e")
        hours.pass_by(1)
        handle = await retried(open_path, mirror, "x/e/e")
        assert handle is not None
        assert await mirror.read(handle, 0, 100) == content(10, 1)
        handle.release()
        await mirror.settled()


async def test_a_file_that_was_moved_and_listed_is_found(area: Area, hours: Hours) -> None:
    """The listing told which file it is, but it was looked for where it had lain before."""
    area.write("x/c", content(10, 1))
    area.write("y/c", content(20, 2))
    hours.pass_by(2)
    async with area.mount(mode=FreshnessMode.TTL, ttl=60, keeps=False) as mirror:
        assert await walk(mirror, "y/c") is not None
        (area.source / "y/c").rename(area.source / "x/c")
        assert set(await names(mirror, (await mirror.node("x")).ino)) == {b"c"}
        handle = await retried(open_path, mirror, "x/c")
        assert handle is not None
        assert await mirror.read(handle, 0, 100) == content(20, 2)
        handle.release()
        await mirror.settled()


async def test_a_file_below_a_listed_directory_that_was_swapped_is_found_at_the_second_try(
    area: Area, hours: Hours
) -> None:
    """The listing told which directory it is, but its files were looked for where it had lain; that
    it moved was first noticed by the open, which blamed the file alone."""
    area.write("y/e", content(20, 2))
    (area.source / "a").mkdir()
    hours.pass_by(2)
    async with area.mount(mode=FreshnessMode.TTL, ttl=60, keeps=False) as mirror:
        assert await walk(mirror, "y/e") is not None
        swap(area.source / "a", area.source / "y")
        close_directories(mirror.posix)
        assert set(await names(mirror, ROOT_INO)) == {b"a", b"y"}
        handle = await retried(open_path, mirror, "a/e")
        assert handle is not None
        assert await mirror.read(handle, 0, 100) == content(20, 2)
        handle.release()
        await mirror.settled()
