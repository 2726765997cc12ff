"""The emulated parallel file system: right bytes, exact counts, never faster than it says, and gone
afterwards. A machine under load is slower than told, so that only lower bounds of time are tested;
bench/calibrate.py measures the upper ones."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bench.pfs
from bench.calibrate import measure_counters
from bench.harness import Unusable, drop_names
from bench.pfs import INSTANT, PROFILES, ParallelFileSystem, Profile, Requests, build, set_layout
from bench.probes import Data
from bench.report import Result
from bench.task import Task
from tests.support import mounting, surroundings
from tests.support.programs import Running, execute
from tests.support.trees import differences

pytestmark = [mounting.requires_fuse, surroundings.program("gcc"), surroundings.requires_own_clone]

MIB = 1 << 20
SECONDS = 60


def python(script: str, *arguments: object) -> Any:
    """What a script prints as JSON. In a process of its own: what reads a mount can hang."""
    done = execute([sys.executable, "-c", script, *map(str, arguments)], cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users may enter, unlike pytest's; nothing is left in the end."""
    with tempfile.TemporaryDirectory(prefix="monarchfs-test-") as path:
        os.chmod(path, 0o755)
        yield Path(path)
        assert mounting.fuse_mounts(path) == []
        assert mounting.processes_about(path) == []


@pytest.fixture
def backing(place: Path) -> Path:
    root = place / "backing"
    rng = random.Random(7)
    (root / "many").mkdir(parents=True)
    for number in range(300):
        (root / "many" / f"{number:03}").write_bytes(rng.randbytes(number))
    (root / "deep" / "er" / "still").mkdir(parents=True)
    (root / "deep" / "er" / "still" / "ünï çödé\n").write_bytes(b"x")
    (root / "large").write_bytes(rng.randbytes(3 * MIB + 5))
    (root / "copy").write_bytes(rng.randbytes(3 * MIB + 5))
    (root / "again").hardlink_to(root / "large")
    (root / "link").symlink_to("deep/er")
    (root / "dangling").symlink_to("/nowhere")
    return root


Mounter = Callable[..., ParallelFileSystem]


@pytest.fixture
def mounted(backing: Path, place: Path) -> Iterator[Mounter]:
    with ExitStack() as stack:

        def mount(profile: Profile = INSTANT, **options: Any) -> ParallelFileSystem:
            pfs = ParallelFileSystem(backing, place / "pfs", profile, **options)
            return stack.enter_context(pfs)

        yield mount


def test_files_are_those_of_the_backing(backing: Path, mounted: Mounter) -> None:
    pfs = mounted()
    os.setxattr(backing / "large", "user.kind", b"\0random")
    assert differences(backing, pfs.path) == []


MANY = [f"many/{number:03}" for number in range(40)]
READ = "import sys\nfor path in sys.argv[1:]: open(path, 'rb').read()"
TIMED = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
threads, work, *paths = sys.argv[1:]
def run(path):
    os.stat(path) if work == "stat" else open(path, "rb").read()
started = time.monotonic()
with ThreadPoolExecutor(int(threads)) as pool:
    list(pool.map(run, paths))
print(json.dumps(time.monotonic() - started))
"""


def test_what_a_client_of_lustre_would_ask(mounted: Mounter) -> None:
    """Of a cold open, read and close by Python, which asks for the size, too: an enqueue, a
    glimpse, a close, as measured there. A later open is an enqueue, as an attribute is."""
    pfs = mounted(targets=4)
    names = [pfs.path / "many" / f"{number:03}" for number in range(100, 150)]

    def asked_requests(script: str) -> Requests:
        before = pfs.requests()
        python(script, *names)
        mounting.wait_for(lambda: (pfs.requests() - before).close >= 50, "the files to be closed")
        return pfs.requests() - before

    directory = 1  # it is looked up
    assert asked_requests(READ) == Requests(enqueue=50 + directory, glimpse=50, close=50)
    listing = "import os, sys\nfor path in sys.argv[1:]: os.listxattr(path)"
    for script, expected in (
        (READ, Requests(enqueue=50, close=50)),
        (f"{READ}\n{listing}", Requests(enqueue=100, close=50)),
    ):
        # Anew where another test had the kernel drop what it knew.
        mounting.wait_for(lambda: asked_requests(script) == expected, f"no more than {expected}")  # noqa: B023


@pytest.mark.parametrize(
    ("profile", "threads", "work", "names", "least"),
    [
        # Opens are asked for also where the name is known.
        (replace(INSTANT, metadata_seconds=0.01), 1, "read", ["many/000"] * 10, 10 * 0.01),
        (replace(INSTANT, metadata_seconds=0.01, metadata_in_flight=2), 8, "stat", MANY, 0.2),
        (replace(INSTANT, read_seconds=0.02), 1, "read", MANY[1:11], 10 * 0.02),
        # All readers share the bandwidth.
        (replace(INSTANT, bandwidth=15e6), 2, "read", ["large", "copy"], 2 * (3 * MIB + 5) / 15e6),
    ],
)
def test_it_is_never_faster_than_it_says(
    profile: Profile, threads: int, work: str, names: list[str], least: float, mounted: Mounter
) -> None:
    pfs = mounted(profile)
    assert python(TIMED, threads, work, *(pfs.path / name for name in names)) >= least


def test_the_noise_is_the_same_here_as_there() -> None:
    profile, seed = replace(PROFILES["crowded"], noise_period=0.25), 2**64 - 1
    done = execute(
        [build(), "weather", str(seed), str(profile.noise), str(profile.noise_period), "100"],
        check=True,
    )
    there = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert there == [(0.25 * step, profile.share(seed, 0.25 * step)) for step in range(100)]
    assert all(0 <= share < profile.noise for _, share in there)
    assert len({share for _, share in there}) == 100
    assert profile.quiet().share(1, 3.0) == 0


READS = """
import os, sys
sys.stdin.readline()
fd = os.open(sys.argv[1], os.O_RDONLY)  # without asking for the size
try:
    print(len(os.pread(fd, 100, int(sys.argv[2]))), flush=True)
except OSError as error:
    print(error.strerror, flush=True)
"""


@mounting.requires_root
def test_targets_hang_and_fail_one_by_one(backing: Path, mounted: Mounter) -> None:
    """A reader of one that hangs waits, whatever becomes of the others."""
    set_layout(backing / "large", 3)
    pfs = mounted(targets=4)
    offsets = {target: target * MIB for target in range(3)}
    pfs.set_faults(hung=[1], failing=[2])
    readers = {}
    for target, offset in offsets.items():
        readers[target] = Running([sys.executable, "-c", READS, pfs.path / "large", str(offset)])
    try:
        hanging = readers[1]
        hanging.tell("")
        mounting.wait_for(lambda: waits(hanging.pid), "the reader to wait for its target")
        said = [readers[n].communicate("\n", SECONDS)[0].strip() for n in (0, 2)]
        assert said == ["100", "Input/output error"]
        assert waits(hanging.pid)
        pfs.set_faults(failing=[2])
        assert hanging.communicate(timeout=SECONDS)[0] == "100\n"
    finally:
        pfs.set_faults()
        for reader in readers.values():
            reader.kill()
            reader.communicate()


def waits(pid: int) -> bool:
    return "folio_wait" in Path(f"/proc/{pid}/stack").read_text()


HARNESS = """
import os, sys, time
from pathlib import Path
from bench.pfs import INSTANT, ParallelFileSystem
with ParallelFileSystem(Path(sys.argv[1]), Path(sys.argv[2]), INSTANT) as pfs:
    if os.fork() == 0:
        time.sleep(3600)
    opened = open(pfs.path / "large", "rb")
    opened.read(10)
    print(pfs.pid, flush=True)
    sys.stdin.read()
"""


def test_it_ends_with_the_harness(backing: Path, place: Path) -> None:
    """Killed; also where a child of it, which lives on, still has the other end of the pipe."""
    pfs = place / "pfs"
    command = [sys.executable, "-c", HARNESS, str(backing), str(pfs)]
    harness = Running(command, cwd=mounting.REPOSITORY, start_new_session=True)
    try:
        emulator = int(harness.line())
        assert mounting.fuse_mounts(str(place)) == [str(pfs)]
        harness.kill()
        mounting.wait_for(lambda: not mounting.fuse_mounts(str(place)), "the mount to go")
        mounting.wait_for(lambda: not Path(f"/proc/{emulator}").exists(), "the emulator to end")
    finally:
        os.killpg(harness.pid, signal.SIGKILL)
        harness.communicate(timeout=SECONDS)


@mounting.requires_root
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_all_threads_at_once(
    sanitizer: str,
    backing: Path,
    mounted: Mounter,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Under the compiler's sanitizers, which say what goes wrong on standard error."""
    options = ["-g", "-O1", "-Werror", f"-fsanitize={sanitizer}"]
    try:
        program = build(place / "build", options)
    except Unusable as error:
        if "cannot find" in str(error):
            pytest.skip("needs this compiler's sanitizers: apt-get install gcc")
        raise
    monkeypatch.setattr(bench.pfs, "build", lambda: program)
    pfs = mounted(PROFILES["fast"])
    compare = ["diff", "-r", "--no-dereference", str(backing), str(pfs.path)]
    for _ in range(3):
        running = [subprocess.Popen(compare) for _ in range(3)]
        for profile in (PROFILES["crowded"], INSTANT) * 3:
            pfs.use(profile)
            pfs.restart_noise()
            drop_names()
        assert [process.wait(SECONDS) for process in running] == [0] * 3
    pfs.__exit__(None, None, None)
    assert "Sanitizer" not in capfd.readouterr().err


@mounting.requires_root
@surroundings.program("strace")
def test_the_counters_say_what_strace_saw(place: Path) -> None:
    (place / "data").mkdir()
    data = Data(place / "data", 8 << 20, 30)
    result = Result("calibrate", "")
    with ParallelFileSystem(data.root, place / "pfs", PROFILES["fast"]) as pfs:
        measure_counters(Task(place), result, pfs, data, place)
    assert len(result.rows) == 5
    assert [(row.what, row.value) for row in result.rows if not row.holds] == []
    assert not any(row.what.endswith("of 0") for row in result.rows), result.rows
