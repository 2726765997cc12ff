"""Going through a directory name by name: how often the source is asked, in how many batches."""

from __future__ import annotations

import errno
import os
import random
import time

import pytest
import trio
import trio.testing

from monarchfs.fs import cached_listings, directories, sibling_names, statahead, unlisted
from monarchfs.fs.refresh import Refresh
from monarchfs.fs.tree import Entry, Missing
from monarchfs.source import _stats, posix
from monarchfs.source.posix import Found
from monarchfs.types import ROOT_INO, DirRef, FreshnessMode, Lane
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, names
from tests.support.mirror import Area, Mirror, until

FILES = 600
SELINUX, ACL = b"security.selinux", b"system.posix_acl_access"


@pytest.fixture
def many(area: Area, monkeypatch: pytest.MonkeyPatch) -> Area:
    # On a busy machine a batch may take longer than a reader would wait.
    monkeypatch.setattr(statahead, "PATIENCE_SECONDS", 60)
    for number in range(FILES):
        area.write(f"d/{number:04}", b"x" * number)
    return area


class Operations:
    """What the source was asked since this was made or called last, by kind. Changing:
    ``batches``, how many calls of threads that took."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self.batches = 0
        self._batches_before = self._calls()
        self._before = self._now()

    def _calls(self) -> int:
        counted = self._mirror.source.counters.calls.values()
        return sum(sum(counts.durations.counts) for counts in counted)

    def _now(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for (_purpose, kind), counts in self._mirror.source.counters.calls.items():
            found[kind] = found.get(kind, 0) + counts.operations
        return found

    def __call__(self) -> dict[str, int]:
        calls = self._calls()
        self.batches, self._batches_before = calls - self._batches_before, calls
        before, self._before = self._before, self._now()
        return {k: n - before[k] for k, n in self._before.items() if n != before[k]}


async def stat_each(mirror: Mirror, ino: int, order: list[bytes]) -> dict[bytes, int]:
    """Look each up, as the kernel does; their sizes."""
    sizes = {}
    for name in order:
        found = mirror.tree.known.lookup(ino, name) or await mirror.tree.names.lookup(ino, name)
        assert isinstance(found, Entry), name
        sizes[name] = found.node.stat.size
    return sizes


async def attribute(mirror: Mirror, ino: int, name: bytes) -> bytes | int:
    """As getxattr(2): the value or the errno."""
    try:
        return mirror.xattrs.known(ino, name) or await mirror.xattrs.get(ino, name)
    except OSError as exc:
        return exc.errno or 0


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL])
async def test_each_name_is_asked_for_once_and_in_few_batches(
    many: Area, hours: Hours, mode: FreshnessMode
) -> None:
    hours.pass_by(1)  # else the last ones are in the tick of their making
    async with many.mount(mode=mode) as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        operations = Operations(mirror)
        for _ in range(2):
            sizes = await stat_each(mirror, d, order)
            assert sizes == {b"%04d" % number: number for number in range(FILES)}
        assert operations() == {"stat": FILES}
        assert operations.batches < FILES / 10
        if mode is TTL:
            hours.pass_by(61)
            assert await stat_each(mirror, d, order) == sizes
            assert operations() == {"stat": FILES}
            assert operations.batches < FILES / 10


async def test_what_is_used_near_its_expiry_is_asked_for_ahead(many: Area, hours: Hours) -> None:
    hours.pass_by(1)  # else the last ones are in the tick of their making
    async with many.mount(mode=TTL, ttl=60) as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        await stat_each(mirror, d, order)
        hours.pass_by(30)
        assert mirror.tree.directories.known_open(d) is not None
        operations = Operations(mirror)
        await mirror.tree.directories.open(d)
        await mirror.idle()
        assert operations() == {}
        hours.pass_by(20)
        many.write("d/0200", b"another")
        assert mirror.tree.directories.known_open(d) is None, "it is to be asked for"
        await mirror.tree.directories.open(d)
        assert mirror.tree.directories.known_open(d) is not None, "once"
        young_ns = time.time_ns() - 10 * 10**9

        def renewed() -> bool:
            rows = mirror.index.entries(d, 0, FILES)
            return all(node is not None and node.fetched_ns > young_ns for _entry, node in rows)

        await until(renewed, "all to be asked for")
        assert FILES <= operations()["stat"] <= FILES + 1
        assert operations.batches < FILES / 10
        hours.pass_by(30)  # more than the ttl since it was asked for first
        sizes = await stat_each(mirror, d, order)
        assert sizes[b"0200"] == len(b"another")
        assert operations() == {}


async def test_listing_alone_asks_for_no_attributes(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        operations = Operations(mirror)
        assert len(await names(mirror, d)) == FILES
        asked = operations().get("stat", 0)
        assert asked <= 2, "the directory's own, and whether it finds names in any case"


async def test_a_few_names_in_no_order_bring_few_others(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        few = random.Random(1).sample(order[1:], 8)
        operations = Operations(mirror)
        await stat_each(mirror, d, few)
        assert operations()["stat"] <= 3 * len(few)


async def test_all_names_in_no_order(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        random.Random(1).shuffle(order)
        operations = Operations(mirror)
        await stat_each(mirror, d, order)
        assert operations() == {"stat": FILES}
        assert operations.batches < FILES / 10


async def test_names_that_fail_are_not_asked_for_with_each_that_follows(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them, say; the others are known soon."""
    real, real_each = os.stat, _stats.stat_each
    failing = (b"1", b"3", b"5", b"7", b"9")

    def stat(path: bytes, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> object:
        if isinstance(path, bytes) and path.endswith(failing):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    def each(directory: int, device: int, names: list[bytes], until: float) -> list[object]:
        answers = real_each(directory, device, names, until)
        return [
            errno.EACCES if name.endswith(failing) else answer
            for name, answer in zip(names, answers, strict=False)
        ]

    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        random.Random(1).shuffle(order)
        monkeypatch.setattr(posix, "stat_each", each)
        monkeypatch.setattr(os, "stat", stat)
        operations = Operations(mirror)
        failed = 0
        for name in order:
            try:
                await stat_each(mirror, d, [name])
            except PermissionError:
                failed += 1
        assert failed == FILES / 2
        assert operations()["stat"] <= 2 * FILES


async def test_what_changed_meanwhile_is_seen(many: Area, hours: Hours) -> None:
    async with many.mount(mode=TTL) as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        await stat_each(mirror, d, order)
        hours.pass_by(61)
        (many.source / "d/0100").unlink()
        many.write("d/0200", b"another")
        left = [name for name in order if name != b"0100"]
        assert (await stat_each(mirror, d, left))[b"0200"] == len(b"another")
        assert isinstance(await mirror.tree.names.lookup(d, b"0100"), Missing)


async def test_a_file_that_hangs_does_not_hold_up_the_others(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statahead, "PATIENCE_SECONDS", 0.05)
    for number in range(FILES):
        many.write(f"e/{number:04}", b"x" * number)
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        gate = mirror.posix.faults.gate("found_each")
        assert len(await stat_each(mirror, d, order)) == FILES
        assert gate.waiting
        # Nor those in other directories: none of them waits for a batch.
        e = await mirror.ino("e")
        order, batches = list(await names(mirror, e)), mirror.posix.faults.calls["found_each"]
        assert len(await stat_each(mirror, e, order)) == FILES
        assert mirror.posix.faults.calls["found_each"] == batches
        gate.open()
        await mirror.idle()


async def test_a_batch_that_fails_is_not_the_readers(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        mirror.posix.faults.fail("found_each", errno.EIO)
        operations = Operations(mirror)
        assert len(await stat_each(mirror, d, order)) == FILES
        assert operations()["stat"] <= 2 * FILES


async def test_names_that_all_fail_are_not_asked_for_again_and_again(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        mirror.posix.faults.fail("found", errno.EACCES)
        operations = Operations(mirror)
        for name in order:
            with pytest.raises(PermissionError):
                await mirror.tree.names.lookup(d, name)
        assert operations()["stat"] <= 2 * FILES


async def test_who_is_killed_ends_it_for_nobody(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        await stat_each(mirror, d, order[:1])
        gate = mirror.posix.faults.gate("found_each")
        async with trio.open_nursery() as nursery:
            victim = trio.CancelScope()

            async def wait() -> None:
                with victim:
                    await mirror.tree.names.lookup(d, order[1])

            nursery.start_soon(wait)
            await gate.arrived()
            victim.cancel()
        gate.open()
        operations = Operations(mirror)
        await stat_each(mirror, d, order[1:4])
        assert operations().get("stat", 0) <= FILES
        await mirror.idle()


# -- directories that nobody has listed


ORDER = [b"%04d" % number for number in range(FILES)]


def in_no_order(count: int = FILES) -> list[bytes]:
    return random.Random(1).sample(ORDER, count)


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL])
async def test_names_that_nobody_has_listed_come_in_few_batches(
    area: Area, hours: Hours, mode: FreshnessMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statahead, "PATIENCE_SECONDS", 60)
    order = in_no_order(250)
    for name in order:
        area.write(f"d/{name.decode()}", b"x" * int(name))
    hours.pass_by(1)  # else the last ones are in the tick of their making
    async with area.mount(mode=mode) as mirror:
        d = await mirror.ino("d")
        singles = []
        found = mirror.source.found

        async def single(directory: DirRef, name: bytes, lane: Lane) -> Found:
            singles.append(name)
            return await found(directory, name, lane)

        monkeypatch.setattr(mirror.source, "found", single)
        operations = Operations(mirror)
        assert await stat_each(mirror, d, order) == {name: int(name) for name in order}
        asked = operations()
        assert asked["stat"] <= len(order) + len(singles) + 1, "the directory's own"
        assert asked["list"] <= 2
        # How long the listing takes is not ours to say.
        assert operations.batches - len(singles) < 30
        assert singles[:3] == order[:3]
        assert mirror.index.listing(d) is not None
        assert isinstance(await mirror.tree.names.lookup(d, b"no such name"), Missing)
        assert operations() == {}


async def test_after_a_few_of_them_few_others_are_asked_for(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        operations = Operations(mirror)
        for name in in_no_order(8):
            await stat_each(mirror, d, [name])
            if name == in_no_order(3)[-1]:
                await until(lambda: mirror.index.listing(d) is not None, "the listing")
        assert operations()["stat"] <= 3 * 8 + 1


async def test_a_tree_of_small_directories_is_not_listed(area: Area) -> None:
    """A sample's three or four files, say: listing them is no gain."""
    for number in range(20):
        for name in "abcd":
            area.write(f"{number}/{name}", b"x")
    many = [f"{number}" for number in range(40)]
    for name in many:
        area.write(f"many/{name}", b"x")
    async with area.mount() as mirror:
        for number in range(20):
            await stat_each(mirror, await mirror.ino(f"{number}"), [b"a", b"b", b"c", b"d"])
            await until(lambda: not mirror.tree.directories._unlisted._running, "its end")
        # The root has twenty.
        assert mirror.posix.faults.calls["list"] <= 4
        d = await mirror.ino("many")
        await stat_each(mirror, d, [name.encode() for name in many[:20]])
        await until(lambda: mirror.index.listing(d) is not None, "the listing")
        assert mirror.tree.directories._unlisted._few == unlisted.FEW


async def test_a_batch_is_one_transaction(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        commits, operations = mirror.index._commits, Operations(mirror)
        await stat_each(mirror, d, order)
        operations()
        assert mirror.index._commits - commits <= operations.batches + 1


async def test_two_names_list_no_directory(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        operations = Operations(mirror)
        for _ in range(3):
            await stat_each(mirror, d, in_no_order(2))
        await mirror.idle()
        assert operations() == {"stat": 2}


async def test_with_open_nothing_is_listed_ahead(many: Area) -> None:
    async with many.mount(mode=OPEN) as mirror:
        d = await mirror.ino("d")
        operations = Operations(mirror)
        await stat_each(mirror, d, in_no_order(50))
        await mirror.idle()
        assert operations() == {"stat": 50}


async def test_a_large_directory_is_listed_after_more(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        node = mirror.index.node(d)
        assert node is not None
        monkeypatch.setattr(unlisted, "DIRECTORY_BYTES", max(1, node.stat.size // 40))
        operations = Operations(mirror)
        await stat_each(mirror, d, in_no_order(35))
        await mirror.idle()
        assert operations() == {"stat": 35}
        await stat_each(mirror, d, in_no_order(60))
        await until(lambda: "list" in operations(), "the listing")


async def test_one_that_turns_out_to_be_large_is_listed_after_more(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size need not tell."""
    monkeypatch.setattr(unlisted, "MOST_NAMES", 50)
    monkeypatch.setattr(directories, "LISTING_BATCH", 20)
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        await stat_each(mirror, d, in_no_order(4))
        await until(lambda: not mirror.tree.directories._unlisted._running, "its end")
        assert 100 < len(mirror.index.entries(d, 0, FILES)) <= 160
        assert mirror.index.listing(d) is None
        await stat_each(mirror, d, in_no_order())
        await until(lambda: mirror.index.listing(d) is not None, "the listing")
        assert mirror.posix.faults.calls["list"] == 2
        assert list(await names(mirror, d))


async def test_a_directory_that_cannot_be_listed_is_not_listed_again_and_again(
    many: Area,
) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        mirror.posix.faults.fail("list", errno.EACCES)
        operations = Operations(mirror)
        await stat_each(mirror, d, in_no_order())
        await until(lambda: not mirror.tree.directories._unlisted._running, "its end")
        assert operations()["stat"] == FILES + 3, "and the directory, each time"
        assert mirror.posix.faults.calls["list"] == 3, "after 3, 24 and 192 names"
        with pytest.raises(PermissionError):
            await mirror.tree.directories.open(d)


async def test_a_listing_that_hangs_holds_up_nobody(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unlisted, "SILENCE_SECONDS", 0.1)
    async with many.mount(deadline=0.1) as mirror:
        d = await mirror.ino("d")
        gate = mirror.posix.faults.gate("list")
        await stat_each(mirror, d, in_no_order(20))
        await gate.arrived(1)
        await trio.sleep(0.5)
        assert mirror.source.responding
        await stat_each(mirror, d, in_no_order(100))
        await gate.arrived(2)
        # Who lists it himself need not wait for it, either.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.tree.directories.open, d)
            await gate.arrived(3)
            gate.release(2)
        assert set(await names(mirror, d)) == set(ORDER)
        gate.open()
        await mirror.idle()


async def test_who_lists_it_himself_meanwhile_has_all_names(many: Area) -> None:
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        gate = mirror.posix.faults.gate("list")
        await stat_each(mirror, d, in_no_order(3))
        await gate.arrived()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.tree.directories.open, d)
            await gate.arrived(2)
            gate.open()
        assert set(await names(mirror, d)) == set(ORDER)
        await stat_each(mirror, d, in_no_order())


async def test_a_name_that_was_missing_before_is_seen(many: Area, hours: Hours) -> None:
    """The kernel was told for good that there is none."""
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        for name in (b"late", b"never"):
            assert isinstance(await mirror.tree.names.lookup(d, name), Missing)
        many.write("d/late", b"by now")
        assert mirror.kernel.entries == []
        await stat_each(mirror, d, in_no_order(10))
        await until(lambda: mirror.index.listing(d) is not None, "the listing")
        assert mirror.kernel.entries == [(d, b"late")]
        assert (await stat_each(mirror, d, [b"late"]))[b"late"] == len(b"by now")
        assert isinstance(await mirror.tree.names.lookup(d, b"never"), Missing)


async def test_where_many_were_missing_refresh_is_left_to_notice(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_listings, "MISSING_NAMES_KEPT", 1)
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        for name in (b"late", b"never"):
            assert isinstance(await mirror.tree.names.lookup(d, name), Missing)
        many.write("d/late", b"by now")
        await stat_each(mirror, d, in_no_order(10))
        await mirror.idle()
        assert "list" not in mirror.posix.faults.calls
        await Refresh(mirror.tree, mirror.kernel).run()
        assert (d, b"late") in mirror.kernel.entries


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL])
async def test_who_took_over_does_not_know_what_was_missing(
    many: Area, mode: FreshnessMode
) -> None:
    async with many.mount(mode=mode) as mirror:
        mirror.tree.recorder.take_over(0)
        d = await mirror.ino("d")
        operations = Operations(mirror)
        await stat_each(mirror, d, in_no_order(10))
        if mode is TTL:
            await until(lambda: mirror.index.listing(d) is not None, "the listing")
        else:
            assert operations() == {"stat": 10}


async def test_what_changed_before_it_was_listed_is_seen(many: Area, hours: Hours) -> None:
    async with many.mount(mode=TTL) as mirror:
        d = await mirror.ino("d")
        few = in_no_order(2)
        await stat_each(mirror, d, few)
        hours.pass_by(61)
        (many.source / "d" / few[0].decode()).unlink()
        many.write(f"d/{few[1].decode()}", b"another")
        rest = [name for name in ORDER if name not in few]
        await stat_each(mirror, d, rest)
        assert isinstance(await mirror.tree.names.lookup(d, few[0]), Missing)
        assert (await stat_each(mirror, d, [few[1]]))[few[1]] == len(b"another")


# -- extended attributes


async def test_what_hardly_any_file_has_is_asked_for_once_for_all(many: Area) -> None:
    """No more than ``ls -l`` asks of the source: a stat and two attributes a name."""
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        operations = Operations(mirror)
        for again in range(2):
            for name in order:
                await stat_each(mirror, d, [name])
                dirent = mirror.index.dirent(d, name)
                assert dirent is not None
                label = await attribute(mirror, dirent.ino, SELINUX)
                assert label in (errno.ENODATA, errno.EOPNOTSUPP)
                path = many.source / "d" / os.fsdecode(name)
                assert await attribute(mirror, dirent.ino, ACL) == source_attribute(path, ACL)
            asked = operations()
            assert asked.get("stat", 0) == (0 if again else FILES)
            assert asked.get("xattr", 0) <= (0 if again else 2 * FILES + 4)
        assert operations.batches < FILES / 4


def source_attribute(path: os.PathLike[str], name: bytes) -> bytes | int:
    try:
        return os.getxattr(path, name)
    except OSError as exc:
        return exc.errno or 0


async def test_attributes_that_files_have_are_seen(many: Area) -> None:
    acl = bytes.fromhex("0200000001000600ffffffff02000400e803000004000400ffffffff10000400ffffffff")
    acl += bytes.fromhex("20000400ffffffff")
    directory = many.source / "d"
    try:
        os.setxattr(directory / "0300", ACL, acl)
        os.setxattr(directory / "0400", b"security.x", b"label")
    except OSError as exc:
        pytest.skip(f"no such attributes here: {exc}")
    async with many.mount() as mirror:
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        plain: list[int] = []
        mirror.xattrs._on_plain = plain.extend
        await stat_each(mirror, d, order)
        inos = {}
        for name in order:
            dirent = mirror.index.dirent(d, name)
            assert dirent is not None
            inos[name] = dirent.ino
        for _ in range(2):
            for name, ino in inos.items():
                path = directory / os.fsdecode(name)
                for attr in (ACL, b"security.x"):
                    assert await attribute(mirror, ino, attr) == source_attribute(path, attr)
        assert mirror.xattrs.absent(ACL) == errno.ENODATA
        assert sorted(plain) == sorted(
            ino for name, ino in inos.items() if name not in (b"0300", b"0400")
        )


async def test_an_acl_that_is_not_listed_is_seen(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.getxattr
    marked = many.source / "d/0300"

    def getxattr(path: bytes, attribute: bytes, *, follow_symlinks: bool = True) -> bytes:
        if attribute == ACL and os.path.realpath(path) == os.fsencode(marked):
            return b"an ACL"
        return real(path, attribute, follow_symlinks=follow_symlinks)

    async with many.mount() as mirror:
        monkeypatch.setattr(os, "getxattr", getxattr)
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        await stat_each(mirror, d, order)
        for name in order:
            dirent = mirror.index.dirent(d, name)
            assert dirent is not None
            answer = await attribute(mirror, dirent.ino, ACL)
            assert answer == (b"an ACL" if name == b"0300" else errno.ENODATA)


async def test_lists_that_do_not_tell_all_are_not_relied_on(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that gives attributes that its listxattr leaves out."""

    def getxattr(self: object, directory: object, name: bytes, attribute: bytes) -> bytes:
        if name == b"0300":
            return b"value"
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    async with many.mount() as mirror:
        monkeypatch.setattr(type(mirror.posix), "getxattr", getxattr)
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        await stat_each(mirror, d, order)
        one, other = (mirror.index.dirent(d, name) for name in (b"0300", b"0301"))
        assert one is not None
        assert other is not None
        assert await attribute(mirror, one.ino, b"security.x") == b"value"
        assert await attribute(mirror, other.ino, b"security.x") == errno.ENODATA
        assert not mirror.xattrs.plain(other.ino)


async def test_a_source_without_attributes_is_asked_few_times(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, *_arguments: object) -> bytes:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    async with many.mount() as mirror:
        for call in ("getxattr", "listxattr"):
            monkeypatch.setattr(type(mirror.posix), call, refuse)
        d = await mirror.ino("d")
        order = list(await names(mirror, d))
        await stat_each(mirror, d, order)
        operations = Operations(mirror)
        for name in order:
            dirent = mirror.index.dirent(d, name)
            assert dirent is not None
            assert await attribute(mirror, dirent.ino, ACL) == errno.EOPNOTSUPP
        assert operations().get("xattr", 0) <= 8


async def test_the_root_itself(many: Area) -> None:
    async with many.mount() as mirror:
        expected = source_attribute(many.source, ACL)
        assert await attribute(mirror, ROOT_INO, ACL) == expected


# -- who answers look-ups by himself


def all_names(count: int) -> list[bytes]:
    return [b"%04d" % number for number in range(count)]


class Told:
    """What of a directory those have been told who answer look-ups by themselves."""

    def __init__(self, mirror: Mirror, ino: int) -> None:
        self._mirror = mirror
        self._ino = ino
        self.names: list[bytes] = []
        mirror.tree.siblings._publish = self._tell

    def _tell(self, parent: int, name: bytes, entry: Entry) -> None:
        known = self._mirror.tree.known.lookup(parent, name)
        assert isinstance(known, Entry)
        assert known.node == entry.node
        assert parent == self._ino
        self.names.append(name)

    def by_look_up(self) -> list[bytes]:
        """Of a name that was known here only."""
        self.names.clear()
        self._mirror.tree.siblings.looked_up(self._ino)
        return list(self.names)


async def test_names_that_are_asked_for_are_told_of(many: Area) -> None:
    # A file that was changed a moment ago is not told of.
    newest = max(file.stat().st_ctime_ns for file in (many.source / "d").iterdir())
    await until(lambda: time.time_ns() > newest + 100_000_000, "the files to be older")
    async with many.mount(mode=TTL) as mirror:
        told = Told(mirror, d := await mirror.ino("d"))
        await stat_each(mirror, d, [b"0400"])
        assert told.names == [b"0400"]
        await names(mirror, d)
        await stat_each(mirror, d, all_names(FILES))
        await until(lambda: set(told.names) == set(all_names(FILES)), "all")


async def test_a_scan_tells_of_names_alone(many: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    async with many.mount(mode=IMMUTABLE) as mirror:
        told = Told(mirror, d := await mirror.ino("d"))
        scanned: list[bytes] = []
        mirror.tree.siblings._publish_name = lambda parent, name, entry: scanned.append(name)
        await mirror.tree.directories.open(d)

        async def scan() -> list[bytes]:
            scanned.clear()
            rows = mirror.tree.directories.entries(d, directories.PARENT_COOKIE, FILES + 1)
            await mirror.tree.names.find_entries(d, rows, Lane.BACKGROUND, scanned=True)
            return sorted(scanned)

        assert await scan() == all_names(FILES), "unknown before"
        assert await scan() == all_names(FILES), "known"
        monkeypatch.setattr(sibling_names, "MOST_NAMES", FILES)
        assert await scan() == told.names == []


async def test_with_open_nothing_is_told_of(many: Area) -> None:
    async with many.mount(mode=OPEN) as mirror:
        told = Told(mirror, d := await mirror.ino("d"))
        await stat_each(mirror, d, all_names(50))
        assert told.names == []


async def test_known_names_bring_those_beside_them(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_names, "PAUSE_SECONDS", 0.0)
    async with many.mount(mode=IMMUTABLE) as mirror:
        d = await mirror.ino("d")
        await names(mirror, d)
        await stat_each(mirror, d, all_names(FILES))
        told = Told(mirror, d)
        for _ in range(sibling_names.FEW):
            assert told.by_look_up() == []
        brought: list[bytes] = []
        while some := told.by_look_up():
            assert len(some) <= sibling_names.BATCH
            brought += some
        assert sorted(brought) == all_names(FILES)
        # And again, what holds then; after which it is left alone for a while.
        monkeypatch.setattr(sibling_names, "PAUSE_SECONDS", 1000.0)
        gone = mirror.tree.index.dirent(d, b"0003")
        assert gone is not None
        mirror.tree.recorder.outdate(gone.ino)
        again = [name for _ in range(3 * FILES) for name in told.by_look_up()]
        assert sorted(again) == sorted({*all_names(FILES)} - {b"0003"})


async def test_where_more_are_known_than_fit_none_is_told_of(
    many: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_names, "MOST_NAMES", FILES)
    async with many.mount(mode=IMMUTABLE) as mirror:
        d = await mirror.ino("d")
        await stat_each(mirror, d, all_names(FILES))
        told = Told(mirror, d)
        assert not any(told.by_look_up() for _ in range(FILES))
