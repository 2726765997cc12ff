"""Nodes that share a real distributed file system whose servers freeze and die under the job.

The source is a replicated GlusterFS volume on this machine. Each of its servers (a brick) is a
process, which gets SIGSTOP or SIGKILL while three nodes read everything.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.pool import Pool
from threading import Thread

from bench.gluster import BRICKS, bricks, gluster_volume
from bench.harness import Mount, Unusable, drop_caches, reader_processes, wait_for
from bench.nodes import Read, generate, read_all, whole_orders
from bench.report import Result
from bench.sharing import NODES, know_each_other, sharing_options
from bench.task import Task
from monarchfs.peers.web_server import find_nginx

ALONE, SHARED = "source alone", "sharing"
FIRST, LATER, LAST = (
    "epoch 1, a server frozen, then killed",
    "epoch 2, all servers frozen",
    "epoch 3, no server left",
)
SOON_SECONDS, FROZEN_SECONDS = 0.5, 3.0


@contextmanager
def frozen() -> Iterator[None]:
    """All servers."""
    stopped = bricks()
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            process.resume()


@contextmanager
def one_fails() -> Iterator[None]:
    """A server freezes for some seconds, and is killed then."""

    def fail() -> None:
        time.sleep(SOON_SECONDS)
        victim = bricks()[0]
        victim.suspend()
        time.sleep(FROZEN_SECONDS)
        victim.send_signal(signal.SIGKILL)

    thread = Thread(target=fail)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def none_left() -> Iterator[None]:
    for process in bricks():
        process.kill()
    yield


def measure(arm: str, task: Task, files: int, result: Result) -> None:
    """A volume of its own for each arm, because its servers do not come back."""
    place = task.place / ("a" if arm is ALONE else "s")  # short: sockets lie below it
    place.mkdir()
    with ExitStack() as undo:
        volume = undo.enter_context(gluster_volume(place / "gluster", replicas=BRICKS))
        task.say(f"{files:,} files are written")
        generate(volume, files)
        drop_caches()
        roots = [volume] * NODES
        epochs: dict[str, Callable[[], AbstractContextManager[None]]] = {FIRST: one_fails}
        mounts: list[Mount] = []
        if arm is SHARED:
            for node, words in enumerate(sharing_options(place)):
                mount = Mount(volume, place / f"n{node}", "--freshness", "immutable", *words)
                mounts.append(undo.enter_context(mount))
            wait_for(lambda: know_each_other(mounts), "the nodes to know each other", 60)
            roots = [mount.path for mount in mounts]
            epochs |= {LATER: frozen, LAST: none_left}
        pool: Pool = undo.enter_context(reader_processes(NODES))
        for epoch, (what, fault) in enumerate(epochs.items()):
            task.say(f"{arm}, {what}")
            orders = whole_orders(files, NODES, epoch)
            work = [
                (str(root), order, arm is ALONE) for root, order in zip(roots, orders, strict=True)
            ]
            drop_caches()
            with fault():
                found = pool.map(read_all, work, chunksize=1)
            if epoch == 0:
                for mount in mounts:
                    mount.wait_idle()
            report(result, arm, what, found)


def report(result: Result, arm: str, what: str, found: list[Read]) -> None:
    seconds = max(one.seconds for one in found)
    result.figure(f"{what}: time of the slowest node", seconds, "s", arm=arm)
    result.figure(f"{what}: longest call", max(one.longest for one in found), "s", arm=arm)
    wrong = sum(one.wrong for one in found)
    result.figure(f"{what}: files with wrong bytes", wrong, "", at_most=0, arm=arm)
    result.figure(f"{what}: errors", sum(one.errors for one in found), "", at_most=0, arm=arm)


def run(task: Task) -> Result:
    files = 600 if task.quick else 3000
    result = Result(
        "bricks",
        f"{NODES} nodes read {files:,} files of GlusterFS, whose servers freeze and die",
    )
    if find_nginx() is None:
        result.leave_out("all of it", "nginx is not installed: apt-get install nginx-light")
        return result
    try:
        for arm in (ALONE, SHARED):
            measure(arm, task, files, result)
    except Unusable as error:
        result.leave_out("all of it", str(error))
    result.notes = [
        f"the source: a volume of {BRICKS} servers with a copy each, and its client, on this"
        f" machine; frozen: SIGSTOP, for {FROZEN_SECONDS:g} s and for the whole of epoch 2;"
        " killed: SIGKILL",
        "source alone: its readers would wait for ever in epochs 2 and 3",
    ]
    return result
