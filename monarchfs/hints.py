"""What a job may tell its mount about the files that it will read. For use inside a job.

    from monarchfs import hints

    sampler = hints.announce(sampler, files)
    hints.weigh({path: score, ...})

Hints cost nothing if there is no mount, and never fail: a job must not depend on them. Whatever
goes wrong is logged once, as one line, and nothing is raised. Where the job would wait for it, a
mount that did not answer is not asked twice. An announced list is sent by a thread of its own, so
no epoch waits for it. Nothing here needs the libraries of the daemon.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

from monarchfs.config.places import search_of
from monarchfs.control.client import Connection, connect
from monarchfs.control.messages import weight_requests
from monarchfs.control.registration import Registered
from monarchfs.fuse.mountinfo import split_below
from monarchfs.supervisor.recover import find_all
from monarchfs.types import MonarchError

__all__ = ["Announced", "announce", "announce_files", "weigh"]

Item = TypeVar("Item")
Path = str | os.PathLike[str]

THREAD = "monarchfs hints"
CONNECT_SECONDS = 1.0

MOST_DRAWN = 1 << 24
"""The most items of an epoch that are announced, and drawn, at once."""

_PART = 1000
"""So many names are sent together. Meanwhile other threads of the job may have to wait: 1 ms."""

_JOB = os.urandom(4).hex()
"""Processes in containers may have the same number, and share a mount."""

_failed: set[str] = set()

log = logging.getLogger(__name__)


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
        try:
            length = min(max(1, len(self)), MOST_DRAWN)
        except (TypeError, NotImplementedError):  # also of a batch sampler over one without
            yield from self._sampler  # it may have no end
            return
        # Some that have a length have no end either: theirs is that of an epoch.
        draws = iter(self._sampler)
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


def weigh(
    weights: Mapping[Any, float] | Iterable[tuple[Path, float]], *, replace: bool = False
) -> bool:
    """Files with a larger weight stay, and lie in the faster tier: a weight is how often the file
    will be read, compared with others. For a mount with ``--evict weighted``. What was said of
    other files stays; with ``replace`` they weigh nothing. Returns when all is said, which takes
    seconds for a million files; False if there is no mount, or it does not want weights."""
    pairs = iter(weights.items() if isinstance(weights, Mapping) else weights)
    first = next(pairs, None)
    if first is None:
        return False
    found: list[JobMount] = []

    def send() -> None:
        mount = find_mount(first[0])
        if mount is None:
            return
        for request in weight_requests(_below(mount, chain([first], pairs)), replace=replace):
            with mount.connect() as connection:
                connection.request(request, progress=lambda so_far: None)
        found.append(mount)

    return quietly("weights", send) and bool(found)


# How it reaches the mount


class JobMount(NamedTuple):
    """A mount, and the paths under which it has files: ``mountpoints`` has more than one if there
    are bind mounts."""

    daemon: Registered
    mountpoints: Sequence[str]

    def below(self, path: Path) -> str | None:
        """The path relative to the mount, without dots if it has none; None if it is outside."""
        given = os.fspath(path)
        found = self._below(given)
        return self._below(os.path.abspath(given)) if found is None else found

    def _below(self, path: str) -> str | None:
        for mountpoint in self.mountpoints:
            prefix = mountpoint.rstrip("/") + "/"
            if path.startswith(prefix) and path != prefix:
                return path[len(prefix) :]
        return None

    def names(self, paths: Iterable[Path]) -> bytes:
        """What ``below`` says of each, separated by NUL; what is outside is left out."""
        given = [os.fspath(path) for path in paths]
        prefix = "\0" + self.mountpoints[0].rstrip("/") + "/"
        joined = "\0" + "\0".join(given)
        if joined.count(prefix) == len(given):
            # All in one go: of a million files one by one, the job would notice.
            return os.fsencode(joined.replace(prefix, "\0")[1:])
        return os.fsencode("\0".join(name for name in map(self.below, given) if name is not None))

    def connect(self) -> Connection:
        """Raises OperationError."""
        return connect(self.daemon, CONNECT_SECONDS)


def find_mount(path: Path) -> JobMount | None:
    """The mount that has ``path``. The mount itself is not asked, so it cannot hang here. Raises
    OperationError if its daemon is gone."""
    mounts = find_all(search_of(os.environ))
    by_point = {found.mountpoint: found for found in mounts}
    place = split_below(os.path.abspath(os.fspath(path)), by_point)
    if place is None:
        return None
    daemon = by_point[place[0]].daemon
    same = [found.mountpoint for found in mounts if found.registered == daemon]
    return JobMount(daemon, [place[0], *(point for point in same if point != place[0])])


def quietly(what: str, send: Callable[[], object], *, again: bool = False) -> bool:
    """Call ``send``; False if it failed. If it has failed before for the same ``what``, it is not
    called, or with ``again`` it is called, and another failure is not logged."""
    if what in _failed and not again:
        return False
    try:
        send()
    except (OSError, MonarchError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        if what not in _failed:
            log.warning("monarchfs: no hints for %s: %s", what, exc)
        _failed.add(what)
        return False
    return True


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


def _below(mount: JobMount, weights: Iterable[tuple[Path, float]]) -> Iterator[tuple[str, float]]:
    """Of those that lie in the mount."""
    for path, weight in weights:
        if (name := mount.below(path)) is not None:
            yield name, weight
