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

from monarchfs.cli.output import Progress
from monarchfs.config import User
from monarchfs.config.places import dataset_id
from monarchfs.slurm.discovery import user_of
from monarchfs.supervisor.identity import user_name
from monarchfs.supervisor.launch import module_command, spawn_as
from monarchfs.supervisor.lock import LOCK, Holder, InUse, read_holder, take_lock, write_holder
from monarchfs.supervisor.tierdirs import read_record
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import format_bytes
from monarchfs.system.trusted import place_of
from monarchfs.types import OperationError, UsageError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_INDEX = "index"
_END_SECONDS = 10.0


def fsck_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Checks the cache of a state directory; 1 if something wrong was found and is still there.

    Raises UsageError for what is no state directory, OperationError if a mount uses it.
    """
    path = arguments.state_dir
    with ExitStack() as cleanup:
        state_dir, user = _open_state_dir(path)
        cleanup.callback(os.close, state_dir)
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
    print(json.dumps(report) if arguments.json else describe(report, repair=arguments.repair))
    return int(not report["clean"])


def describe(report: Mapping[str, Any], *, repair: bool) -> str:
    """The report for people: a line a tier, and one that sums up."""
    lines = []
    for tier in report["tiers"]:
        files, size = tier["files"], format_bytes(tier["allocated_bytes"])
        there = "" if tier["present"] else ", not there"
        lines.append(f"tier {tier['path']}: {files} files, {size}{there}")
    if report["checked_files"]:
        size = format_bytes(report["checked_bytes"])
        lines.append(f"read {report['checked_files']} files, {size}")
    found = sum(report["findings"].values())
    if not found:
        lines.append(f"{report['state_dir']}: nothing wrong")
    else:
        kinds = ", ".join(f"{name} {count}" for name, count in report["findings"].items())
        rest = "" if report["clean"] else ": run it with --repair" * (not repair)
        lines.append(
            f"{report['state_dir']}: {found} found ({kinds}), {report['repaired']} put right{rest}"
        )
    return "\n".join(map(printable, lines))


def _open_state_dir(path: str) -> tuple[int, User]:
    """The open directory and whose it is."""
    try:
        descriptor = os.open(path, _DIRECTORY)
        if os.fstat(descriptor).st_uid == 0 == os.geteuid():
            # A link of another's could lead to any directory of root's.
            os.close(descriptor)
            with place_of(path, alone=False) as place:
                descriptor = place.open(_DIRECTORY)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}: name a directory as --state-dir of mount has it"
        ) from None
    try:
        st = os.fstat(descriptor)
        if st.st_uid != os.geteuid() and os.geteuid() != 0:
            raise OperationError(f"{path} belongs to {user_name(st.st_uid)}: ask them, or use root")
        if not any(_is_there(name, descriptor) for name in (_INDEX, LOCK)):
            raise UsageError(
                f"{path} holds no cache of monarchfs: name a directory as --state-dir of mount"
                " has it"
            )
        if st.st_mode & 0o022:
            # What everybody shares (/tmp) is not to be closed to them.
            shared = st.st_mode & stat.S_ISVTX
            remedy = "it is no state directory" if shared else f"chmod 700 {path}"
            raise OperationError(f"{path} can be written by others: {remedy}")
        return descriptor, user_of(st.st_uid, st.st_gid)
    except BaseException:
        os.close(descriptor)
        raise


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
            if not quiet:
                _show_rest(shown, report["findings"])
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
            print(_line(finding))
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


def _show_rest(shown: Mapping[str, int], counts: Mapping[str, int]) -> None:
    for kind, count in counts.items():
        if count > shown[kind]:
            print(f"{kind}: and {count - shown[kind]} more")


def _line(finding: Mapping[str, Any]) -> str:
    done = f": {finding['done']}" if finding["done"] else ""
    return printable(f"{finding['kind']}: {finding['what']}: {finding['detail']}{done}")
