"""The options of mount, for each command that takes them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from monarchfs.config.options import OPTIONS, flag_of

MOUNT_OPTIONS = tuple(key for key, option in OPTIONS.items() if option.help)
"""Options that have flags."""

RUN_OPTIONS = tuple(key for key in MOUNT_OPTIONS if key != "foreground")
"""Those of ``run``, which stays with its command."""

PLAN_OPTIONS = ("tier", "state_dir", "user")
"""Those that say what would be mounted, for whom and with which tiers."""

DOCTOR_OPTIONS = (*PLAN_OPTIONS, "peers", "peer_name", "peer_port", "peer_key", "peer_tls")
"""Those, and who would share."""

_SHORT = {"foreground": "-f"}


def add_mount_options(parser: argparse.ArgumentParser, keys: Iterable[str] = MOUNT_OPTIONS) -> None:
    """The flags of these options, and those for files and ``-o``."""
    for key in keys:
        _add_flag(parser, key)
    parser.add_argument(
        "-o", dest="options", metavar="OPT,...", action="append", help="mount options, as in fstab"
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with these options")


def _add_flag(parser: argparse.ArgumentParser, key: str) -> None:
    option = OPTIONS[key]
    names = [*filter(None, [_SHORT.get(key)]), f"--{flag_of(key)}"]
    if option.is_switch:
        # None where it is not given: what files and variables say counts then.
        parser.add_argument(*names, action="store_const", const=True, help=option.help)
    else:
        action = "append" if key == "tier" else "store"
        parser.add_argument(*names, metavar=option.value, action=action, help=option.help)
