"""``monarchfs weigh`` and ``hints.weigh``: what a job says stays, and every byte is right."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs import hints
from monarchfs.cli.main import main
from tests.support import trees
from tests.support.mounting import Bench, Mount, assert_refused, requires_fuse, run

pytestmark = requires_fuse

FILES = 10
ROOM = "816K"
"""For four of the files, each of which takes 49 blocks."""
WEIGHTED = ("--evict", "weighted", "--freshness", "immutable")


CONTENTS = {f"dir/{number}": trees.random_bytes(200_000, number) for number in range(FILES)}


def dataset(work: Bench) -> Path:
    return trees.write_files(work.path / "src", CONTENTS)


@pytest.fixture
def mount(work: Bench) -> Mount:
    """Four of the files fit; none is local."""
    return work.mount(dataset(work), *WEIGHTED, "--prefetch", "access", tier=ROOM)


@pytest.fixture(autouse=True)
def _nothing_failed_before() -> Iterator[None]:
    hints._failed.clear()
    yield
    hints._failed.clear()


def read(mount: Mount, *numbers: int) -> None:
    """Each by itself, from below the page cache; and wait until it is copied, if it is."""
    for number in numbers:
        with (mount.path / "dir" / str(number)).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.readall() == CONTENTS[f"dir/{number}"]
        mount.wait_idle()


def local(mount: Mount) -> set[int]:
    """And the tier holds no more than it may."""
    tier = mount.status()["tiers"][0]
    assert tier["used_bytes"] <= tier["capacity_bytes"]
    done = run("why", *(str(mount.path / "dir" / str(n)) for n in range(FILES)), "--json")
    found = json.loads(done.stdout)
    return {n for n, one in enumerate(found["paths"]) if one["state"] == "resident"}


def test_heavy_files_stay_also_with_the_next_worker(
    mount: Mount, work: Bench, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.write_text("".join(f"{n}\tdir/{n}\n" for n in range(FILES)))
    assert main(["weigh", str(mount.path), str(weights)]) == 0
    assert hints.weigh({mount.path / "dir" / "0": 100.0})
    mount.kill_worker()
    read(mount, *range(FILES))
    assert local(mount) == {0, *range(FILES - 3, FILES)}
    # What is said now changes only the files that are named.
    assert hints.weigh({mount.path / "dir" / "0": 0.5})
    assert main(["restart", str(mount.path)]) == 0
    read(mount, *range(FILES))
    stay = local(mount)
    assert stay == set(range(FILES - 4, FILES))
    # Equal weights: nothing goes any more.
    assert hints.weigh([(mount.path / "dir" / "7", 1.0)], replace=True)
    read(mount, *range(FILES))
    assert local(mount) == stay
    mount.umount()
    assert os.listdir(work.path / "state" / "said") == []


def test_files_are_named_as_elsewhere(
    mount: Mount, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights"
    weights.write_text(f"1\t{mount.path}/dir/../dir/1\n2\tdir/2\n1e3\tdir/nosuch\n0\tdir\n")
    assert main(["weigh", str(mount.path), str(weights)]) == 1
    said = capsys.readouterr()
    assert said.out == "weighed 2 files\n"
    assert f"no weight for {mount.path}/dir/nosuch (and 1 more): no such file" in said.err
    assert main(["weigh", str(mount.path), str(weights), "--json"]) == 1
    answer = {"files": 2, "unknown": 2, "first_unknown": "dir/nosuch"}
    assert json.loads(capsys.readouterr().out) == answer
    # Much of it goes in several requests; the first one alone replaces.
    weights.write_text("".join(f"{n % FILES}\tdir/{n % FILES}\n" for n in range(9_000)))
    assert main(["weigh", str(mount.path), str(weights), "--replace"]) == 0
    assert capsys.readouterr().out == "weighed 9,000 files\n"


def test_what_is_no_weight_is_refused_and_all_where_no_policy_wants_them(
    work: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mount = work.mount(dataset(work))
    weights = tmp_path / "weights"
    for text, words in (
        ("1\tdir/1\n-1\tdir/1\n", "line 2: a weight is a number of at least 0"),
        ("1\t../x\n", "line 1: ../x is not below"),
        ("1\t\n", "line 1: a path is empty"),
    ):
        weights.write_text(text)
        assert_refused(mount, capsys, ["weigh", "{mnt}", str(weights)], 2, words)
    weights.write_text("1\tdir/1\n")
    assert_refused(mount, capsys, ["weigh", "{mnt}", str(weights)], 1, "--evict weighted")
    assert_refused(mount, capsys, ["weigh", "{mnt}", "/nosuch/file"], 1, "No such file")
    assert not hints.weigh({mount.path / "dir" / "1": 1.0})
    assert not hints.weigh({tmp_path / "elsewhere": 1.0})
    assert not hints.weigh({})
