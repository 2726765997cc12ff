"""``monarchfs weigh``: tell a mount how often files will be read, compared with others."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from monarchfs.cli.ask import add, ask, below, opened_list
from monarchfs.cli.progress import Progress
from monarchfs.cli.text import counted
from monarchfs.config.places import search_of
from monarchfs.config.values import parse_path
from monarchfs.control.weights import checked, weight_requests
from monarchfs.supervisor.recover import required
from monarchfs.types import OperationError, UsageError


def weigh_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Sends the weights; 1 if the mount does not know one of the files. Raises UsageError,
    OperationError."""
    name, typed = arguments.file, parse_path(arguments.mountpoint)
    found = required(typed, search_of(environ))
    total: dict[str, Any] = {"files": 0, "unknown": 0, "first_unknown": ""}
    with Progress() as progress, opened_list(name) as lines:
        weights = _weights(lines, name, (typed, found.mountpoint))
        for request in weight_requests(weights, replace=arguments.replace):
            total = add(total, ask(found, request, lambda so_far: None))
            progress.show(f"weigh: {total['files']} files")
    print(json.dumps(total) if arguments.json else f"weighed {counted(total['files'], 'file')}")
    if total["unknown"] and not arguments.json:
        path = os.path.join(found.mountpoint, total["first_unknown"])
        more = f" (and {total['unknown'] - 1:,} more)" if total["unknown"] > 1 else ""
        raise OperationError(f"no weight for {path}{more}: no such file in the mount, or empty")
    return int(bool(total["unknown"]))


def _weights(file: BinaryIO, name: str, mountpoints: Sequence[str]) -> Iterator[tuple[str, float]]:
    """(path below the mount, weight) of each line."""
    for number, line in enumerate(file, 1):
        weight, tab, path = line.rstrip(b"\n").partition(b"\t")
        try:
            if not tab:
                raise ValueError("a line is a weight, a tab and a path")
            yield below(os.fsdecode(path), mountpoints), checked(_number(weight))
        except (ValueError, UsageError) as exc:
            raise UsageError(f"{name}, line {number}: {exc}") from None


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a weight is a number, not {os.fsdecode(text)}") from None
