"""Reading replicas: all of what was asked for, or nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from monarchfs.cache.replicas import OpenReplica
from monarchfs.store import ReplicaLost, Tier, read_full, read_nowait
from monarchfs.store.checksum import checksum
from monarchfs.types import Replica, ReplicaState
from tests.store.tools import NAME


def test_reading_at_once_is_all_or_nothing(tier: Tier) -> None:
    data = os.urandom(200_000)
    tier.files.write_whole(NAME, data)
    fd = tier.files.open(NAME, checksum(data), 200_000)
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


def test_reading_in_full_never_returns_less(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(5_000)
    tier.files.write_whole(NAME, data)
    fd = tier.files.open(NAME, checksum(data), 5_000)
    with pytest.raises(ReplicaLost, match="Replica ends at 5000"):
        read_full(fd, 1_000, 4_001)
    real_pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real_pread(fd, min(size, 999), at))
    assert read_full(fd, 1, 4_999) == data[1:]
    with pytest.raises(ReplicaLost, match="Replica ends at 5000"):
        read_full(fd, 1_000, 4_001)
    os.close(fd)


def test_a_record_is_read_where_it_lies(tmp_path: Path) -> None:
    data = os.urandom(10_000)
    path = tmp_path / "segment"
    path.write_bytes(b"\xee" * 8192 + data + b"\xee" * 8192)
    record = Replica(0, ReplicaState.RESIDENT, NAME, len(data), 12_288, False, 0, 1)
    fd = os.open(path, os.O_RDONLY)
    there = OpenReplica(7, fd, record._replace(segment=9, offset=8192), True)
    for offset, size in ((0, 1 << 20), (0, 10_000), (5_000, 100), (9_990, 100), (10_000, 9)):
        assert there.read(offset, size) == data[offset : offset + size]
        assert there.read_nowait(offset, size) == data[offset : offset + size]
    assert there.read(20_000, 10) == b""
    assert there.in_segment
    with pytest.raises(AssertionError):
        _ = there.path
    alone = OpenReplica(7, fd, record._replace(offset=8192), True)
    assert alone.read(0, 100) == b"\xee" * 100
    assert alone.path.endswith(".0000000000000001")
    os.close(fd)
