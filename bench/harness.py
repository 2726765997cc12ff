"""What the demo and the measurements share: a slow source, a mount, readers, and no traces left."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import Pool
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
MONARCHFS = (sys.executable, "-m", "monarchfs")
MIB = 1 << 20
DROP_CACHES = "/proc/sys/vm/drop_caches"


class Unusable(Exception):
    """This cannot run here; the message names what is missing and the remedy."""


def check_fuse() -> None:
    """Raises Unusable where this user cannot mount."""
    if not os.path.exists("/dev/fuse"):
        raise Unusable("/dev/fuse is missing: modprobe fuse, or give the container that device")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Unusable("this user may not open /dev/fuse: run as root, or chmod 666 /dev/fuse")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise Unusable("fusermount3 is missing: apt-get install fuse3")


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def workplace(name: str, parent: str | None = None) -> Iterator[Path]:
    """A directory that is gone afterwards, also after SIGTERM, SIGHUP or Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup(1)
            signal.signal(number, _interrupt)
    path = Path(tempfile.mkdtemp(prefix=f"monarchfs-{name}-", dir=parent))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def memory_place() -> Iterator[Path]:
    """A directory on tmpfs, gone afterwards; on disk where there is no /dev/shm."""
    parent = "/dev/shm" if os.path.ismount("/dev/shm") else None
    with workplace("memory", parent) as path:
        yield path


def write_random(path: Path, size: int, rng: random.Random) -> int:
    """Writes ``size`` bytes that no file system can shrink; their CRC-32."""
    checksum = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for start in range(0, size, MIB):
            block = rng.randbytes(min(MIB, size - start))
            checksum = zlib.crc32(block, checksum)
            file.write(block)
    return checksum


def wait_for(
    condition: Callable[[], object], what: str, seconds: float = 60.0, pause: float = 0.005
) -> None:
    """Until ``condition`` is true, looked at every ``pause`` seconds; TimeoutError after
    ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(pause)


@contextmanager
def repeated(action: Callable[[], object], seconds: float) -> Iterator[None]:
    """Calls ``action`` every ``seconds`` in a thread while the block runs. What it raises ends
    that, and is raised at the block's end."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            action()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            yield
        finally:
            ended.set()
            running.result()


class Source:
    """A directory seen through ``tests.support.faultfs``, as a context manager.

    ``backing`` is the real directory, ``path`` where it is seen.
    """

    def __init__(self, backing: Path, path: Path) -> None:
        self.backing = backing
        self.path = path

    def __enter__(self) -> Source:
        self.path.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faultfs", str(self.backing), str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            # Ctrl-C is for the program that measures; this one ends when that closes its input.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise Unusable("the slow source could not be mounted: see the error above")
        wait_for(lambda: os.path.ismount(self.path), "the source to be mounted")
        return self

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def faults(self, **faults: Any) -> None:
        """``delay`` (seconds), ``delayed`` (operations), ``rate`` (bytes a second), ``hang``,
        ``fail``, as `tests.support.faultfs` has them; none: healthy."""
        self._ask({"do": "faults", **faults})

    def take_counts(self) -> tuple[int, int]:
        """Bytes read and operations since the last call."""
        counts = self._ask({"do": "counts", "reset": True})
        return counts["read_bytes"], sum(counts["operations"].values())

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.faults()
        detach(self.path)
        end(self._process)


def end(process: subprocess.Popen[Any], seconds: float = 10.0) -> None:
    """Waits for a child that ends when its input is closed, or its mount gone; kills it after
    ``seconds``."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def detach(path: Path) -> None:
    """Unmounts a FUSE mount of ours lazily; it may be gone already."""
    command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z", "-q"]
    subprocess.run([*command, str(path)], check=False, capture_output=True)


class Mount:
    """``monarchfs mount`` and ``umount`` as a context manager. ``place`` is a directory of its
    own: the mount point, the state and the log lie there, and the tier unless one is given.
    ``enter`` comes before the command that mounts, for instance to have another network."""

    def __init__(
        self,
        source: Path,
        place: Path,
        *options: str,
        tier: Path | None = None,
        size: str = "8G",
        enter: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.place = place
        self.path = place / "mnt"
        self.tier = tier or place / "tier"
        self._size = size
        self._options = options
        self._enter = enter

    def __enter__(self) -> Mount:
        # Both are there where an earlier mount left its tier and its state.
        self.place.mkdir(exist_ok=True)
        self.path.mkdir(exist_ok=True)
        command = ["mount", str(self.source), str(self.path), "--tier", f"{self.tier}={self._size}"]
        # Under sudo the mount would be for the user behind it, and closed to this process.
        whose = ["--user", "root"] if os.geteuid() == 0 else []
        places = ["--state-dir", str(self.place / "state"), "--log-file", str(self.place / "log")]
        # The size is what limits, not what else lies on that file system.
        fixed = [*places, *whose, "-o", "reserve_percent=1"]
        try:
            monarchfs(*command, *fixed, *self._options, enter=self._enter)
        except Unusable:
            print(self.log(), file=sys.stderr)
            raise
        return self

    def status(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(monarchfs("status", str(self.path), "--json"))
        return result

    def wait_idle(self, seconds: float = 120.0) -> dict[str, Any]:
        """Until nothing is being copied; the status then."""
        found: dict[str, Any] = {}

        def idle() -> bool:
            found.update(self.status())
            prefetch = found["prefetch"]
            busy = prefetch["queued"] or prefetch["active"] or prefetch["scanning"]
            return not busy and not found["files"]["copying"]

        wait_for(idle, "the copies to end", seconds)
        return found

    def umount(self, timeout: float = 20.0) -> float:
        """Seconds that it took."""
        started = time.perf_counter()
        monarchfs("umount", str(self.path), "--timeout", f"{timeout:g}")
        return time.perf_counter() - started

    def log(self) -> str:
        """What supervisor and worker had to say."""
        files = (self.place / "log", self.place / "state" / "worker.log")
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and kind is not KeyboardInterrupt:
            print(self.log(), file=sys.stderr)
        self.umount()


def monarchfs(*arguments: str, seconds: float = 120.0, enter: Sequence[str] = ()) -> str:
    """Runs one command of the program; its output. Raises Unusable with its own words, and
    subprocess.TimeoutExpired after so many seconds."""
    done = subprocess.run(
        [*enter, *MONARCHFS, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        # An interrupt must not stop an unmount that cleans up.
        start_new_session=True,
    )
    if done.returncode != 0:
        raise Unusable(f"monarchfs {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def drop_pages() -> None:
    """Empties the kernel's cache of pages. Needs root, as the next two. What lies on tmpfs stays,
    and what is still to be written: os.sync() first where that matters."""
    Path(DROP_CACHES).write_text("1")


def drop_names() -> None:
    """Empties its caches of names and attributes, and of the pages of their files."""
    Path(DROP_CACHES).write_text("2")


def drop_caches() -> None:
    """Empties all of them."""
    Path(DROP_CACHES).write_text("3")


def forget_pages(fd: int) -> None:
    """Drops the open file's pages from the page cache: what is read next comes from below it."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent's handler was not inherited: the pool ends readers with SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def reader_processes(count: int) -> Iterator[Pool]:
    """``count`` processes that have started, like the workers of a data loader."""
    # What is left of an earlier pool goes now: its semaphores must not be unregistered while this
    # one registers its own (multiprocessing.resource_tracker is not reentrant).
    gc.collect()
    context = multiprocessing.get_context("spawn")
    with context.Pool(count, _leave_interrupts_to_the_parent) as pool:
        pool.map(time.sleep, [0.05] * count * 2)
        yield pool
