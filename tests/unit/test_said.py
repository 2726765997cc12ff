"""What jobs have said, for the worker that comes next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.worker import said as module
from monarchfs.worker.said import DIRECTORY, KeptOrder, Said

WEIGHTS = st.dictionaries(st.integers(1, 20), st.floats(0, 1e9), max_size=5)


def files_of(state: Path) -> list[str]:
    return os.listdir(state / DIRECTORY) if (state / DIRECTORY).exists() else []


@given(st.lists(st.tuples(WEIGHTS, st.booleans(), st.booleans()), max_size=12))
def test_weights_are_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[dict[int, float], bool, bool]]
) -> None:
    """Also if the worker changes in between, or later weights replaced many."""
    state = str(tmp_path_factory.mktemp("state"))
    said, expected, given = Said(state, 1), dict[int, float](), False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_SUPERSEDED", 100)
        for weights, replace, restarts in history:
            if restarts:
                said = Said(state, 1)
                assert said.weights() == (expected if given else None)
            said.keep_weights(list(weights.items()), replace=replace)
            expected = {**({} if replace else expected), **weights}
            given = True
            assert (Path(state) / DIRECTORY / "weights").stat().st_size < 1000
    assert Said(state, 1).weights() == (expected if given else None)


def test_a_weight_that_was_half_written_says_nothing(tmp_path: Path) -> None:
    Said(str(tmp_path), 1).keep_weights([(5, 1.0)], replace=False)
    with (tmp_path / DIRECTORY / "weights").open("ab") as file:
        file.write(b"half")
    said = Said(str(tmp_path), 1)
    assert said.weights() == {5: 1.0}
    said.keep_weights([(6, 2.0)], replace=False)
    assert Said(str(tmp_path), 1).weights() == {5: 1.0, 6: 2.0}


def test_orders_are_kept_until_they_are_over(tmp_path: Path) -> None:
    said = Said(str(tmp_path), 1)
    one, two = KeptOrder("one/../", b"a\0b\n", 17, 4), KeptOrder("two", b"c", 0, None)
    said.keep_order(one)
    said.keep_order(two)
    assert Said(str(tmp_path), 1).orders() == [one, two]
    said.keep_order(one._replace(names=b"d"))
    assert [order.names for order in said.orders()] == [b"c", b"d"]
    said.forget_order("one/../")
    said.forget_order("one/../")
    assert said.orders() == [two]
    said.keep_weights([(1, 1.0)], replace=True)
    said.clear()
    assert (said.orders(), said.weights(), files_of(tmp_path)) == ([], None, [])


def test_what_another_mount_left_or_was_half_written_is_removed(tmp_path: Path) -> None:
    said = Said(str(tmp_path), 1)
    said.keep_order(KeptOrder("one", b"a", 1, 1))
    said.keep_weights([(1, 1.0)], replace=True)
    (kept,) = (path for path in (tmp_path / DIRECTORY).iterdir() if path.name != "weights")
    half = kept.with_name(kept.name + ".new")
    half.write_bytes(kept.read_bytes())
    (tmp_path / DIRECTORY / "order-x").write_bytes(b"no JSON")
    assert len(said.orders()) == 1
    assert sorted(files_of(tmp_path)) == sorted([kept.name, "weights"])
    later = Said(str(tmp_path), 2)
    assert (later.orders(), later.weights(), files_of(tmp_path)) == ([], None, [])


def test_what_cannot_be_kept_costs_nobody_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DIRECTORY).write_text("no directory")
    said = Said(str(tmp_path), 1)
    said.keep_order(KeptOrder("one", b"a", 1, 1))
    said.keep_weights([(1, 1.0)], replace=False)
    said.forget_order("one")
    said.clear()
    assert (said.orders(), said.weights()) == ([], None)
    assert "not kept" in caplog.text
