"""Names and attributes from another node's look at the source, instead of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monarchfs.metadata.load import Load
from monarchfs.metadata.snapshot_export import export
from monarchfs.metadata.tree import Missing
from monarchfs.types import ROOT_INO, FreshnessMode
from tests.support.lookups import IMMUTABLE, METADATA, OPEN, TTL, entry, names, stale
from tests.support.mirror import Area, Mirror, content


async def exported(area: Area, of: Path | None = None) -> Path:
    await area.settled()
    path = area.path / "exported"
    with path.open("wb") as file:
        export(str(of or area.source), file, lambda _so_far: None)
    return path


async def load(mirror: Mirror, path: Path) -> Load:
    loading = Load(mirror.tree, mirror.tree.freshness.mount_ns)
    await loading.run(str(path), mirror.area.source.stat().st_ino)
    return loading


def asked(mirror: Mirror) -> int:
    """Calls for names, attributes and listings since this was called last."""
    calls = mirror.posix.faults.calls
    return sum(calls.pop(call, 0) for call in (*METADATA, "list", "next"))


async def known(mirror: Mirror, ino: int = ROOT_INO) -> dict[str, tuple[int, ...]]:
    """Paths and attributes, as a job that looks at everything sees them."""
    found: dict[str, tuple[int, ...]] = {}
    for name in await names(mirror, ino):
        node = (await entry(mirror, ino, name)).node
        found[os.fsdecode(name)] = node.stat[1:]
        if node.stat.is_directory:
            below = await known(mirror, node.ino)
            found |= {f"{os.fsdecode(name)}/{path}": stat for path, stat in below.items()}
    return found


async def shows_the_source(mirror: Mirror) -> None:
    source = mirror.area.source
    there = {str(path.relative_to(source)): path.lstat().st_ino for path in source.rglob("*")}
    assert {name: stat[0] for name, stat in (await known(mirror)).items()} == there


async def test_a_job_asks_nothing_that_was_loaded(files: Area) -> None:
    """Names that are known from before and are gone are not shown."""
    files.write("d/gone", b"gone")
    files.write("replaced", b"file")
    await files.settled()
    async with files.mount() as mirror:
        await known(mirror)
        await mirror.copied("d/gone")
    (files.source / "d/gone").unlink()
    (files.source / "replaced").unlink()
    files.write("replaced/inside", b"directory")
    (files.source / "link").symlink_to("a")
    (files.source / "empty").mkdir()
    for number in range(250):
        files.write(f"many/{number}", b"")
    path = await exported(files)
    async with files.mount() as mirror:
        loading = await load(mirror, path)
        assert (loading.state, loading.entries) == ("done", 250 + 9)
        asked(mirror)
        await shows_the_source(mirror)
        assert await mirror.tree.attributes.target(await mirror.ino("link")) == b"a"
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"nothing"), Missing)
        assert asked(mirror) == 0
        await mirror.read_each(["d/b"])


@pytest.mark.parametrize("mode", [TTL, OPEN])
async def test_where_it_may_change_each_name_is_asked_about(
    files: Area, mode: FreshnessMode
) -> None:
    path = await exported(files)
    async with files.mount(mode=mode) as mirror:
        assert (await load(mirror, path)).state == "done"
        files.write("d/b", content(21, seed=2))
        asked(mirror)
        assert (await mirror.node("d/b")).stat.size == 21
        assert asked(mirror) > 0
        assert await mirror.read_file("d/b") == content(21, seed=2)


async def test_a_file_that_changed_since_is_noticed_when_it_is_opened(files: Area) -> None:
    path = await exported(files)
    files.write("d/b", content(21, seed=2))
    async with files.mount() as mirror:
        await load(mirror, path)
        assert (await mirror.node("d/b")).stat.size == 20
        with stale():
            await mirror.open("d/b")
        assert await mirror.read_file("d/b") == content(21, seed=2)  # the kernel's second try


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL, OPEN])
async def test_what_this_node_has_asked_since_is_not_touched(
    files: Area, mode: FreshnessMode
) -> None:
    files.write("e/gone", b"")
    path = await exported(files)
    files.write("d/b", content(21, seed=2))
    files.write("d/new", b"new")
    (files.source / "e/gone").unlink()
    await files.settled()
    async with files.mount(mode=mode, ttl=3600) as mirror:
        before = await known(mirror)
    async with files.mount(mode=mode, ttl=3600) as mirror:
        await load(mirror, path)
        assert await known(mirror) == before
        assert await mirror.read_file("d/b") == content(21, seed=2)
        assert await mirror.read_file("d/new") == b"new"


async def test_what_changed_while_it_was_looked_at_is_asked_for(files: Area) -> None:
    await files.settled()
    files.write("young", b"young")
    path = files.path / "exported"
    with path.open("wb") as file:
        assert export(str(files.source), file, lambda _so_far: None).unknown >= 1
    async with files.mount() as mirror:
        await load(mirror, path)
        files.write("young", b"older by now")
        assert (await mirror.node("young")).stat.size == len(b"older by now")


@pytest.mark.parametrize("what", ["damaged", "No such file", "of another directory"])
async def test_a_file_that_is_no_use_leaves_the_source_to_be_asked(
    files: Area, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """What a damaged one may hold: tests/mount/test_index_file.py."""
    (files.path / "other").mkdir()
    path = await exported(files, files.path / "other" if what == "of another directory" else None)
    if what == "damaged":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif what == "No such file":
        path.unlink()
    async with files.mount() as mirror:
        assert (await load(mirror, path)).state == "failed"
        await shows_the_source(mirror)
    assert what in caplog.text
