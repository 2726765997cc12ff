"""What peers want of this node is copied, and nothing else."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Sequence

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.peers.errors import PeerError
from monarchfs.peers.supply import Supply, WantedReplica, decode, encode
from monarchfs.types import ROOT_INO, Lane, Node, SourceStat

DIRECTORY, FILE = 0o40755, 0o100644


def row(name: bytes, size: int, path: bytes) -> bytes:
    return struct.pack("<16sQH", name, size, len(path)) + path


def node(ino: int, parent: int, name: bytes, mode: int) -> Node:
    stat = SourceStat(0, 1000 + ino, 10, 1, 2, 3, mode, 1, 0, 0, 0, 8, 4096)
    return Node(ino, stat, parent, name, 0, False, b"")


class Tree:
    """a/b/file, and a/other; ``looked_up``: what was asked."""

    def __init__(self) -> None:
        nodes = [
            node(2, ROOT_INO, b"a", DIRECTORY),
            node(3, 2, b"b", DIRECTORY),
            node(4, 3, b"file", FILE),
            node(5, 2, b"other", FILE),
        ]
        self.nodes = {(one.parent, one.name): one for one in nodes}
        self.paths = {2: b"a", 3: b"a/b"}
        self.looked_up: list[tuple[int, bytes]] = []
        self.batches = 0
        self.error: OSError | None = None

    async def find(self, parent: int, name: bytes, _lane: Lane) -> Node | None:
        await trio.lowlevel.checkpoint()
        self.looked_up.append((parent, name))
        if self.error is not None:
            raise self.error
        return self.nodes.get((parent, name))

    async def find_each(self, parent: int, names: list[bytes], lane: Lane) -> list[Node | None]:
        self.batches += 1
        return [await self.find(parent, name, lane) for name in names]

    def wanted(self, ino: int, path: bytes) -> WantedReplica:
        found = next(one for one in self.nodes.values() if one.ino == ino)
        return WantedReplica(found.stat.version.replica_name, 10, path)


class Copies:
    """The copier: what was wanted of it, and what it has not done yet."""

    def __init__(self) -> None:
        self.hurried: list[int] = []
        self.queued: list[int] = []
        self.left: set[int] = set()

    def hurry(self, inos: Sequence[int]) -> None:
        self.hurried += inos
        self.left.update(inos)

    def opened(self, ino: int) -> None:
        self.queued.append(ino)
        self.left.add(ino)

    def pending(self, ino: int) -> bool:
        return ino in self.left


@pytest.fixture
def tree() -> Tree:
    return Tree()


@pytest.fixture
def copies() -> Copies:
    return Copies()


def make(
    tree: Tree,
    copies: Copies,
    has: Callable[[bytes], bool] = lambda name: False,
    serves: Callable[[bytes], bool] = lambda name: True,
) -> Supply:
    return Supply(tree, tree.paths.get, copies, copies.hurry, has, serves)


def run(supply: Supply, wanted: list[WantedReplica], seconds: float | None = None) -> float:
    """Seconds that it took, on a clock that jumps to what is waited for."""

    async def main() -> float:
        began = trio.current_time()
        await supply.supply(wanted, seconds)
        return trio.current_time() - began

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_it_waits_until_the_copies_are_there(tree: Tree, copies: Copies) -> None:
    supply = make(tree, copies)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                supply.supply, [tree.wanted(4, b"a/b/file"), tree.wanted(5, b"a/other")]
            )
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(copies.hurried) == [4, 5]
            for ino in (5, 4):
                supply.changed([ino])  # something ended, not all of it
                await trio.testing.wait_all_tasks_blocked()
                assert len(nursery.child_tasks) == 1
                copies.left.discard(ino)
                supply.changed([ino, 77])
                await trio.testing.wait_all_tasks_blocked()

    trio.run(main)


def test_it_does_not_wait_for_ever(tree: Tree, copies: Copies) -> None:
    assert run(make(tree, copies), [tree.wanted(4, b"a/b/file")]) == pytest.approx(0.5)


def test_what_peers_wait_for_is_read_of_the_source(tree: Tree, copies: Copies) -> None:
    supply = make(tree, copies)
    wanted = tree.wanted(4, b"a/b/file")

    async def main() -> None:
        assert not supply.copies(wanted.name)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supply.supply, [wanted])
            nursery.start_soon(supply.supply, [wanted])
            await trio.testing.wait_all_tasks_blocked()
            assert supply.copies(wanted.name)
            assert not supply.copies(tree.wanted(5, b"").name)
            nursery.cancel_scope.cancel()
        assert not supply.copies(wanted.name)

    trio.run(main)


def test_who_is_no_reader_waits_in_turn_and_longer(tree: Tree, copies: Copies) -> None:
    assert run(make(tree, copies), [tree.wanted(4, b"a/b/file")], 2) == pytest.approx(2)
    assert copies.queued == [4]
    assert not copies.hurried


def test_directories_are_looked_up_once(tree: Tree, copies: Copies) -> None:
    supply = make(tree, copies)
    for _ in range(3):
        run(supply, [tree.wanted(4, b"a/b/file")])
    assert tree.looked_up.count((ROOT_INO, b"a")) == 1
    assert tree.looked_up.count((2, b"b")) == 1
    tree.paths[3] = b"moved"
    run(supply, [tree.wanted(4, b"a/b/file")])
    assert tree.looked_up.count((2, b"b")) == 2


@pytest.mark.parametrize("path", [b"a/b/none", b"none/file", b"a/other/file", b"a/b"])
def test_what_is_not_there_is_not_copied(tree: Tree, copies: Copies, path: bytes) -> None:
    assert run(make(tree, copies), [WantedReplica(bytes(16), 10, path)]) == 0
    assert not copies.hurried


def test_another_version_is_not_copied(tree: Tree, copies: Copies) -> None:
    wanted = tree.wanted(5, b"a/b/file")
    assert run(make(tree, copies), [wanted]) == 0
    assert not copies.hurried


def test_what_is_there_is_not_looked_up(tree: Tree, copies: Copies) -> None:
    run(make(tree, copies, lambda name: True), [tree.wanted(4, b"a/b/file")])
    assert not tree.looked_up


def test_what_another_node_serves_is_not_copied(tree: Tree, copies: Copies) -> None:
    """Else a want might go from node to node, where their lists differ."""
    supply = make(tree, copies, serves=lambda name: name != tree.wanted(4, b"").name)
    assert run(supply, [tree.wanted(4, b"a/b/file")]) == 0
    assert not tree.looked_up
    run(supply, [tree.wanted(4, b"a/b/file"), tree.wanted(5, b"a/other")])
    assert copies.hurried == [5]


def test_files_of_one_directory_are_looked_up_and_copied_together(
    tree: Tree, copies: Copies
) -> None:
    tree.nodes[2, b"more"] = node(6, 2, b"more", FILE)
    run(make(tree, copies), [tree.wanted(5, b"a/other"), tree.wanted(6, b"a/more")])
    assert tree.batches == 1
    assert copies.hurried == [5, 6]


def test_an_error_of_the_source_is_the_peers_to_meet(tree: Tree, copies: Copies) -> None:
    tree.error = OSError(errno.EIO, "I/O error")
    assert run(make(tree, copies), [tree.wanted(4, b"a/b/file")]) == 0


paths = st.lists(
    st.binary(min_size=1, max_size=8).filter(
        lambda part: part not in (b".", b"..") and not set(part) & set(b"/\0")
    ),
    min_size=1,
    max_size=4,
).map(b"/".join)


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 1 << 40), paths)))
def test_requests_are_read_as_they_were_written(rows: list[tuple[bytes, int, bytes]]) -> None:
    wanted = [WantedReplica(*one) for one in rows]
    assert encode(wanted) == b"".join(row(*one) for one in rows)
    assert decode(encode(wanted)) == wanted


@given(st.binary(max_size=100))
def test_any_bytes_are_a_request_or_none(data: bytes) -> None:
    try:
        wanted = decode(data)
    except PeerError:
        return
    assert b"".join(row(*one) for one in wanted) == data


@pytest.mark.parametrize("path", [b"", b"/a", b"a/", b"a//b", b"../a", b"a/../b", b".", b"a\0b"])
def test_paths_that_lead_elsewhere_are_refused(path: bytes) -> None:
    with pytest.raises(PeerError):
        decode(row(bytes(16), 1, path))


def test_too_many_at_once_are_refused() -> None:
    with pytest.raises(PeerError):
        decode(row(bytes(16), 1, b"a") * 129)
