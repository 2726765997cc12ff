"""``monarchfs order``: tell a mount in which order files will be read."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from monarchfs.cli.ask import CONNECT_SECONDS, below, opened_list
from monarchfs.config.places import search_of
from monarchfs.config.values import parse_path
from monarchfs.control.client import connect
from monarchfs.supervisor.recover import required
from monarchfs.types import UsageError

_LINES_BYTES = 1 << 20
"""About so many bytes of a list are sent together."""


def order_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Raises UsageError, OperationError."""
    if arguments.file.count("-") > 1:
        raise UsageError("standard input can be one list only")
    typed = parse_path(arguments.mountpoint)
    found = required(typed, search_of(environ))
    total = 0
    for file in arguments.file:
        with opened_list(file) as lines, connect(found.daemon, CONNECT_SECONDS) as to:
            request = {"command": "order", "stream": os.path.basename(file)}
            parts = _parts(lines, (typed, found.mountpoint), inodes=arguments.inodes)
            total += int(to.send_list(request, parts).get("files", 0))
    if arguments.json:
        print(json.dumps({"files": total}))
    else:
        print(f"announced: {total:,} {'file' if total == 1 else 'files'}")
    return 0


def _parts(lines: BinaryIO, mountpoints: tuple[str, str], *, inodes: bool) -> Iterator[bytes]:
    """The list as the worker takes it. Raises UsageError, OperationError."""
    while some := lines.readlines(_LINES_BYTES):
        words = [word for line in some if (word := line.rstrip(b"\r\n"))]
        if inodes:
            if not all(word.isdigit() for word in words):
                raise UsageError("with --inodes, each line is an inode number")
            names = [b"/" + word for word in words]
        else:
            names = [os.fsencode(below(os.fsdecode(word), mountpoints)) for word in words]
        yield b"".join(name + b"\0" for name in names)
