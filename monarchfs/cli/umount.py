"""``monarchfs umount``: ask the supervisor, or do it without one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from monarchfs.cli.text import printable
from monarchfs.config.places import search_of
from monarchfs.fuse.mountinfo import MONARCHFS
from monarchfs.supervisor.recover import find_one, find_others_mount, unmount_found
from monarchfs.types import OperationError, UsageError


def umount_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0 when nothing of ours is mounted there any more (or never was), within ``--timeout``
    seconds and a moment. Raises OperationError if it still is."""
    deadline = time.monotonic() + arguments.timeout
    path = arguments.mountpoint
    found = find_one(path, search_of(environ))
    if found is None:
        other = find_others_mount(path)
        if other is not None:
            what = (
                "a part of a monarchfs mount" if other.fstype == MONARCHFS else "not of monarchfs"
            )
            raise UsageError(f"{path} is a mount of type {other.fstype}, {what}: use umount")
        print(f"{printable(path)} is not mounted")
        return 0
    if found.mount is not None and not found.on_top:
        raise OperationError(
            f"{found.mountpoint} is hidden by another mount on it or above it: unmount that first"
        )
    found.refuse_others()
    if not unmount_found(found, deadline):
        raise OperationError(
            f"cannot unmount {found.mountpoint}: try umount -l {found.mountpoint} as root"
        )
    return 0
