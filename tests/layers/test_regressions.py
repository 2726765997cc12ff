"""What the random walks of ``tests/model`` found, step by step."""

from __future__ import annotations

from pathlib import Path

from monarchfs.types import ROOT_INO, FreshnessMode
from tests.support.lookups import Hours, names
from tests.support.mirror import Area, Mirror, content
from tests.support.open_directories import close_directories
from tests.support.runner import open_path, retried, walk


def swap(first: Path, second: Path) -> None:
    """Two directories change places."""
    staged = first.parent / "staged"
    first.rename(staged)
    second.rename(first)
    staged.rename(second)


async def has(mirror: Mirror, path: str, data: bytes) -> None:
    """At the second try, if need be."""
    handle = await retried(open_path, mirror, path)
    assert handle is not None
    assert await mirror.read(handle, 0, 100) == data
    handle.release()


async def test_directories_that_moved_twice(area: Area, hours: Hours) -> None:
    """The way to a file was known from before two moves, one of its directories by another name:
    asking again along that name alone left the rest of the way as it was."""
    source = area.source
    area.write("x/z/a", content(10, 1))
    area.write("y/a", content(20, 2))
    area.write("w/z/a", content(30, 3))
    async with area.mounted(mode=FreshnessMode.TTL) as mirror:
        await walk(mirror, "x/z")
        swap(source / "x/z", source / "y")
        hours.pass_by(1)
        assert await walk(mirror, "y") is not None
        swap(source / "y", source / "x/z")
        swap(source / "x", source / "w")
        hours.pass_by(1)
        close_directories(mirror.posix)
        await has(mirror, "x/z/a", content(30, 3))


async def test_a_file_in_a_directory_that_moved(area: Area, hours: Hours) -> None:
    """Its directory was found at the second try only, and what lay in it before with it."""
    source = area.source
    area.write("x/c", content(10, 1))
    area.write("x/e", content(20, 2))
    area.write("y/e", content(30, 3))
    hours.pass_by(2)
    async with area.mounted(mode=FreshnessMode.TTL) as mirror:
        for path in ("x/c", "x/e", "y/e"):
            assert await walk(mirror, path) is not None
        (source / "x/e").unlink()
        (source / "x/c").rename(source / "y/e")
        hours.pass_by(1)
        (source / "y").rename(source / "x/e")
        hours.pass_by(1)
        await has(mirror, "x/e/e", content(10, 1))


async def test_a_file_that_was_moved_and_listed(area: Area, hours: Hours) -> None:
    """The listing told which file it is, but it was looked for where it had lain before."""
    area.write("x/c", content(10, 1))
    area.write("y/c", content(20, 2))
    hours.pass_by(2)
    async with area.mounted(mode=FreshnessMode.TTL, keeps=False) as mirror:
        assert await walk(mirror, "y/c") is not None
        (area.source / "y/c").rename(area.source / "x/c")
        assert set(await names(mirror, await mirror.ino("x"))) == {b"c"}
        await has(mirror, "x/c", content(20, 2))


async def test_a_file_below_a_listed_directory_that_was_swapped(area: Area, hours: Hours) -> None:
    """The listing told which directory it is, but its files were looked for where it had lain; that
    it moved was first noticed by the open, which blamed the file alone."""
    area.write("y/e", content(20, 2))
    (area.source / "a").mkdir()
    hours.pass_by(2)
    async with area.mounted(mode=FreshnessMode.TTL, keeps=False) as mirror:
        assert await walk(mirror, "y/e") is not None
        swap(area.source / "a", area.source / "y")
        close_directories(mirror.posix)
        assert set(await names(mirror, ROOT_INO)) == {b"a", b"y"}
        await has(mirror, "a/e", content(20, 2))
