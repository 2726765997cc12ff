"""The parser of the command line: which commands there are, and their options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from monarchfs import __version__
from monarchfs.cli.examples import EXAMPLES
from monarchfs.config.options import OPTIONS, flag_of
from monarchfs.config.values import parse_count, parse_interval, parse_path, parse_timeout
from monarchfs.types import UsageError

MOUNT_OPTIONS = tuple(key for key, option in OPTIONS.items() if option.help)
"""Options of ``mount`` that have flags."""

RUN_OPTIONS = tuple(key for key in MOUNT_OPTIONS if key != "foreground")
"""Those of ``run``, which stays with its command."""

PLAN_OPTIONS = ("tier", "state_dir", "user", "share")
DOCTOR_OPTIONS = (*PLAN_OPTIONS[:3], "peers", "peer_name", "peer_port", "peer_key", "peer_tls")
"""Those that say what would be mounted, for whom, with which tiers, and who would share."""

SHELLS = ("bash", "zsh", "fish")
JOB_STEPS = ("prolog", "epilog", "sweep", "record")
TOP_BY = ("process", "directory")
TOP_ORDERS = ("waiting", "bytes", "reads", "opens", "names")
CACHE_STEPS = ("list", "show", "remove", "prune")
_ASKS = {
    "refresh": "ask the source again now",
    "pin": "never evict the copies of files or directories",
    "unpin": "allow pinned files to be evicted again",
    "evict": "remove local copies",
}


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, which is clearer than argparse's usage and easier to log, and
    names the nearest word for a mistyped one. Positional arguments are shown in capitals."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see {self.prog} --help")

    def add_argument(self, *names: str, **how: Any) -> argparse.Action:
        if names and not names[0].startswith("-"):
            how.setdefault("metavar", names[0].upper())
        return super().add_argument(*names, **how)

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
            getattr(parsed, many.dest).extend(unknown)
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
    """The nearest known word, to be appended to a complaint; nothing if none is near."""
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
    _add_mounting(commands)
    _add_looking(commands)
    _add_copying(commands)
    _add_asking(commands)
    _add_checking(commands)
    _add_site(commands)
    _add_help(commands)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _add_command(
    commands: _Commands, name: str, summary: str, *, json: bool = False
) -> argparse.ArgumentParser:
    """``json``: the command can print its result for programs."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if json:
        parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def _add_mount_options(parser: argparse.ArgumentParser, keys: Iterable[str]) -> None:
    """The flags of these options, and those for files and ``-o``."""
    for key in keys:
        option = OPTIONS[key]
        names = [*(["-f"] if key == "foreground" else []), f"--{flag_of(key)}"]
        if option.is_switch:
            # None where it is not given: what files and variables say counts then.
            parser.add_argument(*names, action="store_const", const=True, help=option.help)
        else:
            action = "append" if key == "tier" else "store"
            parser.add_argument(*names, metavar=option.value, action=action, help=option.help)
    parser.add_argument(
        "-o", dest="options", metavar="OPT,...", action="append", help="mount options, as in fstab"
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with these options")


def _add_timeout(
    parser: argparse.ArgumentParser, default: str, what: str = "the time limit"
) -> None:
    text = f"{what} (default {default})"
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=parse_timeout, default=default, help=text
    )


def _add_site_config(parser: argparse.ArgumentParser) -> None:
    text = "the site's configuration (default /etc/monarchfs-slurm.toml)"
    parser.add_argument("--config", metavar="FILE", type=parse_path, help=text)


def _add_ask(commands: _Commands, name: str, summary: str) -> argparse.ArgumentParser:
    parser = _add_command(commands, name, summary, json=True)
    parser.add_argument("mountpoint", help="the mount, or a path in it")
    parser.add_argument("path", nargs="*", help="absolute, or relative to the mount point")
    return parser


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    text = "remove nothing; show what would be removed"
    parser.add_argument("--dry-run", action="store_true", help=text)


def _add_mounting(commands: _Commands) -> None:
    """Mounting, unmounting."""
    parser = _add_command(commands, "mount", "mount a dataset directory")
    parser.add_argument("source", help="the dataset's directory")
    parser.add_argument("mountpoint", help="where to mount; may be SOURCE")
    _add_mount_options(parser, MOUNT_OPTIONS)
    parser.add_argument(
        "--source-fd",
        metavar="N",
        help="mount the directory of descriptor N; SOURCE is only its name (for programs)",
    )

    parser = _add_command(commands, "umount", "unmount, within a time limit")
    parser.add_argument("mountpoint", type=parse_path, help="where it is mounted")
    _add_timeout(parser, "30")

    summary = "replace a mount's worker, after an upgrade"
    parser = _add_command(commands, "restart", summary, json=True)
    parser.add_argument("mountpoint", type=parse_path, help="where it is mounted")
    _add_timeout(parser, "30")

    summary = "run a command that sees the cached view at the source's own path"
    parser = _add_command(commands, "run", summary)
    option = parser.add_argument
    option("source", help="the dataset's directory")
    _add_mount_options(parser, RUN_OPTIONS)
    option("--strict", action="store_true", help="do not run COMMAND if nothing can be mounted")
    report = "at the end, print on standard error what was served locally"
    option("--report", action="store_true", help=report)
    option("--json", metavar="FILE", help="at the end, write the report as a JSON object to FILE")
    argv = "after --: the command to run, and its arguments"
    option("argv", metavar="COMMAND", nargs="*", help=argv)


def _add_looking(commands: _Commands) -> None:
    """What mounts do, and whom they share with."""
    parser = _add_command(commands, "status", "show what mounts do", json=True)
    parser.add_argument("mountpoint", nargs="?", help="one mount (default: all of them)")
    watch = "repeat every SECONDS (default 2), with rates"
    parser.add_argument("--watch", metavar="SECONDS", nargs="?", const="2", help=watch)

    summary = "show which processes use a mount now, and what they wait for"
    option = _add_command(commands, "top", summary, json=True).add_argument
    option("mountpoint", type=parse_path, help="where it is mounted")
    what = "add up by process (default) or by directory"
    option("--by", metavar="WHAT", choices=TOP_BY, default=TOP_BY[0], help=what)
    order = f"which come first: those with the most {', '.join(TOP_ORDERS)} (default waiting)"
    option("--sort", metavar="KEY", choices=TOP_ORDERS, default=TOP_ORDERS[0], help=order)
    interval = "how long each interval is (default 2)"
    option("--interval", metavar="SECONDS", type=parse_timeout, default="2", help=interval)
    option("--count", metavar="N", help="show N intervals, one below the other, and exit")

    summary = "show the nodes that a mount shares with, or change their list"
    parser = _add_command(commands, "peers", summary, json=True)
    parser.add_argument("mountpoint", type=parse_path, help="where it is mounted")
    what = "add or remove; without it, show"
    parser.add_argument("action", nargs="?", choices=("add", "remove"), help=what)
    nodes = "which nodes: NAME[=ADDRESS][:PORT][*WEIGHT], as in --peers"
    parser.add_argument("node", nargs="*", help=nodes)
    _add_timeout(parser, "30")


def _add_copying(commands: _Commands) -> None:
    """What is copied, and when."""
    flag = _add_ask(commands, "warm", "copy files before they are opened").add_argument
    flag("--wait", action="store_true", help="wait until each file is resident or will not be")
    flag("--check", action="store_true", help="copy nothing; say how much is resident")
    flag("--metadata", action="store_true", help="learn names and attributes only")

    summary = "say in which order files will be read, so that they are fetched ahead"
    option = _add_command(commands, "order", summary, json=True).add_argument
    option("mountpoint", type=parse_path, help="where it is mounted")
    files = "a list of paths, one a line; - is standard input. Each is the order of one reader"
    option("file", nargs="+", help=files)
    option("--inodes", action="store_true", help="the lists have inode numbers, not paths")

    summary = "say which files will be read more often than others"
    option = _add_command(commands, "weigh", summary, json=True).add_argument
    option("mountpoint", help="where it is mounted, with --evict weighted")
    option("file", help='lines of "WEIGHT<TAB>PATH"; -: standard input')
    option("--replace", action="store_true", help="files that are not named weigh nothing")


def _add_asking(commands: _Commands) -> None:
    """Of files: why, what is read, and the commands of ``ask``."""
    parser = _add_command(commands, "why", "say why a file is local, or is not", json=True)
    parser.add_argument("path", nargs="+", help="a file or directory in a mount")

    parser = _add_command(commands, "record", "record what is read from a mount, event by event")
    option = parser.add_argument
    option("mountpoint", type=parse_path, help="where it is mounted")
    output = "the file to write (default monarchfs.rec)"
    option("-o", "--output", metavar="FILE", type=parse_path, default="monarchfs.rec", help=output)
    option("--seconds", metavar="N", help="for so long (default: until Ctrl-C)")
    option("--max-size", metavar="SIZE", default="256M", help="stop with this size (default 256M)")
    sample = "record one of N files (a power of two; default 1: all)"
    option("--sample", metavar="N", default="1", help=sample)
    argv = "after --: record while this command runs"
    option("argv", metavar="COMMAND", nargs="*", help=argv)

    for name, summary in _ASKS.items():
        _add_ask(commands, name, summary)


def _add_checking(commands: _Commands) -> None:
    """Without a mount: checks and estimates."""
    parser = _add_command(commands, "fsck", "check a cache that is not mounted", json=True)
    flag = parser.add_argument
    flag("state_dir", type=parse_path, help="the --state-dir of the mount")
    flag("--repair", action="store_true", help="repair what is wrong")
    flag("--checksum", action="store_true", help="read every complete copy and check its bytes")

    summary = "check whether this machine can mount, and how well"
    parser = _add_command(commands, "doctor", summary, json=True)
    parser.add_argument("source", nargs="?", help="the dataset's directory")
    _add_mount_options(parser, DOCTOR_OPTIONS)
    parser.add_argument("--quick", action="store_true", help="measure no rates")
    _add_timeout(parser, "60")

    summary = "check monarchfs on a file system of this site, and print a page to send"
    option = _add_command(commands, "selftest", summary, json=True).add_argument
    directory = "a directory of it, in which you may write"
    option("directory", metavar="DIR", type=parse_path, help=directory)
    second = "the same directory by another mount of the file system: changes are made there"
    option("--second", metavar="PATH", type=parse_path, help=second)
    tier = "a directory on local storage for copies (default: TMPDIR)"
    option("--tier", metavar="PATH", type=parse_path, help=tier)
    files = "how many small files an epoch has (default 1000)"
    option("--files", metavar="N", type=parse_count, default="1000", help=files)

    parser = _add_command(commands, "plan", "say what caching a dataset would bring", json=True)
    option = parser.add_argument
    option("source", help="the dataset's directory")
    _add_mount_options(parser, PLAN_OPTIONS)
    nodes = "how many nodes share the dataset, each with such tiers"
    option("--nodes", metavar="N", type=parse_count, help=nodes)
    epochs = "how often the dataset is read (default 10)"
    option("--epochs", metavar="N", type=parse_count, default="10", help=epochs)
    option("--quick", action="store_true", help="measure no rates, estimate no times")
    _add_timeout(parser, "600", "how long to look at files; the others are left out")

    summary = "say what limited a job, from the recording of its mount, or from Darshan"
    option = _add_command(commands, "analyze", summary, json=True).add_argument
    option("file", nargs="+", help="what monarchfs record wrote; with --darshan, logs of one job")
    option("--html", metavar="FILE", help="also write a page with plots to FILE")
    option("--trace", metavar="FILE", help="also write a trace for Perfetto or Chrome to FILE")
    nodes = "also estimate what --peers would bring: N such nodes share what they have"
    option("--nodes", metavar="N", help=nodes)
    darshan = "FILE is a log of Darshan: would a mount have helped that job?"
    option("--darshan", action="store_true", help=darshan)
    source = "with --darshan: the dataset's directory (default: where most was read)"
    option("--source", metavar="DIR", help=source)
    listed = "with --darshan: also write a list of the job's files for --prefetch"
    option("--list", metavar="LIST", help=listed)


def _add_site(commands: _Commands) -> None:
    """Of nodes and sites."""
    summary = "serve the metrics of all mounts of this node"
    option = _add_command(commands, "exporter", summary).add_argument
    address = "127.0.0.1:9465"
    listen = f"the IP address and port to serve on (default {address})"
    option("--listen", metavar="ADDR:PORT", default=address, help=listen)
    user = "the user who reads what the mounts say (root only; default nobody)"
    option("--user", metavar="USER", help=user)
    option("--once", action="store_true", help="print the metrics and exit")

    summary = "mount datasets for Slurm jobs (called by its prolog)"
    parser = _add_command(commands, "job", summary)
    parser.add_argument("what", choices=JOB_STEPS, help=", ".join(JOB_STEPS))
    _add_site_config(parser)
    parser.add_argument("--without", metavar="JOB", help="for sweep: a job that is over")
    parser.add_argument("--recording", metavar="NAME", help="for record: which one")

    parser = _add_command(commands, "report", "show the report of a Slurm job", json=True)
    parser.add_argument("job", help="the job's number")
    where = "the directory of reports (default: the site's)"
    parser.add_argument("--dir", metavar="DIR", type=parse_path, help=where)

    parser = _add_command(commands, "gc", "remove what crashes left behind", json=True)
    _add_dry_run(parser)
    _add_site_config(parser)

    parser = _add_command(commands, "cache", "show and remove caches of this node", json=True)
    option = parser.add_argument
    option("what", choices=CACHE_STEPS, help=", ".join(CACHE_STEPS))
    names = "which caches, for show and remove (and for prune; default: all)"
    option("name", nargs="*", help=names)
    older = "for prune: also caches that were not used for this long, as 30d"
    option("--older-than", metavar="TIME", type=parse_interval, help=older)
    gone = "for prune: also caches whose source does not exist"
    option("--source-gone", action="store_true", help=gone)
    _add_dry_run(parser)
    option("--yes", action="store_true", help="do not ask before removing")
    tier = "also look for copies in this tier; may be repeated"
    paths: dict[str, Any] = {"metavar": "PATH", "type": parse_path, "default": []}
    option("--tier", action="append", help=tier, **paths)
    state_dir = "also look at this state directory; may be repeated"
    option("--state-dir", action="append", help=state_dir, **paths)
    _add_site_config(parser)


def _add_help(commands: _Commands) -> None:
    """About the program itself."""
    parser = _add_command(commands, "completion", "print the completion script for a shell")
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")

    parser = _add_command(commands, "help", "show all commands, or the options of one command")
    names = [*commands.choices, "version"]
    parser.add_argument("topic", metavar="COMMAND", nargs="?", choices=names, help="a command")
    _add_command(commands, "version", "print the version")


def help_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints all commands, or the help of one."""
    parser = build_parser()
    chosen = parser if arguments.topic is None else commands_of(parser)[arguments.topic]
    chosen.print_help()
    return 0


def version_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    print(f"monarchfs {__version__}")
    return 0
