"""What is looked at before a mount is made. Nothing here changes anything."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

from monarchfs.config import Config, PrefetchMode, User
from monarchfs.config.places import DefaultPlaces, build_config
from monarchfs.config.settings import Settings
from monarchfs.fuse.mount import check_device
from monarchfs.fuse.mountinfo import MONARCHFS, RENUMBERING, type_of_device
from monarchfs.supervisor.backing import check_privileges
from monarchfs.supervisor.identity import acting_as, become
from monarchfs.supervisor.limits import check_limits
from monarchfs.supervisor.logs import check_log_file
from monarchfs.supervisor.probe import (
    Mountpoint,
    OpenedSource,
    check_filled,
    complaint_of_empty,
    probe_mountpoint,
    probe_source,
)
from monarchfs.supervisor.registration import check_runtime_dir
from monarchfs.supervisor.storage import check_storage
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.types import OperationError, UsageError

log = logging.getLogger(__name__)

_LONGEST_LINE = 8192
"""Twice PATH_MAX (limits.h): a path with that of its root."""

_MOST_LOOKED_AT = 1000
_LOOK_SECONDS = 1.0
_READ_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class MountSpec:
    """What is to be mounted where; paths are absolute. With ``source_fd`` the directory behind that
    descriptor is mounted, and ``source`` is its name."""

    settings: Settings
    source: str
    mountpoint: str
    user: User
    places: DefaultPlaces
    source_fd: int | None = None


def check_mount(spec: MountSpec) -> None:
    """Checks all that mounting checks before it makes anything, with the same errors."""
    with ExitStack() as undo:
        checked(spec, time.monotonic() + spec.settings.start_timeout_seconds, undo)


def checked(spec: MountSpec, deadline: float, undo: ExitStack) -> tuple[Config, OpenedSource]:
    """What will be mounted, and its source, opened. Raises UsageError or OperationError."""
    settings, user, places = spec.settings, spec.user, spec.places
    check_limits(user)
    check_privileges(settings.data_path)
    check_device()
    check_runtime_dir(places.runtime_dir)
    if settings.log_file is not None:
        check_log_file(settings.log_file, user)
    where = probe_mountpoint(spec.mountpoint, _left(deadline))
    what = probe_source(spec.source, user, _left(deadline), spec.source_fd)
    undo.callback(os.close, what.descriptor)
    _check_overlap(what, where)
    if settings.require_files:
        check_filled(what)
    elif (complaint := complaint_of_empty(what)) is not None:
        log.warning("%s", complaint)
    config = build_config(
        settings, source=what.path, mountpoint=where.path, user=user, places=places
    )
    fstype = type_of_device(what.identity[0])
    if fstype == MONARCHFS:
        raise UsageError(f"source {what.path} is a mount of monarchfs: name what it was made of")
    if config.peers and fstype in RENUMBERING:
        raise UsageError(
            f"{what.path}: {fstype} gives files other inode numbers on each node: leave out --peers"
        )
    _check_lists(config)
    if config.prefetch_list is not None:
        complaint = _complaint_of_list(config.prefetch_list, what, config.mountpoint, user)
        if complaint is not None:
            log.warning("%s", complaint)
    check_storage(config, what, where, places.cache_dir, _left(deadline))
    return config, what


def _check_overlap(source: OpenedSource, mountpoint: Mountpoint) -> None:
    if mountpoint.identity == source.identity:
        return
    if source.identity in mountpoint.lineage:
        raise UsageError(
            f"mount point {mountpoint.path} lies inside the source {source.path}: mount on the"
            " source itself, or outside of it"
        )
    if mountpoint.identity in source.lineage:
        raise UsageError(
            f"mount point {mountpoint.path} would hide the source {source.path}, which lies inside"
            " it: mount on the source itself, or outside of it"
        )


def _check_lists(config: Config) -> None:
    """Raises UsageError for a file that the worker is to read and could not."""
    if config.prefetch is PrefetchMode.FILE:
        assert config.prefetch_list is not None
        _check_readable(config.prefetch_list, config.user)


def _check_readable(path: str, user: User) -> None:
    reason = ""
    with acting_as(user):
        try:
            # A FIFO without a writer would be waited for, and could be read once only.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                reason = "it is not a file"
            os.close(descriptor)
        except OSError as error:
            reason = str(error.strerror)
    if reason:
        raise UsageError(
            f"prefetch list {path} cannot be read by {user.name}: {reason}: use none, access, auto,"
            " all or the path of a readable list"
        )


def _complaint_of_list(path: str, source: OpenedSource, mountpoint: str, user: User) -> str | None:
    """What is wrong with a list that ``user`` may read, in one line; None where nothing is seen.

    All lines are read, and the first thousand names looked up in the source, as far as that gets
    within a second. Takes some seconds at most.
    """
    roots = [os.fsencode(root).rstrip(b"/") + b"/" for root in (mountpoint, source.path)]

    def call() -> Answer:
        become(user)
        began = time.monotonic()
        lines = wrong = looked = 0
        first: tuple[int, str] | None = None
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            for number, line in _lines(file):
                lines += 1
                seconds = time.monotonic() - began
                looks = looked < _MOST_LOOKED_AT and seconds < _LOOK_SECONDS
                looked += looks
                if _is_wrong(line, roots, source.descriptor if looks else None):
                    wrong += 1
                    first = first or (number, os.fsdecode(line[:200]))
                if seconds > _READ_SECONDS:
                    break
        return [lines, looked, wrong, first], ()

    try:
        (lines, looked, wrong, first), _ = bounded_call(
            call, timeout=2 * _READ_SECONDS, overdue="", keep=[source.descriptor]
        )
    except OperationError:
        return None  # the source does not answer just now; the worker goes through the list later
    if lines == 0:
        return f"prefetch list {path} names nothing: write a path in the source on each line"
    if not wrong:
        return None
    part = f" (names of {looked:,} were looked up)" if looked < lines else ""
    return (
        f"prefetch list {path}: {wrong:,} of {lines:,} lines name no file in the source{part}, the"
        f" first is line {first[0]}: {first[1]}"
    )


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers; of long ones the beginning."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        whole = line
        while whole and not whole.endswith(b"\n"):
            whole = file.readline(_LONGEST_LINE)
        if plain := line.rstrip(b"\n"):
            yield number, plain


def _is_wrong(line: bytes, roots: list[bytes], source: int | None) -> bool:
    """``source``: where to look for the name; None: by its form alone."""
    for root in roots:
        if line.startswith(root):
            line = line[len(root) :]
            break
    if line.startswith(b"/") or b"\0" in line or len(line) > _LONGEST_LINE // 2:
        return True
    if b".." in line.split(b"/"):
        return True
    if source is None or not line:
        return not line
    try:
        return not stat.S_ISREG(os.stat(line, dir_fd=source, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # it may be there


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
