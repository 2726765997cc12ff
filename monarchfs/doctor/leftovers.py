"""What earlier mounts left behind: dead mounts, sockets, caches of sources that are gone."""

from __future__ import annotations

import os
import re
import shlex
import socket
import stat
from collections.abc import Container, Sequence

from monarchfs.config.places import DefaultPlaces, Search
from monarchfs.control.peers import short_socket_path
from monarchfs.doctor.checks import Check, from_error, ok, warning
from monarchfs.fuse.mountinfo import MONARCHFS, read_mountinfo
from monarchfs.supervisor.directories import LOCK, OPEN_FILE, Holder, read_holder
from monarchfs.supervisor.recover import FoundMount, find_all, find_private
from monarchfs.supervisor.registration import check_runtime_dir
from monarchfs.system.bounded import is_missing
from monarchfs.types import MonarchError

_CONNECT_SECONDS = 1.0
_PLACE = re.compile(r"\b([0-9a-f]+):([0-9a-f]+):(\d+) ")


def runtime_dir(path: str) -> list[Check]:
    try:
        check_runtime_dir(path)
    except MonarchError as error:
        return [from_error("runtime_dir", error)]
    return [ok("runtime_dir", path, path=path)]


def mounts(search: Search) -> list[Check]:
    """Looks at the table of mounts and at registrations; no mount itself is touched."""
    return judge_mounts([*find_all(search), *find_private(search)])


def judge_mounts(found: Sequence[FoundMount]) -> list[Check]:
    checks = []
    others = sum(one.other_owner is not None for one in found)
    for one in found:
        if one.other_owner is not None or one.supervisor_alive:
            continue
        remedy = f"monarchfs umount {one.mountpoint}"
        if one.registered is not None:
            detail = f"the mount on {one.mountpoint} is stale: its daemon is dead"
        else:
            # It may be in another container, and serve.
            detail = f"no daemon of the mount on {one.mountpoint} can be seen from here"
            remedy = f"if it does not answer: {remedy}"
        checks.append(warning("stale_mount", detail, remedy, mountpoint=one.mountpoint))
    alive = len(found) - others - len(checks)
    hidden = sum(one.private for one in found)
    text = "none" if not found else f"{alive} alive, {len(checks)} stale"
    text += f", {others} of other users" if others else ""
    text += f"; {hidden} of them not visible in this mount namespace" if hidden else ""
    return [ok("mounts", text, alive=alive, stale=len(checks), others=others), *checks]


def sockets(search: Search) -> list[Check]:
    """Sockets without a registration that nobody listens on."""
    what = "nobody listens there any more"
    dead = [path for directory in search(mount_owners()) for path in dead_sockets(directory)]
    return [
        warning("stale_socket", f"{path}: {what}", f"rm {shlex.quote(path)}", path=path)
        for path in dead
    ]


def mount_owners() -> set[int]:
    """The users who have mounts of ours, by the mount table."""
    return {m.user_id for m in read_mountinfo() if m.fstype == MONARCHFS and m.user_id is not None}


def dead_sockets(directory: str) -> list[str]:
    """Sockets in a runtime directory without a registration beside them, on which nobody listens. A
    directory that is a link, or that others may write to, is passed over: its entries may be
    anybody's."""
    try:
        st = os.lstat(directory)
        if not stat.S_ISDIR(st.st_mode) or st.st_mode & 0o022:
            return []
        names = set(os.listdir(directory))
    except OSError:
        return []
    stems = [name.removesuffix(".sock") for name in sorted(names) if name.endswith(".sock")]
    paths = [os.path.join(directory, f"{s}.sock") for s in stems if f"{s}.json" not in names]
    return [path for path in paths if _is_socket_of(st.st_uid, path) and not _listens(path)]


def _is_socket_of(uid: int, path: str) -> bool:
    try:
        st = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(st.st_mode) and st.st_uid == uid


def _listens(path: str) -> bool:
    """Also if it cannot be asked (another user's)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        try:
            with short_socket_path(path) as short:
                connection.connect(short)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def caches(places: DefaultPlaces) -> list[Check]:
    """State directories in the default place. Asks the file systems of their sources."""
    base = os.path.join(places.cache_dir, "state")
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return []
    busy = locked_files()
    paths = [os.path.join(base, name) for name in names]
    kept = [(path, holder) for path in paths if (holder := _idle_holder(path, busy))]
    return judge_caches([(path, holder, is_missing(holder.source)) for path, holder in kept])


def judge_caches(kept: Sequence[tuple[str, Holder, bool]]) -> list[Check]:
    """``kept``: state directories that no mount uses, who had them last, and whether their source
    is missing."""
    checks = []
    for path, holder, missing in kept:
        if not missing:
            continue
        detail = f"{path} is the cache of {holder.source}, which is not there"
        remedy = f"if it will not come back: monarchfs cache remove {shlex.quote(path)}"
        checks.append(warning("orphan", detail, remedy, path=path))
    if kept:
        text = f"{len(kept)} kept for later mounts, {len(checks)} of a source that is not there"
        checks.insert(0, ok("caches", text, kept=len(kept), orphans=len(checks)))
    return checks


def locked_files() -> set[tuple[int, int, int]]:
    """Major, minor and inode number of each file with a flock(2) on it (proc(5), /proc/locks):
    trying the lock would disturb a mount that begins just then."""
    found = set()
    with open("/proc/locks", encoding="ascii", errors="replace") as locks:
        for line in locks:
            fields = line.split()
            if "FLOCK" in fields and (match := _PLACE.search(line)):
                found.add((int(match[1], 16), int(match[2], 16), int(match[3])))
    return found


def _idle_holder(state_dir: str, busy: Container[tuple[int, int, int]]) -> Holder | None:
    """Who had a state directory last; None if somebody has it now, or that is unknown."""
    try:
        lock = os.open(os.path.join(state_dir, LOCK), os.O_RDONLY | OPEN_FILE)
    except OSError:
        return None
    try:
        st = os.fstat(lock)
        if (os.major(st.st_dev), os.minor(st.st_dev), st.st_ino) in busy:
            return None
        return read_holder(lock)
    finally:
        os.close(lock)
