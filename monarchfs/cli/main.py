"""The command line: which command, and how errors and exit codes look.

0 done, 1 failed, 2 wrong usage; an error is one line on stderr that begins with ``monarchfs:``.
What Ctrl-C interrupts dies of SIGINT, which a shell shows as 130.
"""

from __future__ import annotations

import errno
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence

from monarchfs.cli.output import (
    INTERRUPTED,
    complain,
    die_of_interrupt,
    output_written,
    prepare_streams,
)
from monarchfs.cli.parser import build_parser
from monarchfs.cli.run_options import split_command
from monarchfs.types import MonarchError, UsageError

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
Command = Callable[[Namespace, Mapping[str, str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line ``arguments`` (without the program's name); the exit code.

    Ends by SIGINT, as whoever started it can see, where that interrupted it.
    """
    prepare_streams()
    try:
        return output_written(_outcome(sys.argv[1:] if arguments is None else arguments))
    except SystemExit as end:  # of argparse, which has printed what --help or --version asks for
        raise SystemExit(output_written(end.code if isinstance(end.code, int) else 1)) from None
    except KeyboardInterrupt as interrupt:
        complain(str(interrupt) or "interrupted", INTERRUPTED)
        return die_of_interrupt(output_written(INTERRUPTED))


def _outcome(arguments: Sequence[str]) -> int:
    if not arguments:
        from monarchfs.cli.help import SHORT_HELP

        sys.stderr.write(SHORT_HELP)
        return 2
    try:
        words, behind = split_command(arguments)
        parsed = build_parser().parse_args(words)
        if parsed.command == "run":
            if parsed.argv:
                raise UsageError(f"write -- before the command: -- {parsed.argv[0]} ...")
            parsed.argv = behind
        return _command(parsed.command)(parsed, os.environ)
    except UsageError as error:
        return complain(str(error), 2)
    except BrokenPipeError:
        return 0
    except MonarchError as error:
        return complain(str(error), 1)
    except OSError as error:
        # More than a buffer holds is written at once; of files that are opened the name is known.
        if error.filename is None and error.errno in _DISK_ERRORS:
            return complain(f"cannot write the output: {error.strerror}", 1)
        return complain(str(error), 1)


def _command(name: str) -> Command:
    # Each command loads only what it needs: `umount` in an epilog should not wait for imports.
    match name:
        case "mount":
            from monarchfs.cli.mount import mount_command

            return mount_command
        case "umount":
            from monarchfs.cli.umount import umount_command

            return umount_command
        case "restart":
            from monarchfs.cli.restart import restart_command

            return restart_command
        case "run":
            from monarchfs.cli.run import run_command

            return run_command
        case "status":
            from monarchfs.cli.status import status_command

            return status_command
        case "refresh" | "pin" | "unpin" | "evict":
            from monarchfs.cli.ask import ask_command

            return ask_command
        case "warm":
            from monarchfs.cli.warm import warm_command

            return warm_command
        case "why":
            from monarchfs.cli.why import why_command

            return why_command
        case "fsck":
            from monarchfs.cli.fsck import fsck_command

            return fsck_command
        case "doctor":
            from monarchfs.cli.doctor import doctor_command

            return doctor_command
        case "plan":
            from monarchfs.cli.plan import plan_command

            return plan_command
        case "index":
            from monarchfs.cli.index import index_command

            return index_command
        case "exporter":
            from monarchfs.cli.exporter import exporter_command

            return exporter_command
        case "job":
            from monarchfs.cli.job import job_command

            return job_command
        case "report":
            from monarchfs.cli.report import report_command

            return report_command
        case "cache":
            from monarchfs.cli.cache import cache_command

            return cache_command
        case "gc":
            from monarchfs.cli.gc import gc_command

            return gc_command
        case "completion":
            from monarchfs.cli.completion import completion_command

            return completion_command
        case "help":
            from monarchfs.cli.help import help_command

            return help_command
        case "version":
            from monarchfs.cli.help import version_command

            return version_command
        case _:
            raise UsageError(f"there is no command '{name}': see monarchfs --help")


if __name__ == "__main__":
    sys.exit(main())
