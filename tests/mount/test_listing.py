"""Directories on a real mount: what the kernel lists from its memory, and when it must not; sources
whose listings say other inode numbers (d_ino) than stat(2) does (overlays of two file systems,
subvolumes of btrfs), and sources whose inode numbers change."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from monarchfs.fuse import packing
from tests.support import surroundings
from tests.support.mounting import Bench, as_user, asked, requires_mounts, run, wait_for
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
            found = execute(command, check=True, cwd=work.mounts[0].path).stdout
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
            assert execute(command, check=True).stdout.split() == [str(FILES + 255 + 2)] * 2
    assert sorted(os.listdir(mount.path / "d")) == sorted(os.listdir(source / "d"))


def test_a_directory_that_may_not_be_read_cannot_be_opened(work: Bench, source: Path) -> None:
    """The error belongs to open, as in the source: also once others have listed it."""
    work.path.chmod(0o755)
    (source / "d").chmod(0o711)
    mount = work.mount(source, "--freshness", "immutable", "-o", "allow_other")
    for _ in range(3):
        assert len(os.listdir(mount.path / "d")) == FILES
        opens = "import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)"
        command = as_user("nobody", ["/usr/bin/python3", "-c", opens, str(mount.path / "d")])
        assert "PermissionError" in execute(command, cwd="/").stderr


IN_EACH = 15
"""Files in each of four directories."""

Filled = dict[str, bytes]


class Place:
    """Where file systems are mounted for a test, and unmounted at its end."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._stack = stack

    def mount(self, name: str, *words: str) -> Path:
        """Mounts at ``name`` as mount(8) is told; skips where the kernel cannot."""
        point = self.path / name
        point.mkdir()
        done = execute(["mount", *words, point])
        if done.returncode:
            reason = done.stderr.strip().splitlines()[0]
            pytest.skip(surroundings.no_namespaces() or f"needs a kernel with it: {reason}")
        self._stack.callback(subprocess.run, ["umount", "-l", str(point)], check=True)
        return point

    def tmpfs(self, name: str) -> Path:
        """Each numbers its files from the same number on."""
        return self.mount(name, "-t", "tmpfs", "none")


def fill(root: Path, of: str, files: Callable[[int], bool] = lambda number: True) -> Filled:
    """Files, ``IN_EACH`` in each of four directories, of which ``files`` says which there are."""
    contents: Filled = {}
    for number in filter(files, range(4 * IN_EACH)):
        path = f"d{number // IN_EACH}/f{number}"
        contents[path] = f"{of} {path} ".encode() * (1 + number % 7)
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(contents[path])
    return contents


def upper_elsewhere(place: Place) -> tuple[Path, Filled]:
    lower, upper = place.tmpfs("lower"), place.tmpfs("upper")
    for directory in (upper / "upper", upper / "work"):
        directory.mkdir()
    contents = fill(lower, "lower")
    contents |= fill(upper / "upper", "upper", lambda number: number % 2 == 0)
    layers = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work"
    return place.mount("source", "-t", "overlay", "none", "-o", layers), contents


def two_lowers(place: Place) -> tuple[Path, Filled]:
    first, second = place.tmpfs("first"), place.tmpfs("second")
    contents = fill(first, "first", lambda number: number % 2 == 0)
    contents |= fill(second, "second", lambda number: number % 2 == 1)
    layers = f"lowerdir={first}:{second}"
    return place.mount("source", "-t", "overlay", "none", "-o", layers), contents


def subvolumes(place: Place) -> tuple[Path, Filled]:
    image = place.path / "image"
    image.touch()
    os.truncate(image, 256 << 20)
    try:
        subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs mkfs.btrfs: apt-get install btrfs-progs")
    source = place.mount("source", "-t", "btrfs", "-o", "loop", str(image))
    contents: Filled = {}
    for name in ("one", "two", "two/inner"):
        made = ["btrfs", "-q", "subvolume", "create", str(source / name)]
        subprocess.run(made, check=True, capture_output=True)
        contents |= {f"{name}/{path}": data for path, data in fill(source / name, name).items()}
    copied = ["btrfs", "-q", "subvolume", "snapshot", str(source / "one"), str(source / "three")]
    subprocess.run(copied, check=True, capture_output=True)
    three = {path: data for path, data in contents.items() if path.startswith("one/")}
    contents |= {f"three/{path[4:]}": data for path, data in three.items()}
    contents["three/d0/f0"] = b"changed in the snapshot"
    (source / "three/d0/f0").write_bytes(contents["three/d0/f0"])
    return source, contents


@pytest.fixture
def place(work: Bench) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(work.path, stack)
        for mount in work.mounts:
            mount.umount()


@pytest.mark.parametrize(
    ("make", "freshness"),
    [
        (upper_elsewhere, "immutable"),
        (upper_elsewhere, "open"),
        (two_lowers, "ttl=1"),
        (subvolumes, "immutable"),
        (subvolumes, "open"),
    ],
)
def test_listed_first_and_opened_by_path(
    work: Bench, place: Place, make: Callable[[Place], tuple[Path, Filled]], freshness: str
) -> None:
    source, contents = make(place)
    mount = work.mount(source, "--freshness", freshness)
    for _epoch in range(2):
        listed: list[str] = []
        for directory, below, names in os.walk(mount.path):
            assert len(listed) <= len(contents), "the tree does not end"
            listed += [os.path.relpath(os.path.join(directory, name), mount.path) for name in names]
            below.sort()
        assert sorted(listed) == sorted(contents)
        wrong: list[str] = []
        for path, data in contents.items():
            try:
                if (mount.path / path).read_bytes() != data:
                    wrong.append(f"{path}: bytes of another file")
            except OSError as error:
                wrong.append(f"{path}: {error.strerror}")
        assert not wrong, f"{len(wrong)} of {len(contents)} files are wrong: {wrong[:3]}"
    inos = [(mount.path / path).stat().st_ino for path in contents]
    assert len(set(inos)) == len(inos)
    warmed = asked("warm", str(mount.path), "--wait")
    assert (warmed["files"], warmed["resident"], warmed["failed"]) == (len(contents),) * 2 + (0,)


def packed(place: Place, contents: dict[str, bytes]) -> Path:
    """An image of squashfs with these files, all of one time."""
    for path, data in contents.items():
        (place.path / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (place.path / "files" / path).write_bytes(data)
    image = place.path / "image"
    command = ["mksquashfs", str(place.path / "files"), str(image), "-quiet", "-no-progress"]
    subprocess.run([*command, "-all-time", "1700000000"], check=True, capture_output=True)
    return image


@contextmanager
def squashfuse(image: Path, source: Path, order: Iterable[str], *options: str) -> Iterator[None]:
    """The image, mounted; it numbers files as they are looked up: in this order. They stay known
    to the kernel, which would give them other numbers after it had forgotten them."""
    source.mkdir(exist_ok=True)
    subprocess.run(["squashfuse", *options, str(image), str(source)], check=True)
    known: list[int] = []
    try:
        known += [os.open(source / path, os.O_PATH) for path in order]
        yield
    finally:
        for fd in known:
            os.close(fd)
        subprocess.run(["umount", "-l", str(source)], check=True)


@surroundings.program("squashfuse")
@surroundings.program("mksquashfs", "squashfs-tools")
@pytest.mark.parametrize("kind", ["squashfuse", "unheard-of"])
def test_no_file_has_the_copy_of_one_with_its_number(work: Bench, place: Place, kind: str) -> None:
    """All have one size and time."""
    contents = {f"d{n % 3}/f{n}": b"%099d" % n for n in range(60)}
    large = {f"large{n}": b"%d" % n * (2 << 20) for n in range(4)}
    image, source = packed(place, contents | large), place.path / "source"
    for times in range(2):
        order = sorted(contents | large, reverse=bool(times))
        with squashfuse(image, source, order, "-o", f"subtype={kind}"):
            mount = work.mount(source, "--freshness", "immutable")
            assert run("warm", str(mount.path), "--wait").returncode == 0
            os.kill(mount.worker_pid(), signal.SIGKILL)
            for path, data in (contents | large).items():
                assert (mount.path / path).read_bytes() == data, path
            assert mount.status()["files"]["resident"] == len(contents | large)
            (owner,) = work.path.glob("tier*/*/owner")
            foreign = owner.with_name("foreign")
            foreign.touch()
            assert mount.umount().returncode == 0
            checks = json.loads(run("doctor", str(source), "--json").stdout)["checks"]
            peers = ("--peers", "a,b", "--peer-name", "a")
            shares = run("mount", str(source), str(mount.path), *peers)
    assert foreign.exists()
    assert "copies of earlier mounts are gone" in work.log()
    known = [check for check in checks if check["name"] == "inode_numbers"]
    if kind == "unheard-of":
        assert not known
        return
    (check,) = known
    assert (check["state"], check["type"]) == ("warning", "fuse.squashfuse")
    assert "mount -t squashfs" in check["remedy"]
    assert (shares.returncode, "leave out --peers" in shares.stderr) == (2, True), shares.stderr
