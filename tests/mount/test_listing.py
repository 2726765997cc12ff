"""Directories on a real mount: what the kernel lists from its memory, and when it must not."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from monarchfs.fuse import fast_path
from tests.support.mounting import Bench, Mount, as_user, free_port, requires_mounts, run, wait_for
from tests.support.scraping import scrape

pytestmark = requires_mounts

FILES = 300


@pytest.fixture
def source(work: Bench) -> Path:
    path = work.path / "source"
    (path / "d").mkdir(parents=True)
    for number in range(FILES):
        (path / "d" / f"f{number}").write_bytes(b"x" * number)
    return path


class Counted:
    """A mount of which it is known what the kernel asked for."""

    def __init__(self, work: Bench, source: Path, *options: str) -> None:
        self.port = free_port()
        self.mount: Mount = work.mount(source, *options, "--metrics-port", str(self.port))

    def requests(self, operation: str) -> int:
        name = "monarchfs_request_duration_seconds_count"
        return round(
            sum(
                value
                for (known, labels), value in scrape(self.port).samples.items()
                if known == name and ("operation", operation) in labels
            )
        )

    def asked_by(self, *command: str) -> tuple[str, dict[str, int]]:
        """What a command that is run in the mount says, and what the kernel asks for meanwhile."""
        operations = ("opendir", "readdir", "lookup", "getattr")
        before = [self.requests(operation) for operation in operations]
        done = subprocess.run(
            command, cwd=self.mount.path, capture_output=True, text=True, timeout=60, check=True
        )
        after = [self.requests(operation) for operation in operations]
        counts = dict(
            zip(operations, (b - a for a, b in zip(before, after, strict=True)), strict=True)
        )
        return done.stdout, counts


FIND = ("find", "d", "-type", "f", "-printf", "%f %s\n")


@pytest.mark.skipif(
    not fast_path.CACHES_LISTINGS,
    reason="needs a kernel that keeps listings: Linux 5.0 or later, without 6.9 to 6.12.9",
)
def test_a_listing_that_is_known_is_not_asked_for_again(work: Bench, source: Path) -> None:
    counted = Counted(work, source, "--freshness", "immutable")
    assert run("warm", str(counted.mount.path), "--metadata", "--wait").returncode == 0
    first, asked = counted.asked_by(*FIND)
    assert len(first.splitlines()) == FILES
    assert asked["readdir"] >= 2
    assert asked["lookup"] <= 1, "attributes come with the names"

    def not_asked() -> bool:
        """Others may have the machine drop its caches just now."""
        again, asked = counted.asked_by(*FIND)
        assert sorted(again.splitlines()) == sorted(first.splitlines())
        assert 1 <= asked["opendir"] <= 2, "find opens where it is, too"
        return (asked["readdir"], asked["lookup"], asked["getattr"]) == (0, 0, 0)

    wait_for(not_asked, "a listing from the kernel's memory")


def test_refresh_reaches_listings_that_the_kernel_has(work: Bench, source: Path) -> None:
    counted = Counted(work, source, "--freshness", "immutable")
    directory = counted.mount.path / "d"
    for _ in range(3):
        names = os.listdir(directory)
    held = os.open(directory, os.O_RDONLY)
    try:
        assert sorted(os.listdir(held)) == sorted(names)
        (source / "d" / "f7").unlink()
        (source / "d" / "new").write_bytes(b"new")
        assert sorted(os.listdir(directory)) == sorted(names), "that is what immutable means"
        assert run("refresh", str(counted.mount.path)).returncode == 0
        changed = sorted({*names, "new"} - {"f7"})
        assert sorted(os.listdir(directory)) == changed
        assert sorted(os.listdir(directory)) == changed
        # A descriptor that was opened before, from its beginning: the kernel is told by and by.
        wait_for(lambda: sorted(os.listdir(held)) == changed, "the kernel to forget the listing")
    finally:
        os.close(held)


def test_a_change_shows_when_its_time_is_over(work: Bench, source: Path) -> None:
    counted = Counted(work, source, "--freshness", "ttl=1")
    directory = counted.mount.path / "d"
    names = os.listdir(directory)
    for _ in range(3):
        assert sorted(os.listdir(directory)) == sorted(names)
    (source / "d" / "f7").unlink()
    (source / "d" / "new").write_bytes(b"new")
    changed = sorted({*names, "new"} - {"f7"})
    wait_for(lambda: sorted(os.listdir(directory)) == changed, "the change to show", 5)
    (source / "d" / "new").unlink()
    wait_for(lambda: "new" not in os.listdir(directory), "the change to show", 5)


def test_open_shows_every_change_at_once(work: Bench, source: Path) -> None:
    mount = work.mount(source, "--freshness", "open")
    for number in range(10):
        (source / "d" / f"new{number}").write_bytes(b"new")
        assert f"new{number}" in os.listdir(mount.path / "d")
        (source / "d" / f"new{number}").unlink()
        assert f"new{number}" not in os.listdir(mount.path / "d")


SEEK = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
buffer = ctypes.create_string_buffer(int(sys.argv[2]))

def names():
    while (got := libc.syscall(217, fd, buffer, len(buffer))) > 0:  # getdents64(2)
        raw, at = buffer.raw[:got], 0
        while at < got:
            length = int.from_bytes(raw[at + 16 : at + 18], "little")
            offset = int.from_bytes(raw[at + 8 : at + 16], "little")
            yield raw[at + 19 : at + length].split(b"\\0")[0], raw[at + 18], offset
            at += length
    assert got == 0

found = list(names())
os.lseek(fd, 0, os.SEEK_SET)
assert list(names()) == found
for at in (0, 1, len(found) // 2, len(found) - 1):
    os.lseek(fd, found[at][2], os.SEEK_SET)
    assert list(names()) == found[at + 1 :], at
print(len(found), len({name for name, _type, _offset in found}))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of getdents64")
@pytest.mark.parametrize("size", [300, 4096, 1 << 20])
def test_seeking_in_listings(work: Bench, source: Path, size: int) -> None:
    """Names of every length, buffers of many sizes, from the daemon and from memory."""
    for length in range(1, 256):
        (source / "d" / ("n" * length)).touch()
    mount = work.mount(source, "--freshness", "immutable")
    for warmed in (False, True):
        if warmed:
            assert run("warm", str(mount.path), "--metadata", "--wait").returncode == 0
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-c", SEEK, str(mount.path / "d"), str(size)],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == [str(FILES + 255 + 2)] * 2
    assert sorted(os.listdir(mount.path / "d")) == sorted(os.listdir(source / "d"))


def test_types_and_attributes_of_what_is_listed(work: Bench, source: Path) -> None:
    (source / "d" / "link").symlink_to("f1")
    os.link(source / "d" / "f2", source / "d" / "hard link")
    os.mkfifo(source / "d" / "fifo")
    (source / "d" / "below").mkdir()
    os.utime(source / "d" / "f1", ns=(-5, -1_000_000_001))
    mount = work.mount(source, "--freshness", "immutable")
    for _ in range(3):  # with names alone, with attributes, from memory
        for there, here in zip(
            sorted(os.scandir(mount.path / "d"), key=lambda e: e.name),
            sorted(os.scandir(source / "d"), key=lambda e: e.name),
            strict=True,
        ):
            mine, its = there.stat(follow_symlinks=False), here.stat(follow_symlinks=False)
            assert there.name == here.name
            assert there.inode() == mine.st_ino
            assert there.is_dir(follow_symlinks=False) == stat.S_ISDIR(its.st_mode)
            assert there.is_symlink() == here.is_symlink()
            for name in ("mode", "nlink", "uid", "gid", "size", "mtime_ns", "ctime_ns", "blocks"):
                assert getattr(mine, f"st_{name}") == getattr(its, f"st_{name}"), here.name
        assert run("warm", str(mount.path), "--metadata", "--wait").returncode == 0


def operations(mount: Mount) -> int:
    return int(mount.status()["source_io"]["operations"])


def long_listing(path: Path) -> list[str]:
    """What ``ls -l`` says of a directory, but for its own size."""
    done = run_command("ls", "-l", "--time-style=full-iso", str(path / "d"))
    return done.splitlines()[1:]


def run_command(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("freshness", ["immutable", "ttl=3600"])
def test_ls_l_asks_the_source_no_more_than_directly_and_then_not_at_all(
    work: Bench, source: Path, freshness: str
) -> None:
    with_list = source / "d" / "f7"
    run_command("setfacl", "-m", "u:daemon:r", str(with_list))
    expected = long_listing(source)
    assert [line.split()[0][-1] for line in expected].count("+") == 1
    for warmed in (False, True):
        mount = work.mount(source, "--freshness", freshness, "--prefetch", "none")
        if warmed:
            assert run("warm", str(mount.path), "--metadata", "--wait").returncode == 0
        before = operations(mount)
        assert long_listing(mount.path) == expected
        first = operations(mount)
        assert first - before <= (8 if warmed else 3 * FILES + 20)
        for _ in range(2):
            assert long_listing(mount.path) == expected
        assert operations(mount) - first <= 1, "what ls asks of one file, if it is another one"
        for number in (7, 8):
            path = mount.path / "d" / f"f{number}"
            assert os.getxattr(path, "user.monarchfs.state") == b"remote"
            assert os.listxattr(path) == os.listxattr(source / "d" / f"f{number}")
        assert mount.umount().returncode == 0


OPEN_ONLY = "import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)"


def test_a_directory_that_may_not_be_read_cannot_be_opened(work: Bench, source: Path) -> None:
    """The error belongs to open, as in the source: also once others have listed it."""
    work.path.chmod(0o755)
    (source / "d").chmod(0o711)
    mount = work.mount(source, "--freshness", "immutable", "-o", "allow_other")
    for _ in range(3):
        assert len(os.listdir(mount.path / "d")) == FILES
        for root in (source, mount.path):
            done = subprocess.run(
                as_user("nobody", ["/usr/bin/python3", "-c", OPEN_ONLY, str(root / "d")]),
                capture_output=True, text=True, timeout=60, check=False, cwd="/",
            )  # fmt: skip
            assert "PermissionError" in done.stderr, root


@pytest.mark.parametrize("freshness", ["immutable", "ttl=1"])
def test_a_listing_goes_on_under_another_worker(work: Bench, source: Path, freshness: str) -> None:
    mount = work.mount(source, "--freshness", freshness)
    expected = sorted(os.listdir(mount.path / "d"))

    def another(before: int) -> bool:
        return mount.worker_pid() != before

    for _ in range(2):  # the second time, what the kernel has is the dead worker's
        with os.scandir(mount.path / "d") as entries:
            names = [next(entries).name]
            pid = mount.worker_pid()
            os.kill(pid, signal.SIGKILL)
            names += [entry.name for entry in entries]
        assert sorted(names) == expected
        wait_for(partial(another, pid), "another worker")
    (source / "d" / "new").write_bytes(b"new")
    assert run("refresh", str(mount.path)).returncode == 0
    assert sorted(os.listdir(mount.path / "d")) == sorted([*expected, "new"])
