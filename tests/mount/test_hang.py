"""A source that hangs stalls only what needs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support import trees
from tests.support.mounting import Bench, FaultySource, Mount, requires_mounts, wait_for
from tests.support.scenario import play
from tests.support.timing import Stopwatch

pytestmark = requires_mounts

READER = "import sys; [open(path, 'rb').read() for path in sys.argv[1:]]"
WAITING = 1500
WAITING_THREADS = 16
"""Fewer than requests: what a thread takes that asks the source is not theirs."""
MOST_KIB_A_REQUEST = 20
STATTER = "import os, sys; os.stat(sys.argv[1])"


class Readers:
    """Processes that will wait; killed at the end whatever happens."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, code: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def threads(self, count: int, path: Path) -> subprocess.Popen[bytes]:
        """One process with many threads that each open a file ``path``N."""
        code = (
            "import sys, threading\n"
            "def read(n):\n"
            "    try: open(f'{sys.argv[1]}{n}', 'rb').read()\n"
            "    except OSError: pass\n"
            "threading.stack_size(65536)\n"
            f"ts = [threading.Thread(target=read, args=(n,)) for n in range({count})]\n"
            "[t.start() for t in ts]; [t.join() for t in ts]\n"
        )
        return self.start(code, path)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(30)


@pytest.fixture
def readers() -> Readers:
    return Readers()


@pytest.fixture
def source(faulty: FaultySource, readers: Readers) -> Iterator[FaultySource]:
    yield faulty
    if faulty.process.poll() is None:
        faulty.faults()
    readers.close()


def fill(source: FaultySource, resident: int, cold: int) -> dict[str, bytes]:
    contents = {f"r{n}": trees.random_bytes(100_000, n) for n in range(resident)}
    for name, data in contents.items():
        (source.backing / name).write_bytes(data)
    for n in range(cold):
        (source.backing / f"c{n}").write_bytes(b"cold")
    return contents


def read_resident(mount: Mount, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        assert (mount.path / name).read_bytes() == data


@pytest.mark.parametrize("freshness", ["immutable", "ttl=1"])
def test_what_is_local_is_served_while_hundreds_wait(
    work: Bench, source: FaultySource, readers: Readers, freshness: str
) -> None:
    contents = fill(source, 20, 500)
    mount = work.mount(source.path, "--freshness", freshness, "-o", "source_deadline_seconds=0.5")
    read_resident(mount, contents)
    names = sorted(os.listdir(mount.path))
    mount.wait_idle()
    source.faults(hang=["* *"])
    readers.threads(500, mount.path / "c")
    wait_for(lambda: mount.status()["requests"]["waiting"] >= 450, "requests to wait")
    Path("/proc/sys/vm/drop_caches").write_text("3")
    time.sleep(1.1 if freshness != "immutable" else 0)  # past the promise: the answers are stale
    started = Stopwatch()
    read_resident(mount, contents)
    started.check(5, "resident reads were held up")
    assert sorted(os.listdir(mount.path)) == names
    for name, data in contents.items():
        assert os.stat(mount.path / name).st_size == len(data)
    if freshness != "immutable":
        assert mount.status()["served"]["stale_answers"] > 0
    assert mount.umount(timeout=5).returncode == 0


@pytest.mark.parametrize("targets", [True, False], ids=["targets", "no targets"])
def test_one_storage_target_that_hangs_is_waited_for_once(
    work: Bench, source: FaultySource, targets: bool
) -> None:
    """By a reader of all files, a third of which are on it. The others are asked about as ever."""
    count, deadline = 30, 4.0
    contents = fill(source, count, 0)
    if targets:
        source.faults(targets={f"r{n}": [n % 3] for n in range(count)})
    options = ("--freshness", "ttl=1", "-o", f"source_deadline_seconds={deadline}")
    mount = work.mount(source.path, *options)
    read_resident(mount, contents)
    mount.wait_idle()
    time.sleep(1.1)  # past the promise
    source.faults(hang=[f"getattr r{n}" for n in range(0, count, 3)])
    took: list[float] = []
    for _ in range(2):
        for name, data in contents.items():
            watch = Stopwatch()
            assert (mount.path / name).read_bytes() == data
            took.append(watch.elapsed())
    print(f"{sum(took):.1f} s in all, longest {[round(one, 2) for one in sorted(took)[-3:]]}")
    assert sum(one > deadline for one in took) <= 1
    (source.backing / "r1").write_bytes(b"changed")
    wait_for(lambda: (mount.path / "r1").read_bytes() == b"changed", "the change to be seen")
    source.faults()
    (source.backing / "r0").write_bytes(b"changed")
    wait_for(lambda: (mount.path / "r0").read_bytes() == b"changed", "the change to be seen")


def cached(path: Path | str, seconds: float) -> str | None:
    """The mode as statx(2) with AT_STATX_DONT_SYNC shows it; None if that takes too long."""
    command = ["stat", "--cached=always", "-c", "%f", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            return process.communicate(timeout=seconds)[0].strip()
        except subprocess.TimeoutExpired:
            process.kill()
            return None


@pytest.mark.parametrize("freshness", ["immutable", "ttl=1", "open"])
def test_statx_that_need_not_ask_waits_for_nothing(
    work: Bench, source: FaultySource, freshness: str
) -> None:
    (source.backing / "seen").mkdir()
    (source.backing / "not").mkdir()
    mount = work.mount(source.path, "--freshness", freshness, "-o", "source_deadline_seconds=0.5")
    source.faults(hang=["* *"])
    source.counts(reset=True)
    # What the kernel makes up for a root that it has asked nothing about.
    assert cached(mount.path, 2) == "4000"
    assert source.data_operations() == 0
    source.faults()
    mode = f"{(mount.path / 'seen').stat().st_mode:x}"
    root = f"{mount.path.stat().st_mode:x}"
    inside = os.open(mount.path / "seen", os.O_PATH)
    time.sleep(1.1 if freshness != "immutable" else 0)  # past the promise
    source.faults(hang=["* *"])
    assert cached(mount.path, 2) == root
    assert cached(f"/proc/{os.getpid()}/fd/{inside}/.", 2) == mode
    os.close(inside)
    if freshness != "open":
        assert cached(mount.path / "seen", 5) == mode
    # Nothing is known of this one. The process that waits can be killed.
    assert cached(mount.path / "not", 1) is None
    source.faults()
    assert cached(mount.path / "not", 5) == mode


def resident_kib(pid: int) -> int:
    """Of a process' own memory, what is in RAM (RssAnon of proc(5)): in KiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:"))


def test_a_request_that_waits_takes_little_memory(
    work: Bench, source: FaultySource, readers: Readers
) -> None:
    fill(source, 0, WAITING)
    mount = work.mount(source.path, "-o", f"source_threads={WAITING_THREADS}")
    assert len(os.listdir(mount.path)) == WAITING
    mount.wait_idle()
    before = resident_kib(mount.worker_pid())
    source.faults(hang=["open *"])
    readers.threads(WAITING, mount.path / "c")
    wait_for(lambda: mount.status()["requests"]["waiting"] >= WAITING * 0.99, "requests to wait")
    each_kib = (resident_kib(mount.worker_pid()) - before) / WAITING
    print(f"{each_kib:.1f} KiB a request")
    assert each_kib < MOST_KIB_A_REQUEST
    source.faults()
    assert mount.umount(timeout=5).returncode == 0


KILLED = """
file c0 4000; directory d
mount --freshness ttl=60
hang {operation} *; {begin}
until source.{operation} >= 1; until requests.waiting = 1
kill waiter within={within}; {given_up}
heal; until requests.waiting = 0
read c0
"""
GIVEN_UP = "until requests.waiting = 0"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("operation", "begin", "given_up", "within"),
    [
        ("lookup", "begin waiter c0", GIVEN_UP, 1),
        ("open", "begin waiter c0", GIVEN_UP, 1),
        ("readdir", "begin_list waiter d", GIVEN_UP, 1),
        # Readahead: nobody's request, it goes on for whoever wants the page.
        ("read", "begin waiter c0", "", 1),
        # The kernel does not tell of the signal.
        ("read", "begin waiter c0 way=direct", "", 20),
    ],
)
def test_a_waiting_process_dies_at_once(
    work: Bench, operation: str, begin: str, given_up: str, within: int
) -> None:
    words = {"operation": operation, "begin": begin, "given_up": given_up, "within": within}
    play(work, KILLED.format(**words))


CASES = {
    "a signal that does not kill does not disturb": """
file c0 4000
mount --freshness ttl=60
hang read *; begin waiter c0; until requests.waiting >= 1
signal waiter; signal waiter; signal waiter; until requests.waiting >= 1
heal; finish waiter
""",
    "who was signalled before can still be killed": """
file c0 4000
mount --freshness ttl=60
hang open *; begin waiter c0; until requests.waiting = 1
signal waiter D; kill waiter
""",
    # Not look-ups: the kernel lets only one at a time into a directory of such a source.
    "one hung file does not stop the others": """
file r{0..59} 100000; file c{0..5} 4
mount --freshness immutable
hang open c{0..5}; begin_at_once waiter c{0..5}; until requests.waiting >= 6
read r*; until files.resident = 60
heal; finish waiter
""",
    "errors are the source's": """
file c0 4
mount --freshness ttl=60
fail lookup c0 EIO; missing c0 error=EIO
heal; size c0
""",
}


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, CASES[case])


DIRECT_READER = """
import mmap, os, sys, threading
path, count, offset = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
right = []
def read(n):
    fd, page = os.open(f"{path}{n}", os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
    os.preadv(fd, [page], offset)
    if page[:] == bytes.fromhex(sys.argv[4]):
        right.append(n)
threads = [threading.Thread(target=read, args=(n,)) for n in range(count)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(count - len(right))
"""
"""Not by the page cache: who waits for a page of it can be killed in any case."""


@contextmanager
def not_kept(work: Bench, source: FaultySource, count: int) -> Iterator[tuple[Mount, str]]:
    """A mount that keeps nothing of the files f0, f1, ... and whose threads read them; what they
    hold at 512 KiB."""
    data = trees.random_bytes((1 << 20) + 4096, 5)  # else it might be read as a whole
    for n in range(count):
        (source.backing / f"f{n}").write_bytes(data)
    mount = work.mount(source.path, "--prefetch", "none")
    with ExitStack() as files:
        for n in range(count):
            file = files.enter_context((mount.path / f"f{n}").open("rb", buffering=0))
            assert file.read(4096) == data[:4096]
        yield mount, data[1 << 19 : (1 << 19) + 4096].hex()


def test_a_process_whose_read_of_what_is_not_kept_hangs_can_be_killed(
    work: Bench, source: FaultySource, readers: Readers
) -> None:
    with not_kept(work, source, 1) as (mount, page):
        source.faults(hang=["read *"])
        asked = source.counts()["operations"]["read"]
        reader = readers.start(DIRECT_READER, mount.path / "f", 1, 1 << 19, page)
        wait_for(lambda: source.counts()["operations"]["read"] > asked, "the source to be asked")
        reader.kill()
        assert reader.wait(20) == -signal.SIGKILL
        wait_for(lambda: mount.status()["requests"]["waiting"] == 0, "the request to be given up")
        source.faults()
        again = readers.start(DIRECT_READER, mount.path / "f", 1, 1 << 19, page)
        assert again.wait(30) == 0


def test_hundreds_of_reads_of_what_is_not_kept_hang_and_are_answered_in_the_end(
    work: Bench, source: FaultySource, readers: Readers
) -> None:
    """They do not keep others waiting, once it is seen that they hang, and a worker that is killed
    meanwhile takes none of them along."""
    with not_kept(work, source, 151) as (mount, page):
        source.faults(hang=[f"read f{n}" for n in range(150)])
        hung = readers.start(DIRECT_READER, mount.path / "f", 150, 1 << 19, page)
        wait_for(lambda: mount.status()["requests"]["waiting"] == 150, "the requests to wait")
        other = readers.start(DIRECT_READER, mount.path / "f15", 1, 1 << 19, page)
        assert other.wait(30) == 0
        worker = mount.worker_pid()
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: mount.worker_pid() != worker, "the next worker")
        wait_for(lambda: mount.status()["requests"]["waiting"] == 150, "them to be asked for again")
        source.faults()
        assert hung.wait(20) == 0


def test_a_source_that_hangs_at_the_end_of_a_file_holds_up_nobody(
    work: Bench, source: FaultySource, readers: Readers
) -> None:
    """close(2) of its descriptors may wait for it, too."""
    source.faults(flushes=True)
    with not_kept(work, source, 3) as (mount, page):
        worker = mount.worker_pid()
        source.faults(hang=["flush *"])
    # Its own descriptor of each file, and the one that the threads have.
    wait_for(lambda: source.counts()["operations"].get("flush") == 6, "all to be closed")
    reader = readers.start(DIRECT_READER, mount.path / "f", 3, 1 << 19, page)
    assert reader.wait(30) == 0
    assert mount.worker_pid() == worker
    source.faults()
    assert mount.umount(timeout=5).returncode == 0


@pytest.mark.smoke
def test_umount_returns_in_time_and_leaves_only_what_is_stuck(
    work: Bench, source: FaultySource, readers: Readers
) -> None:
    fill(source, 0, 50)
    mount = work.mount(source.path)
    (mount.path / "c0").read_bytes()
    worker = mount.worker_pid()
    source.faults(hang=["* *"])
    reader = readers.threads(40, mount.path / "c")
    wait_for(lambda: mount.status()["requests"]["waiting"] >= 30, "the readers to wait")
    started = Stopwatch()
    done = mount.umount(timeout=4)
    started.check(8)
    assert done.returncode == 0, done.stderr
    assert not os.path.ismount(mount.path)
    reader.wait(20)
    source.faults()
    wait_for(
        lambda: (
            not Path(f"/proc/{worker}/cmdline").exists()
            or not Path(f"/proc/{worker}/cmdline").read_bytes()
        ),
        "the worker to go when the source lets it",
    )


def test_mounting_a_source_that_hangs_fails_in_time(work: Bench, source: FaultySource) -> None:
    from tests.support.mounting import run

    source.faults(hang=["* *"])
    point = work.path / "mnt"
    point.mkdir()
    started = Stopwatch()
    done = run(
        *("mount", str(source.path), str(point), "--tier", f"{work.path}/tier=1G"),
        *("--state-dir", f"{work.path}/state", "-o", "start_timeout_seconds=2"),
    )
    started.check(10)
    assert done.returncode == 1
    assert str(source.path) in done.stderr
    assert done.stderr.count("\n") == 1
    source.faults()
    assert os.listdir(point) == []


def test_with_open_freshness_an_open_waits_for_the_source(
    work: Bench, source: FaultySource, readers: Readers
) -> None:
    contents = fill(source, 1, 0)
    mount = work.mount(source.path, "--freshness", "open", "-o", "source_deadline_seconds=0.2")
    read_resident(mount, contents)
    mount.wait_idle()
    source.faults(hang=["* *"])
    reader = readers.start(READER, mount.path / "r0")
    wait_for(lambda: mount.status()["requests"]["waiting"] >= 1, "the open to wait")
    time.sleep(0.5)
    assert reader.poll() is None
    source.faults()
    assert reader.wait(30) == 0
