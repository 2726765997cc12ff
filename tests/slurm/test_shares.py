"""Sets of jobs, kept by many processes at once."""

import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monarchfs.config.model import User
from monarchfs.slurm import records
from monarchfs.slurm.shares import Share, every_share, share_key, shares_of, uid_of
from monarchfs.slurm.site import Site
from monarchfs.types import OperationError
from tests.support import surroundings
from tests.support.programs import Running
from tests.support.timing import Stopwatch

ALICE = User("alice", 1000, 1000, (1000, 20))
KEY = share_key("/data", ALICE)


@pytest.fixture
def layout(tmp_path: Path) -> Site:
    places = Site(str(tmp_path / "run"), str(tmp_path / "cache"))
    records.prepare(places)
    return places


def test_a_key_is_of_the_source_the_user_and_the_set_of_groups() -> None:
    assert share_key("/data", User("other name", 1000, 20, (1000,))) == KEY
    others = [
        share_key("/data2", ALICE),
        share_key("/data", User("alice", 1001, 1000, (1000, 20))),
        share_key("/data", User("alice", 1000, 1000, (1000,))),
        share_key("/data", User("alice", 1000, 1000, (1000, 20, 21))),
    ]
    assert len({KEY, *others}) == 5


def test_a_name_of_digits_is_a_name_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pwd.getpwnam", {"7": pwd.getpwuid(0)}.__getitem__)
    assert (uid_of("7", 30), uid_of("8", 30)) == (0, 8)


def test_jobs_come_and_go(layout: Site) -> None:
    share = Share(layout, KEY)
    assert share.jobs() == []
    for job in (3, "12[3].x", 1, 2, 1):
        share.enter(job)
    assert share.jobs() == [1, 2, 3, "12[3].x"]
    assert share.leave("12[3].x")
    assert shares_of(layout, 2) == [share]
    assert share.entry(1)["met"] == [2, 3, "12[3].x"]
    assert share.leave(2)
    assert not share.leave(2)
    assert share.jobs() == [1, 3]
    assert share.entry(3)["met"] == ["12[3].x", 1, 2], "who was there is remembered"
    share.leave(1)
    share.leave(3)
    share.mark_idle()
    assert 0 <= share.idle_seconds() < 60
    share.clear()
    assert every_share(layout) == []
    # One that is in use is not cleared.
    share = Share(layout, KEY)
    share.enter(1)
    os.mkdir(share.mountpoint("/data"))
    (Path(share.directory) / "jobs" / ".2.77").write_text("half")
    share.clear()
    assert share.jobs() == [1]
    share.leave(1)
    share.clear()
    assert every_share(layout) == []


@pytest.mark.parametrize("name", ["jobs", "idle", "share.json", "..x", "a b", "-x", "ü", "x" * 99])
def test_a_mount_points_name_is_plain(layout: Site, name: str) -> None:
    assert Share(layout, KEY).mountpoint(f"/data/{name}").endswith(f"{KEY}/data")


def test_a_lock_is_waited_for_but_not_for_ever(layout: Site) -> None:
    path = layout.lock("x")
    with records.locked(path, 0.0):
        watch = Stopwatch()
        with pytest.raises(OperationError), records.locked(path, time.monotonic() + 0.2):
            pass
        assert watch.elapsed() >= 0.2
        watch.check(2)
    with records.locked(path, 0.0):
        pass
    os.symlink("/etc/passwd", layout.lock("y"))
    with pytest.raises(OperationError, match="links"), records.locked(layout.lock("y"), 0.0):
        pass


@surroundings.requires_root
def test_directories_that_others_can_change_are_refused(tmp_path: Path) -> None:
    for name, mode, owner in (("open", 0o777, 0), ("foreign", 0o755, 65534)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        os.chown(tmp_path / name, owner, owner)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "foreign", "link"):
        with pytest.raises(OperationError, match="root can change"):
            records.make_directory(f"{tmp_path}/{name}", 0o755)


def test_a_record_is_whole_or_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    assert records.read_record(path) is None
    records.write_record(path, {"a": 1})
    assert records.read_record(path) == {"a": 1}
    # Left by a process of this number that was killed while it wrote.
    (tmp_path / f".record.{os.getpid()}").write_text("{")
    records.write_record(path, {"a": 2})
    assert records.read_record(path) == {"a": 2}
    assert os.listdir(tmp_path) == ["record"]
    for garbage in ("", "[]", "{", "[" * 100_000, "\udcff"):
        records.write_text(path, garbage)
        assert records.read_record(path) is None
    os.unlink(path)
    os.symlink("/etc/passwd", path)
    assert records.read_record(path) is None


WORKER = """
import os, random, sys, time
from monarchfs.slurm.records import locked
from monarchfs.slurm.shares import Share
from monarchfs.slurm.site import Site
layout = Site(sys.argv[1], sys.argv[2])
share = Share(layout, sys.argv[3])
mounted = layout.run_dir + "/mounted"
first, seed = int(sys.argv[4]), random.Random(int(sys.argv[4]))
for number in range(15):
    job = first + number
    with locked(share.lock, time.monotonic() + 60):
        share.enter(job)
        if not share.record():
            share.write({"source": "/data"})
            open(mounted, "x").close()
        assert job in share.jobs()
    time.sleep(seed.random() / 200)
    with locked(share.lock, time.monotonic() + 60):
        assert os.path.exists(mounted)
        assert share.leave(job)
        if not share.jobs():
            os.unlink(mounted)
            share.clear()
print("done", flush=True)
"""


def test_many_processes_keep_one_set(layout: Site) -> None:
    command = [sys.executable, "-c", WORKER, layout.run_dir, layout.cache_dir, KEY]
    firsts = [str(1000 * number) for number in range(1, 9)]
    running = [Running([*command, first], stderr=subprocess.PIPE) for first in firsts]
    for process in running:
        output, errors = process.communicate(timeout=60)
        assert output == "done\n", errors
    assert every_share(layout) == []
    assert not os.path.exists(f"{layout.run_dir}/mounted")
