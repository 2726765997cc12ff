"""One worker after another, around a fake one: who waits gets his answer, or an error. Real ones
that die are in `tests.mount.test_restart`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.control import client
from monarchfs.supervisor.vital_signs import DEAD_SILENT_SECONDS
from monarchfs.types import OperationError
from tests.support.fake_mounts import (
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
from tests.support.mounting import assert_one_line, fuse_mounts, requires_mounts, wait_for
from tests.support.programs import execute
from tests.support.surroundings import requires_namespaces

pytestmark = requires_mounts

as_root = pytest.mark.parametrize("fake_area", [None], ids=["root"], indirect=True)
Waits = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def work(fake_area: Area) -> Iterator[Area]:
    """What is mounted in the end can be unmounted."""
    yield fake_area
    if fuse_mounts(str(fake_area.path)):
        umount(fake_area, "--timeout", "3")
    assert_unmounted(fake_area)


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
    worker: dict[str, Any] = wait_for(
        lambda: (now := status(work))["state"] == state and now["worker"], state
    )
    return worker


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
def test_who_asks_while_it_dies_is_told_what_follows(work: Area) -> None:
    work.mount()
    found, before = registered(work), status(work)["worker"]["pid"]
    os.kill(before, signal.SIGSTOP)
    with client.connect(found, 5) as waiting:
        waiting.ask({"command": "status"})
        with pytest.raises(OperationError, match="no peers"):  # after the other one was taken
            client.request(found, {"command": "change_peers"}, 5)
        os.kill(before, signal.SIGKILL)
        told = waiting.next(5)[0]["result"]
    worker = told["worker"]
    assert (told["state"], worker["pid"], worker["restarts"]) == ("restarting", None, 1)


@as_root
def test_one_that_never_gets_ready_is_replaced(work: Area) -> None:
    work.mount("-o", "start_timeout_seconds=1", mode="silent-later")
    os.kill(status(work)["worker"]["pid"], signal.SIGKILL)
    wait_for(lambda: "did not become ready in time" in log_of(work), "the time limit")


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


# -- on purpose


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


def test_a_dead_supervisor_leaves_no_worker_and_no_mount_in_the_way(work: Area) -> None:
    """It is reported, and goes with its registration."""
    work.mount()
    kill_worker(work, signal.SIGKILL)
    found = registered(work)
    os.kill(found.entry.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not work.workers(), "the worker to follow", 10)
    assert run_as_owner(work, "stat", f"{work.path}/mnt") != 0
    done = work.run("status", "mnt", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "dead")
    assert work.run("mount", "src", "mnt", *work.storage).returncode == 1
    umount(work)
    assert not os.path.lexists(found.stem + ".json")
    work.mount()
    assert status(work)["worker"]["restarts"] == 0
    assert fuse_mounts(str(work.path)) == [f"{work.path}/mnt"]


@as_root
@requires_namespaces
def test_a_look_from_another_namespace_leaves_a_dead_mount_its_registration(work: Area) -> None:
    work.mount()
    os.kill(registered(work).entry.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not work.workers(), "the worker to follow", 10)
    look = shlex.join(work.command("status"))
    script = f"umount --lazy {work.path}/mnt && {look}"
    assert execute(["unshare", "--mount", "sh", "-c", script]).returncode == 0
    done = work.run("status", "mnt", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "dead")
