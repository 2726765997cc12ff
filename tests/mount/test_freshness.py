"""What changes in the source, seen through a real mount and the kernel's caches."""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import trees
from tests.support.mounting import Bench, Mount, requires_mounts, run, wait_for
from tests.support.scenario import play

pytestmark = requires_mounts

CASES = {
    # No zeros where a file was truncated.
    "fstat and read of a descriptor agree": """
file f{0..2} 2M
mount --freshness open --prefetch none
open holder; held holder
truncate f0 1000; append f1 4; file f2 2M; size; follows holder; close holder
""",
    # Nothing of a change is seen before: that is what immutable means. What is open was local, and
    # is one version.
    "refresh reaches what the kernel remembers": """
file f 2M; file d/g 10
mount --freshness immutable
read; list d; list d; list d; missing new d/new; open holder f; idle
file f 2M; remove d/g; file new d/new 3
read f old=1; read d/g; missing new d/new
command refresh
same f new d/new d/g; list d; list d
held holder old=1; close holder
""",
    # It is not local, so who has it open sees the source as it is, once somebody looked.
    "pages of a file that is mapped are dropped": """
file f 2M
mount --freshness open --prefetch none
open holder way=mapped; held holder
file f 2M; size f; follows holder; close holder
""",
    "a map of what is local stays one version": """
file f 2M
mount --freshness open
read; idle; open holder way=mapped; held holder
file f 2M; read; drop_caches; held holder old=1; close holder
""",
}


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, CASES[case])


def test_access_times_of_what_is_used_go_on(work: Bench, ext4: Callable[..., Path]) -> None:
    """With ``--touch-source``, on a file system that records every access time."""
    source = ext4("-O", "^has_journal", options="loop,strictatime") / "data"
    trees.write_files(source, {name: os.urandom(300_000) for name in ("used", "idle")})
    options = ("--freshness", "immutable", "--prefetch", "all", "--touch-source", "1s")
    mount = work.mount(source, *options)
    wait_for(lambda: mount.status()["files"]["resident"] == 2, "both to be resident")
    content = (source / "used").read_bytes()
    before = {name: (source / name).stat() for name in ("used", "idle")}
    # Not in this process: should the mount hang, the test must not.
    read = ["cat", str(mount.path / "used")]
    assert subprocess.run(read, capture_output=True, check=True, timeout=30).stdout == content
    wait_for(lambda: mount.status()["touch"]["completed"], "a touch")
    for name, old in before.items():
        now = (source / name).stat()
        assert (now.st_atime_ns > old.st_atime_ns) == (name == "used")
        assert (now.st_mtime_ns, now.st_ctime_ns) == (old.st_mtime_ns, old.st_ctime_ns)
    assert mount.status()["touch"]["failed"] == 0


@pytest.mark.parametrize("prefetch", ["none", "access"])
def test_changes_within_one_tick(work: Bench, ext4: Callable[..., Path], prefetch: str) -> None:
    """Two writes of the same size that leave the same times: each open sees what it should. The
    source's times are whole seconds: inodes of 128 bytes have no room for more (ext4(5)). Others
    give each time that somebody saw to one change only, since Linux 6.13."""
    source = ext4("-I", "128", "-O", "^has_journal")
    mount = work.mount(source, "--freshness", "open", "--prefetch", prefetch)
    through = mount.path / "f"
    alike = 0
    for number in range(50):
        rewritten = b"a%06d" % number, b"b%06d" % number
        times = []
        for data in rewritten:
            (source / "f").write_bytes(data)
            times.append(os.stat(source / "f").st_ctime_ns)
            assert through.read_bytes() == data
        alike += times[0] == times[1]
        # Also once the tick is over and what is read may be kept.
        if number % 25 == 0:
            wait_for(lambda: time.time_ns() > times[1] + 1_010_000_000, "the clock")  # noqa: B023
            assert through.read_bytes() == rewritten[1]
            mount.wait_idle()
            assert through.read_bytes() == rewritten[1]
    assert alike > 0, "no change fell into the tick of another"


NAMES = 48
MODES = {"immutable": 0.0, "ttl=1": 1.0, "open": 0.0}
CHANGES = {
    "renamed over": "echo another one >new; mv new 17",
    "unlinked": "rm 17",
    "truncated": "truncate -s 3 17",
    "its mode": "chmod 400 17",
    "linked": "ln 17 zz",
    "swapped": "mv 17 zz; mv 18 17",
    "moved": "cd ..; mkdir new; echo other >new/17; mv moved old; mv new moved",
}
"""Of a file in a directory of this name."""


def shown(root: Path) -> dict[str, tuple[int, ...] | None]:
    found: dict[str, tuple[int, ...] | None] = dict.fromkeys(CHANGES)
    for name in CHANGES:
        with suppress(FileNotFoundError):
            st = (root / name / "17").lstat()
            found[name] = st.st_size, st.st_mode, st.st_nlink, st.st_ctime_ns
    return found


def bring(mount: Mount) -> None:
    """Have all names asked for, most of which nobody has looked up."""
    for name in CHANGES:
        os.listdir(mount.path / name)
        for number in range(24):
            (mount.path / name / f"{number:02}").lstat()
    all_names = NAMES * len(CHANGES)
    wait_for(lambda: mount.status()["source_io"]["operations"] > all_names, "all to be asked for")


SEEN = ("brought", "warmed", "forgotten by the kernel", "of an earlier worker")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seen", SEEN)
def test_a_name_is_shown_no_longer_than_promised(work: Bench, mode: str, seen: str) -> None:
    source = work.path / "src"
    for name in CHANGES:
        trees.write_files(source / name, {f"{number:02}": bytes(number) for number in range(NAMES)})
    mount = work.mount(source, "--freshness", mode)
    before = shown(source)
    if mode != "open":
        if seen == "warmed":
            assert run("warm", str(mount.path), "--metadata", "--wait").returncode == 0
        else:
            bring(mount)
    if seen in ("forgotten by the kernel", "of an earlier worker"):
        assert shown(mount.path) == before
        Path("/proc/sys/vm/drop_caches").write_text("2")
    if seen == "of an earlier worker":
        mount.kill_worker()
    for name, change in CHANGES.items():
        subprocess.run(["sh", "-ec", change], cwd=source / name, check=True)
    changed, since = shown(source), time.monotonic()
    assert not changed.items() & before.items()
    for name, found in shown(mount.path).items():
        assert found in ([changed[name]] if mode == "open" else [before[name], changed[name]]), name
    if mode == "immutable":
        assert run("refresh", str(mount.path)).returncode == 0
    time.sleep(max(0.0, since + MODES[mode] - time.monotonic()))
    for _ in range(3):
        assert shown(mount.path) == changed
        Path("/proc/sys/vm/drop_caches").write_text("2")
