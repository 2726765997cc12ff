"""The parsers of what is for clusters and whole nodes: ``job``, ``report``, ``gc``, ``cache``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

JOB_STEPS = ("prolog", "epilog", "sweep")
CACHE_STEPS = ("list", "show", "remove", "prune")
_Add = Callable[[str, str, str], argparse.ArgumentParser]

_JOB_EXAMPLES = """\
examples:
  monarchfs job prolog        (in the Prolog of slurm.conf)
  monarchfs job epilog        (in its Epilog)
  monarchfs job sweep

prolog mounts the datasets of the job that SLURM_JOB_ID and its like describe, epilog takes the job
out, unmounts what no job uses any more and writes the job's report; sweep does what an earlier
epilog had to leave. All take a bounded time and exit with 0 whatever happens: see the log, and
docs/SLURM.md."""
_REPORT_EXAMPLES = """\
examples:
  monarchfs report 4711
  monarchfs report 4711 --json
  monarchfs report 4711 --dir /cluster/monarchfs/jobs

Shows, for each node whose reports are kept in the directory, how much of the job's datasets was
served locally and what the source was spared. Only the job's user and root may read a report."""
_GC_EXAMPLES = """\
examples:
  monarchfs gc --dry-run
  sudo monarchfs gc
  sudo monarchfs gc --json

Removes what crashed nodes, crashed daemons and deleted users left: dead mounts, registrations and
sockets, jobs that Slurm does not know any more, copies that nobody counts, and, as root, caches
beyond the budget. What is in use is never touched. Exit code: 1 if something could not be
removed."""


_CACHE_EXAMPLES = """\
examples:
  monarchfs cache list
  sudo monarchfs cache list --json
  monarchfs cache show /lustre/imagenet
  monarchfs cache remove /lustre/imagenet
  monarchfs cache prune --dry-run
  sudo monarchfs cache prune --older-than 30d --yes

The caches of this node, mounted or not: as a user your own, as root those of all. A NAME is a
source, a state directory, a mount point, or a path in a cache. prune removes stranded copies (no
state directory claims them, or its last mount did not name their tier); with --older-than whole
caches that were not used for so long as well, with --source-gone those whose source is not there,
which holds for one that is not mounted now, too. What is in use is never removed. Exit code: 1 if
something could not be removed, or NAME is not known or in use."""


def add_cluster_commands(add: _Add) -> None:
    """``add`` makes the parser of a command of this name, summary and examples."""
    _add_job(add)
    _add_report(add)
    _add_gc(add)
    _add_cache(add)


def _add_job(add: _Add) -> None:
    parser = add("job", "mount for Slurm jobs (for its prolog)", _JOB_EXAMPLES)
    parser.add_argument("what", metavar="WHAT", choices=JOB_STEPS, help=", ".join(JOB_STEPS))
    option = parser.add_argument
    option("--config", metavar="FILE", help="the site's (default /etc/monarchfs-slurm.toml)")
    option("--without", metavar="JOB", help="of sweep: a job that is over")


def _add_report(add: _Add) -> None:
    parser = add("report", "show the report of a Slurm job", _REPORT_EXAMPLES)
    parser.add_argument("job", metavar="JOB", help="the job's number")
    parser.add_argument("--dir", metavar="DIR", help="where reports are (default: the site's)")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_gc(add: _Add) -> None:
    parser = add("gc", "remove what crashes left behind", _GC_EXAMPLES)
    option = parser.add_argument
    option("--dry-run", action="store_true", help="remove nothing, tell what would be")
    option("--config", metavar="FILE", help="the site's (default /etc/monarchfs-slurm.toml)")
    option("--json", action="store_true", help="one JSON object, for programs")


def _add_cache(add: _Add) -> None:
    parser = add("cache", "show and remove caches of this node", _CACHE_EXAMPLES)
    parser.add_argument("what", metavar="WHAT", choices=CACHE_STEPS, help=", ".join(CACHE_STEPS))
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="*",
        help="which caches: of show and remove, and of prune if not all",
    )
    option = parser.add_argument
    older_help = "of prune: also what was not used for so long, as in 30d"
    option("--older-than", metavar="TIME", help=older_help)
    option("--source-gone", action="store_true", help="of prune: also where SOURCE is not there")
    option("--dry-run", action="store_true", help="remove nothing, tell what would be")
    option("--yes", action="store_true", help="do not ask before removing")
    many: list[str] = []
    tier_help = "look for copies in this tier, too; may be repeated"
    option("--tier", metavar="PATH", action="append", default=many, help=tier_help)
    state_help = "look at this state directory, too; may be repeated"
    option("--state-dir", metavar="PATH", action="append", default=many, help=state_help)
    option("--config", metavar="FILE", help="the site's (default /etc/monarchfs-slurm.toml)")
    option("--json", action="store_true", help="one JSON object, for programs")
