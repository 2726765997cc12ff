"""Directories on a real mount: what the kernel lists from its memory, and when it must not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from monarchfs.fuse import packing
from tests.support.mounting import Bench, as_user, requires_mounts, run, wait_for
from tests.support.programs import execute
from tests.support.scenario import play, playing

pytestmark = requires_mounts

FILES = 150


@pytest.fixture
def source(work: Bench) -> Path:
    path = work.path / "source"
    (path / "d").mkdir(parents=True)
    for number in range(FILES):
        (path / "d" / f"f{number}").write_bytes(b"x" * number)
    return path


CASES = {
    "a change shows when its time is over": """
mount --freshness ttl=1
list d; list d; list d; list d
remove d/f7; file d/new 3; listed d; remove d/new; listed d
""",
    "open shows every change at once": "mount --freshness open\n"
    + "".join(f"file d/n{n} 3; list d; remove d/n{n}; list d\n" for n in range(3)),
} | {
    # The second time, what the kernel has is the dead worker's.
    f"a listing goes on under another worker ({freshness})": f"""
mount --freshness {freshness}
list_some one d; kill worker; list_rest one d
list_some one d; kill worker; list_rest one d
file d/new 3; command refresh; list d
"""
    for freshness in ("immutable", "ttl=1")
}


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, f"file d/f{{0..{FILES - 1}}} 10\n" + CASES[case])


@pytest.mark.skipif(
    not packing.CACHES_LISTINGS,
    reason="needs a kernel that keeps listings: Linux 5.0 or later, without 6.9 to 6.12.9",
)
def test_a_listing_that_is_known_is_not_asked_for_again(work: Bench) -> None:
    with playing(work) as scenario:
        scenario.play(f"file d/f{{0..{FILES - 1}}} 10; mount --freshness immutable")
        scenario.play("command warm --metadata --wait; check warmed")

        def asked(operation: str) -> int:
            """How often the kernel asked while all names and sizes were looked at."""
            seen = scenario.observed["found"]
            return sum(n for key, n in seen.items() if key.startswith(f"requests.{operation}."))

        def find() -> list[str]:
            command = ["find", "d", "-type", "f", "-printf", "%f %s\n"]
            found = run_command(*command, cwd=work.mounts[0].path)
            scenario.play("check found")
            return sorted(found.splitlines())

        first = find()
        assert len(first) == FILES
        assert asked("readdir") >= 2
        assert asked("lookup") <= 1, "attributes come with the names"

        def not_asked() -> bool:
            """Others may have the machine drop its caches just now."""
            assert find() == first
            assert 1 <= asked("opendir") <= 2, "find opens where it is, too"
            return not any(map(asked, ("readdir", "lookup", "getattr")))

        wait_for(not_asked, "a listing from the kernel's memory")


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
def test_seeking_in_listings(work: Bench, source: Path) -> None:
    """Names of every length, buffers of many sizes, from the daemon and from memory."""
    for length in range(1, 256):
        (source / "d" / ("n" * length)).touch()
    mount = work.mount(source, "--freshness", "immutable")
    for size in (300, 4096, 1 << 20, 300):
        if size == 1 << 20:
            assert run("warm", str(mount.path), "--metadata", "--wait").returncode == 0
        command = (sys.executable, "-c", SEEK, str(mount.path / "d"), str(size))
        for _ in range(2):
            assert run_command(*command).split() == [str(FILES + 255 + 2)] * 2
    assert sorted(os.listdir(mount.path / "d")) == sorted(os.listdir(source / "d"))


def long_listing(path: Path) -> list[str]:
    """What ``ls -l`` says of a directory, but for its own size."""
    done = run_command("ls", "-l", "--time-style=full-iso", str(path / "d"))
    return done.splitlines()[1:]


def run_command(*command: str, cwd: Path | None = None) -> str:
    return execute(command, check=True, cwd=cwd).stdout


def test_ls_l_asks_the_source_no_more_than_directly_and_then_not_at_all(
    work: Bench, source: Path
) -> None:
    with_list = source / "d" / "f7"
    run_command("setfacl", "-m", "u:daemon:r", str(with_list))
    expected = long_listing(source)
    assert [line.split()[0][-1] for line in expected].count("+") == 1
    for warmed in (False, True):
        mount = work.mount(source, "--freshness", "ttl=3600", "--prefetch", "none")
        if warmed:
            assert run("warm", str(mount.path), "--metadata", "--wait").returncode == 0
        before = mount.status()["source_io"]["operations"]
        assert long_listing(mount.path) == expected
        first = mount.status()["source_io"]["operations"]
        assert first - before <= (8 if warmed else 3 * FILES + 20)
        for _ in range(2):
            assert long_listing(mount.path) == expected
        assert mount.status()["source_io"]["operations"] - first <= 1, (
            "what ls asks of one file, if it is another one"
        )
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
        command = as_user("nobody", ["/usr/bin/python3", "-c", OPEN_ONLY, str(mount.path / "d")])
        assert "PermissionError" in execute(command, cwd="/").stderr
