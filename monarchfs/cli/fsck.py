"""``monarchfs fsck``: runs a child as the cache's owner, and shows its report."""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from monarchfs.cli.output import Progress, show_result
from monarchfs.config import User
from monarchfs.config.places import dataset_id, user_of
from monarchfs.supervisor.directories import (
    LOCK,
    OPEN_DIRECTORY,
    Holder,
    InUse,
    read_holder,
    read_record,
    take_lock,
    write_holder,
)
from monarchfs.supervisor.identity import user_name
from monarchfs.supervisor.launch import module_command, spawn_as
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import format_bytes
from monarchfs.system.trusted import place_of
from monarchfs.types import OperationError, UsageError

_INDEX = "index"
_REMEDY = "name a directory as --state-dir of mount has it"
_END_SECONDS = 10.0


def fsck_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Checks the cache of a state directory; 1 if something wrong was found and is still there."""
    path = arguments.state_dir
    with ExitStack() as cleanup:
        state_dir = _open_state_dir(path)
        cleanup.callback(os.close, state_dir)
        user = _owner_of(state_dir, path)
        if not _is_there(LOCK, state_dir):
            raise _unknown_dataset(path)  # taking it would make it
        try:
            lock = take_lock(state_dir, user)
        except InUse as error:
            raise OperationError(f"state directory {path} is in use by {error}") from None
        cleanup.callback(os.close, lock)
        holder = _known_holder(lock, path, user)
        write_holder(lock, replace(holder, pid=os.getpid(), checking=True))
        cleanup.callback(write_holder, lock, holder)
        task = {
            "state": state_dir,
            "dataset_id": holder.dataset_id,
            "directories": read_record(state_dir, user),
            "tiers": holder.tiers,
            "repair": arguments.repair,
            "checksum": arguments.checksum,
        }
        report = _run(task, user, (state_dir, lock), quiet=arguments.json)
    report = {"state_dir": path, **report}
    show_result(arguments, report, map(printable, _lines(report, repair=arguments.repair)))
    return int(not report["clean"])


def _lines(report: Mapping[str, Any], *, repair: bool) -> Iterator[str]:
    """The report for people: a line a tier, and one that sums up."""
    for tier in report["tiers"]:
        size = format_bytes(tier["allocated_bytes"])
        there = "" if tier["present"] else ", not there"
        yield f"tier {tier['path']}: {tier['files']} files, {size}{there}"
    if report["checked_files"]:
        yield f"read {report['checked_files']} files, {format_bytes(report['checked_bytes'])}"
    found = sum(report["findings"].values())
    if not found:
        yield f"{report['state_dir']}: nothing wrong"
        return
    kinds = ", ".join(f"{name} {count}" for name, count in report["findings"].items())
    rest = "" if report["clean"] or repair else ": run it with --repair"
    yield f"{report['state_dir']}: {found} found ({kinds}), {report['repaired']} put right{rest}"


def _open_state_dir(path: str) -> int:
    try:
        descriptor = os.open(path, OPEN_DIRECTORY)
        if os.fstat(descriptor).st_uid == 0 == os.geteuid():
            # A link of another's could lead to any directory of root's.
            os.close(descriptor)
            with place_of(path, alone=False) as place:
                descriptor = place.open(OPEN_DIRECTORY)
        return descriptor
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: {_REMEDY}") from None


def _owner_of(state_dir: int, path: str) -> User:
    """Whose it is. Raises UsageError, OperationError where nothing can or may be checked."""
    st = os.fstat(state_dir)
    if st.st_uid != os.geteuid() and os.geteuid() != 0:
        raise OperationError(f"{path} belongs to {user_name(st.st_uid)}: ask them, or use root")
    if not any(_is_there(name, state_dir) for name in (_INDEX, LOCK)):
        raise UsageError(f"{path} holds no cache of monarchfs: {_REMEDY}")
    if st.st_mode & 0o022:
        # What everybody shares (/tmp) is not to be closed to them.
        shared = st.st_mode & stat.S_ISVTX
        remedy = "it is no state directory" if shared else f"chmod 700 {path}"
        raise OperationError(f"{path} can be written by others: {remedy}")
    return user_of(st.st_uid, st.st_gid)


def _is_there(name: str, directory: int) -> bool:
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) if name == _INDEX else stat.S_ISREG(mode)


def _unknown_dataset(path: str) -> OperationError:
    return OperationError(
        f"{path}/{LOCK} does not say of which dataset this is the cache: mount it once"
    )


def _known_holder(lock: int, path: str, user: User) -> Holder:
    """What the last mount said of itself: the dataset and the tiers."""
    holder = read_holder(lock)
    if holder is None:
        raise _unknown_dataset(path)
    if not holder.dataset_id:
        holder = replace(holder, dataset_id=dataset_id(holder.source, user.uid))
    return replace(holder, checking=False)


def _run(
    task: Mapping[str, Any], user: User, inherited: tuple[int, ...], *, quiet: bool
) -> dict[str, Any]:
    """What the child reports. It keeps the lock while it lives, even without us."""
    with Progress() as progress, _child(task, user, inherited) as process:
        assert process.stdout is not None
        try:
            report = _listen(process.stdout, progress, quiet=quiet)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # It runs as the user, who can do with it as they like.
            raise OperationError(f"the check speaks nonsense: {error!r}") from None
        if report is not None:
            return report
        code = process.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    raise OperationError(f"the check {how} before its end")


def _listen(lines: Iterable[bytes], progress: Progress, *, quiet: bool) -> dict[str, Any] | None:
    """Shows what the child says up to its report; None if it ends without one."""
    shown: Counter[str] = Counter()
    for line in lines:
        message = json.loads(line)
        if "report" in message:
            progress.clear()
            report = dict(message["report"])
            for kind, count in () if quiet else report["findings"].items():
                if count > shown[kind]:
                    print(f"{kind}: and {count - shown[kind]} more")
            return report
        if "failed" in message:
            raise OperationError(str(message["failed"]))
        if "progress" in message:
            now = message["progress"]
            progress.show(f"{bar(now['done'], now['of'])} {printable(now['text'])}")
        elif not quiet:
            finding = message["finding"]
            shown[finding["kind"]] += 1
            progress.clear()
            done = f": {finding['done']}" if finding["done"] else ""
            print(printable(f"{finding['kind']}: {finding['what']}: {finding['detail']}{done}"))
    return None


@contextmanager
def _child(
    task: Mapping[str, Any], user: User, inherited: tuple[int, ...]
) -> Iterator[subprocess.Popen[bytes]]:
    command = [*module_command("monarchfs.cache.fsck"), json.dumps(task)]
    with spawn_as(user, command, inherited, stdout=subprocess.PIPE, stderr=None) as process:
        try:
            yield process
        except BaseException:
            assert process.stdout is not None
            process.stdout.close()
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def bar(done: int, of: int, width: int = 24) -> str:
    """How much of it, drawn: ``[######------]  50%``."""
    share = min(1.0, done / of) if of > 0 else 1.0
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {100 * share:3.0f}%"
