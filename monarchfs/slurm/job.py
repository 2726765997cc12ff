"""The job of a prolog or epilog, as slurmd describes it in the environment, and what it asks for by
``--comment="monarchfs=..."`` or ``--monarchfs=...``. Prologs of other batch systems say both in
options.

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
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from monarchfs.config.settings import parse_value
from monarchfs.types import UsageError

PREFIX = "monarchfs="
MOST_CHARACTERS = 16 << 10
MOST_DATASETS = 16
_MOST_PATH_BYTES = 4000
_BLANKS = " \t\r\n"
_OPTIONS = ("evict", "freshness", "name", "prefetch", "profile")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_NUMBER = re.compile(r"[0-9]{1,10}")
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\[\]-]{0,63}")
"""Of any batch system; safe as a part of a file name."""
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}")


JobId = int | str
"""A number, as all of Slurm's are, or another batch system's name, as ``123[4].server``."""


@dataclass(frozen=True, slots=True)
class Request:
    """One dataset. ``path`` is absolute, printable, without ``.`` and ``..``; ``name`` is for the
    variable in the job's environment, None for the path's last part; ``options`` are mount options,
    checked, in their order."""

    path: str
    name: str | None = None
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """``requests`` are the job's own; ``mistake`` says why its request is refused. ``nodes`` is how
    many it runs on, ``node_list`` which ones, in Slurm's notation.
    ``by_slurm``: Slurm runs it, and knows when it is over."""

    id: JobId
    uid: int
    user: str
    account: str
    partition: str
    node: str
    requests: tuple[Request, ...] = ()
    mistake: str | None = None
    nodes: int = 1
    node_list: str = ""
    by_slurm: bool = True


def parse_job_id(text: str) -> JobId:
    """Raises UsageError for what no batch system calls a job."""
    if JOB_ID.fullmatch(text) is None:
        raise UsageError(f"'{text[:40]}' is no job: give its number or name, as the queue shows it")
    return int(text) if text.isdecimal() else text


def job_ids(names: Iterable[str]) -> list[JobId]:
    """The jobs that files are named after, in the order of their numbers."""
    found = [parse_job_id(name) for name in names if JOB_ID.fullmatch(name)]
    return sorted(found, key=lambda job: (len(str(job)), str(job)))


def job_from(environ: Mapping[str, str]) -> Job:
    """What slurmd says (prolog and epilog guide of Slurm). A wrong request is a ``mistake``, not an
    error: the job runs without. Raises UsageError outside of Slurm."""
    if "SLURM_JOB_ID" not in environ:
        raise UsageError("there is no SLURM_JOB_ID: this is for Slurm's prolog and epilog")
    job = environ["SLURM_JOB_ID"]
    if _NUMBER.fullmatch(job) is None or not 0 < int(job) < 1 << 32:
        raise UsageError(f"SLURM_JOB_ID is '{job[:40]}', no number: this is for Slurm's prolog")
    uid = environ.get("SLURM_JOB_UID", "")
    if _NUMBER.fullmatch(uid) is None or int(uid) >= (1 << 32) - 1:
        raise UsageError("SLURM_JOB_UID is no number: this is for Slurm's prolog and epilog")
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    requests: list[Request] = []
    mistake = None
    try:
        requests = _requested(environ)
    except UsageError as error:
        mistake = str(error)
    return Job(
        id=int(job),
        uid=int(uid),
        user=environ.get("SLURM_JOB_USER", ""),
        account=environ.get("SLURM_JOB_ACCOUNT", ""),
        partition=environ.get("SLURM_JOB_PARTITION", ""),
        node=node_name(environ),
        requests=tuple(requests),
        mistake=mistake,
        nodes=int(nodes) if _NUMBER.fullmatch(nodes) else 1,
        # The first one in later releases of Slurm.
        node_list=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""),
    )


def node_name(environ: Mapping[str, str]) -> str:
    """This node's name in Slurm, else in the network; safe as part of a file name."""
    name = environ.get("SLURMD_NODENAME", "")
    if NODE.fullmatch(name) is None:
        name = socket.gethostname().partition(".")[0]
    return name if NODE.fullmatch(name) else "node"


def _requested(environ: Mapping[str, str]) -> list[Request]:
    # The plugin's environment reaches a prolog with this prefix (spank_job_control_setenv).
    plugin, comment = environ.get("SPANK_MONARCHFS", ""), environ.get("SLURM_JOB_COMMENT", "")
    if len(plugin) + len(comment) > MOST_CHARACTERS:
        raise UsageError(f"a comment of more than {MOST_CHARACTERS} characters: make it shorter")
    return (parse_request(plugin) if plugin else []) + parse_comment(comment)


# Its requests


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


def parse_requests(texts: Sequence[str]) -> list[Request]:
    """The datasets of several requests. Raises UsageError."""
    return _limited([request for text in texts for request in parse_request(text)])


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
            known = ", ".join(_OPTIONS)
            raise UsageError(
                f"{plain}: '{word[:80]}' is no option that a job may give: write OPTION=VALUE with"
                f" one of {known}"
            )
        _check_option(key, value)
        if key == "name":
            name = value
        else:
            options[key] = value
    return Request(plain, name, tuple(options.items()))


def _check_option(key: str, value: str) -> None:
    match key:
        case "name" if _NAME.fullmatch(value) is None:
            raise UsageError(
                f"'{value[:80]}' is no name for a variable: use letters, digits and _, 32 at most"
            )
        case "prefetch" if value not in ("none", "access", "auto", "all"):
            raise UsageError(
                f"prefetch '{value[:80]}' is not for jobs: use none, access, auto or all"
            )
        case "freshness" | "evict" | "profile":
            parse_value(key, value, key)


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
