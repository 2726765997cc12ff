"""The command line: which command, and how errors and exit codes look.

0 done, 1 failed, 2 wrong usage; an error is one line on stderr that begins with ``monarchfs:``.
Ctrl-C ends the process by SIGINT, which a shell shows as 130.

A command is ``NAME_command(arguments, environ)`` in the module that ``_MODULES`` names: it asks
something, prints the answer and returns the exit code. It raises UsageError for wrong usage, and
OperationError, or OSError, for what failed.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from monarchfs.cli.output import complain, output_written, prepare_streams
from monarchfs.cli.parser import SHORT_HELP, build_parser
from monarchfs.system import inherited
from monarchfs.system.limits import explained, unmet
from monarchfs.types import MonarchError, UsageError

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_ASKING = ("refresh", "pin", "unpin", "evict", "warm", "order", "weigh", "why", "peers", "restart")
_ANSWERED = (*_ASKING, "record")
"""Those that show, or count with, what a daemon says. `status` looks at all of it first."""
_MODULES = {
    **dict.fromkeys(_ASKING, "ask"),
    **{"gc": "cache", "selftest": "doctor", "completion": "documents", "report": "job"},
    **{"help": "parser", "version": "parser"},
}
"""The modules of commands that are not in one of their own name."""
_WITH_COMMAND = ("run", "record")
"""Those that run another one, which stands behind ``--``."""

Command = Callable[[Namespace, Mapping[str, str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line ``arguments`` (without the program's name); the exit code. If it is
    interrupted, the process ends by SIGINT, as its parent can see."""
    inherited.put_right()
    prepare_streams()
    try:
        return output_written(_outcome(sys.argv[1:] if arguments is None else arguments))
    except SystemExit as end:  # of argparse, which has printed what --help or --version asks for
        raise SystemExit(output_written(end.code if isinstance(end.code, int) else 1)) from None
    except KeyboardInterrupt as interrupt:
        code = output_written(complain(str(interrupt) or "interrupted", 128 + signal.SIGINT))
        # A shell script stops if its child dies of the signal, and goes on after any exit code.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return code  # SIGINT is blocked


def _outcome(arguments: Sequence[str]) -> int:
    if not arguments:
        sys.stderr.write(SHORT_HELP)
        return 2
    try:
        words, behind = _split_command(arguments)
        parsed = build_parser().parse_args(words)
        if parsed.command in _WITH_COMMAND:
            if parsed.argv:
                raise UsageError(f"write -- before the command: -- {parsed.argv[0]} ...")
            parsed.argv = behind
        return _command(parsed.command)(parsed, os.environ)
    except UsageError as error:
        return complain(str(error), 2)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE  # it ends in the middle, as others do, and has no outcome
    except MonarchError as error:
        return complain(str(error), 1)
    except OSError as error:
        # More than a buffer holds is written at once; of files that are opened the name is known.
        if error.filename is None and error.errno in _DISK_ERRORS:
            return complain(f"cannot write the output: {error.strerror}", 1)
        return complain(explained(error), 1)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A daemon may be another user's, or in truth another program.
        if arguments[0] not in _ANSWERED:
            raise
        return complain(f"the mount's daemon answered nonsense ({type(error).__name__})", 1)
    except (ImportError, MemoryError, RuntimeError, SystemError) as error:
        if (why := unmet(error)) is None:
            raise
        return complain(why, 1)


def _command(name: str) -> Command:
    # Each command loads only what it needs: `umount` in an epilog should not wait for imports.
    module = import_module(f"monarchfs.cli.{_MODULES.get(name, name)}")
    command: Command = getattr(module, f"{name}_command")
    return command


def _split_command(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Divides a command line at the first ``--`` of ``run`` and ``record``: no parser may touch
    what follows.
    None where nothing follows."""
    if not words or words[0] not in _WITH_COMMAND or "--" not in words:
        return list(words), None
    where = list(words).index("--")
    return list(words[:where]), list(words[where + 1 :])
