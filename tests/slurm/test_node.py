"""Prolog and epilog on this machine, without Slurm: what they do, and what they survive."""

import fcntl
import itertools
import json
import math
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config.model import User
from monarchfs.insight.recording import Kind, open_recording
from monarchfs.slurm import caches, daemon, leftovers
from monarchfs.slurm.job import Job, Request
from monarchfs.slurm.leftovers import Sweeper
from monarchfs.slurm.prolog import WantedDataset, mount_for
from monarchfs.slurm.records import names_in, prepare, read_record, write_record
from monarchfs.slurm.shares import Dataset, Share, resolve, share_key
from monarchfs.slurm.site import Site, read_site
from monarchfs.types import OperationError
from tests.support import surroundings, trees
from tests.support.fake_mounts import interpreter_for
from tests.support.flipping import Bait
from tests.support.mounting import (
    MONARCHFS,
    REPOSITORY,
    Bench,
    Mount,
    as_user,
    assert_one_line,
    fuse_mounts,
    requires_mounts,
    run,
    wait_for,
)
from tests.support.processes import parent_of, priorities
from tests.support.programs import execute
from tests.support.timing import Stopwatch

pytestmark = requires_mounts

NOBODY = pwd.getpwnam("nobody")
GROUPS = tuple(os.getgrouplist("nobody", NOBODY.pw_gid))
USER = User("nobody", NOBODY.pw_uid, NOBODY.pw_gid, GROUPS)
SCRIPTS = REPOSITORY / "slurm"


@dataclass
class Node:
    """A node's site configuration and directories, below a Bench's. Jobs are nobody's."""

    work: Bench

    @property
    def path(self) -> Path:
        return self.work.path

    @property
    def tier(self) -> Path:
        return self.path / "tier"

    @property
    def caches(self) -> Path:
        return self.path / "cache" / "slurm"

    @property
    def layout(self) -> Site:
        return Site(f"{self.path}/run", f"{self.path}/cache")

    def configure(
        self, *lines: str, size: str = "100M", roots: str = "/lustre", deadline: int = 40
    ) -> None:
        (self.path / "site.toml").write_text(
            f'roots = ["{self.path}{roots}"]\n'
            f'tier = ["{self.tier}={size}"]\n'
            'options = "reserve_percent=1"\n'
            f"deadline_seconds = {deadline}\n"
            f'run_dir = "{self.path}/run"\n'
            f'cache_dir = "{self.path}/cache"\n'
            f'report_dir = "{self.path}/reports"\n'
            f'log = "{self.path}/slurm.log"\n' + "\n".join(lines) + "\n"
        )

    def command(self, what: str, job: int, comment: str = "") -> list[str]:
        """As slurmd would run it; its environment is part of it."""
        words = [
            *(f"SLURM_JOB_ID={job}", f"SLURM_JOB_UID={NOBODY.pw_uid}", "SLURM_JOB_USER=nobody"),
            *("SLURM_JOB_PARTITION=main", f"SLURM_JOB_COMMENT={comment}", "SLURMD_NODENAME=here"),
            f"PATH={os.environ.get('PATH', '/usr/bin:/bin')}",
        ]
        return ["env", "-i", *words, *MONARCHFS, "job", what, "--config", f"{self.path}/site.toml"]

    def job(self, what: str, job: int, comment: str = "") -> str:
        """Runs a prolog or epilog to its end, which has to be a good one; what it said."""
        done = execute(self.command(what, job, comment), cwd=self.path)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        return done.stderr

    def begin(self, job: int, comment: str) -> str:
        """Runs its prolog; the directory that it gives to the job."""
        self.job("prolog", job, comment)
        return self.environment(job)["MONARCHFS_ROOT"]

    def end(self, *jobs: int) -> None:
        """Runs the epilogs of the last jobs; they leave nothing."""
        for job in jobs:
            self.job("epilog", job)
        assert self.mounts() == self.left() == []

    def dataset(self, name: str = "data", files: int = 4) -> Path:
        path = self.path / "lustre" / name
        path.mkdir()
        trees.dataset(path, files=files)
        return path

    def environment(self, job: int) -> dict[str, str]:
        names = {"SLURM_JOB_ID": str(job), "MONARCHFS_RUN": f"{self.path}/run"}
        environment = {**names, "PATH": "/usr/bin:/bin"}
        done = execute([SCRIPTS / "task_prolog"], env=environment, check=True)
        assert done.stderr == ""
        lines = [line.removeprefix("export ") for line in done.stdout.splitlines()]
        return dict(line.split("=", 1) for line in lines)

    def report(self, job: int) -> list[dict[str, Any]]:
        found = json.loads((self.path / "reports" / f"{job}.here.json").read_text())
        result: list[dict[str, Any]] = found["datasets"]
        return result

    def mounts(self) -> list[str]:
        return fuse_mounts(f"{self.path}/run")

    def read(self, root: str) -> None:
        words = ["sh", "-c", 'find "$0" -type f -exec cat {} + >/dev/null', root]
        subprocess.run(as_user("nobody", words), capture_output=True, timeout=30, check=True)

    def left(self) -> list[str]:
        found = []
        for part in ("shares", "env", "jobs"):
            # Something may be going just now, which rglob does not take.
            for base, directories, files in os.walk(self.path / "run" / part):
                found += [f"{base}/{name}" for name in directories + files]
        return found

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
        name = f"{made.path}/site.toml".replace("/", "%")
        Path("/run/monarchfs/slurm/config", name).unlink(missing_ok=True)


def _supervisor(point: str) -> int:
    return parent_of(Mount(Path(point), Path(point)).worker_pid())


@pytest.mark.smoke
def test_a_job_from_prolog_to_epilog(node: Node) -> None:
    data = node.dataset("a b")
    assert node.job("prolog", 1, f'monarchfs="{data}":name=AB:prefetch=all') == ""
    (root,) = node.mounts()
    assert node.environment(1) == {"MONARCHFS_ROOT": root, "MONARCHFS_DATA_AB": root}
    node.read(root)
    assert os.stat(f"{node.path}/run/env/1").st_uid == NOBODY.pw_uid
    worker = json.loads(run("status", root, "--json").stdout)["worker"]["pid"]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for pid in (_supervisor(root), worker):
        assert os.getpriority(os.PRIO_PROCESS, pid) == own
        assert os.getsid(pid) != os.getsid(0)
    wait_for(lambda: priorities(worker) == {own, max(own, 5)}, "a scan, with its own priority")
    assert node.begin(1, f'monarchfs="{data}":name=AB') == root
    node.end(1)
    (one,) = node.report(1)
    assert (one["source"], one["variable"]) == (str(data), "MONARCHFS_DATA_AB")
    before = (node.path / "reports" / "1.here.json").read_text()
    node.end(1)
    assert (node.path / "reports" / "1.here.json").read_text() == before
    # The next job finds what was copied.
    node.read(node.begin(2, f'monarchfs="{data}"'))
    node.end(2)
    assert node.report(2)[0]["source_read_bytes"] == 0
    assert node.report(2)[0]["local_open_share"] == 1


def test_grid_engine_and_health_checks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    data, spool, program = node.dataset("it's"), node.path / "spool", node.path / "program"
    spool.mkdir()
    (spool / "environment").write_text(f"A=1\nMONARCHFS_REQUEST={data}:name=AB\n")
    program.write_text(f'#!/bin/sh\nexec {" ".join(MONARCHFS)} "$@" --config {node.path}/site.toml')
    program.chmod(0o755)

    def script(name: str, *words: str) -> None:
        text = (REPOSITORY / "packaging" / "gridengine" / name).read_text()
        text = text.replace("/opt/monarchfs/bin/monarchfs", str(program))
        environment = {"SGE_JOB_SPOOL_DIR": str(spool), "BASH_FUNC_sed%%": "() { exit 1; }"}
        done = execute(["bash", "-pc", text, name, "12", *words], env=environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    script("prolog", "3", "nobody", "all.q")
    (root,) = node.mounts()
    assert f"\nMONARCHFS_DATA_AB={root}\n" in (spool / "environment").read_text()
    # Slurm knows nothing of it, so gc leaves it.
    monkeypatch.setattr(leftovers, "YOUNG_SECONDS", -1.0)
    (sweeper := Sweeper(remove=True)).jobs(node.layout, set())
    assert sweeper.found == []
    assert run("check", "--node").stdout == "monarchfs: OK: 1 mount\n"
    os.kill(supervisor := _supervisor(root), signal.SIGSTOP)
    done = run("check", "--node")
    assert (done.returncode, "FAILED: the daemon" in done.stdout) == (1, True)
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: f"{root} has died: monarchfs gc" in run("check").stdout, "the check")
    assert node.mounts() == [root], "its jobs are to get errors, not an empty directory"
    script("epilog", "3")
    assert node.mounts() == node.left() == []
    done = run("report", "12.3", "--dir", f"{node.path}/reports")
    assert done.stdout.startswith("job 12.3 ")
    assert "the mount ended before the job did: its daemon was killed" in done.stdout
    # Whatever is wrong, the job knows a way to its data.
    words = ("--job", "1[2].x", "--user", "no such user", "--dataset", str(data), "--json")
    done = run("job", "begin", *words, "--config", f"{node.path}/site.toml")
    assert json.loads(done.stdout)["environment"]["MONARCHFS_ROOT"] == str(data)


def test_run_shows_the_mount_of_its_own_job_alone(node: Node) -> None:
    """Another one's ends with that job."""
    data, report = node.dataset(), node.path / "report"
    root = node.begin(1, f"monarchfs={data}")
    words = [*MONARCHFS, "run", f"{data}", "--user", "nobody", *node.work.storage()]
    for mine, view in ((root, "existing"), ("/another", "own")):
        command = [*words, "--json", f"{report}", "--", "true"]
        execute(command, env={**os.environ, "MONARCHFS_DATA_X": mine}, check=True)
        assert json.loads(report.read_text())["view"] == view
    node.end(1)


def recordings_of(node: Node) -> list[Path]:
    return list((node.path / "cache" / "recordings").glob("*"))


def recorded_bytes(node: Node) -> int:
    return sum(file.stat().st_size for file in (node.path / "cache/recordings").glob("1.*/rec"))


def test_where_the_site_records_a_report_gets_a_verdict_and_the_recording(node: Node) -> None:
    node.configure('record = "16M"')
    data = node.dataset(files=30)
    root = node.begin(1, f"monarchfs={data}:freshness=open")
    wait_for(lambda: recorded_bytes(node), "the recorder")
    for _ in range(3):
        node.read(root)
    node.end(1)
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


def test_a_long_job_gets_its_verdict_though_the_recording_was_full_and_is_old(node: Node) -> None:
    node.configure('record = "8K"')
    data = node.dataset(files=100)
    root = node.begin(1, f"monarchfs={data}:freshness=open")
    wait_for(lambda: recorded_bytes(node), "the recorder")

    def full() -> int:
        node.read(root)
        return execute(["pgrep", "-f", f"record {root} "]).returncode

    wait_for(full, "the recorder to end", 60)
    (facts,) = (node.path / "cache" / "recordings").glob("1.*.json")
    os.utime(facts, LONG_AGO)
    node.begin(2, f"monarchfs={data}")
    assert not (node.path / "reports").exists(), "it is not over"
    node.end(1, 2)
    wait_for(lambda: "verdict" in node.report(1)[0], "the verdict", 60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_recorder_that_fails_delays_no_epilog(node: Node, number: signal.Signals) -> None:
    node.configure("record = true")
    node.begin(1, f"monarchfs={node.dataset()}")
    wait_for(lambda: recorded_bytes(node), "the recorder")
    found = execute(["pgrep", "-f", f"record {node.path}/run/.*/rec"], check=True)
    (pid,) = map(int, found.stdout.split())
    assert os.stat(f"/proc/{pid}").st_uid == NOBODY.pw_uid
    os.kill(pid, number)
    watch = Stopwatch()
    node.end(1)
    watch.check(8)
    assert "verdict" not in node.report(1)[0]
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "no verdict" in node.log(), "the log", 60)
    wait_for(lambda: not recordings_of(node), "nothing to be left")


def test_a_dataset_that_fails_spoils_no_other_and_two_names_are_one_mount(node: Node) -> None:
    data, secret = node.dataset(), node.dataset("secret")
    secret.chmod(0o700)
    (node.path / "lustre" / "link").symlink_to(data)
    missing = f"{node.path}/lustre/missing"
    node.job("prolog", 1, f"monarchfs={missing},{data},/etc,{secret},{node.path}/lustre/link")
    (root,) = node.mounts()
    assert node.environment(1) == {
        "MONARCHFS_ROOT": missing,
        "MONARCHFS_DATA_MISSING": missing,
        "MONARCHFS_DATA_DATA": root,
        "MONARCHFS_DATA_ETC": "/etc",
        "MONARCHFS_DATA_SECRET": str(secret),
        "MONARCHFS_DATA_LINK": root,
        "MONARCHFS_WARNING": (
            f"{missing}: No such file or directory (for nobody); /etc: this job may ask for what"
            f" lies below {node.path}/lustre; {secret}: Permission denied (for nobody)"
        ),
    }
    node.end(1)
    assert sorted((one["source"], one["mounted"]) for one in node.report(1)) == sorted(
        [(str(data), True), (missing, False), ("/etc", False), (str(secret), False)]
    )


@pytest.mark.parametrize(
    ("systemd_says", "ours_ran"),
    [("Failed to connect to bus", True), ("monarchfs: there is no room", False)],
    ids=["for reasons of its own", "for what the command says"],
)
def test_where_no_scope_can_be_had(
    systemd_says: str, ours_ran: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without systemd it is done without; tests/mount/test_systemd.py has one where it is."""
    tool, ran = tmp_path / "systemd-run", tmp_path / "ran"
    tool.write_text(f"#!/bin/sh\necho {systemd_says} >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(daemon, "_BOOTED", str(tmp_path))
    monkeypatch.setattr(daemon, "_SYSTEMD_RUN", str(tool))
    monkeypatch.setattr(daemon, "command_of_ours", lambda *_words: ["touch", str(ran)])
    dataset = Dataset("/source", os.open(tmp_path, os.O_PATH | os.O_CLOEXEC))
    about: dict[str, Any] = {"tiers": [], "state_dir": "/state", "options": [], "log_file": None}
    with nullcontext() if ours_ran else pytest.raises(OperationError, match=r"^there is no room$"):
        until = time.monotonic() + 10
        daemon.start(dataset, "/mountpoint", USER, **about, unit="x", deadline=until)
    assert ran.exists() is ours_ran
    dataset.close()


def test_a_link_out_of_the_roots_is_not_mounted(node: Node) -> None:
    link = node.path / "lustre" / "link"
    link.symlink_to("/etc")
    assert node.begin(1, f"monarchfs={link}") == str(link)
    assert node.mounts() == []
    assert "in none of the roots" in node.environment(1)["MONARCHFS_WARNING"]
    node.end(1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda node: node.configure("nonsense = 1"), "this key is not known"),
        (lambda node: (node.path / "site.toml").write_text("= 1"), "not TOML"),
        (lambda node: (node.path / "site.toml").unlink(), "there is no configuration"),
        (lambda node: (node.path / "site.toml").chmod(0o666), "can be written by others"),
    ],
    ids=["key", "toml", "none", "mode"],
)
def test_a_site_that_is_configured_wrongly_fails_no_job(node: Node, spoil: Any, said: str) -> None:
    """And what was mounted before is unmounted."""
    data = node.dataset()
    node.read(node.begin(1, f"monarchfs={data}"))
    spoil(node)
    assert node.begin(2, f"monarchfs={data}") == str(data)
    assert "prolog: job 2: no job gets a mount: " in node.log()
    assert said in node.log()
    node.end(1, 2)
    assert node.report(1)[0]["mounted"]


def test_a_site_that_was_never_configured_right_fails_no_job(node: Node) -> None:
    (node.path / "site.toml").unlink()
    # Where it logs is not known then: it is the usual place.
    usual = Path("/var/log/monarchfs/slurm.log")
    existed, size = usual.parent.exists(), usual.stat().st_size if usual.exists() else 0
    data, told = node.dataset(), Path("/run/monarchfs/slurm/env/4000000001")
    made = next((one for one in reversed(told.parents[:3]) if not one.exists()), told)
    node.job("prolog", 4_000_000_001, f"monarchfs={data}")
    assert f"export MONARCHFS_ROOT={data}\n" in told.read_text()
    shutil.rmtree(made) if made.is_dir() else made.unlink()
    with open(usual, encoding="utf-8") as log:
        log.seek(size)
        assert "there is no configuration" in log.read()
    if not existed:
        shutil.rmtree(usual.parent)
    assert node.mounts() == []


def test_wrong_usage_is_told_and_scripts_succeed_whatever_happens() -> None:
    assert_one_line(run("job", "prolog"), 2, "monarchfs: there is no SLURM_JOB_ID")
    assert_one_line(run("job", "prolog", user="nobody"), 2)
    assert_one_line(run("job", "begin", user="nobody"), 2, "write monarchfs run SOURCE -- COMMAND")
    assert_one_line(run("job", "end", "--job", "../x"), 2, "monarchfs: '../x' is no job")
    assert_one_line(
        run("report", "39_2"), 1, "give the number that sacct -X -n -o jobidraw -j 39_2"
    )
    assert run("job", "nonsense").returncode == 2
    for name in ("prolog", "epilog", "task_prolog"):
        for environment in ({}, {"MONARCHFS": "/nonexistent"}, {"SLURM_JOB_ID": "../../etc/x"}):
            done = execute([SCRIPTS / name], env={"PATH": "/usr/bin:/bin", **environment})
            assert (done.returncode, done.stdout) == (0, ""), name


def test_a_wiped_cache_is_gone_after_the_last_job(node: Node) -> None:
    node.configure("wipe = true")
    data = node.dataset()
    for job in (1, 2):
        node.read(node.begin(job, f"monarchfs={data}:prefetch=all"))
    node.job("epilog", 1)
    assert len(os.listdir(node.tier)) == 1
    node.end(2)
    wait_for(lambda: not os.listdir(node.tier), "the copies to be removed")
    wait_for(lambda: not os.listdir(node.caches), "the index to be removed")


def test_unmounted_caches_make_room_within_the_budget(node: Node) -> None:
    node.configure(f'budget = ["{node.tier}=150M"]', size="60M")
    sets = [node.dataset(f"data{number}") for number in range(3)]
    for number, data in enumerate(sets):
        node.read(node.begin(number + 1, f"monarchfs={data}"))
        if number < 2:
            node.end(number + 1)
    keys = [share_key(str(data), USER) for data in sets]
    # A cache that holds nearly nothing is no obstacle; make the first one a large one.
    noted = node.caches / keys[0] / "cache.json"
    write_record(str(noted), {**json.loads(noted.read_text()), "used": {str(node.tier): 100 << 20}})
    node.begin(4, f"monarchfs={sets[1]}")
    wait_for(lambda: keys[0] not in os.listdir(node.tier), "the oldest cache to go")
    left = {name for name in os.listdir(node.tier) if not name.startswith(".")}
    assert left == {keys[1], keys[2]}
    # Both mounted ones hold 120M of 150M: a third gets what is left.
    third = run("status", node.begin(5, f"monarchfs={sets[0]}"), "--json")
    assert json.loads(third.stdout)["tiers"][0]["capacity_bytes"] <= 30 << 20
    other = node.dataset("other")
    assert node.begin(6, f"monarchfs={other}") == str(other)
    assert "used up" in node.environment(6)["MONARCHFS_WARNING"]
    node.end(3, 4, 5, 6)


def test_a_dead_daemon_is_replaced_and_one_that_hangs_left_to_those_who_use_it(node: Node) -> None:
    data = node.dataset()
    root = node.begin(1, f"monarchfs={data}")
    os.kill(_supervisor(root), signal.SIGKILL)
    assert node.begin(2, f"monarchfs={data}") == root
    node.read(root)
    pid = _supervisor(root)
    node.configure(deadline=6)
    os.kill(pid, signal.SIGSTOP)
    began = Stopwatch()
    assert node.begin(3, f"monarchfs={data}") == str(data)
    began.check(6)
    for job in (1, 2, 3):
        began = Stopwatch()
        node.job("epilog", job)
        began.check(6)
    assert [node.report(job)[0]["ended_early"] for job in (1, 2)] == [True, False]
    assert node.mounts() == node.left() == []
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the daemon to go")


CALLS = "rename,mkdir,mkdirat,unlink,rmdir,flock,clone,fork,vfork"


def _swept(node: Node) -> bool:
    if node.mounts() or node.left():
        subprocess.run(node.command("sweep", 1), check=True, timeout=60)
    return not node.mounts() and not node.left()


def ends_before(step: int, command: list[str]) -> bool:
    """Runs a command that is killed at this call of `CALLS`; whether it made fewer."""
    strace = ["strace", "-qq", "-o", "/dev/null", "-e", f"trace={CALLS}"]
    strace += ["-e", f"inject={CALLS}:signal=KILL:when={step}"]
    return execute([*strace, *command]).returncode == 0


@surroundings.program("strace")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("which", ["prolog", "epilog"])
def test_a_prolog_and_an_epilog_may_be_killed_at_any_point(node: Node, which: str) -> None:
    """Killed at its first call that changes something, at the second, and so on: each time the
    (next) epilog leaves nothing behind, and the next job is served."""
    comment = f"monarchfs={node.dataset()}"
    for step in itertools.count(1):
        job = 10 * step
        if which == "epilog":
            node.begin(job, comment)
            assert node.mounts()
        survived = ends_before(step, node.command(which, job, comment))
        if which == "prolog" and step % 5 == 0:
            root = node.begin(job + 1, comment)
            assert root.startswith(str(node.path / "run")), node.environment(job + 1)
            node.read(root)
            node.job("epilog", job + 1)
        node.job("epilog", job)
        # What an epilog found without a job it leaves to a process of its own. A mount that was
        # under way when its prolog was killed may come about after all; the next sweep finds it.
        gone = _swept if which == "prolog" else lambda node: not node.mounts() and not node.left()
        wait_for(lambda: gone(node), f"all to be gone after step {step}")  # noqa: B023
        if survived:
            break
    assert step > (6 if which == "prolog" else 5), "it was killed too rarely"


def a_cache(node: Node, source: str, uid: int, *, days: float, size: int = 0) -> str:
    """An unmounted cache that was used so many days ago; its key."""
    prepare(node.layout)
    key = share_key(source, User("someone", uid, 100, (100,)))
    (node.tier / key / "0123456789abcdef").mkdir(parents=True)
    (node.caches / key / "state").mkdir(parents=True)
    record = {
        **{"source": source, "user": "someone", "uid": uid, "gid": 100, "groups": [100]},
        **{"granted": {str(node.tier): size}, "used": {str(node.tier): size}},
        "last_used_unix_seconds": time.time() - days * 86400,
    }
    write_record(f"{node.layout.cache(key)}/cache.json", record)
    return key


def test_what_a_user_plants_is_not_followed(node: Node) -> None:
    """A cache that goes takes nothing along that a user linked into it, and goes however deep it
    is."""
    precious = node.path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    key = a_cache(node, "/data", NOBODY.pw_uid, days=1)
    (node.tier / key / "0123456789abcdef" / "link").symlink_to(precious)
    (node.tier / key / "0123456789abcdef" / "lock").symlink_to(precious / "file")
    (node.caches / key / "state").rmdir()
    (node.caches / key / "state").symlink_to(precious)
    deep = os.open(node.tier / key, os.O_PATH)
    for _ in range(1500):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_PATH, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    assert caches.discard(node.layout, key, "test")
    subprocess.run(node.command("sweep", 1), check=True, timeout=60)
    assert os.listdir(node.tier) == []
    assert (precious / "file").read_text() == "keep me"


@pytest.mark.parametrize(
    ("held", "resting", "wanted", "gone"),
    [
        (0, {"a": (1.0, 50)}, 50, []),
        (0, {"a": (1.0, 51)}, 50, ["a"]),
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
    data = node.dataset()
    root = node.begin(1, f"monarchfs={data}")
    key = share_key(str(data), USER)
    assert not caches.discard(node.layout, key, "test")
    # Also where what is known of the mount was lost.
    shutil.rmtree(Share(node.layout, key).directory, ignore_errors=True)
    assert not caches.discard(node.layout, key, "test")
    node.read(root)
    assert run("umount", root).returncode == 0
    assert caches.discard(node.layout, key, "test")


LONG_AGO = (1.6e9, 1.6e9)
NOBODYS_UID = 3_999_999_999
"""Of no user."""


def swept(node: Node, *, remove: bool = True) -> list[tuple[str, str, bool]]:
    site = read_site(f"{node.path}/site.toml")
    sweeper = Sweeper(remove=remove)
    sweeper.budget(site)
    sweeper.caches(site)
    assert {one.error for one in sweeper.found} <= {None}
    return [(one.kind, one.path, one.removed) for one in sweeper.found]


def gone_at_once(node: Node, cache: str, *kept: str) -> None:
    found = swept(node)
    assert found[0] == ("cache", node.layout.cache(cache), True)
    assert {kind for kind, _, _ in found[1:]} <= {"trash"}
    swept(node)
    assert sorted(os.listdir(node.tier)) == names_in(str(node.caches)) == sorted(kept)
    assert swept(node) == []


def test_gc_removes_caches_of_users_that_are_gone(node: Node) -> None:
    fresh = a_cache(node, "/lustre/fresh", NOBODYS_UID, days=0.5)
    old = a_cache(node, "/lustre/old", NOBODY.pw_uid, days=500)
    gone = a_cache(node, "/lustre/gone", NOBODYS_UID, days=1.5)
    # A user whom one look does not find may be found by the next.
    assert swept(node) == []
    record = f"{node.caches}/.gone"
    assert set(read_record(record) or ()) == {str(NOBODYS_UID)}
    write_record(record, {str(NOBODYS_UID): 0.0, str(NOBODY.pw_uid): 0.0})
    assert swept(node, remove=False) == [("cache", node.layout.cache(gone), False)]
    assert os.path.exists(node.layout.cache(gone))
    gone_at_once(node, gone, fresh, old)


def test_gc_keeps_to_the_budget(node: Node) -> None:
    node.configure(f'budget = ["{node.tier}=100M"]')
    old = a_cache(node, "/lustre/old", NOBODY.pw_uid, days=9, size=60 << 20)
    new = a_cache(node, "/lustre/new", NOBODY.pw_uid, days=3, size=60 << 20)
    # By the word of a user's worker, which costs others nothing.
    for said in (-(10**18), math.inf, 10**18):
        tier = {"path": f"{node.tier}/{new}", "used_bytes": said}
        caches.close_cache(node.layout, new, {"tiers": [tier]})
    gone_at_once(node, old, new)


def test_a_prolog_measures_what_is_not_known_once_and_in_time(node: Node, caplog: Any) -> None:
    node.configure(f'budget = ["{node.tier}=100M"]', size="60M")
    site, new = read_site(f"{node.path}/site.toml"), share_key("/new", USER)
    key = a_cache(node, "/lustre/old", NOBODY.pw_uid, days=3, size=60 << 20)
    path = f"{site.cache(key)}/cache.json"
    unknown = {**(read_record(path) or {}), "used": None}
    # Without time it counts as what it was granted, and makes room.
    for seconds, used in ((60, {str(node.tier): 0}), (0, None)):
        write_record(path, unknown)
        caches.open_cache(Share(site, new), "/new", USER, time.monotonic() + seconds)
        assert (read_record(path) or {}).get("used") == used
        is_roots = node.tier.stat().st_dev == os.stat("/").st_dev
        assert ("tier shares its file system with /: mount the disk" in caplog.text) == is_roots
    assert not os.path.exists(path)


def test_the_cache_command_knows_caches_of_jobs(node: Node) -> None:
    data = node.dataset()
    node.read(node.begin(1, f"monarchfs={data}:prefetch=all"))
    site = ("--config", f"{node.path}/site.toml")
    done = run("cache", "remove", str(data), "--yes", *site)
    assert (done.returncode, "in use" in done.stderr) == (1, True), done.stderr
    node.end(1)
    listed = json.loads(run("cache", "list", "--json", *site).stdout)["caches"]
    (row,) = [one for one in listed if one["source"] == str(data)]
    assert (row["user"], row["in_use"]) == ("nobody", False)
    assert row["tiers"][0]["files"] > 0
    done = run("cache", "remove", str(data), "--yes", *site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(node.tier) == os.listdir(node.caches) == []


def test_gc_removes_what_plain_mounts_of_gone_users_left(node: Node) -> None:
    prepare(node.layout)
    write_record(f"{node.caches}/.gone", {str(NOBODYS_UID): 0.0})
    cache = node.path / "cache"
    a, b, c = ("a" * 16, "b" * 16, "c" * 16)
    for name, uid in ((a, NOBODYS_UID), (b, NOBODY.pw_uid), (c, NOBODYS_UID)):
        for path in (cache / "state" / name, cache / f"{name}-{name}"):
            path.mkdir(parents=True)
            os.chown(path, uid, uid)
            os.utime(path, LONG_AGO)
    (cache / "precious").mkdir()
    os.utime(cache / "precious", LONG_AGO)
    lock = cache / "state" / c / "lock"
    lock.touch()
    with open(lock, "rb") as held:
        os.utime(lock.parent, LONG_AGO)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert {path for _, path, _ in swept(node)} == {f"{cache}/state/{a}", f"{cache}/{a}-{a}"}
    assert sorted(os.listdir(cache / "state")) == [b, c]
    assert sorted(os.listdir(cache)) == [f"{b}-{b}", f"{c}-{c}", "precious", "slurm", "state"]


def test_gc_removes_copies_that_nobody_counts(node: Node) -> None:
    key = a_cache(node, "/lustre/data", NOBODY.pw_uid, days=0)
    orphan = node.tier / ("e" * 20)
    (orphan / "0123456789abcdef").mkdir(parents=True)
    (orphan / "link").symlink_to(node.path / "lustre")
    precious = node.dataset("precious")
    (node.tier / "somebody's").mkdir()
    assert swept(node) == [("copies", str(orphan), True)]
    assert sorted(os.listdir(node.tier)) == sorted([key, "somebody's"])
    assert len(os.listdir(precious)) > 0


def test_what_is_mounted_is_shared_though_its_source_hangs(node: Node) -> None:
    backing = node.path / "backing"
    backing.mkdir()
    trees.dataset(backing, files=2)
    source = node.work.faulty_source(backing)
    node.configure(roots="")
    root = node.begin(1, f"monarchfs={source.path}:prefetch=all")
    assert [root] == node.mounts()
    node.read(root)
    source.faults(hang=["* *"])
    began = Stopwatch()
    node.job("prolog", 2, f"monarchfs={source.path}")
    began.check(5)
    variable = f"MONARCHFS_DATA_{source.path.name.upper()}"
    assert node.environment(2) == {"MONARCHFS_ROOT": root, variable: root}
    source.faults()
    node.end(1, 2)


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
    assert execute(as_user(USER.name, ["cat", f"{point}/which"]), check=True).stdout == "inside"
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
