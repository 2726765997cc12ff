"""A source that hangs stalls only what needs it, and a slow tier only who reads from it."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import surroundings, trees
from tests.support.mounting import Bench, FaultySource, assert_one_line, requires_mounts, wait_for
from tests.support.processes import status_of
from tests.support.programs import execute
from tests.support.reading import COMMAND, Reader
from tests.support.scenario import play, playing
from tests.support.timing import Stopwatch

pytestmark = requires_mounts

LOCAL = """
file r{{0..19}} 100000; file c{{0..499}} 4
mount --freshness {freshness} -o source_deadline_seconds=0.5
read r*; list; idle
hang * *; begin_at_once waiting c*; until requests.waiting >= 450
drop_caches; read r* within=5; list; size r*
{stale}; umount within=5; kill waiting
"""


@pytest.mark.parametrize("freshness", ["immutable", "ttl=0.1"])
def test_what_is_local_is_served_while_hundreds_wait(work: Bench, freshness: str) -> None:
    stale = "until served.stale_answers >= 1" if freshness != "immutable" else ""
    play(work, LOCAL.format(freshness=freshness, stale=stale))


@pytest.mark.parametrize("targets", [True, False], ids=["targets", "no targets"])
def test_one_storage_target_that_hangs_is_waited_for_once(work: Bench, targets: bool) -> None:
    """By a reader of all files, a third of which are on it. The others are asked about as ever."""
    hung, took = " ".join(f"r{n}" for n in range(0, 30, 3)), []
    with playing(work) as scenario:
        scenario.play("file r{0..29} 100000")
        if targets:
            work.faulty[0].faults(targets={f"r{n}": [n % 3] for n in range(30)})
        scenario.play("mount --freshness ttl=0.1 -o source_deadline_seconds=2.5; read; idle")
        scenario.play(f"hang getattr {hung}")
        for number in (*range(30), *range(30)):
            watch = Stopwatch()
            scenario.play(f"read r{number}")
            took.append(watch.elapsed())
        assert sum(one > 2.5 for one in took) <= 1
        scenario.play("file r1 7; same r1; heal; file r0 7; same r0")


def cached(path: Path | str, seconds: float) -> str | None:
    """The mode as statx(2) with AT_STATX_DONT_SYNC shows it; None if that takes too long."""
    command = ["stat", "--cached=always", "-c", "%f", path]
    try:
        return execute(command, timeout=seconds).stdout.strip()
    except subprocess.TimeoutExpired:
        return None


@pytest.mark.parametrize("freshness", ["immutable", "ttl=0.1", "open"])
def test_statx_without_asking_never_waits(
    work: Bench, faulty: FaultySource, freshness: str
) -> None:
    (faulty.backing / "seen").mkdir()
    (faulty.backing / "not").mkdir()
    mount = work.mount(faulty.path, "--freshness", freshness, "-o", "source_deadline_seconds=0.5")
    faulty.faults(hang=["* *"])
    faulty.counts(reset=True)
    # What the kernel makes up for a root that it has asked nothing about.
    assert cached(mount.path, 2) == "4000"
    assert faulty.data_operations() == 0
    faulty.faults()
    mode = f"{(mount.path / 'seen').stat().st_mode:x}"
    root = f"{mount.path.stat().st_mode:x}"
    inside = os.open(mount.path / "seen", os.O_PATH)
    time.sleep(0.2 if freshness != "immutable" else 0)  # past the promise
    faulty.faults(hang=["* *"])
    assert cached(mount.path, 2) == root
    assert cached(f"/proc/{os.getpid()}/fd/{inside}/.", 2) == mode
    os.close(inside)
    if freshness != "open":
        assert cached(mount.path / "seen", 5) == mode
    # Nothing is known of this one. The process that waits can be killed.
    assert cached(mount.path / "not", 1) is None
    faulty.faults()
    assert cached(mount.path / "not", 5) == mode


def test_a_request_that_waits_takes_little_memory(work: Bench) -> None:
    """There are fewer threads than requests: what a thread takes that asks the source is not
    theirs."""
    with playing(work) as scenario:
        scenario.play("file c{0..1499} 4; mount -o source_threads=16; list; idle")
        (mount,) = work.mounts
        worker = mount.worker_pid()
        before = int(status_of(worker)["RssAnon"].split()[0])  # KiB of its own (proc(5))
        scenario.play("hang open *; begin_at_once waiting c*; until requests.waiting >= 1485")
        each_kib = (int(status_of(worker)["RssAnon"].split()[0]) - before) / 1500
        print(f"{each_kib:.1f} KiB a request")
        scenario.play("heal; finish waiting")
        assert each_kib < 20


KILLED = """
file c{0..3} 4000; directory d
mount --freshness ttl=60 --prefetch access
hang lookup *; begin waiter c0; until source.lookup >= 1; until requests.waiting = 1
kill waiter within=1; until requests.waiting = 0
heal; fail lookup c1 EIO; missing c1 error=EIO
heal; read c0; size c{1..3}; check lookup
hang open *; begin waiter c1; until source.open >= 1; until requests.waiting = 1
kill waiter within=1; until requests.waiting = 0
heal; read c1; check open
hang readdir *; begin_list waiter d; until source.readdir >= 1; until requests.waiting = 1
kill waiter within=1; until requests.waiting = 0
heal; list d; check readdir
hang read *; begin waiter c2; until source.read >= 1; until requests.waiting = 1
kill waiter within=1  # readahead is nobody's request, and goes on for whoever wants the page
heal; until requests.waiting = 0; read c2; check read
hang read *; begin waiter c3 way=direct; until source.read >= 1; until requests.waiting = 1
kill waiter within=20  # the kernel does not tell of the signal
heal; until requests.waiting = 0; read c3
"""


@pytest.mark.smoke
def test_a_waiting_process_dies_at_once(work: Bench) -> None:
    play(work, KILLED)


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
    "with open freshness an open waits for the source": """
file r0 100000
mount --freshness open -o source_deadline_seconds=0.2
read; idle; hang * *; begin waiter r0; until source_io.stuck >= 1
until requests.waiting = 1; heal; finish waiter
""",
    "a read of what is not kept can be killed": """
file f 1052672
mount --prefetch none
open holder; held holder; check before
hang read *; begin waiter f way=direct; until source.read >= 1
kill waiter; until requests.waiting = 0
heal; read f way=direct; close holder
""",
}


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, CASES[case])


NOT_KEPT = """
file f{0..150} 1052672
mount --prefetch none
open holder; held holder
hang read f{0..149}; begin_at_once hung f{0..149} way=direct; until requests.waiting >= 150
read f150 way=direct
kill worker; until requests.waiting >= 150
heal; finish hung; close holder
"""
"""A byte less would be read as a whole. Not by the page cache: who waits for a page of it can be
killed in any case."""


def test_hundreds_of_reads_of_what_is_not_kept_hang_and_are_answered_late(work: Bench) -> None:
    """They do not keep others waiting, once it is seen that they hang, and a worker that is killed
    meanwhile takes none of them along."""
    play(work, NOT_KEPT)


def test_a_source_that_hangs_at_the_end_of_a_file_holds_up_nobody(work: Bench) -> None:
    """close(2) of its descriptors may wait for it, too: its own of each file, and the one that the
    threads have."""
    with playing(work) as scenario:
        scenario.play("file f{0..2} 1052672")
        work.faulty[0].faults(flushes=True)
        scenario.play("mount --prefetch none; open holder; held holder; check before")
        scenario.play("hang flush *; close holder; until source.flush = 6")
        scenario.play("read way=direct; heal")


@pytest.mark.smoke
def test_umount_returns_in_time_and_leaves_only_what_is_stuck(work: Bench) -> None:
    """What is left goes when the source lets it."""
    play(work, """
file c{0..49} 4
mount; read c0
hang * *; begin_at_once waiting c{0..39}; until requests.waiting >= 30
umount within=4; kill waiting
""")  # fmt: skip


def test_mounting_a_source_that_hangs_fails_in_time(work: Bench, faulty: FaultySource) -> None:
    faulty.faults(hang=["* *"])
    started = Stopwatch()
    done = work.try_to_mount(faulty.path, "-o", "start_timeout_seconds=2")
    started.check(10)
    assert_one_line(done, 1, str(faulty.path))
    assert os.listdir(work.path / "mnt") == []


THREADS, READERS = 10, 24
"""The threads that take requests from the kernel, and more than those."""


@pytest.fixture
def slow_tier(work: Bench) -> Iterator[Path]:
    """A directory whose files are read with 32 KiB/s in all, and written, opened and listed at
    once; of a type that is taken for local."""
    backing, tier = work.path / "tier-backing", work.path / "slow"
    backing.mkdir()
    tier.mkdir()
    words = ["bindfs", "-f", "--multithreaded", "--read-rate=32k", "-o", "subtype=exfat"]
    server = subprocess.Popen([*words, str(backing), str(tier)])
    try:
        wait_for(lambda: os.path.ismount(tier), "bindfs")
        yield tier
    finally:
        server.kill()
        server.wait(10)
        subprocess.run(["umount", "-l", str(tier)], check=False, capture_output=True)


def waiting(pid: int) -> int:
    """How many threads of a process wait for a page (D state)."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return sum(stat.read_text().rpartition(") ")[2][0] == "D" for stat in stats)


@surroundings.program("bindfs")
def test_reads_of_a_slow_tier_hold_up_no_metadata(work: Bench, slow_tier: Path) -> None:
    contents = {f"f{n}": trees.random_bytes(131072, n) for n in range(READERS)}
    source = trees.write_files(work.path / "source", contents | {f"m{n}": b"m" for n in range(100)})
    options = ("--freshness", "ttl=600", "--data-path", "relay", "--prefetch", "access")
    mount = work.mount(source, *options, tiers=[f"{slow_tier}=1G"])
    for name, content in contents.items():
        assert (mount.path / name).read_bytes() == content
    for n in range(100):
        os.stat(mount.path / f"m{n}")
    assert mount.wait_idle()["files"]["resident"] == READERS
    worker = mount.worker_pid()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    with closing(Reader(COMMAND)) as reader:
        reader.tell("read at once", str(mount.path), list(contents), "whole")
        readers = reader.process.pid
        wait_for(lambda: waiting(readers) >= THREADS, "the readers to wait")
        took = []
        for n in range(100):
            started = time.monotonic()
            assert os.stat(mount.path / f"m{n}").st_size == 1
            took.append(time.monotonic() - started)
        assert len(os.listdir(mount.path)) == READERS + 100
        assert max(took) < 1, f"{max(took):.1f} s for the slowest of {len(took)}"
        assert waiting(readers) >= THREADS, "the tier is not slow"
        assert mount.worker_pid() == worker
    assert mount.umount().returncode == 0
