"""``monarchfs completion``: what a shell needs to complete monarchfs's command line.

shtab(1) writes it from the parser; here is what completes which argument.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import shtab

from monarchfs.cli.parser import build_parser, commands_of
from monarchfs.config.options import OPTIONS, Option

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

_PATHS = {"file": shtab.FILE, "directory": shtab.DIRECTORY}

_COMPLETED: Mapping[str, Mapping[str, object]] = {
    "mountpoint": _MOUNTED,
    "source": shtab.DIRECTORY,
    "name": shtab.FILE,
    "config": shtab.FILE,
    **dict.fromkeys(("file", "html", "trace", "list"), shtab.FILE),
    "user": _USERS,
}
"""By the name of an argument, whatever the command. Those of options are in their table."""


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
    preamble = {"bash": _BASH + _words_or_files(), "zsh": _ZSH, "fish": ""}
    # Annotated as text; a text for each shell is what its documentation shows.
    script: str = shtab.complete(parser, shell=shell, preamble=preamble)  # type: ignore[arg-type]
    return script


def _mark(command: str, action: argparse.Action, path: Mapping[str, object]) -> None:
    if action.choices is not None or action.nargs == 0:
        return
    option = OPTIONS.get(action.dest)
    if action.option_strings and option is not None and not option.paths:
        action.choices = option.choices or None
    complete = path if action.dest == "path" else _completed(action.dest, option)
    if command == "mount" and action.dest == "mountpoint":
        complete = shtab.DIRECTORY
    if complete is not None:
        action.complete = complete  # type: ignore[attr-defined]


def _completed(name: str, option: Option | None) -> Mapping[str, object] | None:
    if option is None or not option.paths:
        return _COMPLETED.get(name)
    paths = _PATHS[option.paths]
    return {**paths, "bash": _function_of(name)} if option.choices else paths


def _function_of(name: str) -> str:
    return f"_monarchfs_{name}_words_or_files"


def _words_or_files() -> str:
    """Functions of bash for options that take certain words, or else a file."""
    return "".join(
        f"{_function_of(name)}() {{\n"
        f'  compgen -W "{" ".join(option.choices)}" -- "$1"\n'
        '  compgen -f -- "$1"\n'
        "}\n"
        for name, option in OPTIONS.items()
        if option.choices and option.paths
    )
