"""Names, attributes and listings: how often the source is asked, what changes there, what the mount
then says, and what a refresh does about it."""

import errno
import gc
import os
import shutil
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from monarchfs.metadata import directories
from monarchfs.metadata.cached_listings import LATE_NS
from monarchfs.metadata.freshness import FOREVER_SECONDS
from monarchfs.metadata.refresh import Refresh, RefreshResult
from monarchfs.metadata.tree import Missing
from monarchfs.source.posix import Found
from monarchfs.types import ROOT_INO, DirRef, FreshnessMode, Lane, OperationError
from tests.support.faults import close_directories
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, entry, names, stale
from tests.support.mirror import Area, Mirror, content
from tests.support.runner import open_path, retried, walk


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
        mirror.posix.faults.fail("stat", errno.EIO, times=2)
        with pytest.raises(OSError, match="Input/output"):
            await mirror.tree.directories.open(ROOT_INO)
        assert mirror.tree.known.lookup(ROOT_INO, b"new") is None
        await entry(mirror, ROOT_INO, b"a")


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL, OPEN])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("limit", [143, 255, 1023])
async def test_too_long_a_name(files: Area, mode: FreshnessMode, listed: bool, limit: int) -> None:
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


async def test_another_version_has_another_number_and_the_old(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        old = (await entry(mirror, ROOT_INO, b"a")).node
        files.write("a", b"another version")
        hours.pass_by(61)
        assert (await entry(mirror, ROOT_INO, b"a")).node.ino != old.ino
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
        # The second try finds one empty that was removed again, and nobody else believes that.
        shutil.rmtree(files.source / "d")
        with stale("replaced"):
            await mirror.tree.directories.open(new.node.ino)
        await mirror.tree.directories.open(new.node.ino, again=True)
        assert mirror.tree.directories.entries(new.node.ino, directories.PARENT_COOKIE, 9) == []
        assert mirror.tree.directories.known_open(new.node.ino) is None
        # And a file in its place.
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


async def test_who_is_in_a_directory_sees_it_change(files: Area) -> None:
    """Also while the way to it is to be asked for again, which nobody does from inside."""
    async with files.mount(mode=TTL, ttl=60) as mirror:
        d = await mirror.ino("d")
        mirror.tree.recorder.invalidate_directory(d)
        files.write("d/new", b"")
        shown = (await mirror.files.attributes(d)).node.stat
        assert shown.mtime_ns == (files.source / "d").stat().st_mtime_ns


async def test_a_directory_below_what_was_below_it(files: Area) -> None:
    """Each is known in the other, until the way is asked for again."""
    (files.source / "d/e").mkdir()
    async with files.mount(mode=TTL) as mirror:
        d, e = await mirror.ino("d"), await mirror.ino("d/e")
        (files.source / "d/e").rename(files.source / "e")
        (files.source / "d").rename(files.source / "e/d")
        assert (await entry(mirror, e, b"d")).node.ino == d
        mirror.files.invalidation.forget_path(d)
        mirror.tree.recorder.invalidate_directory(d)
        assert await mirror.ino("e/d") == d


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


# Refresh: the source is asked again on demand, whatever the mount promises.


MODES = [IMMUTABLE, TTL, OPEN]


async def refresh(mirror: Mirror, path: str = "") -> RefreshResult:
    mirror.kernel.clear()
    return await Refresh(mirror.tree, mirror.kernel).run([n.encode() for n in path.split("/") if n])


async def know_tree(mirror: Mirror, ino: int = ROOT_INO) -> None:
    for name in await names(mirror, ino):
        node = (await entry(mirror, ino, name)).node
        if node.stat.is_directory:
            await know_tree(mirror, node.ino)


def counts(result: RefreshResult) -> tuple[int, int, int, int]:
    return result.changed, result.appeared, result.gone, result.failed


@pytest.mark.parametrize("mode", MODES)
async def test_what_changed_is_shown_at_once(files: Area, mode: FreshnessMode) -> None:
    for name in ("gone", "retargeted", "e/deep", "same"):
        files.write(name, b"old")
    (files.source / "link").symlink_to("a")
    async with files.mounted(mode=mode, ttl=3600) as mirror:
        await know_tree(mirror)
        before = {name: await mirror.ino(name) for name in ("a", "same", "gone", "link", "d", "e")}
        assert counts(await refresh(mirror)) == (0, 0, 0, 0)
        assert mirror.kernel.entries == []
        assert mirror.kernel.pages == []
        files.write("a", b"in place")
        # What is new is made first: a file system may give it the number of one that is gone.
        files.write("new", b"new")
        (files.source / "other").symlink_to("elsewhere")
        (files.source / "other").rename(files.source / "link")
        (files.source / "gone").unlink()
        files.write("e/deep", b"deep")
        os.chmod(files.source / "e", 0o700)
        result = await refresh(mirror)
        # a, link, e/deep have other versions; e has other attributes; the link is a new file.
        assert counts(result) == (4, 1, 1, 0)
        assert result.error == ""
        e = before["e"]
        assert set(mirror.kernel.entries) == {
            *((ROOT_INO, name) for name in (b"a", b"gone", b"link", b"new")),
            (e, b"deep"),
        }
        assert {ROOT_INO, e} <= set(mirror.kernel.attributes)
        assert {before["a"], before["gone"]} <= set(mirror.kernel.pages)
        assert before["same"] not in mirror.kernel.pages
        assert await mirror.ino("same") == before["same"]
        assert await mirror.ino("e") == e
        assert await mirror.read_file("a") == b"in place"
        assert await mirror.read_file("new") == b"new"
        assert await mirror.read_file("e/deep") == b"deep"
        assert mirror.tree.known.target(await mirror.ino("link")) == b"elsewhere"
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"gone"), Missing)


@pytest.mark.parametrize("mode", MODES)
async def test_directories_that_changed_places(files: Area, mode: FreshnessMode) -> None:
    files.write("e/b", b"of e")
    async with files.mounted(mode=mode, ttl=3600) as mirror:
        await know_tree(mirror)
        d, e = await mirror.ino("d"), await mirror.ino("e")
        swap(files.source / "d", files.source / "e")
        await refresh(mirror)
        assert {(ROOT_INO, b"d"), (ROOT_INO, b"e")} <= set(mirror.kernel.entries)
        assert (await mirror.ino("d"), await mirror.ino("e")) == (e, d)
        assert await mirror.read_file("d/b") == b"of e"
        assert await mirror.read_file("e/c") == content(30)


async def test_only_what_is_below_the_path(files: Area) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        await know_tree(mirror)
        for name in ("a", "d/b", "d/c"):
            files.write(name, b"another")
        assert counts(await refresh(mirror, "d/b")) == (1, 0, 0, 0)
        assert counts(await refresh(mirror, "d")) == (1, 0, 0, 0)
        assert await mirror.read_file("d/c") == b"another"
        assert (await mirror.node("a")).stat.size == 10
        assert counts(await refresh(mirror)) == (1, 0, 0, 0)


async def test_a_path_that_is_new_or_gone(files: Area) -> None:
    async with files.mounted(mode=IMMUTABLE) as mirror:
        d = await mirror.ino("d")
        assert isinstance(await mirror.tree.names.lookup(d, b"late"), Missing)
        with pytest.raises(OperationError, match="cannot refresh 'd/late': No such file"):
            await refresh(mirror, "d/late")
        files.write("d/late", b"late")
        # Its directory has another time.
        assert counts(await refresh(mirror, "d/late")) == (1, 1, 0, 0)
        assert (d, b"late") in mirror.kernel.entries
        assert await mirror.read_file("d/late") == b"late"
        (files.source / "d/late").unlink()
        assert counts(await refresh(mirror, "d/late")) == (1, 0, 1, 0)
        with pytest.raises(OperationError, match="Not a directory"):
            await refresh(mirror, "a/below")
        # A copy that is given up while it is made goes with the next mount if this one ends first.


async def test_a_source_that_does_not_answer(
    files: Area, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        await know_tree(mirror)
        await mirror.idle()
        gate = mirror.posix.faults.gate("found_each")
        errors: list[OperationError] = []

        async def run() -> None:
            try:
                await refresh(mirror)
            except OperationError as exc:
                errors.append(exc)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await gate.arrived()
            clock.jump(directories.REFRESH_SECONDS + 1)
        assert "the source does not answer: '/'" in str(errors[0])
        gate.open()
        assert (await mirror.node("a")).stat.size == 10
        await mirror.idle()
        assert counts(await refresh(mirror)) == (0, 0, 0, 0)


async def test_what_fails_does_not_stop_the_rest(files: Area) -> None:
    files.write("e/f", b"1")
    async with files.mount(mode=IMMUTABLE) as mirror:
        await know_tree(mirror)
        for name in ("a", "d/b", "e/f"):
            files.write(name, b"another")
        # Of the root's attributes, its listing, and those of the two directories.
        mirror.posix.faults.fail("stat", errno.EIO, after=2, times=1)
        result = await refresh(mirror)
        assert counts(result) == (2, 0, 0, 1)
        assert result.error in ("'/d': Input/output error", "'/e': Input/output error")


async def test_a_large_directory_holds_up_nobody(area: Area) -> None:
    for number in range(3000):
        area.write(f"d/{number:05}", b"")
    async with area.mount(mode=IMMUTABLE) as mirror:
        await know_tree(mirror)
        for number in range(0, 3000, 3):
            (area.source / f"d/{number:05}").unlink()
            area.write(f"d/new{number}", b"")
        seen = []
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                before = time.thread_time()
                await trio.lowlevel.checkpoint()
                longest = max(longest, time.thread_time() - before)

        gc.disable()  # one collection of what earlier tests have left may take longer than all
        try:
            began = time.thread_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                result = await Refresh(
                    mirror.tree, mirror.kernel, lambda result: seen.append(result.checked)
                ).run()
                nursery.cancel_scope.cancel()
        finally:
            gc.enable()
        assert (result.appeared, result.gone, result.failed) == (1000, 1000, 0)
        assert seen == sorted(seen)
        assert len(seen) > 40
        all_of_it = time.thread_time() - began
        assert longest < all_of_it / 3, "of this thread's own time"
        assert mirror.kernel.pauses > 30
