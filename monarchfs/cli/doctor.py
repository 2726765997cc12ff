"""``monarchfs doctor`` and ``selftest``: can this machine mount, and how well; and is it right on a
site's own file system."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from monarchfs.cli.mount import HOME_SECONDS, config_and_personal, places_for, settings_from
from monarchfs.cli.output import Progress, show_result
from monarchfs.config.files import SYSTEM_FILE
from monarchfs.config.model import Config, Profile
from monarchfs.config.places import (
    DefaultPlaces,
    build_config,
    places_without_home,
    resolve_user,
    search_of,
)
from monarchfs.config.settings import set_by_profile
from monarchfs.config.values import parse_path
from monarchfs.doctor.checks import Check, Severity, Step, Value, ok, problem, warning
from monarchfs.doctor.run import examine, summary
from monarchfs.doctor.speed import measure
from monarchfs.doctor.trial import run_trial
from monarchfs.system.bounded import bounded_value
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import counted
from monarchfs.types import OperationError, UsageError

_COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def doctor_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the checks; 1 if it cannot be mounted, or with ``--here`` if `monarchfs run` does not
    work. Ends within ``--timeout`` seconds and a moment. Raises UsageError."""
    source = parse_path(arguments.source) if arguments.source is not None else ""
    deadline = time.monotonic() + arguments.timeout
    first, config, places = _asked_at_home(arguments, source, environ)
    if arguments.here and config.user.uid != os.geteuid():
        raise UsageError("--here tries what you may do: run it as the user of the job")
    search = search_of(environ)
    with Progress() as progress:
        found = examine(config, places, environ, search, deadline - time.monotonic())
        found = chain([first], found)
        checks = _shown(found, progress, quiet=arguments.json)
        if not arguments.quick:
            measured = measure(config, checks, deadline - time.monotonic())
            checks += _shown(measured, progress, quiet=arguments.json)
        if arguments.here:
            checks += _shown(_trial(config, deadline), progress, quiet=arguments.json)
    result = summary(checks)
    works = result["can_mount"]
    if arguments.here:
        works = result["can_run"] = checks[-1].state is Severity.OK
    show_result(arguments, result, _conclusion(result))
    return int(not works)


def _asked_at_home(
    arguments: argparse.Namespace, source: str, environ: Mapping[str, str]
) -> tuple[Check, Config, DefaultPlaces]:
    """`configuration` and `config_from`; a problem, and what there is without the home, where that
    hangs. Raises UsageError."""
    seconds = min(HOME_SECONDS, arguments.timeout / 2)
    overdue = f"your home, or a directory for scratch, does not answer within {seconds:g} s"
    try:
        bounded_value(
            lambda: bool(config_from(arguments, source, environ)), timeout=seconds, overdue=overdue
        )
    except OperationError as error:
        settings = settings_from(arguments)
        user, places = resolve_user(settings.user, environ), places_without_home(os.geteuid())
        config = build_config(settings, source=source, mountpoint="", user=user, places=places)
        remedy = "see which file system hangs (mount, dmesg); what follows is without your settings"
        return problem("home", str(error), remedy), config, places
    return configuration(arguments, environ), *config_from(arguments, source, environ)


def _trial(config: Config, deadline: float) -> Iterator[Step]:
    yield "running a command in a mount of its own"
    yield run_trial(config, deadline - time.monotonic())


def _shown(steps: Iterable[Step], progress: Progress, *, quiet: bool) -> list[Check]:
    """All checks, each shown once it is there."""
    done = []
    for step in steps:
        if isinstance(step, str):
            progress.show(step)
            continue
        done.append(step)
        if not quiet:
            progress.clear()
            _print_check(step)
    return done


def config_from(
    arguments: argparse.Namespace, source: str, environ: Mapping[str, str]
) -> tuple[Config, DefaultPlaces]:
    """The configuration of a mount of ``source`` with these options, on no mount point. Raises
    UsageError."""
    settings = settings_from(arguments, environ=environ)
    user = resolve_user(settings.user, environ)
    places = places_for(settings.user, environ)
    config = build_config(settings, source=source, mountpoint="", user=user, places=places)
    return config, places


def configuration(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Check:
    """Which files and environment variables count, the strongest last, and what the profile set."""
    named, own = config_and_personal(arguments, environ)
    standard = [SYSTEM_FILE] if os.path.exists(SYSTEM_FILE) else []
    files = [*standard, *([own.file] if own.file else [])] if named is None else [named]
    said = [*files, *(f"${name}" for name in own.variables)]
    detail = f"taken from {', '.join(said)}" if said else "defaults, and the command line"
    numbers: dict[str, Value] = {"files": files, "variables": list(own.variables)}
    settings = settings_from(arguments, environ=environ)
    if settings.profile is not Profile.NONE:
        name, profile_sets = settings.profile.value, set_by_profile(settings)
        detail += f"; profile {name} sets {', '.join(profile_sets) or 'nothing: all is given'}"
        numbers |= {"profile": name, "profile_sets": profile_sets}
    if own.unknown:
        detail += f"; not known: {', '.join(f'${name}' for name in own.unknown)}"
        remedy = "see docs/CONFIGURATION.md for the names of options"
        return warning("configuration", detail, remedy, **numbers)
    return ok("configuration", detail, **numbers)


def _conclusion(result: Mapping[str, Any]) -> str:
    can = "can mount" if result["can_mount"] else "cannot mount"
    found = [(result["problems"], "problem"), (result["warnings"], "warning")]
    parts = [counted(number, what) for number, what in found if number]
    said = f"{can}: {', '.join(parts) or 'all is well'}"
    if "can_run" not in result:
        return said
    if not result["can_run"]:
        return f"monarchfs run does not work here: see above, behind run (monarchfs mount: {said})"
    works = "monarchfs run works here: in a job, write monarchfs run SOURCE -- COMMAND"
    return works if result["can_mount"] else f"{works} (monarchfs mount, not needed for it: {said})"


def _print_check(check: Check) -> None:
    """One line, and one more with the remedy."""
    text = f"{check.state.value:<8} {check.name:<12} {printable(check.detail)}"
    text += f"\n{'':<21} -> {printable(check.remedy)}" if check.remedy else ""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        print(text, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    coloured = Text(text)
    coloured.stylize(_COLOURS[check.state], 0, len(check.state.value))
    Console(highlight=False, soft_wrap=True).print(coloured)


def selftest_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Checks on a site's own file system, as a page that it can send; 1 if one of them found a
    problem."""
    from monarchfs.doctor.selftest import SelfTest, about

    for place in (arguments.directory, arguments.second, arguments.tier):
        if place is not None and not os.path.isdir(place):
            raise UsageError(f"{place} is no directory")
    where = about(arguments.directory)
    temporary = tempfile.gettempdir()
    second = None if arguments.second is None else Path(arguments.second)
    places = Path(arguments.directory), second, Path(arguments.tier or temporary), Path(temporary)
    with Progress() as progress, SelfTest(*places, arguments.files) as test:
        if not arguments.json:
            who = "root" if os.geteuid() == 0 else "an ordinary user"
            print(f"monarchfs selftest, {time.strftime('%Y-%m-%d')}, as {who}")
            for name, value in where.items():
                print(f"  {name:<14} {printable(value)}")
            print(flush=True)
        checks = _shown(test.checks(), progress, quiet=arguments.json)
    problems = sum(check.state is Severity.PROBLEM for check in checks)
    found = {"about": where, "checks": [check.to_json() for check in checks], "problems": problems}
    show_result(arguments, found, counted(problems, "problem") if problems else "all is well")
    return int(problems > 0)
