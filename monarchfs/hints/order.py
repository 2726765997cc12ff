"""Announcing the order in which a job will read its files, epoch by epoch.

    sampler = hints.announce(sampler, files)

The mount then fetches the files ahead of the readers. The list is sent by a thread of its own, so
no epoch waits for it, and nothing is raised if there is no mount.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from monarchfs.hints.client import JobMount, find_mount, quietly

Item = TypeVar("Item")
Path = str | os.PathLike[str]

THREAD = "monarchfs hints"

_PART = 1000
"""So many names are sent together. Meanwhile other threads of the job may have to wait: 1 ms."""

_JOB = os.urandom(4).hex()
"""Processes in containers may have the same number, and share a mount."""


def announce(sampler: Iterable[Item], files: Sequence[Path]) -> Announced[Item]:
    """A sampler that draws the same, an epoch at once. ``files[i]`` is the file of index i. What it
    draws may also be lists of indices: a batch sampler."""
    return Announced(sampler, files)


def announce_files(files: Iterable[Path], stream: str | None = None) -> None:
    """These files will be read in this order: an epoch of tf.data or DALI, shards of webdataset.
    It takes the place of what was announced for the same ``stream`` (by default, for this
    process). Returns at once."""
    _send(list(files), _stream() if stream is None else stream)


class Announced(Generic[Item]):
    """``sampler``, which announces each epoch when it is drawn. All else is the sampler's own, its
    class too: Lightning and Accelerate do other things with one that is no DistributedSampler."""

    _sampler: Iterable[Item]
    _files: Sequence[Path]

    def __init__(self, sampler: Iterable[Item], files: Sequence[Path]) -> None:
        # Anything else that is set is set of the sampler.
        self.__dict__.update(_sampler=sampler, _files=files)

    def __iter__(self) -> Iterator[Item]:
        # Drawn when the first item is asked for, as by a generator: that keeps the state of random
        # number generators the same as without this.
        if not hasattr(self._sampler, "__len__"):
            yield from self._sampler  # it may have no end
            return
        # Some that have a length have no end either: theirs is that of an epoch.
        draws, length = iter(self._sampler), max(1, len(self))
        while drawn := list(islice(draws, length)):
            _send((self._files[i] for i in _indices(drawn)), f"{_stream()} {id(self)}")
            yield from drawn

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._sampler)

    def __reduce__(self) -> tuple[Any, ...]:
        return Announced, (self._sampler, self._files)

    def __getattr__(self, name: str) -> Any:
        # Such as set_epoch of a distributed sampler.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._sampler, name, value)


def _stream() -> str:
    return f"{_JOB} pid {os.getpid()}"


def _indices(drawn: Sequence[Any]) -> Iterator[int]:
    for item in drawn:
        if isinstance(item, (list, tuple)):
            yield from item
        else:
            yield item


def _send(files: Iterable[Path], stream: str) -> None:
    """Send the list in a thread. At the end of the process nobody waits for that."""
    # Also if the last one failed: the mount may have been starting a worker, for example.
    send = partial(quietly, "orders", partial(_send_now, files, stream), again=True)
    thread = threading.Thread(target=send, name=THREAD, daemon=True)
    quietly("orders", thread.start, again=True)


def _send_now(files: Iterable[Path], stream: str) -> None:
    rest = iter(files)
    first = next(rest, None)
    mount = None if first is None else find_mount(first)
    if first is not None and mount is not None:
        with mount.connect() as connection:
            request = {"command": "order", "stream": stream}
            connection.send_list(request, _parts(mount, chain([first], rest)))


def _parts(mount: JobMount, files: Iterator[Path]) -> Iterator[bytes]:
    """What lies in the mount, as the daemon takes it."""
    while part := list(islice(files, _PART)):
        yield mount.names(part) + b"\0"
