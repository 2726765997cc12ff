"""What the supervisor lets the kernel read in the daemon's place: its rules, and a worker that
tries to get round them."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.config import Config, DataPath, TierSpec, User
from monarchfs.fuse.slots import Slots, backing_ids, make_table
from monarchfs.supervisor import backing
from monarchfs.supervisor.backing import MOST_IDS, BackingFiles, Refused, check, most_ids
from monarchfs.types import OperationError, TierSize
from tests.faking import NOBODY, interpreter_for
from tests.mounting import (
    Bench,
    as_user,
    fuse_mounts,
    processes_about,
    requires_fuse,
    requires_root,
    run,
    wait_for,
)
from tests.test_protocol import LINUX_6_18, request

HOSTILE = str(Path(__file__).with_name("hostile") / "worker.py")
OURS, DEVICE = 1000, 5


def result(mode: int, uid: int = OURS, device: int = DEVICE) -> os.stat_result:
    return os.stat_result((mode, 1, device, 1, uid, 0, 0, 0, 0, 0))


def test_a_file_of_the_users_own_in_a_tier_is_accepted() -> None:
    for mode in (stat.S_IFREG, stat.S_IFREG | 0o400, stat.S_IFREG | 0o4777):
        for flags in (os.O_RDONLY, os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECT | os.O_NOATIME):
            check(result(mode), flags, OURS, {1, DEVICE})


@pytest.mark.parametrize(
    ("st", "flags", "code"),
    [
        (result(stat.S_IFREG), os.O_PATH, errno.EBADF),
        (result(stat.S_IFREG), os.O_RDWR, errno.EBADF),
        (result(stat.S_IFREG), os.O_WRONLY, errno.EBADF),
        (result(stat.S_IFREG), os.O_RDWR | os.O_WRONLY, errno.EBADF),  # neither, for ioctl(2) alone
        *((result(kind), os.O_RDONLY, errno.EINVAL) for kind in (
            stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK, stat.S_IFLNK, 0
        )),
        (result(stat.S_IFREG, device=DEVICE + 1), os.O_RDONLY, errno.EXDEV),
        (result(stat.S_IFREG, uid=0), os.O_RDONLY, errno.EPERM),
        (result(stat.S_IFREG, uid=OURS + 1), os.O_RDONLY, errno.EPERM),
    ],
)  # fmt: skip
def test_nothing_else_is(st: os.stat_result, flags: int, code: int) -> None:
    with pytest.raises(Refused) as refused:
        check(st, flags, OURS, {DEVICE})
    assert refused.value.code == code


def test_how_many() -> None:
    assert most_ids(0) == 1
    assert most_ids(16 << 30) == 16 << 10
    assert most_ids(4 << 40) == MOST_IDS


class Kernel:
    """Registers whatever it is given."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: Path, most: int = 3) -> None:
        self.ids: set[int] = set()
        self.made = 0
        patch.setattr(backing, "register", self._register)
        patch.setattr(backing, "unregister", lambda _fuse, number: self.ids.remove(number))
        user = User("me", os.getuid(), os.getgid())
        tiers = (TierSpec(str(directory), TierSize(bytes=1)),)
        config = Config("/s", "/m", tiers, "/state", "/run", "0" * 16, user)
        self.table = make_table(16)
        self.supervisor = BackingFiles(config, -1, [-1], self.table)
        self.supervisor.most = most
        self.supervisor._devices = frozenset((directory.stat().st_dev,))
        (directory / "file").touch()
        self.file = os.open(directory / "file", os.O_RDONLY)

    def _register(self, _fuse: int, _descriptor: int) -> int:
        self.made += 1
        self.ids.add(self.made)
        return self.made

    def back(self, *descriptors: int) -> dict[str, Any]:
        answer = self.supervisor.answer({"event": "back", "number": 1}, descriptors)
        assert answer is not None
        return answer

    def close(self) -> None:
        os.close(self.table)
        os.close(self.file)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(monkeypatch, tmp_path)
    yield made
    made.close()


def test_ids_are_bounded_and_closed(kernel: Kernel) -> None:
    assert kernel.back(kernel.file, kernel.file)["ids"] == [1, 2]
    answer = kernel.back(kernel.file, kernel.file)
    assert (answer["ids"], answer["error"]) == ([3, 0], errno.ENOSPC)
    for _ in range(2):
        kernel.supervisor.answer({"event": "unback", "number": 2, "ids": [1, 3, 9, True, "2"]}, [])
        assert kernel.ids == {2}
    assert kernel.back(kernel.file)["ids"] == [4]
    assert len(kernel.supervisor) == 2


def test_another_worker_keeps_what_is_open(kernel: Kernel) -> None:
    assert kernel.back(kernel.file, kernel.file, kernel.file)["ids"] == [1, 2, 3]
    slots = Slots(kernel.table)
    slots.add(7, 2, 1)
    closed = slots.add(8, 4, 2)
    slots.end(closed)
    slots.add(9, 6, 0)
    slots.add(10, 8, 77)  # never made
    assert backing_ids(kernel.table) == {1, 77}
    slots.close()
    kernel.supervisor.close_unused()
    assert kernel.ids == {1}


def test_a_table_that_says_it_is_larger_than_it_is(kernel: Kernel) -> None:
    os.pwrite(kernel.table, b"\xff" * 4, 12)
    assert backing_ids(kernel.table) == set()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(event=st.sampled_from(["back", "unback"]) | json_values, number=json_values, ids=json_values)
def test_nonsense_changes_nothing(event: object, number: object, ids: object) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        kernel = Kernel(patch, Path(directory))
        try:
            kernel.supervisor.answer({"event": event, "number": number, "ids": ids}, [])
            kernel.supervisor.answer({"event": event, "ids": ids}, [])
            assert kernel.made == 0
        finally:
            kernel.close()


def config(data_path: DataPath) -> Config:
    tiers = (TierSpec("/", TierSize(bytes=1)),)
    user = User("me", os.getuid(), os.getgid())
    return Config("/s", "/m", tiers, "/state", "/run", "0" * 16, user, data_path=data_path)


@requires_root
@pytest.mark.parametrize("data_path", DataPath)
def test_what_is_asked_of_the_kernel(data_path: DataPath) -> None:
    backing_files = BackingFiles(config(data_path), -1, [-1], -1)
    backing_files.prepare(LINUX_6_18)
    assert backing_files.stack_depth == (0 if data_path is DataPath.RELAY else 1)
    if data_path is DataPath.PASSTHROUGH:
        with pytest.raises(OperationError, match=r"Linux 6\.9 .*: use --data-path relay, or auto"):
            backing_files.prepare(request(0))
    else:
        backing_files.prepare(request(0))
        assert backing_files.stack_depth == 0
    with pytest.raises(OperationError, match="FUSE_INIT failed"):
        BackingFiles(config(DataPath.AUTO), -1, [-1], -1).prepare(b"")


@pytest.fixture
def area() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    path.chmod(0o755)
    owner = pwd.getpwnam(NOBODY).pw_uid
    for name in ("src", "mnt"):
        (path / name).mkdir()
    os.chown(path / "mnt", owner, -1)
    try:
        yield path
    finally:
        for point in fuse_mounts(str(path)):
            subprocess.run(["umount", "-l", point], check=False)
        shutil.rmtree(path)


OPEN = """
import errno, os, sys
for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
    try:
        print(os.read(os.open(sys.argv[1], flags), 100))
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


@requires_root
@requires_fuse
def test_a_hostile_worker(area: Path) -> None:
    python = interpreter_for(NOBODY)
    for name, mode in (("secret", 0o600), ("public", 0o644)):
        (area / "src" / name).write_text("root's")
        (area / "src" / name).chmod(mode)

    def ours(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-I", HOSTILE, "cli", *arguments],
            capture_output=True, text=True, timeout=60, cwd=area, check=False,
        )  # fmt: skip

    storage = ["--tier", f"{area}/tier=10M", "--state-dir", f"{area}/state", "--user", NOBODY]
    done = ours("mount", "src", "mnt", *storage, "--data-path", "passthrough")
    assert done.returncode == 0, done.stderr
    try:
        supervisor = next(
            pid for pid in processes_about(str(area)) if os.stat(f"/proc/{pid}").st_uid == 0
        )
        done = ours("status", "mnt", "--json")
        report = json.loads(done.stdout)
        found = report["found"]
        assert found.pop("some of each") == {"ids": [True, False, True], "error": "EBADF"}
        assert found.pop("nothing") == {"ids": [], "error": ""}
        assert found.pop("a crowd") <= 32
        assert found.pop("as many as it likes") <= report["most"] <= MOST_IDS
        refused = {name: answer["error"] for name, answer in found.items()}
        assert not any(any(answer["ids"]) for answer in found.values())
        assert refused == {
            "a secret, by O_PATH": "EBADF",
            "what all may read": "EPERM",
            "its own, by O_PATH": "EBADF",
            "its own, for writing": "EBADF",
            "its own, for writing alone": "EBADF",
            "a directory": "EINVAL",
            "a FIFO": "EINVAL",
            "a device": "EINVAL",
            "a socket": "EBADF",
            "another file system's": "EXDEV",
        }
        # Its answers to opens: the kernel reads what was accepted, and never asks for more.
        reader = as_user(NOBODY, [python, "-I", "-c", OPEN, str(area / "mnt" / "any")])
        done = subprocess.run(reader, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.split("\n")[:4] == [
            repr(b"the worker's own file"), *("EROFS",) * 3
        ], done.stderr  # fmt: skip
        report = json.loads(ours("status", "mnt", "--json").stdout)
        assert [flags & os.O_ACCMODE for flags in report["opens"]] == [os.O_RDONLY]
        assert len(os.listdir(f"/proc/{supervisor}/fd")) < 40, "what came was closed"
        assert b"VmRSS" in Path(f"/proc/{supervisor}/status").read_bytes()
    finally:
        done = ours("umount", "mnt")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not processes_about(str(area)), "the supervisor to end")


@requires_root
def test_a_users_mount_that_must_and_cannot(area: Path) -> None:
    python = interpreter_for(NOBODY)
    storage = ["--tier", f"{area}/tier=10M", "--state-dir", f"{area}/state"]
    words = ["mount", "src", "mnt", *storage, "-o", "data_path=passthrough"]
    done = subprocess.run(
        as_user(NOBODY, [python, "-I", HOSTILE, "cli", *words]),
        capture_output=True, text=True, timeout=60, cwd=area, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "monarchfs: --data-path passthrough is not possible: only mounts made by root may use it,"
        " outside of any user namespace: use --data-path relay, or auto\n"
    )


@requires_root
@requires_fuse
@pytest.mark.parametrize(("layers", "works"), [(1, True), (2, False)])
def test_a_tier_on_other_file_systems(work: Bench, layers: int, works: bool) -> None:
    """As in a container, whose root is an overlay; the kernel allows one file system below."""
    (work.path / "src").mkdir()
    (work.path / "src" / "file").write_bytes(b"content")
    below = f"{work.path}/lower"
    os.mkdir(below)
    mounted: list[str] = []
    for number in range(layers):
        names = [f"{work.path}/{name}{number}" for name in ("upper", "work", "merged")]
        for name in names:
            os.mkdir(name)
        options = "upperdir={},workdir={}".format(*names) + f",lowerdir={below}"
        done = subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, names[2]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            break
        mounted.append(names[2])
        below = names[2]
    try:
        if len(mounted) < layers:
            pytest.skip(f"no overlay on {below} here: {done.stderr}")
        point = work.path / "mnt"
        point.mkdir()
        tier = ["--tier", f"{below}/tier=100M", "--state-dir", f"{work.path}/state"]
        words = ["mount", str(work.path / "src"), str(point), *tier]
        done = run(*words, "--data-path", "passthrough")
        if not works:
            assert done.returncode == 1
            assert "lies on more file systems than the kernel allows: use" in done.stderr
            done = run(*words)  # auto
        assert done.returncode == 0, done.stderr
        try:
            read = ["cat", str(point / "file")]
            for passed in (0, 1):
                assert subprocess.check_output(read, timeout=60) == b"content"
                report = wait_for(lambda: resident(point), "the copy")
                assert report["data_path"] == ("passthrough" if works else "relay")
                assert report["served"]["passthrough_opens"] == passed * works
        finally:
            assert run("umount", str(point)).returncode == 0
    finally:
        for name in reversed(mounted):
            subprocess.run(["umount", "-l", name], check=False)


def resident(point: Path) -> dict[str, Any] | None:
    report: dict[str, Any] = json.loads(run("status", str(point), "--json").stdout)
    return report if report["files"]["resident"] and not report["files"]["copying"] else None
