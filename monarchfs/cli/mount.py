"""``monarchfs mount``: from words to settings, then into the background or not."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial

from monarchfs.config.files import from_file, from_system_file
from monarchfs.config.places import default_places, resolve_user
from monarchfs.config.settings import Settings, from_flags, from_mount_options, merge
from monarchfs.config.values import parse_path
from monarchfs.supervisor.daemon import run_in_background
from monarchfs.supervisor.start import check_mount, mount_and_supervise, path_is_remote

FLAGS = (
    *("tier", "state_dir", "prefetch", "freshness", "evict", "scrub", "user"),
    "index",
    "prefetch_rate",
    "prefetch_jitter",
    "data_path",
    "metrics_port",
    "touch_source",
    *("foreground", "log_file", "log_level"),
)
_PARENT_GRACE_SECONDS = 5.0
"""How much longer the parent waits than the daemon itself would: it takes things back first."""


def mount_command(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    worker_command: Sequence[str] | None = None,
) -> int:
    """Returns 0 once the mount answers, or after it is gone with ``--foreground``.

    Raises UsageError or OperationError. ``worker_command`` replaces the worker in tests.
    """
    settings = settings_from(arguments)
    return mount_with(
        settings, arguments.source, arguments.mountpoint, environ, worker_command=worker_command
    )


def mount_with(
    settings: Settings,
    source: str,
    mountpoint: str,
    environ: Mapping[str, str],
    *,
    check_only: bool = False,
    worker_command: Sequence[str] | None = None,
) -> int:
    """`mount_command` with its words parsed. With ``check_only`` nothing is mounted."""
    source, mountpoint = parse_path(source), parse_path(mountpoint)
    user = resolve_user(settings.user, environ)
    places = default_places(os.geteuid(), environ, path_is_remote)
    if check_only:
        check_mount(settings, source, mountpoint, user, places)
        return 0
    run = partial(
        mount_and_supervise,
        settings,
        source,
        mountpoint,
        user,
        places,
        worker_command=worker_command,
    )
    if settings.foreground:
        os.chdir("/")
        return run(report=lambda: None)
    timeout = settings.start_timeout_seconds + _PARENT_GRACE_SECONDS
    run_in_background(
        lambda report: run(report=report),
        timeout=timeout,
        overdue=f"the mount of {source} on {mountpoint} did not come about within {timeout:g} s:"
        " check the file systems of both",
    )
    return 0


def settings_from(arguments: argparse.Namespace, flags: Sequence[str] = FLAGS) -> Settings:
    """Defaults, then the file (the machine's, if none is named), then ``-o``, then flags."""
    return merge(
        from_system_file() if arguments.config is None else from_file(parse_path(arguments.config)),
        from_mount_options(arguments.options or ()),
        from_flags({name: getattr(arguments, name) for name in flags}),
    )
