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
from pathlib import Path

import pytest

from tests.support import on_disk
from tests.support.mounting import as_user, fuse_mounts, processes_about, run, wait_for
from tests.support.programs import execute

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


ANYWHERE = (
    *("removed", "empty", "link to root's", "link to the user's", "link to nowhere"),
    *("link to itself", "link to a device", "FIFO", "directory", "file", "socket", "device"),
    *("closed", "open to all", "somebody else's", "root's own"),
)
"""What can become of any file or directory of the cache's."""
CONTENT = ("cut off", "garbled", "overwritten", "deep JSON", "odd JSON", "huge")
"""And of files that are not replicas, whose bytes only their checksum tells."""


def spoil(path: Path, how: str, untouched: Untouched, chance: random.Random) -> None:
    """``how`` is one of ANYWHERE or CONTENT."""
    match how:
        case "cut off":
            os.truncate(path, chance.randrange(max(1, path.stat().st_size)))
        case "garbled":
            _garble(path, chance)
        case "overwritten":
            path.write_bytes(chance.randbytes(chance.choice([1, 100, 10_000, 1 << 20])))
        case "deep JSON":
            path.write_bytes(b'{"pid":' * 100_000)
        case "odd JSON":
            path.write_text('{"pid": Infinity, "mountpoint": {}, "source": [], "tiers": 5}')
        case "huge":
            _enlarge(path)
        case "empty" if not path.is_dir():
            os.truncate(path, 0)
        case "closed":
            path.chmod(0)
        case "open to all":
            path.chmod(0o777)
        case "somebody else's":
            shutil.chown(path, "daemon")
        case "root's own":
            shutil.chown(path, "root")
        case _:
            _replace(path, how, untouched)


def _garble(path: Path, chance: random.Random) -> None:
    """Some bytes here and there; of a huge one, in its first megabyte, and the rest is left."""
    with open(path, "r+b") as file:
        found = bytearray(file.read(1 << 20) or b"x")
        whole = not file.read(1)
        for _ in range(chance.randint(1, 50)):
            at = chance.randrange(len(found))
            found[at : at + chance.randint(1, 64)] = chance.randbytes(chance.randint(0, 64))
            found = found or bytearray(b"x")
        file.seek(0)
        file.write(found)
        if whole:
            file.truncate()


def _enlarge(path: Path) -> None:
    """A hole of a terabyte; on file systems that take none, a smaller one."""
    for size in (1 << 40, 1 << 33):
        try:
            os.truncate(path, size)
            return
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise


def _replace(path: Path, how: str, untouched: Untouched) -> None:
    """By something else, as the user would have made it; or by nothing."""
    inside = "" if path.is_dir() else "data.mdb"
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    targets: dict[str, Path | str] = {
        "link to root's": untouched.path / "roots" / inside,
        "link to the user's": untouched.path / "users" / inside,
        "link to nowhere": untouched.path / "users" / "made-through-a-link",
        "link to itself": path.name,
        "link to a device": "/dev/zero",
    }
    match how:
        case "removed":
            return
        case _ if how in targets:
            path.symlink_to(targets[how])
            return
        case "FIFO":
            os.mkfifo(path, 0o600)
        case "empty":
            path.mkdir(0o700)
        case "directory":
            path.mkdir(0o700)
            (path / "theirs").write_text("keep me")
        case "file":
            path.write_bytes(b"not what you look for")
        case "socket":
            directory = os.open(path.parent, os.O_PATH)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{directory}/{path.name}")
            os.close(directory)
        case "device":
            try:
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
            except PermissionError:
                pytest.skip("needs leave to make devices: for a container: --cap-add MKNOD")
    shutil.chown(path, USER)


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
        words = as_user(USER, ["diff", "-r", f"{self.path}/src", f"{self.path}/mnt"])
        done = execute(words)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def works_or_refuses(self) -> bool:
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
