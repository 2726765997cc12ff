"""``monarchfs gc``: remove what crashes left behind."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict

from monarchfs.cli.cache import take_inventory
from monarchfs.cli.text import printable
from monarchfs.config.places import search_of
from monarchfs.slurm.job import node_name
from monarchfs.slurm.leftovers import Sweeper, running_jobs
from monarchfs.slurm.records import prepare
from monarchfs.slurm.site import read_site
from monarchfs.types import MonarchError


def gc_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints what was found and its fate; 1 if something could not be removed, or looked at. Raises
    UsageError or OperationError."""
    logging.getLogger().addHandler(logging.NullHandler())
    site = read_site(arguments.config) if os.geteuid() == 0 else None
    sweeper = Sweeper(remove=not arguments.dry_run)
    search = search_of(environ)
    sweeper.registrations(search)
    sweeper.sockets(search)
    sweeper.mounts(search)
    if site is not None and (os.path.isdir(site.run_dir) or os.path.isdir(site.cache_dir)):
        if sweeper.remove:
            prepare(site)
        if os.path.isdir(site.shares):
            try:
                sweeper.jobs(site, running_jobs(node_name(environ)))
            except MonarchError as error:
                sweeper.notes.append(f"jobs were not looked at: {error}")
            sweeper.shares(site)
        sweeper.budget(site)
        sweeper.caches(site)
    stranded = [
        one for one in take_inventory(site, environ, measure=False).caches() if one.stranded_part()
    ]
    if stranded:
        sweeper.notes.append(
            f"stranded copies of {len(stranded)} caches stay: see monarchfs cache prune --dry-run"
        )
    _print(sweeper, as_json=arguments.json)
    return int(any(one.error is not None for one in sweeper.found))


def _print(sweeper: Sweeper, *, as_json: bool) -> None:
    if as_json:
        found = [asdict(one) for one in sweeper.found]
        print(json.dumps({"dry_run": not sweeper.remove, "found": found, "notes": sweeper.notes}))
        return
    for one in sweeper.found:
        did = "removed" if one.removed else "would remove" if one.error is None else "cannot remove"
        error = "" if one.error is None else f": {one.error}"
        print(printable(f"{did} {one.kind} {one.path} ({one.why}){error}"))
    for note in sweeper.notes:
        print(printable(note))
    if not sweeper.found:
        print("nothing was left behind")
