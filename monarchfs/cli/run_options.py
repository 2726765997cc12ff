"""The words of ``monarchfs run``, but for those that it has from ``mount``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

RUN_EXAMPLES = """\
examples:
  monarchfs run /lustre/imagenet -- python train.py --data /lustre/imagenet
  monarchfs run /lustre/imagenet --tier /dev/shm=16G --tier /tmp=50% --report -- ./train.sh
  srun --ntasks-per-node=8 monarchfs run /lustre/imagenet --freshness immutable -- ./train.sh
  sudo monarchfs run /lustre/imagenet --user alice -- make -C /lustre/imagenet check
  monarchfs run /lustre/imagenet --strict --json run.json -- ./benchmark

Only COMMAND sees the cached view, at SOURCE's own path. No administrator is needed. The mount is
gone when COMMAND has ended. The commands of one job on a node share it. If nothing can be mounted,
COMMAND runs on SOURCE as it is, and a line says why; with --strict it does not run.

Exit code: COMMAND's own; 128 + N if signal N ended it, 127 if it was not found, 126 if it cannot be
run. 2 for wrong usage. With --strict, 1 or 2 if nothing could be mounted."""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What comes besides SOURCE and the options of a mount."""
    option = parser.add_argument
    option("--strict", action="store_true", help="do not run COMMAND if nothing can be mounted")
    option(
        "--report",
        action="store_true",
        help="at the end, print on standard error what was served locally",
    )
    option("--json", metavar="FILE", help="at the end, write the report as a JSON object to FILE")
    option(
        "argv", metavar="COMMAND", nargs="*", help="after --: the command to run, and its arguments"
    )


def split_command(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """A command line as its words for us, and what comes behind the first ``--`` of ``run``, which
    no parser is to touch; None where there is no such thing."""
    if not words or words[0] != "run" or "--" not in words:
        return list(words), None
    where = list(words).index("--")
    return list(words[:where]), list(words[where + 1 :])
