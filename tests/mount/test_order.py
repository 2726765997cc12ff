"""Files that are fetched ahead of their readers, in an announced order, on a real mount."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monarchfs import hints
from monarchfs.control.client import Connection
from monarchfs.hints.client import find_mount
from monarchfs.types import OperationError
from tests.support import trees
from tests.support.mounting import Bench, FaultySource, Mount, requires_mounts, run, wait_for
from tests.support.processes import Processes
from tests.support.scenario import play

pytestmark = requires_mounts

FILES = 120
SIZE = 20_000


def content(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


def name_of(number: int) -> str:
    return f"d{number % 3}/{number:03d}"


@pytest.fixture
def source(faulty: FaultySource) -> FaultySource:
    trees.write_files(faulty.backing, {name_of(n): content(n) for n in range(FILES)})
    for path in faulty.backing.rglob("*"):
        os.utime(path, (1e9, 1e9))
    faulty.wait_old()
    return faulty


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


JOB = """
import sys
from monarchfs import hints
files = sys.stdin.readline().split()
hints.announce_files(files)
for line in sys.stdin:
    print(len(open(line.split()[1], "rb").read()), flush=True)
"""
"""Announces the files of its first line, and reads those of the others."""


def announce(mount: Mount, numbers: Sequence[int], stream: str = "test") -> None:
    found = find_mount(mount.path)
    assert found is not None
    with found.connect() as connection:
        names = b"\0".join(name_of(number).encode() for number in numbers)
        connection.send_list({"command": "order", "stream": stream}, [names])


def window(mount: Mount) -> dict[str, Any]:
    found: dict[str, Any] = mount.status()["window"]
    return found


def wait_for_files(mount: Mount, count: int) -> None:
    wait_for(lambda: window(mount)["files"] >= count, f"{count} files in the window")


def without_room(work: Bench, source: FaultySource, *options: str) -> Mount:
    """A mount that keeps nothing."""
    return work.mount(source.path, "--prefetch", "none", *options)


DATA = "file d{0..2}/{0..39} 20000; settle\n"


@pytest.mark.smoke
@pytest.mark.parametrize("freshness", ["ttl=3600", "open"])
def test_files_are_in_memory_before_they_are_opened(work: Bench, freshness: str) -> None:
    """That of an immutable dataset is recorded. What a reader comes to while it is being asked for
    may be read twice; with ``open``, each open asks for the version, and so did the window."""
    script = f"""
mount --prefetch none --freshness {freshness}
order; until window.files >= 40
read; until window.orders = 0; until window.used_bytes = 0
check read
  window.hits >=40
  window.wasted_bytes <=240000
  source_io.read_bytes 2400000..2640000
  source.open >={160 if freshness == "open" else 120}
"""
    play(work, DATA + script)


CASES = {
    "what has room is copied in that order": """
mount --prefetch access
order d2/{39..0} d1/{39..0} d0/{39..0}; until files.resident >= 10
read d2/{39..0} d1/{39..0} d0/{39..0}
check read
  files.resident 120
  source_io.read_bytes 2400000
  served.local_opens >=1
until window.files = 0
""",
    "without a window nothing is fetched": """
mount --prefetch none --window 0
order; read; until window.files = 0
""",
    "a file that changed meanwhile is never shown as it was": """
mount --prefetch none --freshness open
order; until window.files >= 10
file d0/3 15; read d0/3 d0/4; order none
""",
    "a later order takes the place of an earlier one": """
mount --prefetch none
order d0/*; until window.files >= 10
order d1/*; until window.orders = 1
order none; until window.used_bytes = 0; until window.wasted_bytes >= 1
""",
} | {
    f"open files go on when the worker dies ({freshness})": f"""
mount --prefetch none --freshness {freshness}
order; until window.files >= 10
open holder d0/0; held holder; kill worker; held holder; close holder
until window.used_bytes = 0
order; until window.files >= 10; read; until window.orders = 0
"""
    for freshness in ("immutable", "ttl=3600")
}


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, DATA + CASES[case])


@pytest.mark.parametrize("freshness", ["immutable", "ttl=3600"])
def test_where_files_go_for_others_an_order_saves_bytes(
    work: Bench, source: FaultySource, freshness: str
) -> None:
    """What comes next stays, and no file is asked for twice. By the policy alone, each epoch would
    read five sixths of the files."""
    size = FILES // 2 * 20_480
    words = ("--prefetch", "access", "--evict", "lru", "--freshness", freshness)
    mount = work.mount(source.path, *words, tier=str(size))
    source.faults(delay=0.001, delayed=["open"])  # what is as fast as memory is not fetched
    asked = missing = 0
    for epoch in range(5):
        order = random.Random(epoch).sample(range(FILES), FILES)
        mount.wait_idle()
        before = mount.status()
        source.counts(reset=True)
        announce(mount, order)
        if epoch:  # else readers are there before the mount knows what comes next
            wait_for_files(mount, before["window"]["files"] + 20)
        for number in order:
            assert (mount.path / name_of(number)).read_bytes() == content(number)
        if epoch:
            asked += source.counts()["operations"]["open"]
            missing += FILES - before["files"]["resident"]
    assert asked <= 1.2 * missing
    assert missing <= 4 * FILES * 0.6


def test_the_window_stays_within_its_limit(work: Bench, source: FaultySource) -> None:
    """Also with files larger than those that the C part reads otherwise."""
    large = source.backing / "large"
    large.mkdir()
    size = 3 << 20
    for number in range(12):
        (large / str(number)).write_bytes(content(number, size))
    wait_for(
        lambda: max(p.stat().st_ctime for p in large.iterdir()) < time.time() - 1.1, "old files"
    )
    mount = without_room(work, source, "--window", "16M", "--freshness", "immutable")
    done = run("order", str(mount.path), "-", stdin="".join(f"large/{n}\n" for n in range(12)))
    assert (done.returncode, done.stdout) == (0, "announced: 12 files\n")
    wait_for_files(mount, 1)
    for number in range(12):
        assert (mount.path / "large" / str(number)).read_bytes() == content(number, size)
        assert window(mount)["used_bytes"] <= 16 << 20
    assert window(mount)["hits"] >= 1
    assert mount.status()["source_io"]["read_bytes"] <= 14 * size


def test_the_command_takes_paths_and_inode_numbers(
    work: Bench, source: FaultySource, tmp_path: Path
) -> None:
    mount = without_room(work, source)
    paths = tmp_path / "paths"
    paths.write_text("".join(f"{mount.path}/{name_of(n)}\n" for n in range(20)))
    inodes = [(mount.path / name_of(n)).stat().st_ino for n in range(20, 40)]
    assert run("order", str(mount.path), str(paths)).stdout == "announced: 20 files\n"
    wait_for_files(mount, 20)
    given = "".join(f"{ino}\n" for ino in inodes)
    done = run("order", str(mount.path), "-", "--inodes", "--json", stdin=given)
    assert json.loads(done.stdout) == {"files": 20}
    wait_for_files(mount, 40)
    assert window(mount)["orders"] == 2
    for number in range(40):
        assert (mount.path / name_of(number)).read_bytes() == content(number)
    assert window(mount)["hits"] == 40


def test_wrong_lists_are_refused(work: Bench, source: FaultySource, tmp_path: Path) -> None:
    mount = without_room(work, source)
    outside = run("order", str(mount.path), "-", stdin="/etc/passwd\n")
    assert (outside.returncode, outside.stdout) == (2, "")
    assert "is not below" in outside.stderr
    assert run("order", str(mount.path), "-", "--inodes", stdin="a\n").returncode == 2
    assert run("order", str(mount.path), str(tmp_path / "none")).returncode == 1
    assert run("order", str(tmp_path), "-", stdin="").returncode == 1


def test_names_that_lead_nowhere_cost_nothing(work: Bench, source: FaultySource) -> None:
    mount = without_room(work, source)
    found = find_mount(mount.path)
    assert found is not None
    names = [
        b"../../etc/passwd",
        b"d0/..",
        b"d0",
        b"no/such",
        b"x" * 300,
        b"/99999",
        b"//",
        b"d0//",
    ]
    good = [name_of(number).encode() for number in range(10)]
    with found.connect() as connection:
        request = {"command": "order", "stream": "odd"}
        sent = connection.send_list(request, [b"\0".join([*names, *good])])
    assert sent == {"files": len(names) + len(good)}
    wait_for_files(mount, 10)
    assert window(mount)["files"] == 10


def test_a_list_that_is_broken_off_is_not_followed(work: Bench, source: FaultySource) -> None:
    mount = without_room(work, source)
    found = find_mount(mount.path)
    assert found is not None
    with Connection(found.daemon.socket_path, 1.0) as connection:
        connection.ask({"command": "order", "stream": 7})
        with pytest.raises(OperationError, match="short string"):
            connection.next(5.0)
    assert window(mount)["orders"] == 0


def test_a_sampler_announces_each_epoch(work: Bench, source: FaultySource) -> None:
    mount = without_room(work, source, "--freshness", "immutable")
    files = [str(mount.path / name_of(number)) for number in range(FILES)]
    sampler = hints.announce([5, 3, 4, *range(6, FILES)], files)
    drawn = iter(sampler)
    assert next(drawn) == 5
    wait_for_files(mount, 10)
    for number in [5, *drawn]:
        assert Path(files[number]).read_bytes() == content(number)
    assert window(mount)["hits"] >= 10


def test_the_window_of_a_killed_job_is_given_up_until_somebody_reads_on(
    work: Bench, source: FaultySource, processes: Processes
) -> None:
    mount = without_room(work, source, "--freshness", "immutable")
    source.faults(delay=0.002, delayed=["open"])  # what is as fast as memory is not fetched
    living, killed = range(40), range(40, 80)  # less than 1 MiB each
    announce(mount, living, "living")  # by this process
    for number in living[:2]:
        (mount.path / name_of(number)).read_bytes()
    job = processes.start(JOB)
    job.tell("", " ".join(str(mount.path / name_of(number)) for number in killed))
    wait_for(lambda: window(mount)["orders"] == 2, "both orders")
    for number in killed[:5]:
        assert job.ask("read", mount.path / name_of(number)) == str(SIZE)
    of_living = (40 - 2) * SIZE
    wait_for(
        lambda: window(mount)["used_bytes"] == of_living + (40 - 5) * SIZE, "the rest in the window"
    )
    job.process.kill()
    wait_for(lambda: window(mount)["used_bytes"] == of_living, "the window of the killed job empty")
    assert window(mount)["orders"] == 2
    read = window(mount)["files"]
    for number in killed[5:]:
        assert (mount.path / name_of(number)).read_bytes() == content(number)
    assert window(mount)["files"] > read
    wait_for(lambda: window(mount)["orders"] == 1, "its order to have ended")
    assert window(mount)["used_bytes"] == of_living


MANY = 600


@pytest.fixture
def many(faulty: FaultySource) -> FaultySource:
    trees.write_files(faulty.backing, {f"{n:03d}": content(n, 4000) for n in range(MANY)})
    for path in faulty.backing.iterdir():
        os.utime(path, (1e9, 1e9))
    faulty.wait_old()
    return faulty


def read_in(mount: Mount, numbers: Sequence[int]) -> None:
    for number in numbers:
        assert (mount.path / f"{number:03d}").read_bytes() == content(number, 4000)


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(MANY), MANY)


@pytest.mark.smoke
def test_an_order_that_nobody_announced(work: Bench, many: FaultySource) -> None:
    mount = without_room(work, many, "--freshness", "immutable")
    many.faults(delay=0.001, delayed=["open"])  # what is as fast as memory is not fetched
    order = shuffled(1)
    read_in(mount, order)
    assert (window(mount)["orders_learned"], window(mount)["files"]) == (0, 0)
    read_in(mount, order[:100])
    wait_for(lambda: window(mount)["orders_learned"] == 1, "the order to be learned")
    # A quarter of an epoch is ahead. Some of the first ones came too late.
    wait_for(lambda: window(mount)["used_bytes"] >= 100 * 4000, "files of the learned order")
    hits = window(mount)["hits"]
    read_in(mount, order[100:130])
    wait_for(lambda: window(mount)["hits"] >= hits + 30, "files that were there")
    read_in(mount, order[130:])
    assert window(mount)["orders"] == 1  # of the third epoch
    # What is announced takes its place.
    announce(mount, [], "none")
    assert window(mount)["orders"] == 1
    announce(mount, range(FILES), "another")
    wait_for(lambda: window(mount)["orders"] == 0, "an order of names that do not exist to end")
    status = mount.status()
    read_in_vain = status["window"]["wasted_bytes"]
    # What a reader comes to while it is being asked for may be read twice.
    assert status["source_io"]["read_bytes"] - read_in_vain <= 2.2 * MANY * 4000


def test_random_epochs_teach_nothing(work: Bench, many: FaultySource) -> None:
    mount = without_room(work, many, "--freshness", "immutable")
    many.faults(delay=0.001, delayed=["open"])
    for epoch in range(3):
        read_in(mount, shuffled(epoch))
    assert (window(mount)["orders_learned"], window(mount)["files"]) == (0, 0)
    assert mount.status()["source_io"]["read_bytes"] == 3 * MANY * 4000


@pytest.mark.smoke
@pytest.mark.parametrize("dies", [True, False], ids=["killed", "replaced"])
def test_an_order_goes_on_with_the_next_worker(
    work: Bench, many: FaultySource, processes: Processes, dies: bool
) -> None:
    # A worker that takes over distrusts what was changed in the last seconds before the mount.
    newest = max(path.stat().st_ctime for path in many.backing.iterdir())
    wait_for(lambda: newest < time.time() - 2.1, "the files to be older")
    mount = without_room(work, many, "--freshness", "immutable")
    many.faults(delay=0.001, delayed=["open"])
    order = shuffled(1)
    job = processes.start(JOB)
    job.tell("", " ".join(str(mount.path / f"{number:03d}") for number in order))
    wait_for_files(mount, 50)
    read_in(mount, order[:200])
    hits = window(mount)["hits"]
    if dies:
        os.kill(mount.worker_pid(), signal.SIGKILL)
        wait_for(lambda: mount.status()["worker"]["restarts"] == 1, "the next worker")
    else:
        assert run("restart", str(mount.path)).returncode == 0
    wait_for(lambda: window(mount)["orders"] == 1, "the order")
    # The readers' place is found by what they open.
    read_in(mount, order[200:500])
    assert window(mount)["hits"] >= hits + 150
    # It is known whether the announcer lives.
    ahead = order[500:510]
    wait_for(lambda: window(mount)["used_bytes"] >= len(ahead) * 4000, "files ahead")
    job.process.kill()
    wait_for(lambda: window(mount)["used_bytes"] == 0, "the window of the killed job empty")
    read_in(mount, order[500:])
    # What was in the window when the worker ended, and twice when the announcer did.
    assert mount.status()["source_io"]["read_bytes"] <= 1.05 * MANY * 4000 + 2 * (1 << 20)
    assert mount.umount().returncode == 0
    assert os.listdir(work.path / "state" / "said") == []
