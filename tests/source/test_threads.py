"""Where no thread can be started, calls wait for one, and nobody gets an error for it.

pthread_create(3) fails by the limit of processes of a user who is not root.
"""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.fake_mounts import NOBODY, device_mode, interpreter_for
from tests.support.mounting import REPOSITORY, as_user, bench, requires_fuse, requires_root
from tests.support.programs import execute

pytestmark = requires_root

CALLS = """
import resource, sys, threading, time, trio
sys.path.insert(0, sys.argv[1])
from monarchfs.system.low_priority import run_sync_at
from monarchfs.system.threads import run_sync

_, hard = resource.getrlimit(resource.RLIMIT_NPROC)

def limit(processes):
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, hard))

async def main(in_thread, before):
    done = []
    async def call(number):
        done.append(await in_thread(lambda: (number, threading.get_ident())))
    for _ in range(before):  # a thread that the others can have
        await call(-1)
    limit(1)
    with trio.move_on_after(30) as scope:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, number)
            if not before:
                await trio.sleep(0.3)
                assert not done
                limit(hard)
        try:
            await in_thread(int, "x")
        except ValueError:
            done.append("raised")
    assert not scope.cancelled_caught, "it hangs"
    assert len(done) == before + 20 + 1
    if before:
        assert len({thread for _, thread in done[:-1]}) == 1
    limit(hard)

trio.run(main, {"any": run_sync, "low priority": run_sync_at(5)}[sys.argv[2]], int(sys.argv[3]))
"""


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("kind", ["any", "low priority"])
def test_calls_wait_for_the_threads_that_there_are(kind: str, threads: int) -> None:
    words = [interpreter_for(NOBODY), "-c", CALLS, str(REPOSITORY), kind, str(threads)]
    done = execute(as_user(NOBODY, words))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("calls wait for threads: can't start new thread") == 1


READER = """
import os, sys

def failed(error):
    sys.exit(str(error))

count = 0
for directory, _, files in os.walk(sys.argv[1], onerror=failed):
    for name in files:
        path = os.path.join(directory, name)
        os.listxattr(path)
        with open(path, "rb") as file:
            assert len(file.read()) == int(name)
        count += 1
print(count, "files")
"""


@requires_fuse
@pytest.mark.parametrize("prefetch", ["none", "access"])
def test_readers_of_a_mount_get_no_error(prefetch: str) -> None:
    """Names and large files are Python's to ask for, small ones the C part's."""
    with device_mode(0o666), bench() as work:
        source = work.path / "src"
        for number in range(6):
            (source / f"d{number}").mkdir(parents=True)
            for size in (100, 100_000, 3_000_000):
                name = str(size + number)
                (source / f"d{number}" / name).write_bytes(os.urandom(size + number))
        interpreter_for(NOBODY)
        work.path.chmod(0o1777)
        mount = work.mount(source, "--prefetch", prefetch, user=NOBODY)
        worker = mount.worker_pid()
        limits = Path(f"/proc/{worker}/limits").read_text()
        (hard,) = re.findall(r"Max processes +\S+ +(\S+)", limits)
        limit(worker, "1")
        command = as_user(NOBODY, [sys.executable, "-c", READER, str(mount.path)])
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
            # It ends, or waits, where the worker has no thread at all.
            with suppress(subprocess.TimeoutExpired):
                reader.wait(2)
            limit(worker, hard)
            said, wrong = reader.communicate(timeout=60)
        assert (reader.returncode, said, wrong) == (0, b"18 files\n", b"")
        assert mount.worker_pid() == worker


def limit(pid: int, processes: str) -> None:
    """The soft limit of a process of nobody's, set by nobody."""
    command = ["prlimit", f"--pid={pid}", f"--nproc={processes}:"]
    subprocess.run(as_user(NOBODY, command), check=True)
