"""What peers want of this node is copied, and nothing else."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from monarchfs.peers.copy_service import CopyService
from monarchfs.peers.messages import Row, WantedReplica
from monarchfs.peers.node_share import NodeShare
from monarchfs.types import ROOT_INO, DirRef, Lane, Node, SourceStat

DIRECTORY, FILE = 0o40755, 0o100644


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
        self.error: OSError | None = None

    async def find(self, parent: int, name: bytes, _lane: Lane) -> Node | None:
        await trio.lowlevel.checkpoint()
        self.looked_up.append((parent, name))
        if self.error is not None:
            raise self.error
        return self.nodes.get((parent, name))

    async def find_each(self, parent: int, names: list[bytes], lane: Lane) -> list[Node | None]:
        return [await self.find(parent, name, lane) for name in names]


def wanted(ino: int, path: bytes) -> WantedReplica:
    """The version that file has in a `Tree`."""
    return WantedReplica(node(ino, 0, b"", FILE).stat.version.replica_name, 10, path)


FILE4, OTHER5 = wanted(4, b"a/b/file"), wanted(5, b"a/other")


class Copies:
    """A copier, and its jobs."""

    def __init__(self) -> None:
        self.jobs = self
        self.hurried: list[int] = []
        self.queued: list[int] = []
        self.left: set[int] = set()

    def hurry(self, inos: Sequence[int]) -> None:
        self.hurried += inos
        self.left.update(inos)

    def want_opened(self, ino: int) -> None:
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


@pytest.fixture
def supply(tree: Tree, copies: Copies) -> CopyService:
    """Of a node that has nothing, and owns all."""
    return make(tree, copies)


def make(
    tree: Tree, copies: Copies, serves: Callable[[bytes], bool] = lambda name: True
) -> CopyService:
    def dirref(ino: int) -> DirRef | None:
        return DirRef(tree.paths[ino], 1000 + ino) if ino in tree.paths else None

    metadata = SimpleNamespace(
        names=tree, index=SimpleNamespace(nodes=SimpleNamespace(dirref=dirref))
    )
    catalogue, ownership = SimpleNamespace(row=Row), SimpleNamespace(serves=serves)
    return CopyService(metadata, copies, catalogue, NodeShare(ownership))  # type: ignore[arg-type]


def run(supply: CopyService, *wanted: WantedReplica, seconds: float | None = None) -> float:
    """Seconds that it took, on a clock that jumps to what is waited for."""

    async def main() -> float:
        began = trio.current_time()
        await supply.copy_wanted(wanted, seconds)
        return trio.current_time() - began

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_it_waits_until_the_copies_are_there(supply: CopyService, copies: Copies) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supply.copy_wanted, [FILE4, OTHER5])
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(copies.hurried) == [4, 5]
        for ino in (5, 4):
            supply.changed([ino])  # something ended, not all of it
            await trio.testing.wait_all_tasks_blocked()
            assert len(nursery.child_tasks) == 1
            copies.left.discard(ino)
            supply.changed([ino, 77])
            await trio.testing.wait_all_tasks_blocked()


def test_it_does_not_wait_for_ever(supply: CopyService) -> None:
    assert run(supply, FILE4) == pytest.approx(0.5)


async def test_what_peers_wait_for_is_read_of_the_source(supply: CopyService) -> None:
    assert not supply._share.copies(FILE4.name)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supply.copy_wanted, [FILE4])
        nursery.start_soon(supply.copy_wanted, [FILE4])
        await trio.testing.wait_all_tasks_blocked()
        assert supply._share.copies(FILE4.name)
        assert not supply._share.copies(OTHER5.name)
        nursery.cancel_scope.cancel()
    assert not supply._share.copies(FILE4.name)


def test_who_is_no_reader_waits_in_turn_and_longer(supply: CopyService, copies: Copies) -> None:
    assert run(supply, FILE4, seconds=2) == pytest.approx(2)
    assert (copies.queued, copies.hurried) == ([4], [])


@pytest.mark.parametrize(
    "one",
    [
        *(WantedReplica(bytes(16), 10, p) for p in (b"a/b/no", b"no/x", b"a/other/file", b"a/b")),
        OTHER5._replace(path=b"a/b/file"),
    ],
    ids=["no file", "no directory", "file for a directory", "directory", "another version"],
)
def test_what_is_not_there_is_not_copied(
    supply: CopyService, copies: Copies, one: WantedReplica
) -> None:
    assert run(supply, one) == 0
    assert not copies.hurried


def test_what_another_node_serves_is_not_copied(tree: Tree, copies: Copies) -> None:
    """Else a want might go from node to node, where their lists differ."""
    supply = make(tree, copies, serves=lambda name: name != FILE4.name)
    assert run(supply, FILE4) == 0
    assert not tree.looked_up
    run(supply, FILE4, OTHER5)
    assert copies.hurried == [5]


def test_an_error_of_the_source_is_the_peers_to_meet(tree: Tree, supply: CopyService) -> None:
    tree.error = OSError(errno.EIO, "I/O error")
    assert run(supply, FILE4) == 0
