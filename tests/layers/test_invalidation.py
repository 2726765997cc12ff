"""Where the kernel opens files without asking: a read that finds nothing at the end of a name has
the kernel forget it."""

from __future__ import annotations

import errno
import os

import pytest

from monarchfs.types import ROOT_INO, FreshnessMode
from tests.support.mirror import Area, Mirror, content
from tests.support.open_directories import close_directories
from tests.support.runner import walk

IMMUTABLE = FreshnessMode.IMMUTABLE


async def read(mirror: Mirror, ino: int) -> bytes:
    """What a READ without a handle gets."""
    handle = mirror.files.first_read(ino)
    try:
        return bytes(await handle.read(0, 1000))
    finally:
        handle.release()


async def ino_of(mirror: Mirror, path: str) -> int:
    entry = await walk(mirror, path)
    assert entry is not None
    return entry.ino


async def test_a_name_that_stands_for_another_file(area: Area) -> None:
    area.write("d/a", content(20, 1))
    async with area.mount(mode=IMMUTABLE, keeps=False) as mirror:
        mirror.opens.known = False
        ino, parent = await ino_of(mirror, "d/a"), await ino_of(mirror, "d")
        area.write("d/b", content(30, 2))
        os.replace(area.source / "d" / "b", area.source / "d" / "a")
        with pytest.raises(OSError, match="another version") as failed:
            await read(mirror, ino)
        assert failed.value.errno == errno.ESTALE
        assert mirror.kernel.entries == [(parent, b"a")]
        assert await read(mirror, await ino_of(mirror, "d/a")) == content(30, 2)
        await mirror.settled()


async def test_a_directory_that_lies_elsewhere(area: Area) -> None:
    """All of the way is forgotten with its first name."""
    area.write("above/below/a", content(20, 1))
    async with area.mount(mode=IMMUTABLE, keeps=False) as mirror:
        mirror.opens.known = False
        ino = await ino_of(mirror, "above/below/a")
        os.rename(area.source / "above", area.source / "away")
        area.write("above/below/a", content(30, 2))
        close_directories(mirror.posix)
        with pytest.raises(OSError, match="another version") as failed:
            await read(mirror, ino)
        assert failed.value.errno == errno.ESTALE
        assert (ROOT_INO, b"above") in mirror.kernel.entries
        assert await read(mirror, await ino_of(mirror, "above/below/a")) == content(30, 2)
        await mirror.settled()


async def test_numbers_of_an_index_that_is_lost(area: Area) -> None:
    """Every name is forgotten, once."""
    for name in ("a", "b", "d/c"):
        area.write(name, content(20))
    async with area.mount(mode=IMMUTABLE, keeps=False) as mirror:
        mirror.opens.known = False
        for unknown in (10**6, 10**6 + 1):
            with pytest.raises(OSError, match="unknown inode") as failed:
                await read(mirror, unknown)
            assert failed.value.errno == errno.ESTALE
        expected = [(ROOT_INO, b"a"), (ROOT_INO, b"b"), (ROOT_INO, b"d")]
        assert sorted(mirror.kernel.entries) == expected
        await mirror.settled()


async def test_where_opens_are_known_they_say_so(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    area.write("a", content(20, 1))
    async with area.mount(mode=IMMUTABLE, keeps=False) as mirror:
        expired: list[int] = []
        monkeypatch.setattr(mirror.cache.readers, "expire", expired.append)
        ino = await ino_of(mirror, "a")
        (area.source / "a").unlink()
        area.write("a", content(30, 2))
        with pytest.raises(OSError, match="another version"):
            await read(mirror, ino)
        assert mirror.kernel.entries == []
        assert set(expired) == {ino}, "threads would go on opening it"
        await mirror.settled()
