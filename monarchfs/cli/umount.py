"""``monarchfs umount``: ask the supervisor; do it without one if need be."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from functools import partial

from monarchfs.cli.text import printable
from monarchfs.config.places import runtime_dirs_to_search
from monarchfs.config.values import parse_path, parse_timeout
from monarchfs.control import Connection
from monarchfs.supervisor.recover import (
    Found,
    find_one,
    find_others_mount,
    remove_by_force,
)
from monarchfs.types import OperationError, UsageError

_FORCE_SECONDS = 1.5
"""What is kept of the time limit for doing it by force, if the supervisor does not."""


def umount_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0 when nothing of ours is mounted there any more (or never was), within
    ``--timeout`` seconds and a moment. Raises OperationError if it still is."""
    timeout = parse_timeout(arguments.timeout)
    deadline = time.monotonic() + timeout
    path = parse_path(arguments.mountpoint)
    found = find_one(path, partial(runtime_dirs_to_search, os.geteuid(), environ))
    if found is None:
        other = find_others_mount(path)
        if other is not None:
            raise UsageError(f"{path} is a mount of type {other}, not of monarchfs: use umount")
        print(f"{printable(path)} is not mounted")
        return 0
    owner = found.mount.user_id if found.mount is not None else None
    if os.geteuid() not in (0, owner) and owner is not None:
        raise OperationError(f"{found.mountpoint} belongs to another user: ask them, or use root")
    if not _supervisor_did_it(found, deadline) and not remove_by_force(found, deadline):
        raise OperationError(
            f"cannot unmount {found.mountpoint}: try umount -l {found.mountpoint} as root"
        )
    return 0


def _supervisor_did_it(found: Found, deadline: float) -> bool:
    """Whether the supervisor unmounted, and went, in time."""
    if not found.supervisor_alive:
        return False
    assert found.registered is not None
    left = deadline - time.monotonic()
    reserve = min(_FORCE_SECONDS, left / 3)
    try:
        with Connection(found.registered.socket_path, left - reserve) as connection:
            if connection.peer_uid not in (0, found.registered.owner_uid):
                return False
            asked = {"command": "umount", "timeout": left - reserve}
            connection.request(asked, deadline - reserve - time.monotonic())
            return connection.wait_closed(1.0)
    except OperationError:
        return False
