"""Reading replicas: all of what was asked for, or nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from monarchfs.store import ReplicaLost, Tier, read_full, read_nowait
from monarchfs.store.checksum import checksum
from tests.store.tools import NAME, needs_root, open_tier


def test_reading_at_once_is_all_or_nothing(tier: Tier) -> None:
    data = os.urandom(200_000)
    tier.write_whole(NAME, data)
    fd = tier.open_replica(NAME, checksum(data), 200_000)
    read_full(fd, 0, 200_000)
    assert read_nowait(fd, 0, 200_000, memory_backed=True) == data
    if not tier.memory_backed:
        assert read_nowait(fd, 0, 200_000) == data
        assert read_nowait(fd, 199_000, 1_000) == data[199_000:]
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert read_nowait(fd, 0, 200_000) in (None, data)  # None, but for a disk of no latency
    for memory_backed in (False, True):
        assert read_nowait(fd, 199_000, 2_000, memory_backed=memory_backed) is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            read_nowait(-1, 0, 1, memory_backed=memory_backed)
    os.close(fd)


@pytest.mark.parametrize("answer", [errno.EAGAIN, errno.EOPNOTSUPP, 0, 5])
def test_what_is_only_partly_in_memory_is_not_read_at_once(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    def preadv(fd: int, buffers: object, offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if answer > 5:
            raise OSError(answer, os.strerror(answer))
        return answer

    monkeypatch.setattr(os, "preadv", preadv)
    assert read_nowait(0, 0, 10) is None


@needs_root
def test_tmpfs_does_not_answer_nowait(small: Path) -> None:
    tier = open_tier(small)
    tier.write_whole(NAME, b"good")
    fd = tier.open_replica(NAME, checksum(b"good"), 4)
    assert read_nowait(fd, 0, 4) in (None, b"good")
    assert read_nowait(fd, 0, 4, memory_backed=True) == b"good"
    os.close(fd)
    tier.close()


def test_reading_in_full_never_returns_less(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(5_000)
    tier.write_whole(NAME, data)
    fd = tier.open_replica(NAME, checksum(data), 5_000)
    with pytest.raises(ReplicaLost, match="Replica ends at 5000"):
        read_full(fd, 1_000, 4_001)
    real_pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real_pread(fd, min(size, 999), at))
    assert read_full(fd, 1, 4_999) == data[1:]
    with pytest.raises(ReplicaLost, match="Replica ends at 5000"):
        read_full(fd, 1_000, 4_001)
    os.close(fd)
