"""What is written from the parsers: man pages, and the completion of shells.

``python -m monarchfs.cli.documents DIRECTORY`` writes the pages (`make man`), in the language of
man(7). ``monarchfs completion`` prints what shtab(1) makes; here is what completes which argument.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import shtab

from monarchfs import __version__
from monarchfs.cli.mount_helper import build_helper_parser
from monarchfs.cli.parser import build_parser, commands_of
from monarchfs.config.files import SYSTEM_FILE
from monarchfs.config.options import OPTIONS, Option

_EXIT_CODES = "0: done. 1: failed. 2: wrong usage. An error is one line on standard error."


def monarchfs_page(parser: argparse.ArgumentParser) -> str:
    """monarchfs(1): all commands, with their options and examples."""
    commands = commands_of(parser)
    lines = [
        *_head("monarchfs", 1, parser.description or ""),
        ".B monarchfs",
        ".I COMMAND",
        "[\\fIOPTION\\fR...] [\\fIARGUMENT\\fR...]",
        ".SH COMMANDS",
    ]
    for name, command in commands.items():
        lines += [
            f'.SS "monarchfs {_escape(name)}"',
            *_usage(command),
            *_text(command.description or ""),
            *_arguments(command),
            *_literally(command.epilog or ""),
        ]
    lines += [
        *(".SH EXIT STATUS", *_text(_EXIT_CODES)),
        *(".SH ENVIRONMENT", ".TP", ".I MONARCHFS_OPTION", "An option of mount and run."),
        *(".SH FILES", ".TP", f".I {_escape(SYSTEM_FILE)}", "Defaults of this machine."),
        *(".TP", f".I {_escape('~/.config/monarchfs.toml')}", "Your own."),
        *(".SH SEE ALSO", ".BR mount.monarchfs (8),", ".BR fusermount3 (1)"),
    ]
    return "\n".join(lines) + "\n"


def helper_page(parser: argparse.ArgumentParser) -> str:
    """mount.monarchfs(8)."""
    lines = [
        *_head("mount.monarchfs", 8, parser.description or ""),
        *_usage(parser),
        ".SH OPTIONS",
        *_arguments(parser),
        ".SH EXAMPLES",
        *_literally(parser.epilog or ""),
        *(".SH SEE ALSO", ".BR monarchfs (1),", ".BR mount (8),", ".BR fstab (5)"),
    ]
    return "\n".join(lines) + "\n"


def write_pages(directory: Path) -> list[Path]:
    # argparse breaks lines for the terminal it runs in.
    os.environ["COLUMNS"] = "80"
    pages = {
        "monarchfs.1": monarchfs_page(build_parser()),
        "mount.monarchfs.8": helper_page(build_helper_parser()),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in pages.items():
        (directory / name).write_text(page, encoding="utf-8")
    return [directory / name for name in pages]


def _head(name: str, section: int, description: str) -> list[str]:
    summary = description[:1].lower() + description[1:].rstrip(".")
    return [
        f'.TH "{name.upper()}" "{section}" "" "monarchfs {__version__}"',
        *(".SH NAME", f"{name} \\- {_escape(summary)}", ".SH SYNOPSIS"),
    ]


def _usage(parser: argparse.ArgumentParser) -> list[str]:
    return _literally(parser.format_usage().removeprefix("usage: "))


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    lines = []
    for action in parser._actions:
        name = _name_of(action)
        if action.help == argparse.SUPPRESS:
            continue
        # Not action.help: that may hold %(default)s.
        said = parser._get_formatter()._expand_help(action) if action.help else "Required."
        lines += [".TP", f"\\fB{name}\\fR", *_text(said)]
    return lines


def _name_of(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = "" if action.nargs == 0 else f" \\fI{_escape(metavar)}\\fB"
    if not action.option_strings:
        return value.strip()
    return ", ".join(_escape(option) + value for option in action.option_strings)


def _text(text: str) -> list[str]:
    return [_escape(line) for line in text.splitlines()]


def _literally(text: str) -> list[str]:
    """As it stands, with its line breaks."""
    return [".PP", ".nf", *_text(text.rstrip()), ".fi", ".PP"]


def _escape(text: str) -> str:
    # A hyphen would be printed as one that cannot be copied; a dot or quote at the start of a line
    # would be a request.
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


# Completion.

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


if __name__ == "__main__":
    for path in write_pages(Path(sys.argv[1])):
        print(path)
