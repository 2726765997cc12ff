"""What is tried on each kernel, by root of a virtual machine that has nothing but Debian's minimum,
fuse3 and the bundle, whose Python runs this. Prints a line for each: ``ok`` or ``FAILED``, its
name, what was seen, seconds.
"""

import errno
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

MONARCHFS = "/brought/bin/monarchfs"
REPOSITORY = Path(__file__).parents[2]
SOURCE = Path("/lustre/data")
MNT = Path("/mnt/data")
TIER = Path("/scratch/tier")
USER = 1000
GUARD_SECONDS = 120.0
"""A guard: emulated machines are slow."""


def command(*words: str, user: int | None = None, check: bool = True) -> str:
    """What a command of ours prints. Raises AssertionError if it fails."""
    done = subprocess.run(
        [MONARCHFS, *words],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=3 * GUARD_SECONDS,
        check=False, user=user, group=user, extra_groups=None if user is None else [], cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/root" if user is None else "/home/user"},
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{words[0]}: {done.stderr or done.stdout}"
    return done.stdout


def status() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("status", "--json", str(MNT)))
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


@contextmanager
def mounted(*options: str, source: Path = SOURCE, point: Path = MNT) -> Iterator[None]:
    """A mount with a tier and a state of its own, which is gone afterwards."""
    state = Path("/var/cache") / f"state-{point.name}"
    tier = TIER / point.name
    point.mkdir(exist_ok=True)
    tier.mkdir(parents=True, exist_ok=True)
    place = ("--tier", f"{tier}=256M", "--state-dir", str(state), "--log-file", "/tmp/log")
    command("mount", str(source), str(point), *place, *options)
    try:
        yield
    finally:
        command("umount", str(point), check=False)
        shutil.rmtree(state, ignore_errors=True)
        shutil.rmtree(tier, ignore_errors=True)


def paths(root: Path) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(where, name), root)
        for where, directories, files in os.walk(root)
        for name in files + directories
    )


def compare() -> int:
    """Names, kinds, sizes, times and bytes; how many there are."""
    names = paths(SOURCE)
    assert paths(MNT) == names
    for name in names:
        ours, theirs = (MNT / name).lstat(), (SOURCE / name).lstat()
        assert (ours.st_mode, ours.st_size, ours.st_mtime_ns) == (
            theirs.st_mode, theirs.st_size, theirs.st_mtime_ns), name  # fmt: skip
        if (SOURCE / name).is_symlink():
            assert os.readlink(MNT / name) == os.readlink(SOURCE / name)
        elif (SOURCE / name).is_file():
            assert (MNT / name).read_bytes() == (SOURCE / name).read_bytes(), name
    return len(names)


def mapped(flags: int) -> None:
    for name in ("large", "many/7"):
        with (
            open(MNT / name, "rb") as file,
            mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as pages,
        ):
            assert pages[:] == (SOURCE / name).read_bytes(), f"{name} by mmap"


def direct() -> None:
    """O_DIRECT, whole pages into a page-aligned buffer."""
    for name in ("large", "many/7"):
        expected = (SOURCE / name).read_bytes()
        fd = os.open(MNT / name, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, 1 << 20) as buffer:
                got = b""
                while count := os.preadv(fd, [buffer], len(got)):
                    got += buffer[:count]
        finally:
            os.close(fd)
        assert got == expected, f"{name} by O_DIRECT"


def prepare() -> None:
    chance = random.Random(1)
    (SOURCE / "many").mkdir(parents=True)
    for number in range(100):
        (SOURCE / "many" / str(number)).write_bytes(chance.randbytes(number * 331))
    (SOURCE / "large").write_bytes(chance.randbytes(9_000_000))
    (SOURCE / "link").symlink_to("many/7")
    (SOURCE / "deep" / "er").mkdir(parents=True)
    (SOURCE / "deep" / "er" / "file").write_bytes(b"deep")
    subprocess.run(["useradd", "--uid", str(USER), "--home-dir", "/home/user", "user"], check=True)
    for place in ("/home/user", "/home/user/mnt", "/scratch/user"):
        os.makedirs(place, exist_ok=True)
        os.chown(place, USER, USER)


def mirror(mode: str, path: str) -> str:
    # Without the page cache nothing can be mapped shared before Linux 6.6.
    flags = mmap.MAP_PRIVATE if path == "direct" else mmap.MAP_SHARED
    with mounted("--freshness", mode, "--data-path", path):
        compare()
        mapped(flags)
        direct()
        command("warm", str(MNT), "--wait")
        count = compare()
        mapped(flags)
        direct()
        now = status()
        assert now["worker"]["restarts"] == 0, now["worker"]
        passed = now["served"]["passthrough_opens"]
        return f"{count} names, served by {now['data_path']}, {passed} opens passed through"


def restarted(times: int) -> bool:
    return bool(status()["worker"]["restarts"] >= times)


def killed_worker() -> str:
    with mounted():
        command("warm", str(MNT), "--wait")
        errors: list[str] = []
        stop = threading.Event()
        reads = 0

        def read() -> None:
            nonlocal reads
            names = [name for name in paths(SOURCE) if (SOURCE / name).is_file()]
            while not stop.is_set():
                name = names[reads % len(names)]
                try:
                    if (MNT / name).read_bytes() != (SOURCE / name).read_bytes():
                        errors.append(f"{name}: wrong bytes")
                except OSError as error:
                    errors.append(f"{name}: {error}")
                reads += 1

        held = os.open(MNT / "large", os.O_RDONLY)
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for restarts in range(1, 4):
                os.kill(status()["worker"]["pid"], signal.SIGKILL)
                until(partial(restarted, restarts), "another worker")
            enough = reads + 200
            until(lambda: reads >= enough or bool(errors), "reads")
        finally:
            stop.set()
            reader.join()
        assert os.pread(held, 9_000_000, 0) == (SOURCE / "large").read_bytes()[:9_000_000]
        os.close(held)
        assert not errors, errors[:5]
        return f"3 kills, {reads} reads"


def error_of(call: Callable[[], object]) -> int | None:
    """The errno that it fails with; None if it does not."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def processes() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if b"monarchfs" in Path("/proc", entry, "cmdline").read_bytes():
                    found.append(int(entry))
            except OSError:
                continue
    return found


def killed_supervisor() -> str:
    """Its users get ENOTCONN, no process is left, and what is resident is there again."""
    with mounted("--freshness", "immutable"):
        command("warm", str(MNT), "--wait")
        worker = status()["worker"]["pid"]
        supervisor = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        held = os.open(MNT, os.O_RDONLY)
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: not processes(), "all daemons to end")
        assert error_of(lambda: os.listdir(held)) in (errno.ENOTCONN, errno.ECONNABORTED)
        os.close(held)
        command("umount", str(MNT))
        place = ("--tier", f"{TIER / 'data'}=256M", "--state-dir", "/var/cache/state-data")
        command("mount", str(SOURCE), str(MNT), *place, "--freshness", "immutable")
        compare()
        read = status()["source_io"]["read_bytes"]
        assert read == 0, f"{read} bytes were read again"
    return "mounted again, nothing read again"


@contextmanager
def a_source_that_hangs(point: Path) -> Iterator[Callable[[bool], None]]:
    """A FUSE mirror of the source; what to call to have it hang, or go on."""
    point.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-B", "-m", "tests.support.faultfs", str(SOURCE), str(point)],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    told, answers = process.stdin, process.stdout

    def hang(wanted: bool) -> None:
        message = {"do": "faults", "hang": ["* *"] if wanted else []}
        print(json.dumps(message), file=told, flush=True)
        answers.readline()

    try:
        assert answers.readline(), "the source is not mounted"
        yield hang
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False)
        process.kill()
        process.wait()


def hung_source() -> str:
    """What is resident is read; what is not waits until the source answers."""
    between = Path("/mnt/between")
    with a_source_that_hangs(between) as hang, mounted("--freshness", "immutable", source=between):
        command("warm", str(MNT), "--wait")
        command("evict", str(MNT / "deep" / "er" / "file"))
        hang(True)
        waiting = subprocess.Popen(["cat", MNT / "deep" / "er" / "file"], stdout=subprocess.PIPE)
        began = time.monotonic()
        for name in paths(SOURCE):
            if (SOURCE / name).is_file() and not name.startswith("deep"):
                assert (MNT / name).read_bytes() == (SOURCE / name).read_bytes(), name
        seconds = time.monotonic() - began
        assert waiting.poll() is None, "it was read from a source that hangs"
        hang(False)
        assert waiting.communicate(timeout=GUARD_SECONDS)[0] == b"deep"
        compare()
    return f"resident files were read in {seconds:.1f} s meanwhile"


def changes(mode: str) -> str:
    """Names come and go while they are listed; then a listing is the source's."""
    where = SOURCE / "changing"
    where.mkdir()
    for number in range(300):
        (where / f"a{number}").touch()
    with mounted("--freshness", mode):
        for round_ in range(10):
            listed = os.scandir(MNT / "changing")
            next(listed)
            for number in range(30 * round_, 30 * round_ + 30):
                (where / f"a{number}").rename(where / f"b{number}")
            names = [entry.name for entry in listed]
            listed.close()
            assert len(names) == len(set(names)), "a name twice"
            until(
                lambda: sorted(os.listdir(MNT / "changing")) == sorted(os.listdir(where)),
                "the listing to be the source's",
            )
            for name in os.listdir(where):
                assert (MNT / "changing" / name).read_bytes() == b"", name
    shutil.rmtree(where)
    return "10 rounds of 30 renames"


def run_user() -> str:
    words = ("run", str(SOURCE), "--tier", "/scratch/user=64M", "--")
    said = command(
        *words, "sh", "-c", f"cat {SOURCE}/large | md5sum; stat -f -c %T {SOURCE}", user=USER
    )
    expected = subprocess.run(
        ["md5sum"], input=(SOURCE / "large").read_bytes(), capture_output=True, check=True
    )
    within, kind = said.splitlines()
    assert within == expected.stdout.decode().strip(), said
    assert kind == "fuseblk" or "fuse" in kind, kind
    until(lambda: not processes(), "its daemons to end")
    return "the dataset's own path, in the job alone"


def ordinary_user() -> str:
    point = "/home/user/mnt"
    command("mount", str(SOURCE), point, "--tier", "/scratch/user=64M", user=USER)
    try:
        command("warm", point, "--wait", user=USER)
        seen = subprocess.run(
            ["diff", "-r", "--no-dereference", str(SOURCE), point],
            user=USER, group=USER, extra_groups=[], capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert seen.returncode == 0, seen.stdout or seen.stderr
        now = json.loads(command("status", "--json", point, user=USER))
    finally:
        command("umount", point, user=USER)
    return f"served by {now['data_path']}"


CASES: dict[str, Callable[[], str]] = {
    **{
        f"mirror {mode} {path}": partial(mirror, mode, path)
        for mode in ("immutable", "ttl=1", "open")
        for path in ("auto", "relay", "direct")
    },
    "killed worker": killed_worker,
    "killed supervisor": killed_supervisor,
    "hung source": hung_source,
    **{f"changing listings {mode}": partial(changes, mode) for mode in ("ttl=1", "open")},
    "run": run_user,
    "ordinary user": ordinary_user,
}


def main() -> int:
    os.umask(0o022)
    prepare()
    said = command("doctor", "--json", str(SOURCE), check=False)
    print("doctor:", json.dumps(json.loads(said)), flush=True)
    failed = 0
    for name, case in CASES.items():
        began = time.monotonic()
        try:
            word, seen = "ok", case()
            left = processes()
            assert not left, f"processes are left: {left}"
        except Exception as error:  # noqa: BLE001
            word, seen = "FAILED", " ".join(str(error).split())
            failed += 1
            traceback.print_exc()
            with open("/tmp/log", "a+", encoding="utf-8") as log:
                log.seek(0)
                print(log.read()[-3000:], flush=True)
            for pid in processes():
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["umount", "-l", MNT], check=False)
        print(f"{word}\t{name}\t{seen}\t{time.monotonic() - began:.1f}", flush=True)
    return min(failed, 100)


if __name__ == "__main__":
    raise SystemExit(main())
