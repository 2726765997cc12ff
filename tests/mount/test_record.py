"""``monarchfs record`` and ``top``: what they say a mount saw is what readers did."""

import json
import mmap
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli.record import open_events
from monarchfs.config.places import search_of
from monarchfs.control.messages import SILENCE_SECONDS
from monarchfs.fs.files import MAPS_DIRECT
from monarchfs.insight.recording import (
    EVENT,
    AnsweredBy,
    Event,
    Kind,
    Recording,
    open_recording,
    sampled,
)
from tests.support import trees
from tests.support.mounting import (
    ENVIRONMENT,
    MONARCHFS,
    Bench,
    Mount,
    requires_mounts,
    run,
    wait_for,
)
from tests.support.programs import Running
from tests.support.reading import COMMAND, Reader

pytestmark = requires_mounts

KIB = 1024
FILES = 20

READER = """
import json, mmap, os, random, sys, threading, time
root, log, direct, seed = sys.argv[1], sys.argv[2], sys.argv[3] == "direct", int(sys.argv[4])
random.seed(seed)
names = sorted(os.listdir(root))
random.shuffle(names)
calls = []
def logged(kind, name, offset, size, call):
    begin = time.monotonic_ns()
    result = call()
    calls.append([kind, name, offset, size, begin, time.monotonic_ns()])
    return result
def read(names):
    buffer = mmap.mmap(-1, 256 << 10)
    for name in names:
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        fd = logged("OPEN", name, 0, 0, lambda: os.open(f"{root}/{name}", flags))
        size = os.fstat(fd).st_size
        for offset in range(0, size, 64 << 10):
            length = min(64 << 10, size - offset)
            part = memoryview(buffer)[:64 << 10]
            logged("READ", name, offset, length, lambda: os.preadv(fd, [part], offset))
        os.close(fd)
threads = [threading.Thread(target=read, args=(names[half::2],)) for half in (0, 1)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
json.dump({"pid": os.getpid(), "calls": calls}, open(log, "w"))
"""


SIZES = {f"f{n}": (100 + 13 * n) * KIB + n for n in range(FILES)} | {"large": 5 << 20}


def mounted(work: Bench, path: str = "relay", *options: str) -> Mount:
    contents = {f"d/{name}": os.urandom(size) for name, size in SIZES.items()}
    return work.mount(trees.write_files(work.path / "src", contents), "--data-path", path, *options)


def start(mount: Mount, file: Path, *options: str) -> subprocess.Popen[str]:
    """A recorder that has begun."""
    command = [*MONARCHFS, "record", str(mount.path), "-o", str(file), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    wait_for(lambda: file.exists() and file.stat().st_size, "the recording to begin", 60)
    return process


def record_reader(
    mount: Mount, place: Path, how: str, seed: int
) -> tuple[Recording, list[Event], dict[str, Any]]:
    """A recording of the reader above, its events without look-ups, and its own log."""
    program = [sys.executable, "-c", READER, str(mount.path / "d"), str(place / "log"), how]
    done = run("record", str(mount.path), "-o", str(place / "rec"), "--", *program, str(seed))
    assert done.returncode == 0, done.stderr
    recording = open_recording(place / "rec")
    log = json.loads((place / "log").read_text())
    events = [event for event in recording.events if event.kind in (Kind.OPEN, Kind.READ)]
    return recording, [event for event in events if event.pid == log["pid"]], log


def assert_same_calls(recording: Recording, events: list[Event], log: dict[str, Any]) -> None:
    """The recording has what the reader did, byte for byte."""
    said = Counter((e.kind.name, name_of(recording, e), e.offset, e.size) for e in events)
    done = Counter((kind, name, offset, size) for kind, name, offset, size, _b, _e in log["calls"])
    assert said == done


def paths_in(file: Path) -> set[str]:
    return {found.path for found in open_recording(file).files.values()}


def name_of(recording: Recording, event: Event) -> str:
    return Path(recording.files[event.ino].path).name


def test_the_reads_are_those_of_the_reader(work: Bench) -> None:
    mount = mounted(work)
    for resident in (False, True):
        if resident:
            assert run("warm", str(mount.path), "--wait").returncode == 0
        recording, events, log = record_reader(mount, work.path, "direct", 1)
        assert recording.complete
        assert recording.facts["dropped"] == 0
        assert_same_calls(recording, events, log)
        named = recording.facts["processes"]  # if it was there for a tenth of a second
        assert named.get(str(log["pid"]), "python").startswith("python")
        sizes = {file.path: file.size for file in recording.files.values()}
        assert {f"d/{name}": size for name, size in SIZES.items()}.items() <= sizes.items()
        if resident:
            assert {e.source_of for e in events if e.kind is Kind.READ} == {AnsweredBy.TIER}
            assert {e.source_of for e in events if e.kind is Kind.OPEN} == {AnsweredBy.MEMORY}
        else:
            assert AnsweredBy.SOURCE in {e.source_of for e in events}
            assert AnsweredBy.UNKNOWN not in {e.source_of for e in events}
            # A request lies within the call that made it.
            within = {(name, kind, offset): (b, e) for kind, name, offset, _s, b, e in log["calls"]}
            late = []
            for event in events:
                began, ended = within[name_of(recording, event), event.kind.name, event.offset]
                begin = recording.origin_ns + event.begin * 1e9
                assert began <= begin <= ended
                late.append(begin + event.duration * 1e9 - ended)
            assert sorted(late)[len(late) // 2] < 50e6
        assert recording.seconds >= max(event.begin + event.duration for event in events)


@pytest.mark.parametrize(
    ("freshness", "path", "answers"),
    [
        ("open", "passthrough", {AnsweredBy.CHECKED, AnsweredBy.CHECKED_KERNEL}),
        ("ttl=1h", "relay", {AnsweredBy.MEMORY}),
        ("immutable", "relay", set()),
    ],
)
def test_who_answered(work: Bench, freshness: str, path: str, answers: set[AnsweredBy]) -> None:
    """The kernel alone, if they cannot change: such opens are said to be hidden."""
    mount = mounted(work, path, "--freshness", freshness)
    assert run("warm", str(mount.path), "--wait").returncode == 0
    found = set()
    for seed in (1, 2):  # the first one settles what an earlier look at the files has left
        recording, events, _log = record_reader(mount, work.path, "buffered", seed)
        found = {e.source_of for e in events if e.kind is Kind.OPEN} - {AnsweredBy.KERNEL}
    assert found == answers
    assert ("opens" in recording.facts["hidden"]) == (freshness == "immutable")
    assert "reads" in recording.facts["hidden"]  # of pages that the kernel has


@pytest.mark.parametrize("freshness", ["immutable", "open"])
def test_with_the_data_path_direct_every_open_and_read_is_seen(work: Bench, freshness: str) -> None:
    """Of files that are not local, that are, large and small; read again, too."""
    mount = mounted(work, "direct", "--freshness", freshness)
    assert mount.status()["data_path"] == "direct"
    for seed in range(3):
        recording, events, log = record_reader(mount, work.path, "buffered", seed)
        assert_same_calls(recording, events, log)
        assert recording.facts["hidden"] == ["lookups"]
        if not seed:
            assert run("warm", str(mount.path), "--wait").returncode == 0
    for file in (work.path / "src" / "d").iterdir():
        with open(mount.path / "d" / file.name, "rb") as opened:
            assert opened.read() == file.read_bytes()
            if MAPS_DIRECT:
                with mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
                    assert mapped[:] == file.read_bytes()


def test_a_recording_goes_on_with_the_next_worker(work: Bench) -> None:
    mount = mounted(work)
    file = work.path / "rec"
    recorder = start(mount, file)
    (mount.path / "d" / "f1").read_bytes()
    wait_for(lambda: "d/f1" in paths_in(file), "the first file")
    mount.kill_worker()

    def went_on() -> bool:
        """Whether a read after the restart is in the file by now."""
        with open(mount.path / "d" / "f2", "rb") as reader:
            os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            reader.read()
        return "d/f2" in paths_in(file)

    wait_for(went_on, "events of the next worker")
    recorder.send_signal(signal.SIGINT)
    _out, said = recorder.communicate(timeout=60)
    assert (recorder.returncode, said.count("\n")) == (0, 1), said
    recording = open_recording(file)
    ((begin, ended),) = recording.facts["gaps"]
    assert 0 < begin < ended < recording.seconds
    assert not [e for e in recording.events if begin < e.begin < ended]
    kinds = Counter(name_of(recording, event) for event in recording.events if event.ino)
    assert kinds["f1"] >= 2
    assert kinds["f2"] >= 2


def test_a_recorder_that_is_killed(work: Bench) -> None:
    """Its file can be read, and the mount is free for the next one."""
    mount = mounted(work)
    file = work.path / "rec"
    recorder = start(mount, file)
    for words in (["--seconds", "1"], ["--", "true"]):
        refused = run("record", str(mount.path), "-o", str(mount.source / "d" / "f0"), *words)
        assert refused.returncode == 1
        assert "is being recorded already" in refused.stderr
        assert (mount.source / "d" / "f0").stat().st_size, "an older file stays as it is"
    (mount.path / "d" / "f1").read_bytes()
    wait_for(lambda: list(open_recording(file).events), "events in the file")
    recorder.kill()
    recorder.communicate()
    recording = open_recording(file)
    assert not recording.complete
    assert Kind.READ in {event.kind for event in recording.events}

    def free() -> bool:
        return run("record", str(mount.path), "-o", str(file), "--seconds", "0.1").returncode == 0

    wait_for(free, "the mount to notice")
    assert open_recording(file).complete


def test_what_a_recording_is_told(work: Bench) -> None:
    mount, file = mounted(work), work.path / "rec"

    def record(*words: str) -> subprocess.CompletedProcess[str]:
        return run("record", str(mount.path), "-o", str(file), *words)

    # Directories are no files.
    done = record("--", "stat", *(str(mount.path / name) for name in ("d", "d/f0", "d/large")))
    assert done.returncode == 0
    assert done.stderr.startswith("monarchfs: 3 events of 2 files in "), done.stderr
    assert paths_in(file) == {"d/", "d/f0", "d/large"}
    pattern = json.loads(run("analyze", str(file), "--json").stdout)["pattern"]
    assert sum(size["files"] for size in pattern["sizes"]) == 2

    # A sample has all events of some files.
    done = record("--sample", "4", "--", "sh", "-c", f"cat {mount.path}/d/* > /dev/null")
    assert "one of 4 files was recorded" in done.stderr
    recording = open_recording(file)
    assert recording.facts["sampled"] == 4
    opened = {e.ino for e in recording.events if e.kind is Kind.OPEN}
    assert 0 < len(opened) < FILES
    assert {e.ino for e in recording.events if e.kind is Kind.READ} == opened

    # It has a largest size.
    size = f"$(stat -c %s {file})"
    script = f"until [ {size} -gt 600 ]; do cat {mount.path}/d/*; done >/dev/null; exit 7"
    done = record("--max-size", "600", "--", "sh", "-c", script)
    assert done.returncode == 7
    assert "it ended early: the file is full" in done.stderr
    assert open_recording(file).facts["stopped"] == "the file is full"
    assert file.stat().st_size < 16 * KIB

    for arguments, code, words in (
        (["--", "no-such-program"], 127, "command not found"),
        (["--", "sh", "-c", "kill -9 $$"], 137, "events of"),
        (["-o", "/no/such/directory"], 1, "cannot write /no/such/directory"),
        (["--sample", "3"], 2, "power of two"),
    ):
        done = record(*arguments)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert file.stat().st_size, "the last one was wrong, and wrote nothing"


# monarchfs top: what it shows is what processes do


SIZE, TIMES = 100_000, 10
NAMES = [f"f{n}" for n in range(FILES)]


@pytest.fixture
def mount(work: Bench) -> Mount:
    """Of two directories with files of one size."""
    contents = {f"{place}/{name}": bytes(SIZE) for place in ("a", "b/c") for name in NAMES}
    return work.mount(trees.write_files(work.path / "src", contents), "--data-path", "relay")


def read(mount: Mount, directory: str, times: int = TIMES) -> int:
    """All files of a directory so often, from below the page cache; the number of the reader, which
    has ended."""
    with closing(Reader(COMMAND)) as reader:
        for _ in range(times):
            reader.ask("read", f"{mount.path}/{directory}", NAMES, "direct", 0)
        return reader.process.pid


@contextmanager
def reading(mount: Mount) -> Iterator[None]:
    """While somebody reads."""
    with closing(Reader(COMMAND)) as reader:
        assert reader.ask("loop", f"{mount.path}/a", NAMES, f"{mount.source}/a", 1) == "reading"
        yield


class Top:
    def __init__(self, process: Running) -> None:
        self.process = process
        self.seen: list[dict[str, Any]] = []

    def next(self) -> None:
        line = self.process.line()
        assert line, self.process.stderr and self.process.stderr.read()
        self.seen.append(json.loads(line))

    def sum(self, what: str, **who: object) -> float:
        """What all intervals so far have of somebody."""
        return sum(
            float(row[what] * interval["seconds"])
            for interval in self.seen
            for row in interval["rows"]
            if who.items() <= row.items()
        )

    def wait_for(self, what: str, least: float, **who: object) -> None:
        while self.sum(what, **who) < least - 0.5:
            self.next()


@contextmanager
def top(mount: Mount, *options: str) -> Iterator[Top]:
    """One that has begun."""
    command = [*MONARCHFS, "top", str(mount.path), "--json", "--interval", "0.2", *options]
    with Running(command, env=ENVIRONMENT, stderr=subprocess.PIPE) as process:
        try:
            started = Top(process)
            started.next()
            yield started
        finally:
            process.kill()


def test_top_shows_the_processes_that_read(mount: Mount) -> None:
    assert run("warm", str(mount.path), "--wait").returncode == 0
    with top(mount) as watched:
        first, second = read(mount, "a"), read(mount, "b/c", 2)
        watched.wait_for("reads", 2 * FILES, process=second)
        watched.next()
    for reader, times in ((first, TIMES), (second, 2)):
        assert watched.sum("reads", process=reader) == pytest.approx(times * FILES)
        assert watched.sum("opens", process=reader) == pytest.approx(times * FILES)
        assert watched.sum("bytes", process=reader) == pytest.approx(times * FILES * SIZE)
    for interval in watched.seen:
        assert (interval["sampled"], interval["lost"]) == (1, 0)
        for row in interval["rows"]:
            assert 0 <= row["waiting"] <= 1
            if row["process"] == first and row["reads"]:
                assert row["answered"] == {"tier": 1}
    waited = sum(row["waited_seconds"] for one in watched.seen for row in one["rows"])
    assert waited > 0


def test_top_ends_with_the_mount(mount: Mount) -> None:
    with top(mount) as watched:
        assert mount.umount().returncode == 0
        _out, said = watched.process.communicate(timeout=60)
    assert watched.process.returncode == 1
    assert said.startswith(f"monarchfs: {mount.path} is not a monarchfs mount: ")


def test_the_sample_follows_the_rate(mount: Mount) -> None:
    """And events are those of the sample, a moment later."""
    assert run("warm", str(mount.path), "--wait").returncode == 0
    connection, _head = open_events(str(mount.path), search_of(os.environ), {"rate": 50})
    with connection:
        samples: list[int] = []
        with reading(mount):
            while not samples or samples[-1] < 4:
                samples.append(connection.next(SILENCE_SECONDS)[0]["progress"]["sampled"])
            for _ in range(3):
                progress, content = connection.next(SILENCE_SECONDS)
                samples.append(progress["progress"]["sampled"])
            inos = {event[1] for event in EVENT.iter_unpack(content)}
            assert all(sampled(ino, 4) for ino in inos)
        while samples[-1] == max(samples):
            samples.append(connection.next(SILENCE_SECONDS)[0]["progress"]["sampled"])
    assert samples[0] == 1
