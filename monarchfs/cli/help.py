"""``monarchfs help``, ``monarchfs version``, and what ``monarchfs`` alone says."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from monarchfs import __version__
from monarchfs.cli.parser import build_parser, commands_of

SHORT_HELP = """\
usage: monarchfs COMMAND [OPTION]... [ARGUMENT]...

  monarchfs doctor /lustre/imagenet                        can this machine mount it, and how well
  monarchfs mount /lustre/imagenet /mnt/imagenet           mount it
  monarchfs run /lustre/imagenet -- python train.py        run a command that sees it cached
  monarchfs warm /mnt/imagenet --wait                      copy it before the job
  monarchfs status                                         what mounts there are, and what they do
  monarchfs umount /mnt/imagenet                           unmount it

monarchfs help shows all commands, monarchfs help COMMAND the options of one.
"""


def help_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints all commands, the help of one, or the version; returns 0."""
    if arguments.command == "version":
        print(f"monarchfs {__version__}")
        return 0
    parser = build_parser()
    chosen = parser if arguments.topic is None else commands_of(parser)[arguments.topic]
    chosen.print_help()
    return 0
