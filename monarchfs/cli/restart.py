"""``monarchfs restart``: another worker under a mount that is in use."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from monarchfs.config.places import search_of
from monarchfs.control.client import request
from monarchfs.supervisor.recover import required


def restart_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0 when the new worker serves. Raises UsageError, or OperationError where the mount
    goes on with the old one, or did not say within ``--timeout`` seconds."""
    found = required(arguments.mountpoint, search_of(environ))
    message = {"command": "restart", "timeout": arguments.timeout}
    worker = request(found.daemon, message, arguments.timeout)
    if arguments.json:
        print(json.dumps(worker))
    return 0
