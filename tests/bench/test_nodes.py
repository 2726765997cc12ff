"""Nodes with links of their own: what is read in which order, and what counts as right."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import nodes


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


def test_what_a_lost_owner_costs() -> None:
    assert nodes.expected_when_lost(3, 0.0) == nodes.expected_when_lost(3, 1.0) == 1
    assert nodes.expected_when_lost(2, 0.5) == pytest.approx(9 / 8)
    assert 1.02 < nodes.expected_when_lost(8, 0.25) < 1.04
