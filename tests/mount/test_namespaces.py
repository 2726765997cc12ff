"""Seen from another mount namespace, as a container's or that of ``monarchfs run``: the truth."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import pytest

from tests.support import surroundings
from tests.support.mounting import MONARCHFS, Bench, Mount, requires_mounts, run

pytestmark = [*requires_mounts, surroundings.requires_namespaces]

NAMESPACES = {
    "mounts": ["--mount", "--propagation", "private"],
    "mounts and processes": ["--mount", "--propagation", "private", "--pid", "--fork"],
}


@pytest.fixture
def mount(work: Bench) -> Mount:
    (work.path / "source").mkdir()
    (work.path / "source" / "file").write_text("content")
    return work.mount(work.path / "source")


def inside(kind: str, script: str) -> str:
    """What a shell prints in a mount namespace of its own; ``m`` is the command."""
    proc = "mount -t proc proc /proc; " if "processes" in kind else ""
    script = f'm() {{ {shlex.join(MONARCHFS)} "$@"; }}; {proc}{script}'
    command = ["unshare", *NAMESPACES[kind], "sh", "-ec", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_served(mount: Mount) -> None:
    assert mount.status()["state"] == "serving"
    assert (mount.path / "file").read_text() == "content"


@pytest.mark.parametrize("kind", NAMESPACES)
def test_a_mount_is_what_it_is(mount: Mount, kind: str) -> None:
    """Its copy there; where it is not there, it serves elsewhere; and who unmounts a copy takes
    nothing from others."""
    point = shlex.quote(str(mount.path))
    look = f"m status {point} --json; m status --json; m doctor --quick --json || true"
    for before, private in (("", False), (f"umount -l {point}; ", True)):
        one, listed, doctor = map(json.loads, inside(kind, before + look).splitlines())
        assert (one["state"], one["private"]) == ("serving", private)
        assert one["worker"]["pid"] == mount.worker_pid()
        ours = [m for m in listed["mounts"] if m["mountpoint"] == str(mount.path)]
        assert [(m["state"], m["private"]) for m in ours] == [("serving", private)]
        assert_not_stale(doctor, mount)
    inside(kind, f"m warm {point} --wait; m why {point}/file; m evict {point}/file")
    text = inside(kind, f"umount -l {point}; m status {point}")
    assert "serving" in text
    assert "not visible in this mount namespace" in text
    umount = f"m umount {point}; ! mountpoint -q {point}; m umount {point}"
    assert inside(kind, umount).endswith("is not mounted\n")
    assert_served(mount)


def assert_not_stale(doctor: dict[str, Any], mount: Mount) -> None:
    checks = [check for check in doctor["checks"] if check["name"] == "stale_mount"]
    assert [check for check in checks if check["mountpoint"] == str(mount.path)] == []


def test_in_run_all_are_what_they_are(work: Bench, mount: Mount) -> None:
    other = work.path / "other"
    other.mkdir()
    (other / "file").write_text("more")
    storage = ["--tier", f"{work.path}/tier2=10M", "--state-dir", f"{work.path}/state2"]
    script = f'for p in {mount.path} {other}; do "$@" status "$p" --json; done'
    script += '; "$@" doctor --quick --json || true'
    done = run("run", str(other), *storage, "--", "sh", "-ec", script, "sh", *MONARCHFS)
    assert done.returncode == 0, done.stderr
    outer, own, doctor = map(json.loads, done.stdout.splitlines())
    assert [(m["state"], m["private"]) for m in (outer, own)] == [("serving", False)] * 2
    for path in (mount.path, other):
        assert_not_stale(doctor, Mount(path, path))
    assert_served(mount)
