"""``monarchfs job``, which a batch system's prolog and epilog run, and ``report``: what datasets
did for it.

``job`` never fails: errors are logged, and the job runs without a mount.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from monarchfs.cli.output import show_result
from monarchfs.config.files import from_system_file, read_trusted
from monarchfs.config.model import TierSpec
from monarchfs.config.places import DefaultPlaces, build_config, current_user
from monarchfs.config.settings import from_mount_options, merge
from monarchfs.doctor.checks import Check, Severity, from_error, problem
from monarchfs.slurm.caches import size_in_bytes
from monarchfs.slurm.job import Job, JobId, job_from, node_name, parse_job_id, parse_requests
from monarchfs.slurm.peers import expand_nodes
from monarchfs.slurm.records import make_directory, read_record, write_text
from monarchfs.slurm.report import find_reports, job_totals, page
from monarchfs.slurm.site import SITE_FILE, Site, parse_site, read_site, site_content
from monarchfs.supervisor.logs import ToStderr, syslog_handler
from monarchfs.supervisor.preflight import nearest
from monarchfs.system.escaping import OneLine, printable
from monarchfs.system.trusted import Untrusted, open_directory
from monarchfs.types import MonarchError, OperationError, UsageError

_SYSLOG = "/dev/log"

log = logging.getLogger(__name__)


def job_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0, whatever happened, but for ``check``. Raises UsageError where this is not run by
    root, or does not say which job it is, and for ``check`` as `read_site`."""
    from monarchfs.slurm import epilog, prolog, recordings

    if arguments.what == "check":
        return _check(arguments)
    if os.geteuid() != 0:
        raise UsageError(
            "this is for root, in prolog and epilog: in a job, write monarchfs run SOURCE --"
            " COMMAND"
        )
    if arguments.what in ("prolog", "epilog"):
        job = job_from(environ)
    elif arguments.what in ("begin", "end"):
        job = _named_job(arguments, environ)
    without = None if arguments.without is None else parse_job_id(arguments.without)
    os.umask(0o022)
    # Of what it starts nothing may depend on where slurmd was started.
    os.chdir("/")
    named = arguments.what in ("prolog", "epilog", "begin", "end")
    whose = f"job {job.id}: " if named else ""
    site, is_valid = _site(arguments, whose)
    environment: Mapping[str, str] | None = None
    why = "the node's log says why nothing is mounted"
    try:
        match arguments.what:
            case "begin" | "prolog" if not is_valid:
                pass
            case "begin":
                environment = _begin(site, job)
            case "end":
                facts = read_record(site.facts(job.id)) or {}
                owner = int(facts.get("uid", 0)), str(facts.get("user", job.user))
                epilog.run_epilog(site, replace(job, uid=owner[0], user=owner[1]))
            case "prolog":
                environment = prolog.run_prolog(site, job)
            case "epilog":
                epilog.run_epilog(site, job)
            case "sweep":
                epilog.sweep(site, without=without)
            case "record":
                recordings.run_recording(site, arguments.recording or "")
    except (MonarchError, OSError) as error:
        log.error("%s%s", whose, error)
        why = str(error)
    except Exception:
        log.exception("%sunexpected error", whose)
    if arguments.what == "prolog" and environment is None:
        try:
            prolog.tell_without_mount(site, job, why)
        except (MonarchError, OSError) as error:
            log.error("job %s of %s is told nothing: %s", job.id, job.user, error)
    if arguments.what == "begin":
        if environment is None:
            environment = prolog.environment_without_mount(site, job, why)
        lines = prolog.environment_lines(environment, by_slurm=False)
        show_result(arguments, {"job": job.id, "environment": environment}, lines.splitlines())
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Returns 1 where a tier cannot serve on this node."""
    path, site = arguments.config or SITE_FILE, read_site(arguments.config)
    roots = sorted({root for one in site.allow for root in one.roots})
    given = [request.path for _who, request in site.given]
    tiers = [tier.path for tier in site.tiers]
    checks = _checks_of_tiers(site) if os.geteuid() == 0 else []
    wrong = any(check.state is Severity.PROBLEM for check in checks)
    right = "wrong for this node" if wrong else "right" if os.path.lexists(path) else "not there"
    found = {"config": path, "roots": roots, "datasets": given, "tiers": tiers}
    below = ", ".join(roots) or "nothing: there are no roots"
    lines = [
        f"{path}: {right}",
        f"jobs may ask for datasets below: {below}",
        *(f"jobs get without asking: {path}" for path in given),
        f"tiers: {', '.join(tiers)}{' (only root can check them)' * (os.geteuid() != 0)}",
        *(
            f"{check.state.value}: {check.detail}: {check.remedy}"
            for check in checks
            if check.state is not Severity.OK
        ),
    ]
    found["checks"] = [check.to_json() for check in checks]
    show_result(arguments, found, map(printable, lines))
    return int(wrong)


def _checks_of_tiers(site: Site) -> list[Check]:
    """What `doctor` says of the site's tiers, each within a few seconds, and whether a prolog can
    make them."""
    from monarchfs.doctor import storage
    from monarchfs.doctor.run import TIER_SECONDS, guarded

    settings = merge(from_system_file(), from_mount_options(site.options), {"tier": site.tiers})
    places = DefaultPlaces(site.cache_dir, site.run_dir)
    config = build_config(settings, source="", mountpoint="", user=current_user(), places=places)

    def look(tier: TierSpec) -> list[Check]:
        existing = nearest(tier.path)
        budget = site.budget.get(tier.path, tier)
        spec = min(tier, budget, key=lambda one: size_in_bytes(existing, one.size))
        # As a default place: a prolog makes what is missing above it, too.
        checks = storage.tier(spec, config, tier.path, {})
        if any(check.state is Severity.PROBLEM for check in checks):
            return checks
        try:
            if existing == tier.path:
                make_directory(tier.path, 0o755)  # it is there: judged, not made
            else:
                os.close(open_directory(existing))
        except Untrusted as error:
            detail = f"tier {tier.path}: {error.strerror}"
            return [problem("tier", detail, "configure another", path=tier.path)]
        except OperationError as error:
            return [replace(from_error("tier", error), numbers={"path": tier.path})]
        return checks

    looks = [(f"tier {tier.path}", partial(look, tier)) for tier in site.tiers]
    return [check for what, probe in looks for check in guarded(what, TIER_SECONDS, probe)]


def _named_job(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """The job that the options describe; whose number `_begin` finds out. A wrong request is a
    ``mistake``, as Slurm's."""
    if arguments.job is None:
        raise UsageError(f"job {arguments.what}: name the job with --job ID")
    if arguments.what == "begin" and not arguments.user:
        raise UsageError("job begin: name the job's user with --user USER")
    requests, mistake = [], None
    try:
        requests = parse_requests(arguments.dataset)
    except UsageError as error:
        mistake = str(error)
    return Job(
        id=parse_job_id(arguments.job),
        uid=-1,
        user=arguments.user or "",
        account=arguments.account or "",
        partition=arguments.partition or "",
        node=node_name(environ),
        requests=tuple(requests),
        mistake=mistake,
        nodes=len(expand_nodes(arguments.node_list)) if arguments.node_list else 1,
        node_list=arguments.node_list or "",
        by_slurm=False,
    )


def _begin(site: Site, job: Job) -> Mapping[str, str]:
    """As `run_prolog`, of whose time limit it takes the time to find the user. Raises
    OperationError also if there is none."""
    from monarchfs.slurm.prolog import run_prolog
    from monarchfs.slurm.shares import uid_of

    began = time.monotonic()
    uid = uid_of(job.user, site.deadline_seconds / 4)
    left = site.deadline_seconds - (time.monotonic() - began)
    return run_prolog(replace(site, deadline_seconds=left), replace(job, uid=uid))


def _site(arguments: argparse.Namespace, whose: str) -> tuple[Site, bool]:
    """The site's configuration, and whether it is valid. If not, the log says why, and it is the
    one by which the last job was begun: what jobs have is still to be taken back."""
    path, directory = arguments.config, os.path.join(Site().run_dir, "config")
    kept = os.path.join(directory, (path or SITE_FILE).replace("/", "%"))
    content, wrong = None, None
    try:
        content = site_content(path)
        site = parse_site(content, path)
    except MonarchError as error:
        wrong = error
        try:
            site = parse_site(read_trusted(kept), path)
        except MonarchError:
            site = Site()
    _log_to(site.log_file, arguments.what)
    if wrong is not None:
        log.error("%sno job gets a mount: %s", whose, wrong)
    elif content is not None and arguments.what in ("begin", "prolog"):
        try:
            if read_trusted(kept) != content:
                make_directory(os.path.dirname(directory), 0o711)
                make_directory(directory, 0o700)
                write_text(kept, os.fsdecode(content))
        except (MonarchError, OSError) as error:
            log.warning("%sthe configuration is not kept for epilogs: %s", whose, error)
    return site, wrong is None


def _log_to(path: str | None, what: str) -> None:
    handler = first_that_works(path)
    handler.setFormatter(OneLine(f"%(asctime)s %(levelname)s {what}: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def first_that_works(path: str | None) -> logging.Handler:
    """The site's file, else syslog, else what the batch system makes of standard error.
    Neither of these two is waited for."""
    try:
        if path is not None:
            make_directory(os.path.dirname(path), 0o755)
            return logging.FileHandler(path)
    except (OSError, OperationError) as error:
        print(f"monarchfs: {printable(error)}", file=sys.stderr)
    try:
        if os.path.exists(_SYSLOG):
            return syslog_handler(_SYSLOG)
    except OSError as error:
        print(f"monarchfs: {printable(error)}", file=sys.stderr)
    return ToStderr()


def report_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the reports of all nodes that keep theirs in the directory."""
    job = parse_job_id(arguments.job)
    reports = find_reports(_directory(arguments), job)
    show_result(arguments, {"job": job, "nodes": reports}, _report_lines(job, reports))
    return 0


def _report_lines(job: JobId, reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """All reports, with an empty line between them."""
    try:
        pages = [*map(page, reports), *filter(None, [job_totals(reports)])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OperationError(f"the report of job {job} makes no sense: {error!r}") from None
    for number, text in enumerate(pages):
        yield from ([""] if number else [])
        yield from map(printable, text.splitlines())


def _directory(arguments: argparse.Namespace) -> str:
    if arguments.dir is not None:
        return str(arguments.dir)
    try:
        return read_site().report_dir
    except UsageError:
        # A user may not be meant to read the site's configuration.
        return Site().report_dir
