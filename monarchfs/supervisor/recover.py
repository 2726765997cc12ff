"""Which mounts there are, and how to remove one whose supervisor does not answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from monarchfs.config.places import Search, name_of
from monarchfs.control.client import Connection, connect
from monarchfs.control.registration import (
    UNKNOWN_CONNECTION,
    Registered,
    Registration,
    find_mounts,
    own_mount_namespace,
    root_uid,
)
from monarchfs.fuse.connection import connection_of_mount
from monarchfs.fuse.mountinfo import (
    MONARCHFS,
    Mount,
    find_mount,
    read_mountinfo,
    resolve_mountpoint,
    split_below,
)
from monarchfs.fuse.unmount import Unmounted, unmount_bounded, unmount_call
from monarchfs.supervisor.registration import remove_registration
from monarchfs.system.process_stat import start_ticks
from monarchfs.types import OperationError

_POLL_SECONDS = 0.02
_CONNECT_SECONDS = 1.0
_FORCE_SECONDS, _FORCE_SHARE = 1.5, 0.1
"""What is kept of the time limit, at most, for doing it by force if the supervisor does not."""


@dataclass(frozen=True, slots=True)
class FoundMount:
    """A mount of ours: in the mount table, registered, or both as it should be."""

    mountpoint: str
    source: str
    mount: Mount | None
    registered: Registered | None
    is_copy: bool = False
    """Whether it is a bind mount, beside the mount that was made."""

    @property
    def supervisor_alive(self) -> bool:
        return self.registered is not None and is_alive(self.registered)

    @property
    def daemon(self) -> Registered:
        """Where it can be asked. Raises OperationError, with the remedy, if it is gone, or another
        user's."""
        self.refuse_others()
        if self.registered is None or not self.supervisor_alive:
            raise OperationError(
                f"the daemon of {self.mountpoint} is gone: clear the mount with"
                f" monarchfs umount {self.mountpoint}"
            )
        return self.registered

    @property
    def other_owner(self) -> str | None:
        """Another user whose mount it is: its daemon answers only them and root, and may have
        registered where this process does not look. None: this process may ask."""
        if self.mount is not None:
            uid = self.mount.user_id
        else:
            uid = self.registered.entry.uid if self.registered is not None else None
        return None if uid is None or os.geteuid() in (0, uid) else name_of(uid)

    def refuse_others(self) -> None:
        """Raises OperationError for another user's mount."""
        if self.other_owner is not None:
            raise OperationError(
                f"the mount on {self.mountpoint} belongs to {self.other_owner}: ask them, or use"
                " root"
            )

    @property
    def made_elsewhere(self) -> bool:
        """Whether it was made in another mount namespace, of which this one may have a copy."""
        entry = self.registered.entry if self.registered is not None else None
        return entry is not None and entry.mount_namespace != own_mount_namespace()

    @property
    def on_top(self) -> bool:
        """Whether its mount point leads to it, and nothing is mounted over that."""
        return self.mount is not None and find_mount(self.mountpoint) == self.mount

    @property
    def private(self) -> bool:
        """Whether it is in another mount namespace than this process, and not in this one."""
        return self.made_elsewhere and self.mount is None


def find_all(search: Search) -> list[FoundMount]:
    """All mounts of ours in this mount namespace, with copies from other ones. ``search`` names the
    runtime directories to look into, given the mounts' owners. Removes registrations of mounts that
    are gone. Leaves out bind mounts of a directory in a mount, below which paths are different."""
    mounts = [m for m in read_mountinfo() if m.fstype == MONARCHFS and m.root == "/"]
    owners = {mount.user_id for mount in mounts if mount.user_id is not None}
    known = find_mounts(search(owners))
    found, matched = [], set()
    for mount in mounts:
        match = registration_of(mount, known)
        matched |= {match.stem} if match is not None else set()
        found.append(
            FoundMount(mount.mountpoint, mount.source, mount, match, _is_copy(mount, match, mounts))
        )
    namespace = own_mount_namespace()
    for registered in known:
        entry = registered.entry
        if registered.stem in matched or entry.mount_namespace != namespace:
            continue
        if not supervisor_lives(registered):
            _forget(registered)
            continue
        found.append(FoundMount(entry.mountpoint, entry.source, None, registered))
    return sorted(found, key=lambda one: one.mountpoint)


def find_private(search: Search) -> list[FoundMount]:
    """The mounts in other mount namespaces, as ``monarchfs run`` makes them, that answer and are
    not visible in this one. Removes registrations of those that are gone, with all processes of
    their namespaces."""
    namespace = own_mount_namespace()
    visible = {mount.minor for mount in read_mountinfo() if mount.fstype == MONARCHFS}
    found = []
    for registered in find_mounts(search(set())):
        entry = registered.entry
        if entry.mount_namespace == namespace or entry.connection in visible:
            continue
        if is_alive(registered):
            found.append(FoundMount(entry.mountpoint, entry.source, None, registered))
        elif not _is_inhabited(entry.mount_namespace):
            _forget(registered)
    return sorted(found, key=lambda one: one.mountpoint)


def find_one(path: str, search: Search) -> FoundMount | None:
    """The topmost mount of ours on ``path`` (absolute), found without touching it."""
    resolved = resolve_mountpoint(path)
    there = [one for one in find_all(search) if one.mountpoint == resolved]
    return next((one for one in there if one.on_top), there[-1] if there else None)


def find_others_mount(path: str) -> Mount | None:
    """What is mounted on ``path``, if it is not a mount of ours (but perhaps a part of one)."""
    mount = find_mount(resolve_mountpoint(path))
    return None if mount is None or (mount.fstype, mount.root) == (MONARCHFS, "/") else mount


def not_a_mount(path: str, search: Search) -> OperationError:
    """The error for a path without a mount of ours, with the remedy."""
    refuse_private(path, search)
    return OperationError(f"{path} is not a monarchfs mount: see monarchfs status for those")


def refuse_private(path: str, search: Search) -> None:
    """Raises OperationError for what lies in a mount of another namespace."""
    found = split_below(path, [one.mountpoint for one in find_private(search)])
    if found is not None:
        raise OperationError(
            f"{path} is mounted for one command alone (monarchfs run): join it with monarchfs run"
            f" {found[0]} -- monarchfs ... {path}"
        )


def required(path: str, search: Search) -> FoundMount:
    """`find_one`; raises OperationError, with the remedy, where there is none."""
    found = find_one(path, search)
    if found is None:
        raise not_a_mount(path, search)
    return found


def require_daemon(path: str, search: Search) -> Registered:
    """Where the mount there can be asked. Raises OperationError, with the remedy, if it cannot."""
    return required(path, search).daemon


def is_alive(registered: Registered) -> bool:
    """Whether a daemon lives. That of a mount in another namespace may be in another process
    namespace, where its number means nothing; then its socket tells."""
    elsewhere = registered.entry.mount_namespace != own_mount_namespace()
    return supervisor_lives(registered) or (elsewhere and _listens(registered))


def supervisor_lives(registered: Registered) -> bool:
    """Whether the registered supervisor is still the process of that number."""
    ticks = start_ticks(registered.entry.supervisor_pid)
    if ticks is None and registered.owner_uid != os.geteuid():
        # Where /proc hides the processes of others (hidepid), its socket tells.
        return _listens(registered)
    return ticks == registered.entry.start_ticks


def unmount_found(found: FoundMount, deadline: float) -> Unmounted:
    """Unmounts by ``deadline`` (time.monotonic), by the supervisor or else by force. Of a bind
    mount, or a mount made in another mount namespace, only the copy is removed: users of the mount
    itself keep it."""
    if found.made_elsewhere or found.is_copy:
        if found.on_top:
            unmount_call(found.mountpoint, lazy=True)
        left = found.mount is not None and found.mount in read_mountinfo()
        return Unmounted.FAILED if left else Unmounted.CLEAN
    return _by_supervisor(found, deadline) or remove_by_force(found, deadline)


def remove_by_force(found: FoundMount, deadline: float) -> Unmounted:
    """Unmounts without the supervisor by ``deadline`` (time.monotonic), kills it if it still lives,
    and removes the registration. Idempotent."""
    outcome = Unmounted.NOT_MOUNTED
    if found.mount is not None:
        with closing(connection_of_mount(found.mount)) as connection:
            outcome = unmount_bounded(connection, deadline)
    if found.registered is not None:
        if supervisor_lives(found.registered):
            _kill(found.registered)
        _forget(found.registered)
    return outcome


def _by_supervisor(found: FoundMount, deadline: float) -> Unmounted | None:
    """None where the supervisor did not unmount, and go, in time."""
    if not found.supervisor_alive:
        return None
    assert found.registered is not None
    left = deadline - time.monotonic()
    reserve = min(_FORCE_SECONDS, left * _FORCE_SHARE)
    try:
        with connect(found.registered, left - reserve) as connection:
            asked = {"command": "umount", "timeout": left - reserve}
            answer = connection.request(asked, deadline - reserve - time.monotonic())
            outcome = Unmounted[str(answer["outcome"]).upper()]
            return outcome if connection.wait_closed(1.0) else None
    except (OperationError, KeyError):
        return None


def registration_of(mount: Mount, known: Iterable[Registered]) -> Registered | None:
    """The registration of a mount, or of that in another mount namespace that it is a copy of."""
    namespace = own_mount_namespace()
    # A dead daemon's registration may name a number that another connection got since.
    return max(
        (
            one
            for one in known
            if is_about(one.entry, one.owner_uid, mount)
            and (one.entry.source == mount.source or supervisor_lives(one))
        ),
        key=lambda one: (one.entry.mount_namespace == namespace, one.entry.started_ns),
        default=None,
    )


def is_about(entry: Registration, owner_uid: int, mount: Mount) -> bool:
    """Whether a registration means ``mount``, wherever that is by now. Only the mount's owner and
    root are believed."""
    if owner_uid not in (0, root_uid(), mount.user_id):
        return False
    if entry.connection != UNKNOWN_CONNECTION:
        return entry.connection == mount.minor
    return (entry.mount_namespace, entry.mountpoint) == (own_mount_namespace(), mount.mountpoint)


def _is_copy(mount: Mount, match: Registered | None, mounts: Iterable[Mount]) -> bool:
    """Whether it is not the connection's first mount: the one where it was made, or else the
    oldest."""
    same = [one for one in mounts if one.minor == mount.minor]
    made = match.entry.mountpoint if match is not None else None
    return mount != next((one for one in same if one.mountpoint == made), same[0])


def _is_inhabited(mount_namespace: int) -> bool:
    """Whether a process that can be seen from here is in that mount namespace. A dead daemon's
    mount may still stand there, and commands there tell (`find_all`)."""
    link = f"mnt:[{mount_namespace}]"  # namespaces(7)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/ns/mnt") == link:
                return True
        except OSError:
            continue  # it ended, or is another user's
    return False


def _listens(registered: Registered) -> bool:
    try:
        with Connection(registered.socket_path, _CONNECT_SECONDS):
            return True
    except OperationError:
        return False


def _forget(registered: Registered) -> None:
    try:
        remove_registration(registered.stem, registered.owner_uid)
    except OSError:
        pass  # somebody else's to remove; the next mount there replaces it


def _kill(registered: Registered) -> None:
    """Kills a supervisor that belongs to whoever registered it, and waits a moment for its end."""
    pid = registered.entry.supervisor_pid
    try:
        if os.stat(f"/proc/{pid}").st_uid != registered.owner_uid:
            return
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return
    deadline = time.monotonic() + 1
    while supervisor_lives(registered) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
