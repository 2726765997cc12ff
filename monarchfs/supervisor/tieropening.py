"""Opens the dataset's own directory in each tier: the one it had, one that nobody claims, or a new
one. `supervisor.tierdirs` says who owns which."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from monarchfs.config import Config, User
from monarchfs.config.places import OWNER
from monarchfs.supervisor.identity import acting_as, become
from monarchfs.supervisor.storage import open_shared
from monarchfs.supervisor.tierdirs import (
    OPEN_DIRECTORY,
    RECORD,
    TierOwner,
    TierRoot,
    claims,
    in_tier,
    lock_owner,
    names_for,
    open_own,
    read_owner,
    read_record,
    remove_record,
    write_owner,
    write_record,
)
from monarchfs.system.bounded import answer_within
from monarchfs.system.sizes import format_bytes
from monarchfs.types import OperationError

_MOST_CANDIDATES = 16
_ATTEMPTS = 3
_LOOK_SECONDS = 2.0
_MEASURE_SECONDS = 0.5
_MOST_LEFT_OUT = 8
"""More tiers than anybody had; the record is the user's file."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnDirectory:
    """The dataset's directory ``name`` in a tier, open; ``lock`` is held until it is closed."""

    name: str
    descriptor: int
    lock: int


def open_tiers(config: Config, state_dir: int, undo: ExitStack) -> tuple[Config, TierDirectories]:
    """Makes and opens the dataset's directory in each tier, in their order, and returns the
    configuration that names them. Raises OperationError."""
    directories = TierDirectories(config, state_dir, undo)
    for tier in config.tiers:
        directories.open(tier.path)
    tiers = tuple(
        replace(tier, directory=directory.name)
        for tier, directory in zip(config.tiers, directories.opened, strict=True)
    )
    return replace(config, tiers=tiers), directories


class TierDirectories:
    """The directories of a mount. ``opened`` has the order of the tiers; ``record`` is what the
    state directory owns; ``remarks`` are lines for the log, once there is a mount."""

    def __init__(self, config: Config, state_dir: int, undo: ExitStack) -> None:
        """``state_dir`` is open and locked; ``undo`` takes back what is made here."""
        self._config = config
        self._user = config.user
        self._owner = TierOwner(config.source, config.user.uid, config.state_dir)
        self._state_dir = state_dir
        self._undo = undo
        self.record = read_record(state_dir, config.user)
        self.opened: list[OwnDirectory] = []
        self.remarks: list[tuple[int, str]] = []

    @property
    def locks(self) -> list[int]:
        """To be closed at the end."""
        return [directory.lock for directory in self.opened]

    def open(self, tier: str) -> None:
        """Opens the directory in a tier: the one it had, one that nobody claims, or a new one.
        Raises OperationError."""
        try:
            with open_root(tier, self._user, self._undo) as root:
                found = self._recorded(root) or self._unclaimed(root) or self._made(root)
        except OSError as error:
            raise OperationError(
                f"cannot make a directory in {tier}: {error.strerror}: have it made writable for"
                f" {self._user.name}, or name another --tier"
            ) from None
        self._undo.callback(os.close, found.descriptor)
        self._undo.callback(os.close, found.lock)
        self.opened.append(found)

    def left_out(self) -> list[str]:
        """A line for each tier that the mount had before, and does not have now, and that holds
        copies. Blocks for 2 seconds a tier at most; looks as the user."""
        tiers = {tier.path for tier in self._config.tiers}
        others = [item for item in sorted(self.record.items()) if item[0] not in tiers]
        lines = []
        for tier, name in others[:_MOST_LEFT_OUT]:
            path = os.path.join(tier, name)
            count, whole = answer_within(
                _LOOK_SECONDS, partial(_measured, path, self._user), otherwise=(0, True)
            )
            if not count:
                continue
            lines.append(
                f"copies of an earlier mount stay in {path} ({'' if whole else 'at least '}"
                f"{format_bytes(count)}), which no --tier names: name --tier {tier} again to use"
                f" them, or remove them with monarchfs cache remove {shlex.quote(path)}"
                f" --state-dir {shlex.quote(self._config.state_dir)}"
            )
        return lines

    def _recorded(self, root: TierRoot) -> OwnDirectory | None:
        name = self.record.get(root.path)
        if name is None or not name.startswith(self._config.dataset_id):
            return None  # the state directory was another dataset's
        found = self._hold(root, name)
        if found is None:
            return None
        owner = read_owner(found.lock)
        if owner is not None and owner.state_dir != self._owner.state_dir:
            # The state directory was moved, or copied: then the other one claims it, too.
            return self._take_over(root, found)
        self._sign(found)
        return found

    def _unclaimed(self, root: TierRoot) -> OwnDirectory | None:
        """One of the same source and user whose state directory is gone, or owns another by now."""
        try:
            names = names_for(self._config.dataset_id, root.descriptor, self._user.uid)
        except OSError as error:
            self._warn(f"cannot look for earlier copies in {root.path}: {error.strerror}")
            return None
        for name in names[:_MOST_CANDIDATES]:
            found = self._hold(root, name)
            if found is None:
                continue
            owner = read_owner(found.lock)
            if owner is None or not self._may_have(owner, root.path, name):
                _close(found)
                continue
            taken = self._take_over(root, found)
            if taken is not None:
                return taken
        return None

    def _may_have(self, owner: TierOwner, tier: str, name: str) -> bool:
        if (owner.source, owner.uid) != (self._owner.source, self._owner.uid):
            return False
        own = owner.state_dir == self._owner.state_dir
        return own or not claims(owner.state_dir, tier, name, self._user)

    def _made(self, root: TierRoot) -> OwnDirectory:
        for _ in range(_ATTEMPTS):
            name = self._new_name(root.path)
            try:
                in_tier(root, self._user, partial(self._make, root.descriptor, name))
            except FileExistsError:
                continue
            found = self._hold(root, name)
            if found is not None:
                self._undo.callback(_remove_if_unused, root.path, name, self._user)
                self._sign(found)
                return found
        raise FileExistsError(errno.EEXIST, "others made what was to be made")

    def _make(self, parent: int, name: str) -> None:
        os.mkdir(name, 0o700, dir_fd=parent)
        if os.geteuid() == self._user.uid:
            return
        # Root's own directory: nobody else can have put anything under the name.
        descriptor = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
        try:
            os.fchown(descriptor, self._user.uid, self._user.gid)
        finally:
            os.close(descriptor)

    def _take_over(self, root: TierRoot, found: OwnDirectory) -> OwnDirectory | None:
        """Renames it to a name that this state directory owns; None, with it closed, if that
        fails."""
        name = self._new_name(root.path)
        try:
            there = root.descriptor
            rename = partial(os.rename, found.name, name, src_dir_fd=there, dst_dir_fd=there)
            in_tier(root, self._user, rename)
        except OSError as error:
            self._warn(f"{root.path}/{found.name} cannot be taken over: {error.strerror}")
            _close(found)
            return None
        taken = replace(found, name=name)
        self._sign(taken)
        line = f"took over the copies in {root.path}/{found.name}, as {name}"
        self.remarks.append((logging.INFO, line))
        return taken

    def _new_name(self, tier: str) -> str:
        name = f"{self._config.dataset_id}-{secrets.token_hex(8)}"
        if not self.record:
            self._undo.callback(remove_record, self._state_dir, self._user)
        self.record[tier] = name
        try:
            write_record(self._state_dir, self._user, self.record)
        except OSError as error:
            raise OperationError(
                f"cannot write {self._config.state_dir}/{RECORD}: {error.strerror}: remove it, or"
                " name another --state-dir"
            ) from None
        return name

    def _hold(self, root: TierRoot, name: str) -> OwnDirectory | None:
        """Opens and locks one; None where it is gone, not ours, or in use."""
        try:
            descriptor, owner = open_own(root, name, self._user)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{root.path}/{name} is not used: {error.strerror}")
            return None
        found = OwnDirectory(name, descriptor, owner)
        if not lock_owner(owner):
            _close(found)
            return None
        return found

    def _sign(self, directory: OwnDirectory) -> None:
        """Says in the directory whose it is. Its time of change tells when it was used last."""
        try:
            write_owner(directory.lock, self._owner)
        except OSError as error:
            # The record says it, too.
            self._warn(f"cannot write {directory.name}/{OWNER}: {error.strerror}")

    def _warn(self, line: str) -> None:
        self.remarks.append((logging.WARNING, line))


def _close(directory: OwnDirectory) -> None:
    os.close(directory.lock)
    os.close(directory.descriptor)


@contextmanager
def open_root(tier: str, user: User, undo: ExitStack) -> Iterator[TierRoot]:
    """A tier's directory, made if it is missing. Raises OSError."""
    descriptor, roots = open_shared(tier, user, undo)
    try:
        yield TierRoot(tier, descriptor, roots and not os.fstat(descriptor).st_mode & 0o022)
    finally:
        os.close(descriptor)


def _remove_if_unused(tier: str, name: str, user: User) -> None:
    """Takes back a directory of a mount that failed."""
    with ExitStack() as cleanup:
        try:
            root = cleanup.enter_context(open_root(tier, user, cleanup))
            directory, owner = open_own(root, name, user)
            cleanup.callback(os.close, directory)
            cleanup.callback(os.close, owner)
            with acting_as(user):
                for name_below in ("parts", "segments"):
                    with suppress(FileNotFoundError):
                        os.rmdir(name_below, dir_fd=directory)
                if os.listdir(directory) == [OWNER]:
                    os.unlink(OWNER, dir_fd=directory)
            in_tier(root, user, partial(os.rmdir, name, dir_fd=root.descriptor))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                log.warning("cannot remove %s/%s: %s", tier, name, error.strerror)


def _measured(path: str, user: User) -> tuple[int, bool]:
    """The blocks of what lies in a directory of ``user``, in bytes, and whether all of it was
    looked at. For a child."""
    become(user)
    directory = os.open(path, OPEN_DIRECTORY)
    until = time.monotonic() + _MEASURE_SECONDS
    total = 0
    if os.fstat(directory).st_uid != user.uid:
        return 0, True
    for _, _, files, inside in os.fwalk(".", dir_fd=directory):
        for file in files:
            if file != OWNER:
                total += os.stat(file, dir_fd=inside, follow_symlinks=False).st_blocks * 512
            if time.monotonic() > until:
                return total, False
    return total, True
