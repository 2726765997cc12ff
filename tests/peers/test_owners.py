"""Who owns what, and what other nodes want of this one."""

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.core.misses import MOST_BYTES, Misses
from monarchfs.peers import _replicas
from monarchfs.peers.catalogue import Follower
from monarchfs.peers.copy_service import CopyService
from monarchfs.peers.following import Following
from monarchfs.peers.messages import Row, WantedReplica
from monarchfs.peers.names import NameOwners
from monarchfs.peers.node_share import NodeShare
from monarchfs.peers.nodes import PeerNode, Peers, parse_node, parse_nodes
from monarchfs.peers.owners import Owners
from monarchfs.peers.ownership import BUCKETS, Ownership
from monarchfs.peers.span_sharing import SpanNodes
from monarchfs.types import ROOT_INO, DirRef, Lane, Node, SourceStat, UsageError

node_names = st.lists(
    st.from_regex(r"[a-z]{1,6}[0-9]{1,3}", fullmatch=True), min_size=1, max_size=12, unique=True
)
FILES = [os.urandom(16) for _ in range(500)]


def owners_among(nodes: list[PeerNode]) -> list[str]:
    ownership = Ownership(nodes)
    return [nodes[ownership.number(name)].name for name in FILES]


@given(node_names, st.randoms())
@settings(max_examples=30)
def test_all_nodes_agree_whatever_the_order_of_the_list(
    given_names: list[str], random: Random
) -> None:
    shuffled = list(given_names)
    random.shuffle(shuffled)
    assert owners_among(parse_nodes(given_names, 1)) == owners_among(parse_nodes(shuffled, 1))


@given(node_names.filter(lambda names: len(names) > 1), st.data())
@settings(max_examples=30)
def test_a_node_that_leaves_gives_away_its_own_files_alone_to_who_stands_in(
    given_names: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(given_names))
    nodes = parse_nodes(given_names, 1)
    before, after = Ownership(nodes), owners_among([node for node in nodes if node.name != gone])
    assert gone not in after
    for name, owner in zip(FILES, after, strict=True):
        if nodes[before.number(name)].name == gone:
            assert nodes[before.stand_in(name)].name == owner
        else:
            assert nodes[before.number(name)].name == owner
        assert before.stand_in(name) != before.number(name)


def test_a_node_owns_as_much_as_it_weighs() -> None:
    nodes = [PeerNode("a", "a", 1, 1.0), PeerNode("b", "b", 1, 2.0), PeerNode("c", "c", 1, 5.0)]
    counts = Counter(Ownership(nodes).table.cast("H"))
    assert [counts[n] / BUCKETS for n in range(3)] == pytest.approx([1 / 8, 2 / 8, 5 / 8], rel=0.05)


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("node1", PeerNode("node1", "node1", 9)),
        ("node1=10.0.0.1:70", PeerNode("node1", "10.0.0.1", 70)),
        ("node1=[fe80::1]:70", PeerNode("node1", "fe80::1", 70)),
        ("node1=fe80::1", PeerNode("node1", "fe80::1", 9)),
        ("node1*2.5", PeerNode("node1", "node1", 9, 2.5)),
        ("node1:", PeerNode("node1", "node1", 9)),  # as in a URL
    ],
)
def test_one_node(text: str, node: PeerNode) -> None:
    assert parse_node(text, 9) == node


@pytest.mark.parametrize(
    "text", ["", "a b", "a:0", "a:70000", "a:x", "a*0", "a*-1", "a*nan", "a=;", "-a", "a*inf"]
)
def test_what_is_no_node(text: str) -> None:
    with pytest.raises(UsageError):
        parse_node(text, 9)


def test_a_list_is_changed_around_this_node() -> None:
    peers = Peers(tuple(parse_nodes(["a", "c", "d=10.0.0.4:70"], 9)), 1, "secret")
    changed = peers.changed(["b", "e:71"], ["a", "d"], 9)
    assert changed == Peers((*parse_nodes(["b", "c", "e:71"], 9),), 1, "secret")
    assert peers.changed([], ["a"], 9).own == 0
    assert Peers.from_message(json.loads(json.dumps(changed.to_message()))) == changed


@pytest.mark.parametrize(
    ("add", "remove", "words"),
    [
        (["a"], [], "'a' is twice"),
        ([], ["x"], "'x' is not in the list"),
        ([], ["c"], "'c' is this node"),
        (["/"], [], "is no peer"),
    ],
)
def test_what_changes_no_list(add: list[str], remove: list[str], words: str) -> None:
    peers = Peers(tuple(parse_nodes(["a", "c"], 9)), 1, "secret")
    with pytest.raises(UsageError, match=words):
        peers.changed(add, remove, 9)


# What others want


DIRECTORY, FILE = 0o40755, 0o100644


def node(ino: int, parent: int, name: bytes, mode: int = FILE) -> Node:
    stat = SourceStat(0, 1000 + ino, 10, 1, 2, 3, mode, 1, 0, 0, 0, 8, 4096)
    return Node(ino, stat, parent, name, 0, False, b"")


async def test_what_this_node_copies_for_others_comes_from_the_source() -> None:
    peers = Peers(tuple(parse_nodes(["a", "b", "c"], 1)), 0, "secret")
    ownership = Ownership(peers.nodes, peers.own)
    nodes = {one.stat.version.replica_name: one for one in (node(n, 7, b"x") for n in range(60))}
    share, tables = NodeShare(ownership), SimpleNamespace()
    owners = Owners(share, Following(peers), tables)  # type: ignore[arg-type]
    taken = list(nodes)[::2]
    share.begin_copies(taken)
    for name, one in nodes.items():
        assert owners.elsewhere(one) != (name in taken or ownership.number(name) == 0)


def test_other_nodes_are_asked_for_small_files_alone() -> None:
    """Where an order has large ones read into the window, too."""
    put: list[tuple[object, ...]] = []
    hooks: Any = SimpleNamespace(
        misses_has=lambda _: False,
        misses_put=lambda *row: put.append(row),
        misses_window=lambda *_: [],
    )
    unused: Any = None
    misses = Misses(hooks, unused, unused, lambda _: True, lambda _: 0, shares=True)
    misses._directories[7] = 0
    small = node(1, 7, b"x")
    sizes = [MOST_BYTES, MOST_BYTES + 1]
    files = [small._replace(stat=small.stat._replace(size=size)) for size in sizes]
    misses.window(files, 1, 1 << 30)
    assert [row[4] for row in put] == sizes
    assert [row[8:] for row in put] == [(files[0].stat.version.replica_name,), ()]


async def test_the_end_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a peer that hangs."""
    given_up, end = list[bool](), threading.Event()
    monkeypatch.setattr(_replicas, "ask", lambda *_: given_up.append(not end.wait(30)))
    following = Following(Peers(tuple(parse_nodes(["a", "b"], 1)), 0, "secret"))
    following.answered[1].set()
    share, unused = NodeShare(Ownership(following.nodes)), SimpleNamespace()
    names = NameOwners(share.ownership, following)
    asked: list[Callable[[], Awaitable[object]]] = [
        partial(following._ask, 1, Follower()),
        partial(Owners(share, following, unused)._ask, 1, [], [], []),  # type: ignore[arg-type]
        partial(names.list, 1, DirRef(b"", 1), 0, Lane.DEMAND),
        partial(SpanNodes(unused, unused, share, following).ask, 1, []),  # type: ignore[arg-type]
    ]
    async with trio.open_nursery() as nursery:
        for one in asked:
            nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert not given_up
    end.set()


class Tree:
    """a/b/file, and a/other; ``looked_up``: what was asked."""

    def __init__(self) -> None:
        nodes = [
            node(2, ROOT_INO, b"a", DIRECTORY),
            node(3, 2, b"b", DIRECTORY),
            node(4, 3, b"file"),
            node(5, 2, b"other"),
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
    return WantedReplica(node(ino, 0, b"").stat.version.replica_name, 10, path)


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


def make(tree: Tree, copies: Any, serves: Callable[[bytes], bool] = bool) -> CopyService:
    def dirref(ino: int) -> DirRef | None:
        return DirRef(tree.paths[ino], 1000 + ino) if ino in tree.paths else None

    index: Any = SimpleNamespace(nodes=SimpleNamespace(dirref=dirref))
    catalogue: Any = SimpleNamespace(row=Row)
    ownership: Any = SimpleNamespace(serves=serves)
    metadata: Any = SimpleNamespace(names=tree, index=index)
    return CopyService(metadata, copies, catalogue, NodeShare(ownership))


def seconds_of(supply: CopyService, *wanted: WantedReplica, seconds: float | None = None) -> float:
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
    assert seconds_of(supply, FILE4) == pytest.approx(0.5)


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
    assert seconds_of(supply, FILE4, seconds=2) == pytest.approx(2)
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
    assert seconds_of(supply, one) == 0
    assert not copies.hurried


def test_what_another_node_serves_is_not_copied(tree: Tree, copies: Copies) -> None:
    """Else a want might go from node to node, where their lists differ."""
    supply = make(tree, copies, serves=lambda name: name != FILE4.name)
    assert seconds_of(supply, FILE4) == 0
    assert not tree.looked_up
    seconds_of(supply, FILE4, OTHER5)
    assert copies.hurried == [5]


def test_an_error_of_the_source_is_the_peers_to_meet(tree: Tree, supply: CopyService) -> None:
    tree.error = OSError(errno.EIO, "I/O error")
    assert seconds_of(supply, FILE4) == 0
