"""Going through a directory name by name: how often the source is asked for attributes, in how many
batches; extended attributes and rights."""

import errno
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarchfs.metadata import cached_listings, directories, sibling_names, statahead, unlisted
from monarchfs.metadata.refresh import Refresh
from monarchfs.metadata.tree import Entry, Missing
from monarchfs.source.posix import Found
from monarchfs.types import ROOT_INO, DirRef, FreshnessMode, Lane
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, fails, names, stale
from tests.support.mirror import Area, Mirror, until

FILES = 300
ORDER = [b"%04d" % number for number in range(FILES)]
SIZES = {name: number for number, name in enumerate(ORDER)}
SELINUX, ACL = b"security.selinux", b"system.posix_acl_access"


def in_no_order(count: int = FILES) -> list[bytes]:
    return random.Random(1).sample(ORDER, count)


@pytest.fixture
def many(area: Area, monkeypatch: pytest.MonkeyPatch) -> Area:
    # On a busy machine a batch may take longer than a reader would wait, and a disk seem far away.
    monkeypatch.setattr(statahead, "PATIENCE_SECONDS", 60)
    monkeypatch.setattr(statahead, "FAR_SECONDS", 60)
    for number in range(FILES):
        area.write(f"d/{number:04}", b"x" * number)
    return area


class Operations:
    """What the source was asked since this was made or called last, by kind. Changing:
    ``batches``, how many calls of threads that took."""

    def __init__(self, mirror: Mirror) -> None:
        self._counts = mirror.source.counters.calls
        self._before: Counter[str] = Counter()
        self._calls = self.batches = 0
        self()

    def __call__(self) -> dict[str, int]:
        operations, calls = Counter[str](), 0
        for (_purpose, kind), counts in self._counts.items():
            operations[kind] += counts.operations
            calls += sum(counts.durations.counts)
        asked, self.batches = operations - self._before, calls - self._calls
        self._before, self._calls = operations, calls
        return dict(asked)


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


class Directory:
    """``d`` of a mount; its names in the order in which it lists them. ``operations`` counts what
    the source is asked from then on."""

    def __init__(self, mirror: Mirror, ino: int, order: list[bytes]) -> None:
        self.mirror = mirror
        self.ino = ino
        self.order = order
        self.operations = Operations(mirror)

    async def stat(self, order: list[bytes]) -> dict[bytes, int]:
        return await stat_each(self.mirror, self.ino, order)

    async def lacks(self, name: bytes) -> bool:
        return isinstance(await self.mirror.tree.names.lookup(self.ino, name), Missing)

    async def attribute(self, name: bytes, attribute_name: bytes) -> bytes | int:
        return await attribute(self.mirror, self.number(name), attribute_name)

    def number(self, name: bytes) -> int:
        dirent = self.mirror.index.nodes.dirent(self.ino, name)
        assert dirent is not None
        return dirent.ino

    async def is_listed(self) -> None:
        await until(lambda: self.mirror.index.listings.listing(self.ino) is not None, "the listing")

    async def listing_ends(self) -> None:
        """Or is broken off."""
        await until(lambda: not self.mirror.tree.names._unlisted._running, "its end")


@asynccontextmanager
async def looked_up(area: Area, **options: Any) -> AsyncIterator[Directory]:
    """Its number alone is known."""
    async with area.mount(**options) as mirror:
        yield Directory(mirror, await mirror.ino("d"), [])


@asynccontextmanager
async def listed(area: Area, **options: Any) -> AsyncIterator[Directory]:
    async with area.mount(**options) as mirror:
        ino = await mirror.ino("d")
        yield Directory(mirror, ino, list(await names(mirror, ino)))


@pytest.mark.parametrize(
    ("mode", "shuffled"), [(IMMUTABLE, False), (IMMUTABLE, True), (TTL, False)]
)
async def test_each_name_is_asked_for_once_and_in_few_batches(
    many: Area, hours: Hours, mode: FreshnessMode, shuffled: bool
) -> None:
    """Each of which is one transaction."""
    hours.pass_by(1)  # else the last ones are in the tick of their making
    async with listed(many, mode=mode) as d:
        order = in_no_order() if shuffled else d.order
        commits = d.mirror.index.environment._commits
        for _ in range(2):
            assert await d.stat(order) == SIZES
        assert d.operations() == {"stat": FILES}
        # In no order, some are asked for one by one.
        assert d.operations.batches < FILES / (3 if shuffled else 10)
        assert d.mirror.index.environment._commits - commits <= d.operations.batches + 1
        if mode is TTL:
            hours.pass_by(61)
            assert await d.stat(order) == SIZES
            assert d.operations() == {"stat": FILES}
            assert d.operations.batches < FILES / 10


async def test_who_wants_a_few_names_in_no_order_brings_no_others(many: Area) -> None:
    async with listed(many) as d:
        order = in_no_order(15)
        assert await d.stat(order) == {name: SIZES[name] for name in order}
        await d.mirror.idle()
        assert d.operations() == {"stat": 15}


async def test_what_is_used_near_its_expiry_is_asked_for_ahead(many: Area, hours: Hours) -> None:
    hours.pass_by(1)  # else the last ones are in the tick of their making
    async with listed(many, mode=TTL, ttl=60) as d:
        mirror = d.mirror
        await d.stat(d.order)
        hours.pass_by(30)
        assert mirror.tree.directories.known_open(d.ino) is not None
        d.operations()
        await mirror.tree.directories.open(d.ino)
        await mirror.idle()
        assert d.operations() == {}
        hours.pass_by(20)
        many.write("d/0200", b"another")
        assert mirror.tree.directories.known_open(d.ino) is None, "it is to be asked for"
        await mirror.tree.directories.open(d.ino)
        assert mirror.tree.directories.known_open(d.ino) is not None, "once"
        young_ns = time.time_ns() - 10 * 10**9

        def renewed() -> bool:
            rows = mirror.index.listings.entries(d.ino, 0, FILES)
            return all(node is not None and node.fetched_ns > young_ns for _entry, node in rows)

        await until(renewed, "all to be asked for")
        assert FILES <= d.operations()["stat"] <= FILES + 1
        assert d.operations.batches < FILES / 10
        hours.pass_by(30)  # more than the ttl since it was asked for first
        assert (await d.stat(d.order))[b"0200"] == len(b"another")
        assert d.operations() == {}


@pytest.mark.parametrize("failing", [b"13579", b"0123456789"], ids=["half of them", "all of them"])
async def test_names_that_fail_are_asked_for_at_most_twice(many: Area, failing: bytes) -> None:
    """Where half of them do, the others are known soon."""
    async with listed(many) as d:
        posix, found = d.mirror.posix, d.mirror.posix.found

        def find(directory: DirRef, name: bytes) -> Found:
            if name[-1] in failing:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return found(directory, name)

        posix.found = find  # type: ignore[method-assign]
        posix.faults.before("found", lambda: None)  # one by one, so by the above
        failed = 0
        for name in in_no_order():
            try:
                await d.stat([name])
            except PermissionError:
                failed += 1
        assert failed == FILES * len(failing) / 10
        assert d.operations()["stat"] <= 2 * FILES


async def test_a_file_that_hangs(many: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statahead, "PATIENCE_SECONDS", 0.05)
    for number in range(FILES):
        many.write(f"e/{number:04}", b"x" * number)
    async with listed(many) as d:
        faults = d.mirror.posix.faults
        gate = faults.gate("found_each")
        assert len(await d.stat(d.order)) == FILES
        assert gate.waiting
        # Nor those in other directories: none of them waits for a batch.
        e = await d.mirror.ino("e")
        order, batches = list(await names(d.mirror, e)), faults.calls["found_each"]
        assert len(await stat_each(d.mirror, e, order)) == FILES
        assert faults.calls["found_each"] == batches
        gate.open()
        await d.mirror.idle()


async def test_who_is_killed_ends_it_for_nobody(many: Area) -> None:
    async with listed(many) as d:
        await d.stat(d.order[:1])
        gate = d.mirror.posix.faults.gate("found_each")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.mirror.tree.names.lookup, d.ino, d.order[1])
            await gate.arrived()
            nursery.cancel_scope.cancel()
        gate.open()
        d.operations()
        await d.stat(d.order[1:4])
        assert d.operations().get("stat", 0) <= FILES
        await d.mirror.idle()


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL])
async def test_names_that_nobody_has_listed_come_in_few_batches(
    many: Area, hours: Hours, mode: FreshnessMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = in_no_order()
    hours.pass_by(1)  # else the last ones are in the tick of their making
    async with looked_up(many, mode=mode) as d:
        singles = []
        found = d.mirror.posix.found

        def single(directory: DirRef, name: bytes) -> Found:
            singles.append(name)
            return found(directory, name)

        single.__name__ = "found"
        monkeypatch.setattr(d.mirror.posix, "found", single)
        assert await d.stat(order) == SIZES
        asked = d.operations()
        assert asked["stat"] <= len(order) + len(singles) + 1, "the directory's own"
        assert asked["list"] <= 2
        # How long the listing takes is not ours to say.
        assert d.operations.batches - len(singles) < FILES / 4
        assert singles[:3] == order[:3]
        assert d.mirror.index.listings.listing(d.ino) is not None
        assert await d.lacks(b"no such name")
        assert d.operations() == {}


async def test_after_a_few_of_them_few_others_are_asked_for(many: Area) -> None:
    async with looked_up(many) as d:
        few = in_no_order(8)
        await d.stat(few[:3])
        await d.is_listed()
        await d.stat(few[3:])
        assert d.operations()["stat"] <= 3 * 8 + 1


async def test_a_tree_of_small_directories_is_not_listed(area: Area) -> None:
    """A sample's three or four files, say: listing them is no gain."""
    for number in range(20):
        for name in "abcd":
            area.write(f"{number}/{name}", b"x")
    async with area.mount() as mirror:
        for number in range(20):
            await stat_each(mirror, await mirror.ino(f"{number}"), [b"a", b"b", b"c", b"d"])
            await mirror.idle()
        # The root has twenty.
        assert mirror.posix.faults.calls["list"] <= 4


@pytest.mark.parametrize(
    ("mode", "count", "takes_over"),
    [(IMMUTABLE, 2, False), (OPEN, 50, False), (IMMUTABLE, 10, True)],
    ids=["two names", "open", "who took over does not know what was missing"],
)
async def test_nothing_is_listed_ahead(
    many: Area, mode: FreshnessMode, count: int, takes_over: bool
) -> None:
    async with looked_up(many, mode=mode) as d:
        if takes_over:
            d.mirror.tree.recorder.take_over(0)
        await d.stat(in_no_order(count))
        if mode is IMMUTABLE:
            await d.stat(in_no_order(count))
        await d.mirror.idle()
        assert d.operations() == {"stat": count}


async def test_one_that_turns_out_to_be_large(many: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size need not tell."""
    monkeypatch.setattr(unlisted, "MOST_NAMES", 50)
    monkeypatch.setattr(directories, "LISTING_BATCH", 20)
    async with looked_up(many) as d:
        await d.stat(in_no_order(4))
        await d.listing_ends()
        assert 100 < len(d.mirror.index.listings.entries(d.ino, 0, FILES)) <= 160
        assert d.mirror.index.listings.listing(d.ino) is None
        await d.stat(in_no_order())
        await d.is_listed()
        assert d.mirror.posix.faults.calls["list"] == 2
        assert list(await names(d.mirror, d.ino))


async def test_a_directory_that_cannot_be_listed_is_not_listed_again_and_again(many: Area) -> None:
    async with looked_up(many) as d:
        d.mirror.posix.faults.fail("list", errno.EACCES)
        await d.stat(in_no_order())
        await d.listing_ends()
        assert d.operations()["stat"] == FILES + 3, "and the directory, each time"
        assert d.mirror.posix.faults.calls["list"] == 3, "after 3, 24 and 192 names"
        with pytest.raises(PermissionError):
            await d.mirror.tree.directories.open(d.ino)


async def test_a_hanging_list_holds_up_nobody(many: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "AHEAD_SECONDS", 0.1)
    async with looked_up(many, deadline=0.1) as d:
        mirror = d.mirror
        gate = mirror.posix.faults.gate("list")
        await d.stat(in_no_order(20))
        await gate.arrived(1)
        await trio.sleep(0.5)
        assert mirror.source.responding
        await d.stat(in_no_order(100))
        await gate.arrived(2)
        # Who lists it himself need not wait for it, either.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.tree.directories.open, d.ino)
            await gate.arrived(3)
            gate.release(2)
        assert set(await names(mirror, d.ino)) == set(ORDER)
        gate.open()
        await mirror.idle()


@pytest.mark.parametrize("limit", ["", "MISSING_NAMES_KEPT", "MOST_MISSING"])
async def test_a_name_that_was_missing_before_is_seen(
    many: Area, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """The kernel was told for good that there is none. If there are too many of these, nothing is
    listed ahead, and refresh is left to notice."""
    if limit:
        monkeypatch.setattr(cached_listings, limit, 1)
    async with looked_up(many) as d:
        assert await d.lacks(b"late")
        assert await d.lacks(b"never")
        many.write("d/late", b"by now")
        assert d.mirror.kernel.entries == []
        await d.stat(in_no_order(10))
        if limit:
            await d.mirror.idle()
            assert len(d.mirror.tree.recorder.negative._names) <= 1
            assert "list" not in d.mirror.posix.faults.calls
            await Refresh(d.mirror.tree, d.mirror.kernel).run()
            assert (d.ino, b"late") in d.mirror.kernel.entries
        else:
            await d.is_listed()
            assert d.mirror.kernel.entries == [(d.ino, b"late")]
        assert await d.stat([b"late"]) == {b"late": len(b"by now")}
        assert await d.lacks(b"never")


async def test_names_that_are_known_bring_more(many: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    """To those who answer look-ups by themselves."""
    monkeypatch.setattr(sibling_names, "PAUSE_SECONDS", 0.0)
    async with listed(many, mode=IMMUTABLE) as d:
        await d.stat(ORDER)
        told: list[bytes] = []

        class Threads:
            def known(self, parent: int, name: bytes, entry: Entry) -> None:
                told.append(name)

            name_known = known

        d.mirror.tree.siblings._threads = Threads()
        d.mirror.tree.recorder.outdate(d.number(b"0003"))
        for _ in range(FILES):
            d.mirror.tree.siblings.looked_up(d.ino)
        assert {*told} == {*ORDER} - {b"0003"}


def source_attribute(path: os.PathLike[str], name: bytes) -> bytes | int:
    try:
        return os.getxattr(path, name)
    except OSError as exc:
        return exc.errno or 0


async def test_attributes_that_files_have_are_seen(many: Area) -> None:
    acl = bytes.fromhex("02000000 01000600ffffffff 02000400e8030000 04000400ffffffff")
    acl += bytes.fromhex("10000400ffffffff 20000400ffffffff")
    directory = many.source / "d"
    try:
        os.setxattr(directory / "0130", ACL, acl)
        os.setxattr(directory / "0140", b"security.x", b"label")
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EPERM):
            raise
        pytest.skip(f"no such attributes here: {exc}")
    await many.settled()
    async with listed(many) as d:
        plain: list[int] = []
        d.mirror.xattrs.on_plain.add(plain.extend)
        await d.stat(d.order)
        for _ in range(2):
            for name in d.order:
                path = directory / os.fsdecode(name)
                for attr in (ACL, b"security.x"):
                    assert await d.attribute(name, attr) == source_attribute(path, attr)
        assert d.mirror.xattrs.absent(ACL) == errno.ENODATA
        without = [name for name in d.order if name not in (b"0130", b"0140")]
        assert sorted(plain) == sorted(map(d.number, without))


@pytest.mark.parametrize("attribute", [ACL, b"security.x"])
async def test_lists_tell_not_all(
    many: Area, monkeypatch: pytest.MonkeyPatch, attribute: bytes
) -> None:
    """A file system that gives attributes that its listxattr leaves out: ACLs, or others, of which
    one is met soon."""
    real, marked = os.getxattr, many.source / "d/0130"

    def getxattr(path: bytes, asked: bytes, *, follow_symlinks: bool = True) -> bytes:
        if asked == attribute and os.path.realpath(path) == os.fsencode(marked):
            return b"value"
        return real(path, asked, follow_symlinks=follow_symlinks)

    await many.settled()
    async with listed(many) as d:
        monkeypatch.setattr(os, "getxattr", getxattr)
        await d.stat(d.order)
        for name in d.order if attribute == ACL else [b"0130", *d.order]:
            expected = b"value" if name == b"0130" else errno.ENODATA
            assert await d.attribute(name, attribute) == expected


async def test_a_source_without_attributes(many: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *_arguments: object) -> bytes:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    async with listed(many) as d:
        for call in ("getxattr", "listxattr"):
            monkeypatch.setattr(type(d.mirror.posix), call, refuse)
        await d.stat(d.order)
        d.operations()
        for name in d.order:
            assert await d.attribute(name, ACL) == errno.EOPNOTSUPP
        assert d.operations().get("xattr", 0) <= 8
        # With allow_other no ACL is all that the kernel lets anybody in with.
        d.mirror.xattrs._kernel_checks = True
        assert await d.attribute(d.order[0], ACL) == errno.ENODATA


def set_xattr(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as exc:
        if exc.errno == errno.EOPNOTSUPP:
            pytest.skip("needs user.* attributes: TMPDIR on ext4 or xfs")
        raise


async def test_attributes_are_asked_for_once(files: Area) -> None:
    set_xattr(files.source / "a", "user.x", b"value")
    await files.settled()
    async with files.mount() as mirror:
        ino = await mirror.ino("a")
        for _ in range(3):
            assert await mirror.xattrs.get(ino, b"user.x") == b"value"
            with fails(errno.ENODATA):
                await mirror.xattrs.get(ino, b"user.none")
            assert await mirror.xattrs.list(ino) == [b"user.x"]
        assert mirror.posix.faults.calls["getxattr"] == 2
    async with files.mount() as again:
        await again.ino("a")
        assert again.xattrs.known(ino, b"user.x") == b"value"
        with fails(errno.ENODATA):
            again.xattrs.known(ino, b"user.none")


async def test_what_was_asked_in_a_changes_tick_is_asked_again(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        for later in (0.0, 0.5):
            hours.pass_by(later)
            with hours.held():
                if not later:
                    files.write("new", b"1")
                ino = await mirror.ino("new")
                assert await attribute(mirror, ino, b"user.x") == errno.ENODATA
                assert await mirror.xattrs.list(ino) == []
                await mirror.xattrs.list_each(ROOT_INO, [b"new"], Lane.DEMAND)
                assert await mirror.xattrs.access(ino, os.R_OK)
            known = [mirror.xattrs.known_access(ino, os.R_OK), mirror.xattrs.plain(ino)]
            assert known == [True if later else None, bool(later)]
            if not later:
                assert mirror.xattrs.known(ino, b"user.x") is None


async def test_attributes_of_a_file_with_the_same_name_are_not_remembered(files: Area) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        ino, xattrs = await mirror.ino("a"), mirror.xattrs
        os.replace(files.source / "d/b", files.source / "a")
        await xattrs.list_each(ROOT_INO, [b"a"], Lane.DEMAND)
        assert await attribute(mirror, ino, b"user.x") == errno.ENODATA
        assert (await xattrs.list(ino), await xattrs.access(ino, os.R_OK)) == ([], True)
        known = xattrs.known(ino, b"user.x"), xattrs.known_access(ino, os.R_OK), xattrs.plain(ino)
        assert known == (None, None, False)
        xattrs._kernel_checks = True
        with stale():
            await xattrs.get(ino, ACL)
        with fails(errno.ENODATA):
            await xattrs.get(ino, ACL, again=True)
        assert await mirror.ino("a") != ino


async def test_an_error_is_not_remembered_as_an_answer(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.ino("a")
        mirror.posix.faults.fail("getxattr", errno.EIO, times=2)
        for code in (errno.EIO, errno.ENODATA):
            with fails(code):
                await mirror.xattrs.get(ino, b"user.x")


async def test_a_directorys_attributes_go_with_its_change(files: Area) -> None:
    for path in (files.source, files.source / "d"):
        set_xattr(path, "user.x", b"one")
    async with files.mount(mode=OPEN) as mirror:
        for path, ino in ((files.source, ROOT_INO), (files.source / "d", await mirror.ino("d"))):
            assert await mirror.xattrs.get(ino, b"user.x") == b"one"
            os.setxattr(path, "user.x", b"two")
            await mirror.tree.attributes.revalidated(ino)
            assert await mirror.xattrs.get(ino, b"user.x") == b"two"
        assert await mirror.ino("d") == ino


async def test_rights_are_asked_for_once_a_version(files: Area) -> None:
    (files.source / "a").chmod(0o644)
    await files.settled()
    async with files.mount(mode=OPEN) as mirror:
        ino = await mirror.ino("a")
        assert mirror.xattrs.known_access(ino, os.F_OK) is True
        assert mirror.xattrs.known_access(ino, os.R_OK) is None
        for _ in range(2):
            assert await mirror.xattrs.access(ino, os.R_OK)
            assert not await mirror.xattrs.access(ino, os.X_OK)
        assert mirror.posix.faults.calls["access"] == 2
        with fails(errno.EROFS):
            await mirror.xattrs.access(ino, os.R_OK | os.W_OK)
        d = await mirror.ino("d")
        assert await mirror.xattrs.access(d, os.R_OK | os.X_OK)
        (files.source / "a").chmod(0o755)
        assert await mirror.xattrs.access(await mirror.ino("a"), os.X_OK)
        mirror.posix.faults.fail("access", errno.EIO, times=2)
        (files.source / "a").chmod(0o700)
        changed = await mirror.ino("a")
        with fails(errno.EIO):
            await mirror.xattrs.access(changed, os.R_OK)
        assert await mirror.xattrs.access(changed, os.R_OK)
