"""The state directory and the tiers as an enemy left them: right bytes, or one line why not.

Root mounts for an ordinary user, whose directories these are: nothing is followed, nothing outside
is changed, and nobody waits for ever.
"""

import errno
import os
import pwd
import random
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monarchfs.cache.store.allocator import SMALL_BYTES
from tests.support import mounting, on_disk, trees
from tests.support.fake_mounts import interpreter_for
from tests.support.programs import execute

pytestmark = [*mounting.requires_mounts, pytest.mark.timeout(300)]

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
        return mounting.run(
            "mount", f"{self.path}/src", f"{self.path}/mnt", *self.options, timeout=60
        )

    def read(self) -> None:
        words = ["diff", "-r", f"{self.path}/src", f"{self.path}/mnt"]
        done = execute(mounting.as_user(USER, words))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def works_or_refuses(self) -> bool:
        done = self.mount()
        if done.returncode != 0:
            assert done.returncode in (1, 2), done.stderr
            *warnings, error = done.stderr.splitlines()
            assert error.startswith("monarchfs: "), done.stderr
            # What the worker would say is lost: that is told before why nothing can be served.
            told = "worker.log in the state directory"
            assert all(told in line for line in warnings), done.stderr
            assert "/proc/self" not in done.stderr, done.stderr
            assert not mounting.fuse_mounts(str(self.path))
            mounting.wait_for(
                lambda: not mounting.processes_about(f"{self.path}/"), "everything to have ended"
            )
            return False
        assert "Traceback" not in done.stderr
        try:
            self.read()
        finally:
            ended = mounting.run("umount", f"{self.path}/mnt", "--timeout", "10", timeout=60)
        assert ended.returncode == 0, ended.stderr
        mounting.wait_for(
            lambda: not mounting.processes_about(f"{self.path}/"), "everything to have ended"
        )
        return True


DIRECTORIES = (
    *("state directory", "index", "tier's directory", "inside of the tier", "segments"),
    "a segment and its list",
)
FILES = ("lock", "data.mdb", "mark and log", "who owns what")
WRITING = (*CONTENT, "empty")
REPLACING = (
    *("removed", "link to root's", "link to nowhere", "link to itself", "FIFO", "directory"),
    "file",
)
SET_ASIDE = (
    *("link to root's", "link to the user's", "link to nowhere", "link to itself", "FIFO"),
    *("socket", "link to a device"),
)
NAMED = [
    *((place, how) for place in (*DIRECTORIES, *FILES) for how in ANYWHERE),
    *((place, how) for place in FILES for how in CONTENT),
    ("replicas", "cut off"),
    ("replicas", "huge"),
]

HARMLESS = {
    *((place, how) for place in ("who owns what", "data.mdb", "lock") for how in CONTENT),
    *(("mark and log", how) for how in (*ANYWHERE, *CONTENT)),
    *((place, how) for place in ("data.mdb", "index") for how in SET_ASIDE),
}


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    interpreter_for(USER)
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    path.chmod(0o755)
    trees.dataset(path / "src", files=6, largest=300_000)
    for name in ("large", "larger"):
        (path / "src" / name).write_bytes(trees.random_bytes(SMALL_BYTES + 5000, len(name)))
    (path / "mnt").mkdir()
    done = Cache(path).mount()
    assert done.returncode == 0, done.stderr
    # What --prefetch all finds: the copies of small files share one.
    status = mounting.Mount(path / "src", path / "mnt", USER).wait_idle()
    assert status["files"]["resident"] == 8
    assert len(on_disk.own_files(path / "tier")) == 2
    assert len(on_disk.segments(path / "tier")) == 1
    assert mounting.run("umount", f"{path}/mnt").returncode == 0
    yield path
    shutil.rmtree(path)


@pytest.fixture
def cache(template: Path) -> Iterator[Cache]:
    with a_copy(template) as copied:
        yield copied


@contextmanager
def a_copy(template: Path) -> Iterator[Cache]:
    """The cache, to be spoilt; then it is as before, with the same owners, modes and times."""
    kept = template.with_name(template.name + "-kept")
    shutil.copytree(template, kept, symlinks=True)
    for path in (template, *template.rglob("*")):
        shutil.chown(kept / path.relative_to(template), path.owner(), path.group())
    watchdog = threading.Timer(90, _break_up, [template])
    watchdog.start()
    try:
        yield Cache(template)
    finally:
        watchdog.cancel()
        watchdog.join()
        _break_up(template)
        for name in ("state", "tier"):
            path = template / name
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path)
            (kept / name).rename(path)
        shutil.rmtree(template / "untouched", ignore_errors=True)
        shutil.rmtree(kept)


def _break_up(path: Path) -> None:
    mounting.kill_each(mounting.processes_about(f"{path}/"))
    for point in mounting.fuse_mounts(str(path)):
        subprocess.run(["umount", "-l", point], check=False)


def untouched(cache: Cache) -> Untouched:
    return Untouched(cache.path / "untouched", pwd.getpwnam(USER).pw_uid)


@pytest.mark.parametrize(("place", "how"), NAMED)
def test_one_thing(cache: Cache, place: str, how: str) -> None:
    beside = untouched(cache)
    for path in cache.places()[place]:
        spoil(path, how, beside, random.Random(place + how))
    works = cache.works_or_refuses()
    beside.check()
    # What is merely damaged, or can be set aside, is no reason not to mount.
    if place == "replicas" or (place, how) in HARMLESS:
        assert works


@settings(max_examples=5)
@given(
    spoils=st.lists(
        st.tuples(st.sampled_from([*DIRECTORIES, *FILES]), st.sampled_from(ANYWHERE))
        | st.tuples(st.sampled_from(FILES), st.sampled_from(CONTENT))
        | st.tuples(st.just("replicas"), st.sampled_from(["cut off", "removed"])),
        min_size=2,
        max_size=3,
    ),
    seed=st.integers(0, 1 << 32),
)
@example(spoils=[("index", "link to the user's"), ("data.mdb", "removed")], seed=0)
@example(spoils=[("index", "link to root's"), ("mark and log", "file")], seed=0)
@example(spoils=[("index", "link to root's"), ("inside of the tier", "link to root's")], seed=0)
def test_several_things(template: Path, spoils: list[tuple[str, str]], seed: int) -> None:
    """One after the other, on what the one before it left."""
    with a_copy(template) as cache:
        beside = untouched(cache)
        places, chosen = cache.places(), random.Random(seed)
        for place, how in spoils:
            for path in places[place]:
                # What lies behind a link that was planted before is not the product's to protect
                # from this test.
                inside = path.parent.relative_to(template)
                as_made = os.path.join(os.path.realpath(template), inside)
                if os.path.realpath(path.parent) != as_made:
                    continue
                # What is something else by now is not written to, nor what a link leads to.
                there = path.is_file() if how in WRITING else path.exists()
                if how in REPLACING if path.is_symlink() else there:
                    spoil(path, how, beside, chosen)
        cache.works_or_refuses()
        beside.check()
