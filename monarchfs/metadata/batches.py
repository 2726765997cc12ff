"""Asks the source about many names of a directory with few calls."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import trio

from monarchfs.metadata.known import KnownMetadata
from monarchfs.metadata.recorder import Recorder
from monarchfs.metadata.shared_names import SharedNames
from monarchfs.metadata.sibling_names import SiblingNames
from monarchfs.source.source import Source
from monarchfs.types import Dirent, IndexWriteError, Lane, Node

BATCH = 32
"""Names that one call of the source asks for, one after the other, and one transaction records."""

BATCH_SECONDS = 0.1
"""The answers that a thread has after this time are recorded, for those who wait for them."""

_NOT_THERE = (FileNotFoundError, NotADirectoryError)

Answer = Node | OSError | None
"""None for a name that does not exist."""


class BatchLookups:
    """Constant: its parts."""

    def __init__(
        self,
        source: Source,
        known: KnownMetadata,
        recorder: Recorder,
        siblings: SiblingNames,
        shared: SharedNames,
    ) -> None:
        self.shared = shared
        self._source = source
        self._known = known
        self._recorder = recorder
        self._siblings = siblings

    async def find_each(
        self,
        parent: int,
        names: list[bytes],
        lane: Lane,
        *,
        peers: bool = True,
        opens_bytes: int = 0,
    ) -> dict[bytes, Answer]:
        """The answers of ``peers`` and other tasks, and those of ``ask_each`` for other names."""
        found: dict[bytes, Answer] = dict(await self.shared.ask(parent, names, lane, peers=peers))
        rest = [name for name in names if name not in found]
        try:
            answers = await self.ask_each(parent, rest, lane, opens_bytes) if rest else []
        finally:
            self.shared.asked(parent, rest)
        found.update(zip(rest, answers, strict=True))
        return found

    async def ask_each(
        self, parent: int, names: list[bytes], lane: Lane, opens_bytes: int = 0
    ) -> list[Answer]:
        """Ask the source about each name, whatever is known, and record the answers. Raises OSError
        if the directory cannot be used, and IndexWriteError. ``opens_bytes`` as in PosixSource."""
        parts = [names[at : at + BATCH] for at in range(0, len(names), BATCH)]
        answers: list[list[Answer]] = [[] for _ in parts]
        errors: list[OSError | IndexWriteError] = []

        async def ask(part: int) -> None:
            rest = parts[part]
            try:
                while rest:
                    some = await self._ask_some(parent, rest, lane, opens_bytes)
                    answers[part] += some
                    rest = rest[len(some) :]
            except (OSError, IndexWriteError) as exc:
                errors.append(exc)

        # Side by side: each name is a round trip to the metadata server.
        async with trio.open_nursery() as nursery:
            for part in range(len(parts)):
                nursery.start_soon(ask, part)
        if errors:
            raise errors[0]
        return [answer for part in answers for answer in part]

    # -- as ``Questions``

    @property
    def name_seconds(self) -> float:
        return self.shared.source_seconds

    def lacks(self, dirent: Dirent, node: Node | None) -> bool:
        return self._known.entry(dirent.checked_ns, node, time.time_ns()) is None

    async def ask_ahead(self, parent: int, names: list[bytes]) -> tuple[Collection[bytes], int]:
        found: dict[bytes, Answer] = dict(await self.shared.ask(parent, names, Lane.DEMAND))
        rest = [name for name in names if name not in found]
        try:
            if rest:
                answers = await self._ask_some(parent, rest, Lane.DEMAND)
                found.update(zip(rest, answers, strict=False))
        finally:
            self.shared.asked(parent, rest)
        self.publish(parent, found)
        return found.keys(), sum(isinstance(answer, Node) for answer in found.values())

    def publish(self, parent: int, found: Mapping[bytes, Answer]) -> None:
        """Publish the names that were just found."""
        for name, node in found.items():
            if isinstance(node, Node):
                self._siblings.publish(parent, name, node, node.fetched_ns)

    async def _ask_some(
        self, parent: int, names: list[bytes], lane: Lane, opens_bytes: int = 0
    ) -> list[Answer]:
        """For the first names, as many as can be asked for in BATCH_SECONDS, and at least one."""
        directory = self._known.directory(parent)
        asked_ns, began = time.time_ns(), time.perf_counter()
        with self._recorder.estale_if_replaced(parent):
            answers = await self._source.found_each(
                directory, names, lane, BATCH_SECONDS, opens_bytes
            )
        self.shared.source_took((time.perf_counter() - began) / max(1, len(answers)))
        named = list(zip(names, answers, strict=False))
        found = [(name, *answer) for name, answer in named if not isinstance(answer, OSError)]
        nodes = iter(self._recorder.found_each(parent, found, asked_ns))
        self._recorder.missing(
            parent, [name for name, answer in named if isinstance(answer, _NOT_THERE)], asked_ns
        )
        self.shared.asked(parent, names[: len(answers)])
        return [
            None
            if isinstance(answer, _NOT_THERE)
            else answer
            if isinstance(answer, OSError)
            else next(nodes)
            for answer in answers
        ]
