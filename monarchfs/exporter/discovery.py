"""What mounts are registered on this node, found without reading a word of what users wrote.

For root, who may look into every user's directory and connect to every socket; who reads what is
found has no privilege at all (``node``). Users own these directories. So nothing in them is
believed but what the kernel says of it, and nothing is touched that could hang: names are walked
one at a time, by descriptors that only stand for a place (O_PATH, open(2)), and each has to be in
the mount in which the walk began. No daemon of a user's is ever asked, and no link is followed.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice

from monarchfs.config.places import ROOT_RUNTIME_DIR
from monarchfs.control.messages import MOST_REQUEST_BYTES, encode_message
from monarchfs.control.registration import decode_registration
from monarchfs.fuse.mountinfo import mount_id, read_mountinfo

MOST_OF_ROOT = 512
MOST_OF_A_USER = 16
MOST_IN_ALL = 1024
"""Mounts that are looked at. More of them are left off, and counted."""

QUESTION = encode_message({"command": "metrics"})

JOBS = "jobs"
MOST_JOBS = 256
"""Of one mount; there are as many series of ``monarchfs_mount_job_info``."""

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\[\]-]{0,63}")
_MOST_JOB_NAMES = 1024
_MOST_NAMES = 4096
_NAME = re.compile(r"([0-9a-f]{24})\.json")
_UID = re.compile(r"(0|[1-9][0-9]{0,9})(?:\.[0-9a-f]{16})?")
"""The end of a user's directory's name; in /tmp it may have a random number (`config.places`)."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Roots:
    """Where runtime directories are (``config.places``): root's; those of sessions, one directory a
    uid; those in the directory to which everybody may write. An ordinary user only looks into
    ``own`` and root's."""

    system: str = ROOT_RUNTIME_DIR
    sessions: str = "/run/user"
    temporary: str = "/tmp"
    own: str | None = None


@dataclass(slots=True)
class DiscoveredMount:
    """A registration whose file is open for reading, as ``registration``. ``owner_uid`` wrote it.
    ``connection`` is a connected socket on which the QUESTION was asked and nothing else can be;
    None if nobody listens, or too many wait (``full``). To be closed."""

    stem: str
    owner_uid: int
    registration: int
    connection: int | None
    full: bool = False
    jobs: tuple[str, ...] = ()

    def close(self) -> None:
        os.close(self.registration)
        if self.connection is not None:
            os.close(self.connection)


@dataclass
class Discovery:
    """One look at the node; ``left_off`` counts what was more than the limits."""

    roots: Roots = field(default_factory=Roots)
    left_off: int = 0

    def mounts(self) -> Iterator[DiscoveredMount]:
        """All registered mounts, one at a time; those that vanish meanwhile are left out."""
        left = MOST_IN_ALL
        looked_at: Counter[int] = Counter()
        for owner, path, directory in self._directories():
            with ExitStack() as closing:
                closing.callback(os.close, directory)
                limit = MOST_OF_ROOT if owner == 0 else MOST_OF_A_USER
                most = min(left, limit - looked_at[owner])
                stems = _stems(directory)
                self.left_off += max(0, len(stems) - most)
                left -= len(stems[:most])
                looked_at[owner] += len(stems[:most])
                for stem in stems[:most]:
                    mount = _discovered(directory, path, stem, owner)
                    if mount is not None:
                        yield mount

    def _directories(self) -> Iterator[tuple[int, str, int]]:
        """Owner, path, and a descriptor that stands for it, of each runtime directory."""
        yield from _plain(self.roots.system, 0)
        if self.roots.own is not None:
            yield from _plain(self.roots.own, os.geteuid())
            return
        sessions = {m.mount_id for m in read_mountinfo() if m.fstype == "tmpfs"}
        yield from _of_users(self.roots.sessions, "", "monarchfs", sessions)
        yield from _of_users(self.roots.temporary, "monarchfs-", "run", set())


def _plain(path: str, owner: int) -> Iterator[tuple[int, str, int]]:
    try:
        directory = os.open(path, _PLACE | os.O_DIRECTORY)
    except OSError:
        return
    if _private(directory, owner):
        yield owner, path, directory
    else:
        os.close(directory)


def _of_users(
    root: str, prefix: str, name: str, other_mounts: set[int]
) -> Iterator[tuple[int, str, int]]:
    """``ROOT/PREFIXuid/NAME``, or with ``uid.RANDOM``, if both belong to that uid. The directory of
    the uid may be in one of ``other_mounts``."""
    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    with ExitStack() as closing:
        closing.callback(os.close, top)
        with os.scandir(top) as entries:
            ends = [e.name.removeprefix(prefix) for e in entries if e.name.startswith(prefix)]
        seen: Counter[int] = Counter()
        for match in filter(None, map(_UID.fullmatch, sorted(ends))):
            uid, user = int(match[1]), prefix + match[0]
            if seen[uid] >= MOST_OF_A_USER:
                continue
            try:
                with _step(top, user, os.O_DIRECTORY, other_mounts) as above:
                    if not _private(above, uid):
                        continue
                    with _step(above, name, os.O_DIRECTORY) as directory:
                        if _private(directory, uid):
                            seen[uid] += 1
                            yield uid, f"{root}/{user}/{name}", os.dup(directory)
            except OSError:
                continue


@contextmanager
def _step(
    directory: int, name: str, flags: int = 0, other_mounts: set[int] | None = None
) -> Iterator[int]:
    """A descriptor for ``name`` in a directory. Raises OSError; EXDEV for a mount point, before the
    file system there is asked anything."""
    place = os.open(name, _PLACE | flags, dir_fd=directory)
    try:
        mount = mount_id(place)
        if mount != mount_id(directory) and mount not in (other_mounts or ()):
            raise OSError(errno.EXDEV, "something is mounted there")
        yield place
    finally:
        os.close(place)


def _private(directory: int, owner: int) -> bool:
    """Whether nobody but ``owner`` could put anything into it."""
    found = os.fstat(directory)
    return found.st_uid == owner and not found.st_mode & 0o022


def _listed(directory: int, most: int) -> list[str]:
    """Names in a directory, so many at most. Raises OSError."""
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        with os.scandir(listing) as entries:
            return [entry.name for entry in islice(entries, most)]
    finally:
        os.close(listing)


def _stems(directory: int) -> list[str]:
    names = _listed(directory, _MOST_NAMES)
    return sorted(match[1] for match in map(_NAME.fullmatch, names) if match)


def _discovered(directory: int, path: str, stem: str, owner: int) -> DiscoveredMount | None:
    full = False
    try:
        try:
            connection = _connect(directory, stem + ".sock")
        except BlockingIOError:  # its queue: unix(7)
            connection, full = None, True
        try:
            registration = _open_file(directory, stem + ".json", owner)
        except OSError:
            if connection is not None:
                os.close(connection)
            raise
    except OSError:  # gone meanwhile, no such thing, or (for an ordinary user) somebody else's
        return None
    jobs = _jobs(registration, directory, path) if owner == 0 else ()
    return DiscoveredMount(f"{path}/{stem}", owner, registration, connection, full, jobs)


def _open_file(directory: int, name: str, owner: int) -> int:
    with _step(directory, name) as place:
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise OSError(errno.EPERM, "it is not the owner's file")
        # Not blocking: its owner may hold a lease (fcntl(2)).
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _connect(directory: int, name: str) -> int | None:
    try:
        with _step(directory, name) as place:
            if not stat.S_ISSOCK(os.fstat(place).st_mode):
                return None
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            with ExitStack() as undo:
                undo.callback(connection.close)
                connection.connect(f"/proc/self/fd/{place}")
                # Who gets it has no say in what root asks for: a mount would do more than tell.
                connection.send(QUESTION)
                connection.shutdown(socket.SHUT_WR)
                undo.pop_all()
            return connection.detach()
    except (FileNotFoundError, ConnectionError):
        return None


def _jobs(registration: int, directory: int, top: str) -> tuple[str, ...]:
    """The jobs of a mount that root registered in ``directory``, whose path is ``top``: the names
    in a directory ``jobs`` beside its mount point, one file a job, as the Slurm prolog keeps it.
    Only root's words are read, and the whole way to the jobs must be root's."""
    try:
        content = os.pread(registration, MOST_REQUEST_BYTES, 0)
        names = _way_to_jobs(decode_registration(content, 0).mountpoint, top)
        if not names:
            return ()
        with ExitStack() as closing:
            place = directory
            for name in names:
                place = closing.enter_context(_step(place, name, os.O_DIRECTORY))
                if not _private(place, 0):
                    return ()
            jobs = filter(_JOB.fullmatch, _listed(place, _MOST_JOB_NAMES))
            return tuple(sorted(jobs)[:MOST_JOBS])
    except (OSError, ValueError):
        return ()


def _way_to_jobs(mountpoint: str, top: str) -> list[str]:
    """The names from the directory ``top`` to the set of a mount's jobs; empty if that is not below
    it."""
    names = mountpoint.split("/")[1:]
    begin = top.split("/")[1:]
    below = names[len(begin) :]
    if names[: len(begin)] != begin or len(below) < 2 or not {"", ".", ".."}.isdisjoint(below):
        return []
    return [*below[:-1], JOBS]
