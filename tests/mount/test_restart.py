"""Real workers that die, hang and are replaced, under processes that read."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from monarchfs.types import OperationError
from tests.support.mounting import Bench, requires_mounts, wait_for
from tests.support.processes import open_slots
from tests.support.scenario import Scenario, play, playing

pytestmark = requires_mounts

KILLS = 20

HANDED_OVER = {
    "kernel": ("-o", "standby=true"),
    "journal": ("-o", "kernel_resend=false", "--data-path", "relay"),
}
"""What a dead worker took comes to the next, which was loaded ahead, by the kernel (Linux 6.9); or
by the journal, to one that was not."""


CASES = {
    "kernel or journal: killed under readers, and while reads wait for the source": """
file f{0..8} 3000000; file small{0..9} 110000
mount --evict lru tier=9M
slow seconds=0.005; loop one; loop two; loop three
kill worker times=4; kill worker SIGSEGV; death the worker was killed by signal 11
kill worker SIGTERM; death the worker was killed by signal 15
end one; end two; end three
""",
    "kernel or journal: who waits across a restart can be killed": """
file f0 10
mount --freshness ttl=60
hang open *; begin_open waiter f0; until requests.waiting = 1
kill worker; until requests.waiting = 1
kill waiter; until requests.waiting = 0
begin_open signalled f0; until requests.waiting = 1
signal signalled D; kill worker; until requests.waiting = 1
kill signalled; heal; until requests.waiting = 0
""",
    "kernel: pages of an outdated file that is open": """
file f0 3000000
mount --freshness ttl=0.1 --prefetch none
open holder; held holder
file f0 3000000; kill worker; same
held holder error=ESTALE|none; close holder
""",
    "kernel: a stopped worker is replaced": """
file f{0..2} 50000
mount --freshness ttl=60
stop worker; read; death no sign of life
""",
    "journal: replaced on purpose under readers": """
file f{0..19} 110000; file long 5000000
mount --freshness ttl=60
loop reader
command restart --json; command restart --json; command restart --json
end reader
""",
    "journal: descriptors on files that were replaced": """
file f0 300000; file remote 3000000
mount --freshness ttl=0.1 tier=1M
open holder; held holder; idle
replace f0 2000; replace remote 2000
kill worker; held holder f0 old=1; held holder remote error=ESTALE; same
kill worker; held holder f0 old=1; held holder remote error=ESTALE; same
close holder
""",
    "journal: copying goes on": """
file d/{0..29} 50000; file opened 8000000
mount --freshness ttl=60
slow seconds=0.05; command warm d; part opened 0 10
kill worker; kill worker; heal
until files.resident = 31
""",
}
"""Under readers, copying and evicting go on: not all fits into the tier. Of an outdated file, the
dead worker may not have come to telling the kernel. Copying goes on of files that somebody asked
for, and of one that was being copied after it was opened. By the kernel,
`tests/scenarios/killed_worker.txt` has a worker replaced on purpose."""


@pytest.mark.parametrize(
    ("way", "case"), [(way, case) for case in CASES for way in HANDED_OVER if way in case[:20]]
)
def test_case(work: Bench, way: str, case: str) -> None:
    play(work, CASES[case], *HANDED_OVER[way])


@pytest.mark.parametrize("way", HANDED_OVER)
def test_a_worker_that_cannot_be_reaped_holds_nobody_up(work: Bench, way: str) -> None:
    with playing(work, *HANDED_OVER[way]) as scenario:
        scenario.play("file f{0..4} 50000; file hung 50000; settle; mount --freshness ttl=3600")
        scenario.play("read f*; size hung; idle")
        scenario.play("hang * *; begin_open holder hung; until requests.waiting = 1")
        first = work.mounts[0].worker_pid()
        for _ in range(2):
            scenario.play("kill worker; drop_caches; read f*")
        assert Path(f"/proc/{first}/stat").exists(), "it should have been unable to die"
        scenario.play("heal; finish holder; check one is open; held holder; close holder")
        wait_for(lambda: not Path(f"/proc/{first}/stat").exists(), "the old worker to go")


def serving(scenario: Scenario, restarts: int = 0) -> Any:
    """The worker that serves after so many were replaced."""

    def found() -> dict[str, Any] | None:
        now = scenario.asked()
        serves = now["state"] == "serving" and now["worker"]["restarts"] >= restarts
        return now["worker"] if serves else None

    return wait_for(found, "a worker")


def test_worker_and_standby_killed_together_again_and_again(work: Bench) -> None:
    """Also those that are only starting. Whoever does it, the mount stays, and stays whole. On a
    machine that does other things as well, a reader's round takes longer than the pauses."""
    with playing(work) as scenario:
        scenario.play("file f{0..9} 110000; file long 1000000")
        scenario.play("mount --freshness ttl=60 -o standby=true")
        scenario.play("loop reader f* long")
        chance = random.Random(9)
        for _ in range(KILLS):
            for pid in scenario.workers():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if chance.random() < 0.7:  # else the next one is killed while it starts
                serving(scenario)
            time.sleep(chance.uniform(0, 0.3))
        scenario.restarts = scenario.deaths = serving(scenario)["restarts"]
        assert scenario.restarts > KILLS / 2
        scenario.play("end reader within=20")


def test_a_busy_machine_does_not_look_like_a_hang(work: Bench) -> None:
    """Eight processes want the processors all the while."""
    with ExitStack() as hogs:
        for _ in range(8):
            hog = hogs.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            hogs.callback(hog.kill)
        with playing(work) as scenario:
            scenario.play("file f{0..9} 110000; file long 1000000; mount --freshness open")
            scenario.play("loop one; loop another; idle; end one; end another")
    assert "the worker hangs" not in work.log()


@pytest.mark.parametrize("way", HANDED_OVER)
def test_killed_while_it_takes_its_first_requests(work: Bench, way: str) -> None:
    """The kernel copies a request to who takes it; where it cannot, its caller gets EIO."""
    readers, chance = [f"reader{n}" for n in range(4)], random.Random(5)
    with playing(work, *HANDED_OVER[way]) as scenario:
        scenario.play("file f{0..19} 10; mount --freshness open")
        for reader in readers:
            scenario.loop(reader)
        for number in range(14):
            worker = serving(scenario, number)
            time.sleep(chance.uniform(0, 0.004) if number % 2 else 0)
            os.kill(worker["pid"], signal.SIGKILL)
        scenario.restarts = scenario.deaths = serving(scenario, 14)["restarts"]
        for reader in readers:
            scenario.end(reader)


def test_an_index_that_is_lost_meanwhile(work: Bench) -> None:
    """Numbers that the kernel knows do not come to mean something else."""
    with playing(work) as scenario:
        scenario.play("file f{0..19} 20000; mount --freshness immutable; open holder f0; read")
        (mount,) = work.mounts
        mount.wait_idle()
        newest = max(path.stat().st_ino for path in mount.path.iterdir())
        worker = mount.worker_pid()
        os.kill(worker, signal.SIGSTOP)
        (work.path / "state" / "index" / "data.mdb").write_bytes(b"damaged" * 10_000)
        os.kill(worker, signal.SIGSEGV)
        os.kill(worker, signal.SIGCONT)
        scenario.restarts = scenario.deaths = serving(scenario, 1)["restarts"]
        # It is found out with the first open (the kernel walks the path again) or, where the
        # kernel opens without asking, with the first read (it is told to forget all names).
        scenario.play("drop_caches; same")
        assert all(path.stat().st_ino > newest for path in mount.path.iterdir())
        scenario.play("held holder error=ESTALE|none; close holder")


SAFE = [("ttl=0.1", "journal"), ("immutable", "kernel"), ("immutable --touch-source 1d", "journal")]


@pytest.mark.parametrize(("freshness", "way"), SAFE)
def test_safe_mode_serves_the_source(work: Bench, freshness: str, way: str) -> None:
    """Which workers that crash one after the other lead to. With ``immutable``, files are read
    without having been opened; but if they are touched, opens are known, also afterwards."""
    with playing(work, *HANDED_OVER[way]) as scenario:
        scenario.play(f"file f{{0..4}} 50000; mount --freshness {freshness}; read; list; idle")
        (mount,) = work.mounts
        crashed: set[int] = set()

        def safe() -> Any:
            """The worker in safe mode; each that serves before it crashes."""
            now = scenario.asked()
            worker = now["worker"]
            if now["state"] == "serving" and worker["pid"] not in crashed:
                crashed.add(worker["pid"])
                os.kill(worker["pid"], signal.SIGSEGV)
            # What is said of tiers may be the last that a dead worker said.
            is_safe = now["state"] == "safe mode" and now["tiers"] == []
            return worker if is_safe and worker["pid"] not in crashed else None

        first = wait_for(safe, "safe mode")
        scenario.play("drop_caches")
        if "immutable" in freshness:
            (work.path / "backing" / "later").mkdir()
            assert "later" not in os.listdir(mount.path)
            (work.path / "backing" / "later").rmdir()
            scenario.play("read f*")
        else:
            scenario.play("file later/f 10; listed; file f{0..4} 60000; same")
        scenario.play("until served.local_opens = 0")
        with pytest.raises(OperationError, match="in safe mode"):
            scenario.order("f0")
        crashed.add(first["pid"])
        os.kill(first["pid"], signal.SIGKILL)
        scenario.restarts = scenario.deaths = wait_for(safe, "safe mode again")["restarts"]
        scenario.play("command restart; until tiers.0.files = 5; open holder f0")
        assert open_slots(mount) == 1 or freshness == "immutable"
        scenario.play("close holder")
