"""``monarchfs report``: what a Slurm job's datasets did for it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from monarchfs.cli.text import printable
from monarchfs.slurm.archive import find_reports
from monarchfs.slurm.job import parse_job_id
from monarchfs.slurm.report import job_totals, page
from monarchfs.slurm.site import Site, read_site
from monarchfs.types import OperationError, UsageError


def report_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the reports of all nodes that keep theirs in the directory. Raises UsageError, or
    OperationError if there is none."""
    job = parse_job_id(arguments.job)
    reports = find_reports(_directory(arguments), job)
    if arguments.json:
        print(json.dumps({"job": job, "nodes": reports}))
        return 0
    try:
        pages = [*map(page, reports), *filter(None, [job_totals(reports)])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OperationError(f"the report of job {job} makes no sense: {error!r}") from None
    print("\n".join("\n".join(map(printable, text.splitlines())) + "\n" for text in pages), end="")
    return 0


def _directory(arguments: argparse.Namespace) -> str:
    if arguments.dir is not None:
        return str(arguments.dir)
    try:
        return read_site().report_dir
    except UsageError:
        # A user may not be meant to read the site's configuration.
        return Site().report_dir
