"""How much more memory this process may use, for tiers in memory.

Writes to a tmpfs are charged to the process's control group (cgroup), as its own memory is, and
cannot be reclaimed. So the room is the least of what the machine has and what each group, from the
process's own upwards, has below its limit. Clean or dirty pages of files do not count as used,
because the kernel takes those back; pages of a tmpfs are not among them, as they are on the
anonymous lists (memory.stat in Documentation/admin-guide/cgroup-v2.rst).

Both versions of cgroups are read, since a hybrid machine has its memory controller in only one.
Where they are mounted is read once; the process's group each time, since a batch system may move
it. A container sees its own group as the root of the mount, and nothing above.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil

UNLIMITED = 2**63 - 1
"""What stands for the room where nothing limits it or nothing is known."""

# The kernel's "no limit" in version 1 is LONG_MAX, rounded down to pages (of up to 64 KiB).
_NO_LIMIT = 2**62

_ESCAPE = re.compile(rb"\\([0-7]{3})")


class MemoryHeadroom(NamedTuple):
    """``available_bytes`` of ``limit_bytes`` are left; ``limited_by`` is "machine" or the path of a
    control group."""

    available_bytes: int
    limit_bytes: int
    limited_by: str


class Hierarchy(NamedTuple):
    """A mounted tree of groups: ``root`` is the group that is found at ``mount_point``."""

    version: int
    root: bytes
    mount_point: bytes


class MemoryFiles(NamedTuple):
    """The names of a version's files, and the lines of memory.stat that can be reclaimed.

    For all groups below: the plain lines in version 2, those of total_ in version 1.
    """

    limit: bytes
    usage: bytes
    reclaimable: frozenset[bytes]


_FILES = {
    1: MemoryFiles(
        b"memory.limit_in_bytes",
        b"memory.usage_in_bytes",
        frozenset({b"total_inactive_file", b"total_active_file"}),
    ),
    2: MemoryFiles(b"memory.max", b"memory.current", frozenset({b"inactive_file", b"active_file"})),
}


def machine_memory() -> tuple[int, int]:
    """(available, total) bytes of the machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


class MemoryProbe:
    """Reads the limits. ``root`` is where /proc and /sys lie, ``machine`` gives (available, total)
    bytes of the machine."""

    def __init__(
        self, root: str = "/", machine: Callable[[], tuple[int, int]] = machine_memory
    ) -> None:
        """Reads where the groups are mounted; never raises."""
        self._root = os.fsencode(root).rstrip(b"/")
        self._machine = machine
        self._hierarchies = parse_mountinfo(self._read(b"/proc/self/mountinfo"))

    def read(self) -> MemoryHeadroom:
        """The room now. Blocks for nothing but the kernel's accounts; never raises. What cannot be
        read limits nothing. The least room wins, the machine's among equals."""
        found = [self._of_machine()]
        groups = parse_groups(self._read(b"/proc/self/cgroup"))
        for version, group in groups.items():
            hierarchy = hierarchy_of(self._hierarchies, version, group)
            if hierarchy is not None:
                for below in levels(group, hierarchy.root):
                    room = self._of_group(hierarchy, below)
                    if room is not None:
                        found.append(room)
        return min(found, key=lambda room: room.available_bytes)

    def _of_machine(self) -> MemoryHeadroom:
        try:
            available, total = self._machine()
        except (OSError, ValueError, LookupError, RuntimeError):
            # psutil, where /proc is hidden or has unknown contents.
            return MemoryHeadroom(UNLIMITED, UNLIMITED, "nothing known")
        return MemoryHeadroom(available, total, "machine")

    def _of_group(self, hierarchy: Hierarchy, below: bytes) -> MemoryHeadroom | None:
        names = _FILES[hierarchy.version]
        directory = hierarchy.mount_point.rstrip(b"/") + below + b"/"
        # The limit first: most groups have none, and the others cost the kernel a summing up.
        limit = parse_number(self._read(directory + names.limit))
        if limit is None or limit >= _NO_LIMIT:
            return None
        usage = parse_number(self._read(directory + names.usage))
        if usage is None:
            return None
        reclaimable = parse_stat(self._read(directory + b"memory.stat"), names.reclaimable)
        used = max(0, usage - reclaimable)
        group = (hierarchy.root.rstrip(b"/") + below) or b"/"
        return MemoryHeadroom(max(0, limit - used), limit, f"cgroup {os.fsdecode(group)}")

    def _read(self, path: bytes) -> bytes:
        """All of a file; nothing if it cannot be read."""
        try:
            with open(self._root + path, "rb", buffering=0) as file:
                return file.read()
        except (OSError, ValueError):
            return b""


def parse_mountinfo(text: bytes) -> list[Hierarchy]:
    """The mounted trees that may have a memory controller (proc_pid_mountinfo(5))."""
    found = []
    for line in text.splitlines():
        mount, separator, super_block = line.partition(b" - ")
        fields, of_super_block = mount.split(b" "), super_block.split(b" ")
        if not separator or len(fields) < 6 or len(of_super_block) < 3:
            continue
        if of_super_block[0] == b"cgroup2":
            version = 2
        elif of_super_block[0] == b"cgroup" and b"memory" in of_super_block[2].split(b","):
            version = 1
        else:
            continue
        found.append(Hierarchy(version, _unescaped(fields[3]), _unescaped(fields[4])))
    return found


def parse_groups(text: bytes) -> dict[int, bytes]:
    """The process's group for each version that can matter for memory (cgroups(7))."""
    groups = {}
    for line in text.splitlines():
        number, _, rest = line.partition(b":")
        controllers, separator, group = rest.partition(b":")
        if not separator or not group.startswith(b"/"):
            continue
        if b"memory" in controllers.split(b","):
            groups[1] = group
        elif number == b"0" and not controllers:
            groups[2] = group
    return groups


def hierarchy_of(found: list[Hierarchy], version: int, group: bytes) -> Hierarchy | None:
    """The mount that shows most of the groups above ``group``; any if none shows the group itself:
    then its root is the nearest visible one."""
    fitting = [each for each in found if each.version == version]
    showing = [each for each in fitting if _below(group, each.root) is not None]
    return min(showing or fitting, key=lambda each: len(each.root), default=None)


def levels(group: bytes, root: bytes) -> Iterator[bytes]:
    """``group`` and those above it up to ``root``, as paths below that: ``/a/b``, ``/a``, empty."""
    below = _below(group, root) or b""
    while below:
        yield below
        below = below.rpartition(b"/")[0]
    yield b""


def parse_number(text: bytes) -> int | None:
    """A number of bytes; None of ``max`` and whatever else is none."""
    text = text.strip()
    return int(text) if text.isdigit() and len(text) < 20 else None


def parse_stat(text: bytes, wanted: frozenset[bytes]) -> int:
    """The sum of the ``wanted`` lines of memory.stat."""
    total = 0
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key in wanted:
            total += parse_number(value) or 0
    return total


def _below(group: bytes, root: bytes) -> bytes | None:
    """``group`` relative to ``root``: empty or with a slash first; None if it is not below, as a
    group outside of the process's cgroup namespace, which shows as ``/../..``."""
    top = root.rstrip(b"/")
    if not (group + b"/").startswith(top + b"/"):
        return None
    below = group[len(top) :].rstrip(b"/")
    return None if b".." in below.split(b"/") else below


def _unescaped(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field)
