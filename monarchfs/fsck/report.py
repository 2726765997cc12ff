"""What was found, counted by kind, and reported to the parent process as lines of JSON."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any, TextIO

MOST_LINES = 100
"""Findings of one kind that are reported one by one; the others are only counted."""

_PROGRESS_SECONDS = 0.2


class FindingKind(Enum):
    """What can be found; the value is its name in ``--json``."""

    INDEX_MISSING = "index_missing"
    INDEX_DAMAGED = "index_damaged"
    INDEX_FOREIGN = "index_foreign"
    INDEX_SET_ASIDE = "index_set_aside"
    TIER_GONE = "tier_gone"
    TIER_FAILED = "tier_failed"
    INTERRUPTED = "interrupted"
    LOST_IN_REBOOT = "lost_in_reboot"
    ORPHAN = "orphan"
    AMBIGUOUS = "ambiguous"
    ORPHAN_PART = "orphan_part"
    EXTRA_FILE = "extra_file"
    MISSING = "missing"
    WRONG_SIZE = "wrong_size"
    CORRUPT = "corrupt"
    WRONG_BLOCKS = "wrong_blocks"
    NOT_SYNCED = "not_synced"


NOTES = frozenset(
    {
        FindingKind.INDEX_SET_ASIDE,
        FindingKind.LOST_IN_REBOOT,
        FindingKind.WRONG_BLOCKS,
        FindingKind.NOT_SYNCED,
    }
)
"""What is worth a line, but happens where all is well: a file system may give a file blocks, or
take them back, after it was written; a reboot takes what was not synced."""


class FsckReport:
    """Changing: the counts. ``output`` gets one JSON object a line:

    ``{"finding": {"kind", "what", "detail", "done"}}``, at most MOST_LINES of a kind; ``what`` is
    the source file's path or, where no record knows one, a place in the tier;
    ``{"progress": {"text", "done", "of"}}`` now and then.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._counts: Counter[FindingKind] = Counter()
        self._repaired: Counter[FindingKind] = Counter()
        self._next_progress = 0.0

    def found(self, kind: FindingKind, what: str, detail: str, done: str | None = None) -> None:
        """One finding; ``done`` says how it was put right, if it was."""
        self._counts[kind] += 1
        if done is not None:
            self._repaired[kind] += 1
        if self._counts[kind] <= MOST_LINES:
            finding = {"kind": kind.value, "what": what, "detail": detail, "done": done}
            self.send({"finding": finding})

    def progress(self, text: str, done: int, of: int) -> None:
        """How far it is, in whatever unit ``of`` has."""
        now = time.monotonic()
        if now >= self._next_progress:
            self._next_progress = now + _PROGRESS_SECONDS
            self.send({"progress": {"text": text, "done": done, "of": of}})

    def summary(self) -> dict[str, Any]:
        """The counts: of each kind, of what was repaired, and whether nothing wrong is left."""
        return {
            "findings": {
                kind.value: self._counts[kind] for kind in FindingKind if self._counts[kind]
            },
            "repaired": self._repaired.total(),
            "clean": all(
                self._counts[kind] == self._repaired[kind]
                for kind in FindingKind
                if kind not in NOTES
            ),
        }

    def send(self, message: Mapping[str, Any]) -> None:
        """One message. Raises BrokenPipeError when nobody listens any more."""
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()
