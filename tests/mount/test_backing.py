"""What the supervisor lets the kernel read in the daemon's place: its rules, and a worker that
tries to get round them."""

import errno
import json
import os
import shutil
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cache.store.allocator import SMALL_BYTES
from monarchfs.supervisor.backing import MOST_IDS, BackingRefused, check, find_beneath
from tests.support import mounting, surroundings
from tests.support.fake_mounts import NOBODY, Area, interpreter_for
from tests.support.programs import execute
from tests.support.trees import write_files

HOSTILE = str(mounting.REPOSITORY / "tests" / "hostile" / "worker.py")
OURS, DEVICE, INO = 1000, 5, 7


def result(mode: int, uid: int = OURS, device: int = DEVICE) -> os.stat_result:
    return os.stat_result((mode, INO, device, 1, uid, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("st", "ino", "code"),
    [
        *((result(stat.S_IFREG | mode), INO, 0) for mode in (0, 0o400, 0o4777)),
        *((result(kind), INO, errno.EINVAL) for kind in (
            stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK, stat.S_IFLNK, 0
        )),
        (result(stat.S_IFREG, device=DEVICE + 1), INO, errno.EXDEV),
        (result(stat.S_IFREG, uid=0), INO, errno.EPERM),
        (result(stat.S_IFREG, uid=OURS + 1), INO, errno.EPERM),
        (result(stat.S_IFREG), INO + 1, errno.ESTALE),
    ],
)  # fmt: skip
def test_nothing_else_is(st: os.stat_result, ino: int, code: int) -> None:
    """Than a file of the user's own in a tier."""
    refused = 0
    try:
        check(st, ino, OURS, {1, DEVICE})
    except BackingRefused as error:
        refused = error.code
    assert refused == code


def test_only_what_lies_beneath_is_found(tmp_path: Path) -> None:
    for name in ("tier/file", "tier/inside/file", "outside/file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tier" / "link").symlink_to("file")
    (tmp_path / "tier" / "way").symlink_to("../outside")
    directory = os.open(tmp_path / "tier", os.O_PATH)
    for path in ("file", "inside/file"):
        found = find_beneath(directory, path)
        assert os.fstat(found).st_ino == (tmp_path / "tier" / path).stat().st_ino
        os.close(found)
    for path, code in (
        ("link", errno.ELOOP),
        ("way/file", errno.ELOOP),
        ("way", errno.ELOOP),
        ("../outside/file", errno.EXDEV),
        ("/etc/passwd", errno.EXDEV),
        ("nothing", errno.ENOENT),
        ("file/file", errno.ENOTDIR),
    ):
        with pytest.raises(OSError, match=r"\[Errno") as raised:
            find_beneath(directory, path)
        assert raised.value.errno == code, path
    os.close(directory)


@mounting.requires_root
def test_no_other_file_system_is_entered(tmp_path: Path) -> None:
    point = tmp_path / "mounted"
    point.mkdir()
    with surroundings.mounted_tmpfs(point):
        (point / "file").touch()
        directory = os.open(tmp_path, os.O_PATH)
        for path in ("mounted", "mounted/file"):
            with pytest.raises(OSError, match="cross-device"):
                find_beneath(directory, path)
        os.close(directory)


OPEN = """
import errno, os, sys
for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
    try:
        print(os.read(os.open(sys.argv[1], flags), 100))
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


@mounting.needs_mounts
def test_a_hostile_worker(root_work: Area) -> None:
    area, python = root_work.path, interpreter_for(NOBODY)
    shutil.chown(area / "mnt", NOBODY)
    for name, mode in (("secret", 0o600), ("public", 0o644)):
        (area / "src" / name).write_text("root's")
        (area / "src" / name).chmod(mode)

    def ours(*arguments: str) -> subprocess.CompletedProcess[str]:
        return execute([python, "-I", HOSTILE, "cli", *arguments], cwd=area)

    storage = [*root_work.storage, "--user", NOBODY]
    assert mounting.run("mount", f"{area}/src", f"{area}/mnt", *storage).returncode == 0
    assert mounting.run("umount", f"{area}/mnt").returncode == 0
    (dataset,) = (area / "tier").iterdir()
    (dataset / "theirs").write_text("root's")
    done = ours("mount", "src", "mnt", *storage, "--data-path", "passthrough")
    assert done.returncode == 0, done.stderr
    try:
        supervisor = next(
            pid
            for pid in mounting.processes_about(str(area))
            if os.stat(f"/proc/{pid}").st_uid == 0
        )

        def attacked() -> dict[str, Any] | None:
            now: dict[str, Any] = json.loads(ours("status", "mnt", "--json").stdout)
            return now if "found" in now else None

        report = mounting.wait_for(attacked, "the attack to end", 60)
        found = report["found"]
        assert found.pop("some of each") == {"ids": [True, False, True], "error": "EINVAL"}
        assert found.pop("nothing") == {"ids": [], "error": ""}
        assert found.pop("more than a message may hold") == "no answer"
        assert found.pop("as many as it likes") <= report["most"] <= MOST_IDS
        assert found.pop("descriptors") in ("EPERM", "no answer")  # Linux 6.16 refuses them
        assert not any(any(answer["ids"]) for answer in found.values())
        assert {name: answer["error"] for name, answer in found.items()} == {
            "a link to a secret": "ELOOP",
            "what lies behind a link": "ELOOP",
            "somebody else's": "EPERM",
            "another file by its name": "ESTALE",
            "a directory": "EINVAL",
            "a FIFO": "EINVAL",
            "a socket": "EINVAL",
            "what is not there": "ENOENT",
            "no tier": "EXDEV",
        }
        # Its answers to opens: the kernel reads what was accepted, and never asks for more.
        reader = mounting.as_user(NOBODY, [python, "-I", "-c", OPEN, str(area / "mnt" / "any")])
        done = subprocess.run(reader, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.split("\n")[:4] == [
            repr(b"the worker's own file"), *("EROFS",) * 3
        ], done.stderr  # fmt: skip
        report = json.loads(ours("status", "mnt", "--json").stdout)
        assert [flags & os.O_ACCMODE for flags in report["opens"]] == [os.O_RDONLY]
        assert len(os.listdir(f"/proc/{supervisor}/fd")) < 40, "what came was closed"
    finally:
        done = ours("umount", "mnt")
    assert done.returncode == 0, done.stderr


@mounting.needs_mounts
@pytest.mark.parametrize(("layers", "works"), [(1, True), (2, False)])
def test_a_tier_on_other_file_systems(work: mounting.Bench, layers: int, works: bool) -> None:
    """As in a container, whose root is an overlay; the kernel allows one file system below."""
    content = bytes(SMALL_BYTES + 1)  # no less is passed through
    write_files(work.path / "src", {"file": content})
    below = work.path / "lower"
    below.mkdir()
    with ExitStack() as mounted:
        for number in range(layers):
            upper, inner, merged = (work.path / f"{name}{number}" for name in ("up", "in", "on"))
            for directory in (upper, inner, merged):
                directory.mkdir()
            options = f"upperdir={upper},workdir={inner},lowerdir={below}"
            command = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
            if execute(command).returncode:
                pytest.skip(
                    "needs a TMPDIR that overlays can lie on, and leave to mount them: ext4, xfs"
                )
            mounted.callback(subprocess.run, ["umount", "-l", str(merged)], check=True)
            below = merged
        tier, passing = f"{below}/tier=100M", ("--data-path", "passthrough")
        if not works:
            done = work.try_to_mount(work.path / "src", "--tier", tier, *passing)
            mounting.assert_one_line(
                done, 1, "lies on more file systems than the kernel allows: use"
            )
        mount = work.mount(work.path / "src", *(passing if works else ()), tiers=[tier])
        for passed in (0, 1):
            assert (mount.path / "file").read_bytes() == content
            report = mount.wait_idle()
            assert report["files"]["resident"] == 1
            assert report["data_path"] == ("passthrough" if works else "relay")
            # An open is counted after its answer.
            mounting.wait_for(
                lambda: mount.status()["served"]["passthrough_opens"] == passed * works,  # noqa: B023
                "the open to be passed through" if passed else "no open to be passed through",
            )
        assert mount.umount().returncode == 0
