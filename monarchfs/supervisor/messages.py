"""What a worker says, checked. Pure: no I/O.

A worker may have been taken over. Each message becomes one of the types below, with every part
checked, or MalformedMessage. Nobody else looks at the raw message.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from monarchfs.system import escaping

MOST_WORDS = 500
"""Characters of a worker's that a log line or an error message gets."""

MOST_OFFERED = 32
"""Files in one message."""

_MOST_DEPTH = 8
_MOST_NUMBER = 1 << 64
_NAME = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_PATH = re.compile(f"{_NAME}(?:/{_NAME}){{0,7}}")
"""Names of replicas, and of the directories that they lie in, are plain."""

_OBJECTS = frozenset(
    (
        *("files", "source_io", "served", "passthrough", "prefetch", "evictions", "replicas"),
        *("touch", "index", "requests", "worker"),
    )
)
"""Values of a status that are objects."""

_MISSING = object()


class MalformedMessage(ValueError):
    """A message that makes no sense; the text says why, in one line of printable characters."""


class WorkerLoaded(NamedTuple):
    """It could take over, and has touched nothing yet."""


class Ready(NamedTuple):
    """It answers requests."""


class Failed(NamedTuple):
    """It could not start. ``error`` is one line of printable characters."""

    error: str


class StatusReport(NamedTuple):
    """The answer to question ``number``. ``status`` holds finite numbers of 64 bits, is not deep,
    and its known parts have the types of docs/USAGE.md; ``dropped`` counts values that had not."""

    number: int
    status: Mapping[str, Any]
    dropped: int


class Offer(NamedTuple):
    """A file that the kernel is to read. ``tier`` is the tier's place in the configuration,
    ``path`` is of plain names below the dataset's directory there, ``ino`` is of stat(2)."""

    tier: int
    path: str
    ino: int


class Back(NamedTuple):
    """Let the kernel read these files itself."""

    number: int
    offers: tuple[Offer, ...]


class Unback(NamedTuple):
    """Close these backing files."""

    number: int
    ids: tuple[int, ...]


Message = WorkerLoaded | Ready | Failed | StatusReport | Back | Unback


def parse(content: bytes) -> Message:
    """The message in a datagram. Raises Malformed."""
    message = _decode(content)
    match message.get("event"):
        case "loaded":
            return WorkerLoaded()
        case "ready":
            return Ready()
        case "failed":
            error = message.get("error")
            if not isinstance(error, str):
                raise MalformedMessage("it failed and does not say why")
            return Failed(printable(error))
        case "status":
            return _report(message)
        case "back":
            offers = message.get("files")
            if not isinstance(offers, list) or len(offers) > MOST_OFFERED:
                raise MalformedMessage(f"it offers what is no list of {MOST_OFFERED} files at most")
            return Back(_number(message), tuple(map(_offer, offers)))
        case "unback":
            ids = message.get("ids")
            if not isinstance(ids, list):
                raise MalformedMessage("it gives back what is no list")
            # Ids that make no sense are none of its own.
            return Unback(_number(message), tuple(one for one in ids if _is_number(one)))
        case event:
            raise MalformedMessage(f"it says {printable(ascii(event), 60)}, which is no event")


def printable(text: str, most: int = MOST_WORDS) -> str:
    """``text`` as one short line that moves no cursor and forges no other line."""
    cut = text[:most]
    shown = escaping.printable(cut)
    return shown if cut == text else f"{shown}... ({len(text)} characters)"


def _decode(content: bytes) -> dict[str, Any]:
    try:
        message = json.loads(content.decode())
    except UnicodeDecodeError:
        raise MalformedMessage("it is no text") from None
    except RecursionError:
        raise MalformedMessage("it is nested too deeply") from None
    except ValueError as error:
        raise MalformedMessage(f"it is no JSON: {printable(str(error), 100)}") from None
    if not isinstance(message, dict):
        raise MalformedMessage("it is no JSON object")
    return message


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_NUMBER


def _number(message: Mapping[str, Any]) -> int:
    number = message.get("number")
    if not _is_number(number):
        raise MalformedMessage("it has no number")
    assert isinstance(number, int)
    return number


def _offer(given: object) -> Offer:
    match given:
        case [int(tier), str(path), int(ino)] if _is_number(tier) and _is_number(ino):
            if _PATH.fullmatch(path):
                return Offer(tier, path, ino)
    raise MalformedMessage("it offers what is no file")


def _report(message: Mapping[str, Any]) -> StatusReport:
    number, given = _number(message), message.get("status")
    if not isinstance(given, dict):
        return StatusReport(number, {}, 1)
    dropped: list[str] = []
    known = {name: value for name, value in given.items() if _has_its_type(name, value)}
    status = _plain(known, _MOST_DEPTH, dropped)
    return StatusReport(number, status, len(dropped) + len(given) - len(known))


def _has_its_type(name: str, value: object) -> bool:
    if name in _OBJECTS:
        return isinstance(value, dict)
    if name in ("tiers", "other_tiers"):
        return isinstance(value, list) and all(isinstance(tier, dict) for tier in value)
    return name != "state" or isinstance(value, str)


def _plain(value: Any, depth: int, dropped: list[str]) -> Any:
    """``value`` without parts that are too deep and numbers that others do not understand, which
    are counted in ``dropped``."""
    if isinstance(value, (dict, list)) and not depth:
        dropped.append("depth")
        return _MISSING
    if isinstance(value, dict):
        pairs = ((name, _plain(one, depth - 1, dropped)) for name, one in value.items())
        return {name: one for name, one in pairs if one is not _MISSING}
    if isinstance(value, list):
        found = (_plain(one, depth - 1, dropped) for one in value)
        return [one for one in found if one is not _MISSING]
    if isinstance(value, (int, float)) and not (
        math.isfinite(value) if isinstance(value, float) else abs(value) < _MOST_NUMBER
    ):
        dropped.append("number")
        return _MISSING
    return value
