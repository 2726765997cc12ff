"""Names, attributes and listings: asked of the source as often as the mount promises, no more."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from monarchfs.fs import tree as tree_module
from monarchfs.fs.freshness import FOREVER_SECONDS, UNANSWERED_SECONDS
from monarchfs.fs.tree import Entry, Missing
from monarchfs.types import ROOT_INO, FileType, FreshnessMode, IndexWriteError, Lane
from tests.layers.mirror import Area, Mirror, content

IMMUTABLE, TTL, OPEN = FreshnessMode.IMMUTABLE, FreshnessMode.TTL, FreshnessMode.OPEN
METADATA = ("found", "found_each", "stat")


class Hours:
    """time.time_ns() as it was, and as much later as a test says."""

    def __init__(self) -> None:
        self._later = 0
        self._real = time.time_ns

    def pass_by(self, seconds: float) -> None:
        self._later += int(seconds * 1e9)

    def time_ns(self) -> int:
        return self._real() + self._later


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    made = Hours()
    monkeypatch.setattr(time, "time_ns", made.time_ns)
    return made


@pytest.fixture
def files(area: Area) -> Area:
    area.write("a", content(10))
    area.write("d/b", content(20))
    area.write("d/c", content(30))
    return area


def asked(mirror: Mirror) -> int:
    """How often the source was asked for metadata since this was called last."""
    calls = mirror.posix.faults.calls
    return sum(calls.pop(call, 0) for call in METADATA)


async def entry(mirror: Mirror, parent: int, name: bytes) -> Entry:
    found = await mirror.tree.lookup(parent, name)
    assert isinstance(found, Entry)
    return found


async def names(mirror: Mirror, ino: int) -> dict[bytes, int]:
    """The directory's names and cookies, as opendir and readdir give them."""
    await mirror.tree.open_directory(ino)
    cookies, after = {}, 0
    while batch := mirror.tree.entries(ino, after, 3):
        for dirent, _node, _entry_timeout, _attr_timeout in batch:
            assert dirent.cookie > after
            cookies[dirent.name] = after = dirent.cookie
    assert list(cookies)[:2] == [b".", b".."]
    del cookies[b"."], cookies[b".."]
    return cookies


# Freshness.


async def test_immutable_asks_once_and_never_again(files: Area, hours: Hours) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        asked(mirror)
        first = await entry(mirror, ROOT_INO, b"a")
        assert asked(mirror) == 1
        assert (first.entry_timeout, first.attr_timeout) == (FOREVER_SECONDS, FOREVER_SECONDS)
        hours.pass_by(1e6)
        files.write("a", b"other")
        assert await entry(mirror, ROOT_INO, b"a") == first
        assert await mirror.tree.attributes(first.node.ino) == first
        assert await mirror.tree.revalidated(first.node.ino) == first.node
        await names(mirror, ROOT_INO)
        asked(mirror)
        await names(mirror, ROOT_INO)
        assert asked(mirror) == 0


async def test_another_mount_asks_once_more(files: Area) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        old = await entry(mirror, ROOT_INO, b"a")
        await names(mirror, ROOT_INO)
    files.write("a", b"other")
    files.write("new", b"new")
    async with files.mount(mode=IMMUTABLE) as again:
        assert set(await names(again, ROOT_INO)) == {b"a", b"d", b"new"}
        assert (await entry(again, ROOT_INO, b"a")).node.ino != old.node.ino
        asked(again)
        await entry(again, ROOT_INO, b"a")
        assert asked(again) == 0


async def test_ttl_asks_again_when_it_is_over(files: Area, hours: Hours) -> None:
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
        assert (await mirror.tree.attributes(first.node.ino)).node.ino == first.node.ino
        assert asked(mirror) == 1
        await mirror.tree.revalidated(first.node.ino)
        assert asked(mirror) == 0


async def test_open_asks_at_every_look_up_and_open(files: Area, hours: Hours) -> None:
    async with files.mount(mode=OPEN) as mirror:
        first = await entry(mirror, ROOT_INO, b"a")
        assert first.entry_timeout == 0
        asked(mirror)
        await entry(mirror, ROOT_INO, b"a")
        await mirror.tree.revalidated(first.node.ino)
        assert asked(mirror) == 2
        assert mirror.tree.known_attributes(first.node.ino) is not None
        hours.pass_by(1.5)
        assert mirror.tree.known_attributes(first.node.ino) is None
        files.write("d/new", b"")
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
        assert set(await names(mirror, d)) == {b"b", b"c", b"new"}


async def test_all_who_want_the_same_ask_once(files: Area) -> None:
    async with files.mount() as mirror:
        gate = mirror.posix.faults.gate("found")
        asked(mirror)
        found = []

        async def look_up() -> None:
            found.append(await entry(mirror, ROOT_INO, b"a"))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(look_up)
            await gate.arrived()
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert asked(mirror) == 1
        assert len({e.node.ino for e in found}) == 1


# Names that do not exist.


async def test_a_missing_name(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        found = await mirror.tree.lookup(ROOT_INO, b"new")
        assert isinstance(found, Missing)
        assert 59 < found.timeout <= 60
        assert await mirror.tree.find(ROOT_INO, b"new", Lane.DEMAND) is None
        files.write("new", b"new")
        hours.pass_by(61)
        assert (await entry(mirror, ROOT_INO, b"new")).node.stat.size == 3


async def test_a_complete_listing_answers_for_what_is_not_in_it(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        await names(mirror, ROOT_INO)
        asked(mirror)
        hours.pass_by(10)
        found = await mirror.tree.lookup(ROOT_INO, b"new")
        assert isinstance(found, Missing)
        assert 49 < found.timeout <= 50
        assert asked(mirror) == 0
        files.write("new", b"new")
        hours.pass_by(51)
        await entry(mirror, ROOT_INO, b"new")
        assert asked(mirror) == 1


async def test_a_listing_that_broke_off_answers_for_nothing(files: Area) -> None:
    async with files.mount() as mirror:
        mirror.posix.faults.fail("stat", errno.EIO, times=1)
        with pytest.raises(OSError, match="Input/output"):
            await mirror.tree.open_directory(ROOT_INO)
        assert mirror.tree.known_lookup(ROOT_INO, b"new") is None
        await entry(mirror, ROOT_INO, b"a")


# A source that does not answer.


Ask = Callable[[Mirror, int], Awaitable[object]]


async def ask_name(mirror: Mirror, ino: int) -> object:
    return (await entry(mirror, ROOT_INO, b"d")).node.ino


async def ask_attributes(mirror: Mirror, ino: int) -> object:
    return (await mirror.tree.attributes(ino)).node.ino


async def ask_revalidated(mirror: Mirror, ino: int) -> object:
    return (await mirror.tree.revalidated(ino)).ino


async def ask_listing(mirror: Mirror, ino: int) -> object:
    await mirror.tree.open_directory(ino)
    return ino


ASKS = [ask_name, ask_attributes, ask_revalidated, ask_listing]


async def see_everything(mirror: Mirror) -> int:
    ino = (await entry(mirror, ROOT_INO, b"d")).node.ino
    await names(mirror, ino)
    return ino


@pytest.mark.parametrize("ask", ASKS)
async def test_what_is_known_is_served_when_the_deadline_is_over(
    files: Area, clock: trio.testing.MockClock, hours: Hours, ask: Ask
) -> None:
    async with files.mount(mode=TTL, ttl=60, deadline=5) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)
        gate = mirror.posix.faults.gate(*METADATA)
        answers = []

        async def answer() -> None:
            answers.append(await ask(mirror, ino))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            await gate.arrived()
            clock.jump(4.9)
            await trio.testing.wait_all_tasks_blocked()
            assert answers == []
            clock.jump(0.2)
            await trio.testing.wait_all_tasks_blocked()
        assert answers == [ino]
        assert mirror.metrics.stale_answers == 1
        if ask is not ask_listing:
            known = mirror.tree.known_attributes(ino)
            assert known is None, "it is still to be asked for"
        gate.open()
        await mirror.idle()
        # The answer that came late is the next one's.
        asked(mirror)
        assert await ask(mirror, ino) == ino
        assert asked(mirror) == 0
        assert mirror.metrics.stale_answers == 1


async def test_the_kernel_keeps_what_was_served_stale_for_a_second(
    files: Area, clock: trio.testing.MockClock, hours: Hours
) -> None:
    async with files.mount(mode=TTL, ttl=60, deadline=5) as mirror:
        await see_everything(mirror)
        hours.pass_by(61)
        gate = mirror.posix.faults.gate(*METADATA)
        async with trio.open_nursery() as nursery:

            async def look_up() -> None:
                found = await entry(mirror, ROOT_INO, b"d")
                assert found.entry_timeout == found.attr_timeout == UNANSWERED_SECONDS

            nursery.start_soon(look_up)
            await gate.arrived()
            clock.jump(5.1)
        gate.open()


async def test_nobody_waits_twice_for_a_source_that_hangs(
    files: Area, clock: trio.testing.MockClock, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount(mode=TTL, ttl=60, deadline=5) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)
        gate = mirror.posix.faults.gate(*METADATA)
        monkeypatch.setattr(type(mirror.source), "responding", False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.tree.attributes, ino)
            await gate.arrived()
            clock.jump(0.01)
        assert mirror.metrics.stale_answers == 1
        gate.open()
        await mirror.idle()
        assert mirror.tree.known_attributes(ino) is not None


async def test_what_is_not_known_is_waited_for_and_open_waits_for_all(
    files: Area, clock: trio.testing.MockClock
) -> None:
    for mode, name in ((IMMUTABLE, b"a"), (OPEN, b"d")):
        async with files.mount(mode=mode, deadline=5) as mirror:
            if mode is OPEN:
                await see_everything(mirror)
            gate = mirror.posix.faults.gate(*METADATA)
            found: list[Entry] = []

            async def look_up(
                mirror: Mirror = mirror, name: bytes = name, found: list[Entry] = found
            ) -> None:
                found.append(await entry(mirror, ROOT_INO, name))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(look_up)
                await gate.arrived()
                clock.jump(3600)
                await trio.testing.wait_all_tasks_blocked()
                assert found == []
                gate.open()
            assert len(found) == 1
            assert mirror.metrics.stale_answers == 0


async def test_an_error_of_the_source_is_no_silence(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)
        mirror.posix.faults.fail("found", errno.EIO, times=2)
        with pytest.raises(OSError, match="Input/output"):
            await mirror.tree.attributes(ino)
        with pytest.raises(OSError, match="Input/output"):
            await entry(mirror, ROOT_INO, b"d")
        assert (await mirror.tree.attributes(ino)).node.ino == ino


async def test_an_answer_that_cannot_be_recorded(
    files: Area, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number must be in the index before the kernel hears of it; a known one is."""
    async with files.mount(mode=TTL, ttl=60) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)

        def full(*_: object) -> None:
            raise IndexWriteError("the disk is full")

        monkeypatch.setattr(mirror.index, "record_found", full)
        assert (await entry(mirror, ROOT_INO, b"d")).node.ino == ino
        assert mirror.metrics.stale_answers == 1
        with pytest.raises(OSError, match="cannot be recorded") as raised:
            await mirror.tree.lookup(ROOT_INO, b"a")
        assert raised.value.errno == errno.EIO


async def test_statfs_is_remembered(files: Area, clock: trio.testing.MockClock) -> None:
    async with files.mount(mode=OPEN, deadline=5) as mirror:
        first = await mirror.tree.statfs()
        assert await mirror.tree.statfs() == first
        assert mirror.posix.faults.calls["statvfs"] == 1
        clock.jump(tree_module.STATFS_SECONDS + 1)
        gate = mirror.posix.faults.gate("statvfs")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.tree.statfs)
            await gate.arrived()
            clock.jump(5.1)
        assert mirror.metrics.stale_answers == 1
        gate.open()


# What changes in the source.


async def test_another_version_is_another_number_and_the_old_one_is_stale(
    files: Area, hours: Hours
) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        old = (await entry(mirror, ROOT_INO, b"a")).node
        files.write("a", b"another version")
        hours.pass_by(61)
        new = (await entry(mirror, ROOT_INO, b"a")).node
        assert new.ino != old.ino
        for ask in (mirror.tree.revalidated, mirror.files.open):
            with pytest.raises(OSError, match="another version") as raised:
                await ask(old.ino)
            assert raised.value.errno == errno.ESTALE
        assert mirror.files.known_open(old.ino) is None
        # Who has it open may go on asking about it.
        kept = await mirror.tree.attributes(old.ino)
        assert (kept.node.stat, kept.attr_timeout) == (old.stat, 0.0)


async def test_an_open_that_finds_out(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        node = (await entry(mirror, ROOT_INO, b"a")).node
        (files.source / "a").unlink()
        hours.pass_by(61)
        with pytest.raises(OSError, match="another version") as raised:
            await mirror.files.open(node.ino)
        assert raised.value.errno == errno.ESTALE
        assert isinstance(await mirror.tree.lookup(ROOT_INO, b"a"), Missing)


async def test_hard_links_share_a_number(files: Area) -> None:
    os.link(files.source / "a", files.source / "d/link")
    async with files.mount(mode=OPEN) as mirror:
        first = await mirror.node("a")
        second = await mirror.node("d/link")
        assert first.ino == second.ino
        assert second.stat.nlink == 2
        assert await mirror.read_file("d/link") == content(10)
        await mirror.idle()
        assert mirror.files.state(first.ino) == "resident"
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
        mirror.source.forget(b"")
        with pytest.raises(OSError, match="replaced") as raised:
            await mirror.tree.lookup(old.node.ino, b"b")
        assert raised.value.errno == errno.ESTALE
        with pytest.raises(OSError, match="replaced"):
            await mirror.tree.open_directory(old.node.ino)
        with pytest.raises(OSError, match="replaced"):
            await mirror.tree.find_each(old.node.ino, [b"b", b"x"], Lane.BACKGROUND)
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
        mirror.source.forget(b"")
        with pytest.raises(OSError, match="replaced") as raised:
            await mirror.tree.lookup(e.ino, b"f")
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


async def test_links_are_answered_from_what_is_known(files: Area) -> None:
    (files.source / "link").symlink_to("d/b")
    async with files.mount(mode=OPEN) as mirror:
        node = await mirror.node("link")
        assert mirror.tree.known_target(node.ino) == b"d/b"
        assert await mirror.tree.target(node.ino) == b"d/b"
        (files.source / "link").unlink()
        (files.source / "link").symlink_to("elsewhere")
        again = await mirror.node("link")
        assert again.ino != node.ino
        assert await mirror.tree.target(again.ino) == b"elsewhere"
        with pytest.raises(OSError, match="not a regular file"):
            await mirror.files.open(again.ino)


async def test_an_unknown_number_is_stale(files: Area) -> None:
    async with files.mount() as mirror:
        for ask in (
            mirror.tree.attributes,
            mirror.tree.revalidated,
            mirror.tree.open_directory,
            mirror.files.open,
            mirror.tree.target,
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
        half = mirror.tree.entries(d, 0, 6)
        seen = {dirent.name for dirent, *_ in half} - {b".", b".."}
        gone = next(iter(seen))
        (files.source / "d" / os.fsdecode(gone)).unlink()
        await names(mirror, d)
        rest = mirror.tree.entries(d, half[-1][0].cookie, 100)
        names_of_rest = {dirent.name for dirent, *_ in rest}
        assert seen | names_of_rest == set(everything)
        assert not seen & names_of_rest


async def test_listing_asks_for_no_attributes(files: Area) -> None:
    async with files.mount() as mirror:
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
        asked(mirror)
        await mirror.tree.open_directory(d)
        assert asked(mirror) == 1, "of the directory itself"
        entries = {e[0].name: e for e in mirror.tree.entries(d, 2, 100)}
        assert {e[1] for e in entries.values()} == {None}
        assert {e[0].type for e in entries.values()} == {FileType.REGULAR}
        b = await entry(mirror, d, b"b")
        assert b.node.ino == entries[b"b"][0].ino
        listed = {e[0].name: e for e in mirror.tree.entries(d, 2, 100)}
        assert listed[b"b"][1] == b.node
        assert listed[b"b"][2:] == (FOREVER_SECONDS, FOREVER_SECONDS)
        assert listed[b"c"][1] is None


async def test_dots(files: Area) -> None:
    async with files.mount() as mirror:
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
        await mirror.tree.open_directory(d)
        dot, dots = mirror.tree.entries(d, 0, 0)
        assert (dot[0].name, dot[0].ino, dots[0].name, dots[0].ino) == (b".", d, b"..", ROOT_INO)
        root = mirror.tree.entries(ROOT_INO, 0, 0)
        assert [e[0].ino for e in root] == [ROOT_INO, ROOT_INO]
        assert mirror.tree.entries(d, 1, 0)[0][0].name == b".."


# Extended attributes and rights.


def set_xattr(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as exc:
        if exc.errno == errno.EOPNOTSUPP:
            pytest.skip("no user.* attributes here")
        raise


async def test_attributes_are_asked_for_once(files: Area) -> None:
    set_xattr(files.source / "a", "user.x", b"value")
    async with files.mount() as mirror:
        ino = await mirror.ino("a")
        for _ in range(3):
            assert await mirror.xattrs.get(ino, b"user.x") == b"value"
            with pytest.raises(OSError, match=r".") as raised:
                await mirror.xattrs.get(ino, b"user.none")
            assert raised.value.errno == errno.ENODATA
            assert await mirror.xattrs.list(ino) == [b"user.x"]
        assert mirror.posix.faults.calls["getxattr"] == 2
    async with files.mount() as again:
        await again.ino("a")
        assert again.xattrs.known(ino, b"user.x") == b"value"
        with pytest.raises(OSError, match=r"."):
            again.xattrs.known(ino, b"user.none")


async def test_an_error_is_not_remembered_as_an_answer(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.ino("a")
        mirror.posix.faults.fail("getxattr", errno.EIO, times=1)
        for code in (errno.EIO, errno.ENODATA):
            with pytest.raises(OSError, match=r".") as raised:
                await mirror.xattrs.get(ino, b"user.x")
            assert raised.value.errno == code


async def test_a_directorys_attributes_go_with_its_change(files: Area) -> None:
    set_xattr(files.source / "d", "user.x", b"one")
    async with files.mount(mode=OPEN) as mirror:
        d = await mirror.ino("d")
        assert await mirror.xattrs.get(d, b"user.x") == b"one"
        os.setxattr(files.source / "d", "user.x", b"two")
        assert await mirror.ino("d") == d
        assert await mirror.xattrs.get(d, b"user.x") == b"two"


async def test_the_attributes_of_this_file_system(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.ino("a")
        assert await mirror.xattrs.get(ino, b"user.monarchfs.state") == b"remote"
        assert await mirror.xattrs.get(ino, b"user.monarchfs.reason") == b"not opened yet"
        await mirror.copied("a")
        assert mirror.xattrs.known(ino, b"user.monarchfs.state") == b"resident"
        assert mirror.xattrs.known(ino, b"user.monarchfs.tier") == mirror.tier.path.encode()
        for name in (b"user.monarchfs.reason", b"user.monarchfs.else"):
            with pytest.raises(OSError, match=r".") as raised:
                mirror.xattrs.known(ino, name)
            assert raised.value.errno == errno.ENODATA
        assert await mirror.xattrs.list(ino) == []
        with pytest.raises(OSError, match=r".") as raised:
            await mirror.xattrs.get(await mirror.ino("d"), b"user.monarchfs.state")
        assert raised.value.errno == errno.ENODATA


async def test_rights_are_asked_for_once_a_version(files: Area) -> None:
    (files.source / "a").chmod(0o644)
    async with files.mount(mode=OPEN) as mirror:
        ino = await mirror.ino("a")
        assert mirror.xattrs.known_access(ino, os.F_OK) is True
        assert mirror.xattrs.known_access(ino, os.R_OK) is None
        for _ in range(2):
            assert await mirror.xattrs.access(ino, os.R_OK)
            assert not await mirror.xattrs.access(ino, os.X_OK)
        assert mirror.posix.faults.calls["access"] == 2
        with pytest.raises(OSError, match=r".") as raised:
            await mirror.xattrs.access(ino, os.R_OK | os.W_OK)
        assert raised.value.errno == errno.EROFS
        d = await mirror.ino("d")
        assert await mirror.xattrs.access(d, os.R_OK | os.X_OK)
        (files.source / "a").chmod(0o755)
        assert await mirror.xattrs.access(await mirror.ino("a"), os.X_OK)
        mirror.posix.faults.fail("access", errno.EIO, times=1)
        (files.source / "a").chmod(0o700)
        changed = await mirror.ino("a")
        with pytest.raises(OSError, match="Input/output"):
            await mirror.xattrs.access(changed, os.R_OK)
        assert await mirror.xattrs.access(changed, os.R_OK)
