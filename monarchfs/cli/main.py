"""The command line: which command, and how errors and exit codes look.

0 done, 1 failed, 2 wrong usage; an error is one line on stderr that begins with ``monarchfs:``.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

from monarchfs import __version__
from monarchfs.cli.cluster import add_cluster_commands
from monarchfs.cli.run_options import RUN_EXAMPLES, add_run_options, split_command
from monarchfs.cli.text import printable
from monarchfs.types import MonarchError, UsageError

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
SHELLS = ("bash", "zsh", "fish")
Command = Callable[[argparse.Namespace, Mapping[str, str]], int]

_MOUNT_EXAMPLES = """\
examples:
  monarchfs mount /lustre/imagenet /mnt/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs mount /lustre/imagenet /lustre/imagenet --freshness immutable --prefetch all
  monarchfs mount /lustre/shards ~/shards --prefetch ~/order.txt --log-file ~/monarchfs.log
  monarchfs mount /lustre/corpus /mnt/corpus --tier /scratch=2T --evict sieve --scrub 20M
  monarchfs mount /lustre/imagenet /mnt/imagenet --touch-source 1d
  sudo monarchfs mount /lustre/imagenet /mnt/imagenet --user alice -o allow_other
  monarchfs mount /lustre/imagenet /mnt/imagenet --metrics-port 9464

Sizes are powers of 1024 (500M, 16G, 1.5T) or a share of the file system (80%). Without --tier,
half of the file system of /var/cache/monarchfs (root) or of your cache directory is used.
Every option can also be given as -o OPTION=VALUE, or as OPTION = VALUE in a TOML file."""
_UMOUNT_EXAMPLES = """\
examples:
  monarchfs umount /mnt/imagenet
  monarchfs umount /mnt/imagenet --timeout 5

Waits while the mount is in use, then detaches it, then cuts off who still uses it; never takes
longer than the timeout. Nothing mounted there is no error."""
_RESTART_EXAMPLES = """\
examples:
  monarchfs restart /mnt/imagenet
  monarchfs restart /mnt/imagenet --timeout 10 --json

Has the program that is installed now serve the mount, under whatever uses it: nobody sees more
than a pause. Also leaves safe mode. Where the new program cannot take over, the old one goes on.
Exit code: 0 once the new one serves."""
_STATUS_EXAMPLES = """\
examples:
  monarchfs status
  monarchfs status /mnt/imagenet
  monarchfs status /mnt/imagenet --json
  monarchfs status --watch
  monarchfs status /mnt/imagenet --watch 10 >> imagenet.log

--watch follows the mount (without MOUNTPOINT the only one, or the list of all) on the terminal
until q or Ctrl-C is pressed, also while it is unmounted and mounted again. Where the output is not
a terminal it prints a line each time, and with --json an object. Exit code: 1 if MOUNTPOINT is not
mounted, or nothing answers for it."""

_REFRESH_EXAMPLES = """\
examples:
  monarchfs refresh /mnt/imagenet
  monarchfs refresh /mnt/imagenet train/n01440764 /mnt/imagenet/labels.txt --json

Asks the source again, whatever --freshness says, for all names and attributes below each PATH that
the mount knows; without PATH, for all of them. Takes as long as the source needs."""
_PIN_EXAMPLES = """\
examples:
  monarchfs pin /mnt/imagenet val
  monarchfs pin /mnt/imagenet /mnt/imagenet/labels.txt --json

What is pinned, a file or all below a directory, is not evicted. It is copied when it is opened, as
anything else."""
_UNPIN_EXAMPLES = """\
examples:
  monarchfs unpin /mnt/imagenet val"""
_WARM_EXAMPLES = """\
examples:
  monarchfs warm /mnt/imagenet
  monarchfs warm /mnt/imagenet train/n01440764 /mnt/imagenet/labels.txt --wait
  monarchfs warm /mnt/imagenet --metadata --wait
  monarchfs warm /mnt/imagenet val --check --json

Copies what lies at or below each PATH (without PATH: all of it), after what is opened and before
what --prefetch all finds; with --prefetch none, too. Names and attributes are known afterwards as
well. Returns at once, and the mount goes on with it; with --wait when every file is resident or
will not be. An interrupted --wait ends the waiting, not the copying. Exit code: 1 if something
failed, 0 also where there was no room for all; of --check 0 only if all is resident."""
_WHY_EXAMPLES = """\
examples:
  monarchfs why /mnt/imagenet/train/n01440764/n01440764_10026.JPEG
  monarchfs why /mnt/imagenet/train
  monarchfs why ~/data/labels.txt --json

Tells where a file's bytes are and since when, or why they are not on this node: not opened yet, no
room and by how much, a copy that failed and with which error. Of a directory it counts what is
known below. Does not wait for a source that hangs. Exit code: 0 if each PATH is known, 1 if not."""
_EVICT_EXAMPLES = """\
examples:
  monarchfs evict /mnt/imagenet
  monarchfs evict /mnt/imagenet train/n01440764

Removes the local copies of what lies at or below each PATH; without PATH, all of them. What is open
or pinned stays."""
_FSCK_EXAMPLES = """\
examples:
  monarchfs fsck /var/cache/monarchfs/state/0123456789abcdef
  monarchfs fsck ~/.cache/monarchfs/state/0123456789abcdef --repair
  monarchfs fsck STATE_DIR --checksum --json

Compares the index of a mount that is not mounted with what lies in its tiers. Exit code: 0 if all
is well or was repaired, 1 if not. The source is not needed, and nothing of it is at stake: what is
not there is read from it again."""
_COMPLETION_EXAMPLES = """\
examples:
  monarchfs completion bash > /etc/bash_completion.d/monarchfs
  monarchfs completion zsh > /usr/local/share/zsh/site-functions/_monarchfs
  monarchfs completion fish > ~/.config/fish/completions/monarchfs.fish

Prints what makes the shell complete commands, options, paths and mount points. For one shell only:
eval "$(monarchfs completion bash)" in ~/.bashrc."""


_DOCTOR_EXAMPLES = """\
examples:
  monarchfs doctor
  monarchfs doctor /lustre/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs doctor /lustre/imagenet --config cluster.toml --json
  sudo monarchfs doctor /lustre/imagenet --user alice

Takes the options of mount. Exit code: 0 if it can be mounted (also with warnings), 1 if not. Rates
are measured by reading some of the source's files, and by writing a file without a name."""


_PLAN_EXAMPLES = """\
examples:
  monarchfs plan /lustre/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs plan /lustre/imagenet --config cluster.toml --epochs 90 --json
  monarchfs plan /lustre/huge --tier /scratch=2T --quick --timeout 60

Takes the options of mount, mounts nothing and copies nothing. Says which files fit where, what the
source has to serve in the first epoch and in later ones, and, at rates measured now, how long that
takes. Exit code: 0, or 1 where the source does not answer."""


_INDEX_EXAMPLES = """\
examples:
  monarchfs index export /lustre/imagenet imagenet.index
  sbcast imagenet.index /tmp/imagenet.index
  monarchfs mount /lustre/imagenet /mnt/imagenet --freshness immutable --index /tmp/imagenet.index

Looks at all names and attributes below SOURCE and writes them to FILE, whole or not at all. A mount
with --index FILE knows them without asking the source. FILE is believed by mounts that are
immutable: write it anew when the dataset has changed. The bytes of files are never in it."""


_EXPORTER_EXAMPLES = """\
examples:
  monarchfs exporter
  sudo monarchfs exporter --listen 10.1.0.7:9465 --user monarchfs-exporter
  sudo monarchfs exporter --listen '[::]:9465'
  monarchfs exporter --once | grep monarchfs_mount_up

Serves the metrics of all mounts on this node, for Prometheus, with labels that say whose mount it
is, of what and where; as an ordinary user those of your own. A mount that hangs does not hold up
the others. Stays in the foreground until it is ended."""


class Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is clearer, and easier to log."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see {self.prog} --help")


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
    _add_ask(commands, "refresh", "look at the source again, now", _REFRESH_EXAMPLES, "*")
    _add_ask(commands, "pin", "keep the copies of files or directories", _PIN_EXAMPLES, "+")
    _add_ask(commands, "unpin", "no longer keep them", _UNPIN_EXAMPLES, "+")
    _add_ask(commands, "evict", "remove local copies", _EVICT_EXAMPLES, "*")
    _add_fsck(commands)
    _add_doctor(commands)
    _add_plan(commands)
    _add_index(commands)
    _add_exporter(commands)
    add_cluster_commands(partial(_add_command, commands))
    _add_completion(commands)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line ``arguments`` (without the program's name); the exit code."""
    try:
        words, behind = split_command(sys.argv[1:] if arguments is None else arguments)
        parsed = build_parser().parse_args(words)
        if parsed.command == "run":
            if parsed.argv:
                raise UsageError(f"write -- before the command: -- {parsed.argv[0]} ...")
            parsed.argv = behind
        return _output_written(_command(parsed.command)(parsed, os.environ))
    except UsageError as error:
        return complain(str(error), 2)
    except BrokenPipeError:
        return _output_written(0)
    except MonarchError as error:
        return complain(str(error), 1)
    except OSError as error:
        # More than a buffer holds is written at once; of files that are opened the name is known.
        if error.filename is None and error.errno in _DISK_ERRORS:
            return complain(f"cannot write the output: {error.strerror}", 1)
        return complain(str(error), 1)
    except KeyboardInterrupt:
        return complain("interrupted", 1)


def complain(message: str, code: int, program: str = "monarchfs") -> int:
    """Prints an error as the one line it has to be; returns ``code``."""
    # A path may hold a line break, bytes that are no text, and what moves a terminal's cursor.
    print(f"{program}: {printable(' '.join(message.splitlines()))}", file=sys.stderr)
    return code


def _output_written(code: int) -> int:
    """The exit code once all output is out: a full disk is an error, a reader who left is none."""
    try:
        if sys.stdout is not None:  # it may be closed from the start
            sys.stdout.flush()
        return code
    except OSError as error:
        # What is left in the buffer must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code
        return complain(f"cannot write the output: {error.strerror}", 1)


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
        case "gc":
            from monarchfs.cli.gc import gc_command

            return gc_command
        case "completion":
            from monarchfs.cli.completion import completion_command

            return completion_command
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
    _add_mount_options(parser)
    parser.add_argument(
        "-f", "--foreground", action="store_const", const=True, help="stay, and log to the terminal"
    )


def _add_run(commands: _Commands) -> None:
    summary = "run a command that sees the cached view at the source's own path"
    parser = _add_command(commands, "run", summary, RUN_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="the dataset's directory")
    _add_mount_options(parser)
    add_run_options(parser)


def _add_mount_options(parser: argparse.ArgumentParser) -> None:
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
        "--prefetch-rate",
        metavar="RATE",
        help="copy what nobody has open at no more than RATE bytes per second, as 200M (default:"
        " off)",
    )
    option(
        "--prefetch-jitter",
        metavar="TIME",
        help="begin to scan after a random part of TIME, as 30s, and take files in another order on"
        " each node (default: off)",
    )
    option(
        "--index",
        metavar="FILE",
        help="names and attributes that monarchfs index export has written, so that the source need"
        " not be asked for them",
    )
    option(
        "--freshness",
        metavar="MODE",
        help="when the source is asked again: immutable (never), ttl=SECONDS (default 60) or open"
        " (at every open)",
    )
    option(
        "--evict",
        metavar="POLICY",
        help="what happens when a tier is full: keep what is there (the default), or make room for"
        " opened files by lru or sieve",
    )
    option(
        "--data-path",
        metavar="PATH",
        help="how local files are read: relay (by the daemon), passthrough (by the kernel itself;"
        " root's mounts, Linux 6.9 or later), or auto (the default): what is better",
    )
    option(
        "--scrub",
        metavar="RATE",
        help="read all copies again and again to find damaged ones, at RATE bytes per second, as"
        " 20M (default: off)",
    )
    option(
        "--metrics-port",
        metavar="PORT",
        help="serve metrics for Prometheus at http://127.0.0.1:PORT/metrics (default: off)",
    )
    option(
        "--touch-source",
        metavar="INTERVAL",
        help="read a byte of each used file from the source every INTERVAL, as 6h or 1d, where old"
        " access times get files purged (default: off)",
    )
    option("--user", metavar="USER", help="whose mount it is (root only; default: who ran sudo)")
    option(
        "-o", dest="options", metavar="OPT,...", action="append", help="mount options, as in fstab"
    )
    option("--config", metavar="FILE", help="a TOML file with these options")
    option("--log-file", metavar="FILE", help="where a daemon logs (default: syslog)")
    option("--log-level", metavar="LEVEL", help="debug, info (the default), warning or error")


def _add_umount(commands: _Commands) -> None:
    parser = _add_command(commands, "umount", "unmount, within a time limit", _UMOUNT_EXAMPLES)
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="30", help="the time limit (default 30)"
    )


def _add_restart(commands: _Commands) -> None:
    summary = "replace a mount's worker, after an upgrade"
    parser = _add_command(commands, "restart", summary, _RESTART_EXAMPLES)
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="where it is mounted")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="30", help="the time limit (default 30)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_status(commands: _Commands) -> None:
    parser = _add_command(commands, "status", "show what mounts do", _STATUS_EXAMPLES)
    parser.add_argument(
        "mountpoint", metavar="MOUNTPOINT", nargs="?", help="one mount (default: all of them)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        const="2",
        help="again and again, every SECONDS (default 2), with rates",
    )


def _add_ask(
    commands: _Commands, name: str, summary: str, examples: str, how_many: Literal["*", "+"]
) -> None:
    _add_ask_arguments(_add_command(commands, name, summary, examples), how_many)


def _add_ask_arguments(parser: argparse.ArgumentParser, how_many: Literal["*", "+"]) -> None:
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument(
        "path", metavar="PATH", nargs=how_many, help="absolute, or relative to the mount point"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_warm(commands: _Commands) -> None:
    parser = _add_command(commands, "warm", "copy before anybody opens", _WARM_EXAMPLES)
    _add_ask_arguments(parser, "*")
    flag = parser.add_argument
    flag("--wait", action="store_true", help="until each file is resident or will not be")
    flag("--check", action="store_true", help="copy nothing; tell how much is resident")
    flag("--metadata", action="store_true", help="names and attributes only")


def _add_why(commands: _Commands) -> None:
    parser = _add_command(commands, "why", "tell why a file is local, or is not", _WHY_EXAMPLES)
    parser.add_argument("path", metavar="PATH", nargs="+", help="a file or directory in a mount")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_fsck(commands: _Commands) -> None:
    parser = _add_command(commands, "fsck", "check a cache that is not mounted", _FSCK_EXAMPLES)
    parser.add_argument("state_dir", metavar="STATE_DIR", help="what --state-dir of mount names")
    flag = parser.add_argument
    flag("--repair", action="store_true", help="put right what is wrong")
    flag("--checksum", action="store_true", help="read every complete copy and check its bytes")
    flag("--json", action="store_true", help="one JSON object, for programs")


def _add_mounts_options(parser: argparse.ArgumentParser) -> None:
    """Those of mount that say what would be mounted, for whom and with which tiers."""
    option = parser.add_argument
    option("--tier", metavar="PATH=SIZE", action="append", help="local storage, fastest first")
    option("--state-dir", metavar="DIR", help="where the index would be kept")
    option("--user", metavar="USER", help="whose mount it would be (root only)")
    option("-o", dest="options", metavar="OPT,...", action="append", help="as for mount")
    option("--config", metavar="FILE", help="a TOML file as for mount")


def _add_doctor(commands: _Commands) -> None:
    summary = "see whether this machine can mount, and how well"
    parser = _add_command(commands, "doctor", summary, _DOCTOR_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="the dataset's directory")
    _add_mounts_options(parser)
    option = parser.add_argument
    option("--quick", action="store_true", help="measure no rates")
    option("--timeout", metavar="SECONDS", default="60", help="the time limit (default 60)")
    option("--json", action="store_true", help="one JSON object, for programs")


def _add_plan(commands: _Commands) -> None:
    summary = "say what caching a dataset would bring"
    parser = _add_command(commands, "plan", summary, _PLAN_EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="the dataset's directory")
    _add_mounts_options(parser)
    option = parser.add_argument
    option("--epochs", metavar="N", default="10", help="how often it is read (default 10)")
    option("--quick", action="store_true", help="measure no rates, estimate no times")
    option(
        "--timeout",
        metavar="SECONDS",
        default="600",
        help="how long to look at files (default 600); what was not seen by then is left out",
    )
    option("--json", action="store_true", help="one JSON object, for programs")


def _add_index(commands: _Commands) -> None:
    summary = "write a dataset's names and attributes to a file"
    parser = _add_command(commands, "index", summary, _INDEX_EXAMPLES)
    parser.add_argument("action", metavar="ACTION", choices=("export",), help="export")
    parser.add_argument("source", metavar="SOURCE", help="the dataset's directory")
    parser.add_argument("file", metavar="FILE", help="what is written")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _add_exporter(commands: _Commands) -> None:
    parser = _add_command(
        commands, "exporter", "serve the metrics of all mounts of this node", _EXPORTER_EXAMPLES
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
        help="who reads what the mounts say (root only; default nobody)",
    )
    parser.add_argument("--once", action="store_true", help="print the metrics, and end")


def _add_completion(commands: _Commands) -> None:
    summary = "print the completion for a shell"
    parser = _add_command(commands, "completion", summary, _COMPLETION_EXAMPLES)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


if __name__ == "__main__":
    sys.exit(main())
