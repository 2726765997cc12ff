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

from tests.faking import Area
from tests.mounting import fuse_mounts, requires_fuse, requires_root, wait_for
from tests.test_supervisor import (
    assert_unmounted,
    is_gone,
    kill_worker,
    registered,
    root_work,
    run_as_owner,
    start_as_owner,
    status,
    umount,
    work,
)

__all__ = ["root_work", "work"]

pytestmark = [requires_root, requires_fuse]


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
    assert waiters[0].wait(5) == 1
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
    assert waiters[0].wait(5) == 1
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


def test_what_dies_in_safe_mode_too_ends_in_errors(
    work: Area, waiters: list[subprocess.Popen[bytes]]
) -> None:
    work.mount()
    supervisor = registered(work).entry.supervisor_pid
    waiters.append(waits_for(work, "die-always"))
    wait_for(lambda: is_gone(supervisor), "the supervisor to give up")
    assert waiters[0].wait(5) == 1
    assert log_of(work).count("ended with exit code 7") == 7
    assert "ended with exit code 7: unmounting" in log_of(work)
    assert_unmounted(work)


def test_a_worker_that_hangs_is_replaced(
    work: Area, waiters: list[subprocess.Popen[bytes]]
) -> None:
    work.mount()
    waiters.append(waits_for(work, "freeze"))
    started = time.monotonic()
    assert waiters[0].wait(60) == 1
    assert time.monotonic() - started < 60
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
    assert waiters[0].wait(5) == 1
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


OLD_KERNEL_CLI = """
import functools, sys

sys.path.insert(0, {repository!r})
from monarchfs.cli import main, mount
from monarchfs.supervisor import start

mounted = start.Mounted
start.Mounted = lambda *known: mounted(*known)._replace(resends=False)
worker = (sys.executable, "-I", {worker!r}, "serve")
mount.mount_command = functools.partial(mount.mount_command, worker_command=worker)
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_kernel_that_cannot_hand_requests_out_again(root_work: Area) -> None:
    """Who waits for a request that the dead worker had must not wait for ever."""
    tests = Path(__file__).parent
    cli = root_work.path / "cli.py"
    worker = str(tests / "fake_worker.py")
    cli.write_text(OLD_KERNEL_CLI.format(repository=str(tests.parent), worker=worker))
    command = [root_work.python, "-I", str(cli), "mount", "src", "mnt", *root_work.storage]
    subprocess.run(command, cwd=root_work.path, env=root_work.environment, check=True)
    done = root_work.run("restart", "mnt")
    assert done.returncode == 1
    assert "the C part, which was not built" in done.stderr
    waiter = waits_for(root_work, "later")
    supervisor = registered(root_work).entry.supervisor_pid
    os.kill(status(root_work)["worker"]["pid"], signal.SIGKILL)
    assert waiter.wait(10) == 1
    waiter.communicate()
    wait_for(lambda: is_gone(supervisor), "the supervisor to give up", 10)
    assert "was killed by signal 9: unmounting" in log_of(root_work)
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
    assert waiters[0].wait(5) == 1
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
    started = time.monotonic()
    assert root_work.run("restart", "mnt").returncode == 0
    assert time.monotonic() - started < 60
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
