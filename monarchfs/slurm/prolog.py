"""Before a job: its datasets are mounted, or it is told their paths without a mount."""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from monarchfs.config.model import User
from monarchfs.config.settings import escape_option
from monarchfs.slurm import caches, daemon, recordings
from monarchfs.slurm.job import Job, Request
from monarchfs.slurm.peers import follow_job, sharing_options
from monarchfs.slurm.records import locked, make_directory, prepare, write_record, write_text
from monarchfs.slurm.shares import Dataset, Share, record_of, resolve, share_key, user_of_job
from monarchfs.slurm.site import Site, is_below
from monarchfs.supervisor.recover import FoundMount, remove_by_force, unmount_found
from monarchfs.types import MonarchError, OperationError

ROOT_VARIABLE = "MONARCHFS_ROOT"
WARNING_VARIABLE = "MONARCHFS_WARNING"
_PREFIX = "MONARCHFS_DATA_"
_OVERHEAD_SECONDS = 4.0
"""What is kept of the deadline, a fifth of it at most, for taking back what did not come about."""
_LEAST_SECONDS = 0.5
_CLEAR_SECONDS = 3.0
_UMOUNT_SECONDS = 2.0
_JITTER_SECONDS_A_NODE = 0.05
_PEERS_SECONDS = 10.0
_MOST_JITTER_SECONDS = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WantedDataset:
    """A dataset of a job and its variable; ``by_site``: the job did not ask for it."""

    request: Request
    variable: str
    by_site: bool


def run_prolog(site: Site, job: Job) -> dict[str, str]:
    """Mounts what the job gets, within the site's deadline; the variables of its environment. What
    cannot be mounted is logged, and the job gets the source itself. Raises OperationError if not
    even that can be recorded."""
    began = time.time()
    overhead = min(_OVERHEAD_SECONDS, site.deadline_seconds / 5)
    deadline = time.monotonic() + site.deadline_seconds - overhead
    wanted = datasets_of(site, job)
    if job.mistake is not None:
        log.warning("job %s of %s: its request is refused: %s", job.id, job.user, job.mistake)
    if not wanted and job.mistake is None:
        return {}
    prepare(site)
    write_record(site.facts(job.id), _facts(job, began, [], {}))
    paths = [one.request.path for one in wanted]
    warnings = [job.mistake] if job.mistake is not None else []
    # First of all the way without a mount: whatever happens to this process, the job knows it.
    _tell(site, job, wanted, paths, warnings)
    reasons: dict[int, str] = {}
    try:
        user = user_of_job(job.uid, max(1.0, (deadline - time.monotonic()) / 2))
    except MonarchError as error:
        reasons = {number: str(error) for number in range(len(wanted))}
    else:
        for number, one in enumerate(wanted):
            left = deadline - time.monotonic()
            if left < _LEAST_SECONDS:
                reasons[number] = f"{one.request.path}: no time was left to mount it"
                continue
            try:
                # One that hangs must leave time for the others.
                until = time.monotonic() + max(1.0, left / (len(wanted) - number))
                paths[number] = mount_for(site, job, one, user, until)
            except (MonarchError, OSError) as error:
                reasons[number] = " ".join(str(error).splitlines())
    for reason in reasons.values():
        log.warning("job %s of %s: not mounted: %s", job.id, job.user, reason)
        warnings.append(reason)
    write_record(site.facts(job.id), _facts(job, began, wanted, reasons))
    environment = _tell(site, job, wanted, paths, warnings)
    if caches.trash_in(site):
        daemon.leave_running(sweep_words(site))
    return environment


def environment_without_mount(site: Site, job: Job, why: str) -> dict[str, str]:
    """The variables of a job for which nothing could even be tried. Pure."""
    wanted = datasets_of(site, job)
    return environment_of(wanted, [one.request.path for one in wanted], [job.mistake or why])


def tell_without_mount(site: Site, job: Job, why: str) -> None:
    """Write these for the job, unless it wants no dataset. Raises OperationError, OSError."""
    wanted = datasets_of(site, job)
    if wanted or job.mistake is not None:
        for path in (site.run_dir, site.environments):
            make_directory(path, 0o711)
        _tell(site, job, wanted, [one.request.path for one in wanted], [job.mistake or why])


def sweep_words(site: Site) -> list[str]:
    """The command that does later what no prolog or epilog may wait for."""
    return ["job", "sweep", *([] if site.path is None else ["--config", site.path])]


def datasets_of(site: Site, job: Job) -> list[WantedDataset]:
    """What the job gets, by its request and by the site's tables: each path once, each with a
    variable of its own. Pure."""
    own = [(request, False) for request in job.requests]
    given = [(request, True) for request in site.given_to(job)]
    site_paths = {request.path for request, _ in given}
    chosen: dict[str, WantedDataset] = {}
    variables: set[str] = set()
    for request, by_site in own + given:
        if request.path in chosen:
            continue
        variable = _free(_variable(request), variables)
        variables.add(variable)
        chosen[request.path] = WantedDataset(
            request, variable, by_site or request.path in site_paths
        )
    return list(chosen.values())


def mount_for(site: Site, job: Job, wanted: WantedDataset, user: User, deadline: float) -> str:
    """The directory in which the job finds a dataset, mounted now or by another job. Raises
    MonarchError or OSError, with the job in no set, by ``deadline`` (time.monotonic) and a little.
    """
    with ExitStack() as opened:
        return _mount_for(site, job, wanted, user, deadline, opened)


def _mount_for(
    site: Site, job: Job, wanted: WantedDataset, user: User, deadline: float, opened: ExitStack
) -> str:
    request = wanted.request
    roots = None if wanted.by_site else site.roots_for(job)
    if roots is not None and not is_below(request.path, roots):
        # Before anything of it is touched.
        named = ", ".join(roots) or "no directory"
        raise OperationError(f"{request.path}: this job may ask for what lies below {named}")

    def resolved() -> Dataset:
        """Once: by whose path it is looked up could have another there a moment later."""
        left = deadline - time.monotonic()
        dataset = resolve(request.path, roots, user, max(1.0, 0.6 * left))
        opened.callback(dataset.close)
        return dataset

    source, dataset = request.path, None
    share = Share(site, share_key(source, user))
    # A dataset that is mounted under this name needs nothing of a source that may hang.
    if not _known(share, source, deadline):
        dataset = resolved()
        source = dataset.path
        share = Share(site, share_key(source, user))
    with locked(share.lock, deadline):
        share.enter(job.id)
        try:
            found = daemon.find(share.mountpoint(source))
            before = _status(found, deadline)
            if not daemon.serves(before):
                dataset = dataset or resolved()
                if dataset.path != source:
                    raise OperationError(f"{source} has become {dataset.path}")
                options = mount_options(site, job, wanted)
                options += sharing_options(site, job, share.key)
                others = share.jobs() != [job.id]
                _mount(share, dataset, options, user, deadline, others=others)
                before, found = None, daemon.find(share.mountpoint(source))
            elif found and found.registered and before and before.get("peer_server"):
                left = max(1.0, min(_PEERS_SECONDS, deadline - time.monotonic()))
                alone = share.jobs() == [job.id]
                follow_job(site, job, found.registered, left, alone=alone)
            since = None if found is None else daemon.started_ns(found)
            about = {"source": source, "variable": wanted.variable}
            share.note(job.id, before=before, mount_started_ns=since, **about)
        except BaseException:
            share.leave(job.id)
            if not share.jobs() and not share.record():
                share.clear()
            raise
    mountpoint = share.mountpoint(source)
    recordings.begin(share, job, user, {**about, "mountpoint": mountpoint})
    used = "mounted" if before is None else "shares"
    log.info("job %s of %s: %s %s (%s)", job.id, job.user, used, source, share.key)
    return mountpoint


def mount_options(site: Site, job: Job, wanted: WantedDataset) -> list[str]:
    """What follows ``mount -o``, the strongest last. Pure."""
    options = [f"copy_nice={site.nice}"]
    # The prologs of many nodes begin at the same instant; those of a few are no burden.
    jitter = min(_MOST_JITTER_SECONDS, job.nodes * _JITTER_SECONDS_A_NODE)
    if jitter >= 1:
        options.append(f"prefetch_jitter={jitter:.1f}")
    own = (escape_option(f"{key}={value}") for key, value in wanted.request.options)
    return [*options, *site.options, *own]


def _known(share: Share, source: str, deadline: float) -> bool:
    """Whether a dataset is mounted and well. Without the lock: who relies on it looks again with
    it."""
    if not share.record():
        return False
    return daemon.serves(_status(daemon.find(share.mountpoint(source)), deadline))


def _status(found: FoundMount | None, deadline: float) -> dict[str, Any] | None:
    """What its daemon says within a third of what is left: it may be asked twice, and if it hangs
    there is something left to do."""
    left = (deadline - time.monotonic()) / 3
    return None if found is None else daemon.status_of(found, min(daemon.STATUS_SECONDS, left))


def _mount(
    share: Share,
    dataset: Dataset,
    options: Sequence[str],
    user: User,
    deadline: float,
    *,
    others: bool,
) -> None:
    """Mounts a share, having removed a mount there that does not serve."""
    source = dataset.path
    mountpoint = share.mountpoint(source)
    found = daemon.find(mountpoint)
    if found is not None:
        if others and found.supervisor_alive:
            # It may come back for those who use it; this job is better off without.
            raise OperationError(f"the mount of {source} does not answer")
        until = min(deadline, time.monotonic() + _CLEAR_SECONDS)
        remove = unmount_found if found.supervisor_alive else remove_by_force
        if not remove(found, until).gone:
            raise OperationError(f"an earlier mount of {source} cannot be removed")
    os.makedirs(mountpoint, mode=0o755, exist_ok=True)
    share.write({**record_of(source, user), "mountpoint": mountpoint})
    try:
        tiers = caches.open_cache(share, source, user, deadline)
        daemon.start(
            dataset,
            mountpoint,
            user,
            tiers=tiers,
            state_dir=os.path.join(share.cache, "state"),
            options=options,
            log_file=share.site.log_file,
            unit=f"monarchfs-{share.key}-{os.getpid()}",
            deadline=deadline,
        )
    except BaseException:
        found = daemon.find(mountpoint)
        if found is None or unmount_found(found, time.monotonic() + _UMOUNT_SECONDS).gone:
            os.unlink(os.path.join(share.directory, "share.json"))
            caches.remove_empty_cache(share.site, share.key)
        raise


def environment_of(
    wanted: Sequence[WantedDataset], paths: Sequence[str], warnings: Sequence[str]
) -> dict[str, str]:
    """The variables of a job, each of one line. Pure."""
    pairs = [(one.variable, path) for one, path in zip(wanted, paths, strict=True)]
    if paths:
        pairs.insert(0, (ROOT_VARIABLE, paths[0]))
    if warnings:
        pairs.append((WARNING_VARIABLE, "; ".join(warnings)))
    return {name: _one_line(value) for name, value in pairs}


def environment_lines(environment: Mapping[str, str], *, by_slurm: bool) -> str:
    """Lines for a shell, or what the task prolog prints and slurmd, no shell, reads. Pure."""
    quoted = str if by_slurm else shlex.quote
    return "".join(f"export {name}={quoted(value)}\n" for name, value in environment.items())


def _tell(
    site: Site,
    job: Job,
    wanted: Sequence[WantedDataset],
    paths: Sequence[str],
    warnings: Sequence[str],
) -> dict[str, str]:
    environment = environment_of(wanted, paths, warnings)
    text = environment_lines(environment, by_slurm=job.by_slurm)
    write_text(site.environment(job.id), text, mode=0o400, owner=job.uid)
    return environment


def _facts(
    job: Job, began: float, wanted: Sequence[WantedDataset], reasons: dict[int, str]
) -> dict[str, object]:
    return {
        "job": job.id,
        "by_slurm": job.by_slurm,
        "uid": job.uid,
        "user": job.user,
        "began_unix_seconds": began,
        "unmounted": [
            {"variable": one.variable, "source": one.request.path, "reason": reasons[number]}
            for number, one in enumerate(wanted)
            if number in reasons
        ],
    }


def _variable(request: Request) -> str:
    name = request.name or os.path.basename(request.path)
    plain = re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_")[:32]
    return _PREFIX + (plain or "SET")


def _free(variable: str, taken: set[str]) -> str:
    number, free = 1, variable
    while free in taken:
        number += 1
        free = f"{variable}_{number}"
    return free


def _one_line(value: str) -> str:
    # Paths hold nothing of the kind; the words of an error might.
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else "?" for c in value)
