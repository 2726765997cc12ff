"""Surveys a dataset and its tiers, and fits the dataset into the tiers. Runs in a child process as
the mount's user: it blocks as long as the source does, and reports its progress."""

from __future__ import annotations

import os
import stat
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store.replica_files import ReplicaFiles
from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.insight.fitting import Amount, Fitted, PlannedTier, Sizes, fit
from monarchfs.system.bounded import Tell
from monarchfs.system.walk import walk
from monarchfs.types import SourceStat, TierFile

TELL_SECONDS = 0.2
_LOOK_EVERY = 64
"""Files between two readings of the clock."""


@dataclass(slots=True)
class Survey:
    """What was found. ``others`` are links and special files, ``unreadable`` directories could not
    be listed, ``hard_links`` are further names of counted files. ``cached_in_tier`` are complete
    replicas of files as they are now. ``new`` has the sizes of the other files, and what copies
    will occupy."""

    directories: int = 0
    others: int = 0
    unreadable: int = 0
    hard_links: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    all: Amount = field(default_factory=Amount)
    new: array[int] = field(default_factory=lambda: array("q"))
    new_occupied: array[int] = field(default_factory=lambda: array("q"))
    cached_in_tier: list[Amount] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    complete: bool = True


class _Clock:
    """Reports the progress a few times a second, and says when time is up."""

    def __init__(self, tell: Tell, seconds: float) -> None:
        self._tell = tell
        self._end = time.monotonic() + seconds
        self._next = 0.0

    def tick(self, doing: str, done: Amount) -> bool:
        """Whether there is time left."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + TELL_SECONDS
            self._tell({"doing": doing, **asdict(done)})
        return now < self._end


def survey_and_fit(
    root: str,
    cached: Sequence[str],
    rooms: Sequence[PlannedTier],
    reserve_percent: float,
    seconds: float,
    tell: Tell,
) -> dict[str, Any]:
    """Walks ``root`` for at most ``seconds`` and fits what it found into ``rooms``; JSON-able.
    ``cached`` are the dataset's directories there now. Raises OSError if ``root`` cannot be listed.
    """
    clock = _Clock(tell, seconds)
    known = [_replicas(path, clock) for path in cached]
    survey = Survey(cached_in_tier=[Amount() for _ in rooms], held_bytes=[0] * len(rooms))
    _walk(survey, root, known, clock)
    known.clear()
    rooms = [
        replace(room, held_files=cached.files, held_bytes=held)
        for room, cached, held in zip(rooms, survey.cached_in_tier, survey.held_bytes, strict=True)
    ]
    fitted = fit(
        zip(_with_progress(survey.new, clock), survey.new_occupied, strict=True),
        rooms,
        reserve_percent,
    )
    return _report(survey, fitted)


def files_below(root: str, survey: Survey) -> Iterator[SourceStat]:
    """The regular files below ``root``, in the order in which ``--prefetch all`` would copy them;
    what else is there is counted. Blocks as long as the source does. Raises OSError if ``root``
    itself cannot be listed."""
    device = os.stat(root).st_dev
    linked: set[tuple[int, int]] = set()
    for directory in walk(root):
        if directory is None:
            survey.unreadable += 1
            continue
        survey.directories += 1
        for batch in directory:
            for st in batch:
                if st is None:
                    continue
                if not stat.S_ISREG(st.st_mode):
                    survey.others += 1
                    continue
                if st.st_nlink > 1:
                    if (st.st_dev, st.st_ino) in linked:
                        survey.hard_links += 1
                        continue
                    linked.add((st.st_dev, st.st_ino))
                yield SourceStat.of(st, device)


def _walk(survey: Survey, root: str, known: Sequence[Mapping[bytes, int]], clock: _Clock) -> None:
    for file in files_below(root, survey):
        if survey.all.files % _LOOK_EVERY == 0 and not clock.tick("walking", survey.all):
            survey.complete = False
            return
        survey.all.add(file.size)
        survey.sizes.add(file.size)
        name = file.version.replica_name
        tier = next((n for n, names in enumerate(known) if name in names), None)
        if tier is None:
            survey.new.append(file.size)
            survey.new_occupied.append(file.occupied_bytes)
        else:
            survey.cached_in_tier[tier].add(file.size)
            survey.held_bytes[tier] += known[tier][name]


def _with_progress(sizes: array[int], clock: _Clock) -> Iterator[int]:
    done = Amount()
    for size in sizes:
        if done.files % _LOOK_EVERY == 0:
            clock.tick("fitting", done)
        done.add(size)
        yield size


def _replicas(directory: str, clock: _Clock) -> dict[bytes, int]:
    """The names of the complete replicas in a tier, with what they occupy. A name derives from the
    file's version, so no more is needed."""
    found: dict[bytes, int] = {}
    done = Amount()
    for files in _complete(directory):
        for file in files:
            found[file.name] = file.allocated_bytes
            done.add(file.allocated_bytes)
        clock.tick("looking at what is cached", done)
    return found


def _complete(directory: str) -> Iterator[Sequence[TierFile]]:
    """Those with a file each, then those in segments by the lists beside them: copies of the last
    half minute are missing. What cannot be read is left out."""
    with ExitStack() as closing, suppress(OSError):
        fd = os.open(directory, on_disk.DIRECTORY)
        closing.callback(os.close, fd)
        owner = os.fstat(fd).st_uid
        files, segments = ReplicaFiles(fd, directory, owner), SegmentFiles(fd, directory, owner)
        closing.callback(files.close)
        closing.callback(segments.close)
        for number in range(256):
            with suppress(OSError):
                yield files.complete(number)
        for segment in segments.found():
            yield segments.present(segment)


def _report(survey: Survey, fitted: Fitted) -> dict[str, Any]:
    return {
        "complete": survey.complete,
        **asdict(survey.all),
        "directories": survey.directories,
        "others": survey.others,
        "unreadable": survey.unreadable,
        "hard_links": survey.hard_links,
        "sizes": survey.sizes.to_json(),
        "cached": [asdict(amount) for amount in survey.cached_in_tier],
        "new": {"files": len(survey.new), "bytes": sum(survey.new)},
        "placed": [asdict(amount) for amount in fitted.tiers],
        "whole": asdict(fitted.whole),
        "partial": asdict(fitted.partial),
        "remote": asdict(fitted.remote),
    }
