"""What jobs have said, for the worker that comes next; who announces an order, and whether that
process has exited."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.system.listeners import Listeners
from monarchfs.system.process_stat import start_ticks
from monarchfs.worker import said as module
from monarchfs.worker.announcing import Announcing
from monarchfs.worker.said import DIRECTORY, KeptOrder, Said
from tests.support.surroundings import requires_root
from tests.support.timing import wait_for

WEIGHTS = st.dictionaries(st.integers(1, 20), st.floats(0, 1e9), max_size=5)


def files_of(state: Path) -> list[str]:
    return os.listdir(state / DIRECTORY) if (state / DIRECTORY).exists() else []


@given(st.lists(st.tuples(WEIGHTS, st.booleans(), st.booleans()), max_size=12))
def test_weights_are_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[dict[int, float], bool, bool]]
) -> None:
    """Also if the worker changes in between, or later weights replaced many."""
    state = str(tmp_path_factory.mktemp("state"))
    said, expected, given = Said(state, 1), dict[int, float](), False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_SUPERSEDED", 100)
        for weights, replace, restarts in history:
            if restarts:
                said = Said(state, 1)
                assert said.weights() == (expected if given else None)
            said.keep_weights(list(weights.items()), replace=replace)
            expected = {**({} if replace else expected), **weights}
            given = True
            assert (Path(state) / DIRECTORY / "weights").stat().st_size < 1000
    assert Said(state, 1).weights() == (expected if given else None)


def test_a_weight_that_was_half_written_says_nothing(tmp_path: Path) -> None:
    Said(str(tmp_path), 1).keep_weights([(5, 1.0)], replace=False)
    with (tmp_path / DIRECTORY / "weights").open("ab") as file:
        file.write(b"half")
    said = Said(str(tmp_path), 1)
    assert said.weights() == {5: 1.0}
    said.keep_weights([(6, 2.0)], replace=False)
    assert Said(str(tmp_path), 1).weights() == {5: 1.0, 6: 2.0}


def test_orders_are_kept_until_they_are_over(tmp_path: Path) -> None:
    said = Said(str(tmp_path), 1)
    one, two = KeptOrder("one/../", b"a\0b\n", 17, 4), KeptOrder("two", b"c", 0, None)
    said.keep_order(one)
    said.keep_order(two)
    assert Said(str(tmp_path), 1).orders() == [one, two]
    said.keep_order(one._replace(names=b"d"))
    assert [order.names for order in said.orders()] == [b"c", b"d"]
    said.forget_order("one/../")
    said.forget_order("one/../")
    assert said.orders() == [two]
    said.keep_weights([(1, 1.0)], replace=True)
    said.clear()
    assert (said.orders(), said.weights(), files_of(tmp_path)) == ([], None, [])


def test_what_another_mount_left_or_was_half_written_is_removed(tmp_path: Path) -> None:
    said = Said(str(tmp_path), 1)
    said.keep_order(KeptOrder("one", b"a", 1, 1))
    said.keep_weights([(1, 1.0)], replace=True)
    (kept,) = (path for path in (tmp_path / DIRECTORY).iterdir() if path.name != "weights")
    half = kept.with_name(kept.name + ".new")
    half.write_bytes(kept.read_bytes())
    (tmp_path / DIRECTORY / "order-x").write_bytes(b"no JSON")
    assert len(said.orders()) == 1
    assert sorted(files_of(tmp_path)) == sorted([kept.name, "weights"])
    later = Said(str(tmp_path), 2)
    assert (later.orders(), later.weights(), files_of(tmp_path)) == ([], None, [])


def test_what_cannot_be_kept_costs_nobody_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DIRECTORY).write_text("no directory")
    said = Said(str(tmp_path), 1)
    said.keep_order(KeptOrder("one", b"a", 1, 1))
    said.keep_weights([(1, 1.0)], replace=False)
    said.forget_order("one")
    said.clear()
    assert (said.orders(), said.weights()) == ([], None)
    assert "not kept" in caplog.text


# Who announces


CLIENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.sendall(sys.argv[2].encode())
    client.shutdown(socket.SHUT_WR)
    while client.recv(100):
        pass
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
        self.on_dropped: Listeners[[str]] = Listeners()

    def announce(
        self, name: str, names: bytes, exited: Callable[[], bool], *, begun: bool = False
    ) -> None:
        self.on_dropped(name)
        self.exited.append(exited)
        self.orders[name] = names
        if begun:
            self.begun.add(name)


def test_the_exit_of_an_announcer_is_seen(tmp_path: Path) -> None:
    path, orders = str(tmp_path / "socket"), Orders()
    announcing = Announcing(cast(Any, orders), Said(str(tmp_path), 1))

    async def answer(listener: socket.socket) -> None:
        with trio.socket.from_stdlib_socket(listener) as accepting:
            for _ in range(2):
                connection, _ = await accepting.accept()
                async with trio.SocketStream(connection) as stream:
                    await announcing.answer({}, stream)

    def exits() -> list[bool]:
        return sorted(exited() for exited in orders.exited)

    with ExitStack() as stack:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        clients = []
        for name in ("a", "b"):
            words = [sys.executable, "-c", CLIENT, path, name]
            client = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE))
            stack.callback(client.kill)
            clients.append(client)
        trio.run(answer, listener)
        assert exits() == [False, False]
        clients[0].kill()
        wait_for(lambda: any(exits()), "one to have exited")
        assert exits() == [False, True]
        clients[1].kill()  # nobody waits for it (wait(2)) yet
        wait_for(lambda: all(exits()), "both to have exited")


def test_the_next_worker_knows_orders_and_whether_their_announcers_live(tmp_path: Path) -> None:
    said, orders, lives = Said(str(tmp_path), 1), Orders(), start_ticks(os.getpid())
    assert lives is not None
    said.keep_order(KeptOrder("dead", b"a", 2**22 + 1, 5))
    said.keep_order(KeptOrder("other", b"b", os.getpid(), lives + 1))
    said.keep_order(KeptOrder("living", b"c\0d", os.getpid(), lives))
    said.keep_order(KeptOrder("unknown", b"e", 0, None))  # of another pid namespace
    trio.run(Announcing(cast(Any, orders), said).resume)
    assert orders.orders == {"dead": b"a", "other": b"b", "living": b"c\0d", "unknown": b"e"}
    assert [exited() for exited in orders.exited] == [True, True, False, False]
    assert orders.begun == set(orders.orders)
    assert [order.stream for order in said.orders()] == list(orders.orders)


@requires_root
def test_a_process_outside_of_the_pid_namespace_has_no_number(tmp_path: Path) -> None:
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
