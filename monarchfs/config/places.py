"""Where things lie by default, and whom a mount is for."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from monarchfs.config.model import Config, PlainSettings, TierSpec, User
from monarchfs.config.settings import Settings
from monarchfs.types import TierSize, UsageError

ROOT_CACHE_DIR = "/var/cache/monarchfs"
ROOT_RUNTIME_DIR = "/run/monarchfs"
DEFAULT_TIER_SIZE = TierSize(percent=50.0)
OWNER = "owner"
"""The file in a tier's directory that says whose it is; locked by the mount that has it."""
_TEMPORARY = "/tmp"
_SCRATCH = ("/local", "/scratch/local")
_SCRATCH_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_SHARED_MEMORY = "/dev/shm"
_MOST_OWN = 16

StorageOf = Callable[[str], str]
"""Where a path lies, or its nearest directory that exists: "disk", "memory" or "network"."""

Search = Callable[[set[int]], Iterable[str]]
"""Names the runtime directories to look into for mounts of these users."""


@dataclass(frozen=True, slots=True)
class DefaultPlaces:
    """Default directories of whoever runs the command. ``reason``: why copies do not lie in the
    user's cache directory, if they do not."""

    cache_dir: str
    runtime_dir: str
    reason: str = ""


def default_places(uid: int, environ: Mapping[str, str], storage_of: StorageOf) -> DefaultPlaces:
    """Where ``uid`` keeps caches and sockets: in the home, unless that is on a network file system,
    as homes on a cluster are; then on the node's scratch disk, else in memory."""
    if _owns_the_system(uid):
        return DefaultPlaces(ROOT_CACHE_DIR, ROOT_RUNTIME_DIR)
    runtime_dir = runtime_dir_of(uid, environ)
    home = _absolute(environ.get("HOME")) or home_of(uid)
    cache_home = _absolute(environ.get("XDG_CACHE_HOME")) or (home and os.path.join(home, ".cache"))
    reason = "you have no home"
    if cache_home and not _may_create_in(cache_home):
        reason = f"you may not write to {cache_home}"
    elif cache_home and storage_of(cache_home) == "network":
        reason = f"{cache_home} is on a network file system"
    elif cache_home:
        return DefaultPlaces(os.path.join(cache_home, "monarchfs"), runtime_dir)
    parents = [p for p in scratch_directories(environ) if os.path.isdir(p) and _may_create_in(p)]
    kinds = [storage_of(parent) for parent in parents]
    local = [parents[kinds.index(kind)] for kind in ("disk", "memory") if kind in kinds]
    return DefaultPlaces(own_directory((local or [_TEMPORARY])[0], uid), runtime_dir, reason)


def places_without_home(uid: int) -> DefaultPlaces:
    """The same where the home, or a scratch directory, does not answer: neither is asked."""
    if _owns_the_system(uid):
        return DefaultPlaces(ROOT_CACHE_DIR, ROOT_RUNTIME_DIR)
    own = own_directory(_TEMPORARY, uid)
    return DefaultPlaces(own, os.path.join(own, "run"), "your home does not answer")


def scratch_directories(environ: Mapping[str, str]) -> list[str]:
    """Those in which nodes of clusters have room for files of a job, the best one first. They need
    not exist."""
    named = [_absolute(environ.get(name)) for name in _SCRATCH_VARIABLES]
    return list(dict.fromkeys([*filter(None, named), *_SCRATCH, _TEMPORARY, _SHARED_MEMORY]))


def runtime_dir_of(uid: int, environ: Mapping[str, str]) -> str:
    """Where a supervisor that runs as ``uid`` keeps its control socket."""
    if _owns_the_system(uid):
        return ROOT_RUNTIME_DIR
    runtime = _absolute(environ.get("XDG_RUNTIME_DIR"))
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid in (0, uid):
        place = os.path.join(runtime, "monarchfs")
        if _may_create_in(place):
            return place
    return os.path.join(own_directory(_TEMPORARY, uid), "run")


def own_directory(parent: str, uid: int) -> str:
    """The directory of ``uid`` in one to which everybody may write; it may be missing. If somebody
    else took its usual name first, the name gets a random number, and `own_directories` finds it.
    """
    usual = os.path.join(parent, f"monarchfs-{uid}")
    try:
        taken = os.lstat(usual).st_uid != uid
    except OSError:
        taken = False
    if not taken:
        return usual
    return next(iter(own_directories(parent, uid)), f"{usual}.{_random_suffix()}")


def own_directories(parent: str, uid: int) -> list[str]:
    """Those of ``uid`` beside the usual one, by name."""
    name = re.compile(rf"monarchfs-{uid}\.[0-9a-f]{{16}}")
    try:
        found = [os.path.join(parent, one) for one in os.listdir(parent) if name.fullmatch(one)]
    except OSError:
        return []
    return list(islice((path for path in sorted(found) if is_own(path, uid)), _MOST_OWN))


def is_own(path: str, uid: int) -> bool:
    """Whether it is a directory that ``uid`` alone may change."""
    try:
        st = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(st.st_mode) and st.st_uid == uid and not st.st_mode & 0o022


@lru_cache(maxsize=1)
def _random_suffix() -> str:
    """One for all that this process makes."""
    return secrets.token_hex(8)


def runtime_dirs_to_search(uid: int, environ: Mapping[str, str], mount_uids: set[int]) -> list[str]:
    """Where the control socket of a mount that ``uid`` may manage can be; ``mount_uids`` own the
    existing mounts. pam_systemd makes another user's $XDG_RUNTIME_DIR."""
    dirs = [runtime_dir_of(uid, environ), ROOT_RUNTIME_DIR]
    for owner in sorted(mount_uids if uid == 0 else {uid}):
        if owner != 0 or not _owns_the_system(owner):
            dirs += [f"/run/user/{owner}/monarchfs", f"{_TEMPORARY}/monarchfs-{owner}/run"]
            dirs += [os.path.join(own, "run") for own in own_directories(_TEMPORARY, owner)]
    return list(dict.fromkeys(dirs))


def search_of(environ: Mapping[str, str]) -> Search:
    """Where to look for the mounts that this process may manage."""
    return partial(runtime_dirs_to_search, os.geteuid(), environ)


DATASET_ID = re.compile(r"[0-9a-f]{16}")


def dataset_id(source: str, uid: int) -> str:
    """A stable short name for what ``uid`` sees of ``source``."""
    return hashlib.sha256(os.fsencode(source) + b"\0%d" % uid).hexdigest()[:16]


def default_state_dir(places: DefaultPlaces, source: str, uid: int) -> str:
    """Where the index is."""
    return os.path.join(places.cache_dir, "state", dataset_id(source, uid))


def resolve_user(name: str | None, environ: Mapping[str, str]) -> User:
    """Whom the worker runs as: ``name``, else the user behind sudo, else who runs this. Raises
    UsageError for an unknown user, and for another user's name without root."""
    euid = os.geteuid()
    if name is not None:
        entry = _passwd_entry(name)
        if euid != 0 and entry.pw_uid != euid:
            raise UsageError(f"only root can mount for another user: leave out --user {name}")
    elif euid == 0 and environ.get("SUDO_UID", "").isdecimal():
        entry = _passwd_entry(environ["SUDO_UID"])
    else:
        return current_user()
    if entry.pw_uid == euid:
        return current_user()
    return _user_of(entry)


def known_user(uid: int) -> User:
    """A user by number, with all groups. Raises KeyError if there is none."""
    return _user_of(pwd.getpwuid(uid))


def user_of(uid: int, gid: int = 65534) -> User:
    """A user by number; with the group ``gid`` if the node does not know the user (any more)."""
    if uid == os.geteuid():
        return current_user()
    try:
        return known_user(uid)
    except KeyError:
        return User(str(uid), uid, gid)


def _user_of(entry: pwd.struct_passwd) -> User:
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, groups)


def build_config(
    settings: Settings, *, source: str, mountpoint: str, user: User, places: DefaultPlaces
) -> Config:
    """The frozen description of mounting ``source`` (resolved) on ``mountpoint`` (resolved)."""
    identity = dataset_id(source, user.uid)
    prefetch, prefetch_list = settings.prefetch
    plain: dict[str, Any] = {one.name: getattr(settings, one.name) for one in fields(PlainSettings)}
    return Config(
        **plain,
        source=source,
        mountpoint=mountpoint,
        tiers=settings.tier or (TierSpec(places.cache_dir, DEFAULT_TIER_SIZE),),
        state_dir=settings.state_dir or default_state_dir(places, source, user.uid),
        runtime_dir=places.runtime_dir,
        dataset_id=identity,
        user=user,
        prefetch=prefetch,
        prefetch_list=prefetch_list,
        scrub_bytes_per_second=settings.scrub,
        touch_source_seconds=settings.touch_source,
        prefetch_bytes_per_second=settings.prefetch_rate,
        prefetch_jitter_seconds=settings.prefetch_jitter,
    )


def _owns_the_system(uid: int) -> bool:
    # Root of a user namespace is an ordinary user outside of it.
    return uid == 0 and os.access(os.path.dirname(ROOT_RUNTIME_DIR), os.W_OK)


def current_user() -> User:
    return User(name_of(os.geteuid()), os.geteuid(), os.getegid(), tuple(os.getgroups()))


def name_of(uid: int) -> str:
    """A user's name; the number, as text, of one that the machine does not know."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's arbitrary uid
        return str(uid)


def _passwd_entry(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        pass
    try:
        return pwd.getpwuid(int(name))
    except (KeyError, ValueError, OverflowError):
        raise UsageError(f"there is no user '{name}': give the name of an existing one") from None


def home_of(uid: int) -> str | None:
    """A user's home as an absolute path; None if there is none."""
    try:
        return _absolute(pwd.getpwuid(uid).pw_dir)
    except KeyError:
        return None


def _absolute(path: str | None) -> str | None:
    return path if path and os.path.isabs(path) else None


def _may_create_in(path: str) -> bool:
    """Whether this process could create ``path`` or entries in it."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
