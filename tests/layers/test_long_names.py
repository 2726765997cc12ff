"""Names that are too long for some file system: the source says what is wrong with them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial

import pytest

from monarchfs.metadata.tree import Missing
from monarchfs.source import posix
from monarchfs.source.posix import Found, FoundEach, PosixSource
from monarchfs.types import ROOT_INO, DirRef, FreshnessMode, Lane
from tests.support.lookups import IMMUTABLE, OPEN, TTL
from tests.support.mirror import Area


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL, OPEN])
@pytest.mark.parametrize("listed", [False, True])
async def test_a_name_that_is_too_long(files: Area, mode: FreshnessMode, listed: bool) -> None:
    async with files.mount(mode=mode) as mirror:
        if listed:
            await mirror.tree.directories.open(ROOT_INO)
        for size in (256, 503, 504, 1024):
            name = b"n" * size
            assert mirror.tree.known.lookup(ROOT_INO, name) is None
            for _ in range(2):
                with pytest.raises(OSError, match="too long") as raised:
                    await mirror.tree.names.lookup(ROOT_INO, name)
                assert raised.value.errno == errno.ENAMETOOLONG
            (answer,) = await mirror.tree.names.ask_each(ROOT_INO, [name], Lane.BACKGROUND)
            assert isinstance(answer, OSError)
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"n" * 255), Missing)


@pytest.mark.parametrize("limit", [143, 1023])
async def test_the_limit_is_the_sources(
    files: Area, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a lower one says so even where its listing is known; one with a higher one, that
    there is no such name."""
    found = PosixSource.found

    def limited(self: PosixSource, directory: DirRef, name: bytes) -> Found:
        if len(name) > limit:
            raise OSError(errno.ENAMETOOLONG, "too long for it")
        return found(self, directory, name[:255])

    def limited_each(
        self: PosixSource, directory: DirRef, names: Sequence[bytes], seconds: float
    ) -> FoundEach:
        return posix._each(partial(limited, self, directory), names, seconds)

    monkeypatch.setattr(PosixSource, "found", limited)
    monkeypatch.setattr(PosixSource, "found_each", limited_each)
    async with files.mount(mode=IMMUTABLE) as mirror:
        await mirror.tree.directories.open(ROOT_INO)
        lookup, ask_each = mirror.tree.names.lookup, mirror.tree.names.ask_each
        for name in (b"n" * size for size in (144, 255, 256, 504, 1023)):
            if len(name) > limit:
                with pytest.raises(OSError, match="too long for it"):
                    await lookup(ROOT_INO, name)
            else:
                assert isinstance(await lookup(ROOT_INO, name), Missing)
                assert await ask_each(ROOT_INO, [name], Lane.DEMAND) == [None]
