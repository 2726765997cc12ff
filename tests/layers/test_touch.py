"""``--touch-source``: which files are touched in the source, and what a bad source makes of it."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from monarchfs.prefetch import touch as touch_module
from monarchfs.prefetch.touch import MOST_GIVEN_UP, Touch
from tests.support.mirror import Area, Mirror


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch_module, "FASTEST_SECONDS", 0.0001)


FILES = ("a", "d/b", "d/c")


@asynccontextmanager
async def resident(area: Area, *names: str) -> AsyncIterator[tuple[Mirror, Touch]]:
    """A mount that has copied these files, which nobody has opened since."""
    async with area.mount() as mirror:
        for name in names:
            await mirror.copied(name)
        touch = Touch(mirror.source, mirror.cache, mirror.metrics, mirror.tree.known, 0.001)
        mirror.files._touch = touch
        yield mirror, touch


def touches(mirror: Mirror) -> tuple[int, int]:
    """Completed, and failed."""
    return mirror.metrics.touches_completed, mirror.metrics.touches_failed


async def test_what_was_opened_locally_is_touched_once(files: Area) -> None:
    async with resident(files, *FILES) as (mirror, touch):
        await mirror.read_file("d/b")
        await mirror.read_file("d/b")
        before = mirror.posix.faults.calls["open"]
        await touch.round()
        await touch.round()
        assert mirror.posix.faults.calls["open"] == before + 1
        assert touches(mirror) == (1, 0)
        assert mirror.source.counters.read_bytes == 60, "a touch is not reading"


async def test_what_stays_open_is_touched_every_time(files: Area) -> None:
    async with resident(files) as (mirror, touch):
        handle = await mirror.open("a")
        await mirror.idle()
        for _ in range(3):
            await touch.round()
        assert touches(mirror) == (3, 0)
        handle.release()
        await touch.round()
        assert touches(mirror) == (3, 0)


async def test_too_many_to_remember(files: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch_module, "MOST_REMEMBERED", 1)
    async with resident(files, *FILES) as (mirror, touch):
        await mirror.read_file("a")
        await mirror.read_file("d/b")
        assert len(touch.used) == 1
        await touch.round()
        await touch.round()
        assert touches(mirror) == (3, 0)


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "an error"])
async def test_what_fails_is_counted_and_no_reason_to_stop(files: Area, gone: bool) -> None:
    async with resident(files, *FILES) as (mirror, touch):
        for name in FILES:
            await mirror.read_file(name)
        if gone:
            (files.source / "d/b").unlink()
        else:
            mirror.posix.faults.fail("open", errno.EIO, times=1)
        await touch.round()
        assert touches(mirror) == (2, 1)
        assert not touch.used


async def test_a_source_that_hangs_is_left_alone(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = area.write_files(MOST_GIVEN_UP + 4, 10)
    async with resident(area, *names) as (mirror, touch):
        for name in names:
            await mirror.read_file(name)
        gate = mirror.posix.faults.gate("open")
        with monkeypatch.context() as hurried:
            hurried.setattr(touch_module, "PATIENCE_SECONDS", 0.05)
            await touch.round()
        # On a busy machine some were given up before a thread began with them.
        assert mirror.metrics.touches_failed == MOST_GIVEN_UP >= gate.waiting
        assert len(touch.used) == len(names)
        gate.open()
        await touch.round()
        assert mirror.metrics.touches_completed == len(names)
