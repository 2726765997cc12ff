"""Settings in TOML files: one that the user names, else the machine's own.

Errors name the file, line and key.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from typing import Any, BinaryIO

from monarchfs.config.options import OPTIONS
from monarchfs.config.settings import Layer, nearest, parse_value
from monarchfs.types import UsageError

SYSTEM_FILE = "/etc/monarchfs.toml"
"""Defaults of this machine, for root and for users, where no other file is named."""

_LARGEST_FILE = 1 << 20
_PLACE = re.compile(r" *\(at (?:line (?P<line>\d+), column \d+|end of document)\)$")
_KEY = re.compile(r"\s*(?P<quote>[\"']?)(?P<key>[A-Za-z0-9_-]+)(?P=quote)\s*=")


def from_file(path: str) -> Layer:
    """The layer that a TOML file makes. Raises UsageError for what it cannot take."""
    try:
        with open(path, "rb") as file:
            content = read_limited(file)
    except OSError as error:
        raise _unreadable(path, error) from None
    return from_content(path, content)


def read_limited(file: BinaryIO) -> bytes:
    """The content for `from_content`; one byte too many of a file that is too large."""
    return file.read(_LARGEST_FILE + 1)


def from_system_file(path: str = SYSTEM_FILE) -> Layer:
    """The layer of the machine's file, empty if there is none.

    Raises UsageError like `from_file`, and if others than root could have written the file: it says
    where root's mounts keep their data. Root is who owns ``/``: in a user namespace without root it
    has another number.
    """
    content = read_trusted(path)
    return {} if content is None else from_content(path, content)


def read_trusted(path: str) -> bytes | None:
    """The content of a file that only root can have written; None if there is none. Raises
    UsageError for any other file."""
    try:
        with open(path, "rb") as file:
            st = os.fstat(file.fileno())
            if not stat.S_ISREG(st.st_mode) or st.st_uid not in (0, os.stat("/").st_uid):
                raise UsageError(
                    f"configuration {path} is not a file of root's: chown root {path}, or name"
                    " another with --config"
                )
            if st.st_mode & 0o022:
                raise UsageError(
                    f"configuration {path} can be written by others: chmod 644 {path}, or name"
                    " another with --config"
                )
            return read_limited(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None


def toml_table(path: str, content: bytes) -> dict[str, Any]:
    """The table of a TOML document. Raises UsageError, with file and line."""
    return _parsed(path, content)[0]


def _parsed(path: str, content: bytes) -> tuple[dict[str, Any], str]:
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml  # type: ignore[import-not-found, unused-ignore]
    if len(content) > _LARGEST_FILE:
        raise UsageError(f"configuration {path} is larger than 1 MiB: name a TOML file")
    try:
        text = content.decode()
        table: dict[str, Any] = toml.loads(text)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"configuration {path}, line {line}: not TOML: no UTF-8 text: correct it"
        ) from None
    except toml.TOMLDecodeError as error:
        raise _not_toml(path, text, str(error)) from None
    except RecursionError:
        raise UsageError(f"configuration {path}: not TOML: nested too deeply: correct it") from None
    except ValueError as error:  # int() takes no more than 4300 digits
        raise UsageError(f"configuration {path}: {error}: correct it") from None
    return table, text


def from_content(path: str, content: bytes) -> Layer:
    """The layer of a file's content. Raises UsageError, with file, line and key."""
    table, text = _parsed(path, content)
    layer: dict[str, object] = {}
    for name, value in table.items():
        key = name.replace("-", "_")
        place = f"configuration {path}{_line_of(name, text)}"
        if key not in OPTIONS:
            raise UsageError(f"{place}: key '{name}' is not known: {nearest(key)}")
        if key in layer:
            raise UsageError(f"{place}: {key} is given twice: write it once")
        layer[key] = parse_value(key, value, f"{place}: {name}")
    return layer


def _unreadable(path: str, error: OSError) -> UsageError:
    return UsageError(
        f"cannot read configuration {path}: {error.strerror}: give a file that you may read"
    )


def _not_toml(path: str, text: str, complaint: str) -> UsageError:
    place, remedy = f"configuration {path}", "correct it"
    found = _PLACE.search(complaint)
    if found is not None:
        complaint = complaint[: found.start()]
        lines = text.rstrip().split("\n")
        number = int(found["line"] or len(lines))
        place += f", line {number}"
        key = _KEY.match(lines[number - 1]) if number <= len(lines) else None
        if key is not None:
            place += f": {key['key']}"
            if complaint.startswith(("Invalid value", "Expected newline")):
                remedy = f'text stands in quotes, as in {key["key"]} = "VALUE"'
    return UsageError(f"{place}: not TOML: {' '.join(complaint.split())}: {remedy}")


def _line_of(name: str, text: str) -> str:
    """Where a key or table of the top level begins, as far as the lines tell."""
    begins = re.compile(rf"\s*\[*\s*([\"']?){re.escape(name)}\1\s*[].=]")
    for number, line in enumerate(text.split("\n"), 1):
        if begins.match(line):
            return f", line {number}"
    return ""
