"""``mount.monarchfs``: what mount(8) runs for file systems of type ``monarchfs``.

See mount(8), EXTERNAL HELPERS, also for the exit codes: 0 mounted, 1 wrong call or option, 8
interrupted, 32 not mounted. mount(8) adds options of its own: ``rw`` without ``ro``, and
``exec,suid,dev`` for a line of fstab with ``user`` that root mounts. The mount is read-only, nosuid
and nodev in any case.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Sequence

from monarchfs import __version__
from monarchfs.cli.output import complain, output_written, prepare_streams
from monarchfs.cli.parser import Parser, build_parser
from monarchfs.config.settings import escape_option, is_known_option, split_options
from monarchfs.system import inherited
from monarchfs.system.escaping import printable
from monarchfs.system.limits import explained
from monarchfs.types import MonarchError, OperationError, UsageError

PROGRAM = "mount.monarchfs"
USAGE, INTERRUPTED, FAILED = 1, 8, 32

_OVERRULED = frozenset({"rw", "suid", "dev"})
_CLONE_NEWNS = 0x00020000
_EXAMPLES = """\
examples:
  mount -t monarchfs /lustre/imagenet /mnt/imagenet -o tier=/scratch=80%,allow_other
  mount.monarchfs /lustre/imagenet /mnt/imagenet -f -v -o tier=/dev/shm=16G,freshness=immutable

A line of /etc/fstab:
  /lustre/imagenet  /mnt/imagenet  monarchfs  tier=/scratch=80%,allow_other,_netdev,nofail  0 0

Options are those of monarchfs mount, as NAME or NAME=VALUE. The mount is read-only, nosuid and
nodev, even if rw, suid or dev is asked for. Without user=NAME it belongs to the user who runs this,
also under sudo. Exit code: 0 mounted, 1 wrong usage, 8 interrupted, 32 not mounted."""


def build_helper_parser() -> argparse.ArgumentParser:
    """The parser of what mount(8) gives a helper."""
    parser = Parser(
        prog=PROGRAM,
        description="Mounts a dataset directory, for mount(8) and fstab(5).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add("source", "the dataset's directory")
    parser.add("mountpoint DIR", "where to mount; may be SOURCE")
    option = parser.add_argument
    option("-o", dest="options", metavar="OPT,...", action="append", help="mount options")
    option("-f", dest="fake", action="store_true", help="check everything, but do not mount")
    option("-v", dest="verbose", action="store_true", help="say what is mounted, and how")
    option("-s", dest="sloppy", action="store_true", help="leave out unknown options")
    option("-n", dest="no_mtab", action="store_true", help="ignored: no mtab is written anyway")
    option(
        "-N", dest="namespace", metavar="NS", help="mount in this mount namespace: a PID or file"
    )
    option("-t", dest="type", metavar="TYPE", help="ignored: there is one type")
    option("-V", "--version", action="version", version=f"{PROGRAM} {__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the helper's command line; the exit code."""
    inherited.put_right()
    prepare_streams()
    try:
        return output_written(_outcome(arguments), PROGRAM)
    except SystemExit as end:  # of argparse, which has printed what -h or -V asks for
        code = end.code if isinstance(end.code, int) else USAGE
        raise SystemExit(output_written(code, PROGRAM)) from None


def _outcome(arguments: Sequence[str] | None) -> int:
    try:
        given = build_helper_parser().parse_args(arguments)
        options = _options(given.options or (), sloppy=given.sloppy)
        # Loaded late, and before the namespace is changed: other files may be in there.
        from monarchfs.cli.mount import mount_with, settings_from

        words = ["mount", "-o", ",".join(options), "--", given.source, given.mountpoint]
        settings = settings_from(build_parser().parse_args(words))
    except UsageError as error:
        return complain(str(error), USAGE, PROGRAM)
    # Under sudo as at boot: fstab says whose mount it is.
    environ = {name: value for name, value in os.environ.items() if name != "SUDO_UID"}
    try:
        if given.namespace is not None:
            _enter(given.namespace)
        mount_with(settings, given.source, given.mountpoint, environ, check_only=given.fake)
    except MonarchError as error:
        return complain(str(error), FAILED, PROGRAM)
    except OSError as error:
        return complain(explained(error), FAILED, PROGRAM)
    except KeyboardInterrupt as interrupt:
        return complain(str(interrupt) or "interrupted", INTERRUPTED, PROGRAM)
    if given.verbose:
        done = "could be mounted" if given.fake else "mounted"
        listed = ",".join(("ro", "nosuid", "nodev", *options))
        print(printable(f"{PROGRAM}: {given.source} {done} on {given.mountpoint} ({listed})"))
    return 0


def _options(texts: Sequence[str], *, sloppy: bool) -> list[str]:
    """The options that are left for ``monarchfs mount -o``, each escaped."""
    options = [option for text in texts for option in split_options(text)]
    return [
        escape_option(option)
        for option in options
        if option not in _OVERRULED and (not sloppy or is_known_option(option))
    ]


def _enter(namespace: str) -> None:
    """Enters a mount namespace. Raises OperationError if this process may not."""
    path = f"/proc/{namespace}/ns/mnt" if namespace.isdecimal() else namespace
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OperationError(
            f"cannot open mount namespace {path}: {error.strerror}: give a PID, or a file of"
            " /proc/PID/ns"
        ) from None
    try:
        # os.setns is there from Python 3.12 on.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNS) != 0:
            raise OperationError(
                f"cannot enter mount namespace {path}: {os.strerror(ctypes.get_errno())}:"
                " root may, with CAP_SYS_ADMIN"
            )
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
