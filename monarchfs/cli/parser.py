"""The parser of the command line: which commands there are, and their options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from monarchfs import __version__
from monarchfs.cli.cluster import add_cluster_commands
from monarchfs.cli.examples import (
    COMPLETION_EXAMPLES,
    DOCTOR_EXAMPLES,
    EVICT_EXAMPLES,
    EXPORTER_EXAMPLES,
    FSCK_EXAMPLES,
    HELP_EXAMPLES,
    INDEX_EXAMPLES,
    MOUNT_EXAMPLES,
    PIN_EXAMPLES,
    PLAN_EXAMPLES,
    REFRESH_EXAMPLES,
    RESTART_EXAMPLES,
    STATUS_EXAMPLES,
    UMOUNT_EXAMPLES,
    UNPIN_EXAMPLES,
    VERSION_EXAMPLES,
    WARM_EXAMPLES,
    WHY_EXAMPLES,
)
from monarchfs.cli.mount_options import PLAN_OPTIONS, RUN_OPTIONS, add_mount_options
from monarchfs.cli.run_options import RUN_EXAMPLES, add_run_options
from monarchfs.types import UsageError

SHELLS = ("bash", "zsh", "fish")


class Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is clearer, and easier to log. What is
    mistyped is answered by what comes nearest."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see {self.prog} --help")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        # A command's parser hands what it does not know to the one above, which knows less.
        parsed, unknown = super().parse_known_args(args, namespace)
        option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if option is not None:
            known = [word for action in self._actions for word in action.option_strings]
            self.error(f"there is no option {option}{did_you_mean(option, known)}")
        many = next((a for a in self._actions if not a.option_strings and a.nargs == "*"), None)
        if many is not None and unknown:
            # argparse gives it what stands before the next option, and nothing that comes later.
            setattr(parsed, many.dest, [*getattr(parsed, many.dest), *unknown])
            unknown = []
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        is_command = isinstance(action, argparse._SubParsersAction) or action.dest == "topic"
        if is_command:
            self.error(f"there is no command '{value}'{did_you_mean(str(value), choices)}")
        self.error(f"there is no {action.metavar} '{value}': use {', '.join(choices)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What to append to a complaint about a word: nothing, where none that is known is near it."""
    close = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {close[0]}?" if close else ""


if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[Parser]


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; tests read it too."""
    parser = Parser(
        prog="monarchfs",
        description="Mounts a dataset directory and serves it from node-local storage.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"monarchfs {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_mount(commands)
    _add_umount(commands)
    _add_restart(commands)
    _add_run(commands)
    _add_status(commands)
    _add_warm(commands)
    _add_why(commands)
    _add_ask(commands, "refresh", "ask the source again now", REFRESH_EXAMPLES)
    _add_ask(commands, "pin", "never evict the copies of files or directories", PIN_EXAMPLES)
    _add_ask(commands, "unpin", "allow pinned files to be evicted again", UNPIN_EXAMPLES)
    _add_ask(commands, "evict", "remove local copies", EVICT_EXAMPLES)
    _add_fsck(commands)
    _add_doctor(commands)
    _add_plan(commands)
    _add_index(commands)
    _add_exporter(commands)
    add_cluster_commands(partial(_add_command, commands))
    _add_completion(commands)
    _add_help(commands)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


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
    parser = _add_command(commands, "mount", "mount a dataset directory", MOUNT_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="the dataset's directory")
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="where to mount; may be SOURCE")
    add_mount_options(parser)
    parser.add_argument(
        "--source-fd",
        metavar="N",
        help="mount the directory of descriptor N; SOURCE is only its name (for programs)",
    )


def _add_run(commands: _Commands) -> None:
    summary = "run a command that sees the cached view at the source's own path"
    parser = _add_command(commands, "run", summary, RUN_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="the dataset's directory")
    add_mount_options(parser, RUN_OPTIONS)
    add_run_options(parser)


def _add_umount(commands: _Commands) -> None:
    parser = _add_command(commands, "umount", "unmount, within a time limit", UMOUNT_EXAMPLES)
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="30", help="the time limit (default 30)"
    )


def _add_restart(commands: _Commands) -> None:
    summary = "replace a mount's worker, after an upgrade"
    parser = _add_command(commands, "restart", summary, RESTART_EXAMPLES)
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="where it is mounted")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="30", help="the time limit (default 30)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_status(commands: _Commands) -> None:
    parser = _add_command(commands, "status", "show what mounts do", STATUS_EXAMPLES)
    parser.add_argument(
        "mountpoint", metavar="MOUNTPOINT", nargs="?", help="one mount (default: all of them)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        const="2",
        help="repeat every SECONDS (default 2), with rates",
    )


def _add_ask(commands: _Commands, name: str, summary: str, examples: str) -> None:
    _add_ask_arguments(_add_command(commands, name, summary, examples))


def _add_ask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="the mount, or a path in it")
    parser.add_argument(
        "path", metavar="PATH", nargs="*", help="absolute, or relative to the mount point"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_warm(commands: _Commands) -> None:
    parser = _add_command(commands, "warm", "copy files before they are opened", WARM_EXAMPLES)
    _add_ask_arguments(parser)
    flag = parser.add_argument
    flag("--wait", action="store_true", help="wait until each file is resident or will not be")
    flag("--check", action="store_true", help="copy nothing; say how much is resident")
    flag("--metadata", action="store_true", help="learn names and attributes only")


def _add_why(commands: _Commands) -> None:
    parser = _add_command(commands, "why", "say why a file is local, or is not", WHY_EXAMPLES)
    parser.add_argument("path", metavar="PATH", nargs="+", help="a file or directory in a mount")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_fsck(commands: _Commands) -> None:
    parser = _add_command(commands, "fsck", "check a cache that is not mounted", FSCK_EXAMPLES)
    parser.add_argument("state_dir", metavar="STATE_DIR", help="the --state-dir of the mount")
    flag = parser.add_argument
    flag("--repair", action="store_true", help="repair what is wrong")
    flag("--checksum", action="store_true", help="read every complete copy and check its bytes")
    flag("--json", action="store_true", help="one JSON object, for programs")


def _add_doctor(commands: _Commands) -> None:
    summary = "check whether this machine can mount, and how well"
    parser = _add_command(commands, "doctor", summary, DOCTOR_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="the dataset's directory")
    add_mount_options(parser, PLAN_OPTIONS)
    option = parser.add_argument
    option("--quick", action="store_true", help="measure no rates")
    option("--timeout", metavar="SECONDS", default="60", help="the time limit (default 60)")
    option("--json", action="store_true", help="one JSON object, for programs")


def _add_plan(commands: _Commands) -> None:
    summary = "say what caching a dataset would bring"
    parser = _add_command(commands, "plan", summary, PLAN_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="the dataset's directory")
    add_mount_options(parser, PLAN_OPTIONS)
    option = parser.add_argument
    option("--epochs", metavar="N", default="10", help="how often the dataset is read (default 10)")
    option("--quick", action="store_true", help="measure no rates, estimate no times")
    option(
        "--timeout",
        metavar="SECONDS",
        default="600",
        help="how long to look at files (default 600); the others are left out",
    )
    option("--json", action="store_true", help="one JSON object, for programs")


def _add_index(commands: _Commands) -> None:
    summary = "write a dataset's names and attributes to a file"
    parser = _add_command(commands, "index", summary, INDEX_EXAMPLES)
    parser.add_argument("action", metavar="ACTION", choices=("export",), help="export")
    parser.add_argument("source", metavar="SOURCE", help="the dataset's directory")
    parser.add_argument("file", metavar="FILE", help="what is written")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_exporter(commands: _Commands) -> None:
    parser = _add_command(
        commands, "exporter", "serve the metrics of all mounts of this node", EXPORTER_EXAMPLES
    )
    parser.add_argument(
        "--listen",
        metavar="ADDR:PORT",
        default="127.0.0.1:9465",
        help="the IP address and port to serve on (default 127.0.0.1:9465)",
    )
    parser.add_argument(
        "--user",
        metavar="USER",
        help="the user who reads what the mounts say (root only; default nobody)",
    )
    parser.add_argument("--once", action="store_true", help="print the metrics and exit")


def _add_completion(commands: _Commands) -> None:
    summary = "print the completion script for a shell"
    parser = _add_command(commands, "completion", summary, COMPLETION_EXAMPLES)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def _add_help(commands: _Commands) -> None:
    parser = _add_command(
        commands, "help", "show all commands, or the options of one command", HELP_EXAMPLES
    )
    names = [*commands.choices, "version"]
    parser.add_argument("topic", metavar="COMMAND", nargs="?", choices=names, help="a command")
    _add_command(commands, "version", "print the version", VERSION_EXAMPLES)
