"""Names that another node of the job has asked for: two mounts of one source in one process."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from monarchfs.metadata import shared_names, statahead
from monarchfs.metadata.refresh import Refresh
from monarchfs.metadata.tree import Entry
from monarchfs.peers import messages
from monarchfs.peers import names as peer_names
from monarchfs.peers.names import NameService
from monarchfs.types import (
    ROOT_INO,
    DirRef,
    FileType,
    FreshnessMode,
    Lane,
    Node,
    PeerListing,
    PeerNames,
)
from tests.layers.test_statahead import Operations, stat_each
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, names, stale
from tests.support.mirror import Area, Mirror

FILES = 300
Names = list[bytes]
FEW = 4
"""Single names that a reader asks for."""


class Everything:
    """The owner of all names."""

    def served(self, _directory: DirRef, _size: int, names: Sequence[bytes]) -> list[bytes]:
        return list(names)


class Owner:
    """``a``, as the other node sees it. ``questions`` counts; ``says`` changes its answers."""

    def __init__(self, a: Mirror) -> None:
        self.questions = 0
        self.silent = False
        self.lies: PeerNames | None = None
        self.listing: PeerListing | None = None
        tree = a.tree

        async def directory(path: bytes, lane: Lane) -> int | None:
            ino = ROOT_INO
            for name in filter(None, path.split(b"/")):
                node = await tree.names.find(ino, name, lane)
                if node is None:
                    return None
                ino = node.ino
            return ino

        self._copies = NameService(
            tree,
            SimpleNamespace(directory=directory),  # type: ignore[arg-type]
            Everything(),  # type: ignore[arg-type]
            a.nursery,
        )

    def divide(
        self, _directory: DirRef, _size: int, names: Sequence[bytes]
    ) -> dict[int, list[bytes]]:
        return {1: list(names)} if names else {}

    async def ask(
        self, owner: int, directory: DirRef, names: list[bytes], most_age_ns: int, lane: Lane
    ) -> PeerNames | None:
        assert owner == 1
        self.questions += 1
        if self.silent or self.lies is not None:
            await trio.lowlevel.checkpoint()
            return self.lies
        question = self._question(directory, names[: messages.MOST_NAMES], most_age_ns, lane)
        return messages.decode_names(messages.encode_names(await self._copies.answer(question)))

    async def list(
        self, _owner: int, directory: DirRef, most_age_ns: int, lane: Lane
    ) -> PeerListing | None:
        if self.silent or self.lies is not None or self.listing is not None:
            await trio.lowlevel.checkpoint()
            return self.listing
        question = self._question(directory, [], most_age_ns, lane)
        answer = await self._copies.listing(question)
        return None if answer is None else messages.decode_listing(messages.encode_listing(answer))

    def _question(
        self, directory: DirRef, some: Names, most_age_ns: int, lane: Lane
    ) -> messages.NamesQuestion:
        question = messages.NamesQuestion(
            *directory[:2], some, max(0, most_age_ns), lane is Lane.DEMAND
        )
        return messages.decode_names_question(messages.encode_names_question(question))


def beside(area: Area) -> Area:
    """Another node's directories, with the same source."""
    path = Path(f"{area.path}-b")
    path.mkdir()
    other = Area(path)
    other.source.rmdir()
    other.source.symlink_to(area.source)
    return other


@asynccontextmanager
async def pair(
    area: Area, mode: FreshnessMode = IMMUTABLE, owner_mode: FreshnessMode | None = None
) -> AsyncIterator[tuple[Mirror, Mirror, Owner]]:
    """Two nodes, the first of which owns all names, and how the other asks it."""
    other = beside(area)
    # All names are the first one's own, so it asks nobody.
    nobody: Any = SimpleNamespace(divide=lambda *_about: {})
    async with area.mount(mode=owner_mode or mode, ttl=60, copies=False, peers=nobody) as a:
        owner = Owner(a)
        async with other.mount(mode=mode, ttl=60, copies=False, peers=owner) as b:
            yield a, b, owner


@pytest.fixture
def many(area: Area, hours: Hours, monkeypatch: pytest.MonkeyPatch) -> Area:
    monkeypatch.setattr(shared_names, "FACTOR", 1e6)  # this source takes no time
    monkeypatch.setattr(peer_names, "DEMAND_SECONDS", 60)  # on a busy machine
    monkeypatch.setattr(shared_names, "JOIN_SECONDS", 60)
    monkeypatch.setattr(statahead, "PATIENCE_SECONDS", 60)
    for number in range(FILES):
        area.write(f"d/{number:04}", b"x" * number)
    os.symlink("0001", area.source / "d/link")
    (area.source / "d/sub").mkdir()
    hours.pass_by(1)  # else the last ones are in the tick of their making
    return area


async def listing(mirror: Mirror) -> Names:
    return list(await names(mirror, await mirror.ino("d")))


async def told(mirror: Mirror, name: bytes, lane: Lane = Lane.BACKGROUND) -> Node:
    (node,) = await mirror.tree.names.find_each(await mirror.ino("d"), [name], lane)
    assert node is not None
    return node


async def go_through(mirror: Mirror) -> dict[bytes, int]:
    """List the directory and look each name up; the sizes."""
    found = await stat_each(mirror, await mirror.ino("d"), await listing(mirror))
    return {name: size for name, size in found.items() if name not in (b"link", b"sub")}


SIZES = {b"%04d" % number: number for number in range(FILES)}


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL])
async def test_the_source_is_asked_once_for_both(many: Area, mode: FreshnessMode) -> None:
    async with pair(many, mode) as (a, b, _):
        of_a, of_b = Operations(a), Operations(b)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_through, a)
            nursery.start_soon(go_through, b)
        asked = of_a().get("stat", 0) + of_b().get("stat", 0)
        assert FILES <= asked <= FILES + 12, "twice for directories alone"
        assert await go_through(b) == SIZES
        for name in (b"link", b"sub", b"0007"):
            one, other = [m.tree.known.lookup(await m.ino("d"), name) for m in (a, b)]
            assert isinstance(one, Entry)
            assert isinstance(other, Entry)
            assert one.node.stat == other.node.stat
            assert one.node.target == other.node.target


async def test_who_comes_later_asks_for_nothing_that_a_peer_knows(many: Area, hours: Hours) -> None:
    async with pair(many) as (a, b, _):
        await go_through(a)
        hours.pass_by(7200)
        of_a, of_b = Operations(a), Operations(b)
        assert await go_through(b) == SIZES
        assert of_b().get("stat", 0) <= FEW
        assert of_a() == {}
        assert b.metrics.peer_names >= FILES


async def test_the_ttl_counts_from_when_the_peer_asked(many: Area, hours: Hours) -> None:
    async with pair(many, TTL) as (a, b, _):
        hours.pass_by(100)
        assert await go_through(a) == SIZES
        hours.pass_by(20)
        of_b = Operations(b)
        assert await go_through(b) == SIZES
        assert of_b().get("stat", 0) <= FEW
        many.write("d/0007", b"changed")
        many.write("d/0008", b"also changed")
        hours.pass_by(20)  # 40 seconds since the peer asked, and those of a busy machine
        assert await go_through(b) == SIZES
        hours.pass_by(21)
        changed = SIZES | {b"0007": 7, b"0008": 12}
        assert await go_through(b) == changed
        assert await b.read_file("d/0007") == b"changed"


async def test_what_is_old_at_the_peer_is_asked_for_again_by_it(many: Area, hours: Hours) -> None:
    async with pair(many, TTL) as (a, b, _):
        hours.pass_by(100)
        await go_through(a)
        many.write("d/0007", b"another")
        hours.pass_by(40)  # more than half of the ttl
        of_a, of_b = Operations(a), Operations(b)
        assert (await go_through(b))[b"0007"] == len(b"another")
        assert of_b().get("stat", 0) <= FEW
        assert of_a()["stat"] >= FILES


async def test_what_has_no_known_age_is_for_immutable_alone(many: Area) -> None:
    async with pair(many, TTL, owner_mode=IMMUTABLE) as (a, b, _):
        assert await go_through(a) == SIZES
        d, mount_ns = await a.ino("d"), a.tree.freshness.mount_ns
        # As if an earlier mount, a peer or an index file had told them.
        rows = a.index.listings.entries(d, 0, 2 * FILES)
        told = [(dirent.name, node.stat, node.target) for dirent, node in rows if node is not None]
        a.index.nodes.record_found_each(d, told, mount_ns)
        many.write("d/0007", b"changed")
        assert await go_through(b) == SIZES | {b"0007": 7}


async def test_with_open_no_peer_is_asked(many: Area) -> None:
    async with pair(many, OPEN) as (_, b, owner):
        assert await go_through(b) == SIZES
        assert owner.questions == 0


async def test_a_version_that_the_source_has_no_more_is_not_believed_again(many: Area) -> None:
    async with pair(many) as (a, b, _):
        await go_through(a)
        many.write("d/0007", b"against the promise")
        d, old = await b.ino("d"), await told(b, b"0007")
        with stale():
            await b.files.open(old.ino)
        assert await b.read_file("d/0007") == b"against the promise"
        assert await b.ino("d/0007") != old.ino
        assert await b.ino("d") == d


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL])
@pytest.mark.parametrize("now", [b"another version", b""], ids=["changed", "gone"])
async def test_an_older_answer_takes_back_nothing_that_was_found_since(
    many: Area, hours: Hours, monkeypatch: pytest.MonkeyPatch, mode: FreshnessMode, now: bytes
) -> None:
    async with pair(many, mode) as (a, b, owner):
        await told(a, b"0007")
        parent, ask = await b.ino("d"), owner.ask
        hours.pass_by(1)

        async def answer_late(*question: Any) -> PeerNames | None:
            """Meanwhile a reader asks the source, which has something else."""
            monkeypatch.setattr(owner, "ask", ask)
            answer = await ask(*question)
            (many.source / "d/0007").unlink()
            if now:
                many.write("d/0007", now)
            hours.pass_by(1)
            await b.tree.names.ask(parent, b"0007")
            return answer

        monkeypatch.setattr(owner, "ask", answer_late)
        await b.tree.names.find_each(parent, [b"0007"], Lane.BACKGROUND)
        known = b.tree.known.lookup(parent, b"0007")
        size = known.node.stat.size if isinstance(known, Entry) else 0
        assert known is None or size == len(now)


async def test_a_refresh_asks_the_source_whatever_peers_say(many: Area, hours: Hours) -> None:
    async with pair(many) as (a, b, _):
        await go_through(a)
        await listing(b)
        many.write("d/0007", b"changed")
        hours.pass_by(1)
        await Refresh(b.tree, b.kernel).run()
        assert (await go_through(b))[b"0007"] == len(b"changed")


@pytest.mark.parametrize("what", ["silent", "too old", "not asked for", "of other files"])
async def test_a_peer_that_is_no_use(many: Area, what: str) -> None:
    async with pair(many, TTL) as (a, b, owner):
        node = await a.node("d/0005")
        # The inode number of one file for all names.
        rows = [(name, node.stat, b"") for name in SIZES]
        match what:
            case "silent":
                owner.silent = True
            case "too old":
                owner.lies = PeerNames(31 * 10**9, rows)
            case "not asked for":
                owner.lies = PeerNames(0, [(b"made up", node.stat, b"")])
            case "of other files":
                owner.lies = PeerNames(0, rows)
        if what != "of other files":
            assert await go_through(b) == SIZES
            assert b.index.nodes.dirent(await b.ino("d"), b"made up") is None
            return
        with suppress(OSError):  # as when the source changes
            assert await b.read_file("d/0007") in (b"x" * 5, b"x" * 7)
        owner.lies = None
        await Refresh(b.tree, b.kernel).run()
        assert await go_through(b) == SIZES
        assert await b.read_file("d/0007") == b"x" * 7


async def test_listings_are_shared_and_cost_no_attributes(many: Area, hours: Hours) -> None:
    for number in range(20):
        many.write(f"small/{number}/file", b"x")
    hours.pass_by(1)
    async with pair(many) as (a, b, _):
        of_a, of_b = Operations(a), Operations(b)
        for name in await names(b, await b.ino("small")):
            assert set(await names(b, await b.ino(f"small/{name.decode()}"))) == {b"file"}
        assert of_b().get("stat", 0) <= FEW
        asked = of_a()
        assert asked["list"] <= 2 * 21
        # Of directories, and of a name in each, in the other case: not where the kind of the file
        # system says that listings have all names.
        assert asked["stat"] <= 2 + 3 * 21


async def test_a_name_that_a_listing_lacks_shows_after_the_ttl(many: Area, hours: Hours) -> None:
    async with pair(many, TTL) as (a, b, _):
        hours.pass_by(100)
        before = set(await listing(a))
        hours.pass_by(20)
        of_b = Operations(b)
        assert set(await listing(b)) == before
        assert of_b().get("stat", 0) <= FEW
        many.write("d/new", b"x")
        hours.pass_by(39)
        assert set(await listing(b)) == before
        hours.pass_by(2)
        assert set(await listing(b)) == before | {b"new"}


async def test_what_this_node_has_found_is_in_its_listings(many: Area, hours: Hours) -> None:
    async with pair(many, TTL) as (a, b, owner):
        hours.pass_by(100)
        before = set(await listing(a))
        hours.pass_by(10)
        many.write("d/new", b"x")
        owner.silent = True
        await told(b, b"new", Lane.DEMAND)
        owner.silent = False
        assert set(await listing(b)) == before | {b"new"}


async def test_a_listing_that_is_made_up_leads_to_nothing(many: Area) -> None:
    async with pair(many) as (a, b, owner):
        other = (await a.node("d/0005")).stat.ino
        entries = [(b"0007", FileType.DIRECTORY, other), (b"none", FileType.REGULAR, 1 << 40)]
        owner.listing = PeerListing(0, 1, 1, True, entries)
        assert set(await listing(b)) == {b"0007", b"none"}
        owner.silent = True
        assert await b.tree.names.find(await b.ino("d"), b"none", Lane.DEMAND) is None
        assert await b.read_file("d/0007") == b"x" * 7
        await Refresh(b.tree, b.kernel).run()
        assert await go_through(b) == SIZES
