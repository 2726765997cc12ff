"""Extended attributes and rights: asked of the source once, and this file system's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.lookups import OPEN, fails
from tests.support.mirror import Area


def set_xattr(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as exc:
        if exc.errno == errno.EOPNOTSUPP:
            pytest.skip("needs user.* attributes: TMPDIR on ext4 or xfs")
        raise


async def test_attributes_are_asked_for_once(files: Area) -> None:
    set_xattr(files.source / "a", "user.x", b"value")
    async with files.mount() as mirror:
        ino = await mirror.ino("a")
        for _ in range(3):
            assert await mirror.xattrs.get(ino, b"user.x") == b"value"
            with fails(errno.ENODATA):
                await mirror.xattrs.get(ino, b"user.none")
            assert await mirror.xattrs.list(ino) == [b"user.x"]
        assert mirror.posix.faults.calls["getxattr"] == 2
    async with files.mount() as again:
        await again.ino("a")
        assert again.xattrs.known(ino, b"user.x") == b"value"
        with fails(errno.ENODATA):
            again.xattrs.known(ino, b"user.none")


async def test_an_error_is_not_remembered_as_an_answer(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.ino("a")
        mirror.posix.faults.fail("getxattr", errno.EIO, times=1)
        for code in (errno.EIO, errno.ENODATA):
            with fails(code):
                await mirror.xattrs.get(ino, b"user.x")


async def test_a_directorys_attributes_go_with_its_change(files: Area) -> None:
    set_xattr(files.source / "d", "user.x", b"one")
    async with files.mount(mode=OPEN) as mirror:
        d = await mirror.ino("d")
        assert await mirror.xattrs.get(d, b"user.x") == b"one"
        os.setxattr(files.source / "d", "user.x", b"two")
        assert await mirror.ino("d") == d
        assert await mirror.xattrs.get(d, b"user.x") == b"two"


async def test_the_attributes_of_this_file_system(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.ino("a")
        assert await mirror.xattrs.get(ino, b"user.monarchfs.state") == b"remote"
        assert await mirror.xattrs.get(ino, b"user.monarchfs.reason") == b"not opened yet"
        await mirror.copied("a")
        assert mirror.xattrs.known(ino, b"user.monarchfs.state") == b"resident"
        assert mirror.xattrs.known(ino, b"user.monarchfs.tier") == mirror.tier.path.encode()
        for name in (b"user.monarchfs.reason", b"user.monarchfs.else"):
            with fails(errno.ENODATA):
                mirror.xattrs.known(ino, name)
        assert await mirror.xattrs.list(ino) == []
        with fails(errno.ENODATA):
            await mirror.xattrs.get(await mirror.ino("d"), b"user.monarchfs.state")


async def test_rights_are_asked_for_once_a_version(files: Area) -> None:
    (files.source / "a").chmod(0o644)
    async with files.mount(mode=OPEN) as mirror:
        ino = await mirror.ino("a")
        assert mirror.xattrs.known_access(ino, os.F_OK) is True
        assert mirror.xattrs.known_access(ino, os.R_OK) is None
        for _ in range(2):
            assert await mirror.xattrs.access(ino, os.R_OK)
            assert not await mirror.xattrs.access(ino, os.X_OK)
        assert mirror.posix.faults.calls["access"] == 2
        with fails(errno.EROFS):
            await mirror.xattrs.access(ino, os.R_OK | os.W_OK)
        d = await mirror.ino("d")
        assert await mirror.xattrs.access(d, os.R_OK | os.X_OK)
        (files.source / "a").chmod(0o755)
        assert await mirror.xattrs.access(await mirror.ino("a"), os.X_OK)
        mirror.posix.faults.fail("access", errno.EIO, times=1)
        (files.source / "a").chmod(0o700)
        changed = await mirror.ino("a")
        with fails(errno.EIO):
            await mirror.xattrs.access(changed, os.R_OK)
        assert await mirror.xattrs.access(changed, os.R_OK)
