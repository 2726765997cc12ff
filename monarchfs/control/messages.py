"""The control socket: one JSON object a line, one request and one reply a connection.

A request is ``{"command": ..., ...}``; a reply is ``{"ok": true, "result": {...}}`` or
``{"ok": false, "error": "one line"}``. The supervisor listens and answers ``status`` and ``umount``
itself; other commands reach the worker, together with the connection. Who may connect is decided by
the socket's mode (0600, the mount's user) and by SO_PEERCRED. All messages and limits are in
docs/CONTROL.md.

Paths are relative to the mount's root (``""`` is the root); bytes that are no text are lone
surrogates (os.fsencode undoes that). A command that takes long writes lines ``{"progress": {...}}``
before its reply, one every PROGRESS_SECONDS at least, also while the source hangs. Who asked gives
up after SILENCE_SECONDS without a line. A client that closes the connection wants no more: the next
line fails with EPIPE, and the worker ends the command (but a ``warm``, unless it only checks).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

MOST_REQUEST_BYTES = 64 << 10
MOST_REPLY_BYTES = 16 << 20
MOST_PATH_BYTES = 4096
MOST_NAME_BYTES = 255
PROGRESS_SECONDS = 5.0
SILENCE_SECONDS = 20.0

NO_WORKER = "the mount's worker does not answer: see monarchfs status"
"""The supervisor's words where no worker can be asked: another one is being started, say."""

_BATCH_BYTES = 48 << 10
"""Of paths, and what goes with them, in one request."""

Item = TypeVar("Item")


def encode_message(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def encode_result(result: Mapping[str, Any]) -> bytes:
    """The reply of a command that worked."""
    return encode_message({"ok": True, "result": result})


def encode_progress(progress: Mapping[str, Any]) -> bytes:
    """How far a long command has come, before its reply."""
    return encode_message({"progress": progress})


def encode_error(error: str) -> bytes:
    """The reply of a command that failed; ``error`` is one line."""
    return encode_message({"ok": False, "error": error})


def decode_message(line: bytes) -> dict[str, Any]:
    """The object on one line. Raises ValueError for anything else."""
    try:
        message = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def decode_request(line: bytes) -> dict[str, Any]:
    """A request, with the checks that all commands share, so that nothing strange reaches a worker.
    Raises ValueError, with the reason in one line."""
    request = decode_message(line)
    if not isinstance(request.get("command"), str):
        raise ValueError("it names no command")
    for name, value in request.items():
        for part in value if isinstance(value, list) else [value]:
            _check_value(name[:40], part, in_list=isinstance(value, list))
    paths = request.get("paths", [])
    if not isinstance(paths, list):
        raise ValueError("'paths' must be a list of strings")
    for path in paths:
        _check_path(path)
    timeout = request.get("timeout", 1.0)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
        raise ValueError("timeout must be a number of seconds above 0")
    return request


def _check_value(name: str, value: object, *, in_list: bool) -> None:
    if isinstance(value, str):
        try:
            plain = b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            plain = False
        if not plain:
            raise ValueError(f"{name!a} holds a character that no path can have")
    elif in_list:
        raise ValueError(f"{name!a} must be a list of strings")
    elif not (value is None or isinstance(value, (bool, int, float))):
        raise ValueError(f"{name!a} must be a plain value or a list of strings")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name!a} must be a finite number")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError(f"{name!a} must have less than 64 bits")


def _check_path(path: str) -> None:
    encoded = os.fsencode(path)
    if encoded.startswith(b"/") or b".." in encoded.split(b"/"):
        raise ValueError("a path must be relative to the mount's root and stay below it")
    if too_long(path):
        raise ValueError(f"a path is longer than {MOST_PATH_BYTES} bytes, or a name in it is")


def too_long(path: str) -> bool:
    """Whether the path, or a name in it, is too long for any file."""
    encoded = os.fsencode(path)
    return len(encoded) > MOST_PATH_BYTES or max(map(len, encoded.split(b"/"))) > MOST_NAME_BYTES


# Many paths, or weights of files, as several requests.


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """``items``, which JSON can carry, in lists that each fit into a request."""
    batch: list[Item] = []
    size = 0
    for item in items:
        needed = len(json.dumps(item)) + 2
        if batch and size + needed > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += needed
    if batch:
        yield batch


def weight_requests(weights: Iterable[tuple[str, float]], *, replace: bool) -> list[dict[str, Any]]:
    """Requests for (path below the mount's root, weight). All at once: what is wrong with the last
    of them is to be known before the first is sent. Raises ValueError for a weight that is none."""
    rows = list(batches((path, repr(checked(weight))) for path, weight in weights))
    return [
        {
            "command": "weigh",
            "paths": [path for path, _weight in batch],
            "weights": [weight for _path, weight in batch],
            "replace": replace and number == 0,
        }
        for number, batch in enumerate(rows or [[]] * replace)
    ]


def weights_of(request: Mapping[str, Any]) -> list[float]:
    """The weights of the request's paths. Raises ValueError."""
    values = request.get("weights")
    if not isinstance(values, list) or len(values) != len(request.get("paths", [])):
        raise ValueError("it has not one weight for each path")
    return [checked(float(value)) for value in values]


def checked(weight: float) -> float:
    """Raises ValueError for what is no weight."""
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"a weight is a number of at least 0, not {weight}")
    return float(weight)
