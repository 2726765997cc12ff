"""``monarchfs peers``: whom a mount shares with, and another list of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from monarchfs.cli.text import format_count, printable
from monarchfs.config.places import search_of
from monarchfs.control.client import request
from monarchfs.supervisor.recover import require_daemon
from monarchfs.system.sizes import format_bytes, format_seconds, in_columns
from monarchfs.types import UsageError

_ASK_SECONDS = 5.0
_HEADINGS = ("peer", "state", "has", "gave", "bytes", "a file", "fallbacks")


def peers_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Shows the peers, or changes their list; 0. Raises UsageError or OperationError."""
    if bool(arguments.action) != bool(arguments.node):
        raise UsageError("say add or remove, and which nodes: see monarchfs peers --help")
    daemon = require_daemon(arguments.mountpoint, search_of(environ))
    if arguments.action:
        message = {"command": "change_peers", arguments.action: arguments.node}
        timeout = arguments.timeout
        result = request(daemon, {**message, "timeout": timeout}, timeout)
        print(json.dumps(result) if arguments.json else "\n".join(result["nodes"]))
        return 0
    result = request(daemon, {"command": "peers"}, _ASK_SECONDS)
    server = request(daemon, {"command": "status"}, _ASK_SECONDS).get("peer_server")
    result["peer_server"] = server
    print(json.dumps(result) if arguments.json else "\n".join(_lines(result)))
    return 0


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for this node, and a table of the others."""
    pid = (report.get("peer_server") or {}).get("pid")
    serves = f"nginx is process {pid}" if pid else "nginx does not run: peers get nothing from here"
    yield printable(f"this node: {_place(report)}; {serves}")
    yield from in_columns([_HEADINGS, *map(_row, report["peers"])], 2)


def _place(node: Mapping[str, Any]) -> str:
    name, address = node["name"], node["address"]
    host = f"[{address}]" if ":" in address else address
    return f"{name}:{node['port']}" if name == address else f"{name}={host}:{node['port']}"


def _row(peer: Mapping[str, Any]) -> tuple[str, ...]:
    files = peer["read_files"]
    return (
        printable(_place(peer)),
        printable(state_of(peer)),
        format_count(peer["has_files"]),
        format_count(files),
        format_bytes(peer["read_bytes"]),
        format_seconds(peer["read_seconds"] / files) if files else "-",
        format_count(peer["failed"] + peer["wrong"]),
    )


def state_of(peer: Mapping[str, Any]) -> str:
    """Whether a peer answers, in a few words."""
    if peer["error"]:
        return f"does not answer: {peer['error']}"
    if peer["avoided"]:
        return "avoided: it failed a moment ago"
    if not peer["answered"]:
        return "its catalogue is being read"
    return f"answered {format_seconds(peer['answer_age_seconds'] or 0)} ago"
