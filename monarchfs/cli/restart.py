"""``monarchfs restart``: another worker under a mount that is in use."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from functools import partial

from monarchfs.config.places import runtime_dirs_to_search
from monarchfs.config.values import parse_path, parse_timeout
from monarchfs.control import request
from monarchfs.supervisor.recover import find_one
from monarchfs.types import OperationError


def restart_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0 when the new worker serves. Raises UsageError, or OperationError where the mount
    goes on with the old one, or did not say within ``--timeout`` seconds."""
    timeout = parse_timeout(arguments.timeout)
    path = parse_path(arguments.mountpoint)
    found = find_one(path, partial(runtime_dirs_to_search, os.geteuid(), environ))
    if found is None:
        raise OperationError(f"{path} is not a monarchfs mount: see monarchfs status for those")
    if found.registered is None or not found.supervisor_alive:
        raise OperationError(
            f"the daemon of {found.mountpoint} is gone: clear the mount with"
            f" monarchfs umount {found.mountpoint}"
        )
    worker = request(found.registered, {"command": "restart", "timeout": timeout}, timeout)
    if arguments.json:
        print(json.dumps(worker))
    return 0
