"""Copies that a mount leaves behind in tiers that it had before, and does not have now."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping

from monarchfs.config import Config
from monarchfs.config.places import OWNER
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.tierdirs import OPEN_DIRECTORY
from monarchfs.system.bounded import answer_within
from monarchfs.system.sizes import format_bytes

_LOOK_SECONDS = 2.0
_MEASURE_SECONDS = 0.5
_MOST_TIERS = 8
"""More than anybody had; the record is the user's file."""


def left_out(config: Config, record: Mapping[str, str]) -> list[str]:
    """A line for each tier of ``record`` (`tierdirs.read_record`) that ``config`` does not name and
    that holds copies. Blocks for 2 seconds a tier at most; looks as the user."""
    tiers = {tier.path for tier in config.tiers}
    others = [item for item in sorted(record.items()) if item[0] not in tiers]
    lines = []
    for tier, name in others[:_MOST_TIERS]:
        path = os.path.join(tier, name)
        if (held := _held(path, config)) is None:
            continue
        count, whole = held
        lines.append(
            f"copies of an earlier mount stay in {path} ({'' if whole else 'at least '}"
            f"{format_bytes(count)}), which no --tier names: name --tier {tier} again to use them,"
            f" or remove them with monarchfs cache remove {shlex.quote(path)}"
            f" --state-dir {shlex.quote(config.state_dir)}"
        )
    return lines


def _held(path: str, config: Config) -> tuple[int, bool] | None:
    def measured() -> tuple[int, bool] | None:
        become(config.user)
        directory = os.open(path, OPEN_DIRECTORY)
        try:
            return _measured(directory) if os.fstat(directory).st_uid == config.user.uid else None
        finally:
            os.close(directory)

    size, whole = answer_within(_LOOK_SECONDS, measured, otherwise=None) or (0, True)
    return (size, whole) if size else None


def _measured(directory: int) -> tuple[int, bool]:
    """The blocks of what lies there, in bytes, and whether all of it was looked at."""
    until = time.monotonic() + _MEASURE_SECONDS
    total = 0
    for _, _, files, inside in os.fwalk(".", dir_fd=directory):
        for file in files:
            if file != OWNER:
                st = os.stat(file, dir_fd=inside, follow_symlinks=False)
                total += st.st_blocks * 512
            if time.monotonic() > until:
                return total, False
    return total, True
