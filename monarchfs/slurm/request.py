"""What a job asks for: the grammar of ``--comment="monarchfs=..."`` and ``--monarchfs=...``.

::

    comment  = words, divided by blanks; one that begins with "monarchfs=" is a request
    request  = dataset { "," dataset }
    dataset  = path { ":" option }
    option   = name "=" value

A backslash takes the meaning from the character after it, and between quotation marks (") blanks,
commas and colons have none. What is no request of ours is not looked at. All of it is written by
users: nothing is expanded, and whatever is not exactly this is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from monarchfs.config.settings import parse_value
from monarchfs.types import UsageError

PREFIX = "monarchfs="
MOST_CHARACTERS = 16 << 10
MOST_DATASETS = 16
_MOST_PATH_BYTES = 4000
_BLANKS = " \t\r\n"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class Request:
    """One dataset. ``path`` is absolute, printable, without ``.`` and ``..``; ``name`` is for the
    variable in the job's environment, None for the path's last part; ``options`` are mount options,
    checked, in their order."""

    path: str
    name: str | None = None
    options: tuple[tuple[str, str], ...] = ()


def parse_comment(text: str) -> list[Request]:
    """The requests in a job's comment, in their order. Raises UsageError for a wrong one."""
    requests: list[Request] = []
    at = 0
    while at < len(text):
        end = _end_of(text, at, _BLANKS, quoting=text.startswith(PREFIX, at))
        if text.startswith(PREFIX, at):
            requests += parse_request(text[at + len(PREFIX) : end])
        at = end + 1
    return _limited(requests)


def parse_request(text: str) -> list[Request]:
    """The datasets of one request. Raises UsageError."""
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"a request of more than {MOST_CHARACTERS} characters: name fewer datasets"
        )
    return _limited([_dataset(part) for part in _split(text, ",")])


def parse_dataset_path(text: str) -> str:
    """A path that a job may name. Raises UsageError."""
    if not text.startswith("/"):
        raise UsageError(f"'{text[:80]}' is no dataset: name a directory by its whole path")
    # What is no text (lone surrogates) is printed escaped; control characters could forge lines.
    if any(not c.isprintable() and not "\udc80" <= c <= "\udcff" for c in text):
        raise UsageError(
            "the path of a dataset holds a character that cannot be printed: rename it"
        )
    parts = [part for part in text.split("/") if part]
    if not parts or "." in parts or ".." in parts:
        raise UsageError(f"'{text[:80]}' is no dataset: name a directory, without . and ..")
    path = "/" + "/".join(parts)
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise UsageError("the path of a dataset is no text: correct it") from None
    if size > _MOST_PATH_BYTES:
        raise UsageError(f"'{text[:80]}...' is too long for a path: name a shorter one")
    return path


def _dataset(text: str) -> Request:
    path, *words = (_plain(part) for part in _split(text, ":"))
    name: str | None = None
    options: dict[str, str] = {}
    plain = parse_dataset_path(path)
    for word in words:
        key, equals, value = word.partition("=")
        if key in options or (key == "name" and name is not None):
            raise UsageError(f"{plain}: option '{key}' is given twice: give it once")
        if key not in _OPTIONS or not equals:
            known = ", ".join(sorted(_OPTIONS))
            raise UsageError(
                f"{plain}: '{word[:80]}' is no option that a job may give: write OPTION=VALUE with"
                f" one of {known}"
            )
        _OPTIONS[key](value)
        if key == "name":
            name = value
        else:
            options[key] = value
    return Request(plain, name, tuple(options.items()))


def _check_name(value: str) -> None:
    if _NAME.fullmatch(value) is None:
        raise UsageError(
            f"'{value[:80]}' is no name for a variable: use letters, digits and _, 32 at most"
        )


def _check_prefetch(value: str) -> None:
    if value not in ("none", "access", "auto", "all"):
        raise UsageError(f"prefetch '{value[:80]}' is not for jobs: use none, access, auto or all")


def _check_setting(key: str) -> Callable[[str], None]:
    def check(value: str) -> None:
        parse_value(key, value, key)

    return check


_OPTIONS: Mapping[str, Callable[[str], None]] = {
    "name": _check_name,
    "prefetch": _check_prefetch,
    "freshness": _check_setting("freshness"),
    "evict": _check_setting("evict"),
}


def _limited(requests: list[Request]) -> list[Request]:
    if len(requests) > MOST_DATASETS:
        raise UsageError(f"{len(requests)} datasets are too many: name {MOST_DATASETS} at most")
    return requests


def _split(text: str, divider: str) -> list[str]:
    """The parts between unquoted dividers, still quoted."""
    parts = []
    at = 0
    while at <= len(text):
        end = _end_of(text, at, divider, quoting=True)
        parts.append(text[at:end])
        at = end + 1
    return parts


def _end_of(text: str, at: int, stops: str, *, quoting: bool) -> int:
    """Where the part that begins at ``at`` ends: at a stop, or with the text."""
    quoted = False
    while at < len(text):
        character = text[at]
        if quoting and character == "\\":
            at += 1
        elif quoting and character == '"':
            quoted = not quoted
        elif character in stops and not quoted:
            return at
        at += 1
    if quoted:
        raise UsageError("a quotation mark is not closed: close it")
    return len(text)


def _plain(text: str) -> str:
    """A part without its quoting."""
    plain = ""
    characters = iter(text)
    for character in characters:
        if character == "\\":
            following = next(characters, None)
            if following is None:
                raise UsageError("a backslash stands at the end: write two for one")
            plain += following
        elif character != '"':
            plain += character
    return plain
