"""A node with little memory beside its data, and an SSD: a group with a limit, and a disk.

MONARCH's nodes had 68 GiB of memory for 100 GiB of data on an SSD. Here a memory cgroup holds the
job and the daemons that serve it: pages of files, the parallel file system's and the disk's, are
charged to whoever of them reads first, and taken back at the limit. So the page cache is as small
as it was there.

The disk is an ext4 on a loop device whose file lies on tmpfs. That file is written in full and
read past the page cache (direct I/O), so no page of it is ever charged to the group, and what the
file system on it caches is, as with an SSD's. tmpfs itself would not do as local storage: its pages
are never taken back, so the limit could not tell storage from cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness import Unusable, wait_for
from monarchfs.system.memory import hierarchy_of, levels, parse_groups, parse_mountinfo, parse_stat

MEMORY = Path("/dev/shm")
# What of a group's memory is no page of a file: memory.stat in Documentation/admin-guide, of
# cgroup-v1/memory.rst (rss holds anonymous pages only) and of cgroup-v2.rst.
OWN = {1: frozenset({b"total_rss"}), 2: frozenset({b"anon", b"kernel"})}
LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}


def group_for(name: str) -> tuple[int, Path]:
    """The version of the memory controller, and where a new group of that name may be made: below
    our own (version 1), or beside it, because one that holds processes may not hand out
    controllers (version 2). Raises Unusable where there is none or it is not ours to use."""
    hierarchies = parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())
    for version, group in sorted(parse_groups(Path("/proc/self/cgroup").read_bytes()).items()):
        hierarchy = hierarchy_of(hierarchies, version, group)
        if hierarchy is None:
            continue
        below = next(levels(group, hierarchy.root))
        parent = Path(os.fsdecode(hierarchy.mount_point + below))
        if version == 2:
            parent = parent.parent if below else parent
            control = parent / "cgroup.subtree_control"
            if not control.exists() or "memory" not in control.read_text().split():
                continue
        if os.access(parent, os.W_OK):
            return version, parent / name
    raise Unusable("no memory cgroup can be made: it takes root and a kernel with that controller")


class MemoryLimit:
    """A group whose processes share a page cache of a set size, as a context manager."""

    def __init__(self, name: str) -> None:
        """Raises Unusable where there are no such groups, or they are not ours to make."""
        self._version, self.path = group_for(f"monarchfs-{name}-{os.getpid()}")

    def __enter__(self) -> MemoryLimit:
        self.path.mkdir()
        return self

    def add(self, pids: Iterable[int]) -> None:
        """Puts processes into it; what they start later is in it too. What they use already stays
        charged to where they were. Those that have ended are passed over."""
        for pid in pids:
            try:
                (self.path / "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:
                continue

    def own_bytes(self) -> int:
        """What its processes have allocated, pages of files left out."""
        return parse_stat((self.path / "memory.stat").read_bytes(), OWN[self._version])

    def file_bytes(self) -> int:
        """Pages of files that are charged to it now."""
        keys = {1: {b"total_cache"}, 2: {b"file"}}[self._version]
        return parse_stat((self.path / "memory.stat").read_bytes(), frozenset(keys))

    def hold(self, pages: int) -> None:
        """From now on pages of files get ``pages`` bytes beside what the processes themselves have
        allocated so far. What they allocate later is at the expense of that, as on a real node."""
        (self.path / LIMIT[self._version]).write_text(str(pages + self.own_bytes()))

    def __exit__(self, *_: object) -> None:
        # Whoever is still there goes back to where this process is: it is not ours to end it.
        left = (self.path / "cgroup.procs").read_text().split()
        for pid in left:
            try:
                (self.path.parent / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue
        wait_for(self._removed, "the memory cgroup to be empty")

    def _removed(self) -> bool:
        """EBUSY while a process that has ended is still being taken apart."""
        try:
            self.path.rmdir()
        except OSError:
            return False
        return True


@contextmanager
def disk(size: int, name: str, parent: Path = MEMORY) -> Iterator[Path]:
    """The mount point of an empty ext4 of ``size`` bytes, beside its own structures; gone
    afterwards. Its image lies in ``parent``. Raises Unusable without root, mkfs.ext4, loop devices
    or room there."""
    if os.geteuid() != 0:
        raise Unusable("a disk of its own takes root")
    if shutil.which("mkfs.ext4") is None:
        raise Unusable("mkfs.ext4 is missing: apt-get install e2fsprogs")
    # Inodes, bitmaps, the journal and what ext4 keeps for itself.
    size += size // 16 + (64 << 20)
    free = os.statvfs(parent)
    if free.f_bavail * free.f_frsize < size:
        raise Unusable(f"{parent} has less than {size >> 20} MiB free for a disk")
    image = parent / f"monarchfs-{name}-{os.getpid()}.disk"
    point = image.with_suffix(".mnt")
    try:
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", options, str(image))
        point.mkdir()
        device = _run("losetup", "--direct-io=on", "--find", "--show", str(image)).strip()
        try:
            _run("mount", "-o", "noatime", device, str(point))
        finally:
            # Takes effect when it is not mounted (any more).
            _run("losetup", "--detach", device)
        try:
            yield point
        finally:
            # What a daemon could not sync in the time of its unmount, the kernel still writes.
            wait_for(lambda: _unmounted(point), "the disk to be free", pause=0.2)
    finally:
        if point.exists():
            point.rmdir()
        image.unlink(missing_ok=True)


def _unmounted(point: Path) -> bool:
    return subprocess.run(["umount", str(point)], check=False, capture_output=True).returncode == 0


def _run(*command: str) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Unusable(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout
