"""What follows a worker's death, when one is taken to hang, and what standbys know: no mounts."""

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.config import User
from monarchfs.config.model import Descriptors
from monarchfs.fuse.handle_table import make_table
from monarchfs.supervisor import restart_policy
from monarchfs.supervisor.directories import LOCK, take_lock
from monarchfs.supervisor.failover import Reaper
from monarchfs.supervisor.launch import WorkerProcess
from monarchfs.supervisor.takeover import MOST_STANDBYS, Handover, StandbyConnection, Standbys
from monarchfs.supervisor.vital_signs import (
    ASLEEP_SECONDS,
    BUSY_SECONDS,
    DEAD_SILENT_SECONDS,
    SILENT_SECONDS,
    STARVED_SECONDS,
    Activity,
    VitalSigns,
)
from monarchfs.system.limits import passing
from monarchfs.types import OperationError
from tests.formats import make as frozen


class Life(NamedTuple):
    """How a worker lived, as `RestartPolicy.died` is told."""

    seconds: float | None
    answered: bool
    waited: bool
    killed: bool = False


class Verdict(NamedTuple):
    """What follows a worker's death: the end, if ``pause_seconds`` is None."""

    safe: bool
    pause_seconds: float | None = 0.0


GOOD = Life(5.0, answered=True, waited=True)
IDLE = Life(5.0, answered=False, waited=False)
USELESS = Life(5.0, answered=False, waited=True)
NEVER_READY = Life(None, answered=False, waited=False)
EARLY = Life(0.1, answered=True, waited=True)
LONG = Life(restart_policy.LONG_LIFE_SECONDS, answered=True, waited=True)
AT_ONCE = Verdict(safe=False)
SAFE = Verdict(safe=True)
END = Verdict(safe=True, pause_seconds=None)


def verdict_of(policy: restart_policy.RestartPolicy, life: Life) -> Verdict:
    pause = policy.died(**life._asdict())
    return Verdict(policy.safe, pause)


def after(*lives: Life, policy: restart_policy.RestartPolicy | None = None) -> list[Verdict]:
    deaths = policy or restart_policy.RestartPolicy()
    return [verdict_of(deaths, life) for life in lives]


def test_what_worked_is_replaced_at_once_however_often() -> None:
    assert after(*[GOOD, IDLE, LONG] * 500) == [AT_ONCE] * 1500


@pytest.mark.parametrize("life", [USELESS, NEVER_READY])
def test_lives_without_use(life: Life) -> None:
    pauses = [Verdict(False, seconds) for seconds in restart_policy.PAUSES_SECONDS]
    in_safe_mode = [Verdict(True, seconds) for seconds in restart_policy.PAUSES_SECONDS[1:]]
    assert after(*[life] * 7) == [*pauses, SAFE, *in_safe_mode, END]


def test_short_lives_are_a_loop_whatever_they_answered() -> None:
    verdicts = after(*[EARLY] * (restart_policy.MOST_EARLY + restart_policy.MOST_IN_SAFE_MODE))
    assert verdicts[: restart_policy.MOST_EARLY - 1] == [AT_ONCE] * (restart_policy.MOST_EARLY - 1)
    assert verdicts[restart_policy.MOST_EARLY - 1] == SAFE
    assert verdicts[-1] == END
    verdicts = after(*[USELESS] * 4, GOOD, LONG, GOOD)
    assert [(v.safe, v.pause_seconds is None) for v in verdicts[3:]] == [(True, False)] * 4
    last = after(*[USELESS] * 4, *[USELESS, USELESS, LONG] * 3)[-1]
    assert last.safe
    assert last.pause_seconds is not None
    assert after(*[USELESS] * 4, *[USELESS, GOOD] * 3)[-2] == END


def test_a_try_that_fails_leads_back_to_safe_mode_at_once_and_for_longer() -> None:
    deaths = restart_policy.RestartPolicy()
    lasted = []
    for _ in range(3 + len(restart_policy.RETRY_SECONDS)):
        while not deaths.safe:
            verdict = verdict_of(deaths, USELESS)
        lasted.append(deaths.retry_seconds)
        assert verdict == SAFE
        deaths.tried()
        assert verdict_of(deaths, GOOD) == AT_ONCE  # it did its work: no reason to give it up
        assert verdict_of(deaths, USELESS) == SAFE
        lasted.append(deaths.retry_seconds)
        deaths.tried()
    assert lasted[: len(restart_policy.RETRY_SECONDS)] == list(restart_policy.RETRY_SECONDS)
    assert set(lasted[len(restart_policy.RETRY_SECONDS) :]) == {restart_policy.RETRY_SECONDS[-1]}
    deaths = restart_policy.RestartPolicy()
    after(*[USELESS] * 4, policy=deaths)
    deaths.tried()
    assert after(LONG, USELESS, policy=deaths) == [AT_ONCE] * 2
    assert deaths.retry_seconds == restart_policy.RETRY_SECONDS[0]
    deaths = restart_policy.RestartPolicy()
    after(*[USELESS] * 5, policy=deaths)
    assert deaths.safe
    deaths.replaced()
    assert verdict_of(deaths, USELESS) == AT_ONCE


KILLED = Life(None, answered=False, waited=True, killed=True)


def test_one_that_is_killed_is_followed_at_once_or_soon_for_ever() -> None:
    verdicts = after(*[KILLED] * 200)
    assert verdicts[0] == AT_ONCE
    assert verdicts[1:] == [Verdict(False, restart_policy.KILLED_PAUSE_SECONDS)] * 199
    assert restart_policy.KILLED_PAUSE_SECONDS <= 0.25
    # Also one that serves, however short: what it did says how soon.
    assert after(*[EARLY._replace(killed=True)] * 200) == [AT_ONCE] * 200
    deaths = restart_policy.RestartPolicy()
    pauses = [deaths.not_started() for _ in range(200)]
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[4:] == [restart_policy.LONGEST_NOT_STARTED_SECONDS] * 196
    assert after(NEVER_READY, GOOD, policy=deaths) == [AT_ONCE] * 2
    assert deaths.not_started() == 0.5


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EAGAIN, "no thread"), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.EMFILE, "its own limit"), False),
        (RuntimeError("a bug"), False),
    ],
)
def test_what_a_worker_lacks_only_now(error: Exception, passes: bool) -> None:
    group = Mock(exceptions=[ValueError(), Mock(exceptions=[error])])
    assert [passing(one) is not None for one in (error, group)] == [passes] * 2


@given(st.lists(st.booleans(), max_size=30), st.lists(st.sampled_from([USELESS, EARLY, GOOD])))
def test_kills_change_nothing_of_what_other_deaths_do(kills: list[bool], row: list[Life]) -> None:
    """A crash loop is one, whether somebody kills workers meanwhile or not."""
    with_kills, without = restart_policy.RestartPolicy(), restart_policy.RestartPolicy()
    kills += [False] * len(row)
    for life in row:
        while kills.pop(0):
            verdict = verdict_of(with_kills, KILLED)
            assert verdict.pause_seconds is not None
            assert verdict.safe is without.safe
            kills.append(False)
        assert verdict_of(with_kills, life) == verdict_of(without, life)


class Signs(NamedTuple):
    """What is known of a worker at a moment, as `VitalSigns.check` is told."""

    beats: int
    waiting: int | None
    stuck_since: int = 0
    activity: Activity | None = None


def looks(*steps: tuple[float, Signs]) -> list[float]:
    """When a worker is taken to hang, of these looks (seconds after the one before, signs)."""
    now, found = 100.0, []
    pulse = VitalSigns(now)
    for step, signs in steps:
        now += step
        if pulse.check(now, *signs) is not None:
            found.append(now - 100.0)
    return found


def first_look(*signs: Signs) -> float:
    """When it is taken to hang, half a second between looks, from the first one on."""
    return looks(*[(0.5, one) for one in signs])[0] - 0.5


ASLEEP = Activity(runs=False, cpu_seconds=1.0, rests=True)
AT_THE_DISK = Activity(runs=False, cpu_seconds=1.0, rests=False)


@pytest.mark.parametrize(
    ("waiting", "activity", "seconds"),
    [
        pytest.param(3, None, SILENT_SECONDS, id="requests wait"),
        pytest.param(0, None, DEAD_SILENT_SECONDS, id="none waits"),
        pytest.param(None, None, DEAD_SILENT_SECONDS, id="nobody can see who waits"),
        pytest.param(None, ASLEEP, ASLEEP_SECONDS, id="nobody can see, and all threads sleep"),
        pytest.param(2, ASLEEP, ASLEEP_SECONDS, id="requests wait, and all threads sleep"),
        pytest.param(0, ASLEEP, DEAD_SILENT_SECONDS, id="none waits, and all threads sleep"),
        pytest.param(None, AT_THE_DISK, DEAD_SILENT_SECONDS, id="at the disk"),
    ],
)
def test_one_that_is_silent(waiting: int | None, activity: Activity | None, seconds: float) -> None:
    assert first_look(*[Signs(7, waiting, activity=activity)] * 32) == seconds


def test_sleep_counts_from_the_last_look_that_found_it_at_something() -> None:
    disk = Signs(7, None, activity=AT_THE_DISK)
    asleep = disk._replace(activity=ASLEEP)
    assert first_look(*[disk if n == 3 else asleep for n in range(30)]) == 1.5 + ASLEEP_SECONDS
    often = [disk if n % 4 == 3 else asleep for n in range(30)]
    assert first_look(*often) == DEAD_SILENT_SECONDS


def silent(share: float, waiting: int | None) -> list[tuple[float, Signs]]:
    """Looks at one that wants to run, and gets a share of the time."""
    return [
        (0.5, Signs(7, waiting, activity=Activity(True, 0.5 * n * share, rests=False)))
        for n in range(130)
    ]


def test_one_that_does_not_get_the_processor_is_not_to_blame() -> None:
    for waiting in (None, 0, 5):
        assert looks(*silent(0.25, waiting))[0] >= STARVED_SECONDS
    # One that has it, and does not come back, is.
    assert looks(*silent(1.0, 5))[0] <= SILENT_SECONDS + 1.0
    assert DEAD_SILENT_SECONDS <= looks(*silent(1.0, None))[0] <= DEAD_SILENT_SECONDS + 1.0


def test_who_was_stopped_with_it_does_not_blame_it() -> None:
    """A frozen control group thaws its processes one by one."""
    assert looks((0.5, Signs(7, 3)), (3600.0, Signs(7, 3)), (0.5, Signs(8, 3))) == []
    busy = Signs(7, 3, stuck_since=5)
    assert looks((0.5, busy), (3600.0, busy._replace(beats=8))) == []

    def steps(stuck: int) -> list[tuple[float, Signs]]:
        return [(0.5, Signs(n, 3, stuck_since=stuck)) for n in range(30)]

    assert looks(*steps(5))[0] == 0.5 + BUSY_SECONDS
    assert looks(*steps(0)) == []
    assert looks(*[(0.5, Signs(n, 3, stuck_since=n + 1)) for n in range(60)]) == []


# What passes from a supervisor to its standbys, and the lock that one of them has


@pytest.fixture
def handover(tmp_path: Path) -> Iterator[Handover]:
    def opened() -> int:
        return os.open(tmp_path, os.O_RDONLY)

    descriptors = Descriptors(
        opened(), opened(), opened(), (opened(), opened()), make_table(), opened(), None
    )
    locks = (opened(), opened(), opened())
    made = replace(frozen.handover(), descriptors=descriptors, locks=locks, peers=None)
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
        made.standbys.dismiss()


def test_a_standby_has_what_the_supervisor_has(handover: Handover, served: Served) -> None:
    served.standbys.tell(3, [os.getpid()])
    with closing(served.stand_by()) as standby:
        got = standby.handover
        for mine, its in zip(got.all_descriptors, handover.all_descriptors, strict=True):
            assert os.path.sameopenfile(mine, its)
            assert mine != its
        assert replace(got, descriptors=handover.descriptors, locks=handover.locks) == handover
        assert (standby.restarts, len(standby.workers), standby.ended) == (3, 1, False)
        assert standby.lives()
        assert served.standbys.wanted()
        served.standbys.tell(4, [os.getpid(), os.getppid()])
        assert standby.lives()
        assert (standby.restarts, len(standby.workers)) == (4, 2)
    assert not served.standbys.wanted()


def test_whoever_left_makes_room_for_others(served: Served) -> None:
    for _ in range(MOST_STANDBYS + 1):
        served.stand_by().close()
        served.standbys.tell(0, [])


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
    served.standbys.dismiss()
    assert len(os.listdir("/proc/self/fd")) == before


@dataclass
class Dead:
    """A worker that was killed: of ``DeadWorker``, what is looked at."""

    reaped: bool = False
    quiet: bool = False

    def is_quiet(self) -> bool:
        return self.reaped or self.quiet


@pytest.mark.parametrize("quiet", [True, False], ids=["one that hung", "one that ran on"])
def test_requests_are_repeated_when_the_worker_before_is_gone(quiet: bool) -> None:
    """What it had taken, but not read to the end, was not repeated when its successor came."""
    mount, serving, dead = Mock(journal=False), cast(WorkerProcess, "a worker"), Dead(quiet=quiet)
    reaper = Reaper(mount)
    reaper.add(cast(WorkerProcess, dead))
    assert reaper.all_quiet() is quiet
    reaper.overtaken(hurried=not quiet)
    reaper.tick(serving)
    assert (mount.resend.call_count, reaper.waits) == (0, not quiet)
    dead.quiet, dead.reaped = True, quiet
    for _ in range(2):
        reaper.tick(serving)
    assert (mount.resend.call_count, reaper.waits) == (1, False)


def test_a_lock_of_a_removed_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that gives up removes the file. The next one locks another file."""
    real = fcntl.flock

    def give_up_before(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        (tmp_path / LOCK).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", give_up_before)
    user = User("me", os.geteuid(), os.getegid(), tuple(os.getgroups()))
    state = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    lock = take_lock(state, user)
    assert os.path.samestat(os.fstat(lock), (tmp_path / LOCK).stat())
    os.close(lock)
    os.close(state)
