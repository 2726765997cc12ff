"""Counts that outlive the worker, in memory that the supervisor holds and never reads.

They are written there now and then, and before anybody sees them. The next worker goes on from
there, so that no count that somebody saw becomes less. A worker that is killed loses what it
counted since.

Layout: a word, then two halves; the word says which is whole (0: none). A half is the length of a
JSON document and the document. Zeros are left out, unknown names are passed over: the next worker
may be of another release.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeGuard

from monarchfs.metrics.counts import Histogram

_WORD = struct.Struct("=Q")


class PersistentCounts:
    """Constant: the memory (``handle_table.make_memory``); ``parts``, by names that keep their
    meaning in every release. A part is a dataclass, or has the names of its counts in ``KEPT``.
    Counts are numbers (None: not known yet), histograms, and dataclasses and dictionaries of such.
    Fields with the metadata ``kept`` False are left out."""

    def __init__(self, fd: int | None, parts: Mapping[str, object]) -> None:
        """Nothing is kept without ``fd``. Raises OSError or ValueError for what is no memory."""
        self._memory = None if fd is None else mmap.mmap(fd, 0)
        size = 0 if self._memory is None else len(self._memory)
        self._half_bytes = (size - _WORD.size) // 2 // _WORD.size * _WORD.size
        self._parts = parts
        self._saved = b""

    def restore(self) -> None:
        """Add what the last worker saved, if there was one. Raises ValueError, with nothing added,
        if that makes no sense."""
        if self._memory is None:
            return
        (which,) = _WORD.unpack_from(self._memory, 0)
        if which not in (1, 2):
            return
        at = self._half(which)
        (length,) = _WORD.unpack_from(self._memory, at)
        if length > self._half_bytes - _WORD.size:
            raise ValueError("the counts of the last worker are too long")
        start = at + _WORD.size
        try:
            saved = json.loads(self._memory[start : start + length])
        except RecursionError:
            raise ValueError("the counts of the last worker are too deep") from None
        if not isinstance(saved, dict):
            raise ValueError("the counts of the last worker are no object")
        for name, part in self._parts.items():
            _add(part, saved.get(name))

    def save(self) -> None:
        """Takes a fifth of a millisecond. Raises ValueError if there is too much."""
        if self._memory is None:
            return
        content = {name: _plain(part) for name, part in self._parts.items()}
        text = json.dumps(content, separators=(",", ":")).encode()
        if text == self._saved:
            return
        if len(text) > self._half_bytes - _WORD.size:
            raise ValueError(f"{len(text)} bytes of counts are too many to be kept")
        which = 3 - (_WORD.unpack_from(self._memory, 0)[0] or 2)
        at = self._half(which)
        _WORD.pack_into(self._memory, at, len(text))
        start = at + _WORD.size
        self._memory[start : start + len(text)] = text
        # One store: whoever is killed leaves the other half, or this one.
        _WORD.pack_into(self._memory, 0, which)
        self._saved = text

    def _half(self, which: int) -> int:
        return _WORD.size + (which - 1) * self._half_bytes


def _counts(part: object) -> list[tuple[Any, object]]:
    """The counts in a part that is no number, by their key or attribute."""
    if isinstance(part, dict):
        return list(part.items())
    if is_dataclass(part):
        names = [one.name for one in fields(part) if one.metadata.get("kept", True)]
    else:
        names = [*getattr(part, "KEPT", getattr(part, "__slots__", ()))]
    return [(name, getattr(part, name)) for name in names]


def _plain(part: object) -> Any:
    """A part as JSON, without its zeros."""
    if part is None or isinstance(part, (int, float)):
        return part
    if isinstance(part, Histogram):
        return {"total_ns": part.total_ns, "counts": part.counts} if any(part.counts) else None
    plain = ((_name(key), _plain(value)) for key, value in _counts(part))
    return {name: value for name, value in plain if value} or None


def _add(part: object, saved: object) -> None:
    """Add to a part that is no number; what does not fit is passed over."""
    if not isinstance(saved, dict):
        return
    if isinstance(part, Histogram):
        _add_histogram(part, saved)
        return
    for key, value in _counts(part):
        more = saved.get(_name(key))
        if not _is_number(more) or not (value is None or _is_number(value)):
            _add(value, more)
            continue
        total = more if value is None else value + more
        if isinstance(part, dict):
            part[key] = total
        else:
            setattr(part, key, total)


def _add_histogram(histogram: Histogram, saved: Mapping[str, Any]) -> None:
    counts, total = saved.get("counts"), saved.get("total_ns")
    if not isinstance(counts, list) or len(counts) != len(histogram.counts):
        return  # of another release, with other bounds
    if all(map(_is_number, counts)) and _is_number(total):
        histogram.counts = [now + more for now, more in zip(histogram.counts, counts, strict=True)]
        histogram.total_ns += total


def _name(key: object) -> str:
    return "/".join(key) if isinstance(key, tuple) else str(key)


def _is_number(value: object) -> TypeGuard[int]:
    """Or a float, which adds up in the same way."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
