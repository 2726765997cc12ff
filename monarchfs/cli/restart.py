"""``monarchfs restart``: another worker under a mount that is in use."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from monarchfs.config.places import search_of
from monarchfs.config.values import parse_path, parse_timeout
from monarchfs.control.client import request
from monarchfs.supervisor.recover import required


def restart_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0 when the new worker serves. Raises UsageError, or OperationError where the mount
    goes on with the old one, or did not say within ``--timeout`` seconds."""
    timeout = parse_timeout(arguments.timeout)
    path = parse_path(arguments.mountpoint)
    found = required(path, search_of(environ))
    worker = request(found.daemon, {"command": "restart", "timeout": timeout}, timeout)
    if arguments.json:
        print(json.dumps(worker))
    return 0
