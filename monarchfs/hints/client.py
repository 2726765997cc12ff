"""Sends hints from a job to the mount that has its files.

A hint must not disturb a job: whatever goes wrong is logged once, as one line, and nothing is
raised. Where the job would wait for it, a mount that did not answer is not asked twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from monarchfs.config.places import search_of
from monarchfs.control.client import Connection, connect
from monarchfs.control.registration import Registered
from monarchfs.fuse.mountinfo import split_below
from monarchfs.supervisor.recover import find_all
from monarchfs.types import MonarchError

log = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0


class JobMount(NamedTuple):
    """A mount, and the paths under which it has files: ``mountpoints`` has more than one if there
    are bind mounts."""

    daemon: Registered
    mountpoints: Sequence[str]

    def below(self, path: str | os.PathLike[str]) -> str | None:
        """The path relative to the mount, without dots if it has none; None if it is outside."""
        given = os.fspath(path)
        found = self._below(given)
        return self._below(os.path.abspath(given)) if found is None else found

    def _below(self, path: str) -> str | None:
        for mountpoint in self.mountpoints:
            prefix = mountpoint.rstrip("/") + "/"
            if path.startswith(prefix) and path != prefix:
                return path[len(prefix) :]
        return None

    def names(self, paths: Iterable[str | os.PathLike[str]]) -> bytes:
        """What ``below`` says of each, separated by NUL; what is outside is left out."""
        given = [os.fspath(path) for path in paths]
        prefix = "\0" + self.mountpoints[0].rstrip("/") + "/"
        joined = "\0" + "\0".join(given)
        if joined.count(prefix) == len(given):
            # All in one go: of a million files one by one, the job would notice.
            return os.fsencode(joined.replace(prefix, "\0")[1:])
        return os.fsencode("\0".join(name for name in map(self.below, given) if name is not None))

    def connect(self) -> Connection:
        """Raises OperationError."""
        return connect(self.daemon, CONNECT_SECONDS)


def find_mount(path: str | os.PathLike[str]) -> JobMount | None:
    """The mount that has ``path``. The mount itself is not asked, so it cannot hang here. Raises
    OperationError if its daemon is gone."""
    mounts = find_all(search_of(os.environ))
    by_point = {found.mountpoint: found for found in mounts}
    place = split_below(os.path.abspath(os.fspath(path)), by_point)
    if place is None:
        return None
    daemon = by_point[place[0]].daemon
    same = [found.mountpoint for found in mounts if found.registered == daemon]
    return JobMount(daemon, [place[0], *(point for point in same if point != place[0])])


_failed: set[str] = set()


def quietly(what: str, send: Callable[[], object], *, again: bool = False) -> bool:
    """Call ``send``; False if it failed. If it has failed before for the same ``what``, it is not
    called, or with ``again`` it is called, and another failure is not logged."""
    if what in _failed and not again:
        return False
    try:
        send()
    except (OSError, MonarchError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        if what not in _failed:
            log.warning("monarchfs: no hints for %s: %s", what, exc)
        _failed.add(what)
        return False
    return True
