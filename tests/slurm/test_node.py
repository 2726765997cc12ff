"""Prolog and epilog on this machine, without Slurm: what they do, and what they survive."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config.model import User
from monarchfs.insight.recording import Kind, open_recording
from monarchfs.slurm import caches, daemon
from monarchfs.slurm.identity import Dataset
from monarchfs.slurm.leftovers import Sweeper
from monarchfs.slurm.records import prepare, write_record
from monarchfs.slurm.shares import Share, share_key
from monarchfs.slurm.site import SitePaths, read_site
from monarchfs.types import OperationError
from tests.support import surroundings, trees
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import (
    MONARCHFS,
    Bench,
    Mount,
    as_user,
    fuse_mounts,
    requires_mounts,
    run,
    wait_for,
)
from tests.support.processes import priorities
from tests.support.timing import Stopwatch

pytestmark = requires_mounts

NOBODY = pwd.getpwnam("nobody")


@dataclass
class Node:
    """A node's site configuration and directories, below a Bench's."""

    work: Bench

    @property
    def path(self) -> Path:
        return self.work.path

    @property
    def layout(self) -> SitePaths:
        return SitePaths(f"{self.path}/run", f"{self.path}/cache")

    def configure(self, *lines: str, size: str = "100M") -> None:
        (self.path / "site.toml").write_text(
            f'roots = ["{self.path}/lustre"]\n'
            f'tier = ["{self.path}/tier={size}"]\n'
            'options = "reserve_percent=1"\n'
            "deadline_seconds = 10\n"
            f'run_dir = "{self.path}/run"\n'
            f'cache_dir = "{self.path}/cache"\n'
            f'report_dir = "{self.path}/reports"\n'
            f'log = "{self.path}/slurm.log"\n' + "\n".join(lines) + "\n"
        )

    def command(self, what: str, job: int, comment: str = "", user: str = "nobody") -> list[str]:
        """As slurmd would run it; its environment is part of it."""
        entry = pwd.getpwnam(user)
        environment = {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_UID": str(entry.pw_uid),
            "SLURM_JOB_USER": user,
            "SLURM_JOB_PARTITION": "main",
            "SLURM_JOB_COMMENT": comment,
            "SLURMD_NODENAME": "here",
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        }
        words = [f"{name}={value}" for name, value in environment.items()]
        return ["env", "-i", *words, *MONARCHFS, "job", what, "--config", f"{self.path}/site.toml"]

    def job(self, what: str, job: int, comment: str = "", user: str = "nobody") -> str:
        """Runs a prolog or epilog to its end, which has to be a good one; what it said."""
        done = subprocess.run(
            self.command(what, job, comment, user),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=self.path,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        return done.stderr

    def dataset(self, name: str, files: int = 4) -> Path:
        path = self.path / "lustre" / name
        path.mkdir()
        trees.dataset(path, files=files)
        return path

    def environment(self, job: int) -> dict[str, str]:
        """What the task prolog would export."""
        script = Path(__file__).parent.parent.parent / "slurm" / "task_prolog"
        done = subprocess.run(
            [str(script)],
            env={
                "SLURM_JOB_ID": str(job),
                "MONARCHFS_RUN": f"{self.path}/run",
                "PATH": "/usr/bin:/bin",
            },
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        lines = [line.removeprefix("export ") for line in done.stdout.splitlines()]
        return dict(line.split("=", 1) for line in lines)

    def report(self, job: int) -> list[dict[str, Any]]:
        found = json.loads((self.path / "reports" / f"{job}.here.json").read_text())
        result: list[dict[str, Any]] = found["datasets"]
        return result

    def mounts(self) -> list[str]:
        return fuse_mounts(f"{self.path}/run")

    def read(self, root: str, user: str = "nobody") -> int:
        """Reads all files below a directory, as the user; the exit code."""
        words = ["sh", "-c", 'find "$0" -type f -exec cat {} + >/dev/null', root]
        return subprocess.run(
            as_user(user, words), capture_output=True, timeout=30, check=False
        ).returncode

    def left(self) -> list[str]:
        """What is left of any job or share."""
        return [
            str(path)
            for part in ("shares", "env", "jobs")
            for path in (self.path / "run" / part).rglob("*")
        ]

    def log(self) -> str:
        path = self.path / "slurm.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def node(work: Bench) -> Iterator[Node]:
    interpreter_for("nobody")
    (work.path / "lustre").mkdir()
    made = Node(work)
    made.configure()
    try:
        yield made
    finally:
        print(made.log())
        for point in made.mounts():
            run("umount", point, "--timeout", "5")


@pytest.mark.smoke
def test_a_job_from_prolog_to_epilog(node: Node) -> None:
    data = node.dataset("a b")
    assert node.job("prolog", 1, f'monarchfs="{data}":name=AB:prefetch=all') == ""
    root = node.environment(1)["MONARCHFS_ROOT"]
    assert node.environment(1) == {"MONARCHFS_ROOT": root, "MONARCHFS_DATA_AB": root}
    assert node.mounts() == [root]
    assert node.read(root) == 0
    assert os.stat(f"{node.path}/run/env/1").st_uid == NOBODY.pw_uid
    worker = json.loads(run("status", root, "--json").stdout)["worker"]["pid"]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for pid in (_supervisor(root), worker):
        assert os.getpriority(os.PRIO_PROCESS, pid) == own
        assert os.getsid(pid) != os.getsid(0)
    wait_for(lambda: priorities(worker) == {own, max(own, 5)}, "a scan, with its own priority")
    node.job("prolog", 1, f'monarchfs="{data}":name=AB')
    assert node.environment(1)["MONARCHFS_ROOT"] == root
    node.job("epilog", 1)
    assert node.mounts() == node.left() == []
    (one,) = node.report(1)
    assert (one["source"], one["variable"]) == (str(data), "MONARCHFS_DATA_AB")
    before = (node.path / "reports" / "1.here.json").read_text()
    node.job("epilog", 1)
    assert (node.path / "reports" / "1.here.json").read_text() == before
    # The next job finds what was copied.
    node.job("prolog", 2, f'monarchfs="{data}"')
    assert node.read(node.environment(2)["MONARCHFS_ROOT"]) == 0
    node.job("epilog", 2)
    assert node.report(2)[0]["source_read_bytes"] == 0
    assert node.report(2)[0]["local_open_share"] == 1


def test_a_report_counts_what_the_daemon_did_that_took_the_place_of_a_dead_one(node: Node) -> None:
    data = node.dataset("data")
    comment = f"monarchfs={data}:freshness=ttl=60"  # so that every open is counted
    node.job("prolog", 1, comment)
    root = node.environment(1)["MONARCHFS_ROOT"]
    assert node.read(root) == 0
    wait_for(lambda: Mount(data, Path(root)).wait_idle()["prefetch"]["completed"] == 4, "copies")
    assert node.read(root) == 0
    node.job("prolog", 2, comment)
    os.kill(_supervisor(root), signal.SIGKILL)
    node.job("prolog", 3, comment)
    assert node.read(root) == 0
    for number in (1, 2, 3):
        node.job("epilog", number)
        (one,) = node.report(number)
        counts = (one["local_opens"], one["source_opens"], one["copies_completed"])
        assert counts == (4, 0, 0), f"job {number}: of the second daemon"
    assert node.left() == []


def recordings_of(node: Node) -> list[Path]:
    return list((node.path / "cache" / "recordings").glob("*"))


def recorded_bytes(node: Node) -> int:
    return sum(file.stat().st_size for file in (node.path / "cache/recordings").glob("1.*/rec"))


def test_where_the_site_records_a_report_gets_a_verdict_and_the_recording(node: Node) -> None:
    node.configure('record = "16M"')
    data = node.dataset("data", files=30)
    node.job("prolog", 1, f"monarchfs={data}:freshness=open")
    root = node.environment(1)["MONARCHFS_ROOT"]
    wait_for(lambda: recorded_bytes(node), "the recorder")
    for _ in range(3):
        assert node.read(root) == 0
    node.job("epilog", 1)
    assert node.mounts() == node.left() == []
    wait_for(lambda: "verdict" in node.report(1)[0], "the verdict", 60)
    (one,) = node.report(1)
    assert one["source"] == str(data)
    assert one["verdict"]["kind"] in ("input-bound", "mixed", "compute-bound", "unknown")
    assert 1 <= len(one["verdict"]["lines"]) <= 3
    recorded, page = map(Path, one["verdict"]["files"])
    for path in (recorded, page):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (NOBODY.pw_uid, 0o400)
    recording = open_recording(recorded)
    assert recording.complete
    assert len({event.ino for event in recording.events if event.kind is Kind.OPEN}) == 30
    assert one["verdict"]["lines"][0][:20] in page.read_text()
    assert one["verdict"]["lines"][0] in run("report", "1", "--dir", f"{node.path}/reports").stdout
    wait_for(lambda: not recordings_of(node), "nothing to be left")


@pytest.mark.parametrize("what", ["killed", "hangs"])
def test_a_recorder_that_fails_delays_no_epilog(node: Node, what: str) -> None:
    node.configure("record = true")
    data = node.dataset("data")
    node.job("prolog", 1, f"monarchfs={data}")
    wait_for(lambda: recorded_bytes(node), "the recorder")
    found = subprocess.run(
        ["pgrep", "-f", f"record {node.path}/run/.*/rec"],
        capture_output=True,
        text=True,
        check=True,
    )
    (pid,) = map(int, found.stdout.split())
    assert os.stat(f"/proc/{pid}").st_uid == NOBODY.pw_uid
    os.kill(pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
    watch = Stopwatch()
    node.job("epilog", 1)
    watch.check(8)
    assert node.mounts() == node.left() == []
    assert "verdict" not in node.report(1)[0]
    if what == "hangs":
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "no verdict" in node.log(), "the log", 60)
    wait_for(lambda: not recordings_of(node), "nothing to be left")


def test_a_job_that_asks_for_nothing_leaves_nothing(node: Node) -> None:
    node.job("prolog", 1, "just words")
    node.job("epilog", 1)
    assert not (node.path / "run").exists() or node.left() == []
    assert node.log() == ""
    assert node.environment(1) == {}


def test_two_names_of_a_dataset_are_one_mount(node: Node) -> None:
    data = node.dataset("data")
    (node.path / "lustre" / "link").symlink_to(data)
    node.job("prolog", 1, f"monarchfs={data},{node.path}/lustre/link")
    found = node.environment(1)
    assert found["MONARCHFS_DATA_DATA"] == found["MONARCHFS_DATA_LINK"] == node.mounts()[0]
    node.job("epilog", 1)
    assert node.mounts() == node.left() == []


def test_a_dataset_that_fails_spoils_no_other(node: Node) -> None:
    data = node.dataset("data")
    missing = f"{node.path}/lustre/missing"
    node.job("prolog", 1, f"monarchfs={missing},{data},/etc")
    found = node.environment(1)
    assert found["MONARCHFS_ROOT"] == found["MONARCHFS_DATA_MISSING"] == missing
    assert found["MONARCHFS_DATA_DATA"] == node.mounts()[0]
    assert found["MONARCHFS_DATA_ETC"] == "/etc"
    assert found["MONARCHFS_WARNING"] == (
        f"{missing}: No such file or directory (for nobody); /etc: this job may ask for what lies"
        f" below {node.path}/lustre"
    )
    node.job("epilog", 1)
    assert [(one["source"], one["mounted"]) for one in node.report(1)] == [
        (str(data), True),
        (missing, False),
        ("/etc", False),
    ]


def test_where_systemd_runs_a_daemon_gets_a_scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd-run(1) is a stand-in: there is no systemd here."""
    tool = tmp_path / "systemd-run"
    monkeypatch.setattr(daemon, "_BOOTED", str(tmp_path))
    monkeypatch.setattr(daemon, "_SYSTEMD_RUN", str(tool))
    monkeypatch.setattr(
        daemon, "command_of_ours", lambda *_words: ["sh", "-c", f"echo ours >> {tmp_path}/ran"]
    )

    dataset = Dataset("/source", os.open(tmp_path, os.O_PATH | os.O_CLOEXEC))

    def start() -> None:
        daemon.start(
            dataset, "/mountpoint", _nobody(), tiers=[], state_dir="/state", options=[],
            log_file=None, unit="monarchfs-x", deadline=time.monotonic() + 10,
        )  # fmt: skip

    script = f'#!/bin/sh\necho "$@" >> {tmp_path}/ran\n'
    tool.write_text(script + 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    tool.chmod(0o755)
    start()
    options, ran = (tmp_path / "ran").read_text().splitlines()
    assert options.startswith("--scope --quiet --collect --slice=monarchfs --unit=monarchfs-x --")
    assert ran == "ours"
    # One that cannot, for reasons of its own, is done without.
    (tmp_path / "ran").unlink()
    tool.write_text(script + "echo Failed to connect to bus >&2; exit 1\n")
    start()
    assert (tmp_path / "ran").read_text().splitlines()[1:] == ["ours"]
    # What the command itself says counts.
    (tmp_path / "ran").unlink()
    tool.write_text(script + "echo monarchfs: there is no room >&2; exit 1\n")
    with pytest.raises(OperationError, match=r"^there is no room$"):
        start()
    assert len((tmp_path / "ran").read_text().splitlines()) == 1
    dataset.close()


def test_a_link_out_of_the_roots_is_not_mounted(node: Node) -> None:
    (node.path / "lustre" / "link").symlink_to("/etc")
    node.job("prolog", 1, f"monarchfs={node.path}/lustre/link")
    assert node.mounts() == []
    assert node.environment(1)["MONARCHFS_ROOT"] == f"{node.path}/lustre/link"
    assert "in none of the roots" in node.environment(1)["MONARCHFS_WARNING"]
    node.job("epilog", 1)
    assert node.left() == []


def test_what_the_user_may_not_read_is_not_mounted(node: Node) -> None:
    data = node.dataset("secret")
    data.chmod(0o700)
    node.job("prolog", 1, f"monarchfs={data}")
    assert node.mounts() == []
    assert "Permission denied" in node.environment(1)["MONARCHFS_WARNING"]
    node.job("epilog", 1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda node: node.configure("nonsense = 1"), "this key is not known"),
        (lambda node: node.configure("[[allow]]"), "no directory is named"),
        (lambda node: (node.path / "site.toml").write_text("= 1"), "not TOML"),
        (lambda node: (node.path / "site.toml").unlink(), "there is no configuration"),
        (lambda node: (node.path / "site.toml").chmod(0o666), "can be written by others"),
    ],
    ids=["key", "value", "toml", "none", "mode"],
)
def test_a_site_that_is_configured_wrongly_fails_no_job(node: Node, spoil: Any, said: str) -> None:
    data = node.dataset("data")
    spoil(node)
    # Where it logs is not known then: it is the usual place.
    usual = Path("/var/log/monarchfs/slurm.log")
    existed, size = usual.parent.exists(), usual.stat().st_size if usual.exists() else 0
    node.job("prolog", 1, f"monarchfs={data}")
    with open(usual, encoding="utf-8") as log:
        log.seek(size)
        assert said in log.read()
    if not existed:
        shutil.rmtree(usual.parent)
    assert node.mounts() == []


def test_wrong_usage_is_told(node: Node) -> None:
    done = run("job", "prolog")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("monarchfs: there is no SLURM_JOB_ID")
    done = run("job", "prolog", user="nobody")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = run("job", "nonsense")
    assert done.returncode == 2


def test_scripts_succeed_whatever_happens(node: Node) -> None:
    scripts = Path(__file__).parent.parent.parent / "slurm"
    for name in ("prolog", "epilog", "task_prolog"):
        for environment in ({}, {"MONARCHFS": "/nonexistent"}, {"SLURM_JOB_ID": "../../etc/x"}):
            done = subprocess.run(
                [str(scripts / name)],
                env={"PATH": "/usr/bin:/bin", **environment},
                capture_output=True,
                timeout=20,
                check=False,
            )
            assert (done.returncode, done.stdout) == (0, b""), name


def test_a_wiped_cache_is_gone_after_the_last_job(node: Node) -> None:
    node.configure("wipe = true")
    data = node.dataset("data")
    for job in (1, 2):
        node.job("prolog", job, f"monarchfs={data}:prefetch=all")
    assert node.read(node.environment(1)["MONARCHFS_ROOT"]) == 0
    node.job("epilog", 1)
    assert len(os.listdir(node.path / "tier")) == 1
    node.job("epilog", 2)
    wait_for(lambda: not os.listdir(node.path / "tier"), "the copies to be removed")
    wait_for(lambda: not os.listdir(node.path / "cache" / "slurm"), "the index to be removed")


def test_unmounted_caches_make_room_within_the_budget(node: Node) -> None:
    node.configure(f'budget = ["{node.path}/tier=150M"]', size="60M")
    sets = [node.dataset(f"data{number}") for number in range(3)]
    for number, data in enumerate(sets):
        node.job("prolog", number + 1, f"monarchfs={data}")
        assert node.read(node.environment(number + 1)["MONARCHFS_ROOT"]) == 0
        if number < 2:
            node.job("epilog", number + 1)
    keys = [share_key(str(data), _nobody()) for data in sets]
    # A cache that holds nearly nothing is no obstacle; make the first one a large one.
    record = json.loads((node.path / "cache" / "slurm" / keys[0] / "cache.json").read_text())
    record["used"] = {f"{node.path}/tier": 100 << 20}
    write_record(f"{node.path}/cache/slurm/{keys[0]}/cache.json", record)
    node.job("prolog", 4, f"monarchfs={sets[1]}")
    wait_for(lambda: keys[0] not in os.listdir(node.path / "tier"), "the oldest cache to go")
    left = {name for name in os.listdir(node.path / "tier") if not name.startswith(".")}
    assert left == {keys[1], keys[2]}
    # Both mounted ones hold 120M of 150M: a third gets what is left.
    node.job("prolog", 5, f"monarchfs={sets[0]}")
    points = json.loads(run("status", node.environment(5)["MONARCHFS_ROOT"], "--json").stdout)
    assert points["tiers"][0]["capacity_bytes"] <= 30 << 20
    other = node.dataset("other")
    node.job("prolog", 6, f"monarchfs={other}")
    assert "used up" in node.environment(6)["MONARCHFS_WARNING"]
    assert node.environment(6)["MONARCHFS_ROOT"] == str(other)
    for job in (3, 4, 5, 6):
        node.job("epilog", job)
    assert node.mounts() == node.left() == []


def _nobody() -> User:
    groups = tuple(os.getgrouplist("nobody", NOBODY.pw_gid))
    return User("nobody", NOBODY.pw_uid, NOBODY.pw_gid, groups)


def test_a_dead_daemon_is_replaced_and_one_that_hangs_is_left_to_those_who_use_it(
    node: Node,
) -> None:
    data = node.dataset("data")
    node.job("prolog", 1, f"monarchfs={data}")
    root = node.environment(1)["MONARCHFS_ROOT"]
    os.kill(_supervisor(root), signal.SIGKILL)
    node.job("prolog", 2, f"monarchfs={data}")
    assert node.environment(2)["MONARCHFS_ROOT"] == root
    assert node.read(root) == 0
    pid = _supervisor(root)
    os.kill(pid, signal.SIGSTOP)
    began = Stopwatch()
    node.job("prolog", 3, f"monarchfs={data}")
    began.check(10)
    assert node.environment(3)["MONARCHFS_ROOT"] == str(data)
    for job in (1, 2, 3):
        began = Stopwatch()
        node.job("epilog", job)
        began.check(10)
    assert node.mounts() == node.left() == []
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the daemon to go")


def _supervisor(mountpoint: str) -> int:
    for path in Path("/run/monarchfs").glob("*.json"):
        entry = json.loads(path.read_text())
        if entry["mountpoint"] == mountpoint:
            return int(entry["supervisor_pid"])
    raise AssertionError(f"nobody serves {mountpoint}")


CALLS = "rename,mkdir,mkdirat,unlink,rmdir,flock,clone,fork,vfork"


@surroundings.program("strace")
@pytest.mark.timeout(240)
def test_a_prolog_may_be_killed_at_any_point(node: Node) -> None:
    """Killed at its first call that changes something, at the second, and so on: each time the
    epilog leaves nothing behind, and the next job is served."""
    data = node.dataset("data")
    number, steps = 0, 0
    while True:
        steps += 1
        job = 10 * steps
        done = subprocess.run(
            [
                *("strace", "-qq", "-o", "/dev/null", "-e", f"trace={CALLS}"),
                *("-e", f"inject={CALLS}:signal=KILL:when={steps}"),
                *node.command("prolog", job, f"monarchfs={data}"),
            ],
            capture_output=True,
            timeout=60,
            check=False,
        )
        survived = done.returncode == 0
        number += not survived
        if steps % 5 == 0:
            node.job("prolog", job + 1, f"monarchfs={data}")
            root = node.environment(job + 1)["MONARCHFS_ROOT"]
            assert root.startswith(str(node.path / "run")), node.environment(job + 1)
            assert node.read(root) == 0
            node.job("epilog", job + 1)
        node.job("epilog", job)
        # A mount that was under way when its prolog was killed may come about after all; the sweep
        # that the epilog left running, or that of the next one, finds it.
        wait_for(lambda: _swept(node), f"all to be gone after step {steps}")
        if survived:
            break
    print(f"killed {number} times")
    assert number >= 6, "it was killed too rarely"


def _swept(node: Node) -> bool:
    if not node.mounts() and not node.left():
        return True
    subprocess.run(node.command("sweep", 1), check=True, timeout=60)
    return not node.mounts() and not node.left()


@surroundings.program("strace")
@pytest.mark.timeout(240)
def test_an_epilog_may_be_killed_at_any_point(node: Node) -> None:
    data = node.dataset("data")
    steps = 0
    while True:
        steps += 1
        node.job("prolog", steps, f"monarchfs={data}")
        assert node.mounts()
        done = subprocess.run(
            [
                *("strace", "-qq", "-o", "/dev/null", "-e", f"trace={CALLS}"),
                *("-e", f"inject={CALLS}:signal=KILL:when={steps}"),
                *node.command("epilog", steps),
            ],
            capture_output=True,
            timeout=60,
            check=False,
        )
        node.job("epilog", steps)
        # What it found without a job it leaves to a process of its own.
        wait_for(lambda: not node.mounts() and not node.left(), f"all to go after step {steps}")
        if done.returncode == 0:
            break
    assert steps >= 6, "it was killed too rarely"


def test_what_a_user_plants_is_not_followed(node: Node) -> None:
    """A cache that goes takes nothing along that a user linked into it."""
    precious = node.path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    prepare(node.layout)
    key = share_key("/data", _nobody())
    tier = node.path / "tier" / key / "0123456789abcdef"
    tier.mkdir(parents=True)
    (tier / "link").symlink_to(precious)
    (tier / "lock").symlink_to(precious / "file")
    os.makedirs(node.layout.cache(key))
    os.symlink(precious, f"{node.layout.cache(key)}/state")
    record = {
        **{"source": "/data", "user": "nobody", "uid": NOBODY.pw_uid, "gid": NOBODY.pw_gid},
        **{"groups": list(_nobody().groups), "granted": {f"{node.path}/tier": 1}},
        **{"used": None, "last_used_unix_seconds": 0},
    }
    write_record(f"{node.layout.cache(key)}/cache.json", record)
    assert caches.discard(node.layout, key, "test")
    subprocess.run(node.command("sweep", 1), check=True, timeout=60)
    assert os.listdir(node.path / "tier") == []
    assert (precious / "file").read_text() == "keep me"


@pytest.mark.parametrize(
    ("held", "resting", "wanted", "gone"),
    [
        (0, {}, 100, []),
        (0, {"a": (1.0, 50)}, 50, []),
        (0, {"a": (1.0, 51)}, 50, ["a"]),
        (50, {"new": (9.0, 20), "old": (1.0, 20)}, 20, ["old"]),
        (50, {"new": (9.0, 20), "old": (1.0, 5)}, 40, ["old", "new"]),
        (0, {"empty": (0.0, 0), "old": (1.0, 60)}, 60, ["old"]),
        (90, {"a": (1.0, 5), "b": (2.0, 5)}, 100, ["a", "b"]),
    ],
)
def test_which_caches_go(
    held: int, resting: dict[str, tuple[float, int]], wanted: int, gone: list[str]
) -> None:
    assert caches.over_budget(100, held, resting, wanted) == gone


def test_a_cache_that_is_in_use_stays(node: Node) -> None:
    data = node.dataset("data")
    node.job("prolog", 1, f"monarchfs={data}")
    key = share_key(str(data), _nobody())
    assert not caches.discard(node.layout, key, "test")
    # Also where what is known of the mount was lost.
    shutil.rmtree(Share(node.layout, key).directory, ignore_errors=True)
    assert not caches.discard(node.layout, key, "test")
    root = node.mounts()[0]
    assert node.read(root) == 0
    assert run("umount", root).returncode == 0
    assert caches.discard(node.layout, key, "test")


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(path, (then, then), follow_symlinks=False)


NOBODYS_UID = 3_999_999_999
"""Of no user."""


def a_cache(node: Node, source: str, uid: int, *, days: float, size: int = 0) -> str:
    """An unmounted cache that was used so many days ago; its key."""
    prepare(node.layout)
    user = User("someone", uid, 100, (100,))
    key = share_key(source, user)
    for path in (node.path / "tier" / key / "0123456789abcdef", node.path / "cache/slurm" / key):
        path.mkdir(parents=True)
    (node.path / "cache/slurm" / key / "state").mkdir()
    record = {
        **{"source": source, "user": user.name, "uid": uid, "gid": 100, "groups": [100]},
        **{"granted": {f"{node.path}/tier": size}, "used": {f"{node.path}/tier": size}},
        "last_used_unix_seconds": time.time() - days * 86400,
    }
    write_record(f"{node.layout.cache(key)}/cache.json", record)
    return key


def swept(node: Node, *, remove: bool) -> list[tuple[str, str, bool]]:
    """What gc finds of caches on this node: (kind, path, removed)."""
    site = read_site(f"{node.path}/site.toml")
    sweeper = Sweeper(remove=remove)
    sweeper.budget(site)
    sweeper.caches(site)
    assert [one.error for one in sweeper.found] == [None] * len(sweeper.found)
    return [(one.kind, one.path, one.removed) for one in sweeper.found]


def test_gc_removes_caches_of_users_that_are_gone(node: Node) -> None:
    kept = [
        a_cache(node, "/lustre/fresh", NOBODYS_UID, days=0.5),
        a_cache(node, "/lustre/old", NOBODY.pw_uid, days=500),
    ]
    gone = a_cache(node, "/lustre/gone", NOBODYS_UID, days=1.5)
    path = node.layout.cache(gone)
    assert swept(node, remove=False) == [("cache", path, False)]
    assert os.path.exists(path)
    found = swept(node, remove=True)
    assert found[0] == ("cache", path, True)
    assert {kind for kind, _, _ in found[1:]} <= {"trash"}
    swept(node, remove=True)
    assert sorted(os.listdir(node.path / "tier")) == sorted(kept)
    assert sorted(os.listdir(node.path / "cache" / "slurm")) == sorted(kept)
    assert swept(node, remove=True) == []


def test_the_cache_command_knows_caches_of_jobs(node: Node) -> None:
    data = node.dataset("data")
    node.job("prolog", 1, f"monarchfs={data}:prefetch=all")
    assert node.read(node.environment(1)["MONARCHFS_ROOT"]) == 0
    command = ("cache", "remove", str(data), "--yes", "--config", f"{node.path}/site.toml")
    done = run(*command)
    assert (done.returncode, "in use" in done.stderr) == (1, True), done.stderr
    node.job("epilog", 1)
    listed = run("cache", "list", "--json", "--config", f"{node.path}/site.toml")
    (row,) = [one for one in json.loads(listed.stdout)["caches"] if one["source"] == str(data)]
    assert (row["user"], row["in_use"]) == ("nobody", False)
    assert row["tiers"][0]["files"] > 0
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(node.path / "tier") == []
    assert os.listdir(node.path / "cache" / "slurm") == []


def test_gc_removes_what_plain_mounts_of_gone_users_left(node: Node) -> None:
    prepare(node.layout)
    states = node.path / "cache" / "state"
    names = {"a" * 16: NOBODYS_UID, "b" * 16: NOBODY.pw_uid, "c" * 16: NOBODYS_UID}
    for name, uid in names.items():
        for path in (states / name, node.path / "cache" / name):
            path.mkdir(parents=True)
            os.chown(path, uid, uid)
            age(path, 2)
    (node.path / "cache" / "precious").mkdir()
    age(node.path / "cache" / "precious", 99)
    lock = states / ("c" * 16) / "lock"
    lock.touch()
    with open(lock, "rb") as held:
        age(lock.parent, 2)
        fcntl.flock(held, fcntl.LOCK_EX)
        found = swept(node, remove=True)
        assert {path for _, path, _ in found} == {
            str(states / ("a" * 16)),
            str(node.path / "cache" / ("a" * 16)),
        }
    assert sorted(os.listdir(states)) == ["b" * 16, "c" * 16]
    assert set(os.listdir(node.path / "cache")) == {
        *("b" * 16, "c" * 16, "precious", "slurm", "state")
    }


def test_gc_removes_copies_that_nobody_counts(node: Node) -> None:
    key = a_cache(node, "/lustre/data", NOBODY.pw_uid, days=0)
    orphan = node.path / "tier" / ("e" * 20)
    (orphan / "0123456789abcdef").mkdir(parents=True)
    (orphan / "link").symlink_to(node.path / "lustre")
    precious = node.dataset("precious")
    (node.path / "tier" / "somebody's").mkdir()
    assert swept(node, remove=True) == [("copies", str(orphan), True)]
    assert sorted(os.listdir(node.path / "tier")) == sorted([key, "somebody's"])
    assert len(os.listdir(precious)) > 0


def test_gc_keeps_to_the_budget(node: Node) -> None:
    node.configure(f'budget = ["{node.path}/tier=100M"]')
    old, new = (
        a_cache(node, f"/lustre/{days}", NOBODY.pw_uid, days=days, size=60 << 20) for days in (9, 3)
    )
    found = swept(node, remove=True)
    assert found[0] == ("cache", node.layout.cache(old), True)
    swept(node, remove=True)
    assert os.listdir(node.path / "tier") == [new]
    assert swept(node, remove=True) == []


def test_what_is_mounted_is_shared_though_its_source_hangs(node: Node) -> None:
    backing = node.path / "backing"
    backing.mkdir()
    trees.dataset(backing, files=2)
    source = node.work.faulty_source(backing)
    node.configure()
    text = (node.path / "site.toml").read_text().replace("/lustre", "")
    (node.path / "site.toml").write_text(text)
    node.job("prolog", 1, f"monarchfs={source.path}:prefetch=all")
    root = node.environment(1)["MONARCHFS_ROOT"]
    assert root != str(source.path), node.environment(1)
    assert node.read(root) == 0
    source.faults(hang=["* *"])
    began = Stopwatch()
    node.job("prolog", 2, f"monarchfs={source.path}")
    began.check(5)
    assert node.environment(2) == {
        "MONARCHFS_ROOT": root,
        f"MONARCHFS_DATA_{source.path.name.upper()}": root,
    }
    source.faults()
    for job in (1, 2):
        node.job("epilog", job)
    assert node.mounts() == node.left() == []
