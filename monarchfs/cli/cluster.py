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

prolog mounts the datasets of the job that SLURM_JOB_ID and related variables describe. epilog
removes the job, unmounts what no job uses any more, and writes the job's report. sweep does what an
earlier epilog had to postpone.

Each takes a limited time and exits with 0, except for wrong usage. The log says what went wrong:
see docs/SLURM.md."""
_REPORT_EXAMPLES = """\
examples:
  monarchfs report 4711
  monarchfs report 4711 --json
  monarchfs report 4711 --dir /cluster/monarchfs/jobs

Shows how much of the job's datasets was served locally and what the source was spared, for each
node with a report in the directory. Only the job's user and root may read a report."""
_GC_EXAMPLES = """\
examples:
  monarchfs gc --dry-run
  sudo monarchfs gc
  sudo monarchfs gc --json

Removes what crashed nodes, crashed daemons and deleted users left: dead mounts, registrations and
sockets. As root also jobs that Slurm no longer knows, copies that no index counts, and caches
beyond the budget. Never touches anything in use.

Exit code: 1 if something could not be removed."""


_CACHE_EXAMPLES = """\
examples:
  monarchfs cache list
  sudo monarchfs cache list --json
  monarchfs cache show /lustre/imagenet
  monarchfs cache remove /lustre/imagenet
  monarchfs cache prune --dry-run
  sudo monarchfs cache prune --older-than 30d --yes

The caches of this node, mounted or not: as a user your own, as root those of all users. NAME is a
source, a state directory, a mount point, or a path in a cache.

prune removes stranded copies: no state directory claims them, or its last mount did not name their
tier. --older-than also removes whole caches that nobody has used for that long. --source-gone also
removes caches whose source does not exist; a source that is not mounted now counts as gone. Nothing
in use is ever removed.

Exit code: 1 if something could not be removed, or NAME is not known or in use."""


def add_cluster_commands(add: _Add) -> None:
    """``add`` makes the parser of a command of this name, summary and examples."""
    _add_job(add)
    _add_report(add)
    _add_gc(add)
    _add_cache(add)


def _add_job(add: _Add) -> None:
    parser = add("job", "mount datasets for Slurm jobs (called by its prolog)", _JOB_EXAMPLES)
    parser.add_argument("what", metavar="WHAT", choices=JOB_STEPS, help=", ".join(JOB_STEPS))
    option = parser.add_argument
    option(
        "--config",
        metavar="FILE",
        help="the site's configuration (default /etc/monarchfs-slurm.toml)",
    )
    option("--without", metavar="JOB", help="for sweep: a job that is over")


def _add_report(add: _Add) -> None:
    parser = add("report", "show the report of a Slurm job", _REPORT_EXAMPLES)
    parser.add_argument("job", metavar="JOB", help="the job's number")
    parser.add_argument(
        "--dir", metavar="DIR", help="the directory of reports (default: the site's)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_gc(add: _Add) -> None:
    parser = add("gc", "remove what crashes left behind", _GC_EXAMPLES)
    option = parser.add_argument
    option("--dry-run", action="store_true", help="remove nothing; show what would be removed")
    option(
        "--config",
        metavar="FILE",
        help="the site's configuration (default /etc/monarchfs-slurm.toml)",
    )
    option("--json", action="store_true", help="one JSON object, for programs")


def _add_cache(add: _Add) -> None:
    parser = add("cache", "show and remove caches of this node", _CACHE_EXAMPLES)
    parser.add_argument("what", metavar="WHAT", choices=CACHE_STEPS, help=", ".join(CACHE_STEPS))
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="*",
        help="which caches, for show and remove (and for prune; default: all)",
    )
    option = parser.add_argument
    older_help = "for prune: also caches that were not used for this long, as 30d"
    option("--older-than", metavar="TIME", help=older_help)
    option(
        "--source-gone",
        action="store_true",
        help="for prune: also caches whose source does not exist",
    )
    option("--dry-run", action="store_true", help="remove nothing; show what would be removed")
    option("--yes", action="store_true", help="do not ask before removing")
    many: list[str] = []
    tier_help = "also look for copies in this tier; may be repeated"
    option("--tier", metavar="PATH", action="append", default=many, help=tier_help)
    state_help = "also look at this state directory; may be repeated"
    option("--state-dir", metavar="PATH", action="append", default=many, help=state_help)
    option(
        "--config",
        metavar="FILE",
        help="the site's configuration (default /etc/monarchfs-slurm.toml)",
    )
    option("--json", action="store_true", help="one JSON object, for programs")
