"""The command line: which commands there are, their options, and what --help says below those.

Man pages and the completion of shells are written from this and from ``config.options``.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from monarchfs import __version__
from monarchfs.config.options import OPTIONS, flag_of
from monarchfs.config.values import parse_count, parse_interval, parse_path, parse_timeout
from monarchfs.types import UsageError

MOUNT_OPTIONS = tuple(key for key, option in OPTIONS.items() if option.help)
"""Options of ``mount`` that have flags."""

RUN_OPTIONS = tuple(key for key in MOUNT_OPTIONS if key != "foreground")
"""Those of ``run``, which stays with its command."""

PLAN_OPTIONS = ("profile", "tier", "state_dir", "user", "share")
DOCTOR_OPTIONS = (*PLAN_OPTIONS[:4], "peers", "peer_name", "peer_port", "peer_key", "peer_tls")
"""Those that say what would be mounted, for whom, with which tiers, and who would share."""

SHELLS = ("bash", "zsh", "fish")


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, which is clearer than argparse's usage and easier to log, and
    names the nearest word for a mistyped one."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see {self.prog} --help")

    def add(self, form: str, said: str, **how: Any) -> None:
        """An argument as --help shows it: ``-o --output FILE``, ``--wait``; ``argv COMMAND`` is
        kept as argv and shown as COMMAND."""
        *names, last = form.split()
        if last.startswith("-"):
            self.add_argument(*names, last, action="store_true", help=said)
        else:
            self.add_argument(*(names or [last]), metavar=last.upper(), help=said, **how)

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
        if isinstance(action, argparse._SubParsersAction) or action.dest == "topic":
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


def _add_command(commands: _Commands, name: str, summary: str, *, json: bool = False) -> Parser:
    """``json``: the command can print its result for programs."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{_EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if json:
        parser.add("--json", "one JSON object, for programs")
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


def _add_timeout(parser: Parser, default: str, what: str = "the time limit") -> None:
    said = f"{what} (default {default})"
    parser.add("--timeout SECONDS", said, type=parse_timeout, default=default)


def _add_site_config(parser: Parser) -> None:
    said = "the site's configuration (default /etc/monarchfs-slurm.toml)"
    parser.add("--config FILE", said, type=parse_path)


def _add_ask(commands: _Commands, name: str, summary: str) -> Parser:
    parser = _add_command(commands, name, summary, json=True)
    parser.add("mountpoint", "the mount, or a path in it")
    parser.add("path", "absolute, or relative to the mount point", nargs="*")
    return parser


def _add_mounting(commands: _Commands) -> None:
    """Mounting, unmounting."""
    parser = _add_command(commands, "mount", "mount a dataset directory")
    parser.add("source", "the dataset's directory")
    parser.add("mountpoint", "where to mount; may be SOURCE")
    _add_mount_options(parser, MOUNT_OPTIONS)
    said = "mount the directory of descriptor N; SOURCE is only its name (for programs)"
    parser.add("--source-fd N", said)

    parser = _add_command(commands, "umount", "unmount, within a time limit")
    parser.add("mountpoint", "where it is mounted", type=parse_path)
    _add_timeout(parser, "30")

    summary = "replace a mount's worker, after an upgrade"
    parser = _add_command(commands, "restart", summary, json=True)
    parser.add("mountpoint", "where it is mounted", type=parse_path)
    _add_timeout(parser, "30")

    summary = "run a command that sees the cached view at the source's own path"
    parser = _add_command(commands, "run", summary)
    parser.add("source", "the dataset's directory")
    _add_mount_options(parser, RUN_OPTIONS)
    parser.add("--strict", "do not run COMMAND if nothing can be mounted")
    parser.add("--report", "at the end, print on standard error what was served locally")
    parser.add("--json FILE", "at the end, write the report as a JSON object to FILE")
    parser.add("argv COMMAND", "after --: the command to run, and its arguments", nargs="*")


def _add_looking(commands: _Commands) -> None:
    """What mounts do, and whom they share with."""
    add = _add_command(commands, "status", "show what mounts do", json=True).add
    add("mountpoint", "one mount (default: all of them)", nargs="?")
    add("--watch SECONDS", "repeat every SECONDS (default 2), with rates", nargs="?", const="2")

    summary = "show which processes use a mount now, and what they wait for"
    add = _add_command(commands, "top", summary, json=True).add
    add("mountpoint", "where it is mounted", type=parse_path)
    by, orders = ("process", "directory"), ("waiting", "bytes", "reads", "opens", "names")
    add("--by WHAT", "add up by process (default) or by directory", choices=by, default=by[0])
    said = f"which come first: those with the most {', '.join(orders)} (default waiting)"
    add("--sort KEY", said, choices=orders, default=orders[0])
    said = "how long each interval is (default 2)"
    add("--interval SECONDS", said, type=parse_timeout, default="2")
    add("--count N", "show N intervals, one below the other, and exit")

    summary = "show the nodes that a mount shares with, or change their list"
    parser = _add_command(commands, "peers", summary, json=True)
    parser.add("mountpoint", "where it is mounted", type=parse_path)
    parser.add("action", "add or remove; without it, show", nargs="?", choices=("add", "remove"))
    said = "which nodes: NAME[=ADDRESS][:PORT][*WEIGHT], as in --peers"
    parser.add("node", said, nargs="*")
    _add_timeout(parser, "30")


def _add_copying(commands: _Commands) -> None:
    """What is copied, and when."""
    add = _add_ask(commands, "warm", "copy files before they are opened").add
    add("--wait", "wait until each file is resident or will not be")
    add("--check", "copy nothing; say how much is resident")
    add("--metadata", "learn names and attributes only")

    summary = "say in which order files will be read, so that they are fetched ahead"
    add = _add_command(commands, "order", summary, json=True).add
    add("mountpoint", "where it is mounted", type=parse_path)
    said = "a list of paths, one a line; - is standard input. Each is the order of one reader"
    add("file", said, nargs="+")
    add("--inodes", "the lists have inode numbers, not paths")

    summary = "say which files will be read more often than others"
    add = _add_command(commands, "weigh", summary, json=True).add
    add("mountpoint", "where it is mounted, with --evict weighted")
    add("file", 'lines of "WEIGHT<TAB>PATH"; -: standard input')
    add("--replace", "files that are not named weigh nothing")


def _add_asking(commands: _Commands) -> None:
    """Of files: why, what is read, and those that are asked of a mount."""
    add = _add_command(commands, "why", "say why a file is local, or is not", json=True).add
    add("path", "a file or directory in a mount", nargs="+")

    add = _add_command(commands, "record", "record what is read from a mount, event by event").add
    add("mountpoint", "where it is mounted", type=parse_path)
    output = "monarchfs.rec"
    said = f"the file to write (default {output})"
    add("-o --output FILE", said, type=parse_path, default=output)
    add("--seconds N", "for so long (default: until Ctrl-C)")
    add("--max-size SIZE", "stop with this size (default 256M)", default="256M")
    add("--sample N", "record one of N files (a power of two; default 1: all)", default="1")
    add("argv COMMAND", "after --: record while this command runs", nargs="*")

    _add_ask(commands, "refresh", "ask the source again now")
    _add_ask(commands, "pin", "never evict the copies of files or directories")
    _add_ask(commands, "unpin", "allow pinned files to be evicted again")
    _add_ask(commands, "evict", "remove local copies")


def _add_checking(commands: _Commands) -> None:
    """Without a mount: checks and estimates."""
    add = _add_command(commands, "fsck", "check a cache that is not mounted", json=True).add
    add("state_dir", "the --state-dir of the mount", type=parse_path)
    add("--repair", "repair what is wrong")
    add("--checksum", "read every complete copy and check its bytes")

    summary = "check whether this machine can mount, and how well"
    parser = _add_command(commands, "doctor", summary, json=True)
    parser.add("source", "the dataset's directory", nargs="?")
    _add_mount_options(parser, DOCTOR_OPTIONS)
    parser.add("--quick", "measure no rates")
    said = "run a command in a mount of its own, as run would: in a job, whether its node allows it"
    parser.add("--here", said)
    _add_timeout(parser, "60")

    summary = "write an archive with what a report of a problem needs"
    add = _add_command(commands, "bugreport", summary, json=True).add
    add("mountpoint", "where it is mounted", type=parse_path)
    said = "the file to write (default monarchfs-bugreport-DATE.tar.gz)"
    add("-o --output FILE", said, type=parse_path)
    add("--with-names", "keep the names of files below the source")

    summary = "check monarchfs on a file system of this site, and print a page to send"
    add = _add_command(commands, "selftest", summary, json=True).add
    add("directory DIR", "a directory of it, in which you may write", type=parse_path)
    said = "the same directory by another mount of the file system: changes are made there"
    add("--second PATH", said, type=parse_path)
    said = "a directory on local storage for copies (default: TMPDIR)"
    add("--tier PATH", said, type=parse_path)
    said = "how many small files an epoch has (default 1000)"
    add("--files N", said, type=parse_count, default="1000")

    parser = _add_command(commands, "plan", "say what caching a dataset would bring", json=True)
    add = parser.add
    add("source", "the dataset's directory")
    _add_mount_options(parser, PLAN_OPTIONS)
    add("--nodes N", "how many nodes share the dataset, each with such tiers", type=parse_count)
    said = "how often the dataset is read (default 10)"
    add("--epochs N", said, type=parse_count, default="10")
    add("--quick", "measure no rates, estimate no times")
    _add_timeout(parser, "600", "how long to look at files; the others are left out")

    summary = "say what limited a job, from the recording of its mount, or from Darshan"
    add = _add_command(commands, "analyze", summary, json=True).add
    add("file", "what monarchfs record wrote; with --darshan, logs of one job", nargs="+")
    add("--html FILE", "also write a page with plots to FILE")
    add("--trace FILE", "also write a trace for Perfetto or Chrome to FILE")
    add("--nodes N", "also estimate what --peers would bring: N such nodes share what they have")
    add("--darshan", "FILE is a log of Darshan: would a mount have helped that job?")
    add("--source DIR", "with --darshan: the dataset's directory (default: where most was read)")
    add("--list LIST", "with --darshan: also write a list of the job's files for --prefetch")


def _add_site(commands: _Commands) -> None:
    """Of nodes and sites."""
    add = _add_command(commands, "exporter", "serve the metrics of all mounts of this node").add
    address = "127.0.0.1:9465"
    said = f"the IP address and port to serve on (default {address})"
    add("--listen ADDR:PORT", said, default=address)
    add("--user USER", "the user who reads what the mounts say (root only; default nobody)")
    add("--once", "print the metrics and exit")

    summary = "mount datasets for the jobs of a batch system (called by its prolog)"
    parser = _add_command(commands, "job", summary, json=True)
    stages = ("prolog", "epilog", "begin", "end", "sweep", "record", "check")
    parser.add("what", ", ".join(stages), choices=stages)
    parser.add("--job ID", "for begin and end: the job's number or name")
    parser.add("--user USER", "for begin: whose job it is, by name or number")
    said = "for begin: a dataset, as PATH[:OPTION=VALUE]...; may be repeated"
    parser.add("--dataset DATASET", said, action="append", default=[])
    parser.add("--account NAME", "for begin: its account, as the site's configuration has it")
    parser.add("--partition NAME", "for begin: its partition or queue, likewise")
    parser.add("--node-list LIST", "for begin: the job's nodes, as n1,n2 or n[1-2]")
    _add_site_config(parser)
    parser.add("--without JOB", "for sweep: a job that is over")
    parser.add("--recording NAME", "for record: which one")

    add = _add_command(commands, "report", "show the report of a job", json=True).add
    add("job", "the job's number or name")
    add("--dir DIR", "the directory of reports (default: the site's)", type=parse_path)

    summary = "say in one line whether this node is fit for jobs, for health checks"
    parser = _add_command(commands, "check", summary)
    parser.add("--node", "check the node: what it does in any case")
    _add_timeout(parser, "5")

    nothing = "remove nothing; show what would be removed"
    parser = _add_command(commands, "gc", "remove what crashes left behind", json=True)
    parser.add("--dry-run", nothing)
    _add_site_config(parser)

    parser = _add_command(commands, "cache", "show and remove caches of this node", json=True)
    add = parser.add
    steps = ("list", "show", "remove", "prune")
    add("what", ", ".join(steps), choices=steps)
    add("name", "which caches, for show and remove (and for prune; default: all)", nargs="*")
    said = "for prune: also caches that were not used for this long, as 30d"
    add("--older-than TIME", said, type=parse_interval)
    add("--source-gone", "for prune: also caches whose source does not exist")
    add("--dry-run", nothing)
    add("--yes", "do not ask before removing")
    paths: dict[str, Any] = {"type": parse_path, "action": "append", "default": []}
    add("--tier PATH", "also look for copies in this tier; may be repeated", **paths)
    add("--state-dir PATH", "also look at this state directory; may be repeated", **paths)
    _add_site_config(parser)


def _add_help(commands: _Commands) -> None:
    """About the program itself."""
    add = _add_command(commands, "completion", "print the completion script for a shell").add
    add("shell", "bash, zsh or fish", choices=SHELLS)

    add = _add_command(commands, "help", "show all commands, or the options of one command").add
    add("topic COMMAND", "a command", nargs="?", choices=[*commands.choices, "version"])
    _add_command(commands, "version", "print the version")


def help_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    parser = build_parser()
    chosen = parser if arguments.topic is None else commands_of(parser)[arguments.topic]
    chosen.print_help()
    return 0


def version_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    print(f"monarchfs {__version__}")
    return 0


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
"""What ``monarchfs`` alone says."""

_EXAMPLES = {
    "mount": """\
  monarchfs mount /lustre/imagenet /mnt/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs mount /lustre/imagenet /mnt/imagenet --profile training
  monarchfs mount /lustre/imagenet /lustre/imagenet --freshness immutable --prefetch all
  monarchfs mount /lustre/shards ~/shards --prefetch ~/order.txt --log-file ~/monarchfs.log
  monarchfs mount /lustre/corpus /mnt/corpus --tier /scratch=2T --evict sieve --scrub 20M
  monarchfs mount /lustre/imagenet /mnt/imagenet --touch-source 1d
  sudo monarchfs mount /lustre/imagenet /mnt/imagenet --user alice -o allow_other
  monarchfs mount /lustre/imagenet /mnt/imagenet --metrics-port 9464

A SIZE is a number with a power of 1024 (500M, 16G, 1.5T) or a share of the file system (80%).
Without --tier the mount uses half of the file system of /var/cache/monarchfs (root), or of your
cache directory.

Every option can also be given as -o OPTION=VALUE, as MONARCHFS_OPTION=VALUE in the environment, or
as OPTION = VALUE in a TOML file: ~/.config/monarchfs.toml, /etc/monarchfs.toml, or --config FILE.
The command line overrides the environment, and the environment overrides files.""",
    "umount": """\
  monarchfs umount /mnt/imagenet
  monarchfs umount /mnt/imagenet --timeout 5

Waits while the mount is in use, then detaches it, then cuts off the processes that still use it.
Never takes longer than the timeout. If nothing is mounted there, that is no error.""",
    "restart": """\
  monarchfs restart /mnt/imagenet
  monarchfs restart /mnt/imagenet --timeout 10 --json

Makes the installed program serve the mount, for example after an upgrade. Jobs that use the mount
see a short pause. Also ends safe mode. If the new program cannot take over, the old one goes on.
Exit code: 0 once the new one serves.""",
    "run": """\
  monarchfs run /lustre/imagenet -- python train.py --data /lustre/imagenet
  monarchfs run /lustre/imagenet --tier /dev/shm=16G --tier /tmp=50% --report -- ./train.sh
  srun --ntasks-per-node=8 monarchfs run /lustre/imagenet --freshness immutable -- ./train.sh
  sudo monarchfs run /lustre/imagenet --user alice -- make -C /lustre/imagenet check
  monarchfs run /lustre/imagenet --strict --json run.json -- ./benchmark

Only COMMAND sees the cached view, at SOURCE's own path. No administrator is needed. The mount is
gone when COMMAND has ended. The commands of one job on a node share it. If nothing can be mounted,
COMMAND runs on SOURCE as it is, and a line says why; with --strict it does not run.

Exit code: COMMAND's own; 128 + N if signal N ended it, 127 if it was not found, 126 if it cannot be
run. 2 for wrong usage. With --strict, 1 or 2 if nothing could be mounted.""",
    "status": """\
  monarchfs status
  monarchfs status /mnt/imagenet
  monarchfs status /mnt/imagenet --json
  monarchfs status --watch
  monarchfs status /mnt/imagenet --watch 10 >> imagenet.log

--watch follows the mount on the terminal until you press q or Ctrl-C, also while it is unmounted
and mounted again. Without MOUNTPOINT it follows the only mount, or the list of all. If the output
is not a terminal, it prints a line each time, or with --json an object.

Exit code: 1 if MOUNTPOINT is not mounted, or nothing answers for it.""",
    "top": """\
  monarchfs top /mnt/imagenet
  monarchfs top /mnt/imagenet --by directory --sort bytes
  monarchfs top /mnt/imagenet --interval 10 --count 6 >> imagenet.log
  monarchfs top /mnt/imagenet --json --count 1

Shows for each process, or each directory, what it asks of the mount per second (reads, opens, names
that are looked up, bytes), for which part of the time it waits for an answer, and where the bytes
come from: memory of the mount's worker, a tier, a peer, the source, a copy that was under way, or
the kernel, to which an open handed the file. A request counts when it is answered. With more than
20,000 events a second, only those of one of some files are looked at, and the last line says so.
Nothing is written to disk.

What the kernel answers by itself is not seen: reads from its page cache, and of copies above 1 MiB
with data path passthrough; opens of an immutable mount.

q or Ctrl-C ends it. If the output is not a terminal, or with --count, it prints a table each time,
with --json an object. Exit code: 1 if nothing is mounted there, or no more.""",
    "order": """\
  monarchfs order /mnt/imagenet epoch-7.txt
  ./sampler.py --epoch 7 | monarchfs order /mnt/imagenet -
  monarchfs order /mnt/imagenet rank0.txt rank1.txt rank2.txt rank3.txt

Paths are absolute, or relative to the mount point, in the order of reading. The mount fetches the
files ahead of their readers: into a tier if there is room, else into memory (--window), until they
were read. A later list of the same name takes the place of an earlier one. A list in which files
are not read costs little: the mount gives it up. In a job, the Python module monarchfs.hints
does the same.""",
    "record": """\
  monarchfs record /mnt/imagenet -o epoch.rec -- python train.py --epochs 1
  monarchfs record /mnt/imagenet --seconds 60
  monarchfs record /mnt/imagenet --sample 16 --max-size 1G

Writes an event for each look-up, open, read and close that the kernel sends to the mount: when, how
long it took, which file and process, and who answered (memory, a tier, another node, the source).
Recording costs a few microseconds a file, and goes on if the mount's worker is replaced. If events
come too fast, fewer files are recorded, and the last line says so.

What the kernel answers by itself is not seen: reads from its page cache, and of copies above 1 MiB
with data path passthrough (see more with --data-path relay); opens of an immutable mount.

Exit code: COMMAND's own as with run; else 0, also after Ctrl-C.""",
    "peers": """\
  monarchfs peers /mnt/imagenet
  monarchfs peers /mnt/imagenet --json
  monarchfs peers /mnt/imagenet add node5 node6:9470
  monarchfs peers /mnt/imagenet remove node2

For each peer: how many small files it is known to have, what it gave, how long one took, and how
often the source had to be asked instead (it did not answer in time, or sent something else).

add and remove hold until the mount is unmounted. A new worker takes over with the new list; jobs
see a short pause. Give all nodes the same list. PORT is the mount's own --peer-port by default.""",
    "warm": """\
  monarchfs warm /mnt/imagenet
  monarchfs warm /mnt/imagenet train/n01440764 /mnt/imagenet/labels.txt --wait
  monarchfs warm /mnt/imagenet --metadata --wait
  monarchfs warm /mnt/imagenet val --check --json

Copies all files at or below each PATH; without PATH, everything. Opened files go first, those of
--prefetch all last. Works with --prefetch none, too. Names and attributes are known afterwards.

Returns at once, and the mount does the rest. With --wait it returns when every file is resident or
will not be. An interrupted --wait ends the waiting, not the copying.

Exit code: 1 if something failed. Lack of room is no failure. With --check, 0 only if every file is
resident.""",
    "weigh": """\
  monarchfs weigh /mnt/imagenet importance.tsv --replace
  printf '2.5\\ttrain/n01440764/n01440764_10026.JPEG\\n' | monarchfs weigh /mnt/imagenet -

For a mount with --evict weighted: files with a larger weight stay, and lie in the faster tier. A
weight says how often a file will be read, compared with others: 0 or more. A PATH is absolute below
the mount point, or relative to it. From the first call on, weights are used instead of counted
opens, and a file that was never named weighs 0. They are forgotten when the mount, or its worker,
ends.

Exit code: 1 if a file is not in the mount, or cannot be asked for.""",
    "why": """\
  monarchfs why /mnt/imagenet/train/n01440764/n01440764_10026.JPEG
  monarchfs why /mnt/imagenet/train
  monarchfs why ~/data/labels.txt --json

Says where a file's bytes are and since when, or why they are not on this node: not opened yet, no
room (and how much is missing), a failed copy (and its error). For a directory it counts what is
known below it. Does not wait for a source that hangs.

Exit code: 0 if each PATH is known, 1 if not.""",
    "refresh": """\
  monarchfs refresh /mnt/imagenet
  monarchfs refresh /mnt/imagenet train/n01440764 /mnt/imagenet/labels.txt --json

Asks the source again, whatever --freshness says, for all names and attributes that the mount knows
below each PATH; without PATH, for all it knows. Takes as long as the source needs.""",
    "pin": """\
  monarchfs pin /mnt/imagenet val
  monarchfs pin /mnt/imagenet /mnt/imagenet/labels.txt --json

A pinned file is not evicted; a pinned directory stands for all files below it. Pinning copies
nothing: files are copied when they are opened.""",
    "unpin": """\
  monarchfs unpin /mnt/imagenet val""",
    "evict": """\
  monarchfs evict /mnt/imagenet
  monarchfs evict /mnt/imagenet train/n01440764

Removes the local copies of all files at or below each PATH; without PATH, all copies. Copies of
open and pinned files stay.""",
    "fsck": """\
  monarchfs fsck /var/cache/monarchfs/state/0123456789abcdef
  monarchfs fsck ~/.cache/monarchfs/state/0123456789abcdef --repair
  monarchfs fsck STATE_DIR --checksum --json

Compares the index of a cache that is not mounted with the files in its tiers. Neither needs nor
changes the source: missing copies are read from it again.

Exit code: 0 if everything is correct or was repaired, 1 if not.""",
    "doctor": """\
  monarchfs doctor
  monarchfs doctor /lustre/imagenet --tier /dev/shm=16G --tier /scratch=80%
  srun monarchfs doctor --here /lustre/imagenet
  monarchfs doctor /lustre/imagenet --config cluster.toml --json
  sudo monarchfs doctor /lustre/imagenet --user alice
  monarchfs doctor /lustre/imagenet --peers node1,node2 --peer-key /etc/monarchfs-peers.key

Takes the options of mount. To measure rates, it reads some of the source's files, and writes and
reads a file without a name in each tier.

Exit code: 0 if it can be mounted (also with warnings), 1 if not; with --here, 0 if the command read
the source's bytes.""",
    "bugreport": """\
  monarchfs bugreport /mnt/imagenet
  sudo monarchfs bugreport /mnt/imagenet -o /tmp/report.tar.gz
  monarchfs bugreport /mnt/imagenet --with-names --json

Collects versions, options, status, metrics (twice), the stacks of the daemons, the ends of their
logs, the mount table, and what doctor says. No contents of files or keys; names of files below the
source are replaced by digests. Only you can read the archive, which says what is missing, and why.
Also for a mount that is dead, or hangs: takes two minutes at most. Root gets more.

Exit code: 0 once the archive is written, 1 if not.""",
    "selftest": """\
  monarchfs selftest /lustre/scratch/alice
  monarchfs selftest /lustre/scratch/alice --second /mnt/lustre2/scratch/alice
  sudo monarchfs selftest /lustre/scratch --files 5000 --json

Makes some 4,000 files (40 to 80 MB) below DIR and mounts them on this node: what is mirrored in
each freshness mode, with each layout that lfs can make; a first and a second epoch, counted by the
client's llite.*.stats where they can be read; changes by another client; a worker that is killed
under a reader. Takes a few minutes, and removes all that it made.

Exit code: 0 if all is well (also with warnings), 1 if not.""",
    "plan": """\
  monarchfs plan /lustre/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs plan /lustre/imagenet --config cluster.toml --epochs 90 --json
  monarchfs plan /lustre/huge --tier /scratch=2T --quick --timeout 60
  monarchfs plan /lustre/huge --tier /scratch=2T --quick --nodes 16 --share auto

Takes the options of mount, but mounts and copies nothing. Says which files fit where, what the
source has to serve in the first epoch and in later ones, and how long that takes at rates measured
now.

Exit code: 0, or 1 if the source does not answer.""",
    "analyze": """\
  monarchfs analyze imagenet.rec
  monarchfs analyze imagenet.rec --html imagenet.html
  monarchfs analyze imagenet.rec --nodes 16
  monarchfs analyze imagenet.rec --trace imagenet.json --json
  monarchfs analyze --darshan me_train_id1234.darshan --list order.txt

Says whether reading its input was what the job waited for, what that waited for, and what other
tiers or settings would bring. For that it replays the recording through the placement that mounts
use. Two recorded epochs say most. The trace is for ui.perfetto.dev or chrome://tracing.

With --darshan it says of a job that did not use a mount whether one would have helped, from its log
of Darshan (several, if each process has its own), and with --list writes the files that it read,
for mount --prefetch. That needs pydarshan: pip install 'darshan>=3.4'.

Exit code: 0, also without a verdict; 1 if FILE is no recording, or no log.""",
    "exporter": """\
  monarchfs exporter
  sudo monarchfs exporter --listen 10.1.0.7:9465 --user monarchfs-exporter
  sudo monarchfs exporter --listen '[::]:9465'
  monarchfs exporter --once | grep monarchfs_mount_up

Serves the metrics of all mounts on this node for Prometheus; as an ordinary user, those of your own
mounts. Labels name the user, the source and the mount point. A mount that hangs does not delay the
others. Stays in the foreground.""",
    "job": """\
  monarchfs job prolog        (in the Prolog of slurm.conf)
  monarchfs job epilog        (in its Epilog)
  monarchfs job begin --job 123.server --user alice --dataset /lustre/imagenet:prefetch=all
  monarchfs job end --job 123.server
  monarchfs job sweep
  monarchfs job check         (after a change of the site's configuration)

prolog mounts the datasets of the job that SLURM_JOB_ID and related variables describe. epilog
removes the job, unmounts what no job uses any more, and writes the job's report. begin and end are
the same for other batch systems; begin prints lines for the job's shell, export NAME=VALUE. sweep
does what an earlier epilog had to postpone. record, which a prolog starts where the site wants it,
records a mount until its job's epilog. check says what is wrong with the site's configuration, or
what jobs may have by it; and, as root, whether this node's tiers can serve (exit code 1: no).

Each takes a limited time, and else exits with 0, except for wrong usage. The log says what went
wrong: see docs/SLURM.md and docs/BATCH.md.""",
    "report": """\
  monarchfs report 4711
  monarchfs report 4711 --json
  monarchfs report 4711 --dir /cluster/monarchfs/jobs

Shows how much of the job's datasets was served locally and what the source was spared, for each
node with a report in the directory. Only the job's user and root may read a report.""",
    "check": """\
  monarchfs check --node

Exit code 1, and a line that begins with monarchfs: FAILED, only for what jobs would suffer from and
what does not pass by itself: a daemon of root's that is stopped by a signal. Everything else is 0
and monarchfs: OK, also what was not found out in time. It changes nothing. As root it looks at all
mounts. See docs/BATCH.md.""",
    "gc": """\
  monarchfs gc --dry-run
  sudo monarchfs gc
  sudo monarchfs gc --json

Removes what crashed nodes, crashed daemons and deleted users left: dead mounts, registrations and
sockets. As root also jobs that Slurm no longer knows, copies that no index counts, and caches
beyond the budget. Never touches anything in use.

Exit code: 1 if something could not be removed.""",
    "cache": """\
  monarchfs cache list
  sudo monarchfs cache list --json
  monarchfs cache show /lustre/imagenet
  monarchfs cache remove /lustre/imagenet
  monarchfs cache prune --dry-run
  sudo monarchfs cache prune --older-than 30d --yes

The caches of this node, mounted or not: as a user your own, as root those of all users. NAME is a
source, a state directory, a mount point, or a path in a cache.

prune removes stranded copies: no state directory claims them, or its last mount did not name their
tier. It looks at what list shows, in all tiers that it finds: your own caches, as root those of all
users. Of a mounted cache it removes at most what lies in tiers that the mount does not use.
--older-than also removes whole caches that nobody has used for that long. --source-gone also
removes caches whose source does not exist; a source that is not mounted now counts as gone. Nothing
in use is ever removed.

Exit code: 1 if something could not be removed, or NAME is not known or in use.""",
    "completion": """\
  monarchfs completion bash > /etc/bash_completion.d/monarchfs
  monarchfs completion zsh > /usr/local/share/zsh/site-functions/_monarchfs
  monarchfs completion fish > ~/.config/fish/completions/monarchfs.fish

Prints a script with which the shell completes commands, options, paths and mount points. Without
root, put eval "$(monarchfs completion bash)" into ~/.bashrc.""",
    "help": """\
  monarchfs help
  monarchfs help mount""",
    "version": """\
  monarchfs version""",
}
"""Examples, then what else is to be known, by command."""
