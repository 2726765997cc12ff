"""``monarchfs job``: run by Slurm's prolog and epilog.

It never fails: errors are logged, and the job runs without a mount.
"""

from __future__ import annotations

import argparse
import logging
import logging.handlers
import os
import sys
from collections.abc import Mapping

from monarchfs.cli.text import printable
from monarchfs.slurm.epilog import run_epilog, sweep
from monarchfs.slurm.job import job_from, parse_job_id
from monarchfs.slurm.prolog import run_prolog
from monarchfs.slurm.recordings import run_recording
from monarchfs.slurm.records import make_directory
from monarchfs.slurm.site import Site, read_site
from monarchfs.system.escaping import OneLine
from monarchfs.types import MonarchError, OperationError, UsageError

_SYSLOG = "/dev/log"

log = logging.getLogger(__name__)


def job_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0, whatever happened. Raises UsageError where this is not run by root or not by
    Slurm."""
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
                run_prolog(site, job)
            case "epilog":
                run_epilog(site, job)
            case "sweep":
                sweep(site, without=without)
            case "record":
                run_recording(site, arguments.recording or "")
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
            facility = logging.handlers.SysLogHandler.LOG_DAEMON
            return logging.handlers.SysLogHandler(_SYSLOG, facility=facility)
    except OSError as error:
        print(f"monarchfs: {printable(error)}", file=sys.stderr)
    return logging.StreamHandler(sys.stderr)
