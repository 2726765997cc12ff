"""``monarchfs run``: a command that sees the cached view at the source's own path."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import stat
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from monarchfs.cli.child import run_child
from monarchfs.cli.mount import (
    config_and_personal,
    places_for,
    say_where_copies_lie,
    settings_from,
    words_of,
)
from monarchfs.cli.output import complain, format_share
from monarchfs.cli.status import makes_sense
from monarchfs.config import User
from monarchfs.config.files import from_file
from monarchfs.config.personal import flag_of_run
from monarchfs.config.places import resolve_user, search_of
from monarchfs.config.settings import Settings, merge
from monarchfs.config.values import parse_path
from monarchfs.control.client import Connection
from monarchfs.fuse.mountinfo import resolve_mountpoint
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.namespace import bind, join, leave_for_own
from monarchfs.supervisor.preflight import MountSpec
from monarchfs.supervisor.private_mount import MountLease, job_stem, lease_mount, settings_digest
from monarchfs.supervisor.probe import (
    EmptySource,
    check_exists,
    check_filled,
    complaint_of_empty,
    probe_source,
)
from monarchfs.supervisor.recover import FoundMount, find_all, find_private
from monarchfs.system.bounded import bounded_value
from monarchfs.system.limits import explained
from monarchfs.system.sizes import counted, format_bytes
from monarchfs.types import MonarchError, OperationError, UsageError

_STATUS_SECONDS = 5.0
_LOOK_SECONDS = 5.0
_OF_JOBS = re.compile(r".*/slurm/[0-9a-f]{20}/state")
"""The state directories of prologs' mounts (`slurm.records`)."""


CommandView = MountLease | FoundMount | None
"""How the command sees the source: by a private mount, perhaps shared with other jobs; by a mount
that was there; or without one."""


def run_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Runs the command behind ``--`` and returns its exit code (126, 127 and 128 + N as of shells).

    If nothing can be mounted, the command runs on the plain source, and standard error says why;
    with ``--strict`` that raises UsageError or OperationError. Misuse always raises: also a source
    that does not exist, and an empty one with ``--require-files``.
    """
    if not arguments.argv:
        raise UsageError("there is no command: monarchfs run SOURCE -- COMMAND [ARGUMENT]...")
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Until the command runs, Ctrl-C ends this process, and not only the mounting.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    source = parse_path(arguments.source)
    # Under sudo, too, the command is root's: other than a mount it is used at once, by who asked.
    user = resolve_user(_words_of(arguments, environ).user, {})
    other = None if user.uid == os.geteuid() else user.name
    arguments.strict |= flag_of_run(environ, other, "strict")
    arguments.report |= flag_of_run(environ, other, "report")
    report = None if arguments.json is None else _open_report(parse_path(arguments.json))
    began = time.monotonic()
    reason = None
    view: CommandView = None
    try:
        view = _view_of(arguments, source, user, environ)
    except EmptySource:
        raise
    except Exception as error:
        # Nothing of ours keeps the command from running.
        if arguments.strict:
            raise
        if isinstance(error, UsageError):
            check_exists(source, user, _LOOK_SECONDS)
        reason = explained(error) if isinstance(error, OSError) else str(error)
        if not isinstance(error, (MonarchError, OSError)):
            reason = f"unexpected {error!r}"
        _warn(source, reason)
    kind = "none" if view is None else "own" if isinstance(view, MountLease) else "existing"
    before = _status(view) if arguments.report and isinstance(view, FoundMount) else None
    about = {"source": source, "view": kind, "reason": reason}
    code = run_child(arguments.argv, partial(_prepare, view, user, source, strict=arguments.strict))
    seconds = round(time.monotonic() - began, 3)
    try:
        _end(view, arguments, report, before, {**about, "exit_code": code, "seconds": seconds})
    except Exception as error:  # noqa: BLE001 - it is over: only its own exit code counts
        complain(f"nothing can be reported of {source}: {error!r}", 0)
    return code


def _end(
    view: CommandView,
    arguments: argparse.Namespace,
    report: int | None,
    before: Mapping[str, Any] | None,
    result: dict[str, Any],
) -> None:
    """Lets go of the mount, and reports what was asked for: since ``before``, if that is known."""
    status = None
    if view is not None and (arguments.report or report is not None):
        status = _status(view)
    if isinstance(view, MountLease):
        view.close()
    if arguments.report:
        complain(_summary(result["source"], before, status), 0)
    if report is not None:
        _write_report(report, {**result, "status": status})


def _words_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """The settings that the user named, without the machine's file. Raises UsageError."""
    named, own = config_and_personal(arguments, environ)
    file = {} if named is None else from_file(parse_path(named))
    return merge(own.home if named is None else file, own.environment, *words_of(arguments))


def _view_of(
    arguments: argparse.Namespace, source: str, user: User, environ: Mapping[str, str]
) -> CommandView:
    settings = replace(settings_from(arguments, environ=environ), foreground=False)
    deadline = time.monotonic() + settings.start_timeout_seconds
    timeout = settings.start_timeout_seconds
    real = bounded_value(  # without symbolic links
        lambda: resolve_mountpoint(source),
        timeout=timeout,
        overdue=f"source {source} did not answer within {timeout:g} s: check its file system",
    )
    found = _existing(real, user, environ)
    if found is not None:
        return found
    _check_filled(real, user, settings)
    places = places_for(settings.user, environ)
    say_where_copies_lie(settings, places)
    spec = MountSpec(settings, real, real, user, places)
    search = search_of(environ)
    find_private(search)  # what killed mounts have left goes
    lease = lease_mount(spec, job_stem(spec, environ), deadline, search)
    if lease.settings != settings_digest(settings):
        complain(f"{source} is mounted already for you: with the options of that mount", 0)
    return lease


def _check_filled(source: str, user: User, settings: Settings) -> None:
    """Here because the mount's daemon has nobody to tell."""
    found = probe_source(source, user, settings.start_timeout_seconds)
    os.close(found.descriptor)
    complaint = complaint_of_empty(found)
    if settings.require_files:
        check_filled(found)
    elif complaint is not None:
        complain(complaint, 0)


def _existing(real: str, user: User, environ: Mapping[str, str]) -> FoundMount | None:
    """A mount of the source that the user may enter, and that this process can see. A prolog's ends
    with the jobs that it is for, so it has to be in this one's variables."""
    names = [name for name in environ if re.fullmatch("MONARCHFS_(ROOT|DATA_.*)", name)]
    given = {environ[name] for name in names}
    for found in find_all(search_of(environ)):
        usable = found.mount is not None and found.mount.user_id == user.uid and found.on_top
        if usable and found.source == real and found.supervisor_alive:
            assert found.registered is not None
            entry = found.registered.entry
            if entry.mountpoint in given or not _OF_JOBS.fullmatch(entry.state_dir):
                return found
    return None


def _enter(view: CommandView) -> None:
    """Raises MonarchError, OSError."""
    if isinstance(view, MountLease):
        join(view.spaces)
    elif view is not None and view.mountpoint != view.source:
        leave_for_own()
        bind(view.mountpoint, view.source)


def _prepare(view: CommandView, user: User, source: str, *, strict: bool) -> None:
    """In the command's process: into the view, to the directory where we were, and as the user."""
    here = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        path: str | None = os.getcwd()
    except FileNotFoundError:
        path = None
    try:
        _enter(view)
    except (MonarchError, OSError) as error:
        if strict:
            raise SystemExit(complain(f"cannot show the cached view: {error}", 1)) from None
        _warn(source, str(error))
    # By name: what lies below the source is to be that of the mount. Root may enter directories
    # that the user may not, and the user a mount that root may not.
    there = path is not None and _go_to(path)
    become(user)
    if not there and not (path is not None and _go_to(path)) and not _go_to(here):
        complain("the working directory cannot be entered: / is used instead", 0)
        os.chdir("/")


def _go_to(directory: str | int) -> bool:
    try:
        os.chdir(directory)
    except OSError:
        return False
    return True


def _warn(source: str, reason: str) -> None:
    complain(f"{source} is read without a cache: {reason}", 0)


def _status(view: MountLease | FoundMount) -> dict[str, Any] | None:
    if isinstance(view, MountLease):
        control, owner_uid = view.control, view.owner_uid
    else:
        assert view.registered is not None
        control, owner_uid = view.registered.socket_path, view.registered.owner_uid
    try:
        with Connection(control, _STATUS_SECONDS) as connection:
            if connection.peer_uid != owner_uid:
                return None
            status = connection.request({"command": "status"}, _STATUS_SECONDS)
            return status if makes_sense(status) else None
    except OperationError:
        return None


def _summary(
    source: str, before: Mapping[str, Any] | None, status: Mapping[str, Any] | None
) -> str:
    if status is None:
        return f"{source} was read without a cache"

    def count(part: str, key: str) -> int:
        now, then = (one.get(part, {}).get(key, 0) for one in (status, before or {}))
        return int(max(0, now - then))

    local, refused = count("served", "local_opens"), count("prefetch", "refused")
    opens = local + count("served", "peer_opens") + count("served", "source_opens")
    if not opens:
        return f"{source}: the command opened no file there: does it read another path?"
    return (
        f"{source}: {format_share(local, opens)} of {counted(opens, 'open')} were local,"
        f" {format_bytes(count('source_io', 'read_bytes'))} read from the source,"
        f" {counted(status.get('files', {}).get('resident', 0), 'file')} resident"
        # A file is counted each time that it is opened.
        + (f", no room for a copy {counted(refused, 'time')}" if refused else "")
    )


def _open_report(path: str) -> int:
    """Opened first: a report that cannot be written is a mistake to be told at once."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.set_blocking(descriptor, True)
        return descriptor
    except OSError as error:
        raise UsageError(
            f"report {path} cannot be written: {error.strerror}: name another --json FILE"
        ) from None


def _write_report(descriptor: int, result: Mapping[str, Any]) -> None:
    """Errors are told, and change no exit code."""
    try:
        with open(descriptor, "w") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.ftruncate(descriptor, 0)
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        complain(f"the report cannot be written: {error.strerror}", 0)
