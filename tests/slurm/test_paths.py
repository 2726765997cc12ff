"""A user who changes the way to a dataset while the prolog is at work: what is mounted is what was
found to lie below the site's roots."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config.model import User
from monarchfs.slurm import daemon
from monarchfs.slurm.identity import resolve
from monarchfs.slurm.job import Job
from monarchfs.slurm.prolog import WantedDataset, mount_for
from monarchfs.slurm.records import prepare
from monarchfs.slurm.request import Request
from monarchfs.slurm.site import Site, read_site
from monarchfs.types import OperationError
from tests.support.fake_mounts import interpreter_for
from tests.support.flipping import Bait
from tests.support.mounting import (
    MONARCHFS,
    Bench,
    as_user,
    fuse_mounts,
    requires_fuse,
    requires_root,
    run,
)

pytestmark = requires_root

NOBODY = pwd.getpwnam("nobody")
USER = User("nobody", NOBODY.pw_uid, NOBODY.pw_gid, ())


@dataclass
class Node:
    """A site whose only root, ``roots``, holds a directory of the user's, ``roots/way``, with the
    dataset ``data``; ``outside`` has a ``data``, too."""

    work: Bench
    bait: Bait

    @property
    def data(self) -> Path:
        return self.bait.way / "data"

    @property
    def roots(self) -> Path:
        return self.work.path / "roots"

    def site(self) -> Site:
        path = self.work.path / "site.toml"
        path.write_text(
            f'roots = ["{self.roots}"]\ntier = ["{self.work.path}/tier=10M"]\n'
            f'options = "reserve_percent=1"\ndeadline_seconds = 30\n'
            f'run_dir = "{self.work.path}/run"\ncache_dir = "{self.work.path}/cache"\n'
            f'report_dir = "{self.work.path}/reports"\nlog = "{self.work.path}/slurm.log"\n'
        )
        return read_site(str(path))

    def job(self, what: str, number: int) -> None:
        words = {
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_UID": str(USER.uid),
            "SLURM_JOB_USER": USER.name,
            "SLURM_JOB_COMMENT": f"monarchfs={self.data}",
            "SLURMD_NODENAME": "here",
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        }
        command = ["env", "-i", *(f"{name}={value}" for name, value in words.items()), *MONARCHFS]
        command += ["job", what, "--config", f"{self.work.path}/site.toml"]
        subprocess.run(command, check=True, timeout=60, capture_output=True)

    def mounts(self) -> list[str]:
        return fuse_mounts(f"{self.work.path}/run")


@pytest.fixture
def node(work: Bench) -> Iterator[Node]:
    interpreter_for(USER.name)
    (work.path / "roots").mkdir(mode=0o1777)
    (work.path / "roots").chmod(0o1777)
    outside = work.path / "outside"
    bait = Bait(work.path / "roots", outside, USER.uid)
    for directory, text in ((bait.way, "inside"), (outside, "outside")):
        (directory / "data").mkdir(parents=True)
        (directory / "data" / "which").write_text(text)
    made = Node(work, bait)
    made.site()
    yield made
    for point in made.mounts():
        run("umount", point, "--timeout", "5")


def what_is_mounted(point: str) -> str:
    done = subprocess.run(
        as_user(USER.name, ["cat", f"{point}/which"]), capture_output=True, text=True, check=True
    )
    return done.stdout


@requires_fuse
def test_a_link_that_comes_after_the_look_changes_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user exchanges the directory for a link when the prolog has looked at it."""
    site = node.site()
    prepare(site)
    start = daemon.start

    def flip_then_start(*arguments: Any, **keywords: Any) -> None:
        node.bait.flip()
        start(*arguments, **keywords)

    monkeypatch.setattr(daemon, "start", flip_then_start)
    job = Job(1, USER.uid, USER.name, "", "", "here")
    wanted = WantedDataset(Request(str(node.data)), "X", by_site=False)
    point = mount_for(site, job, wanted, USER, time.monotonic() + 30)
    assert node.bait.way.is_symlink()
    assert what_is_mounted(point) == "inside"
    (found,) = node.mounts()
    assert found == point
    status = run("status", point, "--json")
    assert f'"source": "{node.data}"' in status.stdout


@requires_fuse
def test_prologs_race_with_a_link(node: Node) -> None:
    with node.bait.flipping():
        for number in range(1, 8):
            node.job("prolog", number)
            assert [what_is_mounted(point) for point in node.mounts()] in ([], ["inside"])
            node.job("epilog", number)
    node.job("prolog", 8)
    assert [what_is_mounted(point) for point in node.mounts()] == ["inside"]
    node.job("epilog", 8)


def test_a_look_is_right_or_an_error(node: Node) -> None:
    """Of the path, the directory and whether it is allowed, no two are of different moments."""
    inside = os.stat(node.data)
    found = 0
    with node.bait.flipping():
        for _ in range(100):
            try:
                dataset = resolve(str(node.data), [str(node.roots)], USER, 10)
            except OperationError:
                continue
            found += 1
            assert os.path.samestat(os.fstat(dataset.descriptor), inside)
            # The other name is what the directory has while it is exchanged.
            assert dataset.path in (str(node.data), f"{node.bait.link}/data")
            dataset.close()
    assert found


@requires_fuse
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x", "is no open descriptor"),
        ("-1", "is no open descriptor"),
        ("1000000000000", "is no open descriptor"),
        ("77", "is no open descriptor"),
        ("0", "is not a directory"),
    ],
)
def test_a_wrong_descriptor_is_told(node: Node, value: str, said: str) -> None:
    (node.work.path / "mnt").mkdir()
    done = run("mount", f"{node.data}", f"{node.work.path}/mnt", "--source-fd", value)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
