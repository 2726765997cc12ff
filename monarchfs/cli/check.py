"""``monarchfs check --node``: whether a batch system should keep jobs from this node.

It must not be the reason why a good node is drained. So only what is certain, and does not pass by
itself, is a failure; what could not be found out in time is none. A job is served without a mount
where there is trouble, so most trouble is none of the node's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from monarchfs.config.places import search_of
from monarchfs.control.client import request
from monarchfs.slurm.leftovers import is_unserved
from monarchfs.supervisor.recover import FoundMount, find_all
from monarchfs.system.bounded import bounded_value
from monarchfs.system.escaping import printable
from monarchfs.system.process_stat import stat_fields
from monarchfs.system.sizes import counted
from monarchfs.types import MonarchError

_ASK_SECONDS = 1.0
_STOPPED = b"T"
"""The state of a process (proc_pid_stat(5)) that only a signal ends. D, waiting in the kernel, may
pass: a node that swaps is no reason."""
_MOST_TOLD, _MOST_SHOWN = 20, 200
"""Mounts that are spoken of, and characters of what users called them: any user can register
more."""


def check_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints one line; 1 for a node that needs an administrator, else 0, whatever happens."""
    timeout: float = arguments.timeout
    deadline = time.monotonic() + timeout * 0.8

    def look() -> tuple[list[Sequence[str]], int]:
        looked = [_trouble(found, deadline) for found in find_all(search_of(environ))]
        told = sorted((one for one in looked if one[0]), key=lambda one: one[0] != "wrong")
        more = [("word", "...")] if len(told) > _MOST_TOLD else []
        return [*told[:_MOST_TOLD], *more], len(looked)

    overdue = f"the node did not say within {timeout:g} s what is mounted"
    try:
        told, count = bounded_value(look, timeout=timeout, overdue=overdue)
    except (MonarchError, OSError) as error:
        print(f"monarchfs: OK, but not known: {printable(error)}")
        return 0
    wrong = any(kind == "wrong" for kind, _ in told)
    text = "; ".join([*(text for _, text in told), counted(count, "mount")])
    print(f"monarchfs: {'FAILED' if wrong else 'OK'}: {printable(text)}")
    return 1 if wrong else 0


def _trouble(found: FoundMount, deadline: float) -> Sequence[str]:
    """What kind of word there is about a mount (``wrong``, ``word`` or none), and the word."""
    where = found.mountpoint[:_MOST_SHOWN]
    left = deadline - time.monotonic()
    if left <= 0:
        return "word", f"{where} was not looked at in time"
    if found.mount is not None and not found.supervisor_alive:
        # Whose jobs still run get errors, not an empty directory: gc unmounts it after them.
        dead = "has died" if is_unserved(found) else "is not to be found"
        return "word", f"the daemon of {where} {dead}: monarchfs gc unmounts it"
    if found.registered is None or found.other_owner is not None:
        return "", ""
    pid = found.registered.entry.supervisor_pid
    before = _state(pid)
    try:
        status: Mapping[str, Any] = request(
            found.registered, {"command": "status"}, min(left, _ASK_SECONDS)
        )
    except MonarchError:
        # A user's daemon is stopped by its user, or with its job.
        ours = found.registered.owner_uid == 0 and not found.made_elsewhere
        if not ours or not before == _state(pid) == _STOPPED:
            return "word", f"the daemon of {where} did not answer in time"
        return "wrong", f"the daemon of {where} is stopped: continue it with kill -CONT {pid}"
    state = str(status.get("state"))[:_MOST_SHOWN]
    return ("", "") if state == "serving" else ("word", f"{where}: {state}")


def _state(pid: int) -> bytes:
    return next(iter(stat_fields(f"/proc/{pid}")), b"")
