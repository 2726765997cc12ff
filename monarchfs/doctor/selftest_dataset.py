"""What a mirror may get wrong, made below a directory of a real file system, and its comparison."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

SMALL_BYTES = 16 << 10
MANY_NAMES = 2000

LAYOUTS: Mapping[str, str] = {
    "one stripe": "setstripe -c 1",
    "all stripes": "setstripe -c -1 -S 64K",
    "progressive": "setstripe -E 64K -c 1 -E 1M -c 2 -E -1 -c -1",
    "data on the metadata target": "setstripe -E 64K -L mdt -E -1 -c 1",
    "self-extending": "setstripe -E 256M -z 64M -c 1 -E -1 -z 64M -c 1",
    "mirrored": "mirror create -N2 -c 1",
}
"""Of Lustre, by what gives them to new files of a directory: lfs-setstripe(1),
lfs-mirror-create(1)."""

_SIZES = (0, 1, 4095, 4096, 65_537, (1 << 20) + 3, (5 << 20) + 12_345)
_COMPARED = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_ctime_ns")
_PIECE_BYTES = 1 << 20
_LFS_SECONDS = 60.0


def make(root: Path) -> tuple[list[str], dict[str, str]]:
    """Fills the empty directory ``root``: 2,048 names and 7 MB, and 7 MB more for each layout. The
    names of layouts, and those that the file system refused, with the last line of what lfs(1)
    said. Raises OSError."""
    chance = random.Random(1)
    _make_names(root / "names", chance)
    _make_files(root / "sizes", chance)
    layouts: list[str] = []
    refused: dict[str, str] = {}
    if shutil.which("lfs") is not None:
        for name, options in LAYOUTS.items():
            directory = root / "layouts" / name
            directory.mkdir(parents=True)
            why = _lay_out(directory, options)
            if why is None:
                _make_files(directory, chance)
                layouts.append(name)
            else:
                directory.rmdir()
                refused[name] = why
    os.sync()
    return layouts, refused


def make_small(root: Path, count: int) -> None:
    """``count`` files of 16 KiB, each other; nothing of them stays in this node's page cache."""
    root.mkdir()
    chance = random.Random(2)
    for number in range(count):
        with open(root / f"{number:06}", "wb") as file:
            file.write(chance.randbytes(SMALL_BYTES))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _make_names(root: Path, chance: random.Random) -> None:
    (root / "many").mkdir(parents=True)
    for number in range(MANY_NAMES):
        (root / "many" / f"{number:05}").touch()
    for name in (b"\xff\xfe\x01", b"new\nline", b"-rf", b" ", b"x" * 255):
        with open(os.fsencode(root) + b"/" + name, "wb") as file:
            file.write(name)
    deep = root.joinpath(*["d" * 100] * 20)
    deep.mkdir(parents=True)
    (deep / "at the end").write_bytes(b"of a long path")
    (root / "absolute").symlink_to("/etc/hostname")
    (root / "dangling").symlink_to("nowhere/at all")
    (root / "long link").symlink_to("y" * 4000)
    (root / "linked").write_bytes(b"two names")
    os.link(root / "linked", root / "another name")
    for mode in (0o400, 0o444, 0o640, 0o755):
        (root / f"mode {mode:o}").write_bytes(chance.randbytes(100))
        (root / f"mode {mode:o}").chmod(mode)
    (root / "old").touch()
    os.utime(root / "old", ns=(1, 999_999_999))
    (root / "attributes").touch()
    try:
        os.setxattr(root / "attributes", "user.colour", b"blue\0green")
    except OSError:
        (root / "attributes").write_bytes(b"there are none of users here")


def _make_files(root: Path, chance: random.Random) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for size in _SIZES:
        (root / f"{size} bytes").write_bytes(chance.randbytes(size))
    with open(root / "sparse", "wb") as file:
        file.truncate(3 << 20)
        file.seek(1 << 20)
        file.write(b"an island")


def _lay_out(directory: Path, options: str) -> str | None:
    """Gives new files of a directory a layout; None, or why not."""
    words = ["lfs", *options.split(), str(directory)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_LFS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "lfs did not end"
    said = (done.stderr.strip() or "refused").splitlines()
    return None if done.returncode == 0 else said[-1]


# -- comparison


def walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """All paths below ``root``, relative to it, in order, and their lstat."""
    pending = [b""]
    while pending:
        relative = pending.pop()
        for name in sorted(os.listdir(os.path.join(root, relative) if relative else root)):
            path = os.path.join(relative, name)
            st = os.lstat(os.path.join(root, path))
            yield path, st
            if stat.S_ISDIR(st.st_mode):
                pending.append(path)


def differences(source: Path, mount: Path) -> list[str]:
    """What a reader could tell apart, a line each; none where the mirror is true. Access times may
    differ. Raises OSError where the source cannot be read."""
    a, b = os.fsencode(source), os.fsencode(mount)
    ours, theirs = dict(walk(a)), dict(walk(b))
    found = [f"{_shown(path)}: only in the source" for path in ours.keys() - theirs.keys()]
    found += [f"{_shown(path)}: only in the mount" for path in theirs.keys() - ours.keys()]
    for path in ours.keys() & theirs.keys():
        what = list(_differing(a + b"/" + path, b + b"/" + path, ours[path], theirs[path]))
        if what:
            found.append(f"{_shown(path)}: {', '.join(what)}")
    return sorted(found)


def _differing(
    path: bytes, mirrored: bytes, st: os.stat_result, seen: os.stat_result
) -> Iterator[str]:
    for name in _COMPARED:
        if getattr(st, name) != getattr(seen, name):
            yield f"{name} is {getattr(seen, name)}, not {getattr(st, name)}"
    if stat.S_ISLNK(st.st_mode) and os.readlink(path) != os.readlink(mirrored):
        yield "the link's target differs"
    if not stat.S_ISREG(st.st_mode):
        return
    if (own := _attributes(path)) != (others := _attributes(mirrored)):
        yield f"attributes are {others}, not {own}"
    try:
        if (at := first_difference(path, mirrored)) is not None:
            yield f"bytes differ at {at}"
    except OSError as error:
        yield f"reading: {error.strerror}"


def _attributes(path: bytes) -> dict[str, bytes]:
    """Those of users, but ours (docs/USAGE.md)."""
    try:
        names = [os.fsdecode(name) for name in os.listxattr(path)]
        return {
            name: os.getxattr(path, name)
            for name in names
            if name.startswith("user.") and not name.startswith("user.monarchfs.")
        }
    except OSError as error:
        return {"error": (error.strerror or "").encode()}


def first_difference(path: bytes | Path, other: bytes | Path) -> int | None:
    """The offset, in bytes, from which two files differ; None if they are the same. Both are read
    to their end, then in part from the middle."""
    with open(path, "rb", buffering=0) as a, open(other, "rb", buffering=0) as b:
        at = 0
        while True:
            pieces = [os.pread(file.fileno(), _PIECE_BYTES, at) for file in (a, b)]
            if pieces[0] != pieces[1]:
                return at
            if not pieces[0]:
                break
            at += len(pieces[0])
        middle = [os.pread(file.fileno(), 4096, at // 2 + 1) for file in (a, b)]
        return None if middle[0] == middle[1] else at // 2 + 1


def _shown(path: bytes) -> str:
    text = os.fsdecode(path)
    return text if len(text) < 100 else f"{text[:40]}...{text[-40:]}"
