"""What a log of Darshan says about a job that did not use a mount: would one have helped?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from monarchfs.insight.darshan import FileReads, JobReads
from monarchfs.insight.findings import (
    FEWEST_REQUESTS,
    SENTENCES,
    SHORTEST_SECONDS,
    WORTH_SAYING,
    kind_of,
    percent,
)
from monarchfs.insight.fitting import blocks
from monarchfs.insight.results import Conclusion
from monarchfs.insight.tables import Grid, lines_of
from monarchfs.system.sizes import counted, format_bytes, format_seconds

_MOST_OF_IT = 0.9
"""The dataset's directory is where so much of what was read lies."""

_ROOMS = (0.25, 0.5, 1.0)
_SLOWEST = 10


@dataclass(frozen=True, slots=True)
class RoomShare:
    """So many bytes in tiers: how many files fit, in the order in which they were read; which share
    of the bytes read this job would have had from copies, and the next one like it."""

    bytes: int
    files: int
    local_share: float
    next_local_share: float


@dataclass(slots=True)
class DarshanAnalysis:
    """Bytes and seconds are of ``files``: those below ``source`` that were read and not written,
    in the order of their first read."""

    commands: list[str]
    begun: float
    seconds: float
    source: str
    file_system: str
    processes: int
    readers: int
    waited_share: float
    waited_seconds: float
    meta_seconds: float
    reads: int
    bytes: int
    distinct_bytes: int
    extent_bytes: int
    small_share: float | None
    sequential_share: float | None
    written_files: int
    other_bytes: int
    rooms: list[RoomShare]
    slowest: list[FileReads]
    files: list[FileReads]
    verdict: Conclusion


def analyze_darshan(job: JobReads, source: str | None, listed: str | None) -> DarshanAnalysis:
    """``source``: the dataset's directory; the commonest one if None. ``listed``: where the files
    are listed for ``--prefetch``."""
    read = [one for path, one in job.files.items() if path not in job.written]
    source = commonest(read) if source is None else os.path.normpath(source)
    below = source.rstrip("/") + "/"
    files = sorted(
        (one for one in read if one.path.startswith(below)), key=lambda one: (one.first, one.path)
    )
    waited = sum(one.seconds for one in files)
    sized = sum(one.sized for one in files)
    found = DarshanAnalysis(
        commands=job.commands,
        begun=job.begun,
        seconds=job.ended - job.begun,
        source=source,
        file_system=_file_system(source, job),
        processes=job.processes,
        readers=job.readers,
        waited_share=min(1.0, waited / job.process_seconds) if job.process_seconds else 0.0,
        waited_seconds=waited,
        meta_seconds=sum(one.meta_seconds for one in files),
        reads=sum(one.reads for one in files),
        bytes=sum(one.bytes for one in files),
        distinct_bytes=sum(one.once for one in files),
        extent_bytes=sum(one.extent for one in files),
        small_share=sum(one.small for one in files) / sized if sized else None,
        sequential_share=sum(one.sequential for one in files) / sized if sized else None,
        written_files=sum(path.startswith(below) for path in job.written & job.files.keys()),
        other_bytes=sum(one.bytes for one in read) - sum(one.bytes for one in files),
        rooms=_rooms(files),
        slowest=sorted(files, key=lambda one: -one.seconds)[:_SLOWEST],
        files=files,
        verdict=Conclusion("unknown", 0, [], []),
    )
    found.verdict = _verdict(found, job, listed)
    return found


def paths_of(found: DarshanAnalysis) -> list[str]:
    """What a list for ``--prefetch`` has, without what no line can have. As the job saw them: so
    they hold for a mount of any directory above."""
    return [one.path for one in found.files if one.worth_copying and "\n" not in one.path]


def commonest(files: Sequence[FileReads]) -> str:
    """The deepest directory with most of the bytes that were read."""
    weights: dict[str, int] = {}
    for one in files:
        directory = os.path.dirname(one.path)
        while directory != "/":
            weights[directory] = weights.get(directory, 0) + one.bytes
            directory = os.path.dirname(directory)
    least = _MOST_OF_IT * sum(one.bytes for one in files)
    deep = [directory for directory, size in weights.items() if size >= least]
    return max(deep, key=lambda directory: directory.count("/"), default="/")


def _file_system(source: str, job: JobReads) -> str:
    """As Darshan saw it mounted; empty if it did not."""
    places = (source, *map(str, PurePath(source).parents))
    return next((job.mounts[place] for place in places if place in job.mounts), "")


def _rooms(files: Sequence[FileReads]) -> list[RoomShare]:
    needed = sum(blocks(one.extent) for one in files)
    total = sum(one.bytes for one in files) or 1
    rooms = []
    for share in _ROOMS if needed else ():
        room = int(share * needed)
        kept, left = [], room
        for one in files:
            if blocks(one.extent) <= left:
                left -= blocks(one.extent)
                kept.append(one)
        later = sum(one.bytes for one in kept)
        first = later - sum(one.once for one in kept)
        rooms.append(RoomShare(room, len(kept), first / total, later / total))
    return rooms


def _verdict(found: DarshanAnalysis, job: JobReads, listed: str | None) -> Conclusion:
    reservations = list(_reservations(found, job))
    if found.reads < FEWEST_REQUESTS or found.seconds < SHORTEST_SECONDS:
        line = (
            f"No verdict: the job read too little below {found.source}"
            f" ({counted(found.reads, 'read')} in {format_seconds(found.seconds)})."
        )
        return Conclusion("unknown", 0, [line], reservations)
    words = _words(found, listed)
    lines = [SENTENCES[cause].format_map(words) for cause in _causes(found)]
    return Conclusion(kind_of(found.waited_share), 0, lines, reservations)


def _causes(found: DarshanAnalysis) -> Iterator[str]:
    kind = kind_of(found.waited_share)
    waits = kind != "compute-bound"
    yield kind
    yield "read again" if _again(found) >= WORTH_SAYING else "read once"
    if waits and (found.small_share or 0) >= WORTH_SAYING:
        yield "small reads"
    if waits and _of_names(found) >= WORTH_SAYING:
        yield "names"
    if not waits:
        yield "little waiting"
    elif any(one.worth_copying for one in found.files):
        yield "known order"
    if not all(one.worth_copying for one in found.files):
        yield "sparse reads"


def _again(found: DarshanAnalysis) -> float:
    """The share of bytes that were read again."""
    return 1 - found.distinct_bytes / (found.bytes or 1)


def _of_names(found: DarshanAnalysis) -> float:
    """The share of waiting that was for opens and look-ups."""
    return found.meta_seconds / (found.waited_seconds or 1)


def _words(found: DarshanAnalysis, listed: str | None) -> dict[str, str]:
    many = found.readers != 1
    who = f"the {found.readers:,} processes that read" if many else "the process that read"
    waited = (
        f"{who} spent {percent(found.waited_share)} of the time in reads, opens and look-ups of"
        f" files below {found.source}"
    )
    sparse = [one for one in found.files if not one.worth_copying]
    sequential = 1.0 if found.sequential_share is None else found.sequential_share
    order = f", and {percent(1 - sequential)} did not follow the one before"
    return {
        "waited": waited,
        "computing": "",
        "gain": f"the job would be about {format_seconds(found.waited_share * found.seconds)}",
        "of": f", of {format_seconds(found.seconds)}",
        "again": percent(_again(found)),
        "bytes": format_bytes(found.bytes),
        "room": format_bytes(sum(blocks(one.extent) for one in found.files)),
        "small": percent(found.small_share or 0),
        "order": order if sequential <= 1 - WORTH_SAYING else "",
        "share": percent(_of_names(found)),
        "files": counted(len(found.files), "file"),
        "list": listed or "LIST, which analyze writes with --list LIST,",
        "sparse": counted(len(sparse), "file"),
        "whole": format_bytes(sum(one.extent for one in sparse)),
        "read": format_bytes(sum(one.once for one in sparse)),
    }


def _reservations(found: DarshanAnalysis, job: JobReads) -> Iterator[str]:
    if found.processes > 1:
        yield (
            "Darshan does not say which process ran on which node: what is read again counts for"
            " all of them together. On several nodes it is local where a node reads it again, or"
            " with --peers."
        )
    yield (
        "Sizes are as far as files were read. A read again may have come from the page cache: it"
        " took no time then, and a copy would not save any."
    )
    if found.waited_share == 1.0:
        yield "Threads that read at the same time count one by one: the waiting may be less."
    if found.written_files:
        written = counted(found.written_files, "file")
        yield f"{written} that the job wrote, too, are left out: a mount is read-only."
    if found.other_bytes > found.bytes * WORTH_SAYING:
        yield f"{format_bytes(found.other_bytes)} were read elsewhere: see --source."
    if job.partial:
        yield "Darshan had no memory for all files: some are missing."


def text_lines(found: DarshanAnalysis) -> Iterator[str]:
    return lines_of(_headline(found), found.verdict, _grids(found), _pattern_lines(found))


def _headline(found: DarshanAnalysis) -> str:
    what = found.commands[0] if found.commands and found.commands[0] else "Job"
    where = f"{found.source} ({found.file_system})" if found.file_system else found.source
    return (
        f"{what}: {counted(len(found.files), 'file')} read below {where}, in"
        f" {format_seconds(found.seconds)}, by {found.readers:,} of {found.processes:,} processes"
    )


def _grids(found: DarshanAnalysis) -> Iterator[Grid]:
    """Those that have rows."""
    rooms = [
        (
            format_bytes(room.bytes),
            f"{room.files:,}",
            percent(room.local_share),
            percent(room.next_local_share),
        )
        for room in found.rooms
    ]
    below = len(found.source.rstrip("/")) + 1
    slowest = [
        (one.path[below:], f"{one.reads:,}", format_bytes(one.bytes), format_seconds(one.seconds))
        for one in found.slowest
    ]
    grid = Grid(
        "What would be local",
        "The share of bytes, with so much room in the tiers, if files are kept as they come.",
        ("room", "files", "this job", "the next one"),
        rooms,
    )
    slow = Grid(
        "Files that took longest",
        "Time in reads, opens and look-ups, of all processes together.",
        ("file", "reads", "read", "time"),
        slowest,
    )
    yield from (one for one in (grid, slow) if one.rows)


def _pattern_lines(found: DarshanAnalysis) -> Iterator[str]:
    mean = found.bytes / (found.reads or 1)
    line = f"{counted(found.reads, 'read')} of {format_bytes(mean)} on average"
    if found.small_share is not None and found.sequential_share is not None:
        line += (
            f"; {percent(found.small_share)} below 100 KB, {percent(found.sequential_share)}"
            " behind the one before"
        )
    yield f"{line}."
    files = len(found.files) or 1
    yield (
        f"{counted(len(found.files), 'file')} of {format_bytes(found.extent_bytes / files)} on"
        f" average, each opened {sum(one.opens for one in found.files) / files:.1f} times."
    )
