"""What a Lustre client counts of the calls that it got: ``llite.*.stats``.

Lines are those of lprocfs_stats_seq_show in lustre/obdclass/lprocfs_status.c: ``name count samples
[unit]``, and for bytes ``minimum maximum sum``. Only root can read them on most nodes.
"""

from __future__ import annotations

from collections import Counter
from glob import glob

PLACES = ("/proc/fs/lustre/llite/*/stats", "/sys/kernel/debug/lustre/llite/*/stats")
SHOWN = ("open", "close", "getattr", "getxattr", "readdir", "read", "read_bytes")


def client_counts() -> Counter[str] | None:
    """Of all mounts of Lustre on this node, by the counter's name: how often, and of ``read_bytes``
    how many. None where they cannot be read."""
    total: Counter[str] = Counter()
    found = False
    for pattern in PLACES:
        for path in glob(pattern):
            try:
                with open(path, encoding="ascii") as file:
                    total += parse(file.read())
            except OSError:
                continue
            found = True
    return total if found else None


def parse(text: str) -> Counter[str]:
    """Raises ValueError for what is no number where there must be one."""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or words[2] != "samples":
            continue
        counts[words[0]] += int(words[6] if words[0].endswith("_bytes") else words[1])
    return counts
