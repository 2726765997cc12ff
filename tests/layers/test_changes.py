"""What changes in the source, and what the mount then says; listings and their cookies."""

from __future__ import annotations

import errno
import os

import pytest

from monarchfs.fs.freshness import FOREVER_SECONDS
from monarchfs.fs.tree import Missing
from monarchfs.types import ROOT_INO, FileType, Lane
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, entry, names
from tests.support.mirror import Area, content
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
            with pytest.raises(OSError, match="another version") as raised:
                await ask(old.ino)
            assert raised.value.errno == errno.ESTALE
        assert mirror.files.known_open(old.ino) is None
        # Who has it open may go on asking about it.
        kept = await mirror.tree.attributes.get(old.ino)
        assert (kept.node.stat, kept.attr_timeout) == (old.stat, 0.0)


async def test_an_open_that_finds_out(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        node = (await entry(mirror, ROOT_INO, b"a")).node
        (files.source / "a").unlink()
        hours.pass_by(61)
        with pytest.raises(OSError, match="another version") as raised:
            await mirror.files.open(node.ino)
        assert raised.value.errno == errno.ESTALE
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"a"), Missing)


async def test_hard_links_share_a_number(files: Area) -> None:
    os.link(files.source / "a", files.source / "d/link")
    await files.settled()
    async with files.mount(mode=OPEN) as mirror:
        first = await mirror.node("a")
        second = await mirror.node("d/link")
        assert first.ino == second.ino
        assert second.stat.nlink == 2
        assert await mirror.read_file("d/link") == content(10)
        await mirror.idle()
        assert mirror.residency.state(first.ino) == "resident"
        before = len(mirror.posix.reads)
        assert await mirror.read_file("a") == content(10)
        assert len(mirror.posix.reads) == before
        await mirror.settled()


async def test_a_directory_that_was_swapped(files: Area) -> None:
    """Names below it are looked up in the new one, never in a mixture of both."""
    async with files.mount(mode=OPEN) as mirror:
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
        with pytest.raises(OSError, match="replaced") as raised:
            await mirror.tree.names.lookup(old.node.ino, b"b")
        assert raised.value.errno == errno.ESTALE
        with pytest.raises(OSError, match="replaced"):
            await mirror.tree.directories.open(old.node.ino)
        with pytest.raises(OSError, match="replaced"):
            await mirror.tree.names.find_each(old.node.ino, [b"b", b"x"], Lane.BACKGROUND)
        assert set(await names(mirror, new.node.ino)) == {b"b"}
        # Where it was moved to, it is the same one.
        assert (await entry(mirror, ROOT_INO, b"away")).node.ino == old.node.ino
        assert set(await names(mirror, old.node.ino)) == {b"b", b"c"}


async def test_below_a_directory_that_was_swapped_immutable_asks_anew(files: Area) -> None:
    """What was believed for ever is not believed any more once it was found to be wrong."""
    files.write("d/e/f", b"old")
    async with files.mount(mode=IMMUTABLE) as mirror:
        e = await mirror.node("d/e")
        (files.source / "d").rename(files.source / "away")
        files.write("d/e/f", b"of the new one")
        close_directories(mirror.posix)
        with pytest.raises(OSError, match="replaced") as raised:
            await mirror.tree.names.lookup(e.ino, b"f")
        assert raised.value.errno == errno.ESTALE
        # The kernel then walks the path again, from the top.
        assert (await mirror.node("d/e/f")).stat.size == 14


async def test_a_file_where_a_directory_was(files: Area) -> None:
    async with files.mount(mode=OPEN) as mirror:
        d = await entry(mirror, ROOT_INO, b"d")
        for path in (files.source / "d").iterdir():
            path.unlink()
        (files.source / "d").rmdir()
        files.write("d", b"a file")
        found = await entry(mirror, ROOT_INO, b"d")
        assert found.node.ino != d.node.ino
        assert found.node.stat.is_regular
        assert await mirror.read_file("d") == b"a file"
        await mirror.settled()


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
async def test_where_a_file_was_is_something_else(files: Area, kind: str) -> None:
    """Not EISDIR or ELOOP for a file: the kernel asks for the name again, and finds what it is."""
    async with files.mount(mode=TTL, copies=False) as mirror:
        node = await mirror.node("d/b")
        path = files.source / "d/b"
        path.unlink()
        match kind:
            case "directory":
                path.mkdir()
            case "link":
                path.symlink_to("c")
            case "pipe":
                os.mkfifo(path)
        with pytest.raises(OSError, match="another version") as raised:
            await mirror.files.open(node.ino)
        assert raised.value.errno == errno.ESTALE
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
            with pytest.raises(OSError, match=r".") as raised:
                await ask(12345)
            assert raised.value.errno == errno.ESTALE


# Listings.


async def test_cookies_stay_what_they_are(files: Area) -> None:
    async with files.mount(mode=OPEN) as mirror:
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
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
        third = await names(again, (await entry(again, ROOT_INO, b"d")).node.ino)
        assert {name: third[name] for name in second} == second


async def test_a_reader_of_a_directory_goes_on_across_a_change(files: Area) -> None:
    for number in range(9):
        files.write(f"d/n{number}", b"")
    async with files.mount(mode=OPEN) as mirror:
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
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
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
        asked(mirror)
        await mirror.tree.directories.open(d)
        assert asked(mirror) == 1, "of the directory itself"
        entries = {e[0].name: e for e in mirror.tree.directories.entries(d, 2, 100)}
        assert {e[1] for e in entries.values()} == {None}
        assert {e[0].type for e in entries.values()} == {FileType.REGULAR}
        b = await entry(mirror, d, b"b")
        assert b.node.ino == entries[b"b"][0].shown_ino
        listed = {e[0].name: e for e in mirror.tree.directories.entries(d, 2, 100)}
        assert listed[b"b"][1] == b.node
        assert listed[b"b"][2:] == (FOREVER_SECONDS, FOREVER_SECONDS)
        assert listed[b"c"][1] is None


async def test_dots(files: Area) -> None:
    async with files.mount() as mirror:
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
        await mirror.tree.directories.open(d)
        dot, dots = mirror.tree.directories.entries(d, 0, 0)
        assert (dot[0].name, dot[0].ino, dots[0].name, dots[0].ino) == (b".", d, b"..", ROOT_INO)
        root = mirror.tree.directories.entries(ROOT_INO, 0, 0)
        assert [e[0].ino for e in root] == [ROOT_INO, ROOT_INO]
        assert mirror.tree.directories.entries(d, 1, 0)[0][0].name == b".."
