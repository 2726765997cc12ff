"""Threads of a low priority: what they run, and that readers do not wait for them."""

import ctypes
import os
import platform
import subprocess
import threading

import pytest
import trio

from monarchfs.system.low_priority import LowPriorityThreads, at_normal_priority
from tests.support import trees
from tests.support.mirror import until
from tests.support.mounting import Bench, requires_fuse, run
from tests.support.processes import nice_of, threads_by_nice

OWN = os.getpriority(os.PRIO_PROCESS, 0)
NICE = min(19, OWN + 7)
BEST_EFFORT_LOWEST = 2 << 13 | 7
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31, "riscv64": 31, "ppc64le": 274, "s390x": 283}


def io_priority(thread: int) -> int:
    """ioprio_get(2) of one thread."""
    number = _IOPRIO_GET.get(platform.machine())
    if number is None:
        pytest.skip(f"needs the number of ioprio_get on {platform.machine()}: add it to this file")
    value: int = ctypes.CDLL(None).syscall(number, 1, thread)
    return value


def own_priorities() -> tuple[int, int, int]:
    thread = threading.get_native_id()
    return thread, nice_of(os.getpid(), thread), io_priority(thread)


async def test_a_task_that_is_in_a_hurry_is_not_put_behind() -> None:
    threads = LowPriorityThreads(NICE)

    async def hurries() -> None:
        at_normal_priority.set(True)
        _thread, nice, _io = await threads.run_sync(own_priorities)
        assert nice == OWN

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hurries)
    seen = {await threads.run_sync(own_priorities) for _ in range(3)}
    assert len(seen) == 1, "one after the other needs one thread"
    assert {of[1:] for of in seen} == {(max(NICE, OWN), BEST_EFFORT_LOWEST)}, "others are not"
    _thread, nice, io = await trio.to_thread.run_sync(own_priorities)
    assert (nice, io != BEST_EFFORT_LOWEST) == (OWN, True), "nor are the threads of everybody else"


@pytest.mark.parametrize("abandons", [True, False])
async def test_who_is_cancelled_leaves_only_where_that_was_agreed(abandons: bool) -> None:
    go_on, left = threading.Event(), trio.Event()
    threads, limiter = LowPriorityThreads(NICE), trio.CapacityLimiter(1)

    async def asks(scope: trio.CancelScope) -> None:
        with scope:
            await threads.run_sync(go_on.wait, 20, abandon_on_cancel=abandons, limiter=limiter)
        left.set()

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(asks, scope)
        await until(lambda: limiter.borrowed_tokens == 1, "a thread")
        scope.cancel()
        if abandons:
            await left.wait()
            assert limiter.borrowed_tokens == 1, "its thread is still at it"
        else:
            with trio.move_on_after(0.1):
                await left.wait()
            assert not left.is_set()
        go_on.set()
        await left.wait()
        await until(lambda: not limiter.borrowed_tokens, "the thread to end")


@requires_fuse
@pytest.mark.skipif(OWN == NICE, reason="needs a lower priority than its own: nice -n 18 at most")
def test_a_mount_copies_at_the_priority_that_it_was_given(work: Bench) -> None:
    names = [f"f{number}" for number in range(10)]
    source = trees.write_files(work.path / "src", {name: os.urandom(3 << 20) for name in names})
    mount = work.mount(source, "--prefetch", "all", "-o", f"copy_nice={NICE}")
    paths = [str(mount.path / name) for name in names]
    subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, timeout=60, check=True)
    now = mount.wait_idle()
    assert now["files"]["resident"] == len(names)
    pid = now["worker"]["pid"]
    # That nobody waits for; threads without work end after a while.
    assert run("refresh", str(mount.path), str(mount.path)).returncode == 0
    found = threads_by_nice(pid)
    assert set(found) == {OWN, NICE}
    assert pid in found[OWN], "the event loop is as quick as ever"
    assert len(found[OWN]) > 3, "and so are the threads that serve what is local"
    assert {io_priority(thread) for thread in found[NICE]} == {BEST_EFFORT_LOWEST}
    assert BEST_EFFORT_LOWEST not in {io_priority(thread) for thread in found[OWN]}
