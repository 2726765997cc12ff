"""``monarchfs top``: what it shows is what processes do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from monarchfs.cli.recorder import open_events
from monarchfs.config.places import search_of
from monarchfs.control.messages import SILENCE_SECONDS
from monarchfs.insight.recording import EVENT, sampled
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
from tests.support.reading import COMMAND, Reader

pytestmark = requires_mounts

FILES, SIZE, TIMES = 20, 100_000, 10


def mounted(work: Bench, *options: str) -> Mount:
    contents = {f"{place}/f{n}": bytes(SIZE) for place in ("a", "b/c") for n in range(FILES)}
    source = trees.write_files(work.path / "src", contents)
    return work.mount(source, "--data-path", "relay", *options)


NAMES = [f"f{n}" for n in range(FILES)]


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
        truth = f"{mount.source}/a"
        assert reader.ask("loop", f"{mount.path}/a", NAMES, truth, 1) == "reading"
        yield


class Top:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.seen: list[dict[str, Any]] = []

    def next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        self.seen.append(json.loads(line))
        return self.seen[-1]

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
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, env=ENVIRONMENT, stdout=pipe, stderr=pipe) as process:
        try:
            started = Top(process)
            started.next()
            yield started
        finally:
            process.kill()


def test_processes_are_those_that_read(work: Bench) -> None:
    mount = mounted(work)
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


def test_it_goes_on_with_the_next_worker(work: Bench) -> None:
    mount = mounted(work)
    with top(mount) as watched:
        assert run("restart", str(mount.path)).returncode == 0

        def is_seen() -> bool:
            reader = read(mount, "a", 1)
            watched.next()
            watched.next()
            return watched.sum("opens", process=reader) > 0

        wait_for(is_seen, "events of the next worker")


def test_it_ends_with_the_mount(work: Bench) -> None:
    mount = mounted(work)
    with top(mount) as watched:
        assert mount.umount().returncode == 0
        _out, said = watched.process.communicate(timeout=60)
    assert watched.process.returncode == 1
    assert said.startswith(f"monarchfs: {mount.path} is not a monarchfs mount: ")


def test_tables(work: Bench) -> None:
    """What they look like is in tests/golden/top.txt."""
    mount = mounted(work, "--freshness", "immutable")
    command = ("top", str(mount.path), "--interval", "0.1", "--count", "2", "--by", "directory")
    done = run(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(" s: nothing was asked of the mount; not seen: reads") == 2
    with reading(mount):
        table = wait_for(
            lambda: (said := run(*command).stdout).count("reads/s") == 2 and said, "two"
        )
    _head, columns, row, *_rest = table.splitlines()
    assert columns.split()[:3] == ["directory", "reads/s", "opens/s"]
    assert row.split()[0] == "a"


def test_the_sample_follows_the_rate(work: Bench) -> None:
    """And events are those of the sample, a moment later."""
    mount = mounted(work)
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
