"""One worker after another, around a fake one: who waits gets his answer, or an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.supervisor.vital_signs import DEAD_SILENT_SECONDS
from tests.support.fake_mounts import (
    FAKE_WORKER,
    Area,
    assert_unmounted,
    is_gone,
    kill_worker,
    registered,
    run_as_owner,
    start_as_owner,
    status,
    umount,
)
from tests.support.mounting import REPOSITORY, fuse_mounts, requires_mounts, wait_for
from tests.support.timing import Stopwatch

pytestmark = requires_mounts


@pytest.fixture
def work(fake_area: Area) -> Area:
    return fake_area


@pytest.fixture
def waiters() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that wait for an answer; killed at the end."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def waits_for(work: Area, name: str) -> subprocess.Popen[bytes]:
    """A process that looks a name up, and waits; it will have said "No such file" at the end."""
    process = start_as_owner(work, "stat", f"{work.path}/mnt/{name}")
    wchan = Path(f"/proc/{process.pid}/wchan")
    wait_for(lambda: b"request_wait" in wchan.read_bytes(), "the process to wait")
    return process


def log_of(work: Area) -> str:
    return (work.path / "state" / "supervisor.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_worker_that_dies_is_replaced(
    work: Area, waiters: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    work.mount()
    waiters.append(waits_for(work, "later"))
    before = status(work)["worker"]["pid"]
    report = kill_worker(work, number)
    worker = report["worker"]
    assert (report["state"], worker["restarts"], worker["error"]) == ("serving", 1, None)
    assert worker["pid"] != before
    assert worker["last_death"]["why"] == f"the worker was killed by signal {int(number)}"
    assert 0 <= time.time() - worker["last_death"]["unix_seconds"] < 20
    # Its request was handed out again.
    assert waiters[0].wait(20) == 1
    assert run_as_owner(work, "stat", f"{work.path}/mnt") == 0
    assert f"was killed by signal {int(number)}: starting another one" in log_of(work)
    assert umount(work) < 5
    assert_unmounted(work)


def test_a_worker_that_goes_by_itself_is_replaced(work: Area) -> None:
    work.mount(mode="serve")
    worker = status(work)["worker"]["pid"]
    os.kill(worker, signal.SIGSTOP)
    os.kill(worker, signal.SIGTERM)
    os.kill(worker, signal.SIGCONT)
    wait_for(lambda: status(work)["worker"]["restarts"] == 1, "another worker")
    umount(work)


def test_a_crash_loop_ends_in_safe_mode(
    root_work: Area, waiters: list[subprocess.Popen[bytes]]
) -> None:
    root_work.mount()
    waiters.append(waits_for(root_work, "die"))
    seen = set()

    def safe() -> bool:
        report = status(root_work)
        seen.add(report["state"])
        return bool(report["state"] == "safe mode")

    wait_for(safe, "safe mode")
    assert waiters[0].wait(20) == 1
    assert seen <= {"serving", "restarting", "worker not answering", "safe mode"}
    report = status(root_work)
    assert report["worker"]["restarts"] == 4
    assert report["worker"]["last_death"]["why"] == "the worker ended with exit code 7"
    assert "the next one only serves the source" in log_of(root_work)
    assert (root_work.path / "state" / "suspect").exists()
    # Safe mode is left on purpose, and not by itself.
    assert kill_worker(root_work, signal.SIGKILL)["state"] == "safe mode"
    assert root_work.run("restart", "mnt").returncode == 0
    assert status(root_work)["state"] == "serving"
    umount(root_work)
    assert_unmounted(root_work)


TRYING_CLI = """
import functools, sys

sys.path.insert(0, {repository!r})
from monarchfs.cli import main, mount
from monarchfs.supervisor import restart_policy

restart_policy.RETRY_SECONDS = (0.5, 1.0, 600.0)
worker = (sys.executable, "-I", {worker!r}, "serve")
mount.mount_command = functools.partial(mount.mount_command, worker_command=worker)
sys.exit(main.main(sys.argv[1:]))
"""


def mount_with(work: Area, cli: str) -> None:
    """Mount by this program, with the fake worker."""
    path = work.path / "cli.py"
    path.write_text(cli.format(repository=str(REPOSITORY), worker=FAKE_WORKER))
    command = [work.python, "-I", str(path), "mount", "src", "mnt", *work.storage]
    subprocess.run(command, cwd=work.path, env=work.environment, check=True)


def test_safe_mode_is_left_for_a_try(
    root_work: Area, waiters: list[subprocess.Popen[bytes]]
) -> None:
    mount_with(root_work, TRYING_CLI)
    for number in range(2):
        waiters.append(waits_for(root_work, "die"))
        assert waiters[number].wait(20) == 1
        assert log_of(root_work).count("only serves the source") == number + 1
        wait_for(lambda: status(root_work)["state"] == "serving", "a try")
        assert status(root_work)["worker"]["retry_seconds"] is None
    # A try that fails is not tried four times, and the next one is later.
    waiters.append(waits_for(root_work, "die"))
    report = wait_for(
        lambda: (now := status(root_work))["state"] == "safe mode" and now, "safe mode"
    )
    assert report["worker"]["restarts"] == 4 + 1 + 1 + 1 + 1
    assert 500 < report["worker"]["retry_seconds"] <= 600
    assert "it only serves the source: a whole one is tried in " in report["worker"]["error"]
    assert "is tried in 600 s" in log_of(root_work)
    umount(root_work)
    assert_unmounted(root_work)


def test_what_dies_in_safe_mode_too_ends_in_errors(
    work: Area, waiters: list[subprocess.Popen[bytes]]
) -> None:
    work.mount()
    supervisor = registered(work).entry.supervisor_pid
    waiters.append(waits_for(work, "die-always"))
    wait_for(lambda: is_gone(supervisor), "the supervisor to give up")
    assert waiters[0].wait(20) == 1
    assert log_of(work).count("ended with exit code 7") == 7
    assert "ended with exit code 7: unmounting" in log_of(work)
    assert_unmounted(work)


def test_a_worker_that_hangs_is_replaced(
    work: Area, waiters: list[subprocess.Popen[bytes]]
) -> None:
    work.mount()
    waiters.append(waits_for(work, "freeze"))
    started = Stopwatch()
    assert waiters[0].wait(60) == 1
    started.check(60)
    report = status(work)
    assert (report["state"], report["worker"]["restarts"]) == ("serving", 1)
    assert "no sign of life for" in report["worker"]["last_death"]["why"]
    log = log_of(work)
    assert "the worker hangs: no sign of life" in log
    assert "thread " in log
    umount(work)
    assert_unmounted(work)


def test_umount_while_nobody_serves(
    root_work: Area, waiters: list[subprocess.Popen[bytes]]
) -> None:
    """Between two workers, in the pause before the next one."""
    root_work.mount()
    waiters.append(waits_for(root_work, "die"))
    wait_for(lambda: status(root_work)["worker"]["restarts"] == 3, "the third death")
    report = status(root_work)
    assert report["state"] == "restarting"
    assert report["worker"]["pid"] is None
    assert report["worker"]["error"] == "the worker ended with exit code 7"
    assert umount(root_work, "--timeout", "1") < 4
    assert waiters[0].wait(20) == 1
    assert_unmounted(root_work)


def test_umount_while_a_worker_starts(root_work: Area) -> None:
    root_work.mount(mode="silent-later")
    os.kill(status(root_work)["worker"]["pid"], signal.SIGKILL)
    wait_for(lambda: status(root_work)["state"] == "restarting", "the death")
    worker = wait_for(lambda: status(root_work)["worker"]["pid"], "another worker")
    assert umount(root_work, "--timeout", "3") < 5
    assert is_gone(worker)
    assert_unmounted(root_work)


def test_one_that_never_gets_ready_is_replaced(root_work: Area) -> None:
    root_work.mount("-o", "start_timeout_seconds=1", mode="silent-later")
    os.kill(status(root_work)["worker"]["pid"], signal.SIGKILL)
    wait_for(lambda: "did not become ready in time" in log_of(root_work), "the time limit")
    umount(root_work, "--timeout", "3")
    assert_unmounted(root_work)


UNSEEN_CLI = """
import functools, sys

sys.path.insert(0, {repository!r})
from monarchfs.cli import main, mount
from monarchfs.supervisor import start

mounted = start.Mounted
start.Mounted = lambda *known, **named: mounted(*known, **named)._replace(waiting=lambda: None)
worker = (sys.executable, "-I", {worker!r}, "serve")
mount.mount_command = functools.partial(mount.mount_command, worker_command=worker)
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_hang_that_nobody_shows_is_noticed(root_work: Area) -> None:
    """The kernel does not say who waits (fusectl is not mounted), and all requests were taken."""
    mount_with(root_work, UNSEEN_CLI)
    os.kill(status(root_work)["worker"]["pid"], signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: "the worker hangs" in log_of(root_work), "it to be noticed")
    noticed = time.monotonic() - stopped
    print(f"noticed after {noticed:.1f} s")
    assert noticed < DEAD_SILENT_SECONDS / 2
    assert "all its threads sleep; it is replaced" in log_of(root_work)
    wait_for(lambda: status(root_work)["worker"]["restarts"] == 1, "another worker")
    umount(root_work)
    assert_unmounted(root_work)


# -- on purpose


def test_restart(work: Area, waiters: list[subprocess.Popen[bytes]]) -> None:
    work.mount()
    before = status(work)["worker"]["pid"]
    waiters.append(waits_for(work, "later"))
    done = work.run("restart", "mnt", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    report = status(work)
    assert answer == {"pid": report["worker"]["pid"], "restarts": 1}
    assert answer["pid"] != before
    assert report["worker"]["last_death"] is None
    assert waiters[0].wait(20) == 1
    assert is_gone(before)
    umount(work)
    assert_unmounted(work)


def test_restart_with_a_program_that_cannot_take_over(root_work: Area) -> None:
    root_work.mount(mode="other")
    before = status(root_work)["worker"]
    done = root_work.run("restart", "mnt")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "monarchfs: the installed program cannot take over, and the old one goes on: it is"
        " another program\n"
    )
    assert status(root_work)["worker"] == before
    umount(root_work)
    assert_unmounted(root_work)


def test_restart_of_a_worker_that_does_not_leave(root_work: Area) -> None:
    root_work.mount()
    before = status(root_work)["worker"]["pid"]
    os.kill(before, signal.SIGSTOP)
    started = Stopwatch()
    assert root_work.run("restart", "mnt").returncode == 0
    started.check(60)
    assert is_gone(before)
    umount(root_work)
    assert_unmounted(root_work)


def test_restart_of_what_is_not_mounted(root_work: Area) -> None:
    done = root_work.run("restart", "mnt")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a monarchfs mount" in done.stderr
    root_work.mount()
    os.kill(registered(root_work).entry.supervisor_pid, signal.SIGKILL)
    done = root_work.run("restart", "mnt")
    assert done.returncode == 1
    assert "clear the mount with monarchfs umount" in done.stderr
    umount(root_work)


def test_a_dead_supervisor_leaves_no_worker_and_no_mount_in_the_way(work: Area) -> None:
    work.mount()
    kill_worker(work, signal.SIGKILL)
    os.kill(registered(work).entry.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not work.workers(), "the worker to follow", 10)
    assert run_as_owner(work, "stat", f"{work.path}/mnt") != 0
    umount(work)
    work.mount()
    assert status(work)["worker"]["restarts"] == 0
    assert fuse_mounts(str(work.path)) == [f"{work.path}/mnt"]
    umount(work)
    assert_unmounted(work)
