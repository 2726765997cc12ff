"""Requests that C leaves to Python: what is answered at once, and what a task answers. In the place
of the C part, what gives numbers to requests and keeps the answers."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from monarchfs.fuse import session  # isort: skip  # before pyfuse3
from monarchfs.fuse import answerer, interrupts, packing, protocol
from monarchfs.fuse.answerer import Answerer
from monarchfs.fuse.handle_table import HandleTable, make_table
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay
from monarchfs.types import ROOT_INO
from tests.support.lookups import METADATA
from tests.support.mirror import Area, Mirror, until

READ_IN = packing.READ_IN.pack(12345, 0, 100)
WRITES = packing.OPEN_IN.pack(os.O_RDWR)
UNUSED_OPCODE = 4000


class Requests:
    """Changing: the number of the last one; errno and body of each answer that a task gave;
    ``pauses``, what was said about taking new ones."""

    def __init__(self, mirror: Mirror, patch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.answers: dict[int, tuple[int, bytes]] = {}
        self.pauses: list[bool] = []
        patch.setattr(session.hooks, "current", lambda: (self.number, self.number, os.getpid()))
        patch.setattr(session.hooks, "reply", self._reply)
        patch.setattr(session.hooks, "pause", self.pauses.append)
        self.memory = make_table(16)
        self.table = HandleTable(self.memory, session.hooks)
        self.interrupts = Interrupts(mirror.metrics)
        relay = Relay(free_opens=False)
        self.answerer = Answerer(
            mirror.tree,
            mirror.files,
            mirror.xattrs,
            self.interrupts,
            mirror.metrics,
            relay,
            self.table,
            Passthrough(mirror.files, lambda message: False, mirror.metrics, relay, counts=False),
            mirror.nursery,
        )

    def _reply(self, number: int, _by: int, code: int, body: bytes) -> bool:
        self.answers[number] = code, bytes(body)
        return True

    def ask(self, opcode: int, node: int, body: bytes = b"") -> Any:
        self.number += 2
        return self.answerer.answer(opcode, node, body)

    def look_up(self, name: str) -> Any:
        return self.ask(protocol.LOOKUP, ROOT_INO, name.encode() + b"\0")

    async def answered(self, number: int) -> tuple[int, bytes]:
        await until(lambda: number in self.answers, f"the answer to request {number}")
        return self.answers[number]

    def close(self) -> None:
        self.table.close()
        os.close(self.memory)


Asked = Callable[[], AbstractAsyncContextManager[tuple[Mirror, Requests]]]


@pytest.fixture
def asked(files: Area, monkeypatch: pytest.MonkeyPatch) -> Asked:
    @asynccontextmanager
    async def mounted() -> AsyncIterator[tuple[Mirror, Requests]]:
        async with files.mount(keeps=False) as mirror:
            requests = Requests(mirror, monkeypatch)
            try:
                yield mirror, requests
            finally:
                requests.close()

    return mounted


async def test_a_name_is_asked_for_once_then_it_is_known(asked: Asked) -> None:
    async with asked() as (mirror, requests):
        assert requests.look_up("a") is None
        code, entry = await requests.answered(2)
        assert (code, int.from_bytes(entry[:8], "little")) == (0, await mirror.ino("a"))
        assert requests.look_up("a")[:8] == entry[:8]
        assert list(requests.answers) == [2]


@pytest.mark.parametrize(
    ("opcode", "body", "code"),
    [
        (UNUSED_OPCODE, b"", errno.ENOSYS),
        (protocol.READ, READ_IN, errno.EBADF),
        (protocol.OPEN, WRITES, errno.EROFS),
    ],
)
async def test_what_fails_at_once(asked: Asked, opcode: int, body: bytes, code: int) -> None:
    async with asked() as (mirror, requests):
        assert requests.ask(opcode, await mirror.ino("a"), body) == code
        assert requests.answers == {}
        assert requests.interrupts.waiting == 0


@pytest.mark.parametrize("known", [True, False])
async def test_a_bug_is_an_error_of_its_request_alone(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    async with asked() as (mirror, requests):
        part = mirror.tree.known if known else mirror.tree.names
        with monkeypatch.context() as patch:
            patch.setattr(part, "lookup", broken)
            answer = requests.look_up("a")
            if not known:
                assert answer is None
                answer = (await requests.answered(2))[0]
        assert answer == errno.EIO
        assert "a bug" in caplog.text
        assert mirror.metrics.request_errors.by_name["EIO"] == 1
        assert requests.look_up("a") is None
        assert (await requests.answered(4))[0] == 0


async def test_a_request_of_a_process_that_dies_is_given_up(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before its task has begun; and nothing else is."""
    monkeypatch.setattr(interrupts, "dying", lambda pid: True)
    async with asked() as (mirror, requests):
        gate = mirror.posix.faults.gate(*METADATA)
        assert requests.look_up("a") is None
        assert requests.interrupts.on_interrupt(2)
        assert requests.look_up("top") is None
        assert (await requests.answered(2)) == (errno.EINTR, b"")
        assert not requests.interrupts.on_interrupt(2)
        assert requests.interrupts.waiting == 1
        gate.open()
        assert (await requests.answered(4))[0] == 0
        assert mirror.metrics.interrupted_requests == 1


async def test_no_more_are_taken_than_may_wait(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answerer, "MOST_WAITING", 3)
    async with asked() as (mirror, requests):
        gate = mirror.posix.faults.gate(*METADATA)
        for name in ("a", "d", "x"):
            assert requests.pauses == []
            assert requests.look_up(name) is None
        assert requests.pauses == [True]
        gate.open()
        for number in (2, 4, 6):
            await requests.answered(number)
        assert requests.pauses == [True, False]
        assert requests.interrupts.waiting == 0
