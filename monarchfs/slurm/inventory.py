"""Finds caches, and removes them: state directories, and directories in tiers, which a state
directory owns, or none.

A state directory and its content belong to the user. So a child with that user's rights inspects
it, for a bounded time: it can reach nothing that the user could not. Directories of several users
are only searched where root alone can change the path. One in use is never removed: all its locks
are taken before.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.config import User
from monarchfs.config.places import (
    DATASET_ID,
    OWNER,
    home_of,
    own_directories,
    scratch_directories,
    user_of,
)
from monarchfs.fuse.mountinfo import storage_of
from monarchfs.slurm.records import remove_tree
from monarchfs.supervisor.directories import (
    LOCK,
    MEASURE_SECONDS,
    NAME,
    OPEN_DIRECTORY,
    OPEN_FILE,
    Size,
    claims,
    directories_in,
    in_use,
    open_users,
    read_holder,
    read_owner,
    read_record,
    tree_size,
)
from monarchfs.supervisor.identity import become
from monarchfs.system.bounded import Tell, answer_within, bounded_talk, bounded_value, is_missing
from monarchfs.system.locks import try_lock
from monarchfs.system.trusted import open_directory, place_of
from monarchfs.types import OperationError

OTHER_TIER = "its last mount did not name this tier"
UNCLAIMED = "no state directory claims it"
_LOOK_SECONDS = 2.0
_MOST_SILENT = 8
MOST_NAMES = 1000
_TEMPORARY = "/tmp"
_SILENCE_SECONDS = 120.0
_OURS = re.compile(r"tiers(\.new)?|index(\.bad-\d+)?|suspect|(worker|supervisor)\.log(\.1)?")
"""What lies in a state directory (docs/ARCHITECTURE.md, "On disk"). Nothing else is removed there,
because --state-dir may name any directory."""


@dataclass(frozen=True, slots=True)
class TierDirectory:
    """A directory in a tier. ``size`` is that of its copies. ``stranded`` says why no mount uses
    them."""

    tier: str
    path: str
    size: Size
    in_use: bool
    last_used: float
    stranded: str | None = None


@dataclass(frozen=True, slots=True)
class LocalCache:
    """A state directory with its directories in tiers. If not ``claimed``: a single directory,
    whose state directory is gone or has another one. ``part``: only some of its directories are
    meant. ``mountpoint`` is where it is or was last mounted. Times are in seconds since 1970."""

    source: str
    user: User
    state_dir: str
    directories: tuple[TierDirectory, ...]
    in_use: bool
    last_used: float
    mountpoint: str | None = None
    claimed: bool = True
    part: bool = False

    @property
    def used_bytes(self) -> int:
        return sum(one.size.bytes for one in self.directories)

    def stranded_part(self) -> LocalCache | None:
        """The cache with only its stranded directories; None if there are none."""
        left = tuple(one for one in self.directories if one.stranded)
        return replace(self, directories=left, part=True, in_use=False) if left else None


class Inventory:
    """The caches of a node at one moment. ``notes`` say what could not be inspected. Each place
    that hangs costs a few seconds at most. For processes with one thread, because it forks."""

    def __init__(self, *, measure: bool = True) -> None:
        self._measure = measure
        self._found: dict[tuple[str, int], LocalCache] = {}
        self._claimed: set[tuple[str, int]] = set()
        self._tiers: dict[tuple[str, int], User] = {}
        self.notes: list[str] = []

    def caches(self) -> list[LocalCache]:
        """All caches that were found, the least recently used first, with the stranded directories
        in all known tiers."""
        looked: set[tuple[str, int]] = set()
        # A stranded directory's owner may name a state directory that has further tiers.
        while ahead := set(self._tiers) - looked:
            for tier, uid in sorted(ahead):
                looked.add((tier, uid))
                self._look_in_tier(tier, self._tiers[tier, uid])
        return sorted(self._found.values(), key=lambda one: one.last_used)

    def users(self, users: Iterable[User], environ: Mapping[str, str]) -> None:
        """Search the default places of users; ends early if many homes hang."""
        silent = len(self.notes) + _MOST_SILENT
        for user in users:
            look = partial(default_places, user.uid, environ)
            for place in self._asked(user, f"the home of {user.name}", look) or ():
                self.base(place, user)
            if len(self.notes) > silent:
                self.notes.append(f"users after {user.name} were not looked at")
                return

    def base(self, cache_dir: str, user: User) -> None:
        """Search a default place: state directories are in ``state``, copies beside it."""
        base = os.path.join(cache_dir, "state")
        for name, owner in self._names(base, user, DATASET_ID):
            self.state_dir(os.path.join(base, name), owner)
        self.tier(cache_dir, user)

    def tier(self, path: str, user: User) -> None:
        """Directories in a tier, of the user; of all, where that is root and the tier root's."""
        self._tiers[path, user.uid] = user

    def state_dir(self, path: str, user: User | None) -> bool:
        """Add a state directory of a user (None: of its owner); whether it is one."""
        if user is None:
            me = user_of(os.geteuid())
            uid = self._asked(me, path, lambda: os.lstat(path).st_uid)
            if uid is None or os.geteuid() not in (0, uid):
                return False
            user = user_of(uid)
        if (path, user.uid) in self._found:
            return True
        said = self._asked(user, path, partial(_inspect_state, path, user))
        if said is None:
            return False
        owned = []
        for tier, name in sorted(said["tiers"].items()):
            self.tier(tier, user)
            self._claimed.add((os.path.join(tier, name), user.uid))
            directory = self._directory(tier, name, user)
            if directory is None:
                continue
            if tier not in said["last_tiers"] and not directory[0].in_use:
                owned.append(replace(directory[0], stranded=OTHER_TIER))
            else:
                owned.append(directory[0])
        used = said["in_use"] or any(one.in_use for one in owned)
        last = max([said["last_used"], *(one.last_used for one in owned)])
        cache = LocalCache(said["source"], user, path, tuple(owned), used, last, said["mountpoint"])
        self._found[path, user.uid] = cache
        return True

    def _look_in_tier(self, tier: str, user: User) -> None:
        """Add the directories in a tier that no state directory has claimed so far."""
        for name, owner in self._names(tier, user, NAME):
            if (os.path.join(tier, name), owner.uid) not in self._claimed:
                self._look_at(tier, name, owner)

    def _look_at(self, tier: str, name: str, owner: User) -> None:
        one, said = self._directory(tier, name, owner) or (None, None)
        if one is None or said is None or said["uid"] != owner.uid:
            return
        source, state_dir = said["source"], said["state_dir"]
        if os.path.isabs(state_dir) and claims(state_dir, tier, name, owner):
            # Also if that hangs, or belongs to another container.
            self.state_dir(state_dir, owner)
            return
        one = one if one.in_use else replace(one, stranded=UNCLAIMED)
        self._found[one.path, owner.uid] = LocalCache(
            source, owner, state_dir, (one,), one.in_use, one.last_used, claimed=False
        )

    def _directory(
        self, tier: str, name: str, user: User
    ) -> tuple[TierDirectory, dict[str, Any] | None] | None:
        """The directory, and what its owner file says."""
        path = os.path.join(tier, name)
        said = self._asked(user, path, partial(_inspect_copies, path, user, measure=self._measure))
        if said is None:
            return None
        size = Size(*said["size"])
        one = TierDirectory(tier, path, size, said["in_use"], said["last_used"])
        return one, said["owner"]

    def _names(self, path: str, user: User, pattern: re.Pattern[str]) -> Iterable[tuple[str, User]]:
        """The user's directories in a directory; those of all users if root alone can change it."""
        found = self._asked(user, path, partial(_names_in, path, user.uid, pattern)) or []
        if len(found) == MOST_NAMES:
            self.notes.append(f"{path} has more than {MOST_NAMES} entries: the rest was left out")
        return [(name, user if uid == user.uid else user_of(uid)) for name, uid in found]

    def _asked(self, user: User, path: str, look: Callable[[], Any]) -> Any:
        """What ``look`` returns in a child with the user's rights. None if it finds nothing, has no
        permission, or does not answer in time."""

        def call() -> Any:
            become(user)
            try:
                return look()
            except FileNotFoundError:
                return None
            except OSError as error:
                raise OperationError(f"{path} was not looked at: {error.strerror}") from None

        limit = _LOOK_SECONDS + MEASURE_SECONDS
        try:
            return bounded_value(call, timeout=limit, overdue=f"{path} does not answer")
        except OperationError as error:
            self.notes.append(str(error))
            return None


def source_gone(source: str, user: User) -> bool:
    """Whether the user finds nothing at the source's path (also true if the source is not mounted
    now); False if that is unknown."""

    def gone() -> bool:
        become(user)
        return is_missing(source)

    return bool(answer_within(_LOOK_SECONDS, gone, otherwise=False))


def default_places(uid: int, environ: Mapping[str, str]) -> list[str]:
    """Where mounts of ``uid`` keep data by default. Asks the home's file system, so runs in a
    child."""
    temporary = scratch_directories(environ)
    places = [f"{directory}/monarchfs-{uid}" for directory in temporary]
    places += [path for directory in temporary for path in own_directories(directory, uid)]
    home = environ.get("HOME") or home_of(uid) or ""
    cache_home = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if os.path.isabs(cache_home) and storage_of(cache_home) != "network":
        places.append(os.path.join(cache_home, "monarchfs"))
    return [place for place in places if os.path.isdir(place)]


def users_of_node() -> list[User]:
    """All users that the node knows, and those who have a directory of ours in /tmp."""
    uids = {entry.pw_uid for entry in pwd.getpwall()} - {0}
    own = re.compile(r"monarchfs-([0-9]{1,10})(\.[0-9a-f]{16})?")
    for name in os.listdir(_TEMPORARY):
        if match := own.fullmatch(name):
            uids.add(int(match[1]))
    return [user_of(uid) for uid in sorted(uids) if uid < 1 << 32]


# In a child with the rights of the user who owns what is looked at; raises OSError


def _names_in(path: str, uid: int, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """The directories of ``uid`` in ``path``, with their owners; those of all users if it is
    root's."""
    directory = os.open(path, OPEN_DIRECTORY)
    everybody = uid == 0 and _is_roots(path)
    found = [
        (name, st.st_uid)
        for name, st in directories_in(directory, pattern)
        if everybody or st.st_uid == uid
    ]
    return sorted(found)[:MOST_NAMES]


def _is_roots(path: str) -> bool:
    try:
        os.close(open_directory(path))
    except OSError:
        return False
    return True


def _inspect_state(path: str, user: User) -> dict[str, Any] | None:
    """What a state directory says; None if it is none."""
    directory = open_users(path, user.uid)
    if directory is None:
        return None
    lock = os.open(LOCK, os.O_RDONLY | OPEN_FILE, dir_fd=directory)
    holder = read_holder(lock)
    if holder is None:
        return None
    times = [os.fstat(lock).st_mtime]
    try:
        index = os.stat("index/data.mdb", dir_fd=directory, follow_symlinks=False)
        times.append(index.st_mtime)
    except OSError:
        pass  # it was never mounted, or is no directory: the lock's time counts
    return {
        "source": holder.source,
        "mountpoint": None if holder.checking else holder.mountpoint,
        "last_tiers": holder.tiers,
        "tiers": read_record(directory, user),
        "in_use": in_use(f"/proc/self/fd/{directory}"),
        "last_used": max(times),
    }


def _sharing(directory: int, user: User) -> int:
    """How many more copies lie in segments than there are files of segments."""
    segments = SegmentFiles(directory, f"/proc/self/fd/{directory}", user.uid)
    try:
        found = segments.found()
        lists = sum(bool(segments.noted(segment)) for segment in found)
        return sum(len(segments.present(segment)) for segment in found) - len(found) - lists
    finally:
        segments.close()


def _inspect_copies(path: str, user: User, *, measure: bool) -> dict[str, Any] | None:
    """What a directory in a tier says; None if it is none."""
    directory = open_users(path, user.uid)
    if directory is None:
        return None
    file = os.open(OWNER, os.O_RDONLY | OPEN_FILE, dir_fd=directory)
    owner = read_owner(file)
    here = f"/proc/self/fd/{directory}"
    size = tree_size(f"{here}/.") if measure else Size(whole=False)
    # The owner file itself is no copy.
    copies = size.files - 1 + (_sharing(directory, user) if measure else 0)
    return {
        "owner": None if owner is None else asdict(owner),
        "size": (size.bytes, max(0, copies), size.whole),
        "in_use": in_use(here, OWNER),
        "last_used": os.fstat(file).st_mtime,
    }


# Removing


def remove_cache(cache: LocalCache) -> None:
    """Removes a cache: its directories and, unless only a part is meant, its state directory.

    Blocks until all is removed, or nothing happens for two minutes. Raises OperationError
    if it is in use (then nothing was removed), or something cannot be removed.
    """
    tiers = [(one.path, OWNER) for one in cache.directories]
    state = [(cache.state_dir, LOCK)] if cache.claimed and not cache.part else []

    def call(tell: Tell) -> list[str]:
        become(cache.user)
        # All locks before anything is removed.
        held = [_hold(*one, cache.user.uid) for one in [*state, *tiers]]
        left = []
        for path, lock, directory in [one for one in reversed(held) if one is not None]:
            try:
                if not _empty(path, lock, directory, tell):
                    left.append(path)
            except OSError as error:
                raise OperationError(f"cannot remove all of {path}: {error.strerror}") from None
        return left

    left: Sequence[str] = bounded_talk(
        call,
        silence=_SILENCE_SECONDS,
        overdue=f"the cache of {cache.source} was not removed: its file system does not answer",
        heard=lambda _name: None,  # it is only a sign of progress
    )
    for path in left:
        _remove_as_root(path)


def _hold(path: str, lock: str, uid: int) -> tuple[str, str, int] | None:
    """Open the directory, and lock it for the life of this process; None if it is gone."""
    try:
        directory = open_users(path, uid)
        if directory is None:
            raise OperationError(f"{path} is not the cache's any more: it was left as it is")
        descriptor = os.open(lock, os.O_RDONLY | OPEN_FILE, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OperationError(f"cannot open {path}: {error.strerror}") from None
    if not try_lock(descriptor):
        raise OperationError(f"{path} is in use: unmount that first")
    return path, lock, directory


def _empty(path: str, lock: str, directory: int, tell: Tell) -> bool:
    """Removes a directory's content, its lock last, and then the directory. False if that failed,
    or if something else lies there."""
    os.fchdir(directory)
    for name in os.listdir("."):
        if name == lock or (lock == LOCK and not _OURS.fullmatch(name)):
            continue
        tell(name)
        if stat.S_ISDIR(os.lstat(name).st_mode):
            remove_tree(name)
        else:
            os.unlink(name)
    os.unlink(lock)
    if os.geteuid() == 0:
        return False  # it is done by name, with care for links
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            return False
        if error.errno != errno.ENOTEMPTY:
            raise
    return True


def _remove_as_root(path: str) -> None:
    """Removes an empty directory that its user has no right to remove, or that is root's."""
    try:
        with place_of(path, alone=False) as place:
            os.rmdir(place.name, dir_fd=place.directory)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            return  # what is not ours lies there
        raise OperationError(
            f"{path} was emptied and cannot be removed: {error.strerror}: ask root"
        ) from None
