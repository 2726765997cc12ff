"""``monarchfs weigh``: tell a mount how often files will be read, compared with others."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from monarchfs.cli.ask import add, ask, below, opened_list
from monarchfs.cli.progress import Progress
from monarchfs.config.places import search_of
from monarchfs.config.values import parse_path
from monarchfs.control.weights import checked, weight_requests
from monarchfs.supervisor.recover import required
from monarchfs.types import UsageError


def weigh_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Sends the weights; 1 if the mount does not know one of the files. Raises UsageError,
    OperationError."""
    name, typed = arguments.file, parse_path(arguments.mountpoint)
    found = required(typed, search_of(environ))
    total: dict[str, Any] = {"files": 0, "unknown": 0}
    with Progress() as progress, opened_list(name) as lines:
        weights = _weights(lines, name, (typed, found.mountpoint))
        for request in weight_requests(weights, replace=arguments.replace):
            total = add(total, ask(found, request, lambda so_far: None))
            progress.show(f"weigh: {total['files']} files")
    text = f"weighed {total['files']} file{'' if total['files'] == 1 else 's'}"
    text += f", {total['unknown']} are not in the mount" if total["unknown"] else ""
    print(json.dumps(total) if arguments.json else text)
    return int(bool(total["unknown"]))


def _weights(file: BinaryIO, name: str, mountpoints: Sequence[str]) -> Iterator[tuple[str, float]]:
    """(path below the mount, weight) of each line."""
    for number, line in enumerate(file, 1):
        weight, tab, path = line.rstrip(b"\n").partition(b"\t")
        try:
            if not tab:
                raise ValueError("a line is a weight, a tab and a path")
            yield below(os.fsdecode(path), mountpoints), checked(float(weight))
        except (ValueError, UsageError) as exc:
            raise UsageError(f"{name}, line {number}: {exc}") from None
