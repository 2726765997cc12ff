"""Names and attributes between nodes: who owns a directory, what its owner is asked and answers.

A directory is owned as files are (``ownership``), by its inode number in the source; a large one in
parts, by hashes of names. Questions and answers are JSON, the entries as in index files
(``snapshot.file``). Only the source's own file system is shared: the device numbers of others
differ between nodes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import trio
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from monarchfs.metadata.snapshot import FoundName, MalformedSnapshot, decode_entry, encode_entry
from monarchfs.peers.errors import PeerError
from monarchfs.peers.following import Following, PeerQuestion, ask, avoided
from monarchfs.peers.ownership import Ownership
from monarchfs.peers.supply import is_path
from monarchfs.system.threads import run_sync
from monarchfs.types import MOST_LISTED, DirRef, FileType, Lane, PeerListing, PeerNames

T = TypeVar("T")
log = logging.getLogger(__name__)

MOST_NAMES = 256
"""In one question."""

LARGE_BYTES = 1 << 20
"""A directory of this size, which has some ten thousand names, is owned in parts."""

PARTS = 4

DEMAND_SECONDS = 0.4
"""An owner answers a reader's node after this time, with what it has found by then."""

BACKGROUND_SECONDS = 2.0
MARGIN_SECONDS = 0.4
"""For the way to the owner and back."""

MOST_ANSWER_BYTES = 1 << 20
THREADS = 16
_MOST_AGE = 1 << 63


class NamesQuestion(NamedTuple):
    """Names of the directory with this path and inode number, none for its listing; the answer may
    be so old when the question is sent. ``demand``: a reader waits."""

    path: bytes
    ino: int
    names: list[bytes]
    most_age_ns: int
    demand: bool


class NameOwners:
    """Constant: who owns what, and the nodes."""

    def __init__(self, ownership: Ownership, following: Following) -> None:
        self._ownership = ownership
        self._following = following
        self._own = following.own
        self._threads = trio.CapacityLimiter(THREADS)

    def divide(
        self, directory: DirRef, size: int, names: Sequence[bytes]
    ) -> dict[int, list[bytes]]:
        """The names in a directory of ``size`` bytes that other nodes own, or stand in for, by the
        node to ask."""
        found: dict[int, list[bytes]] = {}
        for part, some in _parts(size, names).items():
            number = self._whom_to_ask(_key(directory), part)
            if number != self._own:
                found.setdefault(number, []).extend(some)
        return found

    def served(self, directory: DirRef, size: int, names: Sequence[bytes]) -> list[bytes]:
        """Those of the names that this node owns, or stands in for."""
        key, serves = _key(directory), self._ownership.serves
        return [
            name
            for part, some in _parts(size, names).items()
            if serves(self._own, key, part)
            for name in some
        ]

    def _whom_to_ask(self, key: bytes, part: int) -> int:
        owner = self._ownership.number(key, part)
        young = trio.current_time() < self._following.starts_until
        if owner == self._own or young or not avoided(owner):
            return owner
        other = self._ownership.stand_in(key, part)
        return self._own if avoided(other) else other

    async def ask(
        self, owner: int, directory: DirRef, names: list[bytes], most_age_ns: int, lane: Lane
    ) -> PeerNames | None:
        """What the owner says about the first of these names; None if it does not answer in time.
        Raises nothing but Cancelled."""
        question = NamesQuestion(
            *directory[:2], names[:MOST_NAMES], most_age_ns, lane is Lane.DEMAND
        )
        return await self._ask("/ask/names", owner, question, decode_answer)

    async def list(
        self, owner: int, directory: DirRef, most_age_ns: int, lane: Lane
    ) -> PeerListing | None:
        """The directory's entries as its owner has them; None if it does not say in time, or there
        are many. Raises nothing but Cancelled."""
        question = NamesQuestion(*directory[:2], [], most_age_ns, lane is Lane.DEMAND)
        return await self._ask("/ask/listing", owner, question, decode_listing)

    async def _ask(
        self, path: str, owner: int, question: NamesQuestion, decode: Callable[[bytes], T]
    ) -> T | None:
        if not question.demand:
            await self._following.until_started(owner)
        question = question._replace(most_age_ns=max(0, question.most_age_ns))

        def ask_and_decode() -> T:
            seconds = answer_seconds(question) + MARGIN_SECONDS
            asked = PeerQuestion(path, encode_question(question), question.demand)
            return decode(ask(owner, asked, seconds, MOST_ANSWER_BYTES))

        try:
            return await run_sync(ask_and_decode, limiter=self._threads)
        except (OSError, PeerError) as exc:
            log.debug("peer %d says nothing about names: %s", owner, exc)
            return None


def _key(directory: DirRef) -> bytes:
    return xxh3_128_digest(b"%d" % directory.ino)


def _parts(size: int, names: Sequence[bytes]) -> dict[int, list[bytes]]:
    """The names in a directory of ``size`` bytes, by the parts in which it is owned."""
    if size < LARGE_BYTES:
        return {0: list(names)} if names else {}
    found: dict[int, list[bytes]] = {}
    for name in names:
        found.setdefault(xxh3_64_intdigest(name) % PARTS, []).append(name)
    return found


def answer_seconds(question: NamesQuestion) -> float:
    """After this time an owner answers."""
    return DEMAND_SECONDS if question.demand else BACKGROUND_SECONDS


def encode_question(question: NamesQuestion) -> bytes:
    """What ``decode_question`` reads."""
    path, ino, names, *rest = question
    return _json([os.fsdecode(path), ino, list(map(os.fsdecode, names)), *rest])


def decode_question(data: bytes) -> NamesQuestion:
    """Raises PeerError if it is none."""
    match _parsed(data):
        case [str(path), int(ino), list(names), int(most_age_ns), bool(demand)] if (
            0 < ino < 1 << 64 and 0 <= most_age_ns < _MOST_AGE and len(names) <= MOST_NAMES
        ):
            found = NamesQuestion(_bytes(path), ino, list(map(_bytes, names)), most_age_ns, demand)
            if (not found.path or is_path(found.path)) and all(map(_is_name, found.names)):
                return found
    raise PeerError("a question about names is none")


def encode_answer(answer: PeerNames) -> bytes:
    """What ``decode_answer`` reads."""
    rows = [
        encode_entry(FoundName(name, FileType.of_mode(stat.mode), stat.ino, stat, target))
        for name, stat, target in answer.found
    ]
    return _json([answer.age_ns, rows])


def decode_answer(data: bytes) -> PeerNames:
    """Raises PeerError if it is none."""
    match _parsed(data):
        case [int(age_ns), list(rows)] if 0 <= age_ns < _MOST_AGE and len(rows) <= MOST_NAMES:
            found = _decoded(rows)
            return PeerNames(
                age_ns, [(one.name, one.stat, one.target) for one in found if one.stat is not None]
            )
    raise PeerError("an answer about names is none")


def encode_listing(listing: PeerListing | None) -> bytes:
    """What ``decode_listing`` reads; None: there is nothing to say."""
    if listing is None:
        return _json([])
    *others, entries = listing
    rows = [encode_entry(FoundName(*entry, None, b"")) for entry in entries]
    return _json([*others, rows])


def decode_listing(data: bytes) -> PeerListing:
    """Raises PeerError if it is none."""
    match _parsed(data):
        case [int(age_ns), int(mtime_ns), int(ctime_ns), bool(lists_all), list(rows)] if (
            0 <= age_ns < _MOST_AGE
            and abs(mtime_ns) < _MOST_AGE
            and abs(ctime_ns) < _MOST_AGE
            and len(rows) <= MOST_LISTED
        ):
            entries = [(one.name, one.type, one.ino) for one in _decoded(rows)]
            if len({name for name, *_ in entries}) == len(entries):
                return PeerListing(age_ns, mtime_ns, ctime_ns, lists_all, entries)
    raise PeerError("there is no listing")


def _decoded(rows: list[Any]) -> list[FoundName]:
    try:
        return [decode_entry(row) for row in rows]
    except MalformedSnapshot as error:
        raise PeerError(f"an answer about names is none: {error}") from None


def _json(value: list[Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise PeerError("it is no JSON") from None


def _bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise PeerError("a name is no text")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise PeerError("a name has surrogates that stand for no byte") from None


def _is_name(name: bytes) -> bool:
    return len(name) <= 255 and b"/" not in name and is_path(name)
