"""After a job: it leaves its shares, the last job unmounts, a report is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from monarchfs.slurm import caches, daemon, recordings
from monarchfs.slurm.job import Job, JobId
from monarchfs.slurm.prolog import sweep_words
from monarchfs.slurm.records import (
    locked,
    prepare,
    read_record,
    remove_tree,
    remove_unfinished,
    unlink,
)
from monarchfs.slurm.report import Status, dataset_report, job_report, keep_report, unmounted_report
from monarchfs.slurm.shares import Share, every_share, shares_of
from monarchfs.slurm.site import Site
from monarchfs.supervisor.recover import unmount_found
from monarchfs.system.locks import Busy
from monarchfs.types import MonarchError

_LEAST_SECONDS = 2.0
_UMOUNT_SECONDS = 8.0
"""How long a mount may be in use still before it is taken away: its jobs are over."""
_REPORT_SECONDS = 3.0
_LATER_SECONDS = 300.0
_MOMENT_SECONDS = 2.0

log = logging.getLogger(__name__)


def run_epilog(site: Site, job: Job) -> None:
    """Takes a job out of all its shares and unmounts those that nobody uses any more, within the
    site's deadline; a process of its own does the rest. Idempotent. Errors are logged."""
    deadline = time.monotonic() + site.deadline_seconds - _REPORT_SECONDS - 1.0
    prepare(site)
    for path in (site.environment(job.id), site.facts(job.id)):
        remove_unfinished(path)
    unlink(site.environment(job.id))
    facts = read_record(site.facts(job.id))
    shares = shares_of(site, job.id)
    if facts is None and not shares:
        return
    datasets = []
    later = False
    for number, share in enumerate(shares):
        left = deadline - time.monotonic()
        if left < 0 and number > 0:
            later = True
            continue
        until = time.monotonic() + max(_LEAST_SECONDS, left / (len(shares) - number))
        try:
            with locked(share.lock, until):
                dataset, status = _leave(share, job.id)
                datasets.append(dataset)
                if not share.jobs() and site.linger_seconds <= 0:
                    end_share(share, until, status)
        except Busy as error:
            log.warning("job %s of %s: %s: it is taken out later", job.id, job.user, error)
            later = True
        except (MonarchError, OSError) as error:
            log.error("job %s of %s: %s", job.id, job.user, error)
            later = True
    idle = any(not share.jobs() for share in every_share(site))
    if later or idle or caches.trash_in(site):
        daemon.leave_running(sweep_words(site) + (["--without", str(job.id)] if later else []))
    _report(site, job, facts or {}, datasets)


def sweep(site: Site, *, without: JobId | None = None) -> None:
    """Unmounts every share that no job has used for the site's linger, waiting for those that still
    linger; ``without`` is a job that is over, but still in some set. Then removes what was thrown
    away. Takes as long as that takes; one process does it at a time."""
    prepare(site)
    if without is not None:
        for share in shares_of(site, without):
            with (
                _trouble_logged(share.directory),
                locked(share.lock, time.monotonic() + _LATER_SECONDS),
            ):
                share.leave(without)
    try:
        # Whoever has it looks again before it ends, but for a moment.
        with locked(site.lock("sweep"), time.monotonic() + _MOMENT_SECONDS):
            _sweep_until_done(site)
    except Busy:
        return


def sweep_once(site: Site) -> float | None:
    """Unmounts what has lingered long enough; in how many seconds to look again, None for never.
    The next sweep tries again what cannot be unmounted now."""
    pauses = []
    for share in every_share(site):
        with (
            _trouble_logged(share.directory),
            locked(share.lock, time.monotonic() + _UMOUNT_SECONDS),
        ):
            if share.jobs():
                continue
            left = site.linger_seconds - share.idle_seconds()
            if left <= 0:
                end_share(share, time.monotonic() + _UMOUNT_SECONDS, last_status(share))
            else:
                pauses.append(left)
    return min(pauses) + _MOMENT_SECONDS / 10 if pauses else None


def _sweep_until_done(site: Site) -> None:
    tried: set[str] = set()
    while True:
        pause = sweep_once(site)
        trash = set(caches.trash_in(site)) - tried
        if pause is None and not trash:
            return
        for path in sorted(trash):
            with _trouble_logged(path):
                remove_tree(path)
        # What cannot be removed is left to `gc`, which says so.
        tried |= trash
        # Once more in any case: what came to rest meanwhile finds nobody else to see to it.
        time.sleep(pause or 0.0)


def _leave(share: Share, job: JobId) -> tuple[dict[str, Any], Status | None]:
    """Takes the job out; what its report says of this dataset, and the mount's status."""
    entry, record = share.entry(job), share.record()
    source = str(entry.get("source", record.get("source", "")))
    found = daemon.find(share.mountpoint(source)) if source else None
    after = daemon.status_of(found) if found is not None else None
    recordings.end(share, job)
    share.leave(job)
    if not share.jobs():
        share.mark_idle()
    # Another daemon may have taken the place of one that died.
    since = entry.get("mount_started_ns")
    same = found is not None and since == daemon.started_ns(found)
    alive = found is not None and (found.registered is None or found.supervisor_alive)
    replaced = found is not None and found.registered is not None and since is not None and not same
    dataset = dataset_report(
        entry.get("before") if same else None,
        after,
        variable=str(entry.get("variable", "")),
        source=source,
        shared_with=entry.get("met", []),
        ended_early="source" in entry and (not alive or replaced),
    )
    return dataset, after


@contextmanager
def _trouble_logged(about: str) -> Iterator[None]:
    try:
        yield
    except (MonarchError, OSError) as error:
        log.error("%s: %s", about, error)


def last_status(share: Share) -> Status | None:
    """The status of a share's daemon, if it answers."""
    mounts = daemon.find_below(share.directory)
    return daemon.status_of(mounts[0]) if mounts else None


def end_share(share: Share, deadline: float, status: Status | None) -> bool:
    """Unmounts a share, even if it is in use, by ``deadline`` (time.monotonic), and keeps or wipes
    its cache; whether that worked. With its lock held. ``status`` is the daemon's last one, if
    there was one."""
    mounts = daemon.find_below(share.directory)
    for found in mounts:
        now = time.monotonic()
        until = max(now + _LEAST_SECONDS, min(deadline, now + _UMOUNT_SECONDS))
        if not unmount_found(found, until).gone:
            log.error("%s cannot be unmounted", found.mountpoint)
            return False
        log.info("unmounted %s (%s)", found.source, share.key)
    known = bool(share.record())
    share.clear()
    if known or mounts:
        caches.close_cache(share.site, share.key, status)
    if share.site.wipe and (cache := caches.read_cache(share.site, share.key)) is not None:
        caches.throw_away(share.site, cache)
    return True


def _report(site: Site, job: Job, facts: Mapping[str, Any], mounted: list[dict[str, Any]]) -> None:
    datasets = mounted + [
        unmounted_report(str(one["variable"]), str(one["source"]), str(one["reason"]))
        for one in facts.get("unmounted", [])
    ]
    now = time.time()
    began = facts.get("began_unix_seconds", now)
    if datasets:
        report = job_report(job.id, job.user, job.node, began, now, datasets)
        try:
            keep_report(site.report_dir, report, job.uid, _REPORT_SECONDS)
        except (MonarchError, OSError) as error:
            log.error("job %s of %s has no report: %s", job.id, job.user, error)
    unlink(site.facts(job.id))
