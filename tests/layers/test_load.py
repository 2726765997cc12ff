"""Names and attributes from another node's look at the source, instead of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monarchfs.fs.load import Load
from monarchfs.fs.tree import Missing
from monarchfs.snapshot.export import export
from monarchfs.types import ROOT_INO, FreshnessMode
from tests.support.lookups import IMMUTABLE, METADATA, OPEN, TTL, entry, names
from tests.support.mirror import Area, Mirror, content


async def exported(area: Area) -> Path:
    await area.settled()
    path = area.path / "exported"
    with path.open("wb") as file:
        export(str(area.source), file, lambda _so_far: None)
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


def there(source: Path) -> dict[str, int]:
    return {str(path.relative_to(source)): path.lstat().st_ino for path in source.rglob("*")}


async def test_a_job_asks_nothing_that_was_loaded(files: Area) -> None:
    (files.source / "link").symlink_to("a")
    (files.source / "empty").mkdir()
    for number in range(250):
        files.write(f"many/{number}", b"")
    path = await exported(files)
    async with files.mount() as mirror:
        loading = await load(mirror, path)
        assert (loading.state, loading.entries) == ("done", len(there(files.source)))
        asked(mirror)
        seen = await known(mirror)
        assert {name: stat[0] for name, stat in seen.items()} == there(files.source)
        assert await mirror.tree.attributes.target(await mirror.ino("link")) == b"a"
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"nothing"), Missing)
        assert asked(mirror) == 0
        assert await mirror.read_file("d/b") == content(20)


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
        with pytest.raises(OSError, match="another version"):
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


async def test_names_that_are_known_from_before_and_are_gone(files: Area) -> None:
    files.write("d/gone", b"gone")
    files.write("replaced", b"file")
    await files.settled()
    async with files.mount() as mirror:
        await known(mirror)
        await mirror.copied("d/gone")
    (files.source / "d/gone").unlink()
    (files.source / "replaced").unlink()
    files.write("replaced/inside", b"directory")
    path = await exported(files)
    async with files.mount() as mirror:
        await load(mirror, path)
        asked(mirror)
        assert {name: stat[0] for name, stat in (await known(mirror)).items()} == there(
            files.source
        )
        assert asked(mirror) == 0


async def test_what_changed_while_it_was_looked_at_is_asked_for(files: Area) -> None:
    await files.settled()
    files.write("young", b"young")
    path = files.path / "exported"
    with path.open("wb") as file:
        result = export(str(files.source), file, lambda _so_far: None)
    assert result.unknown >= 1
    async with files.mount() as mirror:
        await load(mirror, path)
        files.write("young", b"older by now")
        assert (await mirror.node("young")).stat.size == len(b"older by now")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-4] + b"xxxx",
        lambda data: b"",
        lambda data: b"no gzip at all",
        lambda data: data[:40] + b"\0" * 8 + data[48:],
    ],
)
async def test_a_damaged_file_leaves_the_source_to_be_asked(files: Area, damage: object) -> None:
    path = await exported(files)
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    async with files.mount() as mirror:
        assert (await load(mirror, path)).state == "failed"
        assert {name: stat[0] for name, stat in (await known(mirror)).items()} == there(
            files.source
        )


async def test_a_file_of_another_directory_is_refused(
    files: Area, caplog: pytest.LogCaptureFixture
) -> None:
    (files.path / "other").mkdir()
    path = files.path / "exported"
    with path.open("wb") as file:
        export(str(files.path / "other"), file, lambda _so_far: None)
    async with files.mount() as mirror:
        loading = await load(mirror, path)
        assert (loading.state, loading.entries) == ("failed", 0)
        assert len(await names(mirror, ROOT_INO)) == 2
    assert "of another directory" in caplog.text


async def test_a_file_that_is_not_there(files: Area, caplog: pytest.LogCaptureFixture) -> None:
    async with files.mount() as mirror:
        assert (await load(mirror, files.path / "nothing")).state == "failed"
    assert "No such file" in caplog.text
