"""``monarchfs job``, which Slurm's prolog and epilog run, and ``report``: what datasets did for it.

``job`` never fails: errors are logged, and the job runs without a mount.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monarchfs.cli.output import show_result
from monarchfs.slurm.job import job_from, parse_job_id
from monarchfs.slurm.records import make_directory
from monarchfs.slurm.report import find_reports, job_totals, page
from monarchfs.slurm.site import Site, read_site
from monarchfs.system.escaping import OneLine, printable
from monarchfs.types import MonarchError, OperationError, UsageError

_SYSLOG = "/dev/log"

log = logging.getLogger(__name__)


def job_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0, whatever happened. Raises UsageError where this is not run by root or not by
    Slurm."""
    from monarchfs.slurm import epilog, prolog, recordings

    if os.geteuid() != 0:
        raise UsageError("this is for root: Slurm's prolog and epilog run it")
    if arguments.what in ("prolog", "epilog"):
        job = job_from(environ)
    without = None if arguments.without is None else parse_job_id(arguments.without)
    os.umask(0o022)
    # Of what it starts nothing may depend on where slurmd was started.
    os.chdir("/")
    site = _site(arguments)
    if site is None:
        return 0
    try:
        match arguments.what:
            case "prolog":
                prolog.run_prolog(site, job)
            case "epilog":
                epilog.run_epilog(site, job)
            case "sweep":
                epilog.sweep(site, without=without)
            case "record":
                recordings.run_recording(site, arguments.recording or "")
    except (MonarchError, OSError) as error:
        log.error("%s", error)
    except Exception:
        log.exception("unexpected error")
    return 0


def _site(arguments: argparse.Namespace) -> Site | None:
    """The site's configuration; None, with the reason in the usual log, if it is not valid."""
    try:
        site = read_site(arguments.config)
    except MonarchError as error:
        _log_to(Site().log_file, arguments.what)
        log.error("no job gets a mount: %s", error)
        return None
    _log_to(site.log_file, arguments.what)
    return site


def _log_to(path: str | None, what: str) -> None:
    handler = _first_that_works(path)
    handler.setFormatter(OneLine(f"%(asctime)s %(levelname)s {what}: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def _first_that_works(path: str | None) -> logging.Handler:
    """The site's file, else syslog, else what slurmd makes of standard error."""
    try:
        if path is not None:
            make_directory(os.path.dirname(path), 0o755)
            return logging.FileHandler(path)
    except (OSError, OperationError) as error:
        print(f"monarchfs: {printable(error)}", file=sys.stderr)
    try:
        if os.path.exists(_SYSLOG):
            from logging.handlers import SysLogHandler

            return SysLogHandler(_SYSLOG, facility=SysLogHandler.LOG_DAEMON)
    except OSError as error:
        print(f"monarchfs: {printable(error)}", file=sys.stderr)
    return logging.StreamHandler(sys.stderr)


def report_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the reports of all nodes that keep theirs in the directory."""
    job = parse_job_id(arguments.job)
    reports = find_reports(_directory(arguments), job)
    show_result(arguments, {"job": job, "nodes": reports}, _report_lines(job, reports))
    return 0


def _report_lines(job: int, reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
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
