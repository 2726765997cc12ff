"""Real mounts for tests: starting, asking, ending, and seeing that nothing is left."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from monarchfs.cli.main import main
from monarchfs.cli.status import NOT_WELL, report_of
from monarchfs.config.places import runtime_dirs_to_search
from monarchfs.fuse.mountinfo import read_mountinfo
from monarchfs.supervisor.recover import find_one
from tests.support import surroundings
from tests.support.programs import Running, execute
from tests.support.timing import WAIT_SECONDS as WAIT_SECONDS
from tests.support.timing import Stopwatch
from tests.support.timing import wait_for as wait_for

REPOSITORY = surroundings.REPOSITORY
MONARCHFS = [sys.executable, "-m", "monarchfs"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("SUDO_", "XDG_"))} | {
    "MONARCHFS_STANDBY": "false",
    "MONARCHFS_RESERVE_PERCENT": "1",
}
"""A standby worker is loaded where a test asks for it: that takes a third of what a mount costs.
Tests copy little, also on a disk that is nearly full."""
OF_OTHERS = ("-o", "reserve_percent=1")
"""A mount for another user takes nothing from the environment."""
WATCHDOG_SECONDS = 240.0

requires_root = surroundings.requires_root
requires_fuse = surroundings.requires_fuse
requires_mounts = [requires_root, requires_fuse]
Test = TypeVar("Test", bound=Callable[..., object])


def needs_mounts(test: Test) -> Test:
    """Marks a test of a module that has others, too."""
    marked: Test = requires_root(requires_fuse(test))
    return marked


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def fuse_mounts(below: str) -> list[str]:
    inside = below.rstrip("/") + "/"
    points = [mount.mountpoint for mount in read_mountinfo() if mount.fstype.startswith("fuse")]
    return [point for point in points if f"{point}/".startswith(inside)]


def processes_about(text: str) -> list[int]:
    """Processes of ours whose command line mentions ``text``, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            command = Path("/proc", entry, "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in command:
            found.append(int(entry))
    return found


def kill_each(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Sends them a signal; some end with others of them."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def report_on(
    mountpoint: Path, uid: int | None = None, environment: Mapping[str, str] = ENVIRONMENT
) -> dict[str, Any]:
    """What ``monarchfs status --json`` prints for ``uid``, without starting a program, as soon as
    there is a worker that answers."""
    search = partial(runtime_dirs_to_search, os.geteuid() if uid is None else uid, environment)

    def answered() -> dict[str, Any] | None:
        found = find_one(str(mountpoint), search)
        assert found is not None, f"{mountpoint} is not mounted"
        report = dict(report_of(found))
        if report["state"] == "worker not answering":
            return None
        assert report["state"] not in NOT_WELL, report
        return report

    result: dict[str, Any] = wait_for(answered, "the worker to answer")
    return result


@dataclass
class Mount:
    source: Path
    path: Path
    user: str | None = None

    def status(self) -> dict[str, Any]:
        return report_on(self.path)

    def worker_pid(self) -> int:
        return int(self.status()["worker"]["pid"])

    def kill_worker(self) -> None:
        pid = self.worker_pid()
        os.kill(pid, signal.SIGKILL)

        def serves() -> bool:
            now = self.status()
            return bool(now["state"] == "serving" and now["worker"]["pid"] != pid)

        wait_for(serves, "another worker")

    def wait_idle(self) -> dict[str, Any]:
        def idle() -> dict[str, Any] | None:
            now = self.status()
            if now["state"] == "worker not answering":
                return None  # the rest is an earlier report
            prefetch, files = now["prefetch"], now["files"]
            busy = prefetch["queued"] or prefetch["active"] or prefetch["scanning"]
            return None if busy or files["copying"] else now

        result: dict[str, Any] = wait_for(idle, "copying to end")
        return result

    def umount(self, timeout: float = 20) -> subprocess.CompletedProcess[str]:
        return run("umount", str(self.path), "--timeout", str(timeout), user=self.user)


def as_user(user: str | None, command: list[str]) -> list[str]:
    """``command`` as another user; skips the test where it is one of this clone's, and that user
    may not enter the clone."""
    if user is None:
        return command
    if any(sys.executable in word or str(REPOSITORY) in word for word in command):
        surroundings.skip_unless(user)
    entry = pwd.getpwnam(user)
    identity = [f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
    return ["setpriv", *identity, *command]


def run(
    *arguments: str, user: str | None = None, timeout: float = 180, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """One monarchfs command; skips the test where a user whom it names may not enter the clone."""
    surroundings.skip_unless_named(arguments)
    return execute(
        as_user(user, [*MONARCHFS, *arguments]),
        input=stdin,
        timeout=timeout,
        cwd="/",
        env=ENVIRONMENT,
    )


def asked(*words: str, code: int = 0, user: str | None = None) -> Any:
    """What a command says with ``--json``."""
    done = run(*words, "--json", user=user)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """A command that failed says so in one line with these words, and nothing else."""
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("monarchfs: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert [part for part in words if part not in done.stderr] == [], done.stderr


def assert_refused(
    mount: Mount, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    """One clear line says so, and nothing else is said. ``{mnt}`` stands for the mount point, in
    the arguments and in ``words``."""
    named = [argument.replace("{mnt}", str(mount.path)) for argument in arguments]
    done = subprocess.CompletedProcess(named, main(named), *capsys.readouterr())
    assert_one_line(done, code, words.replace("{mnt}", str(mount.path)))


@dataclass
class FaultySource:
    """A running `tests.support.faultfs`: ``backing`` is the real directory, ``path`` the mount."""

    backing: Path
    path: Path
    process: Running

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.process.tell(json.dumps(message))
        answer: dict[str, Any] = json.loads(self.process.line())
        return answer

    def faults(self, **faults: Any) -> None:
        """``delay`` seconds, ``fail`` {"OP PATH": errno}, ``hang`` ["OP PATH"]; none: healthy."""
        self._ask({"do": "faults", **faults})

    def counts(self, *, reset: bool = False) -> dict[str, Any]:
        return self._ask({"do": "counts", "reset": reset})

    def wait_old(self) -> None:
        newest = max(path.stat().st_ctime for path in self.backing.rglob("*"))
        wait_for(lambda: newest < time.time() - 1.1, "the files to be old")

    def data_operations(self) -> int:
        return sum(self.counts()["operations"].values())


@dataclass
class Bench:
    path: Path
    mounts: list[Mount] = field(default_factory=list)
    faulty: list[FaultySource] = field(default_factory=list)

    def mount(
        self,
        source: Path,
        *options: str,
        tier: str = "1G",
        tiers: list[str] | None = None,
        point: Path | None = None,
        user: str | None = None,
    ) -> Mount:
        """Mount ``source``; fails the test with the command's own words where that fails."""
        number = len(self.mounts)
        mountpoint = point or self.path / f"mnt{number}"
        mountpoint.mkdir(exist_ok=True)
        if user is not None:
            os.chown(mountpoint, pwd.getpwnam(user).pw_uid, -1)
        tiers = tiers if tiers is not None else [f"{self.path}/tier={tier}"]
        arguments = ["mount", str(source), str(mountpoint), "--state-dir", f"{self.path}/state"]
        for spec in tiers:
            arguments += ["--tier", spec]
        done = run(*arguments, "--log-file", f"{self.path}/log", *OF_OTHERS, *options, user=user)
        assert done.returncode == 0, f"mount failed: {done.stderr}\n{self.log()}"
        mount = Mount(source, mountpoint, user)
        self.mounts.append(mount)
        return mount

    def storage(self, tier: str = "1G", name: str = "") -> list[str]:
        """Options of a mount; with a name it has a tier and a state of its own."""
        at = self.path
        return ["--tier", f"{at}/tier{name}={tier}", "--state-dir", f"{at}/state{name}", *OF_OTHERS]

    def try_to_mount(self, source: Path | str, *options: str) -> subprocess.CompletedProcess[str]:
        """On ``mnt``, with such options; whoever calls it unmounts."""
        (self.path / "mnt").mkdir(exist_ok=True)
        return run("mount", str(source), f"{self.path}/mnt", *self.storage(), *options)

    def log(self) -> str:
        texts = [p.read_text(errors="replace") for p in (self.path / "log",) if p.exists()]
        worker_log = self.path / "state" / "worker.log"
        if worker_log.exists():
            texts.append(worker_log.read_text(errors="replace"))
        return "\n".join(texts)

    def faulty_source(self, backing: Path) -> FaultySource:
        point = self.path / f"source{len(self.faulty)}"
        point.mkdir()
        command = [sys.executable, "-m", "tests.support.faultfs", str(backing), str(point)]
        source = FaultySource(backing, point, Running(command, cwd=REPOSITORY))
        self.faulty.append(source)
        source.process.line()
        wait_for(lambda: fuse_mounts(str(point)), "the faulty source to be mounted")
        return source

    def close(self) -> list[str]:
        complaints = []
        for source in self.faulty:
            if source.process.poll() is None:
                source.faults()
        for mount in self.mounts:
            done = mount.umount()
            if done.returncode != 0:
                complaints.append(f"umount {mount.path}: {done.stderr.strip()}")
        watch = Stopwatch()
        while (left := self._processes()) and watch.seconds() < 5:
            time.sleep(0.02)
        complaints += [f"process {pid} was left behind" for pid in left]
        kill_each(left)
        for source in self.faulty:
            subprocess.run(["umount", "-l", str(source.path)], check=False, capture_output=True)
            source.process.communicate(timeout=10)
        for point in fuse_mounts(str(self.path)):
            complaints.append(f"{point} was left mounted")
            subprocess.run(["umount", "-l", point], check=False, capture_output=True)
        return complaints

    def break_up(self) -> None:
        """A test hangs in the kernel, where nothing reaches it: kill what it waits for."""
        kill_each(processes_about(str(self.path)))

    def _processes(self) -> set[int]:
        """But those of the faulty sources."""
        faulty = {source.process.pid for source in self.faulty}
        return set(processes_about(str(self.path))) - faulty


@contextmanager
def bench(most_seconds: float = WATCHDOG_SECONDS) -> Iterator[Bench]:
    """A Bench in a directory that any user may enter; fails the test if something is left. What
    runs is killed after so many seconds, less than a test may take (pytest-timeout)."""
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    path.chmod(0o755)
    work = Bench(path)
    watchdog = threading.Timer(most_seconds, work.break_up)
    watchdog.start()
    try:
        yield work
    except BaseException:
        print(work.log())
        work.close()
        raise
    else:
        complaints = work.close()
        assert not complaints, complaints
    finally:
        watchdog.cancel()
        watchdog.join()
        shutil.rmtree(path, ignore_errors=True)
