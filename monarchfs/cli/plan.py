"""``monarchfs plan``: what of a dataset fits, what the source has to serve, and what that
brings."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from monarchfs.cli.doctor import config_from
from monarchfs.cli.output import Progress, labelled, show_result
from monarchfs.config import Config
from monarchfs.config.model import ShareMode
from monarchfs.config.places import search_of
from monarchfs.config.values import parse_path
from monarchfs.doctor.speed import source_rates, tier_rates
from monarchfs.doctor.storage import check_and_locate, look_at_source, room_of
from monarchfs.insight.estimates import SourceRates, TierRates, Times, plan_sharing, times
from monarchfs.insight.fitting import Amount, PlannedTier, total
from monarchfs.insight.survey import survey_and_fit
from monarchfs.supervisor.directories import names_for, recorded_directories
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.recover import find_all
from monarchfs.system.bounded import Tell, bounded_talk, bounded_value
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import counted, format_bytes
from monarchfs.types import OperationError, Space

_SOURCE_SECONDS = 10.0
_TIER_SECONDS = 5.0
_SILENCE_SECONDS = 30.0


def plan_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    source = parse_path(arguments.source)
    config, places = config_from(arguments, source, environ)
    found = look_at_source(source, config.user, _SOURCE_SECONDS)
    # The dataset's place in the tiers is named after the source without symbolic links.
    config, places = config_from(arguments, found.path, environ)
    rooms = [_room(config, number, places.cache_dir) for number in range(len(config.tiers))]
    with Progress() as progress:
        rates = None if arguments.quick else _rates(config, progress)
        report = _survey(config, rooms, arguments.timeout, progress)
    result = combine(config.source, report, rooms, rates, arguments.epochs)
    if arguments.nodes:
        result["sharing"] = shared(result, arguments.nodes, config.share)
    mounts = find_all(search_of(environ))
    result["mountpoints"] = [one.mountpoint for one in mounts if one.source == config.source]
    show_result(arguments, result, lines(result))
    return 0


def combine(
    source: str,
    report: Mapping[str, Any],
    rooms: list[PlannedTier],
    rates: tuple[SourceRates, list[TierRates]] | None,
    epochs: int,
) -> dict[str, Any]:
    """What ``--json`` prints. Pure."""
    cached = [Amount(**amount) for amount in report["cached"]]
    placed = [Amount(**amount) for amount in report["placed"]]
    remote, new = Amount(**report["remote"]), total(*placed)
    estimate = times(placed, cached, remote, *rates) if rates is not None else None
    keys = ("complete", "files", "bytes", "directories", "others", "unreadable", "hard_links")
    tiers = []
    for room, will, was in zip(rooms, placed, cached, strict=True):
        now, usable = total(will, was), min(room.size_bytes, room.usable_bytes + was.bytes)
        tiers.append(
            {
                "path": room.path,
                "capacity_bytes": room.size_bytes,
                "usable_bytes": usable,
                "limited_by": room.limited_by if usable < room.size_bytes else None,
                "free_bytes": room.space.free_bytes,
                **asdict(now),
                "cached_files": was.files,
            }
        )
    return {
        "source": source,
        **{key: report[key] for key in (*keys, "sizes")},
        "tiers": tiers,
        "resident": asdict(total(Amount(**report["whole"]), *cached)),
        "partial": report["partial"],
        "remote": report["remote"],
        "cached_before": asdict(total(*cached)),
        "source_bytes": {
            "first_epoch": new.bytes + remote.bytes,
            "later_epoch": remote.bytes,
            "plain_epoch": report["bytes"],
        },
        "rates": None if rates is None else _rates_json(*rates, rooms),
        "seconds": None if estimate is None else _seconds_json(estimate, epochs),
        "epochs": epochs,
        "pays_from_epoch": estimate.pays_from_epoch if estimate is not None else None,
    }


def shared(plan: Mapping[str, Any], nodes: int, share: ShareMode) -> dict[str, Any]:
    """What ``--json`` prints of nodes that share. Pure."""
    room = plan["resident"]["bytes"] + plan["partial"]["bytes"]
    found = plan_sharing(
        plan["bytes"],
        room,
        nodes,
        own_first=share is not ShareMode.REPLICATE,
        keeps_foreign=share is not ShareMode.PARTITION,
    )
    return {"nodes": nodes, "share": share.value, **found}


def _rates_json(
    source: SourceRates, tiers: list[TierRates], rooms: list[PlannedTier]
) -> dict[str, Any]:
    return {
        "source_read_bytes_per_second": source.read_bytes_per_second,
        "source_open_seconds": source.open_seconds,
        "source_threads": source.threads,
        "tiers": [
            {
                "path": room.path,
                "write_bytes_per_second": tier.write_bytes_per_second,
                "read_bytes_per_second": tier.read_bytes_per_second,
            }
            for room, tier in zip(rooms, tiers, strict=True)
        ],
    }


def _seconds_json(estimate: Times, epochs: int) -> dict[str, float]:
    plain, whole = estimate.plain_total(epochs), estimate.total(epochs)
    return {**asdict(estimate), "plain_total": plain, "total": whole, "saved": plain - whole}


def _room(config: Config, number: int, cache_dir: str) -> PlannedTier:
    """A tier as placement will see it. Raises UsageError, OperationError."""
    tier = config.tiers[number]

    def call() -> list[Any]:
        place = check_and_locate(tier, config, cache_dir)
        room = room_of(place, tier.size, config.reserve_percent)
        # A tier in memory answers to what is left there; others to what is free on the disk.
        capacity = room.usable_bytes if place.headroom is not None else room.capacity_bytes
        usable = (room.capacity_bytes, room.usable_bytes, room.limited_by)
        return [list(place.space), capacity, *usable]

    space, capacity, *usable = bounded_value(
        call,
        timeout=_TIER_SECONDS,
        overdue=f"tier {tier.path} did not answer within {_TIER_SECONDS:g} s: use another disk",
    )
    return PlannedTier(tier.path, capacity, Space(*space), *usable)


def _rates(config: Config, progress: Progress) -> tuple[SourceRates, list[TierRates]] | None:
    """None where the source has nothing to measure."""
    progress.show("measuring the source")
    of_source = source_rates(config)
    if of_source.read_bytes_per_second is None or of_source.open_seconds is None:
        return None
    tiers = []
    for tier in config.tiers:
        progress.show(f"measuring {tier.path}")
        tiers.append(tier_rates(tier.path))
    return of_source, tiers


def _survey(
    config: Config, rooms: list[PlannedTier], seconds: float, progress: Progress
) -> dict[str, Any]:
    def call(tell: Tell) -> Any:
        become(config.user)
        try:
            return survey_and_fit(
                config.source, _cached(config), rooms, config.reserve_percent, seconds, tell
            )
        except OSError as error:
            raise OperationError(
                f"source {config.source} cannot be listed: {error.strerror}: check its file system"
            ) from None

    begun = time.monotonic()

    def heard(now: Mapping[str, Any]) -> None:
        files, size = now["files"], format_bytes(now["bytes"])
        rate = files / max(time.monotonic() - begun, 0.001)
        progress.show(f"{now['doing']}: {files} files, {size}, {rate:.0f} files/s")

    result: dict[str, Any] = bounded_talk(
        call,
        silence=_SILENCE_SECONDS,
        overdue=f"source {config.source} did not answer for {_SILENCE_SECONDS:g} s: check its file"
        " system",
        heard=heard,
    )
    return result


def _cached(config: Config) -> list[str]:
    """The dataset's directory in each tier, there or not: the recorded one, else the newest."""
    own = recorded_directories(config)
    return [own.get(tier.path) or _newest(tier.path, config) for tier in config.tiers]


def _newest(tier: str, config: Config) -> str:
    name = config.dataset_id  # nothing is called so
    with suppress(OSError):
        directory = os.open(tier, os.O_PATH | os.O_DIRECTORY)
        try:
            name = next(iter(names_for(name, directory, config.user.uid)), name)
        finally:
            os.close(directory)
    return os.path.join(tier, name)


def lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """A plan for people."""
    at_least = "" if plan["complete"] else "at least "
    yield (
        f"{printable(plan['source'])}: {at_least}{counted(plan['files'], 'file')},"
        f" {format_bytes(plan['bytes'])},"
        f" {counted(plan['directories'], 'directory', 'directories')}"
    )
    if not plan["complete"]:
        yield "  (not all of it was looked at: give it more --timeout)"
    if plan["unreadable"]:
        yield f"  (without {plan['unreadable']} directories that cannot be listed)"
    sizes = [
        f"{size['files']} up to {format_bytes(size['up_to_bytes'])}"
        for size in plan["sizes"]
        if size["files"]
    ]
    yield labelled("sizes", ", ".join(sizes) or "none")
    if mounted := plan.get("mountpoints"):
        where = ", ".join(map(printable, mounted))
        yield labelled("mounted", f"on {where}: its copies count below where its tiers are these")
    for tier in plan["tiers"]:
        text = f"{printable(tier['path'])}: {counted(tier['files'], 'file')},"
        text += f" {format_bytes(tier['bytes'])} of"
        text += f" {format_bytes(tier['usable_bytes'])}"
        if tier["cached_files"]:
            text += f", {tier['cached_files']} of them already"
        if tier["limited_by"]:
            text += (
                f"; of its {format_bytes(tier['capacity_bytes'])} no more can be used: limited by"
                f" {tier['limited_by']}"
            )
        yield labelled("tier", text)
    for key in ("resident", "partial", "remote"):
        amount = plan[key]
        share = 100 * amount["bytes"] / plan["bytes"] if plan["bytes"] else 0
        if amount["files"] or key != "partial":
            size = format_bytes(amount["bytes"])
            yield labelled(key, f"{counted(amount['files'], 'file')}, {size} ({share:.0f}%)")
    reads = plan["source_bytes"]
    yield labelled(
        "source",
        f"reads {format_bytes(reads['first_epoch'])} in the first epoch,"
        f" {format_bytes(reads['later_epoch'])} in each later one"
        f" (without a mount {format_bytes(reads['plain_epoch'])} in each)",
    )
    if sharing := plan.get("sharing"):
        yield from _shared_lines(sharing)
    yield from _estimates(plan)


_FITS = {
    "each node": "all of it fits each",
    "all together": "it fits all of them together, not each",
    "nowhere": "it does not even fit all of them together",
}


def _shared_lines(sharing: Mapping[str, Any]) -> Iterator[str]:
    own, foreign = sharing["own_bytes"], sharing["foreign_bytes"]
    yield labelled(
        f"{sharing['nodes']} nodes",
        f"{_FITS[sharing['fits']]}; with --share {sharing['share']} each keeps"
        f" {format_bytes(own)} of its own files and {format_bytes(foreign)} of others'",
    )
    first, later = sharing["first_epoch"], sharing["later_epoch"]
    yield labelled(
        "",
        f"source: all read {format_bytes(first['source_bytes'])} in the first epoch,"
        f" {format_bytes(later['source_bytes'])} in each later one; network: each gets"
        f" {format_bytes(first['network_bytes'])}, then {format_bytes(later['network_bytes'])}",
    )


def _estimates(plan: Mapping[str, Any]) -> Iterator[str]:
    rates, seconds, pays = plan["rates"], plan["seconds"], plan["pays_from_epoch"]
    if rates is None:
        yield labelled("rates", "not measured")
        return
    tiers = ", ".join(
        f"{printable(tier['path'])} writes {tier['write_bytes_per_second'] / 1e6:.0f} and reads"
        f" {tier['read_bytes_per_second'] / 1e6:.0f} MB/s"
        for tier in rates["tiers"]
    )
    yield labelled(
        "rates",
        f"source {rates['source_read_bytes_per_second'] / 1e6:.0f} MB/s and"
        f" {rates['source_open_seconds'] * 1e3:.2f} ms a file with {rates['source_threads']}"
        f" threads; {tiers}",
    )
    yield labelled("filling", f"about {_duration(seconds['fill'])} (--prefetch all)")
    yield labelled(
        "an epoch",
        f"without a mount {_duration(seconds['plain_epoch'])}, the first"
        f" {_duration(seconds['first_epoch'])}, each later one {_duration(seconds['later_epoch'])}",
    )
    gain = "never pays" if pays is None else f"pays from epoch {pays} on"
    yield labelled(
        f"{plan['epochs']} epochs",
        f"{_duration(seconds['total'])} instead of {_duration(seconds['plain_total'])}; {gain}",
    )


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
