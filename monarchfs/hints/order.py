"""Announcing the order in which a job will read its files, epoch by epoch.

    sampler = hints.announce(sampler, files)

The mount then fetches the files ahead of the readers. The list is sent by a thread of its own, so
no epoch waits for it, and nothing is raised if there is no mount.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from monarchfs.hints.client import JobMount, find_mount, quietly

Item = TypeVar("Item")
Path = str | os.PathLike[str]

THREAD = "monarchfs hints"

_PART = 10_000
"""So many names are sent together."""


def announce(sampler: Iterable[Item], files: Sequence[Path]) -> Announced[Item]:
    """A sampler that draws the same. ``files[i]`` is the file of index i. What it draws may also be
    lists of indices: a batch sampler."""
    return Announced(sampler, lambda drawn: (files[i] for i in _indices(drawn)))


def announce_files(files: Iterable[Path], stream: str | None = None) -> None:
    """These files will be read in this order: the shards of webdataset, the file list of tf.data or
    DALI. It takes the place of what was announced for the same ``stream`` (by default, for this
    process). Returns at once."""
    _send(list(files), _stream() if stream is None else stream)


class Announced(Generic[Item]):
    """``sampler``, which announces each epoch when it is drawn. All else is the sampler's own."""

    def __init__(
        self, sampler: Iterable[Item], files_of: Callable[[Sequence[Item]], Iterable[Path]]
    ) -> None:
        self._sampler = sampler
        self._files_of = files_of

    def __iter__(self) -> Iterator[Item]:
        # Drawn when the first item is asked for, as by a generator: that keeps the state of random
        # number generators the same as without this.
        if not hasattr(self._sampler, "__len__"):
            yield from self._sampler  # it may have no end
            return
        drawn = list(self._sampler)
        _send(self._files_of(drawn), f"{_stream()} {id(self)}")
        yield from drawn

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Such as set_epoch of a distributed sampler. Copies ask before there is a sampler.
        if name.startswith("__") or "_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._sampler, name)


def _stream() -> str:
    return f"pid {os.getpid()}"


def _indices(drawn: Sequence[Any]) -> Iterator[int]:
    for item in drawn:
        if isinstance(item, (list, tuple)):
            yield from item
        else:
            yield item


def _send(files: Iterable[Path], stream: str) -> None:
    """Send the list in a thread. At the end of the process nobody waits for that."""
    send = partial(_send_now, files, stream)
    thread = threading.Thread(target=quietly, args=("orders", send), name=THREAD, daemon=True)
    quietly("orders", thread.start)


def _send_now(files: Iterable[Path], stream: str) -> None:
    rest = iter(files)
    first = next(rest, None)
    mount = None if first is None else find_mount(first)
    if first is not None and mount is not None:
        with mount.connect() as connection:
            request = {"command": "order", "stream": stream}
            connection.send_list(request, _parts(mount, first, rest))


def _parts(mount: JobMount, first: Path, rest: Iterator[Path]) -> Iterator[bytes]:
    """What lies in the mount, as the daemon takes it."""
    part: list[bytes] = []
    for path in chain([first], rest):
        if (name := mount.below(path)) is not None:
            part.append(os.fsencode(name))
        if len(part) >= _PART:
            yield b"\0".join(part) + b"\0"
            part.clear()
    yield b"\0".join(part)
