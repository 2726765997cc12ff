"""The list of nodes, and who owns which file."""

from __future__ import annotations

import json
import os
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.peers.nodes import PeerNode, Peers, parse_node, parse_nodes
from monarchfs.peers.ownership import BUCKETS, Ownership
from monarchfs.types import UsageError

node_names = st.lists(
    st.from_regex(r"[a-z]{1,6}[0-9]{1,3}", fullmatch=True), min_size=1, max_size=12, unique=True
)
FILES = [os.urandom(16) for _ in range(500)]


def owners(nodes: list[PeerNode]) -> list[str]:
    ownership = Ownership(nodes)
    return [nodes[ownership.number(name)].name for name in FILES]


@given(node_names, st.randoms())
@settings(max_examples=30, deadline=None)
def test_all_nodes_agree_whatever_the_order_of_the_list(
    given_names: list[str], random: Random
) -> None:
    shuffled = list(given_names)
    random.shuffle(shuffled)
    assert owners(parse_nodes(given_names, 1)) == owners(parse_nodes(shuffled, 1))


@given(node_names.filter(lambda names: len(names) > 1), st.data())
@settings(max_examples=30, deadline=None)
def test_a_node_that_leaves_gives_away_its_own_files_alone_to_who_stands_in(
    given_names: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(given_names))
    nodes = parse_nodes(given_names, 1)
    before, after = Ownership(nodes), owners([node for node in nodes if node.name != gone])
    assert gone not in after
    for name, owner in zip(FILES, after, strict=True):
        if nodes[before.number(name)].name == gone:
            assert nodes[before.stand_in(name)].name == owner
        else:
            assert nodes[before.number(name)].name == owner
        assert before.stand_in(name) != before.number(name)


def test_each_node_knows_what_it_owns_and_what_it_serves() -> None:
    nodes = parse_nodes(["a", "b", "c", "d"], 1)
    each = [Ownership(nodes, own) for own in range(len(nodes))]
    for name in FILES:
        number, stand_in = each[0].number(name), each[0].stand_in(name)
        assert [one.own for one in each if one.owns(name)] == [number]
        assert {one.own for one in each if one.serves(name)} == {number, stand_in}


def test_a_node_alone_stands_in_for_itself() -> None:
    ownership = Ownership(parse_nodes(["a"], 1))
    assert set(ownership.tables.cast("H")) == {0}


def test_a_node_owns_as_much_as_it_weighs() -> None:
    nodes = [PeerNode("a", "a", 1, 1.0), PeerNode("b", "b", 1, 2.0), PeerNode("c", "c", 1, 5.0)]
    counts = Counter(Ownership(nodes).table.cast("H"))
    assert [counts[n] / BUCKETS for n in range(3)] == pytest.approx([1 / 8, 2 / 8, 5 / 8], rel=0.05)


def test_the_spans_of_a_large_file_have_several_owners() -> None:
    ownership = Ownership(parse_nodes(["a", "b", "c", "d"], 1))
    assert len({ownership.number(FILES[0], span) for span in range(64)}) == 4


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("node1", PeerNode("node1", "node1", 9)),
        ("node1:70", PeerNode("node1", "node1", 70)),
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
