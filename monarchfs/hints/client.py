"""Sends hints from a job to the mount that has its files.

A hint must not disturb a job: whatever goes wrong is logged once, as one line, and nothing is
raised. A mount that does not answer costs little, because nobody asks it twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
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
        for text in (given := os.fspath(path), os.path.abspath(given)):
            for mountpoint in self.mountpoints:
                prefix = mountpoint.rstrip("/") + "/"
                if text.startswith(prefix) and text != prefix:
                    return text[len(prefix) :]
        return None

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


def quietly(what: str, send: Callable[[], object]) -> bool:
    """Call ``send``; False if it failed, or has failed before for the same ``what``."""
    if what in _failed:
        return False
    try:
        send()
    except (OSError, MonarchError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        _failed.add(what)
        log.warning("monarchfs: no hints for %s: %s", what, exc)
        return False
    return True
