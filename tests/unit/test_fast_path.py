"""Answers that are packed in Python instead of by libfuse: the layout is that of linux/fuse.h, and
a real mount's rights are the source's."""

from __future__ import annotations

import struct
import subprocess

import pytest

from monarchfs.fuse import fast_path
from monarchfs.metadata.tree import Entry, Missing
from monarchfs.types import Dirent, FileType, Node, SourceStat
from tests.support.mounting import Bench, as_user, requires_fuse, requires_root

ACCESS = """
cd "$0" && for again in 1 2 3; do for file; do for right in r w x; do
test -$right $file && echo $file $right; done; done; done
"""


@requires_root
@requires_fuse
def test_rights_are_the_sources(work: Bench) -> None:
    """Asked for the first time, and again."""
    source = work.path / "src"
    source.mkdir()
    modes = (0o400, 0o644, 0o755, 0o711, 0o600, 0o4)
    for mode in modes:
        (source / f"{mode:o}").write_bytes(b"x")
        (source / f"{mode:o}").chmod(mode)
    mount = work.mount(source, "--user", "nobody", "--freshness", "immutable")
    names = [f"{mode:o}" for mode in modes]
    shown, expected = (
        subprocess.run(
            as_user("nobody", ["sh", "-c", ACCESS, str(root), *names]),
            capture_output=True, text=True, timeout=60, check=False,
        ).stdout.split("\n")
        for root in (mount.path, source)
    )  # fmt: skip
    assert shown == expected
    assert set(expected) == {"644 r", "755 r", "755 x", "711 x", "4 r", ""}


def entry(**stat: int) -> Entry:
    whole = {
        "device": 0, "ino": 9, "size": 10**13, "mtime_ns": -1, "ctime_ns": 5, "atime_ns": 2**62,
        "mode": 0o100644, "nlink": 2**32 - 1, "uid": 2**32 - 2, "gid": 3, "rdev": 2**33 + 1,
        "blocks": 2**40, "blksize": 4096,
    } | stat  # fmt: skip
    node = Node(2**50, SourceStat(**whole), 1, b"a", 0, False, b"")
    return Entry(node, 1.5, 365 * 86_400.0)


def test_a_found_name() -> None:
    packed = fast_path._entry(entry())
    assert len(packed) == 40 + 88
    assert struct.unpack_from("=QQQQII", packed) == (2**50, 0, 1, 365 * 86_400, 500_000_000, 0)
    assert struct.unpack_from("=QQQqqqIIIIIIIIII", packed, 40) == (
        *(2**50, 10**13, 2**40),
        *(2**62 // 10**9, -1, 0, 2**62 % 10**9, 999_999_999, 5),
        *(0o100644, 2**32 - 1, 2**32 - 2, 3, 1, 4096, 0),
    )


def test_a_name_that_is_not_there() -> None:
    packed = fast_path._negative(Missing(2.25))
    assert struct.unpack_from("=QQQQII", packed) == (0, 0, 2, 0, 250_000_000, 0)
    assert packed[40:] == bytes(88)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 255])
def test_a_listed_name(length: int) -> None:
    node, *timeouts = found = entry()
    name = b"n" * length
    dirent = Dirent(2**40, name, FileType.REGULAR, node.ino, 0, node.ino)
    packed = fast_path._direntplus(dirent, node, *timeouts)
    assert len(packed) == (128 + 24 + length + 7) // 8 * 8
    assert packed[:128] == fast_path._entry(found), "as a look-up says it"
    assert struct.unpack_from("=QQII", packed, 128) == (2**50, 2**40, length, 8)
    assert packed[152:] == name + bytes(-length % 8)
    bare = fast_path._direntplus(dirent, None, 0.0, 0.0)
    assert len(bare) == len(packed)
    assert struct.unpack_from("=QQQQII", bare) == (0,) * 6, "no node id: no attributes"
    attributes = struct.unpack_from("=QQQqqqIIIIIIIIII", bare, 40)
    assert attributes == (2**50, *(0,) * 8, 0o100000, *(0,) * 6)
    assert bare[128:] == packed[128:]


KEEP = (
    *("4.18.0-305.el8.x86_64", "4.19.0-27-amd64", "6.9.0", "6.11.0-29-generic"),
    *("6.12.0-55.el10.x86_64", "6.12.9-arch1-1"),
)
DROP = (
    *("5.10.0-46-amd64", "6.1.0-50-amd64", "6.8.0-100-generic", "6.12.10", "6.12.118+deb13-amd64"),
    *("6.13-rc7", "6.18.44", "7.0"),
)


def test_which_kernels_are_to_keep_listings() -> None:
    assert not [release for release in KEEP if fast_path.drops_listings(release)]
    assert all(map(fast_path.drops_listings, DROP))
