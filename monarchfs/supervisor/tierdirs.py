"""The dataset's own directory in each tier: who owns it, how it is found again, how it is made.

A state directory owns one directory in each tier with which it was ever mounted. Its name is
random, so that two mounts of one source do not share it, and nobody else can take the name first in
a directory to which everybody may write. Two small files, both the user's, connect them:

- ``tiers`` in the state directory names the directory in each tier. It is written, and synced,
  before a directory is made or renamed.
- ``owner`` in that directory says whose it is. A mount holds a lock on it (flock(2)) as long
  as it lives, so that no other one takes it over, even if it cannot see the state directory.

A directory that its state directory does not claim any more is taken over by renaming it: the name
alone says who owns it, and the worker reconciles a directory of another name.

All of this is done as the user. Where the user may not, root does it, but only in a directory that
root alone can change.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from monarchfs.config import User
from monarchfs.config.places import DATASET_ID, OWNER
from monarchfs.supervisor.identity import acting_as, become, open_file_as
from monarchfs.system.bounded import answer_within

RECORD = "tiers"
RECORD_NEW = RECORD + ".new"
NAME = re.compile(rf"{DATASET_ID.pattern}-[0-9a-f]{{16}}")
"""A directory of ours: the dataset's id, then 64 random bits."""

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_BYTES = 1 << 16
_MOST_ENTRIES = 10_000
_LOOK_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TierOwner:
    """Whose copies a directory in a tier holds. ``state_dir`` is a path."""

    source: str
    uid: int
    state_dir: str


@dataclass(frozen=True, slots=True)
class TierRoot:
    """A tier's directory ``path``, open (O_PATH). ``roots``: only root can change it and the way
    there, so root may make and rename what lies in it."""

    path: str
    descriptor: int
    roots: bool


def read_record(state_dir: int, user: User) -> dict[str, str]:
    """The names of the directories that a state directory owns, by their tiers' paths. Empty
    without a record, or if it makes no sense: it is the user's file."""
    try:
        descriptor = open_file_as(user, RECORD, os.O_RDONLY, directory=state_dir)
    except OSError:
        return {}
    try:
        content = _read_json(descriptor)
    finally:
        os.close(descriptor)
    tiers = content.get("tiers")
    return {
        path: name
        for path, name in (tiers.items() if isinstance(tiers, dict) else ())
        if isinstance(name, str) and NAME.fullmatch(name) and os.path.isabs(path)
    }


def read_record_of(path: str, user: User) -> dict[str, str]:
    """`read_record` of a state directory by its path. Raises OSError where it cannot be opened."""
    with acting_as(user):
        state_dir = os.open(path, OPEN_DIRECTORY)
    try:
        return read_record(state_dir, user)
    finally:
        os.close(state_dir)


def write_record(state_dir: int, user: User, record: Mapping[str, str]) -> None:
    """Replaces the record, durably. Raises OSError."""
    with acting_as(user):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        _unlink(RECORD_NEW, state_dir)
        descriptor = os.open(RECORD_NEW, flags, 0o600, dir_fd=state_dir)
        try:
            os.write(descriptor, json.dumps({"tiers": dict(record)}).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(RECORD_NEW, RECORD, src_dir_fd=state_dir, dst_dir_fd=state_dir)
    os.fsync(state_dir)


def remove_record(state_dir: int, user: User) -> None:
    """That there is none any more. Raises OSError."""
    with acting_as(user):
        _unlink(RECORD, state_dir)


def read_owner(owner_file: int) -> TierOwner | None:
    """What an owner file says; None if it does not make sense. It is the user's file."""
    content = _read_json(owner_file)
    try:
        return TierOwner(str(content["source"]), int(content["uid"]), str(content["state_dir"]))
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None


def names_for(dataset_id: str, tier: int, uid: int) -> list[str]:
    """A user's directories for a dataset in the open directory ``tier``, the newest first; of the
    first 10,000 entries. Empty where the tier must not be listed. Raises OSError."""
    found: list[tuple[int, str]] = []
    try:
        directory = os.open(".", OPEN_DIRECTORY, dir_fd=tier)
    except PermissionError:
        return []
    try:
        with os.scandir(directory) as entries:
            for entry in islice(entries, _MOST_ENTRIES):
                if not entry.name.startswith(dataset_id) or not NAME.fullmatch(entry.name):
                    continue
                with suppress(FileNotFoundError):
                    st = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(st.st_mode) and st.st_uid == uid:
                        found.append((st.st_mtime_ns, entry.name))
    finally:
        os.close(directory)
    return [name for _, name in sorted(found, reverse=True)]


def open_own(tier: TierRoot, name: str, user: User) -> tuple[int, int]:
    """A directory of the user's in a tier, and its owner file, made if it is missing. Raises
    OSError; PermissionError for what belongs to others or can be changed by them."""
    call = partial(os.open, name, OPEN_DIRECTORY, dir_fd=tier.descriptor)
    directory = in_tier(tier, user, call)
    try:
        _refuse_foreign(os.fstat(directory), user)
        with acting_as(user):
            owner = os.open(OWNER, os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=directory)
        if stat.S_ISREG(os.fstat(owner).st_mode):
            return directory, owner
        os.close(owner)
        raise OSError(errno.EINVAL, f"{OWNER} is not a file")
    except BaseException:
        os.close(directory)
        raise


def write_owner(owner_file: int, owner: TierOwner) -> None:
    """Says whose the directory is. The file's time of change tells when it was used last. Raises
    OSError."""
    content = json.dumps(asdict(owner)).encode() + b"\n"
    os.pwrite(owner_file, content, 0)
    os.ftruncate(owner_file, len(content))


def lock_owner(owner_file: int) -> bool:
    """Whether the owner file could be locked: no mount uses its directory."""
    try:
        fcntl.flock(owner_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def in_tier(tier: TierRoot, user: User, call: Callable[[], T]) -> T:
    """Does something in the tier as the user, or as root if only root may. Raises OSError."""
    try:
        with acting_as(user):
            return call()
    except PermissionError:
        if os.geteuid() != 0 or not tier.roots:
            raise
    return call()


def claims(state_dir: str, tier: str, name: str, user: User) -> bool:
    """Whether a state directory says that it owns a directory in a tier, or may say so but cannot
    be read within 2 seconds."""

    def claimed() -> bool:
        become(user)
        try:
            return read_record_of(state_dir, user).get(tier) == name
        except (FileNotFoundError, NotADirectoryError):
            return False

    return bool(answer_within(_LOOK_SECONDS, claimed, otherwise=True))


def _refuse_foreign(st: os.stat_result, user: User) -> None:
    if st.st_uid != user.uid:
        raise PermissionError(errno.EPERM, f"it belongs to user {st.st_uid}")
    if st.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there")


def _read_json(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _unlink(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
