"""What crashed nodes, crashed daemons and deleted users leave behind, and how it is removed.

Nothing in use is touched: each thing is removed with its lock held, or after its process was found
dead. No link is followed: what a user could have made is reached only through directories of
root's, and removed by descriptors.
"""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from monarchfs.config.places import DATASET_ID, OWNER, Search, user_of
from monarchfs.control.registration import find_mounts
from monarchfs.doctor.leftovers import dead_sockets, mount_owners
from monarchfs.fuse.mount import SYSTEM_PATH
from monarchfs.fuse.mountinfo import MONARCHFS, read_mountinfo
from monarchfs.slurm import caches
from monarchfs.slurm.epilog import end_share, last_status
from monarchfs.slurm.job import JobId, job_ids
from monarchfs.slurm.records import (
    locked,
    names_in,
    read_record,
    remove_tree,
    unlink,
    write_record,
)
from monarchfs.slurm.shares import KEY, Share, every_share
from monarchfs.slurm.site import Site
from monarchfs.supervisor.directories import NAME, in_use
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.recover import (
    FoundMount,
    find_all,
    is_alive,
    registration_of,
    remove_by_force,
)
from monarchfs.supervisor.registration import remove_registration, unlink_as
from monarchfs.system.bounded import answer_within
from monarchfs.system.locks import Busy
from monarchfs.types import MonarchError, OperationError

YOUNG_SECONDS = 600.0
"""A job's prolog may run while Slurm does not list it as running yet."""
GONE_USER_SECONDS = 86400.0
"""A user directory that fails for a while must not cost everybody their caches."""
_LOOK_SECONDS = 2.0
_SQUEUE_SECONDS = 10.0
_MEASURE_SECONDS = 60.0
_UMOUNT_SECONDS = 5.0
_ID_DIGITS = 16


@dataclass(slots=True)
class Leftover:
    """Something that was found. ``removed`` is False in a dry run, or where ``error`` says why."""

    kind: str
    path: str
    why: str
    removed: bool = False
    error: str | None = None


class Sweeper:
    """One look at a node, step by step; what was found is in ``found``, in that order."""

    def __init__(self, *, remove: bool) -> None:
        self.remove = remove
        self.found: list[Leftover] = []
        self.notes: list[str] = []
        """What could not be looked at, and why; what other commands are there for."""

    def _put(self, kind: str, path: str, why: str, remove: Callable[[], bool | None]) -> None:
        """Notes something, and removes it if that is wanted. ``remove`` raises MonarchError or
        OSError, or returns False, if it cannot be removed now."""
        leftover = Leftover(kind, path, why)
        self.found.append(leftover)
        if not self.remove:
            return
        try:
            leftover.removed = remove() is not False
            if not leftover.removed:
                leftover.error = "it is in use again"
        except (MonarchError, OSError) as error:
            leftover.error = str(error)

    # Of any user

    def registrations(self, search: Search) -> None:
        """Registrations whose process is gone, in this mount namespace or one that is gone too;
        those of mounts that still exist go with these."""
        known = find_mounts(search(mount_owners()))
        ours = (mount for mount in read_mountinfo() if mount.fstype == MONARCHFS)
        mounted = [registration_of(mount, known) for mount in ours]
        for registered in known:
            if registered.owner_uid != os.geteuid() and os.geteuid() != 0:
                continue
            if registered in mounted or is_alive(registered):
                continue
            why = f"its process {registered.entry.supervisor_pid} is gone"
            remove = partial(remove_registration, registered.stem, registered.owner_uid)
            self._put("registration", registered.socket_path, why, remove)

    def sockets(self, search: Search) -> None:
        """Sockets without a registration that nobody listens on."""
        for directory in search(mount_owners()):
            for path in dead_sockets(directory):
                owner = os.lstat(path).st_uid
                if os.geteuid() in (0, owner):
                    why = "nobody listens there any more"
                    self._put("socket", path, why, partial(unlink_as, owner, path))

    def mounts(self, search: Search) -> None:
        """Mounts whose daemon is dead."""
        for found in find_all(search):
            if found.mount is not None and _is_dead(found):
                remove = partial(_unmount, found)
                self._put("mount", found.mountpoint, "its daemon is dead", remove)

    # Of root

    def jobs(self, site: Site, running: Set[JobId]) -> None:
        """Jobs that Slurm does not run here any more, in the sets of shares. It knows nothing of
        other batch systems' jobs."""
        known = job_ids(names_in(os.path.dirname(site.facts(0))))
        facts = {job: read_record(site.facts(job)) or {} for job in known}
        stay = running | {job for job in known if not facts[job].get("by_slurm", True)}
        young = time.time() - YOUNG_SECONDS
        for share in every_share(site):
            for job in share.jobs():
                entered = share.entry(job).get("entered_unix_seconds", 0)
                if job in stay or entered > young:
                    continue
                path = os.path.join(share.directory, "jobs", str(job))
                self._put("job", path, "it is over", partial(_leave, share, job))
        for directory in (site.environments, os.path.dirname(site.facts(0))):
            for name in names_in(directory):
                path = os.path.join(directory, name)
                is_over = name.isdecimal() and int(name) not in stay
                if is_over and os.lstat(path).st_mtime < young:
                    self._put("job", path, "it is over", partial(unlink, path))

    def shares(self, site: Site) -> None:
        """Mounts that no job uses, and that have lingered long enough."""
        for share in every_share(site):
            if share.jobs() or share.idle_seconds() < max(site.linger_seconds, 1.0):
                continue
            self._put("share", share.directory, "no job uses it", partial(_end, share))

    def caches(self, site: Site) -> None:
        """Caches of users that are gone, copies that nobody counts, and what was thrown away."""
        known = {cache.key: cache for cache in caches.all_caches(site)}
        old = time.time() - GONE_USER_SECONDS
        idle = [cache for cache in known.values() if cache.last_used < old]
        plain = _of_plain_mounts(site.cache_dir, old)
        gone = self._gone_users(site, {cache.uid for cache in idle} | set(plain.values()))
        for cache in idle:
            if cache.uid in gone:
                self._discard(site, cache.key, f"user {cache.user} ({cache.uid}) is gone")
        for tier in dict.fromkeys(tier.path for tier in site.tiers):
            for name in names_in(tier):
                if KEY.fullmatch(name) and name not in known:
                    path = os.path.join(tier, name)
                    remove = partial(_remove_uncounted, Share(site, name), path)
                    self._put("copies", path, "no index counts them", remove)
        for path, uid in plain.items():
            if uid in gone:
                self._discard_plain(site, path, uid)
        for path in caches.trash_in(site):
            self._put("trash", path, "it was thrown away", partial(remove_tree, path))

    def budget(self, site: Site) -> None:
        """Unmounted caches beyond the budget of their tier, the least recently used first."""
        if site.budget:
            caches.measure(site, _MEASURE_SECONDS)
        for tier in site.tiers:
            budget = caches.budget_bytes(site, tier.path)
            if budget is None:
                continue
            for key in caches.over_budget(budget, *caches.usage_of(site, tier.path), 0):
                self._discard(site, key, f"the budget of {tier.path} is exceeded")

    def _discard(self, site: Site, key: str, why: str) -> None:
        self._put("cache", site.cache(key), why, partial(caches.discard, site, key, why))

    def _discard_plain(self, site: Site, path: str, uid: int) -> None:
        state = os.path.join(site.cache_dir, "state", os.path.basename(path)[:_ID_DIGITS])
        if not in_use(state) and not in_use(path, OWNER):
            self._put("cache", path, f"user {uid} is gone", partial(remove_tree, path))

    def _gone_users(self, site: Site, uids: Set[int]) -> set[int]:
        """Those of the users whom no look has found for `GONE_USER_SECONDS`: one look may fail for
        everybody, and says the same then."""
        path, now = os.path.join(site.caches, ".gone"), time.time()
        before = read_record(path) or {}
        since = {uid: before.get(str(uid), now) for uid in uids if not _user_exists(uid)}
        if self.remove:
            with suppress(OSError):
                write_record(path, {str(uid): first for uid, first in since.items()})
        return {uid for uid, first in since.items() if first < now - GONE_USER_SECONDS}


def running_jobs(node: str) -> set[JobId]:
    """The jobs that Slurm has on a node. Raises OperationError where it does not say."""
    squeue = shutil.which("squeue", path=SYSTEM_PATH + ":/usr/local/bin:/opt/slurm/bin")
    if squeue is None:
        raise OperationError("there is no squeue")
    environment = {key: os.environ[key] for key in ("SLURM_CONF",) if key in os.environ}
    try:
        done = subprocess.run(
            [squeue, "--noheader", "--states=all", "--format=%A %t", f"--nodelist={node}"],
            env={"PATH": SYSTEM_PATH, "LANG": "C", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SQUEUE_SECONDS,
            check=True,
        )
        pairs = [line.split() for line in done.stdout.splitlines()]
        return {int(job) for job, state in pairs if state not in _OVER}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise OperationError(f"squeue does not say which jobs are here: {error}") from None


_OVER = frozenset({"CD", "CA", "F", "TO", "NF", "OOM", "BF", "DL", "PR"})
"""Job states of squeue(1) in which nothing of a job is left on a node; CG, completing, is not."""


def _is_dead(found: FoundMount) -> bool:
    if found.registered is not None:
        return not found.supervisor_alive
    return is_unserved(found)


def is_unserved(found: FoundMount) -> bool:
    """Whether the kernel says that no process serves a mount any more. Asks it for two seconds at
    most, and not about other users' mounts."""
    uid = found.mount.user_id if found.mount else None
    if uid is None or os.geteuid() not in (0, uid):
        return False

    def code() -> int | None:
        try:
            if uid != os.geteuid():
                become(user_of(uid))  # others, even root, are refused by the mount
            os.statvfs(found.mountpoint)  # which is never answered from a cache
        except OSError as error:
            return error.errno
        return None

    # What the kernel answers once nobody has the connection's device open (fs/fuse/dev.c).
    return bool(answer_within(_LOOK_SECONDS, code, otherwise=None) == errno.ENOTCONN)


def _unmount(found: FoundMount) -> None:
    if not remove_by_force(found, time.monotonic() + _UMOUNT_SECONDS).gone:
        raise OperationError(f"try umount -l {found.mountpoint} as root")


def _leave(share: Share, job: JobId) -> bool:
    with locked(share.lock, time.monotonic() + _LOOK_SECONDS):
        return share.leave(job)


def _end(share: Share) -> bool:
    with suppress(Busy), locked(share.lock, 0.0):
        if share.jobs():
            return False
        if not end_share(share, time.monotonic() + _UMOUNT_SECONDS, last_status(share)):
            raise OperationError(f"{share.directory} cannot be unmounted")
        return True
    return False


def _remove_uncounted(share: Share, path: str) -> bool:
    with suppress(Busy), locked(share.lock, 0.0):
        if share.record() or share.jobs() or os.path.exists(share.cache):
            return False
        remove_tree(path)
        return True
    return False


def _of_plain_mounts(cache_dir: str, old: float) -> dict[str, int]:
    """State and copies of ``monarchfs mount`` in the default place that are old, and whose."""
    found = {}
    for directory, pattern in ((os.path.join(cache_dir, "state"), DATASET_ID), (cache_dir, NAME)):
        for name in filter(pattern.fullmatch, names_in(directory)):
            st = os.lstat(path := os.path.join(directory, name))
            if st.st_mtime <= old:
                found[path] = st.st_uid
    return found


def _user_exists(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
