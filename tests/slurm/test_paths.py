"""A user who changes the way to a dataset while the prolog is at work: what is mounted is what was
found to lie below the site's roots."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from monarchfs.slurm import daemon
from monarchfs.slurm.job import Job, Request
from monarchfs.slurm.prolog import WantedDataset, mount_for
from monarchfs.slurm.records import prepare
from monarchfs.slurm.shares import resolve
from monarchfs.slurm.site import read_site
from monarchfs.types import OperationError
from tests.slurm.test_node import USER, Node, node
from tests.support.flipping import Bait
from tests.support.mounting import as_user, assert_one_line, requires_fuse, requires_root, run
from tests.support.programs import execute

__all__ = ["node"]

pytestmark = requires_root


@pytest.fixture
def bait(node: Node) -> Bait:
    """A directory of the user's in the node's only root, with the dataset ``data``; ``outside`` has
    a ``data``, too."""
    lustre, outside = node.path / "lustre", node.path / "outside"
    lustre.chmod(0o1777)
    made = Bait(lustre, outside, USER.uid)
    for directory, text in ((made.way, "inside"), (outside, "outside")):
        (directory / "data").mkdir(parents=True)
        (directory / "data" / "which").write_text(text)
    return made


@requires_fuse
def test_a_link_that_comes_after_the_look_changes_nothing(
    node: Node, bait: Bait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user exchanges the directory for a link when the prolog has looked at it."""
    site, data = read_site(f"{node.path}/site.toml"), f"{bait.way}/data"
    prepare(site)
    start = daemon.start

    def flip_then_start(*arguments: Any, **keywords: Any) -> None:
        bait.flip()
        start(*arguments, **keywords)

    monkeypatch.setattr(daemon, "start", flip_then_start)
    job = Job(1, USER.uid, USER.name, "", "", "here")
    wanted = WantedDataset(Request(data), "X", by_site=False)
    point = mount_for(site, job, wanted, USER, time.monotonic() + 30)
    assert bait.way.is_symlink()
    look = as_user(USER.name, ["cat", f"{point}/which"])
    assert execute(look, check=True).stdout == "inside"
    assert node.mounts() == [point]
    assert f'"source": "{data}"' in run("status", point, "--json").stdout


def test_a_look_is_right_or_an_error(bait: Bait) -> None:
    """Of the path, the directory and whether it is allowed, no two are of different moments."""
    data = f"{bait.way}/data"
    inside = os.stat(data)
    found = 0
    with bait.flipping():
        for _ in range(30):
            try:
                dataset = resolve(data, [str(bait.way.parent)], USER, 10)
            except OperationError:
                continue
            found += 1
            assert os.path.samestat(os.fstat(dataset.descriptor), inside)
            # The other name is what the directory has while it is exchanged.
            assert dataset.path in (data, f"{bait.link}/data")
            dataset.close()
    assert found


@requires_fuse
@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((no, "is no open descriptor") for no in ("x", "-1", "1000000000000", "77")),
        ("0", "is not a directory"),
    ],
)
def test_a_wrong_descriptor_is_told(tmp_path: Path, value: str, said: str) -> None:
    assert_one_line(run("mount", "/usr", str(tmp_path), "--source-fd", value), 2, said)
