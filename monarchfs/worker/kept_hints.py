"""What jobs have said of the files that they read, kept for the workers that follow: announced
orders, and weights.

It lies in files in the state directory. Each begins with a line of JSON that names the mount; what
an earlier mount left is removed. They need not survive the machine, so nothing is synced. Nothing
here is worth an error to a job: what cannot be kept is logged, and the next worker goes on without.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

DIRECTORY = "said"
_WEIGHTS = "weights"
_NEW = ".new"
_PAIR = struct.Struct("=Qd")
"""An inode number, and a weight."""

_MOST_SUPERSEDED = 64 << 20
"""Bytes of weights that later ones replaced; then the file is written anew, in about a second."""


class KeptOrder(NamedTuple):
    """An order: its ``names`` as ``Order`` has them; who announced it (0: not known), and when that
    process began (None: not known)."""

    stream: str
    names: bytes
    pid: int
    start_ticks: int | None


class KeptHints:
    """Constant: the directory, the mount. Changing: the weights' size when each was there once
    (``_live_bytes``). Its calls block for the local disk, and raise nothing. One at a time."""

    def __init__(self, state_directory: str, mount_ns: int) -> None:
        self._directory = Path(state_directory) / DIRECTORY
        self._mount_ns = mount_ns
        self._live_bytes = 0

    # -- orders

    def keep_order(self, order: KeptOrder) -> None:
        """In place of the earlier one of that name."""
        head = {"stream": order.stream, "pid": order.pid, "start_ticks": order.start_ticks}
        self._write(_file_of(order.stream), head, order.names)

    def forget_order(self, stream: str) -> None:
        self._remove(_file_of(stream))

    def orders(self) -> list[KeptOrder]:
        """Those that were kept, the newest last. What is of no use is removed."""
        found = []
        with suppress(OSError):
            paths = list(self._directory.iterdir())
            for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
                head, names = self._read(path.name)
                if "stream" in head and path.suffix != _NEW:
                    found.append(KeptOrder(head["stream"], names, head["pid"], head["start_ticks"]))
                elif path.name != _WEIGHTS:
                    self._remove(path.name)
        return found

    # -- weights

    def keep_weights(self, weights: Sequence[tuple[int, float]], replace: bool) -> None:
        """Of files (number, weight); ``replace``: others have none now."""
        rows = b"".join(_PAIR.pack(*pair) for pair in weights)
        path = self._directory / _WEIGHTS
        if replace or not path.exists():
            self._live_bytes = len(rows)
            self._write(_WEIGHTS, {}, rows)
            return
        try:
            with path.open("ab", buffering=0) as file:
                size = file.tell()
                if file.write(rows) != len(rows):
                    file.truncate(size)
                    log.warning("weights are not kept for the next worker: the disk is full")
        except OSError as error:
            log.warning("weights are not kept for the next worker: %s", error.strerror)
            return
        if size > 2 * self._live_bytes + _MOST_SUPERSEDED:
            self.weights()

    def weights(self) -> dict[int, float] | None:
        """Those that were kept; None if nobody has given any."""
        if not (self._directory / _WEIGHTS).exists():
            return None
        head, rows = self._read(_WEIGHTS)
        if not head:
            self._remove(_WEIGHTS)
            return None
        whole = len(rows) // _PAIR.size * _PAIR.size
        found: dict[int, float] = dict(_PAIR.iter_unpack(rows[:whole]))
        self._live_bytes = _PAIR.size * len(found)
        # Each once, and nothing behind them that is half written.
        self._write(_WEIGHTS, {}, b"".join(_PAIR.pack(*pair) for pair in found.items()))
        return found

    def clear(self) -> None:
        """The mount ends."""
        with suppress(OSError):
            for path in self._directory.iterdir():
                self._remove(path.name)

    # -- files

    def _write(self, name: str, head: dict[str, Any], body: bytes) -> None:
        """A reader finds all of it, or what was there before."""
        new = self._directory / f"{name}{_NEW}"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with open(new, "wb", opener=_private) as file:
                file.write(json.dumps({"mount_ns": self._mount_ns, **head}).encode() + b"\n")
                file.write(body)
            os.replace(new, self._directory / name)
        except OSError as error:
            log.warning("what a job said is not kept for the next worker: %s", error.strerror)
            self._remove(name)
            self._remove(new.name)

    def _read(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Nothing if it is not of this mount."""
        try:
            head, _, body = (self._directory / name).read_bytes().partition(b"\n")
            told = json.loads(head)
        except (OSError, ValueError):
            return {}, b""
        return (told, body) if told.get("mount_ns") == self._mount_ns else ({}, b"")

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            (self._directory / name).unlink(missing_ok=True)


def _file_of(stream: str) -> str:
    return "order-" + blake2b(os.fsencode(stream), digest_size=16).hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
