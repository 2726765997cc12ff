"""``monarchfs doctor``: can this machine mount, and how well."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import chain

from monarchfs.cli.mount import config_and_personal, settings_from
from monarchfs.cli.mount_options import DOCTOR_OPTIONS, PLAN_OPTIONS
from monarchfs.cli.progress import Progress
from monarchfs.cli.text import counted, printable
from monarchfs.config.files import SYSTEM_FILE
from monarchfs.config.model import Config
from monarchfs.config.places import (
    DefaultPlaces,
    build_config,
    default_places,
    resolve_user,
    search_of,
)
from monarchfs.config.values import parse_path
from monarchfs.doctor.checks import Check, Severity, Value, ok, warning
from monarchfs.doctor.run import Subject, examine, summary
from monarchfs.fuse.mountinfo import is_network_filesystem

_COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def doctor_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the checks; 1 if it cannot be mounted. Ends within ``--timeout`` seconds and a moment.
    Raises UsageError for options that make no sense."""
    source = parse_path(arguments.source) if arguments.source is not None else ""
    config, places = config_from(arguments, source, environ, DOCTOR_OPTIONS)
    subject = Subject(
        config,
        places,
        environ,
        search_of(environ),
        measures=not arguments.quick,
    )
    checks: list[Check] = []
    with Progress() as progress:
        found = examine(
            subject, arguments.timeout, lambda name: progress.show(f"looking at {name}")
        )
        for check in chain([configuration(arguments, environ)], found):
            checks.append(check)
            if not arguments.json:
                progress.clear()
                print_check(check)
    result = summary(checks)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(conclusion(checks))
    return int(not result["can_mount"])


def config_from(
    arguments: argparse.Namespace,
    source: str,
    environ: Mapping[str, str],
    flags: Sequence[str] = PLAN_OPTIONS,
) -> tuple[Config, DefaultPlaces]:
    """The configuration of a mount of ``source`` with these options, on no mount point. Raises
    UsageError."""
    settings = settings_from(arguments, flags, environ=environ)
    user = resolve_user(settings.user, environ)
    places = default_places(os.geteuid(), environ, is_network_filesystem)
    config = build_config(settings, source=source, mountpoint="", user=user, places=places)
    return config, places


def configuration(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Check:
    """Which files and environment variables count, the strongest last."""
    named, own = config_and_personal(arguments, environ)
    standard = [SYSTEM_FILE] if os.path.exists(SYSTEM_FILE) else []
    files = [*standard, *([own.file] if own.file else [])] if named is None else [named]
    said = [*files, *(f"${name}" for name in own.variables)]
    detail = f"taken from {', '.join(said)}" if said else "defaults, and the command line"
    numbers: dict[str, Value] = {"files": files, "variables": list(own.variables)}
    if own.unknown:
        detail += f"; not known: {', '.join(f'${name}' for name in own.unknown)}"
        remedy = "see docs/CONFIGURATION.md for the names of options"
        return warning("configuration", detail, remedy, **numbers)
    return ok("configuration", detail, **numbers)


def describe(check: Check) -> str:
    """A check for people: one line, and one more with the remedy."""
    text = f"{check.state.value:<8} {check.name:<12} {printable(check.detail)}"
    return text + (f"\n{'':<21} -> {printable(check.remedy)}" if check.remedy else "")


def conclusion(checks: Sequence[Check]) -> str:
    result = summary(checks)
    can = "can mount" if result["can_mount"] else "cannot mount"
    warnings, problems = result["warnings"], result["problems"]
    parts = [counted(problems, "problem")] if problems else []
    parts += [counted(warnings, "warning")] if warnings else []
    return f"{can}: {', '.join(parts) or 'all is well'}"


def print_check(check: Check) -> None:
    text = describe(check)
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        print(text, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    coloured = Text(text)
    coloured.stylize(_COLOURS[check.state], 0, len(check.state.value))
    Console(highlight=False, soft_wrap=True).print(coloured)
