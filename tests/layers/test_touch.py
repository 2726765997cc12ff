"""``--touch-source``: which files are touched in the source, and what a bad source makes of it."""

from __future__ import annotations

import errno

import pytest

from monarchfs.prefetch import touch as touch_module
from monarchfs.prefetch.touch import MOST_GIVEN_UP, Touch
from tests.support.mirror import MIB, Area, Mirror, content


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch_module, "FASTEST_SECONDS", 0.0001)


def touching(mirror: Mirror) -> Touch:
    touch = Touch(
        mirror.source,
        mirror.cache,
        mirror.metrics,
        mirror.tree.known.place,
        mirror.opens.inodes,
        0.001,
    )
    mirror.files._on_local_open = touch.opened
    return touch


async def test_what_was_opened_locally_is_touched_once(files: Area) -> None:
    async with files.mount() as mirror:
        for name in ("a", "d/b", "d/c"):
            await mirror.copied(name)
        touch = touching(mirror)
        await mirror.read_file("d/b")
        await mirror.read_file("d/b")
        before = mirror.posix.faults.calls["open"]
        await touch.round()
        await touch.round()
        assert mirror.posix.faults.calls["open"] == before + 1
        assert (mirror.metrics.touches_completed, mirror.metrics.touches_failed) == (1, 0)
        assert mirror.source.counters.read_bytes == 60, "a touch is not reading"


async def test_what_stays_open_is_touched_every_time(files: Area) -> None:
    async with files.mount() as mirror:
        touch = touching(mirror)
        handle = await mirror.open("a")
        await mirror.idle()
        for _ in range(3):
            await touch.round()
        assert mirror.metrics.touches_completed == 3
        handle.release()
        await touch.round()
        assert mirror.metrics.touches_completed == 3


async def test_a_file_that_is_local_in_part_is_touched(area: Area) -> None:
    area.write("large", content(3 * MIB))
    async with area.mount(tiers=(20 * MIB,), copies=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, 0, 4096)
        await mirror.idle()
        touch = touching(mirror)
        again = await mirror.open("large")
        again.release()
        handle.release()
        await mirror.idle()
        await touch.round()
        assert mirror.metrics.touches_completed == 1


async def test_what_is_read_from_the_source_anyway_is_not_touched(files: Area) -> None:
    async with files.mount(keeps=False) as mirror:
        touch = touching(mirror)
        await mirror.read_file("a")
        await touch.round()
        assert mirror.metrics.touches_completed == 0


async def test_too_many_to_remember_are_all_that_is_resident(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touch_module, "MOST_REMEMBERED", 1)
    async with files.mount() as mirror:
        for name in ("a", "d/b", "d/c"):
            await mirror.copied(name)
        touch = touching(mirror)
        await mirror.read_file("a")
        await mirror.read_file("d/b")
        assert len(touch.used) == 1
        await touch.round()
        assert mirror.metrics.touches_completed == 3
        await touch.round()
        assert mirror.metrics.touches_completed == 3


async def test_a_file_that_is_gone_is_counted_and_no_reason_to_stop(files: Area) -> None:
    async with files.mount() as mirror:
        for name in ("a", "d/b", "d/c"):
            await mirror.copied(name)
        touch = touching(mirror)
        for name in ("a", "d/b", "d/c"):
            await mirror.read_file(name)
        (files.source / "d/b").unlink()
        await touch.round()
        assert (mirror.metrics.touches_completed, mirror.metrics.touches_failed) == (2, 1)


async def test_an_error_of_the_source_is_counted(files: Area) -> None:
    async with files.mount() as mirror:
        await mirror.copied("a")
        touch = touching(mirror)
        await mirror.read_file("a")
        mirror.posix.faults.fail("open", errno.EIO)
        await touch.round()
        assert mirror.metrics.touches_failed == 1
        assert not touch.used


async def test_a_source_that_hangs_is_left_alone_until_the_next_round(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"f{number}" for number in range(MOST_GIVEN_UP + 4)]
    for name in names:
        area.write(name, content(10))
    async with area.mount() as mirror:
        for name in names:
            await mirror.copied(name)
        touch = touching(mirror)
        for name in names:
            await mirror.read_file(name)
        gate = mirror.posix.faults.gate("open")
        with monkeypatch.context() as hurried:
            hurried.setattr(touch_module, "PATIENCE_SECONDS", 0.05)
            await touch.round()
        await gate.arrived(MOST_GIVEN_UP)
        assert mirror.metrics.touches_failed == gate.waiting == MOST_GIVEN_UP
        assert len(touch.used) == len(names)
        gate.open()
        await touch.round()
        assert mirror.metrics.touches_completed == len(names)
