"""What commands print: standard output and error, how far a command is, numbers for people.

Streams may be closed, full, or without a reader. What cannot be written to standard error is
dropped and never changes the outcome of a command. Python alone would end with exit code 120
(``sys.exit``).
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from monarchfs.system.escaping import printable
from monarchfs.system.sizes import format_bytes, format_count
from monarchfs.types import OperationError

Report = Mapping[str, Any]
"""What a mount says of itself; of another version, perhaps."""

_EVERY_SECONDS = 0.1
_CLEAR = "\r\033[K"


class _Lossy(io.FileIO):
    """A descriptor that accepts everything, even what it cannot write."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        left = memoryview(data).cast("B")
        size = left.nbytes
        with suppress(OSError):  # nowhere to tell that the place for telling is full or gone
            while left:
                left = left[os.write(self.fileno(), left) :]
        return size


def prepare_streams() -> None:
    """Opens /dev/null for closed standard descriptors, so that no other file gets their numbers,
    and there are a `sys.stdin` and a `sys.stdout`; and lets `sys.stderr` drop what cannot be
    written. Programs run later get them closed as they were (O_CLOEXEC)."""
    while (lowest := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(lowest)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a letter that its encoding has not
    if sys.stderr is sys.__stderr__:
        # Unbuffered: a child that is forked must not print again what its parent has printed.
        sys.stderr = io.TextIOWrapper(
            _Lossy(2, "w", closefd=False),
            encoding=getattr(sys.stderr, "encoding", None),
            errors="backslashreplace",
            line_buffering=True,
            write_through=True,
        )


def complain(message: str, code: int, program: str = "monarchfs") -> int:
    """Prints an error as the one line it has to be; returns ``code``."""
    # A path may hold a line break, bytes that are no text, and what moves a terminal's cursor.
    print(f"{program}: {printable(' '.join(message.splitlines()))}", file=sys.stderr)
    return code


def output_written(code: int, program: str = "monarchfs") -> int:
    """The exit code once all output is written: a full disk fails a command that did everything
    else, a reader who left does not."""
    try:
        sys.stdout.flush()
        return code
    except OSError as error:
        # What is left in the buffer must not fail again when the interpreter ends.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if code or isinstance(error, BrokenPipeError):
            return code
        return complain(f"cannot write the output: {error.strerror}", 1, program)


def show_result(arguments: Namespace, result: object, text: str | Iterable[str]) -> None:
    """Prints what a command found: as an object with --json, else as text."""
    lines = [json.dumps(result)] if arguments.json else [text] if isinstance(text, str) else [*text]
    if lines:
        print("\n".join(lines))


def failed(arguments: Namespace, why: str) -> int:
    """The exit code of a command of which a part failed, for programs, which read of it in the
    result. For people raises OperationError."""
    if arguments.json:
        return 1
    raise OperationError(why)


# How far a command is.


class Progress(AbstractContextManager["Progress"]):
    """One line on a terminal, until the block ends; nothing elsewhere. ``clear`` it before other
    output."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = False
        self._next = 0.0

    def __exit__(self, *_raised: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Puts ``text`` in place of what is there, a few times a second at most."""
        now = time.monotonic()
        if not self._terminal or now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        print(_CLEAR + printable(text)[: width - 1], end="", file=sys.stderr, flush=True)
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
            self._shown = False
            self._next = 0.0


# Numbers for people.


def labelled(label: str, text: str) -> str:
    """A line below a heading: what it is about, then the text."""
    return f"  {label:<9} {text}"


def format_share(part: float, whole: float) -> str:
    """Per cent; ``-`` of nothing. 100% only of all, 0% only of nothing."""
    if whole <= 0:
        return "-"
    percent = 100 * part / whole
    if 0 < part < whole:
        percent = min(max(percent, 0.1), 99.9)
    return f"{percent:.1f}%" if 0 < percent < 100 else f"{percent:.0f}%"


def renumbered_text(files: int) -> str:
    """What a source does that gives its files other inode numbers."""
    return (
        f"the source changes inode numbers: {files:,} unchanged files were taken for others, and"
        " are copied again (TROUBLESHOOTING, Speed)"
    )


def list_row(report: Report) -> list[str]:
    """A mount's line in the list of mounts: its names, what is resident, how much is local, what is
    used."""
    names = [printable(report.get(key, "?")) for key in ("mountpoint", "source", "state")]
    names[2] += ", private" if report.get("private") else ""
    if "files" not in report:
        return [*names, "-", "-", "-"]
    served, tiers = report.get("served", {}), report.get("tiers", ())
    local = served.get("local_opens", 0)
    used, capacity = (
        sum(tier.get(key, 0) for tier in tiers) for key in ("used_bytes", "capacity_bytes")
    )
    return [
        *names,
        format_count(report["files"].get("resident", 0)),
        format_share(local, local + served.get("peer_opens", 0) + served.get("source_opens", 0)),
        f"{format_bytes(used)} of {format_bytes(capacity)}",
    ]
