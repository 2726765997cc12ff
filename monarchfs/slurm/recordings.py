"""What a job's mount saw, recorded where the site wants that, and the verdict for the job's report.

The prolog leaves a process behind, which has two others run as the job's user: one records until
the job has left the mount, one analyzes. No epilog waits for the analysis: it comes into the report
later, or, if anything fails, not at all; the log says so.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from monarchfs.config.model import User
from monarchfs.slurm import daemon
from monarchfs.slurm.job import Job, JobId
from monarchfs.slurm.records import (
    locked,
    make_directory,
    names_in,
    read_record,
    remove_tree,
    unlink,
    write_record,
    write_text,
)
from monarchfs.slurm.report import add_verdict, keep_file
from monarchfs.slurm.shares import Share
from monarchfs.slurm.site import Site
from monarchfs.types import MonarchError, OperationError

_POLL_SECONDS = 0.1
_ENDING_SECONDS = 1.0
"""An epilog waits so long for the recorder's last events: those that the mount still has."""
_RECORDER_SECONDS = 20.0
_REPORT_SECONDS = 120.0
_ANALYSIS_SECONDS = 900
_ANALYSIS_BYTES = 4 << 30
_VERDICT_BYTES, _LINE_CHARACTERS = 4 << 20, 4096
"""Of what a process of the user's prints no more is read, and no more comes into the report."""
_KEEP_SECONDS = 30.0
_OLD_SECONDS = 86_400.0
_NICE = 19
_FACTS, _OVER, _LOCK = ".json", ".over", ".lock"
"""Files beside a recording's place, which is a directory of the user's by the job's number and the
share's key; ``rec`` and ``html`` lie in it."""

log = logging.getLogger(__name__)


def _place(share: Share, job: JobId) -> str:
    return os.path.join(share.site.recordings, f"{job}.{share.key}")


def begin(share: Share, job: Job, user: User, facts: Mapping[str, str]) -> None:
    """Have a mount recorded for a job, in the background; ``facts``: its source, its mountpoint,
    the job's variable. What fails is logged."""
    site = share.site
    if not site.record_bytes:
        return
    place = _place(share, job.id)
    try:
        make_directory(site.recordings, 0o711)
        _remove_old(site)
        os.mkdir(place, 0o700)
        os.chown(place, user.uid, user.gid)
        who = {"uid": user.uid, "gid": user.gid, "groups": list(user.groups)}
        write_record(place + _FACTS, {"job": job.id, "node": job.node, **who, **facts})
    except FileExistsError:
        return  # the prolog runs once more
    except (MonarchError, OSError) as error:
        log.error("job %s of %s is not recorded: %s", job.id, job.user, error)
        return
    config = [] if site.path is None else ["--config", site.path]
    daemon.leave_running(["job", "record", *config, "--recording", os.path.basename(place)])


def end(share: Share, job: JobId) -> None:
    """The job leaves the mount: its recording ends, within a second."""
    place = _place(share, job)
    if not os.path.exists(place + _FACTS):
        return
    try:
        write_text(place + _OVER, "")
        with locked(place + _LOCK, time.monotonic() + _ENDING_SECONDS):
            pass
    except (OperationError, OSError) as error:
        log.warning("job %s: the end of its recording may be missing: %s", job, error)


def run_recording(site: Site, name: str) -> None:
    """Records until the job has left the mount, then adds the verdict to its report."""
    place = os.path.join(site.recordings, name)
    facts = read_record(place + _FACTS)
    if facts is None or os.path.basename(name) != name:
        raise OperationError(f"there is no recording {name[:80]}")
    with locked(place + _FACTS, time.monotonic()):
        try:
            with locked(place + _LOCK, time.monotonic()):
                _record(site, place, facts)
            # It may have been full long ago.
            while not _over(site, place):
                time.sleep(_POLL_SECONDS)
            _add(site, place, facts, _analyzed(place, facts))
        except (MonarchError, OSError, ValueError, KeyError, TypeError) as error:
            log.error("job %s: no verdict: %s", facts["job"], error)
        finally:
            _remove(place)


def _over(site: Site, place: str) -> bool:
    """Whether the job has left the mount, or was taken out of its set."""
    job, _, key = os.path.basename(place).rpartition(".")
    return os.path.exists(place + _OVER) or job not in map(str, Share(site, key).jobs())


def _record(site: Site, place: str, facts: Mapping[str, Any]) -> None:
    size = str(site.record_bytes)
    words = ["record", str(facts["mountpoint"]), "-o", f"{place}/rec", "--max-size", size]
    process = _as_user(words, facts, subprocess.DEVNULL)
    while process.poll() is None and not _over(site, place):
        time.sleep(_POLL_SECONDS)
    process.terminate()
    try:
        code = process.wait(_RECORDER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise OperationError("the recorder did not end") from None
    if code:
        raise OperationError("it was not recorded: another job's recording goes on, or it failed")


def _analyzed(place: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    words = ["analyze", f"{place}/rec", "--html", f"{place}/html", "--json"]
    process = _as_user(words, facts, subprocess.PIPE, limited=True)
    assert process.stdout is not None
    out, until = b"", time.monotonic() + _ANALYSIS_SECONDS
    with process.stdout as pipe:
        while len(out) < _VERDICT_BYTES and _readable(pipe, until):
            if not (part := os.read(pipe.fileno(), _VERDICT_BYTES)):
                break
            out += part
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        raise OperationError(f"its analysis took more than {_ANALYSIS_SECONDS} s") from None
    if process.returncode:
        raise OperationError("its recording cannot be analyzed")
    verdict = json.loads(out)["verdict"]
    lines = [line[:_LINE_CHARACTERS] for line in in_three_lines(verdict["lines"])]
    return {"kind": str(verdict["kind"])[:_LINE_CHARACTERS], "lines": lines}


def _readable(pipe: IO[bytes], until: float) -> bool:
    return bool(select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0])


def in_three_lines(lines: Sequence[str]) -> list[str]:
    """Whether input was the limit, what was waited for, and, last, what would help. Pure."""
    chosen = lines if len(lines) <= 3 else [*lines[:2], lines[-1]]
    return [str(line) for line in chosen]


def _add(site: Site, place: str, facts: Mapping[str, Any], verdict: dict[str, Any]) -> None:
    """Once the epilog has written the report."""
    uid, variable = int(facts["uid"]), str(facts["variable"])
    stem = os.path.join(site.report_dir, f"{facts['job']}.{facts['node']}")
    verdict["files"] = [f"{stem}.{variable}.{kind}" for kind in ("rec", "html")]
    for kind, path in zip(("rec", "html"), verdict["files"], strict=True):
        keep_file(f"{place}/{kind}", path, uid, site.record_bytes * 2, _KEEP_SECONDS)
    until = time.monotonic() + _REPORT_SECONDS
    while not add_verdict(stem + ".json", uid, str(facts["source"]), verdict, _KEEP_SECONDS):
        if time.monotonic() > until:
            raise OperationError("there is no report that it could come into")
        time.sleep(1.0)


def _as_user(
    words: Sequence[str], facts: Mapping[str, Any], stdout: int, *, limited: bool = False
) -> subprocess.Popen[bytes]:
    """What a user's mount says is read with no more rights than the user has."""

    def prepare() -> None:
        os.nice(_NICE)
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, (_ANALYSIS_BYTES, _ANALYSIS_BYTES))

    return daemon.begun(
        daemon.command_of_ours(*words),
        stdout=stdout,
        user=int(facts["uid"]),
        group=int(facts["gid"]),
        extra_groups=[int(group) for group in facts["groups"]],
        umask=0o077,
        preexec_fn=prepare,
    )


def _remove_old(site: Site) -> None:
    """What a node that crashed has left: whoever works on it holds the lock on its facts."""
    for name in names_in(site.recordings):
        path = os.path.join(site.recordings, name)
        with suppress(OperationError, OSError):
            if name.endswith(_FACTS) and time.time() - os.stat(path).st_mtime > _OLD_SECONDS:
                place = path.removesuffix(_FACTS)
                with locked(path, time.monotonic()):
                    _remove(place)


def _remove(place: str) -> None:
    with suppress(OperationError, OSError):
        remove_tree(place)
    for kind in (_FACTS, _OVER, _LOCK):
        unlink(place + kind)
