"""Who announces an order, and whether that process has exited."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
import trio.testing

from monarchfs.system.process_stat import start_ticks
from monarchfs.worker.announcing import Announcing
from monarchfs.worker.said import KeptOrder, Said
from tests.support.surroundings import requires_root

CLIENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.sendall(sys.argv[2].encode())
    client.shutdown(socket.SHUT_WR)
    while client.recv(100):
        pass
    print("announced", flush=True)
    sys.stdin.read()
"""

SERVER = """
import socket, sys
from monarchfs.control.peers import peer_pid
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
connection, _ = listener.accept()
print(peer_pid(connection), flush=True)
"""


class Orders:
    """In place of the window. ``exited`` tells of those who announced, oldest first; ``begun`` has
    the names of orders that had begun."""

    def __init__(self) -> None:
        self.exited: list[Callable[[], bool]] = []
        self.orders: dict[str, bytes] = {}
        self.begun: set[str] = set()
        self.dropped: Callable[[str], None] = lambda name: None

    def announce(
        self, name: str, names: bytes, exited: Callable[[], bool], *, begun: bool = False
    ) -> None:
        self.dropped(name)
        self.exited.append(exited)
        self.orders[name] = names
        if begun:
            self.begun.add(name)


class Daemon:
    """Takes announcements on a socket."""

    def __init__(self, path: str) -> None:
        self.path, self.orders = path, Orders()
        self.said = Said(os.path.dirname(path), 1)
        self.announcing = Announcing(cast(Any, self.orders), self.said)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen()

    async def run(self, clients: int) -> None:
        with trio.socket.from_stdlib_socket(self._socket) as listener:
            for _ in range(clients):
                connection, _ = await listener.accept()
                async with trio.SocketStream(connection) as stream:
                    await self.announcing.answer({}, stream)


def client(path: str, names: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, path, names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():
            await trio.testing.wait_all_tasks_blocked(0.01)


def test_the_exit_of_an_announcer_is_seen(tmp_path: Any) -> None:
    async def main() -> None:
        daemon = Daemon(str(tmp_path / "socket"))
        first, second = (client(daemon.path, name) for name in ("a", "b"))
        try:
            await daemon.run(2)
            exited = daemon.orders.exited
            assert [one() for one in exited] == [False, False]
            # Which of them was first is not known.
            first.kill()
            await until(lambda: exited[0]() or exited[1]())
            assert sorted(one() for one in exited) == [False, True]
            second.kill()  # nobody waits for it (wait(2)) yet
            await until(lambda: exited[0]() and exited[1]())
        finally:
            for process in (first, second):
                process.kill()
                process.communicate()

    trio.run(main)


def test_the_next_worker_knows_orders_and_whether_their_announcers_live(tmp_path: Any) -> None:
    async def main() -> None:
        said = Said(str(tmp_path), 1)
        lives = start_ticks(os.getpid())
        assert lives is not None
        said.keep_order(KeptOrder("dead", b"a", 2**22 + 1, 5))
        said.keep_order(KeptOrder("other", b"b", os.getpid(), lives + 1))
        said.keep_order(KeptOrder("living", b"c\0d", os.getpid(), lives))
        said.keep_order(KeptOrder("unknown", b"e", 0, None))  # of another pid namespace
        orders = Orders()
        await Announcing(cast(Any, orders), said).resume()
        assert orders.orders == {"dead": b"a", "other": b"b", "living": b"c\0d", "unknown": b"e"}
        assert [exited() for exited in orders.exited] == [True, True, False, False]
        assert orders.begun == set(orders.orders)
        assert [order.stream for order in said.orders()] == list(orders.orders)

    trio.run(main)


@requires_root
def test_a_process_outside_of_the_pid_namespace_has_no_number(tmp_path: Any) -> None:
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs pid namespaces: CAP_SYS_ADMIN")
    path = str(tmp_path / "socket")
    asked = subprocess.Popen(
        [*unshare, sys.executable, "-c", SERVER, path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert asked.stdout is not None
        assert asked.stdout.readline() == "ready\n"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            assert asked.stdout.readline() == "0\n"
    finally:
        asked.kill()
        asked.communicate(timeout=10)
