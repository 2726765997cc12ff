"""``monarchfs cache`` and ``gc``: the caches of this node, mounted or not, to look at and to
remove; and what crashes left behind."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from monarchfs.cli.output import show_result
from monarchfs.config.places import ROOT_CACHE_DIR, search_of, user_of
from monarchfs.config.values import parse_path
from monarchfs.slurm.caches import all_caches, discard, trash_in
from monarchfs.slurm.inventory import (
    Inventory,
    LocalCache,
    remove_cache,
    source_gone,
    users_of_node,
)
from monarchfs.slurm.job import node_name
from monarchfs.slurm.leftovers import Sweeper, running_jobs
from monarchfs.slurm.records import prepare, remove_tree
from monarchfs.slurm.shares import Share
from monarchfs.slurm.site import Site, read_site
from monarchfs.supervisor.recover import find_all, find_private
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import format_bytes, format_seconds, plural
from monarchfs.types import MonarchError, OperationError, UsageError


def cache_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Shows or removes caches; 1 if something could not be removed."""
    logging.getLogger().addHandler(logging.NullHandler())
    step, names = arguments.what, [parse_path(name) for name in arguments.name]
    if step != "prune" and bool(names) != (step in ("show", "remove")):
        want = "name a SOURCE, a STATE_DIR or a PATH" if not names else "it takes no names"
        raise UsageError(f"cache {step}: {want}: see monarchfs cache --help")
    older = arguments.older_than
    if step != "prune" and (older is not None or arguments.source_gone):
        raise UsageError("--older-than and --source-gone are for cache prune")
    site = read_site(arguments.config) if os.geteuid() == 0 else None
    inventory = take_inventory(
        site,
        environ,
        tiers=arguments.tier,
        state_dirs=[*arguments.state_dir, *names],
        named=len(arguments.state_dir),
    )
    found, notes = inventory.caches(), inventory.notes
    if names:
        found = [one for name in names for one in _chosen(found, name)]
        found = list({tuple(_paths(one)): one for one in found}.values())
    if step in ("list", "show"):
        result = {"caches": [as_dict(one) for one in found], "notes": notes}
        lines = (line for one in found for line in _lines(one, whole=step == "show"))
        show_result(arguments, result, chain(lines, _ending(found, notes, "there is no cache")))
        return 0
    if step == "prune":
        gone = arguments.source_gone
        found = [part for one in found if (part := _prunable(one, older, gone=gone))]
    elif busy := next((one for one in found if one.in_use), None):
        where = f" by the mount on {busy.mountpoint}" if busy.mountpoint else ""
        raise OperationError(f"the cache of {busy.source} is in use{where}: unmount that first")
    if found and not arguments.dry_run and not arguments.yes:
        _ask(found)
    results = []
    for one in found:
        error = None if arguments.dry_run else _remove(one, site)
        removed = not arguments.dry_run and error is None
        results.append({**as_dict(one), "removed": removed, "error": error})
        if not arguments.json:
            what = f"{format_bytes(one.used_bytes)} of {one.source}: {', '.join(_paths(one))}"
            print(_fate(what, removed, error))
    result = {"dry_run": arguments.dry_run, "caches": results, "notes": notes}
    show_result(arguments, result, _ending(found, notes, "there is nothing to remove"))
    return int(any(one["error"] is not None for one in results))


def take_inventory(
    site: Site | None,
    environ: Mapping[str, str],
    *,
    tiers: Sequence[str] = (),
    state_dirs: Sequence[str] = (),
    named: int = 0,
    measure: bool = True,
) -> Inventory:
    """An inventory of all known places: those of users, of mounts, of Slurm, and what was named.
    The first ``named`` of the state directories must exist. Raises OperationError."""
    inventory = Inventory(measure=measure)
    me = user_of(os.geteuid())
    for number, path in enumerate(state_dirs):
        if not inventory.state_dir(path, None) and number < named:
            raise OperationError(f"{path} holds no cache of monarchfs that is yours to look at")
    for path in tiers:
        inventory.tier(path, me)
    search = search_of(environ)
    for mount in [*find_all(search), *find_private(search)]:
        if mount.registered is not None:
            entry, writer = mount.registered.entry, mount.registered.owner_uid
            # Who is not root speaks for himself alone.
            uid = entry.uid if writer == 0 else writer
            if os.geteuid() in (0, uid):
                inventory.state_dir(entry.state_dir, user_of(uid))
    inventory.base(ROOT_CACHE_DIR, me)
    inventory.users([me], environ)
    if site is not None:
        inventory.base(site.cache_dir, me)
        for tier in site.tiers:
            inventory.tier(tier.path, me)
        for cache in all_caches(site) if os.path.isdir(site.caches) else ():
            state = os.path.join(site.cache(cache.key), "state")
            inventory.state_dir(state, user_of(cache.uid))
        inventory.users(users_of_node(), {})
    return inventory


def as_dict(cache: LocalCache) -> dict[str, Any]:
    """A cache as ``--json`` has it (docs/USAGE.md)."""
    return {
        "source": cache.source,
        "user": cache.user.name,
        "uid": cache.user.uid,
        "state_dir": cache.state_dir,
        "state_dir_claims": cache.claimed,
        "in_use": cache.in_use,
        "mountpoint": cache.mountpoint if cache.in_use else None,
        "last_used_unix_seconds": cache.last_used,
        "used_bytes": cache.used_bytes,
        "tiers": [
            {
                "tier": one.tier,
                "path": one.path,
                "used_bytes": one.size.bytes,
                "files": one.size.files,
                "complete": one.size.whole,
                "in_use": one.in_use,
                "stranded": one.stranded,
            }
            for one in cache.directories
        ],
    }


def _chosen(found: Sequence[LocalCache], name: str) -> list[LocalCache]:
    """The caches that a name means: by source, state directory, mount point, or a path in one of
    their directories. Of a stranded directory that is meant, that alone."""
    chosen = []
    for one in found:
        if name in (one.source, one.state_dir, one.mountpoint if one.in_use else None):
            chosen.append(one)
            continue
        for directory in one.directories:
            if name == directory.path or name.startswith(directory.path + "/"):
                alone = replace(one, directories=(directory,), part=True, in_use=False)
                chosen.append(alone if directory.stranded else one)
    if not chosen:
        raise OperationError(f"no cache is of {name}, or lies there: see monarchfs cache list")
    return chosen


def _prunable(cache: LocalCache, older: float | None, *, gone: bool) -> LocalCache | None:
    """What of a cache goes: all of it, its stranded directories, or nothing."""
    if cache.claimed and not cache.in_use:
        if older is not None and cache.last_used < time.time() - older:
            return cache
        if gone and source_gone(cache.source, cache.user):
            return cache
    return cache.stranded_part()


def _ask(found: Sequence[LocalCache]) -> None:
    """Goes on only if somebody at a terminal agrees. Raises UsageError or OperationError."""
    if not sys.stdin.isatty():
        raise UsageError("nobody can be asked here: say --yes, or --dry-run to look first")
    for one in found:
        print("\n".join(_lines(one, whole=False)), file=sys.stderr)
    print("Remove these? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OperationError("nothing was removed")


def _remove(cache: LocalCache, site: Site | None) -> str | None:
    """Why not; None if it is removed."""
    key = os.path.basename(os.path.dirname(cache.state_dir))
    whole = cache.claimed and not cache.part
    try:
        if site is None or not whole or cache.state_dir != os.path.join(site.cache(key), "state"):
            remove_cache(cache)
            return None
        prepare(site)
        if not discard(site, key, "as root asked"):
            jobs = Share(site, key).jobs()
            if not jobs:
                return "a mount uses it, or is about to: unmount that first"
            used = f"job {', '.join(map(str, jobs))} uses it"
            return f"{used}: if it is over, monarchfs job sweep --without {jobs[0]}"
        for path in trash_in(site):
            remove_tree(path)
        return None
    except (MonarchError, OSError) as failed:
        return str(failed)


def _paths(cache: LocalCache) -> list[str]:
    state = [cache.state_dir] if cache.claimed and not cache.part else []
    return [*state, *(one.path for one in cache.directories)]


def _fate(what: str, removed: bool, error: str | None) -> str:
    did = "removed" if removed else "would remove" if error is None else "cannot remove"
    return printable(f"{did} {what}" + (f": {error}" if error else ""))


def _ending(found: Sequence[object], notes: Iterable[str], nothing: str) -> Iterator[str]:
    """What stands below a list."""
    yield from map(printable, notes)
    if not found:
        yield nothing


def _lines(cache: LocalCache, *, whole: bool) -> list[str]:
    """A row for the cache, then one for each directory in a tier."""
    ago = format_seconds(max(0.0, time.time() - cache.last_used))
    state = f"in use by {cache.mountpoint or 'somebody'}" if cache.in_use else "not in use"
    used = format_bytes(cache.used_bytes)
    whose = f"state {cache.state_dir}{'' if cache.claimed else ' (gone, or has another)'}"
    lines = [f"{cache.source}  {cache.user.name}  {used}  used {ago} ago  {state}  {whose}"]
    for one in cache.directories:
        place = one.path if whole or one.stranded else one.tier
        size = ("" if one.size.whole else "at least ") + format_bytes(one.size.bytes)
        # Small ones are counted once they are synced.
        least = "at least " * (cache.in_use or not one.size.whole)
        files = f"{least}{one.size.files} {plural(one.size.files, 'file')}"
        why = f"  stranded: {one.stranded}" if one.stranded else ""
        lines.append(f"    {place}  {size}  {files}{why}")
    return [printable(line) for line in lines]


# What crashes left behind.


def gc_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints what was found and its fate; 1 if something could not be removed, or looked at."""
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
    caches = take_inventory(site, environ, measure=False).caches()
    if stranded := sum(one.stranded_part() is not None for one in caches):
        sweeper.notes.append(
            f"stranded copies of {stranded} caches stay: see monarchfs cache prune --dry-run"
        )
    found = sweeper.found
    result = {"dry_run": not sweeper.remove, "found": [asdict(one) for one in found]}
    lines = (_fate(f"{one.kind} {one.path} ({one.why})", one.removed, one.error) for one in found)
    ending = _ending(found, sweeper.notes, "nothing was left behind")
    show_result(arguments, {**result, "notes": sweeper.notes}, chain(lines, ending))
    return int(any(one.error is not None for one in found))
