"""Nodes that share: what they read in which order, what counts as right; many, simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import nodes, scale
from bench.scale import Dataset
from monarchfs.peers.ownership import BUCKETS, Ownership


def test_files_have_the_bytes_that_they_should(tmp_path: Path) -> None:
    nodes.generate(tmp_path, 3)
    found = nodes.read_all((str(tmp_path), [2, 0, 1], True))
    assert (found.errors, found.wrong) == (0, 0)
    assert 0 < found.longest <= found.seconds
    data = (tmp_path / nodes.name_of(1)).read_bytes()
    assert not nodes.is_right(data, 2)
    assert not nodes.is_right(data[:-1], 1)
    file = tmp_path / nodes.name_of(0)
    file.write_bytes(b"\x01" + file.read_bytes()[1:])
    (tmp_path / nodes.name_of(2)).unlink()
    found = nodes.read_all((str(tmp_path), [2, 0, 1], False))
    assert (found.errors, found.wrong) == (1, 1)


def test_a_sampler_divides_the_files_anew_in_each_epoch() -> None:
    first, second = nodes.partitions(10, 3, 0), nodes.partitions(10, 3, 1)
    for parts in (first, second):
        assert sorted(number for part in parts for number in part) == list(range(10))
    assert first != second
    assert all(sorted(order) == list(range(10)) for order in nodes.whole_orders(10, 3, 0))


NODES = scale.cluster(8)
OWNERSHIP = Ownership(NODES)
EVEN = Dataset("even", [1] * BUCKETS)


def without(number: int) -> Ownership:
    return Ownership([node for n, node in enumerate(NODES) if n != number])


def test_lists_that_agree_read_everything_once() -> None:
    nobody: frozenset[int] = frozenset()
    assert scale.read_with_old_lists(OWNERSHIP, OWNERSHIP, nobody, EVEN) == 1
    assert scale.read_with_old_lists(OWNERSHIP, without(3), nobody, EVEN) == 1


def test_who_lists_a_lost_node_reads_its_files_alone() -> None:
    own = scale.owned_bytes(OWNERSHIP, EVEN)[3] / BUCKETS
    after = without(3)
    everybody = frozenset(range(7))
    read = scale.read_with_old_lists(OWNERSHIP, after, everybody, EVEN)
    assert read == pytest.approx(1 + 6 * own)
    # One that is no owner of any of them: it reads them besides the new owners.
    one = scale.read_with_old_lists(OWNERSHIP, after, frozenset([0]), EVEN)
    assert 1 + own < one < 1 + 2 * own


def test_who_does_not_list_a_new_node_asks_the_former_owner() -> None:
    own = scale.owned_bytes(OWNERSHIP, EVEN)[3] / BUCKETS
    # The former owner knows the old list and copies for those that do too.
    stale = frozenset(range(8)) - {3}
    assert scale.read_with_old_lists(without(3), OWNERSHIP, stale, EVEN) == pytest.approx(1 + own)
