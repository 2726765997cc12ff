"""Real workers that die, hang and are replaced, under processes that read."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from monarchfs.control import client, registration
from tests.support import trees
from tests.support.fake_mounts import NOBODY
from tests.support.mounting import (
    MONARCHFS,
    Bench,
    FaultySource,
    Mount,
    requires_mounts,
    run,
    wait_for,
)
from tests.support.processes import Processes, clean_after, some_files
from tests.support.scenario import play
from tests.support.timing import Stopwatch

pytestmark = requires_mounts

SERVING = ("serving", "safe mode", "source not responding")

HOLDER = """
import os, sys
files = {}
for line in sys.stdin:
    command, name = line.split()
    try:
        if command == "open":
            files[name] = os.open(name, os.O_RDONLY)
            answer = "ok"
        elif command == "close":
            os.close(files.pop(name))
            answer = "ok"
        elif command == "list":
            answer = " ".join(sorted(os.listdir(name))) or "nothing"
        else:
            os.posix_fadvise(files[name], 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(files[name]).st_size
            data = b""
            while part := os.pread(files[name], size, len(data)):
                data += part
            answer = __import__("hashlib").sha256(data).hexdigest()
    except OSError as error:
        answer = os.strerror(error.errno)
    print(answer, flush=True)
"""


def kill(mount: Mount, number: signal.Signals = signal.SIGKILL) -> int:
    """Kills the worker, and waits until another one serves; its number of restarts."""
    before = mount.status()["worker"]
    os.kill(before["pid"], number)
    return wait_replaced(mount, before["restarts"])


def wait_replaced(mount: Mount, restarts: int) -> int:
    def replaced() -> int | None:
        now = mount.status()
        there = now["worker"]["restarts"] > restarts and now["state"] in SERVING
        return int(now["worker"]["restarts"]) if there else None

    result: int = wait_for(replaced, "another worker")
    return result


def sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


@pytest.fixture(params=["kernel", "journal"], autouse=True)
def handed_over(request: pytest.FixtureRequest, work: Bench) -> None:
    """What a dead worker took comes to the next by the kernel (Linux 6.9), or by the journal."""
    if request.param == "journal":
        mount = work.mount
        options = ("-o", "kernel_resend=false", "--data-path", "relay")

        def with_journal(source: Path, *others: str, **more: Any) -> Mount:
            return mount(source, *others, *options, **more)

        work.mount = with_journal  # type: ignore[method-assign]


UNDER_READERS = """
file f{0..39} 110000; file long 5000000
mount --evict lru tier=6M
loop one; loop another
kill worker times=6; kill worker SIGSEGV SIGTERM
end one; end another
"""
"""Copying and evicting go on meanwhile: not all fits into the tier."""


@pytest.mark.usefixtures("open_device")
@pytest.mark.parametrize("user", [None, NOBODY], ids=["root", "user"])
def test_killed_under_readers(work: Bench, user: str | None) -> None:
    play(work, UNDER_READERS, user=user)


CASES = {
    "killed while reads wait for the source": """
file f{0..8} 6000000
mount --evict lru tier=18M
slow seconds=0.005; loop one; loop two; loop three
kill worker times=8
end one; end two; end three
""",
    "replaced on purpose under readers": """
file f{0..19} 110000; file long 5000000
mount --freshness ttl=60
loop reader
command restart --json; command restart --json; command restart --json
end reader
""",
    "descriptors across restarts": """
file f{0..3} 300000
mount --freshness ttl=0.1
open holder; check all are open
kill worker; check they still are; close holder f0; held holder f3
kill worker; check three are; close holder f1; held holder f3
kill worker; check two are; close holder f2; held holder f3
open holder f0; held holder; close holder
""",
    "descriptors on files that were replaced": """
file f0 300000; file remote 3000000
mount --freshness ttl=0.1 tier=1M
open holder; held holder; idle
replace f0 2000; replace remote 2000
kill worker; held holder f0 old=1; held holder remote error=ESTALE; same
kill worker; held holder f0 old=1; held holder remote error=ESTALE; same
close holder
""",
    "pages of an outdated file that is open": """
file f0 3000000
mount --freshness ttl=0.1 --prefetch none
open holder; held holder
file f0 3000000; kill worker; same
held holder error=ESTALE|none; close holder
""",
    "an open that is carried out twice is one handle": """
file f{0..1} 50000
mount --freshness ttl=60
hang open *; begin_open holder f0; until requests.waiting = 1
kill worker; until requests.waiting = 1
kill worker; until requests.waiting = 1
heal; finish holder; check one is open
held holder; close holder
""",
    "who waits across a restart can be killed": """
file f0 10
mount --freshness ttl=60
hang open *; begin_open waiter f0; until requests.waiting = 1
kill worker; until requests.waiting = 1
kill waiter; heal; until requests.waiting = 0
""",
    "also who was signalled before": """
file f0 10
mount --freshness ttl=60
hang open *; begin_open waiter f0; until requests.waiting = 1
signal waiter D; kill worker; until requests.waiting = 1
kill waiter; heal; until requests.waiting = 0
""",
    "copying goes on": """
file d/{0..29} 50000; file opened 8000000
mount --freshness ttl=60
slow seconds=0.05; command warm d; part opened 0 10
kill worker; kill worker; heal
until files.resident = 31
""",
    "a stopped worker is replaced": """
file f{0..2} 50000
mount --freshness ttl=60
stop worker; read; death no sign of life
""",
}
"""Of an outdated file, the dead worker may not have come to telling the kernel. Copying goes on of
files that somebody asked for, and of one that was being copied after it was opened."""


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, CASES[case])


STATTER = """
import os, random, sys, select
while not select.select([sys.stdin], [], [], 0)[0]:
    os.stat(f"{sys.argv[1]}/f{random.randrange(50)}")
"""


def test_killed_while_it_takes_its_first_requests(work: Bench, processes: Processes) -> None:
    """The kernel copies a request to who takes it; where it cannot, its caller gets EIO."""
    some_files(work.path / "source", 50, 10)
    mount = work.mount(work.path / "source", "--freshness", "open")
    readers = [processes.start(STATTER, mount.path) for _ in range(8)]
    (found,) = [
        one
        for one in registration.find_mounts(["/run/monarchfs"])
        if one.entry.mountpoint == str(mount.path)
    ]

    def serving(after: int) -> dict[str, int]:
        worker: dict[str, int] = {"restarts": -1}
        while worker["restarts"] <= after:
            report = client.request(found, {"command": "status"}, 5)
            if report["state"] == "serving":
                worker = report["worker"]
        return worker

    worker, chance = serving(-1), random.Random(5)
    for _ in range(10):
        os.kill(worker["pid"], signal.SIGKILL)
        worker = serving(worker["restarts"])
        time.sleep(chance.uniform(0, 0.004))
        os.kill(worker["pid"], signal.SIGKILL)
        worker = serving(worker["restarts"])
    for reader in readers:
        assert reader.end() == ""
    clean_after(work, mount)


def test_what_was_evicted_by_hand_is_not_copied_again(work: Bench) -> None:
    """Some of the copies are still there when the worker dies; the next one removes them."""
    contents = some_files(work.path / "source", 60, 1_100_000)
    mount = work.mount(work.path / "source", "--prefetch", "access")
    assert run("warm", str(mount.path), "--wait").returncode == 0
    worker, copies = mount.worker_pid(), work.path / "tier"
    names = {path.name for path in copies.rglob("*") if path.stat().st_size >= 1_100_000}
    assert len(names) == len(contents)
    command = [*MONARCHFS, "evict", str(mount.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as evicting:
        wait_for(lambda: names - {path.name for path in copies.rglob("*")}, "a copy to go")
        os.kill(worker, signal.SIGKILL)
        evicting.communicate(timeout=30)
    wait_replaced(mount, 0)
    report = mount.wait_idle()
    assert (report["files"]["resident"], report["prefetch"]["completed"]) == (0, len(contents))
    assert not names & {path.name for path in copies.rglob("*")}
    clean_after(work, mount)


def test_a_worker_that_cannot_be_reaped_holds_nobody_up(
    work: Bench, faulty: FaultySource, processes: Processes
) -> None:
    contents = some_files(faulty.backing, 10, 50_000)
    (faulty.backing / "hung").write_bytes(b"x" * 50_000)
    mount = work.mount(faulty.path, "--freshness", "ttl=3600")
    for name, data in contents.items():
        assert (mount.path / name).read_bytes() == data
    assert os.stat(mount.path / "hung").st_size == 50_000
    mount.wait_idle()
    faulty.faults(hang=["* *"])
    holder = processes.start(HOLDER)
    holder.tell("open", mount.path / "hung")
    wait_for(lambda: mount.status()["requests"]["waiting"] == 1, "the open to wait")
    first = mount.worker_pid()
    started = Stopwatch()
    for _ in range(2):
        kill(mount)
        Path("/proc/sys/vm/drop_caches").write_text("1")
        for name, data in contents.items():
            assert (mount.path / name).read_bytes() == data
    started.check(60)
    assert Path(f"/proc/{first}/stat").exists(), "it should have been unable to die"
    faulty.faults()
    assert holder.line() == "ok"
    assert holder.ask("read", mount.path / "hung") == sha(b"x" * 50_000)
    assert holder.ask("close", mount.path / "hung") == "ok"
    wait_for(lambda: not Path(f"/proc/{first}/stat").exists(), "the old worker to go")
    clean_after(work, mount)


def test_a_listing_goes_on_where_it_was(work: Bench, processes: Processes) -> None:
    source = work.path / "source"
    source.mkdir()
    names = {f"a-name-that-is-long-enough-{n:05}" for n in range(3000)}
    for name in names:
        (source / name).touch()
    mount = work.mount(source)
    code = (
        "import os, sys\n"
        "names = []\n"
        "with os.scandir(sys.argv[1]) as entries:\n"
        "    for count, entry in enumerate(entries):\n"
        "        names.append(entry.name)\n"
        "        if count == 100: print('some', flush=True); sys.stdin.readline()\n"
        "print(len(names), len(set(names)), flush=True)\n"
    )
    reader = processes.start(code, mount.path)
    assert reader.line() == "some"
    kill(mount)
    assert reader.end() == "3000 3000"


def test_an_index_that_is_lost_meanwhile(work: Bench, processes: Processes) -> None:
    """Numbers that the kernel knows do not come to mean something else."""
    contents = some_files(work.path / "source", 20, 20_000)
    mount = work.mount(work.path / "source", "--freshness", "immutable")
    holder = processes.start(HOLDER)
    for name, data in contents.items():
        assert (mount.path / name).read_bytes() == data
    assert holder.ask("open", mount.path / "f0") == "ok"
    mount.wait_idle()
    before = {name: os.stat(mount.path / name).st_ino for name in contents}
    worker = mount.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    (work.path / "state" / "index" / "data.mdb").write_bytes(b"damaged" * 10_000)
    os.kill(worker, signal.SIGSEGV)
    os.kill(worker, signal.SIGCONT)
    wait_replaced(mount, 0)
    # It is found out with the first open (the kernel walks the path again) or, where the kernel
    # opens without asking, with the first read (it is told to forget all names).
    Path("/proc/sys/vm/drop_caches").write_text("1")

    def whole(name: str) -> bool:
        try:
            assert (mount.path / name).read_bytes() == contents[name]
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise
            return False
        return True

    for name in contents:
        wait_for(partial(whole, name), "the names to be looked up again")
        assert os.stat(mount.path / name).st_ino > max(before.values())
    assert holder.ask("read", mount.path / "f0") in (os.strerror(116), sha(contents["f0"]))
    assert holder.ask("close", mount.path / "f0") == "ok"
    clean_after(work, mount)


DYING_WORKER = """
import json, os, signal, sys, threading

from monarchfs.worker import worker
from monarchfs.worker.__main__ import main

with open(int(sys.argv[sys.argv.index("--bootstrap-fd") + 1]), "rb") as file:
    text = file.read()
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    if not json.loads(text)["safe"] and os.path.exists({poison!r}):
        original = worker.Worker._begin_background

        async def die(self):
            os.kill(os.getpid(), signal.SIGSEGV)  # a SIGKILL says nothing about the program

        worker.Worker._begin_background = die
    main()
"""
CLI = """
import functools, sys

from monarchfs.cli import main, mount

command = (sys.executable, "-I", {worker!r})
mount.mount_command = functools.partial(mount.mount_command, worker_command=command)
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("freshness", ["ttl=0.1", "immutable"])
def test_safe_mode_serves_the_source(
    work: Bench, monkeypatch: pytest.MonkeyPatch, freshness: str
) -> None:
    """With ``immutable``, files are read without having been opened."""
    contents = some_files(work.path / "source", 5, 50_000)
    poison, worker, cli = (work.path / name for name in ("poison", "worker.py", "cli.py"))
    worker.write_text(DYING_WORKER.format(poison=str(poison)))
    cli.write_text(CLI.format(worker=str(worker)))
    monkeypatch.setattr("tests.support.mounting.MONARCHFS", [sys.executable, str(cli)])
    mount = work.mount(work.path / "source", "--freshness", freshness)
    for name, data in contents.items():
        assert (mount.path / name).read_bytes() == data
    mount.wait_idle()
    poison.touch()
    os.kill(mount.worker_pid(), signal.SIGKILL)

    def safe() -> dict[str, Any] | None:
        now = mount.status()
        # What is said of tiers may be the last that a dead worker said.
        return now if now["state"] == "safe mode" and now["tiers"] == [] else None

    report = wait_for(safe, "safe mode")
    (work.path / "source" / "later").mkdir()
    time.sleep(0.2)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    listed = set(os.listdir(mount.path))
    assert listed == set(os.listdir(work.path / "source")) - (
        {"later"} if freshness == "immutable" else set()
    )
    for name, data in contents.items():
        if freshness != "immutable":
            data = trees.random_bytes(60_000, len(name))
            (work.path / "source" / name).write_bytes(data)
            time.sleep(0.2)
        assert (mount.path / name).read_bytes() == data
    assert mount.status()["served"]["local_opens"] == 0
    assert kill(mount) > report["worker"]["restarts"]
    assert mount.status()["state"] == "safe mode"
    poison.unlink()
    assert run("restart", str(mount.path)).returncode == 0
    assert mount.status()["state"] == "serving"
    assert [tier["files"] for tier in mount.status()["tiers"]] == [5]
    clean_after(work, mount)
