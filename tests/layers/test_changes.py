"""Names, attributes and listings: how often the source is asked, what changes there, and what the
mount then says."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from monarchfs.metadata.cached_listings import LATE_NS
from monarchfs.metadata.freshness import FOREVER_SECONDS
from monarchfs.metadata.tree import Missing
from monarchfs.source.posix import Found
from monarchfs.types import ROOT_INO, DirRef, FreshnessMode, Lane
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, entry, names, stale
from tests.support.mirror import Area, Mirror, content
from tests.support.open_directories import close_directories
from tests.support.runner import open_path, retried, walk

# How often the source is asked.


async def test_immutable_asks_once_and_never_again(files: Area, hours: Hours) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        asked(mirror)
        first = await entry(mirror, ROOT_INO, b"a")
        assert asked(mirror) == 1
        assert (first.entry_timeout, first.attr_timeout) == (FOREVER_SECONDS, FOREVER_SECONDS)
        hours.pass_by(1e6)
        files.write("a", b"other")
        assert await entry(mirror, ROOT_INO, b"a") == first
        assert await mirror.tree.attributes.get(first.node.ino) == first
        assert await mirror.tree.attributes.revalidated(first.node.ino) == first.node
        await names(mirror, ROOT_INO)
        asked(mirror)
        await names(mirror, ROOT_INO)
        assert asked(mirror) == 0


async def test_ttl_asks_again_when_it_is_over(files: Area, hours: Hours) -> None:
    hours.pass_by(1)  # they were not written just now
    async with files.mount(mode=TTL, ttl=60) as mirror:
        first = await entry(mirror, ROOT_INO, b"a")
        assert 59 < first.entry_timeout <= 60
        assert 59 < first.attr_timeout <= 60
        asked(mirror)
        hours.pass_by(50)
        later = await entry(mirror, ROOT_INO, b"a")
        assert 9 < later.entry_timeout <= 10
        assert asked(mirror) == 0
        hours.pass_by(11)
        assert (await entry(mirror, ROOT_INO, b"a")).node.ino == first.node.ino
        assert asked(mirror) == 1
        hours.pass_by(61)
        assert (await mirror.tree.attributes.get(first.node.ino)).node.ino == first.node.ino
        assert asked(mirror) == 1
        await mirror.tree.attributes.revalidated(first.node.ino)
        assert asked(mirror) == 0


async def test_open_asks_at_every_look_up_and_open(files: Area, hours: Hours) -> None:
    async with files.mount(mode=OPEN) as mirror:
        first = await entry(mirror, ROOT_INO, b"a")
        assert first.entry_timeout == 0
        asked(mirror)
        with hours.held():
            await entry(mirror, ROOT_INO, b"a")
            await mirror.tree.attributes.revalidated(first.node.ino)
            assert asked(mirror) == 2
            assert mirror.tree.known.attributes(first.node.ino) is not None
        hours.pass_by(1.5)
        assert mirror.tree.known.attributes(first.node.ino) is None
        files.write("d/new", b"")
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
        assert set(await names(mirror, d)) == {b"b", b"c", b"new"}


async def test_a_complete_listing_answers_for_what_is_not_in_it(files: Area, hours: Hours) -> None:
    hours.pass_by(1)
    async with files.mount(mode=TTL, ttl=60) as mirror:
        await names(mirror, ROOT_INO)
        asked(mirror)
        hours.pass_by(10)
        found = await mirror.tree.names.lookup(ROOT_INO, b"new")
        assert isinstance(found, Missing)
        assert 49 < found.timeout <= 50
        assert asked(mirror) == 0
        # But Lustre's root has this one, and lists it not.
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b".lustre"), Missing)
        assert asked(mirror) == 1
        hours.pass_by(51)
        for number in range(10):
            assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"%d" % number), Missing)
        assert asked(mirror) == 1, "the directory, for all of them"
        files.write("new", b"new")
        hours.pass_by(61)
        assert (await entry(mirror, ROOT_INO, b"new")).node.stat.size == 3
        assert asked(mirror) == 2, "the directory, which changed, and the name"


async def test_a_listing_that_broke_off_answers_for_nothing(files: Area) -> None:
    async with files.mount() as mirror:
        mirror.posix.faults.fail("stat", errno.EIO, times=1)
        with pytest.raises(OSError, match="Input/output"):
            await mirror.tree.directories.open(ROOT_INO)
        assert mirror.tree.known.lookup(ROOT_INO, b"new") is None
        await entry(mirror, ROOT_INO, b"a")


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL, OPEN])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("limit", [143, 255, 1023])
async def test_a_name_is_too_long_for_the_source_alone(
    files: Area, mode: FreshnessMode, listed: bool, limit: int
) -> None:
    """One with a lower limit says so even where its listing is known; one with a higher one, that
    there is no such name."""
    async with files.mount(mode=mode) as mirror:
        found = mirror.posix.found

        def limited(directory: DirRef, name: bytes) -> Found:
            if len(name) > limit:
                raise OSError(errno.ENAMETOOLONG, "too long for it")
            return found(directory, name[:255])

        mirror.posix.found = limited  # type: ignore[method-assign]
        mirror.posix.faults.before("found", lambda: None)  # one by one, so by the above
        if listed:
            await mirror.tree.directories.open(ROOT_INO)
        lookup, ask_each = mirror.tree.names.lookup, mirror.tree.batches.ask_each
        for name in (b"n" * size for size in (144, 255, 256, 503, 504, 1023, 1024)):
            if len(name) > limit:
                for _ in range(2):
                    with pytest.raises(OSError, match="too long for it"):
                        await lookup(ROOT_INO, name)
            else:
                assert isinstance(await lookup(ROOT_INO, name), Missing)
            (answer,) = await ask_each(ROOT_INO, [name], Lane.BACKGROUND)
            assert isinstance(answer, OSError) if len(name) > limit else answer is None


# What changes.


async def test_another_version_is_another_number_and_the_old_one_is_stale(
    files: Area, hours: Hours
) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        old = (await entry(mirror, ROOT_INO, b"a")).node
        files.write("a", b"another version")
        hours.pass_by(61)
        new = (await entry(mirror, ROOT_INO, b"a")).node
        assert new.ino != old.ino
        for ask in (mirror.tree.attributes.revalidated, mirror.files.open):
            with stale():
                await ask(old.ino)
        assert mirror.files.known_open(old.ino) is None
        # Who has it open may go on asking about it.
        kept = await mirror.tree.attributes.get(old.ino)
        assert (kept.node.stat, kept.attr_timeout) == (old.stat, 0.0)


async def test_a_directory_that_was_swapped(files: Area) -> None:
    """Names below it are looked up in the new one, never in a mixture of both."""
    async with files.mounted(mode=OPEN) as mirror:
        old = await entry(mirror, ROOT_INO, b"d")
        old_b = await entry(mirror, old.node.ino, b"b")
        (files.source / "d").rename(files.source / "away")
        files.write("d/b", b"of the new one")
        new = await entry(mirror, ROOT_INO, b"d")
        assert new.node.ino != old.node.ino
        new_b = await entry(mirror, new.node.ino, b"b")
        assert new_b.node.stat.size == 14
        assert new_b.node.ino != old_b.node.ino
        close_directories(mirror.posix)
        with stale("replaced"):
            await mirror.tree.names.lookup(old.node.ino, b"b")
        with stale("replaced"):
            await mirror.tree.directories.open(old.node.ino)
        with stale("replaced"):
            await mirror.tree.names.find_each(old.node.ino, [b"b", b"x"], Lane.BACKGROUND)
        assert set(await names(mirror, new.node.ino)) == {b"b"}
        # Where it was moved to, it is the same one.
        assert (await entry(mirror, ROOT_INO, b"away")).node.ino == old.node.ino
        assert set(await names(mirror, old.node.ino)) == {b"b", b"c"}
        # And a file in its place.
        shutil.rmtree(files.source / "d")
        files.write("d", b"a file")
        assert await mirror.ino("d") != new.node.ino
        assert await mirror.read_file("d") == b"a file"


async def test_below_a_directory_that_was_swapped_immutable_asks_anew(files: Area) -> None:
    """What was believed for ever is not believed any more once it was found to be wrong."""
    files.write("d/e/f", b"old")
    async with files.mount(mode=IMMUTABLE) as mirror:
        e = await mirror.node("d/e")
        (files.source / "d").rename(files.source / "away")
        files.write("d/e/f", b"of the new one")
        close_directories(mirror.posix)
        with stale("replaced"):
            await mirror.tree.names.lookup(e.ino, b"f")
        # The kernel then walks the path again, from the top.
        assert (await mirror.node("d/e/f")).stat.size == 14


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "nothing"])
async def test_where_a_file_was_is_something_else(files: Area, kind: str) -> None:
    """Not EISDIR or ELOOP for a file: the kernel asks for the name again, and finds what it is."""
    async with files.mount(mode=TTL, copies=False) as mirror:
        d, node = await mirror.ino("d"), await mirror.node("d/b")
        path = files.source / "d/b"
        path.unlink()
        match kind:
            case "directory":
                path.mkdir()
            case "link":
                path.symlink_to("c")
            case "pipe":
                os.mkfifo(path)
        with stale():
            await mirror.files.open(node.ino)
        if kind == "nothing":
            assert isinstance(await mirror.tree.names.lookup(d, b"b"), Missing)
        else:
            assert not (await mirror.node("d/b")).stat.is_regular


# What the random walks of tests/model found, step by step.


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
    async with area.mounted(mode=TTL) as mirror:
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
    async with area.mounted(mode=TTL) as mirror:
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
    async with area.mounted(mode=TTL, keeps=False) as mirror:
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
    async with area.mounted(mode=TTL, keeps=False) as mirror:
        assert await walk(mirror, "y/e") is not None
        swap(area.source / "a", area.source / "y")
        close_directories(mirror.posix)
        assert set(await names(mirror, ROOT_INO)) == {b"a", b"y"}
        await has(mirror, "a/e", content(20, 2))


# When the kernel may list a directory from what it has of it.


async def shows(mirror: Mirror, times: int, ino: int = ROOT_INO) -> list[bool | None]:
    """Open and list a directory, as the adapter does; each time, whether the kernel had it."""
    had: list[bool | None] = []
    for _ in range(times):
        has = mirror.tree.directories.known_open(ino)
        if has is None:
            await mirror.tree.directories.open(ino)
        if not has:
            assert mirror.tree.directories.shown_entries(ino, 0, 100)
        had.append(has)
    return had


async def know_all(mirror: Mirror) -> None:
    for name in (b"a", b"d"):
        await entry(mirror, ROOT_INO, name)


async def test_ttl_asks_when_it_is_over_and_shows_what_changed(files: Area, hours: Hours) -> None:
    hours.pass_by(1)
    async with files.mount(mode=TTL, ttl=60) as mirror:
        await know_all(mirror)
        assert await shows(mirror, 3) == [None, False, True]
        hours.pass_by(61)
        asked(mirror)
        assert await shows(mirror, 1) == [None]
        assert asked(mirror) == 1, "the directory's times: the listing holds"
        # What the kernel has of the names is too old by now.
        assert await shows(mirror, 1) == [False]
        files.write("new", b"new")
        hours.pass_by(61)
        with hours.held():
            assert await shows(mirror, 3) == [None, False, False]
        shown = mirror.tree.directories.shown_entries(ROOT_INO, 0, 100)
        assert b"new" in {row[0].name for row in shown}
        # A reader that was given the old names may still be about to put them where the kernel
        # would find them.
        hours.pass_by(LATE_NS / 1e9)
        assert await shows(mirror, 2) == [False, True]


@pytest.mark.parametrize("change", ["appears", "goes", "is replaced"])
async def test_a_question_that_finds_a_change(files: Area, hours: Hours, change: str) -> None:
    """A listing that says otherwise than what was just opened would be a riddle."""
    hours.pass_by(1)
    async with files.mount(mode=TTL, ttl=60) as mirror:
        await know_all(mirror)
        assert await shows(mirror, 3) == [None, False, True]
        name = "new" if change == "appears" else "a"
        if change == "goes":
            (files.source / name).unlink()
        else:
            files.write(name, b"other")
        await mirror.tree.batches.ask_each(ROOT_INO, [b"d"], Lane.DEMAND)
        assert await shows(mirror, 1) == [True]
        await mirror.tree.batches.ask_each(ROOT_INO, [name.encode()], Lane.DEMAND)
        assert await shows(mirror, 2) == [False, False]
        hours.pass_by(LATE_NS / 1e9)
        assert await shows(mirror, 2) == [False, True]
