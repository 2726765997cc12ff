"""The files beside control sockets that say which mounts exist, and whose they are."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields

from monarchfs.control.messages import MOST_REQUEST_BYTES, decode_message

UNKNOWN_CONNECTION = -1


@dataclass(frozen=True, slots=True)
class Registration:
    """What a supervisor writes beside its socket.

    ``mountpoint`` only has a meaning in ``mount_namespace`` (the inode number, namespaces(7)).
    ``start_ticks`` is when the supervisor's process began (field 22 of proc_pid_stat(5)), which
    makes its number unambiguous. ``connection`` is the minor number of the mount's device, by which
    copies of the mount in other namespaces are known, too.
    """

    mountpoint: str
    mount_namespace: int
    source: str
    uid: int
    supervisor_pid: int
    start_ticks: int
    state_dir: str
    started_ns: int
    connection: int = UNKNOWN_CONNECTION

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Registered:
    """A registration that was found; ``stem`` is its path without ``.json`` or ``.sock``,
    ``owner_uid`` is who wrote it: the supervisor's user."""

    stem: str
    owner_uid: int
    entry: Registration

    @property
    def socket_path(self) -> str:
        return self.stem + ".sock"


def root_uid() -> int:
    """Root as this process sees it: another number in a user namespace that does not map root
    (user_namespaces(7)), as that of ``monarchfs run``."""
    return os.stat("/").st_uid


def own_mount_namespace() -> int:
    """The inode number of this process's mount namespace."""
    return os.stat("/proc/self/ns/mnt").st_ino


def registration_stem(runtime_dir: str, mountpoint: str, connection: int) -> str:
    """Where the socket and the registration of a mount are, without suffix. Jobs with mount
    namespaces of their own may share the directory and the mount point's name, and one mount may
    lie over another."""
    name = os.fsencode(mountpoint) + b"\0%d\0%d" % (own_mount_namespace(), connection)
    digest = hashlib.sha256(name).hexdigest()
    return os.path.join(runtime_dir, digest[:24])


def find_mounts(runtime_dirs: Iterable[str]) -> list[Registered]:
    """All readable registrations in ``runtime_dirs``, also of dead daemons. Other users' only count
    for their own mounts, because anybody can write into /tmp."""
    found = []
    for directory in runtime_dirs:
        try:
            names = sorted(os.listdir(directory))
            owner = os.lstat(directory)
        except OSError:
            continue
        if not stat.S_ISDIR(owner.st_mode) or owner.st_mode & 0o022:
            continue
        for name in names:
            if name.endswith(".json"):
                registered = _read_registration(os.path.join(directory, name))
                if registered is not None and registered.owner_uid == owner.st_uid:
                    found.append(registered)
    return found


def decode_registration(content: bytes, owner_uid: int) -> Registration:
    """What a file of ``owner_uid`` says. Raises ValueError for what is no registration, and for one
    of another user's mount, unless root wrote it."""
    message = decode_message(content)
    known = {}
    for field in fields(Registration):
        if field.name not in message and field.default is not MISSING:
            continue
        if type(message.get(field.name)).__name__ != field.type:
            raise ValueError(f"it has no {field.name}")
        known[field.name] = message[field.name]
    entry = Registration(**known)
    if owner_uid not in (0, entry.uid, root_uid()):
        raise ValueError("it is about another user's mount")
    return entry


def _read_registration(path: str) -> Registered | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            owner_uid = os.fstat(file.fileno()).st_uid
            entry = decode_registration(file.read(MOST_REQUEST_BYTES), owner_uid)
    except (OSError, ValueError):
        return None
    return Registered(path.removesuffix(".json"), owner_uid, entry)
