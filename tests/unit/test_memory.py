"""How much memory may be used, from trees of files as the kernel shows them."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from monarchfs.system import memory

MIB = 1024 * 1024
V1_UNLIMITED = 9223372036854771712
MACHINE = memory.MemoryHeadroom(8000 * MIB, 16000 * MIB, "machine")

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
HYBRID_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
OTHER_MOUNTS = """\
23 1 254:0 / / rw,relatime - ext4 /dev/root rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
garbage
34 31 0:31"""


class Tree:
    """A root directory with the files of /proc and /sys that the probe reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/self/mountinfo", OTHER_MOUNTS)
        self.write("proc/self/cgroup", "")

    def write(self, path: str, text: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")

    def mounts(self, *lines: str) -> None:
        self.write("proc/self/mountinfo", "\n".join([OTHER_MOUNTS, *lines]))

    def groups(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines))

    def in_v2(self, group: str, root: str = "/") -> None:
        """This process is in that group."""
        self.mounts(V2_MOUNT.format(root=root))
        self.groups(f"0::{group}")

    def v2(self, group: str, limit: str, current: int = 0, **stat: int) -> None:
        directory = f"sys/fs/cgroup{group}"
        self.write(f"{directory}/memory.max", limit)
        self.write(f"{directory}/memory.current", str(current))
        self.stat(directory, stat)

    def v1(self, group: str, limit: int, usage: int = 0, **stat: int) -> None:
        directory = f"sys/fs/cgroup/memory{group}"
        self.write(f"{directory}/memory.limit_in_bytes", str(limit))
        self.write(f"{directory}/memory.usage_in_bytes", str(usage))
        self.stat(directory, stat)

    def stat(self, directory: str, stat: dict[str, int]) -> None:
        lines = [f"{name} {count * MIB}" for name, count in stat.items()]
        self.write(f"{directory}/memory.stat", "\n".join(lines))

    def read(self) -> memory.MemoryHeadroom:
        return memory.MemoryProbe(str(self.root), lambda: (8000 * MIB, 16000 * MIB)).read()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_groups_the_machine_limits(tree: Tree, tmp_path: Path) -> None:
    assert tree.read() == MACHINE
    assert memory.MemoryProbe(str(tmp_path / "nothing"), lambda: (5, 7)).read() == (5, 7, "machine")


@pytest.mark.parametrize("error", [OSError(), ValueError(), KeyError("MemTotal"), RuntimeError()])
def test_a_machine_that_does_not_tell(tree: Tree, error: Exception) -> None:
    fails = Mock(side_effect=error)
    probe = memory.MemoryProbe(str(tree.root), fails)
    assert probe.read() == (memory.UNLIMITED, memory.UNLIMITED, "nothing known")
    assert (
        memory.MemoryProbe(str(tree.root / "nothing"), fails).read().available_bytes
        == memory.UNLIMITED
    )
    # No limit in version 1 is none.
    tree.mounts(V1_MOUNT.format(root="/"))
    tree.groups("4:memory:/job")
    tree.v1("/job", V1_UNLIMITED, 900 * MIB)
    assert probe.read().limited_by == "nothing known"


def test_the_tightest_of_nested_limits_wins(tree: Tree) -> None:
    tree.in_v2("/a/b/c")
    tree.v2("/a/b/c", "max", 100 * MIB)
    tree.v2("/a/b", str(1000 * MIB), 100 * MIB)
    tree.v2("/a", str(2000 * MIB), 1500 * MIB, inactive_file=100)
    tree.v2("", str(5000 * MIB), 1600 * MIB)
    tree.v2("/other", str(MIB), MIB)
    assert tree.read() == (600 * MIB, 2000 * MIB, "cgroup /a")
    tree.v2("/a", "max", 1500 * MIB)
    assert tree.read() == (900 * MIB, 1000 * MIB, "cgroup /a/b")
    tree.v2("/a/b", str(20_000 * MIB), 100 * MIB)
    assert tree.read() == (3400 * MIB, 5000 * MIB, "cgroup /")
    tree.v2("", "max")
    assert tree.read() == MACHINE
    # A limit counts less what cannot be reclaimed.
    tree.in_v2("/job/step")
    stat = {"anon": 500, "file": 400, "shmem": 150, "inactive_anon": 640}
    tree.v2("/job/step", str(1000 * MIB), 900 * MIB, **stat, active_file=50, inactive_file=200)
    # 250 of 900 are pages of files; those of a tmpfs are not, whatever "file" says.
    assert tree.read() == (350 * MIB, 1000 * MIB, "cgroup /job/step")


def test_the_group_is_asked_for_each_time(tree: Tree) -> None:
    tree.v2("/a", str(10 * MIB))
    tree.v2("/b", str(20 * MIB))
    tree.in_v2("/")
    probe = memory.MemoryProbe(str(tree.root), lambda: (8000 * MIB, 16000 * MIB))
    for group, limit in (("/a", 10), ("/b", 20), ("/c", None), ("/b (deleted)", None)):
        tree.groups(f"0::{group}")
        assert probe.read() == ((limit * MIB, limit * MIB, f"cgroup {group}") if limit else MACHINE)


def test_there_is_never_less_than_nothing(tree: Tree) -> None:
    tree.in_v2("/a")
    tree.v2("/a", str(10 * MIB), 30 * MIB)
    assert tree.read() == (0, 10 * MIB, "cgroup /a")
    # The files are not read at one moment.
    tree.v2("/a", str(10 * MIB), 3 * MIB, inactive_file=5)
    assert tree.read() == (10 * MIB, 10 * MIB, "cgroup /a")
    tree.v2("/a", "0", MIB)
    assert tree.read() == (0, 0, "cgroup /a")
    # A missing account reclaims nothing.
    tree.in_v2("/a")
    tree.v2("/a", str(10 * MIB), 6 * MIB, inactive_file=5)
    (tree.root / "sys/fs/cgroup/a/memory.stat").write_bytes(b"\xff\0\ninactive_file\nactive_file x")
    assert tree.read().available_bytes == 4 * MIB
    (tree.root / "sys/fs/cgroup/a/memory.stat").unlink()
    assert tree.read().available_bytes == 4 * MIB


@pytest.mark.parametrize(
    "group", ["/docker/1234", "/docker/1234/inner", "/docker/12345", "/", "/../other", "/x"]
)
def test_a_container_sees_its_group_as_the_root_or_by_its_full_path(tree: Tree, group: str) -> None:
    tree.v2("", str(100 * MIB), 40 * MIB)
    tree.v2("/inner", str(90 * MIB), 40 * MIB)
    tree.in_v2("/")
    assert tree.read() == (60 * MIB, 100 * MIB, "cgroup /")
    tree.in_v2(group, root="/docker/1234")
    if group.endswith("/inner"):
        assert tree.read() == (50 * MIB, 90 * MIB, "cgroup /docker/1234/inner")
    else:
        assert tree.read() == (60 * MIB, 100 * MIB, "cgroup /docker/1234")


def test_version_1_counts_the_groups_below(tree: Tree) -> None:
    tree.mounts(V1_MOUNT.format(root="/"), HYBRID_MOUNT)
    tree.groups("9:name=systemd:/", "4:memory:/job/step", "3:cpu,cpuacct:/elsewhere", "0::/user")
    tree.v1("/job/step", V1_UNLIMITED, 900 * MIB)
    stat = {"shmem": 300, "total_shmem": 300, "total_inactive_file": 100, "total_active_file": 50}
    tree.v1("/job", 1000 * MIB, 900 * MIB, **stat, inactive_file=1, active_file=1)
    tree.v1("", V1_UNLIMITED, 5000 * MIB)
    assert tree.read() == (250 * MIB, 1000 * MIB, "cgroup /job")


def test_a_controller_mounted_with_others(tree: Tree) -> None:
    tree.mounts("35 31 0:32 / /cg/both\\040of rw - cgroup cgroup rw,cpu,memory")
    tree.groups("4:cpu,memory:/job:1")
    tree.write("cg/both of/job:1/memory.limit_in_bytes", str(10 * MIB))
    tree.write("cg/both of/job:1/memory.usage_in_bytes", str(4 * MIB))
    assert tree.read() == (6 * MIB, 10 * MIB, "cgroup /job:1")
    # Both versions limit, where both have limits.
    tree.mounts(V1_MOUNT.format(root="/"), V2_MOUNT.format(root="/"))
    tree.groups("4:memory:/one", "0::/two")
    tree.v1("/one", 100 * MIB)
    tree.v2("/two", str(200 * MIB))
    assert tree.read() == (100 * MIB, 100 * MIB, "cgroup /one")
    tree.v1("/one", 300 * MIB)
    assert tree.read() == (200 * MIB, 200 * MIB, "cgroup /two")


@pytest.mark.parametrize("text", ["", "garbage", "-5", "1e9", "12 MiB", "9" * 30, "\u0663"])
def test_what_is_no_limit(tree: Tree, text: str) -> None:
    tree.in_v2("/a")
    tree.v2("/a", text, 5 * MIB)
    assert tree.read() == MACHINE
    tree.v2("/a", str(10 * MIB), 5 * MIB)
    tree.write("sys/fs/cgroup/a/memory.current", text)
    assert tree.read() == MACHINE


@pytest.mark.parametrize(
    "line",
    ["", "0", "0:", "0::", "0::relative", "x::/a", "4:memory", "::::", "0::/\0", "0::/\ud8ff"],
)
def test_groups_that_make_no_sense(tree: Tree, line: str) -> None:
    tree.mounts(V1_MOUNT.format(root="/"), V2_MOUNT.format(root="/"))
    (tree.root / "proc/self/cgroup").write_bytes(line.encode("utf-8", "surrogatepass") + b"\n")
    assert tree.read() == MACHINE


def test_this_machine() -> None:
    total = psutil.virtual_memory().total
    available, of_machine = memory.machine_memory()
    assert 0 < available < of_machine == total
    room = memory.MemoryProbe().read()
    assert 0 <= room.available_bytes <= room.limit_bytes
    assert room.available_bytes < total
    assert room.limited_by == "machine" or room.limited_by.startswith("cgroup /")


IN_GROUP = """
import os, sys
open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))
from monarchfs.system.memory import MemoryProbe
print(*MemoryProbe().read())
"""


def test_a_real_group() -> None:
    own = memory.parse_groups(Path("/proc/self/cgroup").read_bytes()).get(2, b"")
    hierarchy = memory.hierarchy_of(
        memory.parse_mountinfo(Path("/proc/self/mountinfo").read_bytes()), 2, own
    )
    if hierarchy is None:
        pytest.skip("needs control groups, version 2: mount -t cgroup2 none /sys/fs/cgroup")
    # Beside our own group: one that holds processes may not hand out controllers.
    mine = Path(os.fsdecode(hierarchy.mount_point + next(memory.levels(own, hierarchy.root))))
    parent = mine if own == hierarchy.root else mine.parent
    if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
        pytest.skip("needs version 2 of the memory controller: boot with cgroup_no_v1=memory")
    group = parent / f"monarchfs-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs control groups that can be written: for a container: --privileged")
    try:
        (group / "memory.max").write_text(str(256 * MIB))
        shown = subprocess.check_output([sys.executable, "-c", IN_GROUP, str(group)], text=True)
    finally:
        group.rmdir()
    available, limit, by, name = shown.split()
    assert by == "cgroup"
    assert "monarchfs-test-" in name
    assert int(limit) == 256 * MIB
    assert 128 * MIB < int(available) <= 256 * MIB
