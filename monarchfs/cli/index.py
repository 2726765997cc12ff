"""``monarchfs index export``: one look at a dataset, in a file for other nodes."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from monarchfs.cli.progress import Progress
from monarchfs.cli.text import printable
from monarchfs.config.values import parse_path
from monarchfs.doctor.source import refuse_ours
from monarchfs.metadata.snapshot_export import Exported, export
from monarchfs.system.bounded import Tell, bounded_talk, bounded_value
from monarchfs.system.sizes import format_bytes, format_seconds
from monarchfs.types import OperationError, UsageError

_SOURCE_SECONDS = 10.0
_SILENCE_SECONDS = 60.0
_TELL_SECONDS = 0.2


def index_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Writes the file, whole or not at all. Raises UsageError, or OperationError where the source
    does not answer or the file cannot be written."""
    refuse_ours(parse_path(arguments.source))
    source, path = _directory(arguments.source), arguments.file
    started = time.monotonic()
    with _new_file(path) as descriptor, Progress() as progress:

        def heard(so_far: Mapping[str, int]) -> None:
            directories, names = so_far["directories"], so_far["entries"]
            progress.show(f"looking at {source}: {directories} directories, {names} names")

        found = bounded_talk(
            lambda tell: _export(source, descriptor, tell),
            silence=_SILENCE_SECONDS,
            overdue=f"source {source} did not answer for {_SILENCE_SECONDS:g} s: nothing was"
            " written",
            heard=heard,
            keep=[descriptor],
        )
    result = {
        "source": source,
        "file": path,
        "bytes": os.stat(path).st_size,
        "seconds": round(time.monotonic() - started, 3),
        **found,
    }
    print(json.dumps(result) if arguments.json else _text(result))
    return 0


def _text(result: Mapping[str, Any]) -> str:
    size, seconds = format_bytes(result["bytes"]), format_seconds(result["seconds"])
    lines = [
        f"{result['file']}: {result['entries']} names in {result['directories']} directories,"
        f" {size}, {seconds}"
    ]
    if result["unreadable"]:
        lines.append(f"{result['unreadable']} directories could not be listed")
    if result["unknown"]:
        lines.append(f"{result['unknown']} names changed meanwhile: mounts ask the source for them")
    return "\n".join(map(printable, lines))


def _directory(path: str) -> str:
    def call() -> str:
        try:
            real = os.path.realpath(parse_path(path), strict=True)
            os.scandir(real).close()
        except OSError as error:
            problem = f"source {path} cannot be listed: {error.strerror}"
            raise UsageError(f"{problem}: name the dataset's directory") from None
        return real

    real = bounded_value(
        call,
        timeout=_SOURCE_SECONDS,
        overdue=f"source {path} did not answer within {_SOURCE_SECONDS:g} s: check its file system",
    )
    return str(real)


def _export(source: str, descriptor: int, tell: Tell) -> dict[str, int]:
    """In a child, which can be given up if the source hangs."""
    next_time = 0.0

    def now_and_then(so_far: Exported) -> None:
        nonlocal next_time
        if time.monotonic() >= next_time:
            next_time = time.monotonic() + _TELL_SECONDS
            tell(asdict(so_far))

    try:
        with open(descriptor, "wb", closefd=False) as file:
            return asdict(export(source, file, now_and_then))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OperationError(
            f"the index of {source} cannot be exported: {error.strerror}"
        ) from None


@contextmanager
def _new_file(path: str) -> Iterator[int]:
    """A new file, which takes the place of ``path`` at the end, and is gone if that does not come.
    Raises OperationError."""
    remedy = "name a file in a directory of yours"
    directory, name = os.path.split(path)
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(0, "Is a directory")
        descriptor, temporary = tempfile.mkstemp("", f".{name}.", directory)
    except OSError as error:
        raise OperationError(f"{path} cannot be written: {error.strerror}: {remedy}") from None
    try:
        yield descriptor
        umask = os.umask(0)
        os.umask(umask)
        try:
            os.fchmod(descriptor, 0o666 & ~umask)
            os.rename(temporary, path)
        except OSError as error:
            raise OperationError(f"{path} cannot be written: {error.strerror}: {remedy}") from None
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(temporary)
