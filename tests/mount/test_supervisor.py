"""The supervisor's life around a fake worker: mounting, asking, dying, unmounting; and one worker
after another: who waits gets his answer, or an error. Real ones that die are in
`tests.mount.test_restart`."""

import json
import os
import pwd
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarchfs.control import client
from monarchfs.fuse.mountinfo import find_mount
from monarchfs.supervisor.vital_signs import DEAD_SILENT_SECONDS
from monarchfs.types import OperationError
from tests.support.fake_mounts import (
    NOBODY,
    Area,
    assert_unmounted,
    interpreter_for,
    is_gone,
    kill_worker,
    registered,
    run_as_owner,
    somebody_inside,
    start_as_owner,
    status,
    umount,
)
from tests.support.mounting import assert_one_line, fuse_mounts, requires_mounts, wait_for
from tests.support.programs import execute
from tests.support.surroundings import requires_namespaces
from tests.support.timing import Stopwatch

pytestmark = requires_mounts


@pytest.fixture
def work(fake_area: Area) -> Iterator[Area]:
    """What is mounted in the end can be unmounted."""
    yield fake_area
    if fuse_mounts(str(fake_area.path)):
        umount(fake_area, "--timeout", "3")
    assert_unmounted(fake_area)


def test_a_mount_from_start_to_end(work: Area) -> None:
    work.mount("--prefetch", "none", "--log-file", "log", "--log-level", "info")
    mounted = find_mount(f"{work.path}/mnt")
    assert mounted is not None
    assert (mounted.fstype, mounted.source) == ("fuse.monarchfs", f"{work.path}/src")
    assert {"ro", "nosuid", "nodev"} <= set(mounted.options.split(","))
    assert "allow_other" not in mounted.super_options
    report = status(work)
    assert report["state"] == "serving"
    assert report["environment"] == ["LANG", "PATH"]
    mounts = json.loads(work.run("status", "--json").stdout)["mounts"]
    assert (f"{work.path}/mnt", "serving") in [(m["mountpoint"], m["state"]) for m in mounts]
    assert "state     serving" in work.run("status", "mnt").stdout
    assert run_as_owner(work, "stat", f"{work.path}/mnt") == 0
    assert umount(work) < 5
    assert_unmounted(work)
    logged = (work.path / "log").read_text()
    assert f"serving {work.path}/src on {work.path}/mnt" in logged
    assert "unmounted" in logged
    done = work.run("umount", "mnt")
    assert (done.returncode, done.stdout) == (0, f"{work.path}/mnt is not mounted\n")


def test_through_a_link(root_work: Area) -> None:
    """Its worker still syncs at the end, and is waited for: killed meanwhile, it would hold the
    tier's file system."""
    (root_work.path / "link").symlink_to("mnt")
    done = root_work.run("mount", "src", "link", *root_work.storage, mode="late")
    assert (done.returncode, done.stderr) == (0, "")
    assert fuse_mounts(str(root_work.path)) == [f"{root_work.path}/mnt"]
    assert status(root_work, "link")["state"] == "serving"
    started = Stopwatch()
    assert umount(root_work, "--timeout", "10", name="link") < 5
    assert started.elapsed() > 2
    assert list(root_work.path.rglob("synced"))
    assert_unmounted(root_work)


def test_the_umask_of_a_service_shuts_nobody_out(root_work: Area) -> None:
    """What all of them pass through is as open as without it, and what is one user's is not."""
    work = root_work
    command = work.command("mount", "src", "mnt", *work.storage, "--user", NOBODY)
    strict = ["sh", "-c", 'umask 077; exec "$@"', "sh", *command]
    subprocess.run(strict, check=True, cwd=work.path, env=work.environment, timeout=30)
    (dataset,) = (work.path / "tier").iterdir()
    assert dataset.parent.stat().st_mode & 0o777 == 0o755
    assert dataset.stat().st_mode & 0o777 == 0o700


def test_a_second_mount_on_the_same_place_or_with_its_state_is_refused(root_work: Area) -> None:
    root_work.mount()
    (root_work.path / "other").mkdir()
    in_use = f"is in use by the mount of {root_work.path}/src on {root_work.path}/mnt: "
    for point, words in (("mnt", "already a monarchfs mount"), ("other", in_use)):
        done = root_work.run("mount", "src", point, *root_work.storage)
        assert_one_line(done, 1, words, f"monarchfs umount {root_work.path}/mnt")
    (root_work.path / "src2").mkdir()
    mount = ("mount", "src2", "other", "--tier", "mnt=1G", "--state-dir", "state2")
    assert_one_line(root_work.run(*mount), 2, "network file system (fuse.monarchfs)")
    umount(root_work)
    assert (root_work.path / "state" / "index").exists()


def test_umount_of_a_busy_mount_waits_for_most_of_its_time_and_says_so(root_work: Area) -> None:
    root_work.mount()
    with somebody_inside(root_work) as process:
        started = Stopwatch()
        done = root_work.run("umount", "mnt", "--timeout", "5")
        assert started.elapsed() > 2.9, "3 of the 5 seconds, and then what it takes to end"
        assert started.seconds() < 5.5
        assert fuse_mounts(str(root_work.path)) == []
    assert (done.returncode, done.stdout) == (0, "")
    waits, end = done.stderr.splitlines()
    assert waits.startswith(
        f"monarchfs: {root_work.path}/mnt is in use by sh ({process.pid}): waiting"
    )
    assert end.endswith("/mnt was in use to the end: who still uses it gets errors")
    assert_unmounted(root_work)


def test_umount_waits_for_those_who_leave_in_time(root_work: Area) -> None:
    root_work.mount()
    supervisor = registered(root_work).entry.supervisor_pid
    with somebody_inside(root_work) as process:
        asked = subprocess.Popen(
            root_work.command("umount", "mnt"), cwd=root_work.path, env=root_work.environment
        )
        log = root_work.path / "state" / "supervisor.log"
        wait_for(lambda: "asked to unmount" in log.read_text(), "the supervisor to be asked")
        assert fuse_mounts(str(root_work.path)) == [f"{root_work.path}/mnt"]
        process.kill()
        assert asked.wait(10) == 0
    assert is_gone(supervisor)
    assert "mnt: unmounted\n" in log.read_text()
    assert_unmounted(root_work)


def test_unmounted_by_somebody_else(work: Area) -> None:
    work.mount()
    supervisor = registered(work).entry.supervisor_pid
    command = ["umount"] if work.user is None else ["fusermount3", "-u"]
    assert run_as_owner(work, *command, f"{work.path}/mnt") == 0
    wait_for(lambda: is_gone(supervisor), "the supervisor to notice", 10)
    assert_unmounted(work)


def test_an_aborted_mount_is_unmounted(root_work: Area) -> None:
    """Left there, it would give everybody errors."""
    root_work.mount()
    with somebody_inside(root_work):
        subprocess.run(["umount", "-f", root_work.path / "mnt"], check=False)
        wait_for(lambda: not fuse_mounts(str(root_work.path)), "it to be unmounted")
    assert_unmounted(root_work)
    assert "somebody aborted the connection of" in log_of(root_work)


def test_a_worker_that_crashed_makes_the_index_suspect(work: Area) -> None:
    """One that was killed says nothing about it."""
    suspect = work.path / "state" / "suspect"
    for number in (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV):
        work.mount()
        suspect.unlink(missing_ok=True)
        kill_worker(work, number)
        umount(work)
        assert_unmounted(work)
        assert suspect.exists() is (number != signal.SIGKILL)
    owner = os.geteuid() if work.user is None else pwd.getpwnam(work.user).pw_uid
    st = suspect.lstat()
    assert (st.st_uid, st.st_mode & 0o777, st.st_size) == (owner, 0o600, 0)


def test_a_suspect_index_of_another_user_is_marked_as_that_user(root_work: Area) -> None:
    """A link that the user planted there leads nowhere."""
    work, nobody = root_work, pwd.getpwnam(NOBODY)
    work.python = interpreter_for(NOBODY)
    work.mount("--user", NOBODY)
    target = work.path / "target"
    target.write_text("of root")
    (work.path / "state" / "suspect").symlink_to(target)
    kill_worker(work, signal.SIGSEGV)
    assert target.read_text() == "of root"
    log = (work.path / "state" / "supervisor.log").read_text()
    assert "cannot mark the index as suspect" in log
    (work.path / "state" / "suspect").unlink()
    kill_worker(work, signal.SIGSEGV)
    assert (work.path / "state" / "suspect").lstat().st_uid == nobody.pw_uid


@pytest.mark.parametrize("stage", ["before", "after"])
def test_a_worker_that_crashes_at_the_start_gets_a_successor(root_work: Area, stage: str) -> None:
    """Two that crash are enough."""
    mount = ("mount", "src", "mnt", *root_work.storage)
    suspect = root_work.path / "state" / "suspect"
    done = root_work.run(*mount, mode=f"segv {stage}")
    assert (done.returncode, done.stderr.count("starting another one")) == (0, 1), done.stderr
    assert suspect.exists()
    report = status(root_work)
    assert (report["state"], report["worker"]["restarts"]) == ("serving", 1)
    assert run_as_owner(root_work, "stat", f"{root_work.path}/mnt") == 0
    umount(root_work)
    suspect.unlink()
    done = root_work.run(*mount, mode=f"segv {stage} always")
    assert (done.returncode, done.stderr.count("starting another one")) == (1, 1)
    assert "was killed by signal 11 while it started" in done.stderr.splitlines()[-1]
    assert suspect.exists()
    root_work.assert_nothing_runs()


def test_a_stopped_supervisor_does_not_stop_umount(work: Area) -> None:
    work.mount()
    os.kill(registered(work).entry.supervisor_pid, signal.SIGSTOP)
    assert umount(work, "--timeout", "3") < 6
    assert_unmounted(work)


def start_mount(
    work: Area, *before: str, mode: str = "serve", options: Sequence[str] = ("-f",)
) -> subprocess.Popen[str]:
    """In the foreground."""
    command = [*before, *work.command("mount", "src", "mnt", *work.storage, *options, mode=mode)]
    return subprocess.Popen(
        command, cwd=work.path, env=work.environment, stderr=subprocess.PIPE, text=True
    )


def test_in_the_foreground(work: Area) -> None:
    """Signals that nohup ignores unmount nothing."""
    for before, ends in (((), signal.SIGINT), (("env", "--ignore-signal=INT,HUP"), signal.SIGTERM)):
        process = start_mount(work, *before)
        assert process.stderr is not None
        serving = f"monarchfs: serving {work.path}/src on {work.path}/mnt\n"
        assert process.stderr.readline() == serving
        if before:
            for number in (signal.SIGINT, signal.SIGHUP):
                process.send_signal(number)
            assert status(work)["state"] == "serving"
        process.send_signal(ends)
        _, rest = process.communicate(timeout=15)
        assert process.returncode == 0
        assert f"{ends.name}: unmounting" in rest
        assert rest.count("SIG") == 1
        assert_unmounted(work)


@pytest.mark.parametrize(("options", "code"), [(["-f"], 1), ([], -signal.SIGINT)])
def test_a_signal_at_the_start_ends_it(root_work: Area, options: list[str], code: int) -> None:
    before = root_work.files()
    process = start_mount(root_work, mode="silent", options=options)
    wait_for(lambda: (root_work.path / "state" / "index").exists(), "the worker")
    process.terminate()
    _, complaint = process.communicate(timeout=15)
    assert process.returncode == code
    assert "interrupted" in complaint
    assert complaint.endswith(": nothing was mounted\n")
    root_work.assert_nothing_runs()
    # The index is the worker's, so its directory stays.
    left = {os.path.relpath(path, root_work.path) for path in root_work.files() - before}
    assert left - {"state/worker.log"} == {"state", "state/index", "state/lock"}


def test_a_mount_is_taken_back_if_who_waits_for_it_is_killed(root_work: Area) -> None:
    with start_mount(root_work, options=[]) as process:
        (daemon,) = wait_for(psutil.Process(process.pid).children, "the daemon")
        daemon.suspend()
        process.kill()
        process.wait()
        with suppress(psutil.NoSuchProcess):  # it was one that looked at the source, before it
            daemon.resume()
    wait_for(lambda: is_gone(daemon.pid), "the daemon to end")
    assert_unmounted(root_work)


def test_another_users_mount_is_not_asked_nor_called_dead(work: Area) -> None:
    work.mount()
    (work.path / "list").write_text("1\tsome\n")
    owner, other = ("root", NOBODY) if work.user is None else (work.user, "daemon")
    stranger = Area(work.path, other, interpreter_for(other))
    report = json.loads(stranger.run("status", "mnt", "--json").stdout)
    assert report["state"] == "not yours"
    assert report["error"] == f"the mount belongs to {owner}: only they and root can ask it"
    if work.user is None:  # the directory for its socket is closed to the other one
        commands = [["umount", "mnt"]]
    else:
        checks = json.loads(stranger.run("doctor", "--quick", "--json").stdout)["checks"]
        assert next(one for one in checks if one["name"] == "mounts")["others"] >= 1
        assert not any(one.get("mountpoint") == f"{work.path}/mnt" for one in checks)
        done = stranger.run("mount", "src", "mnt", *work.storage)
        assert done.returncode == 1
        assert done.stderr.endswith(": it belongs to another user: name another mount point\n")
        names = ("umount", "restart", "warm", "refresh", "evict", "top", "peers")
        commands = [
            *([name, "mnt"] for name in names),
            *([name, "mnt", "list"] for name in ("pin", "unpin", "weigh", "order")),
            *(["why", "mnt/some"], ["record", "mnt", "--output", "no/file"]),
        ]
    for command in commands:
        done = stranger.run(*command)
        assert (done.returncode, done.stdout) == (1, "")
        belongs = f"the mount on {work.path}/mnt belongs to {owner}"
        assert done.stderr == f"monarchfs: {belongs}: ask them, or use root\n"
    assert status(work)["state"] == "serving"


def test_a_mount_without_a_registration(root_work: Area) -> None:
    """Nor is that of a dead daemon its own, whose connection's number the kernel gave it."""
    root_work.mount()
    found = registered(root_work)
    told = json.loads(Path(found.stem + ".json").read_text())
    dead = {**told, "source": "/of/another", "mountpoint": "/gone", "start_ticks": 1}
    stale = Path("/run/monarchfs") / root_work.path.name
    stale.with_suffix(".json").write_text(json.dumps(dead))
    for suffix in (".sock", ".json"):
        os.unlink(found.stem + suffix)
    done = root_work.run("status", "mnt", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "unknown")
    assert not stale.with_suffix(".json").exists()
    umount(root_work)
    assert_unmounted(root_work)


# Known by its connection, wherever it is, and not by the path where it was made


@pytest.mark.parametrize("how", ["umount", "signal"])
def test_a_mount_that_was_renamed_is_found_and_unmounted(work: Area, how: str) -> None:
    before, after = work.path / "before", work.path / "after"
    before.mkdir()
    (work.path / "mnt").rename(before / "mnt")
    done = work.run("mount", "src", "before/mnt", *work.storage)
    assert (done.returncode, done.stderr) == (0, "")
    before.rename(after)
    supervisor = registered(work).entry.supervisor_pid
    if how == "umount":
        assert status(work, "after/mnt")["state"] == "serving"
        assert str(before) not in work.run("status").stdout
        assert umount(work, name="after/mnt") < 3
        assert "by force" not in (work.path / "state" / "supervisor.log").read_text()
    else:
        os.kill(supervisor, signal.SIGTERM)
    wait_for(lambda: is_gone(supervisor), "the supervisor to end", 10)
    assert_unmounted(work)


def bind(work: Area, name: str = "copy") -> None:
    (work.path / name).mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", work.path / "mnt", work.path / name], check=True)


def test_a_bind_mount_is_not_the_mount_and_stands_for_it_when_it_is_gone(root_work: Area) -> None:
    work = root_work
    work.mount()
    bind(work)
    assert status(work, "copy")["state"] == "serving"
    umount(work, name="copy")
    assert fuse_mounts(str(work.path)) == [f"{work.path}/mnt"]
    assert status(work)["state"] == "serving"
    assert os.stat(work.path / "mnt")
    bind(work)
    umount(work)  # with what was bound
    assert_unmounted(work)
    work.mount()
    bind(work)
    supervisor = registered(work).entry.supervisor_pid
    subprocess.run(["umount", work.path / "mnt"], check=True)
    assert status(work, "copy")["worker"]["pid"] > 0
    umount(work, name="copy")
    assert is_gone(supervisor)
    assert_unmounted(work)


def test_what_lies_over_a_mount_is_said_and_left_alone(root_work: Area) -> None:
    """And of another mount, made over it, and the first both are known."""
    work = root_work
    work.mount()
    first = registered(work).entry
    subprocess.run(["mount", "-t", "tmpfs", "over", work.path / "mnt"], check=True)
    done = work.run("umount", "mnt")
    assert (done.returncode, "is hidden by another mount" in done.stderr) == (1, True)
    (work.path / "src2").mkdir()
    storage = ["--tier", f"{work.path}/tier2=10M", "--state-dir", f"{work.path}/state2"]
    done = work.run("mount", "src2", "mnt", *storage)
    assert (done.returncode, done.stderr) == (0, "")
    assert status(work)["source"] == f"{work.path}/src2"
    lines = [line for line in work.run("status").stdout.splitlines() if f"{work.path}/" in line]
    assert len(lines) == 2
    umount(work)
    assert not is_gone(first.supervisor_pid)
    subprocess.run(["umount", work.path / "mnt"], check=True)
    assert (status(work)["source"], status(work)["state"]) == (f"{work.path}/src", "serving")
    assert os.stat(work.path / "mnt")
    umount(work)
    assert_unmounted(work)


as_root = pytest.mark.parametrize("fake_area", [None], ids=["root"], indirect=True)
Waits = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def waits_for(work: Area) -> Iterator[Waits]:
    """Starts a process that looks a name up, and waits; in the end it is told "No such file"."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        process = start_as_owner(work, "stat", f"{work.path}/mnt/{name}")
        started.append(process)
        wchan = Path(f"/proc/{process.pid}/wchan")
        wait_for(lambda: b"request_wait" in wchan.read_bytes(), "the process to wait")
        return process

    yield start
    try:
        assert [process.wait(60) for process in started] == [1] * len(started)
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=10)


def log_of(work: Area) -> str:
    return (work.path / "state" / "supervisor.log").read_text()


def comes_to(work: Area, state: str) -> dict[str, Any]:
    """The worker's part of the status, then."""
    found = wait_for(lambda: (now := status(work))["state"] == state and now["worker"], state)
    return dict(found)


@as_root
def test_safe_mode_is_left_for_a_try(work: Area, waits_for: Waits) -> None:
    work.mount(mode="trying")
    for number in range(2):
        assert waits_for("die").wait(20) == 1
        assert log_of(work).count("only serves the source") == number + 1
        assert comes_to(work, "serving")["retry_seconds"] is None
    # A try that fails is not tried four times, and the next one is later.
    waits_for("die")
    worker = comes_to(work, "safe mode")
    assert worker["restarts"] == 4 + 1 + 1 + 1 + 1
    assert 500 < worker["retry_seconds"] <= 600
    assert "it only serves the source: a whole one is tried in " in worker["error"]
    assert "is tried in 600 s" in log_of(work)


@as_root
def test_what_dies_in_safe_mode_too_ends_in_errors(work: Area, waits_for: Waits) -> None:
    work.mount()
    supervisor = registered(work).entry.supervisor_pid
    waits_for("die-always")
    wait_for(lambda: is_gone(supervisor), "the supervisor to give up")
    assert log_of(work).count("ended with exit code 7") == 7
    assert "ended with exit code 7: unmounting" in log_of(work)


@as_root
def test_the_log_says_where_a_worker_hangs(work: Area, waits_for: Waits) -> None:
    work.mount()
    assert waits_for("freeze").wait(60) == 1
    assert (status(work)["state"], status(work)["worker"]["restarts"]) == ("serving", 1)
    assert "the worker hangs: no sign of life" in log_of(work)
    assert "thread " in log_of(work)


@as_root
def test_umount_while_nobody_serves(work: Area, waits_for: Waits) -> None:
    """Between two workers, in the pause before the next one."""
    work.mount()
    waits_for("die")
    wait_for(lambda: status(work)["worker"]["restarts"] == 3, "the third death")
    report = status(work)
    assert (report["state"], report["worker"]["pid"]) == ("restarting", None)
    assert report["worker"]["error"] == "the worker ended with exit code 7"
    assert umount(work, "--timeout", "1") < 4


@as_root
def test_a_death_is_reported_while_another_worker_starts(work: Area) -> None:
    """And the mount can be unmounted."""
    work.mount(mode="silent-later")
    found, before = registered(work), status(work)["worker"]["pid"]
    os.kill(before, signal.SIGKILL)
    worker = comes_to(work, "restarting")
    assert (worker["restarts"], worker["error"]) == (1, "the worker was killed by signal 9")
    assert worker["last_death"]["why"] == worker["error"]
    assert status(work)["environment"], "what it said last is still told"
    with pytest.raises(OperationError, match="does not answer"):
        client.request(found, {"command": "pin", "paths": ["a"]}, 5)
    another = wait_for(lambda: status(work)["worker"]["pid"], "another worker")
    assert another != before
    assert umount(work, "--timeout", "3") < 5
    assert is_gone(another)


@as_root
def test_a_supervisor_that_may_open_nothing_for_a_while_goes_on(work: Area) -> None:
    work.mount("-o", "standby=false")
    worker, supervisor = status(work)["worker"]["pid"], registered(work).entry.supervisor_pid
    before = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, before[1]))
    with subprocess.Popen(work.command("status", "mnt"), cwd=work.path) as asks:
        wait_for(lambda: "the supervisor: Too many open files" in log_of(work), "a look in vain")
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: "cannot start a worker: Too many" in log_of(work), "a start in vain")
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)
        assert asks.wait(60) == 0
    assert comes_to(work, "serving")["pid"] != worker


@as_root
def test_a_limit_that_is_reached_for_long_does_not_end_the_mount(work: Area) -> None:
    """Neither where no worker can be started, nor where those that are find none of it."""
    work.mount("-o", "standby=false", mode="starved")
    os.kill(status(work)["worker"]["pid"], signal.SIGKILL)
    wait_for(lambda: status(work)["worker"]["restarts"] == 9, "the ninth worker")
    assert comes_to(work, "serving")["restarts"] == 9
    assert "cannot start a worker: no process: the limit of processes" in log_of(work)
    assert "only serves the source" not in log_of(work)


@as_root
def test_one_that_never_gets_ready_is_replaced(work: Area) -> None:
    work.mount("-o", "start_timeout_seconds=1", mode="silent-later")
    os.kill(status(work)["worker"]["pid"], signal.SIGKILL)
    wait_for(lambda: "did not become ready in time" in log_of(work), "the time limit")


@as_root
def test_one_that_checks_its_index_is_waited_for(work: Area) -> None:
    """By the supervisor, and by who mounts."""
    work.mount("-o", "start_timeout_seconds=5", mode="checking")
    assert status(work)["worker"]["restarts"] == 0


@as_root
def test_a_hang_that_nobody_shows_is_noticed(work: Area) -> None:
    """The kernel does not say who waits (fusectl is not mounted), and all requests were taken."""
    work.mount(mode="unseen")
    os.kill(status(work)["worker"]["pid"], signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: "the worker hangs" in log_of(work), "it to be noticed")
    assert time.monotonic() - stopped < DEAD_SILENT_SECONDS / 2
    assert "all its threads sleep; it is replaced" in log_of(work)
    wait_for(lambda: status(work)["worker"]["restarts"] == 1, "another worker")


@as_root
def test_restart_with_a_program_that_cannot_take_over(work: Area) -> None:
    work.mount(mode="other")
    before = status(work)["worker"]
    refused = "the installed program cannot take over, and the old one goes on: it is another"
    assert_one_line(work.run("restart", "mnt"), 1, refused)
    assert status(work)["worker"] == before


@as_root
def test_restart_of_a_worker_that_does_not_leave(work: Area) -> None:
    work.mount()
    before = status(work)["worker"]["pid"]
    os.kill(before, signal.SIGSTOP)
    assert work.run("restart", "mnt").returncode == 0
    assert is_gone(before)


@requires_namespaces
def test_a_dead_supervisor_leaves_no_worker_and_no_mount_in_the_way(work: Area) -> None:
    """Reported, also after a look from another mount namespace; it goes with its registration."""
    work.mount()
    os.kill(status(work)["worker"]["pid"], signal.SIGSTOP)
    found = registered(work)
    os.kill(found.entry.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not work.workers(), "the worker to follow, though it stands still")
    assert run_as_owner(work, "stat", f"{work.path}/mnt") != 0
    look = f"umount --lazy {work.path}/mnt && {shlex.join(work.command('status'))}"
    if work.user is None:
        assert execute(["unshare", "--mount", "sh", "-c", look]).returncode == 0
    done = work.run("status", "mnt", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "dead")
    assert work.run("mount", "src", "mnt", *work.storage).returncode == 1
    umount(work)
    assert not os.path.lexists(found.stem + ".json")
    work.mount()
    assert fuse_mounts(str(work.path)) == [f"{work.path}/mnt"]
