"""The supervisor's life around a fake worker: mounting, asking, dying, unmounting."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monarchfs.fuse.mountinfo import find_mount
from tests.support.fake_mounts import (
    NOBODY,
    Area,
    assert_unmounted,
    device_mode,
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
    REPOSITORY,
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
    work.mount("--prefetch", "none")
    mounted = find_mount(f"{work.path}/mnt")
    assert mounted is not None
    assert (mounted.fstype, mounted.source) == ("fuse.monarchfs", f"{work.path}/src")
    assert {"ro", "nosuid", "nodev"} <= set(mounted.options.split(","))
    assert "allow_other" not in mounted.super_options
    report = status(work)
    assert report["state"] == "serving"
    assert report["environment"] == ["LANG", "PATH"]
    assert run_as_owner(work, "stat", f"{work.path}/mnt") == 0
    assert umount(work) < 5
    assert_unmounted(work)
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
    umount(work)
    assert_unmounted(work)


def test_the_umask_of_a_service_shuts_nobody_out(root_work: Area) -> None:
    """What all of them pass through is as open as without it, and what is one user's is not."""
    work = root_work
    command = work.command("mount", "src", "mnt", *work.storage, "--user", NOBODY)
    strict = ["sh", "-c", 'umask 077; exec "$@"', "sh", *command]
    subprocess.run(strict, check=True, cwd=work.path, env=work.environment, timeout=30)
    (dataset,) = (work.path / "tier").iterdir()
    assert dataset.parent.stat().st_mode & 0o777 == 0o755
    assert dataset.stat().st_mode & 0o777 == 0o700
    umount(work)


def test_root_mounts_for_a_user(root_work: Area) -> None:
    work, nobody = root_work, pwd.getpwnam(NOBODY)
    work.python = interpreter_for(NOBODY)
    work.mount("--user", NOBODY)
    report = status(work)
    assert report["uid"] == nobody.pw_uid
    assert set(report["groups"]) <= set(os.getgrouplist(NOBODY, nobody.pw_gid))
    (dataset,) = (work.path / "tier").iterdir()
    assert dataset.stat().st_uid == nobody.pw_uid
    assert (work.path / "tier").stat().st_uid == 0
    mounted = find_mount(f"{work.path}/mnt")
    assert mounted is not None
    assert mounted.user_id == nobody.pw_uid
    # The user asks and unmounts by the socket, without root.
    user_of_mount = Area(work.path, NOBODY, work.python)
    with device_mode(0o666):
        assert status(user_of_mount)["uid"] == nobody.pw_uid
        umount(user_of_mount)
    assert_unmounted(work)


def test_allow_other_lets_the_kernel_decide(root_work: Area) -> None:
    root_work.python = interpreter_for(NOBODY)
    root_work.mount("-o", "allow_other", "--user", NOBODY)
    mounted = find_mount(f"{root_work.path}/mnt")
    assert mounted is not None
    assert {"allow_other", "default_permissions"} <= set(mounted.super_options.split(","))
    os.stat(root_work.path / "mnt")
    umount(root_work)


def test_over_the_source_itself(work: Area) -> None:
    done = work.run("mount", "src", "src", *work.storage)
    assert (done.returncode, done.stderr) == (0, "")
    assert fuse_mounts(str(work.path)) == [f"{work.path}/src"]
    umount(work, name="src")
    assert_unmounted(work)


def test_a_mount_point_through_a_link(work: Area) -> None:
    (work.path / "link").symlink_to("mnt")
    done = work.run("mount", "src", "link", *work.storage)
    assert (done.returncode, done.stderr) == (0, "")
    assert status(work, "link")["state"] == "serving"
    umount(work, name="link")
    assert_unmounted(work)


def test_a_second_mount_on_the_same_place_is_refused(work: Area) -> None:
    work.mount()
    done = work.run("mount", "src", "mnt", *work.storage)
    assert done.returncode == 1
    assert "already a monarchfs mount" in done.stderr
    assert "monarchfs umount" in done.stderr
    umount(work)


def test_a_second_mount_with_the_same_state_is_refused(work: Area) -> None:
    work.mount()
    (work.path / "other").mkdir()
    if work.user is not None:
        shutil.chown(work.path / "other", work.user)
    done = work.run("mount", "src", "other", *work.storage)
    assert done.returncode == 1
    assert f"is in use by the mount of {work.path}/src on {work.path}/mnt: " in done.stderr
    assert f"monarchfs umount {work.path}/mnt" in done.stderr
    assert done.stderr.count("\n") == 1
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
    umount(root_work)


def test_status_of_all_mounts(work: Area) -> None:
    work.mount()
    done = work.run("status", "--json")
    mounts = json.loads(done.stdout)["mounts"]
    assert "serving" in [one["state"] for one in mounts]
    done = work.run("status", "mnt")
    assert "state     serving" in done.stdout
    umount(work)


def test_umount_of_a_busy_mount_keeps_to_its_time(work: Area) -> None:
    work.mount()
    with somebody_inside(work):
        started = Stopwatch()
        assert umount(work, "--timeout", "6") < 7
        assert started.elapsed() > 1
        assert fuse_mounts(str(work.path)) == []
    assert_unmounted(work)


def test_umount_of_a_busy_mount_waits_for_most_of_its_time_and_says_so(work: Area) -> None:
    work.mount()
    with somebody_inside(work) as process:
        started = Stopwatch()
        done = work.run("umount", "mnt", "--timeout", "5")
        assert started.elapsed() > 2.9, "3 of the 5 seconds, and then what it takes to end"
        assert started.seconds() < 5.5
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts(root_work: Area, number: signal.Signals) -> None:
    root_work.mount()
    supervisor = registered(root_work).entry.supervisor_pid
    os.kill(supervisor, number)
    wait_for(lambda: is_gone(supervisor), "the supervisor to end", 10)
    assert_unmounted(root_work)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_a_worker_that_crashed_makes_the_index_suspect(work: Area, number: signal.Signals) -> None:
    work.mount()
    suspect = work.path / "state" / "suspect"
    assert not suspect.exists()
    kill_worker(work, number)
    umount(work)
    assert_unmounted(work)
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
    umount(work)
    assert_unmounted(work)


def test_a_killed_worker_says_nothing_about_the_index(root_work: Area) -> None:
    root_work.mount()
    kill_worker(root_work, signal.SIGKILL)
    umount(root_work)
    assert not (root_work.path / "state" / "suspect").exists()
    assert_unmounted(root_work)


CRASHING_WORKER = """
import json, os, signal, socket, sys

sys.path.insert(0, {repository!r})
sys.dont_write_bytecode = True
from tests.support import fake_worker

with open({starts!r}, "a") as file:
    file.write("x")
    start = file.tell()
if start > {times}:
    sys.argv.insert(1, "serve")
    sys.exit(fake_worker.main())
with open(int(sys.argv[sys.argv.index("--bootstrap-fd") + 1]), "rb") as bootstrap:
    fds = json.load(bootstrap)["fds"]
if {stage!r} == "after INIT":
    init, channel = socket.socket(fileno=fds["init"]), socket.socket(fileno=fds["channel"])
    init.send(fake_worker.init_reply(init.recv(1 << 18)))
    channel.recv(1 << 16)
os.kill(os.getpid(), signal.SIGSEGV)
"""
CLI = """
import functools, sys

sys.path.insert(0, {repository!r})
from monarchfs.cli import main, mount

worker = (sys.executable, "-I", {worker!r})
mount.mount_command = functools.partial(mount.mount_command, worker_command=worker)
sys.exit(main.main(sys.argv[1:]))
"""


def mount_with_crashes(
    work: Area, stage: str, times: int
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Mounts with a worker that dies of SIGSEGV so often; and how often one was started."""
    worker, cli, starts = (work.path / name for name in ("worker.py", "cli.py", "starts"))
    worker.write_text(
        CRASHING_WORKER.format(
            repository=str(REPOSITORY), starts=str(starts), times=times, stage=stage
        )
    )
    cli.write_text(CLI.format(repository=str(REPOSITORY), worker=str(worker)))
    done = subprocess.run(
        [work.python, "-I", str(cli), "mount", "src", "mnt", *work.storage],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=work.path,
        env=work.environment,
        check=False,
    )
    return done, starts.stat().st_size


@pytest.mark.parametrize("stage", ["before INIT", "after INIT"])
def test_a_worker_that_crashes_at_the_start_gets_a_successor(root_work: Area, stage: str) -> None:
    done, starts = mount_with_crashes(root_work, stage, 1)
    assert (done.returncode, starts) == (0, 2), done.stderr
    assert "starting another one" in done.stderr
    assert (root_work.path / "state" / "suspect").exists()
    assert status(root_work)["state"] == "serving"
    assert status(root_work)["worker"]["restarts"] == 1
    assert run_as_owner(root_work, "stat", f"{root_work.path}/mnt") == 0
    umount(root_work)
    assert_unmounted(root_work)


@pytest.mark.parametrize("stage", ["before INIT", "after INIT"])
def test_two_that_crash_are_enough(root_work: Area, stage: str) -> None:
    (root_work.path / "state").mkdir(mode=0o700)
    (root_work.path / "state" / "index").mkdir()
    done, starts = mount_with_crashes(root_work, stage, 5)
    assert (done.returncode, starts) == (1, 2)
    assert "was killed by signal 11 while it started" in done.stderr.splitlines()[-1]
    assert (root_work.path / "state" / "suspect").exists()
    root_work.assert_nothing_runs()


def test_fsck_of_a_cache_in_use_names_the_mount(work: Area) -> None:
    work.mount()
    done = work.run("fsck", "state", "--repair")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"monarchfs: state directory {work.path}/state is in use by the mount of {work.path}/src"
        f" on {work.path}/mnt: unmount that first with monarchfs umount {work.path}/mnt\n"
    )
    assert status(work)["state"] == "serving"
    umount(work)
    assert_unmounted(work)


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


def test_signals_that_nohup_ignores_unmount_nothing(root_work: Area) -> None:
    work = root_work
    ignoring = ["env", "--ignore-signal=INT,HUP"]
    process = subprocess.Popen(
        [*ignoring, *work.command("mount", "src", "mnt", *work.storage, "-f")],
        cwd=work.path,
        env=work.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == f"monarchfs: serving {work.path}/src on {work.path}/mnt\n"
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    ignored = Path(f"/proc/{process.pid}/status").read_text().split("SigIgn:")[1].split()[0]
    assert int(ignored, 16) & 0b11 == 0b11
    assert status(work)["state"] == "serving"
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=15)
    assert process.returncode == 0
    assert "SIGTERM: unmounting" in rest
    assert "SIGINT" not in rest
    assert "SIGHUP" not in rest
    assert_unmounted(work)


def test_in_the_foreground(work: Area) -> None:
    process = subprocess.Popen(
        work.command("mount", "src", "mnt", *work.storage, "-f"),
        cwd=work.path,
        env=work.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: fuse_mounts(str(work.path)), "the mount")
    assert process.stderr is not None
    assert process.stderr.readline() == (f"monarchfs: serving {work.path}/src on {work.path}/mnt\n")
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=15)
    assert process.returncode == 0
    assert "SIGINT: unmounting" in rest
    assert_unmounted(work)


def test_a_signal_during_the_start_takes_everything_back(root_work: Area) -> None:
    before = root_work.files()
    process = subprocess.Popen(
        root_work.command("mount", "src", "mnt", *root_work.storage, "-f", mode="silent"),
        cwd=root_work.path,
        env=root_work.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (root_work.path / "state" / "index").exists(), "the worker")
    process.terminate()
    _, complaint = process.communicate(timeout=15)
    assert process.returncode == 1
    assert "interrupted by SIGTERM" in complaint
    root_work.assert_nothing_runs()
    # The index is the worker's, so its directory stays.
    left = {os.path.relpath(path, root_work.path) for path in root_work.files() - before}
    assert left == {"state", "state/index", "state/lock"}


def test_a_hanging_source_is_named_in_time(root_work: Area) -> None:
    work = root_work
    (work.path / "hung").mkdir()
    done = work.run(
        *("mount", "src", "hung", "--tier", f"{work.path}/tier0=1M"),
        *("--state-dir", f"{work.path}/state0"),
        mode="hang",
    )
    assert done.returncode == 0, done.stderr
    before = work.files()
    started = Stopwatch()
    done = work.run("mount", "hung", "mnt", *work.storage, "-o", "start_timeout_seconds=1.5")
    started.check(6)
    assert done.returncode == 1
    assert "hung did not answer within" in done.stderr
    assert done.stderr.count("\n") == 1
    assert work.files() == before
    umount(work, "--timeout", "2", name="hung")
    assert_unmounted(work)


def test_a_dead_mount_point_gets_a_remedy(root_work: Area) -> None:
    helper = subprocess.run(
        [
            *(root_work.python, "-I", "-c"),
            "import ctypes, os, sys\n"
            "device = os.open('/dev/fuse', os.O_RDWR)\n"
            "options = f'fd={device},rootmode=40000,user_id=0,group_id=0'.encode()\n"
            "sys.exit(ctypes.CDLL(None).mount(b'x', sys.argv[1].encode(), b'fuse.other', 7,"
            " options))",
            f"{root_work.path}/mnt",
        ],
        check=False,
    )
    assert helper.returncode == 0
    done = root_work.run("mount", "src", "mnt", *root_work.storage)
    assert done.returncode == 1
    assert "daemon is dead" in done.stderr
    assert f"umount -l {root_work.path}/mnt" in done.stderr
    subprocess.run(["umount", f"{root_work.path}/mnt"], check=True)


def ask(path: str, content: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(10)
        client.connect(path)
        client.sendall(content)
        with client.makefile("rb") as replies:
            answer: dict[str, Any] = json.loads(replies.readline())
            return answer


def test_nonsense_on_the_control_socket(root_work: Area) -> None:
    root_work.mount()
    path = registered(root_work).socket_path
    for content, words in (
        (b"status\n", "not valid"),
        (b"[1]\n", "not valid"),
        (b'{"command": "umount", "timeout": "soon"}\n', "not valid"),
        (b"x" * (65 << 10), "too long"),
        (b'{"command"', "in time"),
    ):
        answer = ask(path, content)
        assert answer["ok"] is False
        assert words in answer["error"]
    assert status(root_work)["state"] == "serving"
    assert umount(root_work) < 5


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
    umount(work)


def assert_is_others(done: subprocess.CompletedProcess[str], work: Area, owner: str) -> None:
    assert (done.returncode, done.stdout) == (1, "")
    where = f"the mount on {work.path}/mnt"
    assert done.stderr == f"monarchfs: {where} belongs to {owner}: ask them, or use root\n"


def test_the_log_file(root_work: Area) -> None:
    root_work.mount("--log-file", "log", "--log-level", "info")
    umount(root_work)
    text = (root_work.path / "log").read_text()
    assert f"serving {root_work.path}/src on {root_work.path}/mnt" in text
    assert "unmounted" in text


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
    umount(root_work)


def test_a_registration_without_a_mount_is_cleared(root_work: Area) -> None:
    root_work.mount()
    found = registered(root_work)
    os.kill(found.entry.supervisor_pid, signal.SIGKILL)
    subprocess.run(["umount", "-l", f"{root_work.path}/mnt"], check=True)
    wait_for(lambda: is_gone(found.entry.supervisor_pid), "the supervisor to die")
    assert root_work.run("status", "mnt").returncode == 1
    assert not os.path.lexists(found.stem + ".json")
    assert_unmounted(root_work)
