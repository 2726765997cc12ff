"""What other nodes own is asked for there, many files in one request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from monarchfs.peers import _replicas, owners
from monarchfs.peers.copy_service import MOST_SECONDS
from monarchfs.peers.following import START_SECONDS, Following
from monarchfs.peers.messages import Page, PageState, Row, decode_wanted, encode_page
from monarchfs.peers.node_share import NodeShare
from monarchfs.peers.nodes import Peers, parse_nodes
from monarchfs.peers.owners import Owners
from monarchfs.peers.ownership import Ownership
from monarchfs.types import DirRef, Node, SourceStat

PEERS = Peers(tuple(parse_nodes(["a", "b", "c"], 1)), 0, "secret")
"""This node is the first."""

OWNERSHIP = Ownership(PEERS.nodes)


def node(number: int) -> Node:
    stat = SourceStat(0, 1000 + number, 10, 1, 2, 3, 0o100644, 1, 0, 0, 0, 8, 4096)
    return Node(number, stat, 7, b"%d" % number, 0, False, b"")


class Asked:
    """Instead of the C part: ``asked``, the owner and the paths of each request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, list[bytes]]] = []
        self.known: set[bytes] = set()
        self.refuses: set[bytes] = set()
        self.took = 0.0
        self.asked_at: list[float] = []
        monkeypatch.setattr(_replicas, "available", self.known.__contains__)
        monkeypatch.setattr(_replicas, "put", self.put)
        monkeypatch.setattr(owners, "run_sync", self.run_sync)

    def put(self, _owner: int, rows: Sequence[Row]) -> None:
        self.known.update(row.name for row in rows if row.segment)

    async def run_sync(
        self, _ask: object, owner: int, path: str, body: bytes, *_: object, **__: object
    ) -> bytes:
        assert path == f"/ask/want?seconds={MOST_SECONDS:g}"
        wanted = decode_wanted(body)
        self.asked_at.append(trio.current_time())
        self.asked.append((owner, [one.path for one in wanted]))
        await trio.sleep(self.took)
        rows = [Row(one.name, 1, 10, 0, int(one.name not in self.refuses), 0) for one in wanted]
        return encode_page(Page(PageState.ALL, 1, 0, rows))


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def ask(nodes: Sequence[Node], start_seconds: float = 0) -> list[Node]:
    found: list[Node] = []

    async def main() -> None:
        following = Following(PEERS)

        async def ask() -> None:
            found.extend(await make_owners(following).ask(nodes))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(start_seconds)
            for event in following.answered:
                event.set()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return found


def make_owners(following: Following, copied: Iterable[bytes] = ()) -> Owners:
    """``copied``: by this node, for its peers."""
    nodes = SimpleNamespace(dirref=lambda ino: DirRef(b"a/b", 1))
    share = NodeShare(OWNERSHIP)
    share.begin_copies(list(copied))
    return Owners(share, following, nodes)  # type: ignore[arg-type]


def name_of(one: Node) -> bytes:
    return one.stat.version.replica_name


def owner_of(one: Node) -> int:
    return OWNERSHIP.number(name_of(one))


NODES = [node(number) for number in range(60)]


def test_each_owner_is_asked_once_for_what_it_owns(peers: Asked) -> None:
    assert ask(NODES) == []
    theirs = {owner: [one for one in NODES if owner_of(one) == owner] for owner in (1, 2)}
    assert sorted(peers.asked) == [
        (owner, [b"a/b/" + one.name for one in theirs[owner]]) for owner in (1, 2)
    ]
    assert len(peers.known) == len(theirs[1]) + len(theirs[2])
    assert ask(NODES) == []
    assert len(peers.asked) == 2  # all is known


@pytest.mark.parametrize("seconds", [0, MOST_SECONDS])
def test_what_an_owner_refuses_is_left_to_the_source_unless_it_is_still_being_copied(
    peers: Asked, seconds: float
) -> None:
    refused = [one for one in NODES[:10] if owner_of(one) != 0]
    peers.refuses, peers.took = {name_of(one) for one in refused}, seconds
    asked_again = sorted(one.ino for one in ask(NODES))
    assert asked_again == ([one.ino for one in refused] if seconds else [])
    assert not peers.known & peers.refuses


async def test_what_this_node_copies_for_others_comes_from_the_source() -> None:
    taken = set(map(name_of, NODES[::2]))
    owners = make_owners(Following(PEERS), taken)
    for one in NODES:
        assert owners.elsewhere(one) != (name_of(one) in taken or owner_of(one) == 0)


@pytest.mark.parametrize("seconds", [0, 5, 20])
def test_a_peer_that_starts_is_waited_for(peers: Asked, seconds: float) -> None:
    began = trio.testing.MockClock().current_time()
    assert ask(NODES, seconds) == []
    assert peers.asked_at == pytest.approx([began + min(seconds, START_SECONDS)] * 2)
