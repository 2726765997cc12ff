"""Scrapes of real mounts: what was done is what is counted, whatever state the mount is in."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPException
from pathlib import Path

import pytest

from monarchfs.metrics.names import FAMILIES
from tests.support.mounting import (
    Bench,
    FaultySource,
    Mount,
    assert_one_line,
    free_port,
    requires_mounts,
    run,
    wait_for,
)
from tests.support.reading import COMMAND, Reader
from tests.support.scraping import (
    FILES,
    SIZE,
    Scrape,
    make_files,
    read_all,
    scrape,
    sums_are_right,
    waits_are_right,
)
from tests.support.timing import Stopwatch

pytestmark = requires_mounts

DOCUMENT = Path(__file__).parents[2] / "docs" / "METRICS.md"


def mounted(work: Bench, *options: str) -> tuple[Mount, int]:
    make_files(work.path / "src")
    port = free_port()
    return work.mount(work.path / "src", "--metrics-port", str(port), *options), port


def mounted_faulty(work: Bench, *options: str) -> tuple[Mount, int, FaultySource]:
    make_files(work.path / "backing")
    source = work.faulty_source(work.path / "backing")
    port = free_port()
    return work.mount(source.path, "--metrics-port", str(port), *options), port, source


@contextmanager
def reading(*call: object, healed: FaultySource | None = None) -> Iterator[Reader]:
    """Who reads files meanwhile; killed at the end, when the source is well again."""
    with closing(Reader(COMMAND)) as reader:
        reader.tell(*call)
        try:
            yield reader
        finally:
            if healed is not None:
                healed.faults()


def test_what_was_done_is_what_is_counted(work: Bench) -> None:
    """What each operation counts is recorded in tests/scenarios."""
    mount, port = mounted(work, "--freshness", "ttl=3600")
    assert mount.status()["metrics_port"] == port
    read_all(mount)
    mount.wait_idle()
    read_all(mount)
    assert run("evict", str(mount.path), "f0").returncode == 0
    now = scrape(port)
    tier = f"{work.path}/tier"
    for served in ("local", "source"):
        assert now.value("monarchfs_opens_total", served=served) == FILES
        assert now.value("monarchfs_opened_file_bytes_total", served=served) == FILES * SIZE
    assert now.total("monarchfs_source_read_bytes_total") == FILES * SIZE
    assert now.value("monarchfs_copies_completed_total") == FILES
    assert now.value("monarchfs_evictions_total", reason="manual") == 1
    assert now.value("monarchfs_tier_files", tier=tier, state="complete") == FILES - 1
    assert now.value("monarchfs_tier_capacity_bytes", tier=tier) == 1 << 30
    assert now.value("monarchfs_tier_in_service", tier=tier) == 1
    # Also of what is just being removed.
    used = now.value("monarchfs_tier_used_bytes", tier=tier)
    assert (FILES - 1) * SIZE <= used <= FILES * (SIZE + 8192)
    assert now.value("monarchfs_index_inodes") == FILES + 1
    assert now.value("monarchfs_index_bytes") > 4096
    assert now.value("monarchfs_source_responding") == 1
    assert now.value("process_open_fds") > 5
    assert f'mountpoint="{mount.path}"' in now.text
    sums_are_right(now)
    # Everything that is documented is exported, and nothing else.
    ours = {name: kind for name, kind in now.kinds.items() if name.startswith("monarchfs_")}
    assert ours == {family.name: family.kind.value for family in FAMILIES}
    for family in FAMILIES:
        # An empty label is the same as none, and the parser leaves none out.
        assert now.labels[family.name] == set(family.labels)
    document = DOCUMENT.read_text()
    assert [name for name in now.kinds if f"`{name}`" not in document] == []
    read_all(mount, ["f1", "f2"])
    mount.wait_idle()
    assert len(scrape(port).samples) == len(now.samples), "work makes no series"


def waits(now: Scrape) -> dict[str, float]:
    causes = ("source", "memory", "tier", "peer", "copy", "names")
    return {cause: now.value("monarchfs_wait_seconds_total", cause=cause) for cause in causes}


def read_without_pages(mount: Mount) -> None:
    for n in range(FILES):
        reader = os.open(mount.path / f"f{n}", os.O_RDONLY | os.O_DIRECT)
        os.preadv(reader, [mmap.mmap(-1, 64 << 10)], 0)
        os.close(reader)


def test_waiting_is_counted_by_what_is_waited_for(work: Bench) -> None:
    mount, port = mounted(work, "--data-path", "relay")
    read_without_pages(mount)
    first = scrape(port)
    waits_are_right(first)
    assert waits(first)["source"] > 0
    assert waits(first)["names"] > 0
    mount.wait_idle()
    before = scrape(port)
    read_without_pages(mount)
    again = scrape(port)
    waits_are_right(again)
    more = {cause: now - waits(before)[cause] for cause, now in waits(again).items()}
    assert more["tier"] > 0
    assert more["names"] > 0
    assert more["source"] == more["memory"] == more["peer"] == more["copy"] == 0
    assert run("restart", str(mount.path)).returncode == 0
    wait_for(lambda: mount.status()["worker"]["restarts"], "another worker")
    after = waits(scrape(port))
    assert all(after[cause] >= waits(again)[cause] for cause in after)


def test_scrapes_under_load_are_quick_and_never_go_back(work: Bench) -> None:
    mount, port = mounted(work, "--freshness", "ttl=3600")
    read_all(mount)
    mount.wait_idle()
    names = [f"f{n}" for n in range(FILES)]
    with reading("loop", str(mount.path), names, str(mount.source), 1) as reader:
        before = scrape(port)
        for _ in range(20):
            started = Stopwatch()
            now = scrape(port)
            started.check(5)
            sums_are_right(now)
            for (name, labels), value in before.samples.items():
                if name.endswith(("_total", "_count", "_bucket")):
                    assert now.samples[name, labels] >= value, name
            before = now
        opens = now.value("monarchfs_opens_total", served="local")
        wait_for(
            lambda: scrape(port).value("monarchfs_opens_total", served="local") > opens,
            "the reader to go on",
        )
        assert reader.process.poll() is None


def test_a_scrape_while_the_source_hangs(work: Bench) -> None:
    mount, port, source = mounted_faulty(work, "-o", "source_deadline_seconds=0.5")
    read_all(mount, ["f0"])
    mount.wait_idle()
    source.faults(hang=["* *"])

    def hanging() -> Scrape | None:
        started = Stopwatch()
        now = scrape(port)
        started.check(5)
        return now if now.value("monarchfs_source_calls_stuck") else None

    def responds(value: int) -> bool:
        return scrape(port).value("monarchfs_source_responding") == value

    with reading("read", str(mount.path), ["f1"], "whole", 0, healed=source) as reader:
        now = wait_for(hanging, "the call to be seen as stuck")
        assert now.value("monarchfs_source_oldest_call_seconds", lane="demand") > 0.9
        assert now.value("monarchfs_source_calls_active", lane="demand") >= 1
        assert now.value("monarchfs_requests_waiting") >= 1
        wait_for(lambda: responds(0), "the source to hang")
        reader.process.kill()
        reader.process.wait(10)
        wait_for(
            lambda: scrape(port).value("monarchfs_requests_interrupted_total") >= 1,
            "the request to be given up",
        )
        assert scrape(port).value("monarchfs_request_errors_total", error="EINTR") >= 1
    wait_for(lambda: responds(1), "the source again")


def test_a_port_that_is_taken_fails_the_mount(work: Bench) -> None:
    mount, port = mounted(work)
    (work.path / "other").mkdir()
    before = sorted(os.listdir(work.path))
    words = ["mount", str(mount.source), f"{work.path}/other", "--metrics-port", str(port)]
    done = run(*words, *work.storage(name="2"))
    assert_one_line(done, 1, f"cannot serve metrics on 127.0.0.1:{port}: ")
    assert sorted(os.listdir(work.path)) == before
    assert scrape(port).value("monarchfs_source_responding") == 1


def test_a_worker_that_is_stopped_or_dead_costs_a_scrape_no_more_than_its_timeout(
    work: Bench,
) -> None:
    mount, port = mounted(work)
    worker = mount.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    try:
        with pytest.raises(OSError, match="timed out"):
            scrape(port, 0.3)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert scrape(port).total("monarchfs_opens_total") == 0
    os.kill(worker, signal.SIGKILL)

    def answered() -> bool:
        started = Stopwatch()
        try:
            return scrape(port, 2).value("monarchfs_worker_restarts_total") == 1
        # The supervisor has the socket, and those that the dead one took are reset.
        except (OSError, HTTPException):
            started.check(4)
        return False

    wait_for(answered, "another worker to answer")


def test_a_worker_that_cannot_die_does_not_keep_the_port(work: Bench) -> None:
    mount, port, source = mounted_faulty(work)
    worker = mount.worker_pid()
    source.faults(hang=["open *"])
    with reading("read", str(mount.path), ["f1"], "whole", 0, healed=source):
        wait_for(lambda: scrape(port).value("monarchfs_requests_waiting") >= 1, "the open to hang")
        assert mount.umount(timeout=3).returncode == 0
        assert Path(f"/proc/{worker}").exists(), "a thread of it hangs in the source"
        other = work.path / "other"
        make_files(other)
        work.mount(other, "--metrics-port", str(port), "--state-dir", f"{work.path}/state2")
        assert scrape(port).value("monarchfs_source_responding") == 1


def test_without_the_option_nobody_listens(work: Bench) -> None:
    make_files(work.path / "src")
    mount = work.mount(work.path / "src")
    assert mount.status()["metrics_port"] is None
    worker = mount.worker_pid()
    tcp = Path(f"/proc/{worker}/net/tcp").read_text()
    inodes = {line.split()[9] for line in tcp.splitlines()[1:]}
    links = [os.readlink(entry) for entry in Path(f"/proc/{worker}/fd").iterdir()]
    assert not [link for link in links if link.removeprefix("socket:[").rstrip("]") in inodes]
