"""All checks, one after the other, each in a child of its own; a child that hangs is left
behind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from monarchfs.config import Config
from monarchfs.config.places import DefaultPlaces, Search
from monarchfs.doctor import leftovers, peers, storage, system
from monarchfs.doctor.checks import Check, Probe, Severity, Step, warning
from monarchfs.system.bounded import bounded_value
from monarchfs.types import MonarchError

SOURCE_SECONDS = 10.0
LEAST_SECONDS = 0.05
TIER_SECONDS = 5.0


def examine(
    config: Config,
    places: DefaultPlaces,
    environ: Mapping[str, str],
    search: Search,
    timeout: float,
) -> Iterator[Step]:
    """The checks as they are made, within ``timeout`` seconds and a moment. ``config.source`` is
    empty if none was named; ``places`` are the defaults, ``search`` names runtime directories. For
    processes of one thread, because it forks."""
    deadline = time.monotonic() + timeout
    for name, seconds, probe in _probes(config, places, environ, search):
        yield f"looking at {name}"
        yield from guarded(name, min(seconds, deadline - time.monotonic()), probe)


def _probes(
    config: Config, places: DefaultPlaces, environ: Mapping[str, str], search: Search
) -> Iterator[tuple[str, float, Probe]]:
    yield from system.probes(config.user)
    if config.source:
        touches = bool(config.touch_source_seconds)
        look = partial(storage.source, config.source, config.user, SOURCE_SECONDS, touches=touches)
        yield "source", SOURCE_SECONDS + 2, look
    for tier in config.tiers:
        look = partial(storage.tier, tier, config, places.cache_dir, environ)
        yield f"tier {tier.path}", TIER_SECONDS, look
    yield "state_dir", 5.0, partial(storage.state_dir, config, places.cache_dir)
    if config.peers:
        yield "peers", peers.PEERS_SECONDS, partial(peers.peers, config)
    yield "runtime_dir", 2.0, partial(leftovers.runtime_dir, places.runtime_dir)
    yield "mounts", 10.0, partial(leftovers.mounts, search)
    yield "stale_socket", 10.0, partial(leftovers.sockets, search)
    yield "caches", 5.0, partial(leftovers.caches, places)


_HARMLESS = frozenset({"mounts", "stale_socket", "caches", "allow_other", "memory", "kernel"})
"""Checks that say nothing about mounting where they fail."""


def guarded(what: str, seconds: float, probe: Probe) -> list[Check]:
    """The checks of a probe; if it failed or did not answer, one that says so. ``what``: its name,
    and a path if there are several. For processes of one thread, because it forks."""
    name, _, path = what.partition(" ")
    state = Severity.WARNING if name in _HARMLESS else Severity.PROBLEM
    if seconds < LEAST_SECONDS:
        return [warning(name, "not looked at: time is up", "give it more --timeout")]
    try:
        found = bounded_value(
            lambda: [check.to_json() for check in probe()],
            timeout=seconds,
            overdue=f"no answer{path and f' from {path}'} within {seconds:.0f} s",
        )
    except MonarchError as error:
        return [Check(name, state, str(error), "see which file system hangs (mount, dmesg)")]
    return [Check.from_json(fields) for fields in found]


def summary(checks: Sequence[Check]) -> dict[str, Any]:
    """What ``--json`` prints."""
    problems = sum(check.state is Severity.PROBLEM for check in checks)
    return {
        "can_mount": not problems,
        "warnings": sum(check.state is Severity.WARNING for check in checks),
        "problems": problems,
        "checks": [check.to_json() for check in checks],
    }
