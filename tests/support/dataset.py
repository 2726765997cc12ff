"""The source of a scenario: its files, what they held, and what goes wrong with it."""

import errno
import fnmatch
import os
import re
import zlib
from collections.abc import Sequence
from typing import Any

from tests.support import trees
from tests.support.mounting import FaultySource


def expanded(word: str) -> list[str]:
    """``f{0..2}`` is f0, f1 and f2, and ``f{2..0}`` is f2, f1 and f0."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", word)
    if found is None:
        return [word]
    before, after = word[: found.start()], word[found.end() :]
    first, last = int(found[1]), int(found[2])
    numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
    return [name for number in numbers for name in expanded(f"{before}{number}{after}")]


def bytes_of(word: str) -> int:
    """``3M`` is three times 1024 squared."""
    return int(word.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(word[-1], 0)


def content(name: str, size: int, version: int = 0) -> bytes:
    return trees.random_bytes(size, zlib.crc32(name.encode()) + version)


class Dataset:
    """Its methods are steps of a scenario. Changing: ``versions``, all contents that each file had,
    the last is what it has; ``gone``, the same of those that were removed; ``changes``, how many
    there were."""

    def __init__(self, source: FaultySource) -> None:
        self.versions: dict[str, list[bytes]] = {}
        self.gone: dict[str, list[bytes]] = {}
        self.changes = 0
        self._source = source
        self._backing = source.backing
        self._faults: dict[str, Any] = {}

    def names(self, words: Sequence[str]) -> list[str]:
        """Those that are meant; a word that is no pattern is a name, and no words are all."""
        found = []
        for pattern in (name for word in words or ("*",) for name in expanded(word)):
            matching = fnmatch.filter(self.versions, pattern) if "*" in pattern else [pattern]
            assert matching, f"no file is called {pattern}"
            found += matching
        return found

    def contents(self, name: str) -> list[bytes]:
        return self.versions.get(name) or self.gone[name]

    # -- changes

    def file(self, *words: str) -> None:
        """Write files, new ones or in place: NAMES... SIZE."""
        *patterns, size = words
        for name in (name for pattern in patterns for name in expanded(pattern)):
            path = self._backing / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._next(name, bytes_of(size)))

    def replace(self, name: str, size: str) -> None:
        new = self._backing.with_name("new")
        new.write_bytes(self._next(name, bytes_of(size)))
        new.rename(self._backing / name)

    def append(self, name: str, size: str) -> None:
        more = content(name, bytes_of(size), 99)
        self._store(name, self.versions[name][-1] + more)
        with (self._backing / name).open("ab") as file:
            file.write(more)

    def truncate(self, name: str, size: str) -> None:
        self._store(name, self.versions[name][-1][: bytes_of(size)])
        os.truncate(self._backing / name, bytes_of(size))

    def remove(self, *words: str) -> None:
        for name in self.names(words):
            self.gone[name] = self.versions.pop(name)
            (self._backing / name).unlink()
        self.changes += 1

    def rename(self, old: str, new: str) -> None:
        (self._backing / old).rename(self._backing / new)
        for name in [n for n in self.versions if n == old or n.startswith(f"{old}/")]:
            self.versions[new + name[len(old) :]] = self.versions.pop(name)
        self.changes += 1

    def directory(self, *words: str) -> None:
        for name in (name for word in words for name in expanded(word)):
            (self._backing / name).mkdir(parents=True)

    def settle(self) -> None:
        """Until no file is so young that it might still be written."""
        self._source.wait_old()

    def _next(self, name: str, size: int) -> bytes:
        seen = self.versions.get(name) or self.gone.get(name) or []
        return self._store(name, content(name, size, len(seen)))

    def _store(self, name: str, data: bytes) -> bytes:
        self.versions.setdefault(name, self.gone.pop(name, [])).append(data)
        self.changes += 1
        return data

    # -- faults

    def hang(self, operation: str, *words: str) -> None:
        """OPERATION NAMES...: such calls do not come back; each may be ``*``."""
        self._faults.setdefault("hang", []).extend(_calls(operation, words))
        self._source.faults(**self._faults)

    def fail(self, operation: str, *words: str) -> None:
        """OPERATION NAMES... ERROR: such calls have this error."""
        *names, code = words
        failing = dict.fromkeys(_calls(operation, names), getattr(errno, code))
        self._faults.setdefault("fail", {}).update(failing)
        self._source.faults(**self._faults)

    def slow(self, *operations: str, seconds: str = "0", rate: str = "0") -> None:
        """These calls, or all, take so long; all reads together have so many bytes a second."""
        self._faults |= {"delay": float(seconds), "rate": bytes_of(rate)}
        if operations:
            self._faults["delayed"] = operations
        self._source.faults(**self._faults)

    def heal(self) -> None:
        self._faults.clear()
        self._source.faults()


def _calls(operation: str, words: Sequence[str]) -> list[str]:
    return [f"{operation} {name}" for word in words for name in expanded(word)]
