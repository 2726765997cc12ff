"""The supervisor's life around a fake worker: mounting, asking, dying, unmounting."""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from monarchfs.fuse.mountinfo import find_mount
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
from tests.support.mounting import (
    fuse_mounts,
    requires_mounts,
    wait_for,
)
from tests.support.timing import Stopwatch

pytestmark = requires_mounts


@pytest.fixture
def work(fake_area: Area) -> Area:
    return fake_area


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


def test_what_is_made_belongs_to_the_user_alone(work: Area) -> None:
    work.mount()
    uid = os.geteuid() if work.user is None else pwd.getpwnam(work.user).pw_uid
    (dataset,) = (work.path / "tier").iterdir()
    for directory in (dataset, work.path / "state"):
        st = directory.stat()
        assert (st.st_uid, st.st_mode & 0o777) == (uid, 0o700)
    st = os.stat(registered(work).socket_path)
    assert (st.st_uid, st.st_mode & 0o777) == (uid, 0o600)
    assert json.loads((work.path / "state" / "lock").read_text())["mountpoint"] == (
        f"{work.path}/mnt"
    )
    umount(work)
    # What is cached stays for the next mount, and does not stand in its way.
    work.mount()


def test_the_umask_of_a_service_shuts_nobody_out(root_work: Area) -> None:
    """What all of them pass through is as open as without it, and what is one user's is not."""
    work = root_work
    command = work.command("mount", "src", "mnt", *work.storage, "--user", NOBODY)
    strict = ["sh", "-c", 'umask 077; exec "$@"', "sh", *command]
    subprocess.run(strict, check=True, cwd=work.path, env=work.environment, timeout=30)
    (dataset,) = (work.path / "tier").iterdir()
    assert dataset.parent.stat().st_mode & 0o777 == 0o755
    assert dataset.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("point", "mounted"), [("src", "src"), ("link", "mnt")])
def test_over_the_source_itself_and_through_a_link(work: Area, point: str, mounted: str) -> None:
    (work.path / "link").symlink_to("mnt")
    done = work.run("mount", "src", point, *work.storage)
    assert (done.returncode, done.stderr) == (0, "")
    assert fuse_mounts(str(work.path)) == [f"{work.path}/{mounted}"]
    assert status(work, point)["state"] == "serving"
    umount(work, name=point)
    assert_unmounted(work)


def test_a_second_mount_on_the_same_place_or_with_the_same_state_is_refused(work: Area) -> None:
    work.mount()
    (work.path / "other").mkdir()
    if work.user is not None:
        shutil.chown(work.path / "other", work.user)
    in_use = f"is in use by the mount of {work.path}/src on {work.path}/mnt: "
    for point, words in (("mnt", "already a monarchfs mount"), ("other", in_use)):
        done = work.run("mount", "src", point, *work.storage)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert words in done.stderr
        assert f"monarchfs umount {work.path}/mnt" in done.stderr
    umount(work)
    assert (work.path / "state" / "index").exists()


def test_a_tier_in_a_fuse_mount_is_refused(root_work: Area) -> None:
    root_work.mount()
    (root_work.path / "other").mkdir()
    (root_work.path / "src2").mkdir()
    done = root_work.run(
        *("mount", "src2", "other", "--tier", "mnt=1G"),
        *("--state-dir", f"{root_work.path}/state2"),
    )
    assert done.returncode == 2
    assert "network file system (fuse.monarchfs)" in done.stderr


def test_umount_of_a_busy_mount_waits_for_most_of_its_time_and_says_so(work: Area) -> None:
    work.mount()
    with somebody_inside(work) as process:
        started = Stopwatch()
        done = work.run("umount", "mnt", "--timeout", "5")
        assert started.elapsed() > 2.9, "3 of the 5 seconds, and then what it takes to end"
        assert started.seconds() < 5.5
        assert fuse_mounts(str(work.path)) == []
    assert (done.returncode, done.stdout) == (0, "")
    waits, end = done.stderr.splitlines()
    assert waits.startswith(f"monarchfs: {work.path}/mnt is in use by sh ({process.pid}): waiting")
    assert end == f"monarchfs: {work.path}/mnt was in use to the end: who still uses it gets errors"
    assert_unmounted(work)


def test_umount_waits_for_those_who_leave_in_time(work: Area) -> None:
    work.mount()
    supervisor = registered(work).entry.supervisor_pid
    with somebody_inside(work) as process:
        asked = subprocess.Popen(work.command("umount", "mnt"), cwd=work.path, env=work.environment)
        log = work.path / "state" / "supervisor.log"
        wait_for(lambda: "asked to unmount" in log.read_text(), "the supervisor to be asked")
        assert fuse_mounts(str(work.path)) == [f"{work.path}/mnt"]
        process.kill()
        assert asked.wait(10) == 0
    assert is_gone(supervisor)
    assert "mnt: unmounted\n" in log.read_text()
    assert_unmounted(work)


def test_umount_waits_for_a_worker_that_still_syncs(work: Area) -> None:
    """One that is killed meanwhile would hold the tier's file system."""
    work.mount(mode="late")
    started = Stopwatch()
    assert umount(work, "--timeout", "10") < 5
    assert started.elapsed() > 2
    assert list(work.path.rglob("synced"))
    assert_unmounted(work)


def test_umount_while_nothing_is_answered(work: Area) -> None:
    """Processes that wait for the file system get an error, and nobody is left waiting."""
    work.mount(mode="hang")
    with start_as_owner(work, "stat", f"{work.path}/mnt/name") as reader:
        wchan = Path(f"/proc/{reader.pid}/wchan")
        wait_for(lambda: b"request_wait" in wchan.read_bytes(), "the reader to wait")
        done = work.run("umount", "mnt", "--timeout", "4")
        assert (done.returncode, done.stdout) == (0, "")
        assert f"{work.path}/mnt is in use by somebody" in done.stderr.splitlines()[0]
        assert reader.wait(10) != 0
    assert_unmounted(work)


def test_unmounted_by_somebody_else(work: Area) -> None:
    work.mount()
    supervisor = registered(work).entry.supervisor_pid
    command = ["umount"] if work.user is None else ["fusermount3", "-u"]
    assert run_as_owner(work, *command, f"{work.path}/mnt") == 0
    wait_for(lambda: is_gone(supervisor), "the supervisor to notice", 10)
    assert_unmounted(work)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGKILL])
def test_a_worker_that_crashed_makes_the_index_suspect(work: Area, number: signal.Signals) -> None:
    """One that was killed says nothing about it."""
    work.mount()
    suspect = work.path / "state" / "suspect"
    assert not suspect.exists()
    kill_worker(work, number)
    umount(work)
    assert_unmounted(work)
    assert suspect.exists() is (number != signal.SIGKILL)
    if suspect.exists():
        st = suspect.lstat()
        owner = os.geteuid() if work.user is None else pwd.getpwnam(work.user).pw_uid
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
    done = root_work.run("mount", "src", "mnt", *root_work.storage, mode=f"segv {stage}")
    assert (done.returncode, done.stderr.count("starting another one")) == (0, 1), done.stderr
    assert (root_work.path / "state" / "suspect").exists()
    assert status(root_work)["state"] == "serving"
    assert status(root_work)["worker"]["restarts"] == 1
    assert run_as_owner(root_work, "stat", f"{root_work.path}/mnt") == 0


@pytest.mark.parametrize("stage", ["before", "after"])
def test_two_that_crash_are_enough(root_work: Area, stage: str) -> None:
    (root_work.path / "state").mkdir(mode=0o700)
    (root_work.path / "state" / "index").mkdir()
    done = root_work.run("mount", "src", "mnt", *root_work.storage, mode=f"segv {stage} always")
    assert (done.returncode, done.stderr.count("starting another one")) == (1, 1)
    assert "was killed by signal 11 while it started" in done.stderr.splitlines()[-1]
    assert (root_work.path / "state" / "suspect").exists()
    root_work.assert_nothing_runs()


def test_a_dead_supervisor_is_reported_and_cleared(work: Area) -> None:
    work.mount()
    os.kill(registered(work).entry.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not work.workers(), "the worker to follow", 10)
    done = work.run("status", "mnt", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["state"] == "dead"
    assert work.run("mount", "src", "mnt", *work.storage).returncode == 1
    umount(work)
    assert_unmounted(work)


def test_a_stopped_supervisor_does_not_stop_umount(work: Area) -> None:
    work.mount()
    os.kill(registered(work).entry.supervisor_pid, signal.SIGSTOP)
    assert umount(work, "--timeout", "3") < 6
    assert_unmounted(work)


def start_mount(work: Area, *before: str, mode: str = "serve") -> subprocess.Popen[str]:
    """In the foreground."""
    return subprocess.Popen(
        [*before, *work.command("mount", "src", "mnt", *work.storage, "-f", mode=mode)],
        cwd=work.path,
        env=work.environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_serving(work: Area, process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    assert process.stderr.readline() == f"monarchfs: serving {work.path}/src on {work.path}/mnt\n"


def test_signals_that_nohup_ignores_unmount_nothing(root_work: Area) -> None:
    process = start_mount(root_work, "env", "--ignore-signal=INT,HUP")
    wait_serving(root_work, process)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    ignored = Path(f"/proc/{process.pid}/status").read_text().split("SigIgn:")[1].split()[0]
    assert int(ignored, 16) & 0b11 == 0b11
    assert status(root_work)["state"] == "serving"
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=15)
    assert process.returncode == 0
    assert "SIGTERM: unmounting" in rest
    assert "SIGINT" not in rest
    assert "SIGHUP" not in rest
    assert_unmounted(root_work)


def test_in_the_foreground(work: Area) -> None:
    process = start_mount(work)
    wait_serving(work, process)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=15)
    assert process.returncode == 0
    assert "SIGINT: unmounting" in rest
    assert_unmounted(work)


def test_a_signal_during_the_start_takes_everything_back(root_work: Area) -> None:
    before = root_work.files()
    process = start_mount(root_work, mode="silent")
    wait_for(lambda: (root_work.path / "state" / "index").exists(), "the worker")
    process.terminate()
    _, complaint = process.communicate(timeout=15)
    assert process.returncode == 1
    assert "interrupted by SIGTERM" in complaint
    root_work.assert_nothing_runs()
    # The index is the worker's, so its directory stays.
    left = {os.path.relpath(path, root_work.path) for path in root_work.files() - before}
    assert left == {"state", "state/index", "state/lock"}


def test_a_dead_mount_point_gets_a_remedy(root_work: Area) -> None:
    point = f"{root_work.path}/mnt"
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    assert ctypes.CDLL(None).mount(b"x", point.encode(), b"fuse.other", 7, options) == 0
    os.close(device)
    done = root_work.run("mount", "src", "mnt", *root_work.storage)
    assert done.returncode == 1
    assert "daemon is dead" in done.stderr
    assert f"umount -l {point}" in done.stderr
    subprocess.run(["umount", point], check=True)


def test_another_users_mount_is_not_asked_nor_called_dead(work: Area) -> None:
    work.mount()
    (work.path / "list").write_text("1\tsome\n")
    owner, other = ("root", NOBODY) if work.user is None else (work.user, "daemon")
    stranger = Area(work.path, other, interpreter_for(other))
    report = json.loads(stranger.run("status", "mnt", "--json").stdout)
    assert report["state"] == "not yours"
    assert report["error"] == f"the mount belongs to {owner}: only they and root can ask it"
    checks = json.loads(stranger.run("doctor", "--quick", "--json").stdout)["checks"]
    assert next(one for one in checks if one["name"] == "mounts")["others"] >= 1
    assert not any(one.get("mountpoint") == f"{work.path}/mnt" for one in checks)
    for command in ("umount", "restart", "warm", "refresh", "evict", "top", "peers"):
        assert_is_others(stranger.run(command, "mnt"), work, owner)
    for command in ("pin", "unpin", "weigh", "order"):
        assert_is_others(stranger.run(command, "mnt", "list"), work, owner)
    assert_is_others(stranger.run("why", "mnt/some"), work, owner)
    assert_is_others(stranger.run("record", "mnt", "--output", "no/file"), work, owner)
    if work.user is not None:  # else the directory for its socket is closed to the other one
        done = stranger.run("mount", "src", "mnt", *work.storage)
        assert done.returncode == 1
        assert done.stderr.endswith(": it belongs to another user: name another mount point\n")
    assert status(work)["state"] == "serving"


def assert_is_others(done: subprocess.CompletedProcess[str], work: Area, owner: str) -> None:
    assert (done.returncode, done.stdout) == (1, "")
    where = f"the mount on {work.path}/mnt"
    assert done.stderr == f"monarchfs: {where} belongs to {owner}: ask them, or use root\n"


def status_without_registration(work: Area) -> str:
    done = work.run("status", "mnt", "--json")
    assert done.returncode == 1
    return str(json.loads(done.stdout)["state"])


def test_a_mount_without_a_registration(root_work: Area) -> None:
    root_work.mount()
    found = registered(root_work)
    for suffix in (".sock", ".json"):
        os.unlink(found.stem + suffix)
    assert status_without_registration(root_work) == "unknown"
    umount(root_work)
    assert_unmounted(root_work)


def test_a_dead_daemons_registration_is_not_that_of_a_mount_with_its_number(
    root_work: Area,
) -> None:
    """The kernel gives a connection's number to the next mount, which may not be registered yet."""
    root_work.mount()
    found = registered(root_work)
    told = json.loads(Path(found.stem + ".json").read_text())
    dead = {**told, "source": "/of/another", "mountpoint": "/gone", "start_ticks": 1}
    stale = Path("/run/monarchfs") / root_work.path.name
    stale.with_suffix(".json").write_text(json.dumps(dead))
    os.unlink(found.stem + ".json")
    assert status_without_registration(root_work) == "unknown"
    assert not stale.with_suffix(".json").exists()
    Path(found.stem + ".json").write_text(json.dumps(told))


def test_a_registration_without_a_mount_is_cleared(root_work: Area) -> None:
    root_work.mount()
    found = registered(root_work)
    os.kill(found.entry.supervisor_pid, signal.SIGKILL)
    subprocess.run(["umount", "-l", f"{root_work.path}/mnt"], check=True)
    wait_for(lambda: is_gone(found.entry.supervisor_pid), "the supervisor to die")
    assert root_work.run("status", "mnt").returncode == 1
    assert not os.path.lexists(found.stem + ".json")
    assert_unmounted(root_work)
