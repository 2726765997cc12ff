"""A dataset whose file system is not mounted on this node: an empty directory beside others."""

from __future__ import annotations

import pytest

from monarchfs.fuse.mountinfo import Mount as Entry
from monarchfs.supervisor.probe import OpenedSource, seems_unmounted
from tests.support.mounting import Bench, needs_mounts, run


def entry(point: str, fstype: str, source: str = "none") -> Entry:
    return Entry(1, 0, 0, 7, "/", point, "rw", fstype, source, "rw")


def source(path: str = "/data/b", *, empty: bool = True, device: int = 1) -> OpenedSource:
    return OpenedSource(-1, path, ((device, 5), (1, 4), (1, 2)), empty)


@pytest.mark.parametrize(
    ("mounts", "beside"),
    [
        ([], None),
        ([entry("/data/a", "lustre")], "/data/a"),
        ([entry("/data/a", "autofs")], "/data/a"),
        ([entry("/data/a", "ext4", "/dev/sdb1")], "/data/a"),
        ([entry("/data/a", "tmpfs")], None),
        ([entry("/data/a", "fuse.monarchfs")], None),
        ([entry("/data/a/deeper", "lustre"), entry("/data", "lustre")], None),
        ([entry("/data/a", "lustre"), entry("/data/b", "lustre")], None),
    ],
)
def test_what_lies_beside_it_tells(mounts: list[Entry], beside: str | None) -> None:
    assert seems_unmounted(source(), mounts) == beside
    assert seems_unmounted(source(empty=False), mounts) is None
    assert seems_unmounted(source(device=9), mounts) is None


@needs_mounts
def test_it_is_told_and_refused_where_files_are_required(work: Bench) -> None:
    backing = work.path / "backing"
    backing.mkdir()
    neighbour = work.faulty_source(backing)
    dataset, point = work.path / "dataset", work.path / "mnt"
    dataset.mkdir()
    point.mkdir()
    storage = ["--tier", f"{work.path}/tier=10M", "--state-dir", f"{work.path}/state"]
    command = ["mount", str(dataset), str(point), *storage]
    says = f"source {dataset} is empty, and no file system is mounted on it, as on {neighbour.path}"

    for form in (["--require-files"], ["-o", "require_files"]):
        done = run(*command, *form)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert says in done.stderr
        assert not (work.path / "state").exists()
    done = run(*command)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert says in done.stderr
    assert run("umount", str(point)).returncode == 0

    for more, code, out in ((["--require-files"], 1, ""), ([], 0, "ran\n")):
        done = run("run", str(dataset), *storage, *more, "--", "echo", "ran")
        assert (done.returncode, done.stdout, done.stderr.count(says)) == (code, out, 1)
    done = run("doctor", str(dataset), "--quick", *storage)
    assert says in done.stdout
    (dataset / "below").mkdir()
    done = run(*command, "--require-files")
    assert (done.returncode, done.stderr) == (0, "")
    assert run("umount", str(point)).returncode == 0

    done = run("mount", f"{work.path}/datast/below", str(point))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"did you mean {dataset}/below?" in done.stderr
