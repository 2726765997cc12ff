"""When the kernel may list a directory from what it has of it."""

from __future__ import annotations

import pytest

from monarchfs.fs import cached_listings
from monarchfs.fs.cached_listings import BARE_SECONDS, LATE_NS, CachedListings
from monarchfs.types import ROOT_INO, Lane
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, entry
from tests.support.mirror import Area, Mirror


def test_a_listing_is_shown_once_while_it_is_the_same() -> None:
    kernel = CachedListings()
    assert not kernel.opened(1, 100, 1000)
    assert kernel.opened(1, 100, 1000)
    kernel.until(1, 3000)
    kernel.until(1, 2000)
    kernel.until(1, 4000)
    assert kernel.opened(1, 100, 1999)
    assert not kernel.opened(1, 100, 2000), "its time is over"
    assert kernel.opened(1, 100, 2000), "it was shown anew"
    assert not kernel.opened(2, 100, 2000), "another directory"


def test_what_replaced_another_is_shown_until_nobody_can_be_late() -> None:
    """A reader that was given names of the old one may still be about to put them where the
    kernel would find them."""
    kernel = CachedListings()
    assert not kernel.opened(1, 100, 1000)
    for by_name in (False, True):
        if by_name:
            kernel.changed(1)
        now = 1000
        for _ in range(3):
            assert not kernel.opened(1, 200, now)
            kernel.until(1, 1 << 61)
            now += LATE_NS // 3
        now = 1000 + LATE_NS
        assert not kernel.opened(1, 200, now), "for the last time"
        assert kernel.opened(1, 200, now)
    kernel.changed(2)
    assert not kernel.opened(2, 200, 1000)
    assert kernel.opened(2, 200, 1000), "nothing was shown before"


def test_readers_of_another_process_may_be_late() -> None:
    kernel = CachedListings()
    kernel.take_over(1000)
    for now in (1000, 1000 + LATE_NS - 1, 1000 + LATE_NS):
        assert not kernel.opened(1, 100, now)
    assert kernel.opened(1, 100, 1000 + LATE_NS)
    assert not kernel.opened(2, 100, 1000 + LATE_NS)
    assert kernel.opened(2, 100, 1000 + LATE_NS)


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_listings, "MOST_KEPT", 2)
    kernel = CachedListings()
    for ino in (1, 2, 3):
        assert not kernel.opened(ino, 100, 0)
    assert kernel.opened(3, 100, 0)
    assert kernel.opened(2, 100, 0)
    assert not kernel.opened(1, 100, 0)


async def show(mirror: Mirror, ino: int = ROOT_INO) -> bool | None:
    """Open and list a directory, as the adapter does; whether the kernel had it."""
    has = mirror.tree.directories.known_open(ino)
    if has is None:
        await mirror.tree.directories.open(ino)
    if not has:
        assert mirror.tree.directories.shown_entries(ino, 0, 100)
    return has


async def know_all(mirror: Mirror) -> None:
    for name in (b"a", b"d"):
        await entry(mirror, ROOT_INO, name)


async def test_immutable_is_shown_once_and_for_all(files: Area, hours: Hours) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        assert await show(mirror) is None
        await know_all(mirror)
        assert await show(mirror) is False
        hours.pass_by(1e6)
        assert await show(mirror) is True


async def test_names_without_attributes_are_shown_again(files: Area, hours: Hours) -> None:
    """With attributes, should somebody have asked for them: a look-up each costs more."""
    async with files.mount(mode=IMMUTABLE) as mirror:
        assert [await show(mirror) for _ in range(3)] == [None, False, True]
        await know_all(mirror)
        assert await show(mirror) is True
        hours.pass_by(BARE_SECONDS)
        assert [await show(mirror) for _ in range(2)] == [False, True]
        hours.pass_by(1e6)
        assert await show(mirror) is True


async def test_an_empty_directory(files: Area, hours: Hours) -> None:
    (files.source / "empty").mkdir()
    async with files.mount(mode=IMMUTABLE) as mirror:
        ino = await mirror.ino("empty")
        assert [await show(mirror, ino) for _ in range(3)] == [None, False, True]
        hours.pass_by(1e6)
        assert await show(mirror, ino) is True


async def test_ttl_asks_when_it_is_over_and_shows_what_changed(files: Area, hours: Hours) -> None:
    hours.pass_by(1)
    async with files.mount(mode=TTL, ttl=60) as mirror:
        await know_all(mirror)
        assert [await show(mirror) for _ in range(3)] == [None, False, True]
        hours.pass_by(61)
        asked(mirror)
        assert await show(mirror) is None
        assert asked(mirror) == 1, "the directory's times: the listing holds"
        # What the kernel has of the names is too old by now.
        assert await show(mirror) is False
        files.write("new", b"new")
        hours.pass_by(61)
        assert await show(mirror) is None
        assert await show(mirror) is False
        assert b"new" in {
            row[0].name for row in mirror.tree.directories.shown_entries(ROOT_INO, 0, 100)
        }


async def test_open_is_never_shown_from_memory(files: Area) -> None:
    async with files.mount(mode=OPEN) as mirror:
        await know_all(mirror)
        assert [await show(mirror) for _ in range(3)] == [None, None, None]


@pytest.mark.parametrize("change", ["appears", "goes", "is replaced"])
async def test_a_question_that_finds_a_change(files: Area, hours: Hours, change: str) -> None:
    """A listing that says otherwise than what was just opened would be a riddle."""
    hours.pass_by(1)
    async with files.mount(mode=TTL, ttl=60) as mirror:
        await know_all(mirror)
        assert [await show(mirror) for _ in range(3)] == [None, False, True]
        name = "new" if change == "appears" else "a"
        if change == "goes":
            (files.source / name).unlink()
        else:
            files.write(name, b"other")
        await mirror.tree.names.ask_each(ROOT_INO, [b"d"], Lane.DEMAND)
        assert await show(mirror) is True
        await mirror.tree.names.ask_each(ROOT_INO, [name.encode()], Lane.DEMAND)
        assert [await show(mirror) for _ in range(2)] == [False, False]
        hours.pass_by(LATE_NS / 1e9)
        assert [await show(mirror) for _ in range(2)] == [False, True]
