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
from tests.support.processes import READER, Processes, clean_after, open_slots, some_files
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


@pytest.mark.usefixtures("open_device")
@pytest.mark.parametrize("user", [None, NOBODY], ids=["root", "user"])
def test_killed_under_readers(work: Bench, processes: Processes, user: str | None) -> None:
    """Copying and evicting go on meanwhile: not all fits into the tier."""
    source = work.path / "source"
    some_files(source, 40, 110_000)
    (source / "long").write_bytes(trees.random_bytes(5_000_000, 99))
    work.path.chmod(0o1777)
    mount = work.mount(source, "--evict", "lru", tier="6M", user=user)
    readers = [processes.start(READER, source, mount.path, "long", user=user) for _ in range(2)]
    for reader in readers:
        assert reader.line() == "reading"
    chance = random.Random(7)
    for number in [signal.SIGKILL] * 6 + [signal.SIGSEGV, signal.SIGTERM]:
        kill(mount, number)
        time.sleep(chance.uniform(0, 0.3))
    for reader in readers:
        reader.end()
    assert mount.status()["worker"]["restarts"] == 8
    clean_after(work, mount)


def test_killed_while_reads_wait_for_the_source(
    work: Bench, faulty: FaultySource, processes: Processes
) -> None:
    """Some wait for what is being copied, some for what will not be kept: a third of it fits."""
    some_files(faulty.backing, 9, 6_000_000)
    mount = work.mount(faulty.path, "--evict", "lru", tier="18M")
    faulty.faults(delay=0.005)
    readers = [processes.start(READER, faulty.backing, mount.path, "f0") for _ in range(3)]
    for reader in readers:
        assert reader.line() == "reading"
    chance = random.Random(8)
    for _ in range(8):
        time.sleep(chance.uniform(0, 0.3))
        kill(mount)
    for reader in readers:
        reader.end()
    faulty.faults()
    clean_after(work, mount)


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


def test_replaced_on_purpose_under_readers(work: Bench, processes: Processes) -> None:
    source = work.path / "source"
    some_files(source, 20, 110_000)
    (source / "long").write_bytes(trees.random_bytes(5_000_000, 99))
    mount = work.mount(source)
    reader = processes.start(READER, source, mount.path, "long")
    assert reader.line() == "reading"
    for count in range(1, 4):
        done = run("restart", str(mount.path), "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert mount.status()["worker"]["restarts"] == count
    reader.end()
    assert mount.status()["worker"]["last_death"] is None
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


def test_descriptors_across_restarts(work: Bench, processes: Processes) -> None:
    contents = some_files(work.path / "source", 4, 300_000)
    mount = work.mount(work.path / "source", "--freshness", "ttl=0.1")
    holder = processes.start(HOLDER)
    for name in contents:
        assert holder.ask("open", mount.path / name) == "ok"
    mount.wait_idle()
    assert open_slots(mount) == 4
    for count in range(3):
        kill(mount)
        assert open_slots(mount) == 4 - count
        assert holder.ask("close", mount.path / f"f{count}") == "ok"
        wait_for(lambda: open_slots(mount) == 3 - count, "the release")  # noqa: B023
        assert holder.ask("read", mount.path / "f3") == sha(contents["f3"])
    assert holder.ask("open", mount.path / "f0") == "ok"
    assert holder.ask("read", mount.path / "f0") == sha(contents["f0"])
    for name in ("f0", "f3"):
        assert holder.ask("close", mount.path / name) == "ok"
    clean_after(work, mount)


def test_a_descriptor_on_a_file_that_was_replaced(work: Bench, processes: Processes) -> None:
    """All of it is local: it keeps its version. If not, there is nothing left to read."""
    source = work.path / "source"
    contents = some_files(source, 1, 300_000)
    (source / "remote").write_bytes(trees.random_bytes(3_000_000, 5))
    mount = work.mount(source, "--freshness", "ttl=0.1", tier="1M")
    holder = processes.start(HOLDER)
    for name in ("f0", "remote"):
        assert holder.ask("open", mount.path / name) == "ok"
        assert len(holder.ask("read", mount.path / name)) == 64
    mount.wait_idle()
    new = {name: trees.random_bytes(2_000, 6) for name in ("f0", "remote")}
    for name, data in new.items():
        (source / f"{name}.new").write_bytes(data)
        (source / f"{name}.new").rename(source / name)
    for _ in range(2):
        kill(mount)
        assert holder.ask("read", mount.path / "f0") == sha(contents["f0"])
        assert holder.ask("read", mount.path / "remote") == os.strerror(116)
        time.sleep(0.2)  # past the promise
        for name, data in new.items():
            assert (mount.path / name).read_bytes() == data
    for name in ("f0", "remote"):
        assert holder.ask("close", mount.path / name) == "ok"
    clean_after(work, mount)


def test_pages_of_an_outdated_file_that_is_open(work: Bench, processes: Processes) -> None:
    """The dead worker may not have come to telling the kernel."""
    source = work.path / "source"
    contents = some_files(source, 1, 3_000_000)
    mount = work.mount(source, "--freshness", "ttl=0.1", "--prefetch", "none")
    holder = processes.start(HOLDER)
    assert holder.ask("open", mount.path / "f0") == "ok"
    assert holder.ask("read", mount.path / "f0") == sha(contents["f0"])
    with open(source / "f0", "r+b") as file:
        file.write(b"changed")
    kill(mount)
    changed = b"changed" + contents["f0"][7:]
    time.sleep(0.2)
    assert (mount.path / "f0").read_bytes() == changed
    assert holder.ask("read", mount.path / "f0") in (sha(changed), os.strerror(116))
    assert holder.ask("close", mount.path / "f0") == "ok"
    clean_after(work, mount)


def test_an_open_that_is_carried_out_twice_is_one_handle(
    work: Bench, faulty: FaultySource, processes: Processes
) -> None:
    contents = some_files(faulty.backing, 2, 50_000)
    mount = work.mount(faulty.path)
    faulty.faults(hang=["open *"])
    holder = processes.start(HOLDER)
    holder.tell("open", mount.path / "f0")
    wait_for(lambda: mount.status()["requests"]["waiting"] == 1, "the open to wait")
    for _ in range(2):
        kill(mount)
        wait_for(lambda: mount.status()["requests"]["waiting"] == 1, "it to be asked again")
    faulty.faults()
    assert holder.line() == "ok"
    assert open_slots(mount) == 1
    assert holder.ask("read", mount.path / "f0") == sha(contents["f0"])
    assert holder.ask("close", mount.path / "f0") == "ok"
    clean_after(work, mount)


@pytest.mark.parametrize("signalled", [False, True], ids=["killed", "signalled before"])
def test_who_waits_across_a_restart_can_be_killed(
    work: Bench, faulty: FaultySource, processes: Processes, signalled: bool
) -> None:
    """Also one whose process got its signal from the kernel's point of view long ago."""
    some_files(faulty.backing, 1, 10)
    mount = work.mount(faulty.path)
    faulty.faults(hang=["open *"])
    code = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: None); open(sys.argv[1])"
    waiter = processes.start(code, mount.path / "f0").process
    wait_for(lambda: mount.status()["requests"]["waiting"] == 1, "the open to wait")
    if signalled:
        waiter.send_signal(signal.SIGUSR1)
        state = Path(f"/proc/{waiter.pid}/stat")
        wait_for(lambda: state.read_text().rpartition(") ")[2][0] == "D", "it to be in D state")
    kill(mount)
    wait_for(lambda: mount.status()["requests"]["waiting"] == 1, "it to be asked again")
    waiter.kill()
    assert waiter.wait(20) == -signal.SIGKILL
    faulty.faults()
    wait_for(lambda: mount.status()["requests"]["waiting"] == 0, "nothing to wait")
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


def test_copying_goes_on(work: Bench, faulty: FaultySource) -> None:
    """Of files that somebody asked for, and of one that was being copied after it was opened."""
    contents = some_files(faulty.backing / "d", 30, 50_000)
    (faulty.backing / "opened").write_bytes(trees.random_bytes(8_000_000, 3))
    mount = work.mount(faulty.path)
    faulty.faults(delay=0.05)
    assert run("warm", str(mount.path), "d").returncode == 0
    with open(mount.path / "opened", "rb") as file:
        file.read(10)
    for _ in range(2):
        kill(mount)
    faulty.faults()
    count = len(contents) + 1
    wait_for(lambda: mount.status()["files"]["resident"] == count, "all to be copied")
    clean_after(work, mount)


@pytest.mark.smoke
def test_a_stopped_worker_is_replaced(work: Bench) -> None:
    contents = some_files(work.path / "source", 3, 50_000)
    mount = work.mount(work.path / "source")
    os.kill(mount.worker_pid(), signal.SIGSTOP)
    started = Stopwatch()
    for name, data in contents.items():
        assert (mount.path / name).read_bytes() == data
    started.check(60)
    report = mount.status()
    assert report["worker"]["restarts"] == 1
    assert "no sign of life" in report["worker"]["last_death"]["why"]
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
