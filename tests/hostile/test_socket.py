"""The control socket of a daemon that lives: whatever comes, it goes on, and within its memory.

What single requests are answered is in tests/mount/test_control.py.
"""

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import psutil
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from monarchfs.control import registration
from monarchfs.supervisor import supervise
from monarchfs.worker import commands
from tests.support import trees
from tests.support.mounting import Mount, bench, requires_mounts, wait_for
from tests.unit.test_messages import VALUES as SOME_VALUES

pytestmark = requires_mounts

ANSWER_SECONDS = 5.0
MOST_GROWTH_BYTES = 48 << 20
COMMANDS = sorted({*supervise.COMMANDS, *commands.COMMANDS} - {"umount", "restart", "stand_by"})


@dataclass
class Daemon:
    mount: Mount
    socket_path: str
    supervisor: int
    worker: int

    def memory(self) -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in (self.supervisor, self.worker))

    def descriptors(self) -> int:
        return sum(psutil.Process(pid).num_fds() for pid in (self.supervisor, self.worker))

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(60)  # a busy machine; `answers` has the bound
        wait_for(lambda: client.connect_ex(self.socket_path) == 0, "a place in the backlog")
        return client

    def answers(self) -> None:
        """It says that it serves, in time, and still is who it was."""

        def serving() -> bool:
            with self.connect() as client:
                client.sendall(b'{"command": "status"}\n')
                reply = json.loads(received(client))
            assert reply["ok"] is True
            result = reply["result"]
            assert result["worker"]["pid"] == self.worker
            # A worker that gets no processor for a while is said not to answer.
            return bool(result["state"] == "serving")

        wait_for(serving, "it to serve", ANSWER_SECONDS)


def received(client: socket.socket) -> bytes:
    answer = bytearray()
    with suppress(ConnectionResetError, BrokenPipeError):
        while part := client.recv(1 << 16):
            answer += part
    return bytes(answer)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with bench(most_seconds=1800) as work:  # of all tests here
        trees.dataset(work.path / "src", files=5, largest=10_000)
        mount = work.mount(work.path / "src", "--prefetch", "all")
        mount.wait_idle()
        (found,) = [
            one
            for one in registration.find_mounts(["/run/monarchfs"])
            if one.entry.mountpoint == str(mount.path)
        ]
        status = mount.status()
        worker = status["worker"]["pid"]
        yield Daemon(mount, found.socket_path, found.entry.supervisor_pid, worker)


def check_replies(answer: bytes) -> None:
    """Nothing, or lines of JSON of which the last is a reply; an error is one line."""
    if not answer:
        return
    assert answer.endswith(b"\n")
    *progress, last = [json.loads(line) for line in answer.splitlines()]
    assert all(isinstance(one["progress"], dict) for one in progress)
    assert isinstance(last["ok"], bool)
    assert last["ok"] or "\n" not in last["error"]


NAMES = ["", ".", "class0", "class1/..", "../x", "/", "\0", "copy", "check", "\udcff"]
VALUES = st.recursive(
    SOME_VALUES | st.sampled_from(NAMES), lambda inner: st.lists(inner, max_size=4), max_leaves=6
)
FIELDS = st.sampled_from(["paths", "wait", "what", "timeout", "recursive", "pid", "do", "event"])
REQUESTS = st.builds(
    lambda command, fields: json.dumps({**fields, "command": command}).encode() + b"\n",
    st.sampled_from(COMMANDS) | VALUES,
    st.dictionaries(FIELDS | st.text(max_size=5), VALUES, max_size=4),
)
# How it begins, a piece, and how often that follows: a failure's report then fits on a screen.
LINES = (
    st.tuples(REQUESTS | st.binary(max_size=200), st.just(b""), st.just(0))
    | st.tuples(st.just(b""), st.binary(max_size=50), st.just(1500))
    | st.tuples(st.just(b'{"command":'), st.just(b"["), st.integers(1, 30_000))
    | st.tuples(st.just(b'{"command":"'), st.just(b"x"), st.integers(1, 70_000))
)


@settings(
    max_examples=60,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink them takes minutes
)
@given(st.lists(st.tuples(LINES, st.sampled_from(["read", "leave", "half", "stay"])), max_size=6))
@example([((b'{"command":"warm","paths":[""],"what":"copy","wait":true}\n', b"", 0), "leave")] * 6)
@example([((b'{"command":"why","paths":["class0"]}\n', b"", 0), "leave")] * 6)
@example([((b'{"command":"refresh","paths":["' + b"a/" * 1000 + b'"]}\n', b"", 0), "read")])
@example([((b'{"command":"stand_by"}\n', b"", 0), manner) for manner in ("leave", "half", "stay")])
@example([((b"", b"\n", 1000), "read"), ((b"", b"\0", 100_000), "half")])
@example(
    [((b'{"command":"record"}\n', b"", 0), "read"), ((b'{"command":"order"}\n', b"", 0), "read")]
)
def test_whatever_clients_send(
    daemon: Daemon, clients: list[tuple[tuple[bytes, bytes, int], str]]
) -> None:
    with ExitStack() as stack:
        for (head, piece, count), manner in clients:
            content = head + piece * count
            client = stack.enter_context(daemon.connect())
            with suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(content)
                if manner == "half":
                    client.shutdown(socket.SHUT_WR)
            if manner == "leave":
                client.close()
            elif manner == "read" and content.endswith(b"\n"):
                with suppress(OSError):  # it was refused already
                    client.shutdown(socket.SHUT_WR)  # `record` and `order` last until then
                check_replies(received(client))
        daemon.answers()


def flood(daemon: Daemon, content: bytes, count: int, descriptors: Sequence[int] = ()) -> None:
    """So many connections at once, all of which say the same and none of which reads."""
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(daemon.connect())
            with suppress(BrokenPipeError, ConnectionResetError):
                if descriptors:
                    with suppress(PermissionError):  # since Linux 6.16 the kernel takes none
                        socket.send_fds(client, [b" "], descriptors)
                client.sendall(content)
        daemon.answers()


MANY = {
    "replies that nobody reads": (b'{"command": "status"}\n', 300),
    "commands nobody waits for": (b'{"command": "why", "paths": [""]}\n', 300),
    "half lines": (b'{"comm', 300),
    "long half lines": (b"x" * (60 << 10), 300),
    "nothing": (b"", 300),
    "lists": (b'{"command": "pin", "paths": [' + b'"a",' * 10_000 + b'"a"]}\n', 60),
    "depth": (b'{"command":' + b"[" * 30_000 + b"\n", 60),
}


@pytest.mark.parametrize("what", MANY)
def test_many_at_once(daemon: Daemon, what: str) -> None:
    content, count = MANY[what]
    flood(daemon, content, 20)  # what the first ones cost is no growth
    before = daemon.memory()
    for _ in range(3):
        flood(daemon, content, count)
    assert daemon.memory() - before < MOST_GROWTH_BYTES
    # Connections that are closed are forgotten.
    wait_for(lambda: daemon.descriptors() < 250, "the daemon to close what was closed")


def test_descriptors_that_come_along_are_not_kept(daemon: Daemon) -> None:
    """A client may send descriptors with its bytes (SCM_RIGHTS): nobody asked for them."""
    with open("/dev/null", "rb") as null:
        flood(daemon, b'{"command": "status"}\n', 5)
        wait_for(lambda: daemon.descriptors() < 250, "earlier clients to be gone")
        before = daemon.descriptors()
        flood(daemon, b'{"command": "status"}\n', 30, descriptors=[null.fileno()] * 20)
        flood(daemon, b'{"command": "why", "paths": [""]}\n', 30, descriptors=[null.fileno()] * 20)
        wait_for(lambda: daemon.descriptors() <= before + 2, "nothing to be kept")
    daemon.answers()
