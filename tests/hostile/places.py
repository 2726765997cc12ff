"""What somebody could do to the files of a state directory and of a tier while nothing is mounted.

Nothing is allowed to come of it but right bytes, or one line that says why not.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import on_disk
from tests.support.mounting import as_user, fuse_mounts, processes_about, run, wait_for

USER = "nobody"


class Untouched:
    """Files beside the cache to which planted links lead: one of root's, one of the user's."""

    def __init__(self, path: Path, uid: int) -> None:
        self.path = path
        path.mkdir()
        for name, owner, mode in (("roots", 0, 0o600), ("users", uid, 0o644)):
            directory = path / name
            directory.mkdir()
            (directory / "data.mdb").write_bytes(b"keep me" * 1000)
            (directory / "data.mdb").chmod(mode)
            (directory / "mark").write_text("keep me")
            for entry in (directory / "data.mdb", directory / "mark", directory):
                os.chown(entry, owner, owner)
        self._before = self._look()

    def _look(self) -> list[object]:
        return [
            (str(p), st.st_mode, st.st_uid, st.st_ino, st.st_size, st.st_mtime_ns, st.st_nlink)
            for p in sorted(self.path.rglob("*"))
            for st in [p.lstat()]
        ]

    def check(self) -> None:
        assert self._look() == self._before


Spoil = Callable[[Path, Untouched, random.Random], None]


def _gone(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _own(path: Path) -> None:
    """As the user would have made it."""
    shutil.chown(path, USER)


def removed(path: Path, _u: Untouched, _r: random.Random) -> None:
    _gone(path)


def empty(path: Path, _u: Untouched, _r: random.Random) -> None:
    if path.is_dir():
        shutil.rmtree(path)
        path.mkdir(0o700)
        _own(path)
    else:
        os.truncate(path, 0)


def cut_off(path: Path, _u: Untouched, r: random.Random) -> None:
    os.truncate(path, r.randrange(max(1, path.stat().st_size)))


def garbled(path: Path, _u: Untouched, r: random.Random) -> None:
    """Some bytes here and there."""
    content = bytearray(path.read_bytes() or b"x")
    for _ in range(r.randint(1, 50)):
        at = r.randrange(len(content))
        content[at : at + r.randint(1, 64)] = r.randbytes(r.randint(0, 64))
        content = content or bytearray(b"x")
    path.write_bytes(content)


def overwritten(path: Path, _u: Untouched, r: random.Random) -> None:
    path.write_bytes(r.randbytes(r.choice([1, 100, 10_000, 1 << 20])))


def deep_json(path: Path, _u: Untouched, _r: random.Random) -> None:
    path.write_bytes(b'{"pid":' * 100_000)


def odd_json(path: Path, _u: Untouched, _r: random.Random) -> None:
    path.write_text('{"pid": Infinity, "mountpoint": {}, "source": [], "tiers": 5}')


def huge(path: Path, _u: Untouched, _r: random.Random) -> None:
    """A hole of a terabyte; on file systems that take none, a smaller one."""
    for size in (1 << 40, 1 << 33):
        try:
            os.truncate(path, size)
            return
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise


def to_roots_file(path: Path, u: Untouched, _r: random.Random) -> None:
    directory = path.is_dir()
    _gone(path)
    path.symlink_to(u.path / "roots" / ("" if directory else "data.mdb"))


def to_users_file(path: Path, u: Untouched, _r: random.Random) -> None:
    directory = path.is_dir()
    _gone(path)
    path.symlink_to(u.path / "users" / ("" if directory else "data.mdb"))


def to_nowhere(path: Path, u: Untouched, _r: random.Random) -> None:
    _gone(path)
    path.symlink_to(u.path / "users" / "made-through-a-link")


def to_itself(path: Path, _u: Untouched, _r: random.Random) -> None:
    _gone(path)
    path.symlink_to(path.name)


def to_a_device(path: Path, _u: Untouched, _r: random.Random) -> None:
    _gone(path)
    path.symlink_to("/dev/zero")


def a_fifo(path: Path, _u: Untouched, _r: random.Random) -> None:
    _gone(path)
    os.mkfifo(path, 0o600)
    _own(path)


def a_directory(path: Path, _u: Untouched, _r: random.Random) -> None:
    _gone(path)
    path.mkdir(0o700)
    (path / "theirs").write_text("keep me")
    _own(path)


def a_file(path: Path, _u: Untouched, _r: random.Random) -> None:
    _gone(path)
    path.write_bytes(b"not what you look for")
    _own(path)


def a_socket(path: Path, _u: Untouched, _r: random.Random) -> None:
    _gone(path)
    directory = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{directory}/{path.name}")
    os.close(directory)
    _own(path)


def a_device(path: Path, _u: Untouched, _r: random.Random) -> None:
    _gone(path)
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("needs leave to make devices: for a container: --cap-add MKNOD")
    _own(path)


def closed(path: Path, _u: Untouched, _r: random.Random) -> None:
    path.chmod(0)


def open_to_all(path: Path, _u: Untouched, _r: random.Random) -> None:
    path.chmod(0o777)


def somebody_elses(path: Path, _u: Untouched, _r: random.Random) -> None:
    shutil.chown(path, "daemon")


def roots_own(path: Path, _u: Untouched, _r: random.Random) -> None:
    shutil.chown(path, "root")


ANYWHERE: list[Spoil] = [
    *(removed, empty, to_roots_file, to_users_file, to_nowhere, to_itself, to_a_device),
    *(a_fifo, a_directory, a_file, a_socket, a_device, closed, open_to_all),
    *(somebody_elses, roots_own),
]
CONTENT: list[Spoil] = [cut_off, garbled, overwritten, deep_json, odd_json, huge]
"""Of files that are not replicas: whose bytes only their checksum tells."""


class Cache:
    """A source, a mount point, and the state directory and tier that a mount of it left, of which
    each test gets a copy. ``path`` belongs to root."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def options(self) -> list[str]:
        storage = ["--tier", f"{self.path}/tier=100M", "--state-dir", f"{self.path}/state"]
        return [*storage, "--user", USER, "--prefetch", "all", "-o", "reserve_percent=1"]

    def places(self) -> dict[str, list[Path]]:
        """What can be spoilt, by kind."""
        state = self.path / "state"
        (dataset,) = (self.path / "tier").iterdir()
        own, (segment,) = on_disk.own_files(dataset), on_disk.segments(dataset)
        elsewhere = [path for path in own if path.parent != own[0].parent]
        beside = segment.with_name(f"{segment.name}.list")
        found = {
            "state directory": [state],
            "lock": [state / "lock"],
            "index": [state / "index"],
            "data.mdb": [state / "index" / "data.mdb"],
            "mark and log": [state / "index" / "mark", state / "worker.log"],
            "who owns what": [state / "tiers", dataset / "owner"],
            "tier's directory": [dataset],
            "inside of the tier": [dataset / "parts", own[0].parent, *elsewhere],
            "segments": [segment.parent],
            "a segment and its list": [segment, beside],
            "replicas": [*own, segment, beside],
        }
        assert all(found.values())
        return found

    def mount(self) -> subprocess.CompletedProcess[str]:
        return run("mount", f"{self.path}/src", f"{self.path}/mnt", *self.options, timeout=60)

    def read(self) -> None:
        """Everything, as the user, compared with the source."""
        words = ["diff", "-r", f"{self.path}/src", f"{self.path}/mnt"]
        done = subprocess.run(
            as_user(USER, words), capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def works_or_refuses(self) -> bool:
        """Whether it could be mounted."""
        done = self.mount()
        if done.returncode != 0:
            assert done.returncode in (1, 2), done.stderr
            *warnings, error = done.stderr.splitlines()
            assert error.startswith("monarchfs: "), done.stderr
            # What the worker would say is lost: that is told before why nothing can be served.
            assert all("worker.log in the state directory" in line for line in warnings), (
                done.stderr
            )
            assert "/proc/self" not in done.stderr, done.stderr
            assert not fuse_mounts(str(self.path))
            wait_for(lambda: not processes_about(f"{self.path}/"), "everything to have ended")
            return False
        assert "Traceback" not in done.stderr
        try:
            self.read()
        finally:
            ended = run("umount", f"{self.path}/mnt", "--timeout", "10", timeout=60)
        assert ended.returncode == 0, ended.stderr
        wait_for(lambda: not processes_about(f"{self.path}/"), "everything to have ended")
        return True
