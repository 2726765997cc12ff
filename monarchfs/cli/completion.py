"""``monarchfs completion``: what a shell needs to complete monarchfs's command line.

shtab(1) writes it from the parser; here is what completes which argument.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import shtab

from monarchfs.cli.parser import build_parser, commands_of
from monarchfs.config.model import DataPath, EvictPolicy
from monarchfs.config.values import LOG_LEVELS

# compgen -W would run what a mount point is named like: `$(command)`, say. Words like "dirs" in a
# function's name make shtab quote what it prints, as names of files.
_BASH = r"""
_monarchfs_mounted_dirs() {
  local point
  while IFS= read -r point; do
    [[ "$point" == "$1"* ]] && printf '%s\n' "$point"
  done < <(findmnt --list --noheadings --output TARGET --types fuse.monarchfs 2>/dev/null)
}
# Relative paths count from the mount point, the word after the command.
_monarchfs_files_below() {
  case "$1" in
    /*) compgen -f -- "$1" ;;
    *) (cd -- "${COMP_WORDS[2]}" 2>/dev/null && compgen -f -- "$1") ;;
  esac
}
_monarchfs_list_files() {
  compgen -W "none access all" -- "$1"
  compgen -f -- "$1"
}
_monarchfs_users() { compgen -u -- "$1"; }
"""
_ZSH = r"""
_monarchfs_mounted_dirs() {
  local -a points
  points=(${(f)"$(findmnt --list --noheadings --output TARGET --types fuse.monarchfs 2>/dev/null)"})
  compadd -- $points
}
"""
_MOUNTED = {
    "bash": "_monarchfs_mounted_dirs",
    "zsh": "_monarchfs_mounted_dirs",
    "fish": "(findmnt --list --noheadings --output TARGET --types fuse.monarchfs)",
}
_BELOW = {**shtab.FILE, "bash": "_monarchfs_files_below"}
_USERS = {"bash": "_monarchfs_users", "zsh": "_users", "fish": "(__fish_complete_users)"}

_COMPLETED: Mapping[str, Mapping[str, object]] = {
    "mountpoint": _MOUNTED,
    "source": shtab.DIRECTORY,
    "state_dir": shtab.DIRECTORY,
    "name": shtab.FILE,
    "tier": shtab.DIRECTORY,
    "config": shtab.FILE,
    "index": shtab.FILE,
    "file": shtab.FILE,
    "log_file": shtab.FILE,
    "prefetch": {**shtab.FILE, "bash": "_monarchfs_list_files"},
    "user": _USERS,
}
"""By the name of an argument, whatever the command."""

_CHOICES = {
    "data_path": tuple(path.value for path in DataPath),
    "evict": tuple(policy.value for policy in EvictPolicy),
    "freshness": ("immutable", "ttl=", "open"),
    "log_level": LOG_LEVELS,
}
"""Of options whose values argparse leaves to the settings' own parsers."""


def completion_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the completion for a shell; returns 0."""
    print(completion_for(build_parser(), arguments.shell))
    return 0


def completion_for(parser: argparse.ArgumentParser, shell: str) -> str:
    """The shell's script for a parser, whose arguments are marked on the way."""
    for name, command in commands_of(parser).items():
        # Without a mount point among its arguments, a command's paths are plain ones.
        below = any(action.dest == "mountpoint" for action in command._actions)
        for action in command._actions:
            _mark(name, action, _BELOW if below else shtab.FILE)
    preamble = {"bash": _BASH, "zsh": _ZSH, "fish": ""}
    # Annotated as text; a text for each shell is what its documentation shows.
    script: str = shtab.complete(parser, shell=shell, preamble=preamble)  # type: ignore[arg-type]
    return script


def _mark(command: str, action: argparse.Action, path: Mapping[str, object]) -> None:
    if action.choices is not None or action.nargs == 0:
        return
    if action.option_strings and action.dest in _CHOICES:
        action.choices = _CHOICES[action.dest]
    complete = path if action.dest == "path" else _COMPLETED.get(action.dest)
    if command == "mount" and action.dest == "mountpoint":
        complete = shtab.DIRECTORY
    if complete is not None:
        action.complete = complete  # type: ignore[attr-defined]
