"""Names and listings: what changes in the source, and what the mount then says."""

from __future__ import annotations

import os
import shutil

import pytest

from monarchfs.metadata import cached_listings
from monarchfs.metadata.cached_listings import BARE_SECONDS, LATE_NS, CachedListings
from monarchfs.metadata.freshness import FOREVER_SECONDS
from monarchfs.metadata.tree import Missing
from monarchfs.types import ROOT_INO, FileType, Lane
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, entry, names, stale
from tests.support.mirror import Area, Mirror, content
from tests.support.open_directories import close_directories


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


async def test_hard_links_share_a_number(files: Area) -> None:
    os.link(files.source / "a", files.source / "d/link")
    await files.settled()
    async with files.mounted(mode=OPEN) as mirror:
        first, second = await mirror.node("a"), await mirror.node("d/link")
        assert (first.ino, second.stat.nlink) == (second.ino, 2)
        await mirror.copied("d/link")
        assert await mirror.read_file("a") == content(10)
        assert mirror.posix.reads == []


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


async def test_links_are_answered_from_what_is_known(files: Area) -> None:
    (files.source / "link").symlink_to("d/b")
    async with files.mount(mode=OPEN) as mirror:
        node = await mirror.node("link")
        assert mirror.tree.known.target(node.ino) == b"d/b"
        assert await mirror.tree.attributes.target(node.ino) == b"d/b"
        (files.source / "link").unlink()
        (files.source / "link").symlink_to("elsewhere")
        again = await mirror.node("link")
        assert again.ino != node.ino
        assert await mirror.tree.attributes.target(again.ino) == b"elsewhere"
        with pytest.raises(OSError, match="not a regular file"):
            await mirror.files.open(again.ino)


async def test_an_unknown_number_is_stale(files: Area) -> None:
    async with files.mount() as mirror:
        for ask in (
            mirror.tree.attributes.get,
            mirror.tree.attributes.revalidated,
            mirror.tree.directories.open,
            mirror.files.open,
            mirror.tree.attributes.target,
        ):
            with stale("."):
                await ask(12345)


# Listings.


async def test_cookies_stay_what_they_are(files: Area) -> None:
    async with files.mount(mode=OPEN) as mirror:
        d = await mirror.ino("d")
        for number in range(20):
            files.write(f"d/n{number}", b"")
        first = await names(mirror, d)
        assert len(first) == 22
        for number in range(0, 20, 2):
            (files.source / f"d/n{number}").unlink()
        files.write("d/new", b"")
        (files.source / "d/n1").rename(files.source / "d/renamed")
        second = await names(mirror, d)
        assert set(second) == {b"b", b"c", b"new", b"renamed"} | {
            b"n%d" % number for number in range(3, 20, 2)
        }
        assert all(first[name] == cookie for name, cookie in second.items() if name in first)
        fresh = {second[b"new"], second[b"renamed"]}
        assert not fresh & set(first.values()), "never used twice"
        files.write("d/n0", b"")
        assert (await names(mirror, d))[b"n0"] not in set(first.values())
    async with files.mount(mode=OPEN) as again:
        third = await names(again, await again.ino("d"))
        assert {name: third[name] for name in second} == second


async def test_a_reader_of_a_directory_goes_on_across_a_change(files: Area) -> None:
    for number in range(9):
        files.write(f"d/n{number}", b"")
    async with files.mount(mode=OPEN) as mirror:
        d = await mirror.ino("d")
        everything = await names(mirror, d)
        half = mirror.tree.directories.entries(d, 0, 6)
        seen = {dirent.name for dirent, *_ in half} - {b".", b".."}
        gone = next(iter(seen))
        (files.source / "d" / os.fsdecode(gone)).unlink()
        await names(mirror, d)
        rest = mirror.tree.directories.entries(d, half[-1][0].cookie, 100)
        names_of_rest = {dirent.name for dirent, *_ in rest}
        assert seen | names_of_rest == set(everything)
        assert not seen & names_of_rest


async def test_listing_asks_for_no_attributes(files: Area) -> None:
    async with files.mount() as mirror:
        d = await mirror.ino("d")
        asked(mirror)
        await mirror.tree.directories.open(d)
        assert asked(mirror) == 1, "of the directory itself"
        entries = {e[0].name: e for e in mirror.tree.directories.entries(d, 2, 100)}
        assert {(e[0].type, e[1]) for e in entries.values()} == {(FileType.REGULAR, None)}
        b = (await entry(mirror, d, b"b")).node
        assert b.ino == entries[b"b"][0].shown_ino
        listed = {e[0].name: e for e in mirror.tree.directories.entries(d, 2, 100)}
        assert listed[b"b"][1:] == (b, FOREVER_SECONDS, FOREVER_SECONDS)
        assert listed[b"c"][1] is None


async def test_dots(files: Area) -> None:
    async with files.mount() as mirror:
        d = await mirror.ino("d")
        await mirror.tree.directories.open(d)
        entries = mirror.tree.directories.entries
        assert [(e[0].name, e[0].ino) for e in entries(d, 0, 0)] == [(b".", d), (b"..", ROOT_INO)]
        assert [e[0].name for e in entries(d, 1, 0)] == [b".."]
        assert [e[0].ino for e in entries(ROOT_INO, 0, 0)] == [ROOT_INO, ROOT_INO]


# When the kernel may list a directory from what it has of it.


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_listings, "MOST_KEPT", 2)
    kernel = CachedListings()
    for ino in (1, 2, 3):
        assert not kernel.opened(ino, 100, 0)
    assert kernel.opened(3, 100, 0)
    assert kernel.opened(2, 100, 0)
    assert not kernel.opened(1, 100, 0)


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


async def test_immutable_is_shown_once_and_for_all(files: Area, hours: Hours) -> None:
    (files.source / "empty/none").mkdir(parents=True)
    async with files.mount(mode=IMMUTABLE) as mirror:
        empty = await mirror.ino("empty/none")
        assert await shows(mirror, 3, empty) == [None, False, True]
        assert await shows(mirror, 1) == [None]
        await know_all(mirror)
        assert await shows(mirror, 1) == [False]
        hours.pass_by(1e6)
        assert await shows(mirror, 1) == [True]
        assert await shows(mirror, 1, empty) == [True]


async def test_names_without_attributes_are_shown_again(files: Area, hours: Hours) -> None:
    """With attributes, should somebody have asked for them: a look-up each costs more."""
    async with files.mount(mode=IMMUTABLE) as mirror:
        assert await shows(mirror, 3) == [None, False, True]
        await know_all(mirror)
        assert await shows(mirror, 1) == [True]
        hours.pass_by(BARE_SECONDS)
        assert await shows(mirror, 2) == [False, True]
        hours.pass_by(1e6)
        assert await shows(mirror, 1) == [True]


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


async def test_open_is_never_shown_from_memory(files: Area) -> None:
    async with files.mount(mode=OPEN) as mirror:
        await know_all(mirror)
        assert await shows(mirror, 3) == [None, None, None]


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
        await mirror.tree.names.ask_each(ROOT_INO, [b"d"], Lane.DEMAND)
        assert await shows(mirror, 1) == [True]
        await mirror.tree.names.ask_each(ROOT_INO, [name.encode()], Lane.DEMAND)
        assert await shows(mirror, 2) == [False, False]
        hours.pass_by(LATE_NS / 1e9)
        assert await shows(mirror, 2) == [False, True]
