"""What passes from a supervisor to its standbys."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from monarchfs.config import User
from monarchfs.config.places import DefaultPlaces, build_config
from monarchfs.config.settings import Settings
from monarchfs.fuse.handle_table import make_table
from monarchfs.supervisor.launch import Descriptors, WorkerProcess
from monarchfs.supervisor.reaper import Reaper
from monarchfs.supervisor.startup import Mounted
from monarchfs.supervisor.takeover import (
    MOST_STANDBYS,
    Handover,
    OrphanedWorker,
    StandbyConnection,
    Standbys,
    open_process,
    own,
)
from monarchfs.types import OperationError


@pytest.fixture
def handover(tmp_path: Path) -> Iterator[Handover]:
    def opened() -> int:
        return os.open(tmp_path, os.O_RDONLY)

    made = Handover(
        build_config(
            Settings(),
            source="/s",
            mountpoint="/m",
            user=User("alice", 1000, 1000, (4, 5)),
            places=DefaultPlaces("/cache", "/run/x"),
        ),
        Descriptors(
            opened(), opened(), opened(), (opened(), opened()), make_table(), opened(), None
        ),
        (opened(), opened(), opened()),
        mount_ns=5,
        init_request=b"\0\xff init",
        stack_depth=1,
        source_root=(2, 3),
        connection=44,
    )
    yield made
    made.close()


class Served:
    """A supervisor's side behind a socket, for one client at a time."""

    def __init__(self, handover: Handover, listener: socket.socket) -> None:
        self.standbys, self.listener = Standbys(handover), listener

    def stand_by(self) -> StandbyConnection:
        def take() -> None:
            connection, _ = self.listener.accept()
            connection.recv(1 << 16)
            self.standbys.add(connection)

        thread = threading.Thread(target=take)
        thread.start()
        try:
            return StandbyConnection(self.listener.getsockname())
        finally:
            thread.join()


@pytest.fixture
def served(handover: Handover, tmp_path: Path) -> Iterator[Served]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        made = Served(handover, listener)
        yield made
        made.standbys.end()


def same_files(one: Handover, other: Handover) -> bool:
    pairs = zip(one.all_descriptors, other.all_descriptors, strict=True)
    return all(os.path.sameopenfile(a, b) and a != b for a, b in pairs)


def test_a_standby_has_what_the_supervisor_has(handover: Handover, served: Served) -> None:
    served.standbys.tell(3, [os.getpid()])
    with closing(served.stand_by()) as standby:
        got = standby.handover
        assert same_files(got, handover)
        assert replace(got, descriptors=handover.descriptors, locks=handover.locks) == handover
        assert (standby.restarts, len(standby.workers), standby.ended) == (3, 1, False)
        assert standby.lives()
        assert served.standbys.wanted()
        served.standbys.tell(4, [os.getpid(), os.getppid()])
        assert standby.lives()
        assert (standby.restarts, len(standby.workers)) == (4, 2)
    assert not served.standbys.wanted()


def test_the_end_is_told_and_waited_for(served: Served) -> None:
    standby = served.stand_by()
    ending = threading.Thread(target=served.standbys.end)
    ending.start()
    while standby.lives() and not standby.ended:
        continue
    assert standby.ended
    standby.close()
    ending.join(5)
    assert not ending.is_alive()


def test_whoever_left_makes_room_for_others(served: Served) -> None:
    for _ in range(MOST_STANDBYS + 1):
        served.stand_by().close()
        served.standbys.tell(0, [])


def test_a_supervisor_that_dies_tells_nothing(served: Served) -> None:
    with closing(served.stand_by()) as standby:
        for connection in served.standbys._connections:
            connection.shutdown(socket.SHUT_RDWR)
        assert not standby.lives()
        assert not standby.ended


def test_one_alone_may_start_the_next_supervisor(served: Served) -> None:
    with closing(served.stand_by()) as first, closing(served.stand_by()) as second:
        mine = own(first.handover)
        assert mine is not None
        assert own(second.handover) is None
        os.close(mine)
        again = own(second.handover)
        assert again is not None
        os.close(again)


@pytest.mark.parametrize("change", [{"speaks": 0}, {"config": "{}"}, {"locks": 3}])
def test_what_cannot_be_understood_is_refused(
    handover: Handover, served: Served, change: dict[str, object]
) -> None:
    original = Handover.to_json
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handover, "to_json", lambda self: original(self) | change)
        with pytest.raises(OperationError):
            served.stand_by()
    served.standbys.end()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_orphan_is_killed_and_seen_to_end() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        worker = OrphanedWorker(open_process(process.pid))
        before = worker.reaped
        worker.kill()
        assert process.wait(10) == -signal.SIGKILL
        assert (before, worker.reaped, worker.is_quiet()) == (False, True, True)
        worker.kill()  # does nothing


@dataclass
class Dead:
    """A worker that was killed (``reaper.DeadWorker``)."""

    reaped: bool = False
    quiet: bool = False

    def is_quiet(self) -> bool:
        return self.reaped or self.quiet


@dataclass
class Repeating:
    """A mount, as far as a reaper needs it: how often the kernel was to repeat requests."""

    journal: bool = False
    resends: int = 0

    def resend(self) -> None:
        self.resends += 1


SERVING = cast(WorkerProcess, "a worker")


def test_requests_are_repeated_again_when_a_worker_that_hung_is_gone() -> None:
    """What it had taken, but not read to the end, was not repeated when its successor came."""
    mount, hung = Repeating(), Dead(quiet=True)
    reaper = Reaper(cast(Mounted, mount))
    reaper.add(hung)
    assert reaper.all_quiet()
    reaper.overtaken(hurried=False)
    reaper.tick(SERVING)
    assert (mount.resends, reaper.waits) == (0, False)
    hung.reaped = True
    for _ in range(2):
        reaper.tick(SERVING)
    assert mount.resends == 1


def test_requests_are_repeated_when_a_worker_that_ran_on_stops() -> None:
    mount, running = Repeating(), Dead()
    reaper = Reaper(cast(Mounted, mount))
    reaper.add(running)
    assert not reaper.all_quiet()
    reaper.overtaken(hurried=True)
    reaper.tick(SERVING)
    assert (mount.resends, reaper.waits) == (0, True)
    running.quiet = True
    reaper.tick(SERVING)
    assert (mount.resends, reaper.waits) == (1, False)
