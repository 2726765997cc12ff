"""Requests that C leaves to Python: what is answered at once, what a task answers, and passthrough
with the supervisor's half of it. In the place of the kernel and of the C part, what keeps the
answers, or holds every open to their rules."""

import errno
import json
import logging
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from monarchfs.fuse import session  # isort: skip  # before pyfuse3
from monarchfs.config import Config, TierSpec, User
from monarchfs.fuse import answerer, interrupts, packing, passthrough, protocol
from monarchfs.fuse.answerer import Answerer, FuseRequest
from monarchfs.fuse.handle_table import RESENT, HandleTable, make_table
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay
from monarchfs.fuse.session import hooks
from monarchfs.insight.recording import AnsweredBy
from monarchfs.supervisor import backing
from monarchfs.supervisor.backing import BackingFiles
from monarchfs.supervisor.messages import Back, Unback, parse
from monarchfs.system import process_stat
from monarchfs.types import ROOT_INO, EvictionPolicy, FreshnessMode, ReplicaState, TierSize
from tests.layers.whole import NoReaders
from tests.support.lookups import METADATA
from tests.support.mirror import KIB, Area, Mirror, content, until


def answerer_of(
    mirror: Mirror, interrupts: Interrupts, relay: Relay, table: HandleTable, passed: Passthrough
) -> Answerer:
    return Answerer(
        *(mirror.tree, mirror.files, mirror.xattrs, interrupts, mirror.metrics),
        *(relay, table, passed, mirror.nursery),
    )


READ_IN = packing.READ_IN.pack(12345, 0, 100)
WRITES = packing.OPEN_IN.pack(os.O_RDWR)
UNUSED_OPCODE = 4000


class Requests:
    """Changing: the number of the last one; errno and body of each answer that a task gave;
    ``refused``, by the kernel; ``pauses``, what was said about taking new ones."""

    def __init__(self, mirror: Mirror, patch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.answers: dict[int, tuple[int, bytes]] = {}
        self.refused: set[int] = set()
        self.pauses: list[bool] = []
        patch.setattr(session.hooks, "current", lambda: (self.number, self.number, os.getpid()))
        patch.setattr(session.hooks, "reply", self._reply)
        patch.setattr(session.hooks, "pause", self.pauses.append)
        self.memory = make_table(16)
        self.table = HandleTable(self.memory, session.hooks)
        self.interrupts = Interrupts(mirror.metrics)
        relay = Relay(free_opens=False)
        passthrough = Passthrough(
            mirror.files, lambda message: False, mirror.metrics, relay, counts=False
        )
        self.answerer = answerer_of(mirror, self.interrupts, relay, self.table, passthrough)

    def _reply(self, number: int, _by: int, code: int, body: bytes) -> bool:
        self.answers[number] = code, bytes(body)
        return number not in self.refused

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
    broken = Mock(side_effect=ValueError("a bug"))
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


async def test_who_dies_is_not_answered(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("hidden", [FileNotFoundError, PermissionError])
async def test_a_process_that_proc_hides_is_given_up_only_after_a_signal(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, hidden: type[OSError]
) -> None:
    status = Mock(side_effect=hidden)
    for module in (interrupts, process_stat):
        monkeypatch.setattr(module, "open", status, raising=False)
    monkeypatch.setattr(interrupts, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(interrupts, "UNSEEN_SECONDS", 0.1)
    async with asked() as (mirror, requests):
        gate = mirror.posix.faults.gate(*METADATA)
        mirror.nursery.start_soon(requests.interrupts.watch)
        assert [requests.look_up(name) for name in ("a", "top")] == [None, None]
        await until(lambda: status.call_count > 4, "a look at them")
        assert requests.interrupts.on_interrupt(2)
        assert requests.answers == {}
        assert (await requests.answered(2)) == (errno.EINTR, b"")
        gate.open()
        assert (await requests.answered(4))[0] == 0
    assert interrupts.dying(1 << 30), "nobody has this number"
    assert process_stat.start_ticks(1) is None


async def test_no_more_come_than_may_wait(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is sent again meanwhile, and waits as one."""
    monkeypatch.setattr(answerer, "MOST_WAITING", 3)
    gates = [trio.Event() for _ in range(4)]
    unused = iter(gates)

    async def look_up(_: FuseRequest) -> tuple[AnsweredBy, bytes]:
        await next(unused).wait()
        return AnsweredBy.SOURCE, b""

    async with asked() as (_, requests):
        monkeypatch.setattr(requests.answerer, "_asking", {protocol.LOOKUP: (look_up, None)})
        for requests.number in (RESENT, RESENT, 4, 6):
            assert requests.pauses == []
            assert requests.look_up("a") is None
            await trio.testing.wait_all_tasks_blocked()
        assert requests.pauses == [True]
        for gate in gates:
            gate.set()
            await trio.testing.wait_all_tasks_blocked()
            assert requests.pauses == [True, False]
        assert requests.interrupts.waiting == 0


@pytest.mark.parametrize("first", [0, 1])
async def test_an_open_that_is_sent_again_meanwhile_is_one_handle(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Whichever has its answer first. The kernel takes that to the new number alone."""
    async with asked() as (mirror, requests):
        node, numbers, files = await mirror.ino("a"), (2, 2 | RESENT), requests.answerer._files
        gates, open_it = [trio.Event(), trio.Event()], files.open
        unused = iter(gates)

        async def open_late(*arguments: Any, **options: Any) -> Any:
            await next(unused).wait()
            return await open_it(*arguments, **options)

        monkeypatch.setattr(files, "open", open_late)
        monkeypatch.setattr(files, "known_open", lambda _: None)
        requests.refused = {2}
        for requests.number in (0, RESENT):
            assert requests.ask(protocol.OPEN, node, packing.OPEN_IN.pack(os.O_RDONLY)) is None
            await trio.testing.wait_all_tasks_blocked()
        for which in (first, 1 - first):
            gates[which].set()
            await requests.answered(numbers[which])
        (accepted,) = requests.table
        assert requests.answers[2 | RESENT][1].startswith(packing.HANDLE.pack(accepted.number))
        assert len(requests.answerer.handles) == 1


SIZE = 50_000
ALL = "01234567"


class Registry:
    """The kernel's backing files: a descriptor of its own for each id."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, int] = {}
        self.made = 0
        self.refuses = self.refuses_next = 0
        patch.setattr(backing, "register", self._register)
        patch.setattr(backing, "unregister", self._unregister)

    def _register(self, _fuse: int, descriptor: int) -> int:
        code, self.refuses_next = self.refuses_next or self.refuses, 0
        if code:
            raise OSError(code, os.strerror(code))
        self.made += 1
        self.files[self.made] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        return self.made

    def _unregister(self, _fuse: int, number: int) -> None:
        os.close(self.files.pop(number))

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)


@dataclass(eq=False)
class Open:
    """One open file of a process: its own descriptor of the backing file, as the kernel has."""

    ino: int
    number: int
    backing_id: int
    descriptor: int = -1


class Threads(NoReaders):
    """Those of the C part, which open what is decided, and in the source what is not resident.
    Changing: handles of theirs, by number; ``misses``, the share that they open of what has no
    replica; what those read, ``held``; how many of each they opened."""

    def __init__(self, rng: random.Random, slots: HandleTable) -> None:
        super().__init__()
        self.random = rng
        self.slots = slots
        self.own: set[int] = set()
        self.misses = 0.0
        self.missed_opens = 0
        self.held: dict[int, bytes] = {}
        self.missing: Callable[[int], bytes | None] = lambda ino: None
        self.resident: Callable[[int], bool] = lambda ino: False
        self.wanted: Callable[[int], None] = lambda ino: None
        self.opened = 0

    def open(self, ino: int, unique: int) -> tuple[int, int] | None:
        """Number and backing id; None where the open is Python's."""
        if self.random.random() < self.misses and (data := self.missing(ino)) is not None:
            number, backing_id = self.slots.add(ino, unique)
            self.held[number] = data
            self.missed_opens += 1
            self.wanted(ino)
        elif self.resident(ino) and hooks.inode_decided(ino) and self.random.random() < 0.7:
            number, backing_id = self.slots.add(ino, unique)
            self.opened += backing_id != 0
        else:
            return None
        self.own.add(number)
        return number, backing_id

    def release(self, number: int) -> bool:
        """Whether the RELEASE is theirs."""
        self.held.pop(number, None)
        if number not in self.own:
            return False
        self.own.remove(number)
        self.slots.end_handle(number)
        return True

    def used(self, ino: int) -> bool:
        return super().used(ino) or any(slot.ino == ino for slot in self.slots)


class Passing:
    """A mirror with who answers, a supervisor, and the kernel's view of what is open.

    ``eio`` are opens that the kernel would have answered with EIO.
    """

    def __init__(
        self, mirror: Mirror, patch: pytest.MonkeyPatch, *, most: int = 64, seed: int = 0
    ) -> None:
        self.mirror = mirror
        self.random = random.Random(seed)
        self.registry = Registry(patch)
        self.table = make_table(1024)
        user = User("me", os.getuid(), os.getgid())
        tiers = tuple(TierSpec(tier.path, TierSize(bytes=1)) for tier in mirror.tiers)
        config = Config("/s", "/m", tiers, "/state", "/run", "0" * 16, user)
        places = [tier.dir_fd for tier in mirror.tiers]
        self.supervisor = BackingFiles(config, -1, places, self.table)
        self.supervisor.most = most
        devices = frozenset(os.stat(tier.path).st_dev for tier in mirror.tiers)
        self.supervisor._devices = devices
        self.answers = True
        self.opens: list[Open] = []
        self.eio: list[str] = []
        self._unique = 0
        self.slots = HandleTable(self.table, session.hooks)
        self.threads = Threads(self.random, self.slots)
        self.threads.wanted = mirror.copier.jobs.want_opened
        self.threads.missing = self._missing
        self.threads.resident = self._resident
        mirror.cache.readers = mirror.cache.lookup._readers = self.threads
        self.backed_opens = 0
        self._in, out = trio.open_memory_channel[dict[str, Any]](10_000)
        mirror.nursery.start_soon(self._deliver, out)
        relay = Relay(free_opens=False)
        patch.setattr(relay, "offer", lambda ino, *, seen=False: self._resident(ino))
        self.passthrough = Passthrough(mirror.files, self._send, mirror.metrics, relay, counts=True)
        mirror.cache.accounts.bind(self.passthrough)
        self.answerer = answerer_of(
            mirror, Interrupts(mirror.metrics), relay, self.slots, self.passthrough
        )
        patch.setattr(session.hooks, "current", lambda: (self._unique, self._unique, 0))
        self.answerer.take_over()
        self.passthrough.limit_ids(self.supervisor.most)

    def _resident(self, ino: int) -> bool:
        """Whether the threads may open and read its replica."""
        node, record = self.mirror.index.nodes.node(ino), self.mirror.index.replicas.replica(ino)
        resident = record is not None and record.state is ReplicaState.RESIDENT
        return resident and node is not None and not node.outdated

    def _missing(self, ino: int) -> bytes | None:
        """All of a file that has no replica, as the source has it; None for another version."""
        node = self.mirror.index.nodes.node(ino)
        if node is None or node.outdated or self.mirror.index.replicas.replica(ino) is not None:
            return None
        path = self.mirror.area.source / os.fsdecode(node.name)
        st = path.stat()
        version = st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
        return path.read_bytes() if version == node.stat.version[1:] else None

    def close(self) -> None:
        self.slots.close()
        for ino in self.passthrough._ids:  # the C part outlives it here
            hooks.inode_unback(ino, False)
        self.registry.close()
        os.close(self.table)

    # -- the channel

    def _send(self, message: dict[str, Any]) -> bool:
        said = parse(json.dumps(message).encode())
        assert isinstance(said, (Back, Unback))
        reply = self.supervisor.answer(said)
        if self.answers:
            self._in.send_nowait(reply)
        return True

    async def _deliver(self, out: trio.MemoryReceiveChannel[dict[str, Any]]) -> None:
        async for reply in out:
            for _ in range(self.random.randrange(4)):
                await trio.lowlevel.checkpoint()
            self.passthrough.answered(
                reply["number"], reply["ids"], reply.get("error", 0), reply.get("reason", "")
            )

    def answer_at_last(self) -> None:
        """What was asked first, before ``answers`` was set again."""
        self.answers = True
        self.passthrough.answered(2, [1], 0, "")

    # -- what processes do, by way of the kernel

    async def _ask(self, opcode: int, ino: int, body: bytes) -> bytes:
        answer = self.answerer.answer_known(opcode, ino, body)
        if answer is None:
            request = FuseRequest(self._unique, self._unique, 0, opcode, ino, body)
            _by, answer = await self.answerer._asking[opcode][0](request)
        assert not isinstance(answer, int)
        return bytes(answer)

    async def open(self, path: str) -> Open:
        """As the kernel: an outdated inode is looked up once more."""
        try:
            return await self._open(await self.mirror.ino(path))
        except Exception as exc:
            if getattr(exc, "errno", None) != errno.ESTALE:
                raise
            return await self._open(await self.mirror.ino(path))

    async def _open(self, ino: int) -> Open:
        self._unique += 2
        keep_cache = False
        if (opened := self.threads.open(ino, self._unique)) is not None:
            number, backing_id = opened
        else:
            answer = await self._ask(protocol.OPEN, ino, packing.OPEN_IN.pack(os.O_RDONLY))
            number, flags, backing_id = packing.OPEN_OUT.unpack(answer)
            keep_cache = flags & packing.FOPEN_KEEP_CACHE
            assert bool(flags & packing.FOPEN_PASSTHROUGH) == bool(backing_id)
            self.backed_opens += backing_id != 0
        # Between the answer and the opener's turn others have theirs, but no RELEASE can come.
        one = Open(ino, number, backing_id)
        mode = next((o.backing_id for o in self.opens if o.ino == ino), None)
        if mode is not None and mode != backing_id:
            self.eio.append(f"inode {ino}: {backing_id} while {mode}")
        if backing_id and keep_cache:
            self.eio.append(f"inode {ino}: keep_cache with a backing file")
        self.opens.append(one)
        for _ in range(self.random.randrange(3)):
            await trio.lowlevel.checkpoint()
        if backing_id not in (0, *self.registry.files):
            self.eio.append(f"inode {ino}: there is no backing file {backing_id}")
        elif backing_id:
            one.descriptor = os.dup(self.registry.files[backing_id])
        return one

    async def read(self, one: Open) -> bytes:
        if one.backing_id:
            return os.pread(one.descriptor, 1 << 20, 0)
        if one.number in self.threads.held:
            return self.threads.held[one.number]
        return await self._ask(protocol.READ, one.ino, packing.READ_IN.pack(one.number, 0, 1 << 20))

    async def release(self, one: Open) -> None:
        self.opens.remove(one)
        if one.descriptor >= 0:
            os.close(one.descriptor)
        owned = self.answerer.handles.get(one.number)  # a read of it came to Python
        if owned or not self.threads.release(one.number):
            await self._ask(protocol.RELEASE, one.ino, packing.HANDLE.pack(one.number))

    async def read_file(self, path: str) -> tuple[bytes, bool]:
        """Its bytes, and whether the kernel read them itself."""
        one = await self.open(path)
        data = await self.read(one)
        await self.release(one)
        return data, one.backing_id != 0


Mounted = Callable[..., AbstractAsyncContextManager[Passing]]


@pytest.fixture
def passing(area: Area, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    """Mounts eight files. Those that are named are copied before anything is passed through."""
    monkeypatch.setattr("monarchfs.cache.tiers.SPACE_MAX_AGE_SECONDS", 0.0)
    monkeypatch.setattr(passthrough, "NEWS_SECONDS", 0.002)
    monkeypatch.setattr(passthrough, "CLOSED_SECONDS", 0.002)
    for name in ALL:
        area.write(name, content(SIZE, int(name)))

    @asynccontextmanager
    async def mounted(
        copied: str = "", most: int = 64, seed: int = 0, **options: Any
    ) -> AsyncIterator[Passing]:
        async with area.mount(shares=False, **options) as mirror:
            for name in copied:
                await mirror.copied(name)
            kernel = Passing(mirror, monkeypatch, most=most, seed=seed)
            try:
                yield kernel
                assert kernel.eio == []
                await mirror.settled()
            finally:
                kernel.close()

    return mounted


async def read_relayed(kernel: Passing) -> None:
    assert await kernel.read_file("0") == (content(SIZE, 0), False)


@pytest.mark.parametrize("why", ["corrupt", "corrupt, many wait", "late", "killed"])
async def test_an_id_that_comes_when_nobody_can_use_it_is_given_back(
    passing: Mounted, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The replica has gone, the reader has waited long enough, or waits no more."""
    if why == "late":
        monkeypatch.setattr(passthrough, "ANSWER_SECONDS", 0.01)
    async with passing("0") as kernel:
        mirror = kernel.mirror
        kernel.answers = False
        async with trio.open_nursery() as nursery:
            for _ in range(3 if why == "corrupt, many wait" else 1):
                nursery.start_soon(read_relayed, kernel)
            await until(lambda: bool(kernel.registry.files), "the question")
            if why == "killed":
                nursery.cancel_scope.cancel()
            elif why != "late":
                mirror.cache.accounts.corrupt(await mirror.ino("0"))
                kernel.answer_at_last()
        if why in ("late", "killed"):
            kernel.answer_at_last()
        await mirror.idle()
        assert kernel.backed_opens == 0
        await until(lambda: not kernel.registry.files, "the id to be given back")
        if why == "late":
            assert await kernel.read_file("0") == (content(SIZE, 0), True)


async def test_refusals_end_the_asking(passing: Mounted, caplog: pytest.LogCaptureFixture) -> None:
    async with passing("0") as kernel:
        kernel.registry.refuses = errno.ELOOP
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                await read_relayed(kernel)
        assert kernel.mirror.metrics.backing_refused == passthrough.MOST_REFUSALS
        assert kernel.passthrough.data_path == "relay"
        (line,) = [r.getMessage() for r in caplog.records if "kernel" in r.getMessage()]
        assert "symbolic links" in line, "with the reason"


@pytest.mark.parametrize("seed", range(6))
async def test_no_interleaving_breaks_the_kernels_rules(
    passing: Mounted, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    room = 5 * 64 * KIB
    monkeypatch.setattr(passthrough, "SMALL_BYTES", SIZE if seed % 3 else 0)
    async with passing(
        tiers=[room, room],
        most=(64, 5)[seed % 2],
        seed=seed,
        mode=FreshnessMode.OPEN,
        eviction=EvictionPolicy.SIEVE,
        copy_workers=3,
    ) as kernel:
        mirror = kernel.mirror
        world = World(kernel, seed)
        kernel.threads.misses = 0.3
        mirror.nursery.start_soon(kernel.passthrough.run)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(world.process)
            nursery.start_soon(world.trouble)
        assert kernel.opens == []
        assert len(kernel.slots) == 0
        await mirror.idle()
        # What is offered for passthrough is registered a moment before the worker hears of it.
        await until(lambda: kernel.passthrough.ids == len(kernel.registry.files), "all answers")
        assert len(kernel.registry.files) == len(kernel.supervisor)
        opened = kernel.backed_opens, kernel.threads.opened
        assert sum(opened) > 20, "else this test shows nothing"
        assert all(opened)
        assert kernel.threads.missed_opens > 0
        for name in ALL:
            mirror.cache.evict(await mirror.ino(name))
        await until(lambda: not kernel.passthrough._held, "what threads closed last")
        await mirror.idle()
        backing = [os.readlink(f"/proc/self/fd/{fd}") for fd in kernel.registry.files.values()]
        assert not any("deleted" in path for path in backing)


class World:
    """Processes that open, read and close, and what happens meanwhile."""

    def __init__(self, kernel: Passing, seed: int) -> None:
        self.mirror = kernel.mirror
        self.kernel = kernel
        self.random = random.Random(seed)
        self.contents = {name: [content(SIZE, int(name))] for name in ALL}
        self.passed: dict[int, bytes] = {}

    async def process(self) -> None:
        for _ in range(60):
            name = self.random.choice(ALL[: self.random.choice((2, 8))])
            try:
                one = await self.kernel.open(name)
            except Exception as exc:
                if getattr(exc, "errno", None) == errno.ESTALE:
                    continue  # it was replaced twice meanwhile
                raise
            for _ in range(self.random.randrange(3)):
                try:
                    data = await self.kernel.read(one)
                except Exception as exc:
                    if getattr(exc, "errno", None) != errno.ESTALE or one.backing_id:
                        raise
                    break  # its copy was lost, and it was replaced in the source
                assert data in self.contents[name]
                if one.backing_id:
                    assert self.passed.setdefault(one.ino, data) == data, "one inode, one version"
                await self.pause()
            await self.kernel.release(one)

    async def pause(self) -> None:
        if self.random.random() < 0.3:
            await trio.sleep(self.random.random() * 0.004)
        else:
            await trio.lowlevel.checkpoint()

    async def trouble(self) -> None:
        mirror = self.mirror
        for step in range(60):
            await trio.sleep(0.005)
            name = self.random.choice(ALL)
            ino = await mirror.ino(name)
            match self.random.randrange(6):
                case 0:
                    mirror.cache.evict(ino)
                case 1:
                    mirror.cache.accounts.corrupt(ino)
                case 2:
                    mirror.cache.accounts.drop(ino, "its replica was lost")
                case 3:
                    data = content(SIZE + step, step + 50)
                    self.contents[name].append(data)
                    mirror.area.write(name + ".new", data)
                    (mirror.area.source / (name + ".new")).rename(mirror.area.source / name)
                case 4:
                    self.kernel.registry.refuses_next = errno.ENOMEM
                case 5:
                    await mirror.cache.maintain()
