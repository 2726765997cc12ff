"""How the tests of the tree ask for names and count what the source was asked."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from monarchfs.metadata.tree import Entry
from monarchfs.types import FreshnessMode
from tests.support.mirror import Mirror

IMMUTABLE, TTL, OPEN = FreshnessMode.IMMUTABLE, FreshnessMode.TTL, FreshnessMode.OPEN
METADATA = ("found", "found_each", "stat")


class Hours:
    """time.time_ns() as it was, and as much later as a test says; or one moment, for as long as a
    test says, that a busy machine cannot make a tick longer."""

    def __init__(self) -> None:
        self._later = 0
        self._real = time.time_ns
        self._held: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        self._held = self.time_ns()
        try:
            yield
        finally:
            self._held = None

    def pass_by(self, seconds: float) -> None:
        self._later += int(seconds * 1e9)

    def time_ns(self) -> int:
        return self._real() + self._later if self._held is None else self._held


def asked(mirror: Mirror) -> int:
    calls = mirror.posix.faults.calls
    return sum(calls.pop(call, 0) for call in METADATA)


@contextmanager
def stale(match: str = "another version") -> Iterator[None]:
    """Raises ESTALE, for which the kernel looks the name up again."""
    with pytest.raises(OSError, match=match) as raised:
        yield
    assert raised.value.errno == errno.ESTALE


@contextmanager
def fails(code: int) -> Iterator[None]:
    with pytest.raises(OSError, match=r".") as raised:
        yield
    assert raised.value.errno == code


async def entry(mirror: Mirror, parent: int, name: bytes) -> Entry:
    found = await mirror.tree.names.lookup(parent, name)
    assert isinstance(found, Entry)
    return found


async def names(mirror: Mirror, ino: int) -> dict[bytes, int]:
    await mirror.tree.directories.open(ino)
    cookies, after = {}, 0
    while batch := mirror.tree.directories.entries(ino, after, 3):
        for dirent, _node, _entry_timeout, _attr_timeout in batch:
            assert dirent.cookie > after
            cookies[dirent.name] = after = dirent.cookie
    assert list(cookies)[:2] == [b".", b".."]
    del cookies[b"."], cookies[b".."]
    return cookies
