"""Mounts as on Linux 4.18: without the system calls and the settings of FUSE that came later."""

import errno
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mount.test_run import Jobs
from tests.support import mounting, older_kernel, surroundings
from tests.support.mounting import Bench, requires_mounts, wait_for
from tests.support.older_kernel import ALL_NEWER, NEWER_CALLS
from tests.support.private_mounts import left_clean, make_place
from tests.support.processes import parent_of
from tests.support.scenario import playing

pytestmark = [*requires_mounts, surroundings.requires_namespaces]

NOT_IN_CONTAINERS = ",".join(calls for name, calls in NEWER_CALLS.items() if name != "clone3")
"""glibc's threads need ENOSYS to go back to clone(2), and containers say that."""


class Kernel(NamedTuple):
    """Which system calls fail how, and the rest as in tests/support/older_kernel.py."""

    code: int
    numbers: str
    minor: int = 0
    release: str = ""

    @property
    def relays(self) -> bool:
        """Whether it reads no replica itself: that is later than 7.27, and takes openat2(2)."""
        return self.minor > 0 or any(
            one in (ALL_NEWER, NEWER_CALLS["openat2"]) for one in self.numbers.split(",")
        )

    def assert_in_force(self, worker: int) -> None:
        supervisor = parent_of(worker)
        for pid in (worker, supervisor):
            assert "Seccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text()
        opened = set()
        for place in Path(f"/proc/{supervisor}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                opened.add(os.readlink(place))
        # FUSE_NOTIFY_RESEND came with 7.40.
        assert not self.minor or "/memfd:monarchfs-requests (deleted)" in opened


LACKED_BY = zip(NEWER_CALLS.values(), combinations(range(6), 3), strict=False)
"""By three of six kernels, others for each: for any two calls one lacks the first and has the
second."""
LACKED = [(calls, number) for calls, kernels in LACKED_BY for number in kernels]
SOME = [
    pytest.param(
        Kernel(errno.ENOSYS, ",".join(calls for calls, number in LACKED if number == kernel)),
        id=f"some {kernel}",
    )
    for kernel in range(6)
]
WHOLE = [
    pytest.param(Kernel(errno.ENOSYS, ALL_NEWER), id="none", marks=pytest.mark.smoke),
    pytest.param(Kernel(errno.EPERM, NOT_IN_CONTAINERS), id="EPERM"),
    pytest.param(Kernel(errno.ENOSYS, ALL_NEWER, 27), id="FUSE 7.27"),
]


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """All commands of the test run on it."""
    made: Kernel = request.param
    words = [sys.executable, older_kernel.__file__, *map(str, made)]
    monkeypatch.setattr(mounting, "MONARCHFS", words)
    return made


@pytest.mark.parametrize("kernel", [*SOME, *WHOLE], indirect=True)
def test_a_mount(work: Bench, kernel: Kernel) -> None:
    """Read, listed, its worker killed, unmounted, checked."""
    with playing(work, apart=True) as scenario:
        # The release says that young files can be mapped without the page cache: not by 7.27.
        scenario.play("file f{0..3} 110000; file long 1500000; settle; mount; loop reader")
        (mount,) = work.mounts
        kernel.assert_in_force(mount.worker_pid())
        scenario.play("kill worker; end reader")
        assert os.access(mount.path / "long", os.R_OK)
        assert mount.status()["data_path"] == ("relay" if kernel.relays else "passthrough")


@pytest.mark.parametrize("kernel", [*SOME, *WHOLE], indirect=True)
def test_a_mount_of_run(work: Bench, kernel: Kernel) -> None:
    ran_and_killed(work, kernel, user=False)


@pytest.mark.parametrize("kernel", WHOLE, indirect=True)
def test_a_users_mount_of_run(work: Bench, kernel: Kernel) -> None:
    ran_and_killed(work, kernel, user=True)


def ran_and_killed(work: Bench, kernel: Kernel, *, user: bool) -> None:
    """The worker is killed, then its supervisor, while a job reads."""
    with left_clean(make_place(work, user=user)) as place:
        jobs = Jobs(place)
        reader = jobs.reading(1)
        for of in (int, parent_of):
            worker = jobs.status()["worker"]["pid"]
            kernel.assert_in_force(worker)
            os.kill(of(worker), signal.SIGKILL)
            wait_for(partial(jobs.is_other, worker), "another worker")
        jobs.ended(reader)


@pytest.mark.smoke
@pytest.mark.parametrize("kernel", [Kernel(0, "", 0, "6.12.9")], indirect=True)
def test_listings_where_the_kernel_keeps_those_it_has(work: Bench, kernel: Kernel) -> None:
    """A change of a directory shows also if its mtime, by which the kernel goes, is as before."""
    source = work.path / "source"
    source.mkdir()
    (source / "old").touch()
    os.utime(source, (1e9, 1e9))
    mount = work.mount(source, "--freshness", "ttl=1")

    def names() -> list[str] | None:
        try:
            return os.listdir(mount.path)
        except BlockingIOError:
            return None  # see older_kernel.py

    for _ in range(4):
        assert wait_for(names, "the listing") == ["old"]
    (source / "old").rename(source / "new")
    os.utime(source, (1e9, 1e9))
    wait_for(lambda: names() == ["new"], "the change to show", 10)
