"""``monarchfs mount``: from words to settings, then into the background unless told otherwise."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from functools import cache, partial

from monarchfs.cli.output import complain
from monarchfs.cli.parser import MOUNT_OPTIONS
from monarchfs.config.files import from_file, from_system_file
from monarchfs.config.personal import Personal, acts_for_another, read_personal
from monarchfs.config.places import DefaultPlaces, default_places, places_without_home, resolve_user
from monarchfs.config.settings import Layer, Settings, from_flags, from_mount_options, merge
from monarchfs.config.values import parse_path
from monarchfs.fuse.mountinfo import storage_of
from monarchfs.supervisor.daemon import ending_signals, run_in_background
from monarchfs.supervisor.notify_systemd import ServiceManager
from monarchfs.supervisor.preflight import MountSpec, check_mount
from monarchfs.supervisor.start import mount_and_supervise
from monarchfs.system.bounded import bounded_value
from monarchfs.types import OperationError, UsageError

HOME_SECONDS = 5.0
_PARENT_GRACE_SECONDS = 5.0
"""How much longer the parent waits than the daemon itself would: it takes things back first."""


def mount_command(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    worker_command: Sequence[str] | None = None,
) -> int:
    """Returns 0 once the mount answers, or after it is gone with ``--foreground``.

    ``worker_command`` replaces the worker in tests.
    """
    return mount_with(
        settings_from(arguments, environ=environ),
        arguments.source,
        arguments.mountpoint,
        environ,
        source_fd=_descriptor(arguments.source_fd),
        worker_command=worker_command,
    )


def mount_with(
    settings: Settings,
    source: str,
    mountpoint: str,
    environ: Mapping[str, str],
    *,
    check_only: bool = False,
    source_fd: int | None = None,
    worker_command: Sequence[str] | None = None,
) -> int:
    """`mount_command` with its words parsed. With ``check_only`` nothing is mounted."""
    source, mountpoint = parse_path(source), parse_path(mountpoint)
    user = resolve_user(settings.user, environ)
    places = places_for(settings.user, environ)
    say_where_copies_lie(settings, places)
    spec = MountSpec(settings, source, mountpoint, user, places, source_fd)
    if check_only:
        check_mount(spec)
        return 0
    run = partial(mount_and_supervise, spec, worker_command=worker_command)
    if settings.foreground:
        os.chdir("/")
        manager = ServiceManager(environ)

        def tell(answers: bool) -> None:
            if not answers:
                manager.extend(settings.start_timeout_seconds)

        return run(report=tell)
    for number in ending_signals():
        signal.signal(number, signal.default_int_handler)  # each ends the daemon, as Ctrl-C does
    timeout = settings.start_timeout_seconds + _PARENT_GRACE_SECONDS
    run_in_background(
        lambda report: run(report=report),
        timeout=timeout,
        overdue=f"the mount of {source} on {mountpoint} did not come about within {timeout:g} s:"
        " check the file systems of both",
        keep=() if source_fd is None else (source_fd,),
    )
    return 0


def say_where_copies_lie(settings: Settings, places: DefaultPlaces) -> None:
    """A line on standard error, where it is not the user's cache directory and nobody named it."""
    if not settings.tier and places.reason:
        memory = " (in memory)" if storage_of(places.cache_dir) == "memory" else ""
        where = f"copies lie in {places.cache_dir}{memory}, because {places.reason}"
        complain(f"{where} (--tier PATH=SIZE names another directory)", 0)


def _descriptor(text: str | None) -> int | None:
    """The number of an open descriptor. Nothing is asked of its file system, which may hang."""
    if text is None:
        return None
    try:
        descriptor = int(text)
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--source-fd {text} is no open descriptor: give the number of one of a directory"
        ) from None
    return descriptor


def settings_from(
    arguments: argparse.Namespace, *, environ: Mapping[str, str] | None = None
) -> Settings:
    """Defaults, then files (the machine's and the user's own, if none is named), then the
    environment, then ``-o``, then flags. Without ``environ`` nothing of the user's own counts."""
    typed = words_of(arguments)
    if environ is None:
        named, own = arguments.config, Personal()
    else:
        named, own = config_and_personal(arguments, environ)
    files = (from_system_file(), own.home) if named is None else (from_file(parse_path(named)),)
    return merge(*files, own.environment, *typed)


def words_of(arguments: argparse.Namespace) -> tuple[Layer, Layer]:
    """What the command line itself says: ``-o``, then flags. Raises UsageError."""
    flags = {name: value for name, value in vars(arguments).items() if name in MOUNT_OPTIONS}
    return from_mount_options(arguments.options or ()), from_flags(flags)


def config_and_personal(
    arguments: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[str | None, Personal]:
    """The file that replaces the machine's and the user's own, if one is named, and the user's own
    settings that count. Raises UsageError."""
    options = from_mount_options(arguments.options or ())
    user = {**options, **from_flags({"user": arguments.user})}.get("user")
    name = user if isinstance(user, str) else None
    own = read_personal(environ, name, at_home=_home_answers(name, environ))
    return arguments.config if arguments.config is not None else own.config, own


def places_for(user: str | None, environ: Mapping[str, str]) -> DefaultPlaces:
    """The default places of whoever runs this; those without the home where that hangs."""
    if not _home_answers(user, environ):
        return places_without_home(os.geteuid())
    return default_places(os.geteuid(), environ, storage_of)


def _home_answers(user: str | None, environ: Mapping[str, str]) -> bool:
    """Whether the home of whoever runs this, if it counts, can be asked without hanging. Asked
    once, and if not, said once."""
    return acts_for_another(environ, user) or _answers(frozenset(environ.items()))


@cache
def _answers(variables: frozenset[tuple[str, str]]) -> bool:
    environ = dict(variables)

    def look() -> None:
        default_places(os.geteuid(), environ, storage_of)
        read_personal(environ, None)

    overdue = f"your home, or a directory for scratch, does not answer within {HOME_SECONDS:g} s"
    try:
        bounded_value(look, timeout=HOME_SECONDS, overdue=overdue)
    except UsageError:
        return True  # it is told where it is read
    except OperationError as error:
        complain(f"{error}: settings in your home do not count", 0)
        return False
    return True
