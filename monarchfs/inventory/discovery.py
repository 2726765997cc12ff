"""What caches there are: state directories, and the directories in tiers that they own, or that
nobody claims any more.

A state directory is the user's, and so is what it says. So a child with that user's rights looks at
it, for a bounded time: whatever a link leads to, the user could have looked at as well. Directories
of several users are looked for only where root alone can change the way.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from monarchfs.config import User
from monarchfs.config.places import own_directories, resolve_user
from monarchfs.fuse.mountinfo import is_network_filesystem
from monarchfs.inventory.trees import Size, in_use, open_users, tree_size
from monarchfs.store.segments import SegmentFiles
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.lock import LOCK, read_holder
from monarchfs.supervisor.tierdirs import (
    FORMER_NAME,
    NAME,
    OPEN_DIRECTORY,
    OWNER,
    claims,
    read_owner,
)
from monarchfs.supervisor.tierdirs import read_record as read_tiers
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.system.trusted import open_directory
from monarchfs.types import OperationError, UsageError

OTHER_TIER = "its last mount did not name this tier"
UNCLAIMED = "no state directory claims it"
UNKNOWN = "unknown"
"""The source of a directory of the former layout that no state directory owns: it does not say."""
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOOK_SECONDS = 2.0
_MEASURE_SECONDS = 3.0
_MOST_NAMES = 1000
_MOST_SILENT = 8
_DATASET = re.compile(r"[0-9a-f]{16}")
_TEMPORARY = "/tmp"
_MOST_FORMER = 8
_IN_FORMER = re.compile(rf"[0-9a-f]{{2}}|parts|segments|{OWNER}")


@dataclass(frozen=True, slots=True)
class TierDirectory:
    """One in a tier. ``size`` is of its copies. ``stranded`` says why no mount uses them."""

    tier: str
    path: str
    size: Size
    in_use: bool
    last_used: float
    stranded: str | None = None
    former: bool = False
    """In the layout of earlier releases, which the next mount of the source takes over."""


@dataclass(frozen=True, slots=True)
class LocalCache:
    """A state directory with its directories in tiers; or, not ``claimed``, one directory whose
    state directory is gone or has another. ``part``: only some of its directories are meant.
    ``mountpoint`` is where it is mounted, or was last; times are in seconds since 1970."""

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
        """The cache with nothing but its stranded directories, None without any."""
        left = tuple(one for one in self.directories if one.stranded)
        return replace(self, directories=left, part=True, in_use=False) if left else None


class Inventory:
    """One look at a node. ``notes`` say what could not be looked at. Each step blocks for some
    seconds at most for each place that hangs. For processes of one thread (forks)."""

    def __init__(self, *, measure: bool = True) -> None:
        self._measure = measure
        self._found: dict[tuple[str, int], LocalCache] = {}
        self._claimed: set[tuple[str, int]] = set()
        self._tiers: dict[tuple[str, int], User] = {}
        self.notes: list[str] = []

    def caches(self) -> list[LocalCache]:
        """All that were found, the least recently used first; looks for stranded ones in the tiers
        that are known by now."""
        looked: set[tuple[str, int]] = set()
        # A stranded directory's owner may name a state directory that has further tiers.
        while ahead := set(self._tiers) - looked:
            for tier, uid in sorted(ahead):
                looked.add((tier, uid))
                self._look_in_tier(tier, self._tiers[tier, uid])
        return sorted(self._found.values(), key=lambda one: one.last_used)

    def users(self, users: Iterable[User], environ: Mapping[str, str]) -> None:
        """The default places of users; ends early where many homes hang."""
        silent = len(self.notes) + _MOST_SILENT
        for user in users:
            look = partial(default_places, user.uid, environ)
            for place in self._asked(user, f"the home of {user.name}", look) or ():
                self.base(place, user)
            if len(self.notes) > silent:
                self.notes.append(f"users after {user.name} were not looked at")
                return

    def base(self, cache_dir: str, user: User) -> None:
        """A default place: state directories in ``state``, copies beside that."""
        base = os.path.join(cache_dir, "state")
        for name, owner in self._names(base, user, _DATASET):
            self.state_dir(os.path.join(base, name), owner)
        self.tier(cache_dir, user)

    def tier(self, path: str, user: User) -> None:
        """Directories in a tier, of the user; of all, where that is root and the tier root's."""
        self._tiers[path, user.uid] = user

    def state_dir(self, path: str, user: User | None) -> bool:
        """A state directory of a user's (None: of whoever owns it); whether it is one."""
        if user is None:
            me = user_of(os.geteuid())
            uid = self._asked(me, path, lambda: os.lstat(path).st_uid)
            if uid is None or os.geteuid() not in (0, uid):
                return False
            user = user_of(uid)
        if (path, user.uid) in self._found:
            return True
        said = self._asked(user, path, partial(_state, path, user))
        if said is None:
            return False
        owned = []
        for tier in said["former_tiers"][:_MOST_FORMER]:
            self.tier(tier, user)
            found = self._former(tier, said["dataset_id"], user)
            if found is not None:
                self._claimed.add((found.path, user.uid))
                # Its daemon has no lock but that of the state directory.
                owned.append(replace(found, in_use=found.in_use or said["in_use"]))
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
        for name, owner in self._names(tier, user, NAME):
            path = os.path.join(tier, name)
            if (path, owner.uid) in self._claimed:
                continue
            found = self._directory(tier, name, owner)
            if found is None or (said := found[1]) is None or said["uid"] != owner.uid:
                continue
            state_dir = said["state_dir"]
            if os.path.isabs(state_dir) and claims(state_dir, tier, name, owner):
                # Also where that hangs, or is another container's.
                self.state_dir(state_dir, owner)
                continue
            used = found[0].in_use
            one = found[0] if used else replace(found[0], stranded=UNCLAIMED)
            cache = LocalCache(said["source"], owner, state_dir, (one,), used, one.last_used)
            self._found[path, owner.uid] = replace(cache, claimed=False)

        for name, owner in self._names(tier, user, FORMER_NAME):
            path = os.path.join(tier, name)
            if (path, owner.uid) in self._claimed:
                continue
            former = self._former(tier, name, owner)
            if former is not None:
                one = former if former.in_use else replace(former, stranded=UNCLAIMED)
                cache = LocalCache(UNKNOWN, owner, "", (one,), one.in_use, one.last_used)
                self._found[path, owner.uid] = replace(cache, claimed=False)

    def _former(self, tier: str, name: str, user: User) -> TierDirectory | None:
        path = os.path.join(tier, name)
        said = self._asked(user, path, partial(_former_directory, path, user, self._measure))
        if said is None:
            return None
        size = Size(*said["size"])
        return TierDirectory(tier, path, size, said["in_use"], said["last_used"], former=True)

    def _directory(
        self, tier: str, name: str, user: User
    ) -> tuple[TierDirectory, dict[str, Any] | None] | None:
        path = os.path.join(tier, name)
        said = self._asked(user, path, partial(_directory, path, user, self._measure))
        if said is None:
            return None
        size = Size(*said["size"])
        return TierDirectory(tier, path, size, said["in_use"], said["last_used"]), said["owner"]

    def _names(self, path: str, user: User, pattern: re.Pattern[str]) -> Iterable[tuple[str, User]]:
        """The directories in one, of the user; of all users, where it is root's alone."""
        found = self._asked(user, path, partial(_names, path, user.uid, pattern)) or []
        if len(found) == _MOST_NAMES:
            self.notes.append(f"{path} has more than {_MOST_NAMES} entries: the rest was left out")
        return [(name, user if uid == user.uid else user_of(uid)) for name, uid in found]

    def _asked(self, user: User, path: str, look: Callable[[], Any]) -> Any:
        """What ``look`` returns in a child with the user's rights; None where it may not, where
        nothing is there, and where it does not answer in time."""

        def call() -> Answer:
            become(user)
            try:
                return look(), ()
            except FileNotFoundError:
                return None, ()
            except OSError as error:
                raise OperationError(f"{path} was not looked at: {error.strerror}") from None

        limit = _LOOK_SECONDS + _MEASURE_SECONDS
        try:
            return bounded_call(call, timeout=limit, overdue=f"{path} does not answer")[0]
        except OperationError as error:
            self.notes.append(str(error))
            return None


def source_gone(source: str, user: User) -> bool:
    """Whether a user finds nothing where the source was; False where that cannot be told. Also true
    of a source that is not mounted now."""

    def call() -> Answer:
        become(user)
        try:
            os.lstat(source)
        except (FileNotFoundError, NotADirectoryError):
            return True, ()
        except OSError:
            return False, ()
        return False, ()

    try:
        return bool(bounded_call(call, timeout=_LOOK_SECONDS, overdue=f"{source} hangs")[0])
    except OperationError:
        return False


def default_places(uid: int, environ: Mapping[str, str]) -> list[str]:
    """Where mounts of ``uid`` keep what no option places. Asks the file system of the home: for a
    child."""
    temporary = list(dict.fromkeys([environ.get("TMPDIR") or _TEMPORARY, _TEMPORARY]))
    places = [f"{directory}/monarchfs-{uid}" for directory in temporary]
    places += [path for directory in temporary for path in own_directories(directory, uid)]
    home = environ.get("HOME") or _home_of(uid)
    cache_home = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if os.path.isabs(cache_home) and not is_network_filesystem(cache_home):
        places.append(os.path.join(cache_home, "monarchfs"))
    return [place for place in places if os.path.isabs(place) and os.path.isdir(place)]


def users_of_node() -> list[User]:
    """Everybody whom the node knows, and who has a directory of ours in /tmp."""
    uids = {entry.pw_uid for entry in pwd.getpwall()} - {0}
    own = re.compile(r"monarchfs-([0-9]{1,10})(\.[0-9a-f]{16})?")
    for name in os.listdir(_TEMPORARY):
        if match := own.fullmatch(name):
            uids.add(int(match[1]))
    return [user_of(uid) for uid in sorted(uids) if uid < 1 << 32]


def user_of(uid: int) -> User:
    """A user by number, also one whom the node does not know (any more)."""
    if uid == os.geteuid():
        return User(_name_of(uid), uid, os.getegid(), tuple(os.getgroups()))
    try:
        return resolve_user(str(uid), {})
    except UsageError:
        return User(str(uid), uid, 65534, ())


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _home_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""


# In a child, as the user


def _names(path: str, uid: int, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    directory = os.open(path, OPEN_DIRECTORY)
    everybody = uid == 0 and _is_roots(path)
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not pattern.fullmatch(entry.name):
                continue
            st = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode) and (everybody or st.st_uid == uid):
                found.append((entry.name, st.st_uid))
    return list(islice(sorted(found), _MOST_NAMES))


def _is_roots(path: str) -> bool:
    try:
        os.close(open_directory(path))
    except OSError:
        return False
    return True


def _state(path: str, user: User) -> dict[str, Any] | None:
    directory = open_users(path, user.uid)
    if directory is None:
        return None
    lock = os.open(LOCK, _FILE, dir_fd=directory)
    holder = read_holder(lock)
    if holder is None:
        return None
    owned = read_tiers(directory, user)
    former = FORMER_NAME.fullmatch(holder.dataset_id)
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
        "tiers": owned,
        "dataset_id": holder.dataset_id,
        "former_tiers": [tier for tier in holder.tiers if former and tier not in owned],
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


def _directory(path: str, user: User, measure: bool) -> dict[str, Any] | None:
    directory = open_users(path, user.uid)
    if directory is None:
        return None
    owner_file = os.open(OWNER, _FILE, dir_fd=directory)
    owner = read_owner(owner_file)
    here = f"/proc/self/fd/{directory}"
    size = tree_size(f"{here}/.", _MEASURE_SECONDS) if measure else Size(whole=False)
    # The owner file itself is no copy.
    copies = max(0, size.files - 1 + (_sharing(directory, user) if measure else 0))
    return {
        "owner": None if owner is None else asdict(owner),
        "size": (size.bytes, copies, size.whole),
        "in_use": in_use(here, OWNER),
        "last_used": os.fstat(owner_file).st_mtime,
    }


def _former_directory(path: str, user: User, measure: bool) -> dict[str, Any] | None:
    """One of the former layout: in a tier that others use, too, the name alone says little. It has
    no owner file, or an empty one."""
    directory = open_users(path, user.uid)
    if directory is None:
        return None
    names = os.listdir(directory)
    if not names or not all(_IN_FORMER.fullmatch(name) for name in names):
        return None
    here = f"/proc/self/fd/{directory}"
    size = tree_size(f"{here}/.", _MEASURE_SECONDS) if measure else Size(whole=False)
    copies = size.files - (OWNER in names) + (_sharing(directory, user) if measure else 0)
    return {
        "size": (size.bytes, max(0, copies), size.whole),
        "in_use": in_use(here, OWNER),
        "last_used": os.fstat(directory).st_mtime,
    }
