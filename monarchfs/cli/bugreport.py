"""``monarchfs bugreport``: an archive with what a report of a problem needs."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from monarchfs.cli.output import Progress, show_result
from monarchfs.cli.status import mounts_on, report_of
from monarchfs.config.places import (
    DefaultPlaces,
    build_config,
    default_places,
    places_without_home,
    resolve_user,
    search_of,
)
from monarchfs.config.settings import Settings
from monarchfs.config.values import parse_path
from monarchfs.doctor.bugreport import (
    CollectedPart,
    NameDigests,
    Subject,
    collect,
    readme_of,
    told_config,
    write_archive,
)
from monarchfs.fuse.mountinfo import storage_of
from monarchfs.supervisor.recover import FoundMount
from monarchfs.system.bounded import answer_within, bounded_call
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import counted, format_bytes
from monarchfs.types import OperationError, UsageError

_FILE_SECONDS = 5.0
_SUFFIX = ".tar.gz"


def bugreport_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Writes the archive, and prints what is in it; within about two minutes, whatever hangs. If it
    fails, or is interrupted, it leaves no file."""
    top = f"monarchfs-bugreport-{time.strftime('%Y%m%d-%H%M%S')}"
    output = parse_path(arguments.output or top + _SUFFIX)
    found = mounts_on(arguments.mountpoint, search_of(environ))[0]
    found.refuse_others()
    subject = _subject(found, environ)
    names = None if arguments.with_names else NameDigests((found.source, found.mountpoint))
    with ExitStack() as undo:
        # At once, so that a file that cannot be made is told before all the work.
        descriptor = _created(output, undo)
        parts = _parts(subject, names)
        readme = readme_of(subject, parts, with_names=arguments.with_names)
        try:
            with open(descriptor, "wb") as file:
                write_archive(file, top, parts, readme)
        except OSError as error:
            raise OperationError(
                f"{output} cannot be written: {error.strerror}: name another file with -o"
            ) from None
        undo.pop_all()
    size = os.stat(output).st_size
    result = {
        "file": output,
        "size_bytes": size,
        "with_names": arguments.with_names,
        "parts": [
            {"name": one.part.name, "bytes": len(one.content), "trouble": one.trouble or None}
            for one in parts
        ],
    }
    missing = [one.part.name for one in parts if one.trouble]
    text = f"{printable(output)}, {format_bytes(size)}: {counted(len(parts), 'part')} about"
    text += f" {printable(found.mountpoint)}, without contents of files and keys"
    text += "" if arguments.with_names else ", and without names of files"
    text += f"; missing, or not complete: {', '.join(missing)}" if missing else ""
    show_result(arguments, result, text)
    return 0


def _parts(subject: Subject, names: NameDigests | None) -> list[CollectedPart]:
    parts = []
    with Progress() as progress:
        for step in collect(subject, names):
            if isinstance(step, CollectedPart):
                parts.append(step)
            else:
                progress.clear()  # the next one may take long: it is shown in any case
                progress.show(f"bugreport: {step}")
    return parts


def _subject(found: FoundMount, environ: Mapping[str, str]) -> Subject:
    """How the mount is asked, and what its options are, or else the defaults."""
    uid = os.geteuid()
    said = answer_within(
        _FILE_SECONDS, lambda: asdict(default_places(uid, environ, storage_of)), otherwise=None
    )
    places = places_without_home(uid) if said is None else DefaultPlaces(**said)
    config = told = told_config(found)
    if config is None:
        # Files are not asked: they may be what is wrong.
        config = build_config(
            Settings(),
            source=found.source,
            mountpoint=found.mountpoint,
            user=resolve_user(None, environ),
            places=places,
        )
    status, search = partial(report_of, found), search_of(environ)
    return Subject(found, config, told is not None, status, places, search, environ)


def _created(path: str, undo: ExitStack) -> int:
    """A new file that only this user can read; ``undo`` removes it. Raises UsageError,
    OperationError."""

    def create() -> tuple[None, list[int]]:
        try:
            return None, [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)]
        except OSError as error:
            raise UsageError(
                f"{path} cannot be made: {error.strerror}: name another file with -o"
            ) from None

    overdue = f"{path} cannot be made: no answer within {_FILE_SECONDS:g} s: name another with -o"
    # A Ctrl-C comes when the file will be removed.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _, (descriptor,) = bounded_call(create, timeout=_FILE_SECONDS, overdue=overdue)
        undo.callback(answer_within, _FILE_SECONDS, partial(os.unlink, path), otherwise=None)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return descriptor
