"""``monarchfs selftest``: checks on a site's own file system, and a page that it can send."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from monarchfs.cli.doctor import print_check
from monarchfs.cli.progress import Progress
from monarchfs.cli.text import counted, printable
from monarchfs.doctor.checks import Check, Severity
from monarchfs.doctor.selftest import SelfTest, about
from monarchfs.types import UsageError


def selftest_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the checks; 1 if one of them found a problem. Raises UsageError."""
    for place in (arguments.directory, arguments.second, arguments.tier):
        if place is not None and not os.path.isdir(place):
            raise UsageError(f"{place} is no directory")
    where = about(arguments.directory)
    checks: list[Check] = []
    temporary = tempfile.gettempdir()
    with (
        Progress() as progress,
        SelfTest(
            Path(arguments.directory),
            None if arguments.second is None else Path(arguments.second),
            Path(arguments.tier or temporary),
            Path(temporary),
            arguments.files,
            progress.show,
        ) as test,
    ):
        if not arguments.json:
            print(f"monarchfs selftest, {time.strftime('%Y-%m-%d')}, as {_who()}")
            for name, value in where.items():
                print(f"  {name:<14} {printable(value)}")
            print(flush=True)
        for check in test.checks():
            checks.append(check)
            if not arguments.json:
                progress.clear()
                print_check(check)
    problems = sum(check.state is Severity.PROBLEM for check in checks)
    if arguments.json:
        found = {"about": where, "checks": [check.to_json() for check in checks]}
        print(json.dumps({**found, "problems": problems}))
    else:
        print("all is well" if not problems else counted(problems, "problem"))
    return int(problems > 0)


def _who() -> str:
    return "root" if os.geteuid() == 0 else "an ordinary user"
