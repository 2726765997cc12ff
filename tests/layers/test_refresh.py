"""Asking the source again on demand, whatever the mount promises."""

from __future__ import annotations

import errno
import gc
import os
import time

import pytest
import trio
import trio.testing

from monarchfs.metadata import directories
from monarchfs.metadata.refresh import Refresh, RefreshResult
from monarchfs.metadata.tree import Missing
from monarchfs.types import ROOT_INO, FreshnessMode, OperationError
from tests.support.lookups import IMMUTABLE, OPEN, TTL, entry, names
from tests.support.mirror import Area, Mirror, content

MODES = [IMMUTABLE, TTL, OPEN]


async def refresh(mirror: Mirror, path: str = "") -> RefreshResult:
    mirror.kernel.clear()
    return await Refresh(mirror.tree, mirror.kernel).run([n.encode() for n in path.split("/") if n])


async def know_all(mirror: Mirror, ino: int = ROOT_INO) -> None:
    for name in await names(mirror, ino):
        node = (await entry(mirror, ino, name)).node
        if node.stat.is_directory:
            await know_all(mirror, node.ino)


def counts(result: RefreshResult) -> tuple[int, int, int, int]:
    return result.changed, result.appeared, result.gone, result.failed


@pytest.mark.parametrize("mode", MODES)
async def test_what_changed_is_shown_at_once(files: Area, mode: FreshnessMode) -> None:
    for name in ("gone", "retargeted", "e/deep", "same"):
        files.write(name, b"old")
    (files.source / "link").symlink_to("a")
    async with files.mounted(mode=mode, ttl=3600) as mirror:
        await know_all(mirror)
        before = {name: await mirror.ino(name) for name in ("a", "same", "gone", "link", "d", "e")}
        assert counts(await refresh(mirror)) == (0, 0, 0, 0)
        assert mirror.kernel.entries == []
        assert mirror.kernel.pages == []
        files.write("a", b"in place")
        # What is new is made first: a file system may give it the number of one that is gone.
        files.write("new", b"new")
        (files.source / "other").symlink_to("elsewhere")
        (files.source / "other").rename(files.source / "link")
        (files.source / "gone").unlink()
        files.write("e/deep", b"deep")
        os.chmod(files.source / "e", 0o700)
        result = await refresh(mirror)
        # a, link, e/deep have other versions; e has other attributes; the link is a new file.
        assert counts(result) == (4, 1, 1, 0)
        assert result.error == ""
        e = before["e"]
        assert set(mirror.kernel.entries) == {
            *((ROOT_INO, name) for name in (b"a", b"gone", b"link", b"new")),
            (e, b"deep"),
        }
        assert {ROOT_INO, e} <= set(mirror.kernel.attributes)
        assert {before["a"], before["gone"]} <= set(mirror.kernel.pages)
        assert before["same"] not in mirror.kernel.pages
        assert await mirror.ino("same") == before["same"]
        assert await mirror.ino("e") == e
        assert await mirror.read_file("a") == b"in place"
        assert await mirror.read_file("new") == b"new"
        assert await mirror.read_file("e/deep") == b"deep"
        assert mirror.tree.known.target(await mirror.ino("link")) == b"elsewhere"
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"gone"), Missing)


@pytest.mark.parametrize("mode", MODES)
async def test_directories_that_changed_places(files: Area, mode: FreshnessMode) -> None:
    files.write("e/b", b"of e")
    async with files.mounted(mode=mode, ttl=3600) as mirror:
        await know_all(mirror)
        d, e = await mirror.ino("d"), await mirror.ino("e")
        (files.source / "d").rename(files.source / "x")
        (files.source / "e").rename(files.source / "d")
        (files.source / "x").rename(files.source / "e")
        await refresh(mirror)
        assert {(ROOT_INO, b"d"), (ROOT_INO, b"e")} <= set(mirror.kernel.entries)
        assert (await mirror.ino("d"), await mirror.ino("e")) == (e, d)
        assert await mirror.read_file("d/b") == b"of e"
        assert await mirror.read_file("e/c") == content(30)


async def test_only_what_is_below_the_path(files: Area) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        await know_all(mirror)
        for name in ("a", "d/b", "d/c"):
            files.write(name, b"another")
        assert counts(await refresh(mirror, "d/b")) == (1, 0, 0, 0)
        assert counts(await refresh(mirror, "d")) == (1, 0, 0, 0)
        assert await mirror.read_file("d/c") == b"another"
        assert (await mirror.node("a")).stat.size == 10
        assert counts(await refresh(mirror)) == (1, 0, 0, 0)


async def test_a_path_that_is_new_or_gone(files: Area) -> None:
    async with files.mounted(mode=IMMUTABLE) as mirror:
        d = await mirror.ino("d")
        assert isinstance(await mirror.tree.names.lookup(d, b"late"), Missing)
        with pytest.raises(OperationError, match="cannot refresh 'd/late': No such file"):
            await refresh(mirror, "d/late")
        files.write("d/late", b"late")
        # Its directory has another time.
        assert counts(await refresh(mirror, "d/late")) == (1, 1, 0, 0)
        assert (d, b"late") in mirror.kernel.entries
        assert await mirror.read_file("d/late") == b"late"
        (files.source / "d/late").unlink()
        assert counts(await refresh(mirror, "d/late")) == (1, 0, 1, 0)
        with pytest.raises(OperationError, match="Not a directory"):
            await refresh(mirror, "a/below")
        # A copy that is given up while it is made goes with the next mount if this one ends first.


async def test_a_source_that_does_not_answer(
    files: Area, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        await know_all(mirror)
        await mirror.idle()
        gate = mirror.posix.faults.gate("found_each")
        errors: list[OperationError] = []

        async def run() -> None:
            try:
                await refresh(mirror)
            except OperationError as exc:
                errors.append(exc)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await gate.arrived()
            clock.jump(directories.REFRESH_SECONDS + 1)
        assert "the source does not answer: '/'" in str(errors[0])
        gate.open()
        assert (await mirror.node("a")).stat.size == 10
        await mirror.idle()
        assert counts(await refresh(mirror)) == (0, 0, 0, 0)


async def test_what_fails_does_not_stop_the_rest(files: Area) -> None:
    files.write("e/f", b"1")
    async with files.mount(mode=IMMUTABLE) as mirror:
        await know_all(mirror)
        for name in ("a", "d/b", "e/f"):
            files.write(name, b"another")
        # Of the root's attributes, its listing, and those of the two directories.
        mirror.posix.faults.fail("stat", errno.EIO, after=2, times=1)
        result = await refresh(mirror)
        assert counts(result) == (2, 0, 0, 1)
        assert result.error in ("'/d': Input/output error", "'/e': Input/output error")


async def test_a_large_directory_holds_up_nobody(area: Area) -> None:
    for number in range(3000):
        area.write(f"d/{number:05}", b"")
    async with area.mount(mode=IMMUTABLE) as mirror:
        await know_all(mirror)
        for number in range(0, 3000, 3):
            (area.source / f"d/{number:05}").unlink()
            area.write(f"d/new{number}", b"")
        seen = []
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                before = time.thread_time()
                await trio.lowlevel.checkpoint()
                longest = max(longest, time.thread_time() - before)

        gc.disable()  # one collection of what earlier tests have left may take longer than all
        try:
            began = time.thread_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                result = await Refresh(
                    mirror.tree, mirror.kernel, lambda result: seen.append(result.checked)
                ).run()
                nursery.cancel_scope.cancel()
        finally:
            gc.enable()
        assert (result.appeared, result.gone, result.failed) == (1000, 1000, 0)
        assert seen == sorted(seen)
        assert len(seen) > 40
        all_of_it = time.thread_time() - began
        assert longest < all_of_it / 3, "of this thread's own time"
        assert mirror.kernel.pauses > 30
