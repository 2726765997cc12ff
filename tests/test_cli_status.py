"""What ``monarchfs status`` prints for people."""

from __future__ import annotations

import pytest

from monarchfs.cli.status import format_bytes, format_report

REPORT = {
    "source": "/lustre/d\udcff",
    "mountpoint": "/mnt/d",
    "state": "serving",
    "data_path": "relay",
    "tiers": [
        {"path": "/dev/shm", "capacity_bytes": 1 << 30, "used_bytes": 1 << 29, "files": 3},
        {"path": "/scratch", "capacity_bytes": 0, "used_bytes": 0, "files": 0},
    ],
    "files": {"known": 10, "resident": 3, "partial": 1},
    "source_io": {
        "read_bytes": 5 << 20,
        "demand_read_bytes": 1,
        "prefetch_read_bytes": 1536,
        "operations": 7,
    },
    "served": {"local_opens": 2, "local_file_bytes": 100 << 30},
    "prefetch": {"queued": 4, "active": 1, "failed": 0},
    "worker": {"pid": None, "restarts": 0},
}


def test_a_report_for_people() -> None:
    assert format_report(REPORT).splitlines() == [
        "/lustre/d\\udcff on /mnt/d",
        "  state     serving, relay",
        "  tier      /dev/shm: 512M of 1.0G (50%), 3 files",
        "  tier      /scratch: 0 bytes of 0 bytes, 0 files",
        "  files     known 10, resident 3, partial 1",
        "  source    read 5.0M, demand read 1 bytes, prefetch read 1.5K, operations 7",
        "  served    local opens 2, local files 100G",
        "  prefetch  queued 4, active 1, failed 0",
        "  worker    pid -, restarts 0",
    ]


def test_a_report_may_lack_anything() -> None:
    assert format_report({}).splitlines() == ["? on ?", "  state     "]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0K"),
        (10 << 20, "10M"),
        (3 << 39, "1.5T"),
        (2 << 50, "2.0P"),
    ],
)
def test_bytes_read_like_sizes(count: int, text: str) -> None:
    assert format_bytes(count) == text
