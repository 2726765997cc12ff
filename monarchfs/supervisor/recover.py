"""What mounts there are, and how to be rid of one whose supervisor does not answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from monarchfs.control import (
    Connection,
    Registered,
    find_mounts,
    own_mount_namespace,
    root_uid,
)
from monarchfs.fuse.mountinfo import (
    MONARCHFS,
    Mount,
    find_mount,
    read_mountinfo,
    resolve_mountpoint,
)
from monarchfs.fuse.unmount import Unmounted, unmount_bounded, unmount_call
from monarchfs.supervisor.registration import remove_registration, start_ticks
from monarchfs.types import OperationError

_POLL_SECONDS = 0.02
_CONNECT_SECONDS = 1.0
_FORCE_SECONDS = 1.5
"""What is kept of the time limit for doing it by force, if the supervisor does not."""


@dataclass(frozen=True, slots=True)
class FoundMount:
    """A mount of ours: in the mount table, registered, or both as it should be."""

    mountpoint: str
    source: str
    mount: Mount | None
    registered: Registered | None

    @property
    def supervisor_alive(self) -> bool:
        if self.registered is None:
            return False
        # In another process namespace its number says nothing; that it listens does.
        return supervisor_lives(self.registered) or (
            self.made_elsewhere and _listens(self.registered)
        )

    @property
    def made_elsewhere(self) -> bool:
        """Whether it was mounted in another mount namespace than this process's, which may have
        got a copy of the mount."""
        entry = self.registered.entry if self.registered is not None else None
        return entry is not None and entry.mount_namespace != own_mount_namespace()

    @property
    def private(self) -> bool:
        """Whether it is in another mount namespace than this process, and not in this one."""
        return self.made_elsewhere and self.mount is None


def find_all(search: Callable[[set[int]], Iterable[str]]) -> list[FoundMount]:
    """All mounts of ours in this mount namespace, those among them that were copied from another
    one; ``search`` names the runtime directories to look into, given whose mounts there are.
    Registrations of what is gone altogether are removed."""
    mounts = [mount for mount in read_mountinfo() if mount.fstype == MONARCHFS]
    owners = {mount.user_id for mount in mounts if mount.user_id is not None}
    namespace = own_mount_namespace()
    known = find_mounts(search(owners))
    registrations = [one for one in known if one.entry.mount_namespace == namespace]
    elsewhere = [one for one in known if one.entry.mount_namespace != namespace]
    found = []
    for mount in {mount.mountpoint: mount for mount in mounts}.values():
        match = _registration_of(mount, registrations)
        if match is not None:
            registrations.remove(match)
        else:
            match = _original_of(mount, elsewhere)
        found.append(FoundMount(mount.mountpoint, mount.source, mount, match))
    for registered in registrations:
        entry = registered.entry
        if not supervisor_lives(registered):
            _forget(registered)
            continue
        found.append(FoundMount(entry.mountpoint, entry.source, None, registered))
    return sorted(found, key=lambda one: one.mountpoint)


def find_private(search: Callable[[set[int]], Iterable[str]]) -> list[FoundMount]:
    """The mounts in other mount namespaces, as ``monarchfs run`` makes them, that answer and cannot
    be seen in this one.

    Registrations of those that are gone are removed. A daemon may be in another process namespace,
    where its number says nothing; that nobody listens any more does.
    """
    namespace = own_mount_namespace()
    visible = {mount.minor for mount in read_mountinfo() if mount.fstype == MONARCHFS}
    found = []
    for registered in find_mounts(search(set())):
        entry = registered.entry
        if entry.mount_namespace == namespace or entry.connection in visible:
            continue
        if supervisor_lives(registered) or _listens(registered):
            found.append(FoundMount(entry.mountpoint, entry.source, None, registered))
        else:
            _forget(registered)
    return sorted(found, key=lambda one: one.mountpoint)


def find_one(path: str, search: Callable[[set[int]], Iterable[str]]) -> FoundMount | None:
    """The mount of ours on ``path`` (absolute), without looking at what is mounted there."""
    resolved = resolve_mountpoint(path)
    return next((one for one in find_all(search) if one.mountpoint == resolved), None)


def find_others_mount(path: str) -> str | None:
    """The type of the file system mounted on ``path``; None if nothing is, or if it is ours."""
    mount = find_mount(resolve_mountpoint(path))
    return mount.fstype if mount is not None and mount.fstype != MONARCHFS else None


def supervisor_lives(registered: Registered) -> bool:
    """Whether the registered supervisor is still the process of that number."""
    ticks = start_ticks(registered.entry.supervisor_pid)
    if ticks is None and registered.owner_uid != os.geteuid():
        # Where /proc hides the processes of others (hidepid), its socket tells.
        return _listens(registered)
    return ticks == registered.entry.start_ticks


def unmount_found(found: FoundMount, deadline: float) -> bool:
    """Unmounts by ``deadline`` (time.monotonic), by the supervisor or, where that does not do it,
    by force; whether the mount is gone. Of a mount that was made in another mount namespace only
    the copy in this one goes: those who use it there are not cut off."""
    if found.made_elsewhere:
        unmount_call(found.mountpoint, lazy=True)
        top = find_mount(found.mountpoint)
        return found.mount is None or top is None or top.mount_id != found.mount.mount_id
    return _supervisor_did_it(found, deadline) or remove_by_force(found, deadline)


def remove_by_force(found: FoundMount, deadline: float) -> bool:
    """Unmounts without the supervisor's help by ``deadline`` (time.monotonic), kills the supervisor
    if it is still there, and removes the registration; whether the mount is gone. Idempotent."""
    outcome = Unmounted.NOT_MOUNTED
    if found.mount is not None:
        outcome = unmount_bounded(found.mountpoint, deadline, found.mount.minor)
    if found.registered is not None:
        if supervisor_lives(found.registered):
            _kill(found.registered)
        _forget(found.registered)
    return outcome is not Unmounted.FAILED


def _supervisor_did_it(found: FoundMount, deadline: float) -> bool:
    """Whether the supervisor unmounted, and went, in time."""
    if not found.supervisor_alive:
        return False
    assert found.registered is not None
    left = deadline - time.monotonic()
    reserve = min(_FORCE_SECONDS, left / 3)
    try:
        with Connection(found.registered.socket_path, left - reserve) as connection:
            if connection.peer_uid != found.registered.owner_uid:
                return False
            asked = {"command": "umount", "timeout": left - reserve}
            connection.request(asked, deadline - reserve - time.monotonic())
            return connection.wait_closed(1.0)
    except OperationError:
        return False


def _registration_of(mount: Mount, registrations: list[Registered]) -> Registered | None:
    """The registration of a mount; its owner's word counts, or root's."""
    for registered in registrations:
        same = registered.entry.mountpoint == mount.mountpoint
        if same and registered.owner_uid in (0, root_uid(), mount.user_id):
            return registered
    return None


def _original_of(mount: Mount, registrations: list[Registered]) -> Registered | None:
    """The registration, in another mount namespace, of what this one has a copy of; its owner's
    word counts, or root's."""
    for registered in registrations:
        same = registered.entry.connection == mount.minor
        if same and registered.owner_uid in (0, root_uid(), mount.user_id):
            return registered
    return None


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
    """Kills a supervisor, if it belongs to who registered it, and waits a moment for its end."""
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
