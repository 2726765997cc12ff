"""Files and directories that change all the time: no open, stat or path walk fails for it.

What is read is what a plain open and read of the source could have given: records that are whole,
in order, and of one version where the file was replaced. Bytes whose version was looked at are of
that version, whatever comes next.
"""

import ctypes
import errno
import itertools
import os
import subprocess
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support import surroundings
from tests.support.mounting import Bench, requires_mounts, wait_for
from tests.support.trees import write_files

pytestmark = requires_mounts

RECORD = 64
OFTEN = 10
ROUNDS = 36
READERS = 3
RENAME_EXCHANGE = 2
AT_FDCWD = -100
libc = ctypes.CDLL(None, use_errno=True)

MODES = {
    "ttl": ("--freshness", "ttl=1"),
    "open": ("--freshness", "open"),
    "open, relayed": ("--freshness", "open", "--data-path", "relay"),
    "open, nothing kept": ("--freshness", "open", "--prefetch", "none"),
    "open, for all users": ("--freshness", "open", "-o", "allow_other"),
    "immutable": ("--freshness", "immutable", "--evict", "lru"),
}


def records(wanted: Iterable[int]) -> bytes:
    """Each says which it is, and whether it is whole."""
    bodies = [b"%055d" % number for number in wanted]
    return b"".join(body + b"%08x\n" % zlib.crc32(body) for body in bodies)


def numbers(data: bytes) -> list[int]:
    """Of the records. Raises AssertionError where one is not what was written."""
    assert len(data) % RECORD == 0
    texts = [data[at : at + 55] for at in range(0, len(data), RECORD)]
    found = [int(text) if text.isdigit() else -1 for text in texts]
    assert data == records(found)
    return found


def in_order(data: bytes) -> list[int]:
    found = numbers(data)
    assert found, "nothing was read"
    assert found == list(range(found[0], found[0] + len(found)))
    return found


def of_a_version(data: bytes) -> None:
    """Version k begins with record 1000 k, and has 50 + k % 100."""
    first, *_ = found = in_order(data)
    assert first % 1000 == 0
    assert len(found) == 50 + first // 1000 % 100


def version(number: int) -> bytes:
    return records(range(number * 1000, number * 1000 + 50 + number % 100))


def change(source: Path, step: int) -> None:
    """One step of each file."""
    with (source / "d/log").open("ab", buffering=0) as log:
        log.write(records([1000 + os.fstat(log.fileno()).st_size // RECORD]))
    if step % 2:
        (source / "d/new").write_bytes(version(step))
        (source / "d/new").chmod(0o755)
        (source / "d/new").rename(source / "d/swapped")
        (source / "gone").mkdir()
        for one, other in (("e", "e.other"), ("empty", "gone")):
            exchanged = AT_FDCWD, bytes(source / one), AT_FDCWD, bytes(source / other)
            assert libc.renameat2(*exchanged, RENAME_EXCHANGE) == 0, ctypes.get_errno()
        (source / "gone").rmdir()
    else:
        # Each record stays whole, whenever it is read; how many there are changes.
        with (source / "d/rewritten").open("r+b", buffering=0) as file:
            file.truncate(RECORD * (step % 7))
            file.write(version(step))


@contextmanager
def changing(source: Path) -> Iterator[threading.Event]:
    """Again and again. The event is set when that was often."""
    stop, often = threading.Event(), threading.Event()

    def run() -> None:
        for step in itertools.count(1):
            if stop.wait(0.004):
                return
            change(source, step)
            if step == OFTEN:
                often.set()

    writer = threading.Thread(target=run)
    writer.start()
    try:
        yield often
    finally:
        stop.set()
        writer.join()


CHECKS: dict[str, Callable[[bytes], object]] = {
    "d/log": in_order,
    "d/swapped": of_a_version,
    "d/rewritten": numbers,
    "e/deep/f": of_a_version,
}


def read_all(fd: int) -> bytes:
    """Not by file.read(), which may read a part of a record."""
    return b"".join(iter(lambda: os.read(fd, 1 << 20), b""))


def read_each(root: Path, errors: Counter[str], found: list[str]) -> None:
    """All that is to succeed, of each file, once."""
    for name, check in CHECKS.items():
        path = root / name

        @contextmanager
        def call(what: str, name: str = name) -> Iterator[None]:
            try:
                yield
            except OSError as exc:
                errors[f"{what} {name}: {errno.errorcode[exc.errno or 0]}"] += 1
            except AssertionError as exc:
                found.append(f"{what} {name}: {exc!s:.300}")

        with call("stat"):
            assert os.stat(path).st_size % RECORD == 0
        with call("access"):
            assert os.access(path, os.R_OK), "it may not be read"
        with call("getxattr"):
            os.getxattr(path, "user.monarchfs.state")
        if name == "d/swapped":
            with call("exec"), pytest.raises(OSError, match="Exec format error"):
                os.posix_spawn(path, [name], {})
        with call("listdir"):
            assert path.name in os.listdir(path.parent)
            assert os.listdir(root / "empty") == []
        with call("open"), path.open("rb", buffering=0) as file:
            with call("fstat"):
                assert os.fstat(file.fileno()).st_size % RECORD == 0
            with call("read"):
                check(read_all(file.fileno()))
            same = f"/proc/self/fd/{file.fileno()}"
            with call("open again"), open(same, "rb", buffering=0) as again:
                check(read_all(again.fileno()))


@pytest.mark.parametrize("mode", MODES)
def test_no_call_fails_while_files_change(work: Bench, mode: str) -> None:
    source = work.path / "source"
    files = {f"d/{name}": version(1) for name in ("log", "swapped", "rewritten")}
    write_files(source, files | {"e/deep/f": version(1), "e.other/deep/f": version(2)})
    (source / "d/swapped").chmod(0o755)
    (source / "empty").mkdir()
    mount = work.mount(source, *MODES[mode])
    errors: Counter[str] = Counter()
    found: list[str] = []

    def read() -> None:
        for number in itertools.count():
            if number >= ROUNDS // READERS and often.is_set():
                return
            read_each(mount.path, errors, found)

    with changing(source) as often:
        readers = [threading.Thread(target=read) for _ in range(READERS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert errors == Counter()
    assert found == []
    # In the end all of it is what the source has, and still is when it was copied.
    for _ in range(2) if mode != "immutable" else ():
        for name in CHECKS:
            last = (source / name).read_bytes()
            wait_for(lambda: (mount.path / name).read_bytes() == last, f"the bytes of {name}")  # noqa: B023
        mount.wait_idle()


SIZE, AT, ASKED = 4 << 20, 2 << 20, 128 << 10
FSTATS = {"5", "262"}
"""fstat(2) and newfstatat(2) of x86_64, for which the machine that asks may be another."""


@contextmanager
def slow_checks(pid: int, told: Path) -> Iterator[None]:
    """Each thread of this process comes back from fstat(2) a second late, which ``told`` tells."""
    calls = "fstat,newfstatat"
    command = ["strace", "-f", "-qq", "-p", str(pid), "-o", str(told), "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:delay_exit=1000000"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE)

    def is_traced() -> bool:
        states = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/status")]
        return all(f"TracerPid:\t{tracer.pid}\n" in state for state in states)

    try:
        wait_for(is_traced, "all threads to be traced")
        yield
    finally:
        tracer.terminate()
        tracer.communicate(timeout=10)


def checked(pid: int, reader: threading.Thread, told: Path) -> set[str]:
    """Threads that are on their way back from fstat(2)."""
    found = set()
    back = {line.split()[0] for line in told.read_text().splitlines() if " = 0" in line}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            if (task / "syscall").read_text().split()[0] in FSTATS:
                found.add(task.name)
    assert found or reader.is_alive(), "the bytes came without a check"
    return found & back


@surroundings.program("strace")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="knows numbers of x86_64 alone")
def test_a_change_between_the_check_and_the_answer_is_not_seen(work: Bench) -> None:
    """By a writer on the same node, whose bytes are in the page cache at once."""
    source = write_files(work.path / "source", {"f": b"A" * SIZE})
    os.utime(source / "f", (1, 1))
    mount = work.mount(source, "--prefetch", "none", "--freshness", "ttl=60")
    worker = mount.worker_pid()
    with (mount.path / "f").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, 0) == b"A" * 4096  # Python's; the next ones are not
        got: list[bytes] = []
        reader = threading.Thread(
            target=lambda: got.append(os.pread(file.fileno(), ASKED, AT)), daemon=True
        )
        with slow_checks(worker, told := work.path / "told"):
            reader.start()
            wait_for(lambda: checked(worker, reader, told), "the check to have its answer")
            descriptor = os.open(source / "f", os.O_WRONLY)
            os.pwrite(descriptor, b"B" * SIZE, 0)
            os.close(descriptor)
            assert reader.is_alive()
            reader.join(20)
        assert got == [b"A" * ASKED]
