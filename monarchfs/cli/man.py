"""Man pages, written from the parsers: ``python -m monarchfs.cli.man DIRECTORY`` (`make man`).

The language is that of man(7).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from monarchfs import __version__
from monarchfs.cli.mount_helper import build_helper_parser
from monarchfs.cli.parser import build_parser, commands_of
from monarchfs.config.files import SYSTEM_FILE

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
    """Writes all pages; their paths."""
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
    lines: Iterable[str] = text.rstrip().splitlines()
    return [".PP", ".nf", *map(_escape, lines), ".fi", ".PP"]


def _escape(text: str) -> str:
    # A hyphen would be printed as one that cannot be copied; a dot or quote at the start of a line
    # would be a request.
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    for path in write_pages(Path(sys.argv[1])):
        print(path)
