"""Counts that go on from what an earlier worker has counted."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from monarchfs.fuse.handle_table import make_memory
from monarchfs.metrics import Metrics
from monarchfs.metrics.persistent import PersistentCounts
from monarchfs.source.lanes import SourceCounters
from monarchfs.types import Lane
from tests.support.mounting import Bench, requires_fuse, run, wait_for

SIZE = 64 << 10


@pytest.fixture
def memory() -> Iterator[int]:
    fd = make_memory("test-counts", SIZE)
    yield fd
    os.close(fd)


def counted() -> dict[str, object]:
    """Parts in which something of every kind was counted."""
    metrics, source = Metrics(), SourceCounters()
    metrics.local_opens = 3
    metrics.requests.read_local.observe(20_000)
    metrics.requests.read_local.observe(1 << 60)
    metrics.copy_failed(errno.EIO)
    metrics.copy_refused("no room")
    metrics.tier_failed("/tier", errno.ENOSPC)
    source.seconds = 1.5
    source.stuck = 7
    source.of(Lane.DEMAND, "read").operations = 5
    return {"mount": metrics, "source": source}


def metrics_of(parts: dict[str, object]) -> Metrics:
    metrics = parts["mount"]
    assert isinstance(metrics, Metrics)
    return metrics


def restored(memory: int) -> dict[str, object]:
    parts = fresh()
    PersistentCounts(memory, parts).restore()
    return parts


def fresh() -> dict[str, object]:
    metrics = Metrics()
    metrics.errors_of_tier("/tier")
    return {"mount": metrics, "source": SourceCounters()}


def test_the_next_one_goes_on_from_what_was_saved(memory: int) -> None:
    before = counted()
    PersistentCounts(memory, before).save()
    after = restored(memory)
    source = before["source"]
    assert isinstance(source, SourceCounters)
    source.stuck = 0  # what is so now, not what was counted
    assert repr(plain(after)) == repr(plain(before))
    PersistentCounts(memory, after).save()
    # Counted once, however many go on from it.
    assert repr(plain(restored(memory))) == repr(plain(before))


def plain(parts: dict[str, object]) -> object:
    """Parts as something that can be compared: histograms compare by identity."""

    def of(part: object) -> object:
        if isinstance(part, dict):
            return {str(key): of(value) for key, value in part.items()}
        names = getattr(part, "__dataclass_fields__", None) or getattr(part, "__slots__", None)
        return part if names is None else {name: of(getattr(part, name)) for name in names}

    return of(parts)


def test_without_memory_or_an_earlier_worker_it_begins_at_nothing(memory: int) -> None:
    for fd in (None, memory):
        parts = fresh()
        kept = PersistentCounts(fd, parts)
        kept.restore()
        assert repr(plain(parts)) == repr(plain(fresh()))
    PersistentCounts(None, counted()).save()


def test_one_killed_while_it_saves_leaves_what_was_saved_before(memory: int) -> None:
    parts = counted()
    kept = PersistentCounts(memory, parts)
    kept.save()
    saved = os.pread(memory, SIZE, 0)
    metrics_of(parts).local_opens = 4
    kept.save()
    # All of the second one but its last store.
    os.pwrite(memory, saved[:8], 0)
    assert metrics_of(restored(memory)).local_opens == 3


@pytest.mark.parametrize("document", [b"nonsense", b"[1]", b"null", b"[" * 5000, b"\xff\xfe", b""])
def test_what_makes_no_sense_is_refused(memory: int, document: bytes) -> None:
    put(memory, document)
    parts = fresh()
    with pytest.raises(ValueError, match=r"."):
        PersistentCounts(memory, parts).restore()
    assert repr(plain(parts)) == repr(plain(fresh()))


def test_a_length_beyond_the_memory_is_refused(memory: int) -> None:
    put(memory, b"{}")
    os.pwrite(memory, (1 << 63).to_bytes(8, "little"), 8)
    with pytest.raises(ValueError, match="too long"):
        PersistentCounts(memory, fresh()).restore()


def put(memory: int, document: bytes) -> None:
    os.pwrite(memory, len(document).to_bytes(8, "little") + document, 8)
    os.pwrite(memory, (1).to_bytes(8, "little"), 0)


def test_what_another_release_has_otherwise_is_passed_over(memory: int) -> None:
    other = {
        "mount": {
            "local_opens": 2,
            "requests": {"open_local": {"counts": [1, 2], "total_ns": 5}, "unknown": {}},
            "source_opens": "many",
            "relayed_bytes": True,
            "copy_errors": {"by_name": {"EIO": 1, "EOTHER": 9}},
            "of_tomorrow": 4,
        },
        "unknown": {"x": 1},
        "source": 5,
    }
    put(memory, json.dumps(other).encode())
    expected = fresh()
    metrics_of(expected).local_opens = 2
    metrics_of(expected).copy_errors.by_name["EIO"] = 1
    assert repr(plain(restored(memory))) == repr(plain(expected))


def test_more_than_fits_is_said(memory: int) -> None:
    parts = counted()
    for number in range(2000):
        metrics_of(parts).tier_failed(f"/tiers/{number}", errno.EIO)
    with pytest.raises(ValueError, match="too many"):
        PersistentCounts(memory, parts).save()


FILES, FILE_BYTES = 40, 30_000


@requires_fuse
def test_counts_go_on_when_workers_are_killed_and_replaced(work: Bench) -> None:
    """tests/scenarios/killed_worker.txt has all counts; here are times, and a worker that is
    replaced on purpose."""
    source = work.path / "src"
    source.mkdir()
    for number in range(FILES):
        (source / f"f{number:02}").write_bytes(os.urandom(FILE_BYTES))
    mount = work.mount(source)

    def read(first: int, last: int) -> dict[str, Any]:
        for number in range(first, last):
            (mount.path / f"f{number:02}").read_bytes()
        return mount.wait_idle()

    first = read(0, 20)
    os.kill(first["worker"]["pid"], signal.SIGKILL)
    wait_for(lambda: mount.status()["worker"]["restarts"] == 1, "another worker")
    wait_for(lambda: mount.status()["state"] == "serving", "it to serve")
    second = mount.status()
    assert second["served"] == first["served"]
    for key in ("completed", "idle_since_uptime_seconds"):
        assert second["prefetch"][key] == first["prefetch"][key] is not None
    read(20, FILES)
    assert run("restart", str(mount.path)).returncode == 0
    last = mount.status()
    assert last["served"]["source_opens"] == last["prefetch"]["completed"] == FILES
    assert last["source_io"]["read_bytes"] == FILES * FILE_BYTES
