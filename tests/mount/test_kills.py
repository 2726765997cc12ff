"""Real workers that are killed again and again, or get no processor, under processes that read
and compare."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

from tests.support.mounting import Bench, requires_mounts, wait_for
from tests.support.scenario import play, playing

pytestmark = requires_mounts

KILLS = 30


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
                wait_for(lambda: scenario.asked()["state"] == "serving", "the next worker")
            time.sleep(chance.uniform(0, 0.3))
        wait_for(lambda: scenario.asked()["state"] == "serving", "a worker")
        scenario.restarts = scenario.deaths = scenario.asked()["worker"]["restarts"]
        assert scenario.restarts > KILLS / 2
        scenario.play("end reader within=20")


BUSY = """
file f{0..9} 110000; file long 1000000
mount --freshness open
loop one; loop another; idle; end one; end another
"""


def test_a_busy_machine_does_not_look_like_a_hang(work: Bench) -> None:
    """Eight processes want the processors all the while."""
    with ExitStack() as hogs:
        for _ in range(8):
            hog = hogs.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            hogs.callback(hog.kill)
        play(work, BUSY)
    assert "the worker hangs" not in work.log()
