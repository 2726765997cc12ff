"""The command line: which command, and how errors and exit codes look.

0 done, 1 failed, 2 wrong usage; an error is one line on stderr that begins with ``monarchfs:``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from monarchfs import __version__
from monarchfs.types import MonarchError, UsageError

Command = Callable[[argparse.Namespace, Mapping[str, str]], int]

_MOUNT_EXAMPLES = """\
examples:
  monarchfs mount /lustre/imagenet /mnt/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs mount /lustre/imagenet /lustre/imagenet --freshness immutable --prefetch all
  monarchfs mount /lustre/shards ~/shards --prefetch ~/order.txt --log-file ~/monarchfs.log
  sudo monarchfs mount /lustre/imagenet /mnt/imagenet --user alice -o allow_other

Sizes are powers of 1024 (500M, 16G, 1.5T) or a share of the file system (80%). Without --tier,
half of the file system of /var/cache/monarchfs (root) or of your cache directory is used.
Every option can also be given as -o OPTION=VALUE, or as OPTION = VALUE in a TOML file."""
_UMOUNT_EXAMPLES = """\
examples:
  monarchfs umount /mnt/imagenet
  monarchfs umount /mnt/imagenet --timeout 5

Waits while the mount is in use, then detaches it, then cuts off who still uses it; never takes
longer than the timeout. Nothing mounted there is no error."""
_STATUS_EXAMPLES = """\
examples:
  monarchfs status
  monarchfs status /mnt/imagenet
  monarchfs status /mnt/imagenet --json"""


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is clearer, and easier to log."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see {self.prog} --help")


if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[_Parser]


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; tests read it too."""
    parser = _Parser(
        prog="monarchfs",
        description="Mounts a dataset directory and serves it from node-local storage.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"monarchfs {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_mount(commands)
    _add_umount(commands)
    _add_status(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line ``arguments`` (without the program's name); the exit code."""
    try:
        parsed = build_parser().parse_args(arguments)
        return _command(parsed.command)(parsed, os.environ)
    except UsageError as error:
        return _complain(str(error), 2)
    except (MonarchError, OSError) as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)


def _complain(message: str, code: int) -> int:
    # A path may hold a line break, and bytes that are no text.
    line = " ".join(message.splitlines()).encode(errors="backslashreplace").decode()
    print(f"monarchfs: {line}", file=sys.stderr)
    return code


def _command(name: str) -> Command:
    # Each command loads only what it needs: `umount` in an epilog should not wait for imports.
    match name:
        case "mount":
            from monarchfs.cli.mount import mount_command

            return mount_command
        case "umount":
            from monarchfs.cli.umount import umount_command

            return umount_command
        case "status":
            from monarchfs.cli.status import status_command

            return status_command
        case _:
            raise UsageError(f"there is no command '{name}': see monarchfs --help")


def _add_command(
    commands: _Commands,
    name: str,
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_mount(commands: _Commands) -> None:
    parser = _add_command(commands, "mount", "mount a dataset directory", _MOUNT_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="the dataset's directory")
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="where to mount; may be SOURCE")
    option = parser.add_argument
    option("--tier", metavar="PATH=SIZE", action="append", help="local storage, fastest first")
    option("--state-dir", metavar="DIR", help="where the index is kept (on a local disk)")
    option(
        "--prefetch",
        metavar="WHAT",
        help="what is copied: none, access (opened files; the default), all, or a FILE with paths"
        " in the order of reading",
    )
    option(
        "--freshness",
        metavar="MODE",
        help="when the source is asked again: immutable (never), ttl=SECONDS (default 60) or open"
        " (at every open)",
    )
    option("--evict", metavar="POLICY", help="what happens when a tier is full: keep (the default)")
    option("--user", metavar="USER", help="whose mount it is (root only; default: who ran sudo)")
    option(
        "-o", dest="options", metavar="OPT,...", action="append", help="mount options, as in fstab"
    )
    option("--config", metavar="FILE", help="a TOML file with these options")
    option(
        "-f", "--foreground", action="store_const", const=True, help="stay, and log to the terminal"
    )
    option("--log-file", metavar="FILE", help="where a daemon logs (default: syslog)")
    option("--log-level", metavar="LEVEL", help="debug, info (the default), warning or error")


def _add_umount(commands: _Commands) -> None:
    parser = _add_command(commands, "umount", "unmount, within a time limit", _UMOUNT_EXAMPLES)
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="30", help="the time limit (default 30)"
    )


def _add_status(commands: _Commands) -> None:
    parser = _add_command(commands, "status", "show what mounts do", _STATUS_EXAMPLES)
    parser.add_argument(
        "mountpoint", metavar="MOUNTPOINT", nargs="?", help="one mount (default: all of them)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


if __name__ == "__main__":
    sys.exit(main())
