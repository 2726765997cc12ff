"""The control socket: who may ask, what is refused, what hangs, and what is written about it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.cli.main import main
from monarchfs.control import client as control_client
from monarchfs.control import messages, registration
from monarchfs.supervisor import channel, supervise
from monarchfs.supervisor.reports import ANSWER_SECONDS, Reports
from monarchfs.types import OperationError
from monarchfs.worker import commands
from monarchfs.worker.bootstrap import CHANNEL_BYTES
from tests.support.fake_daemon import Listener, Serve
from tests.support.fake_mounts import NOBODY, Area, interpreter_for
from tests.support.mounting import (
    REPOSITORY,
    Bench,
    Mount,
    as_user,
    requires_fuse,
    requires_root,
    wait_for,
)
from tests.support.timing import Stopwatch

DOCUMENT = (REPOSITORY / "docs" / "CONTROL.md").read_text()


def test_the_document_has_every_command() -> None:
    documented = re.findall(r"^### `(\w+)`$", DOCUMENT, re.MULTILINE)
    assert sorted(documented) == sorted({*supervise.COMMANDS, *commands.COMMANDS})
    assert len(set(documented)) == len(documented)


def test_the_document_has_the_limits() -> None:
    for words in (
        f"{messages.MOST_REQUEST_BYTES >> 10} KiB",
        f"{messages.MOST_REPLY_BYTES >> 20} MiB",
        f"{messages.MOST_PATH_BYTES} bytes",
        f"{messages.MOST_NAME_BYTES} bytes",
        f"{messages.PROGRESS_SECONDS:g} seconds",
        f"{messages.SILENCE_SECONDS:g} seconds",
        f"{ANSWER_SECONDS:g} seconds",
    ):
        assert words in DOCUMENT, words


ASKED = """
import os, socket, sys
from monarchfs.control import peers
listener = socket.socket(socket.AF_UNIX)
os.umask(0o177)
listener.bind(sys.argv[1])
listener.listen(4)
print("ready", flush=True)
for _ in range(2):
    connection, _ = listener.accept()
    print(peers.peer_uid(connection), peers.may_ask(connection, os.geteuid()), flush=True)
"""


@requires_root
@pytest.mark.parametrize("namespace", [(), ("unshare", "--user", "--map-current-user")])
def test_root_may_ask_also_from_outside_of_a_user_namespace(namespace: tuple[str, ...]) -> None:
    """And a user may not who gets around the socket's mode, where users can be told apart."""
    probe = as_user(NOBODY, [*namespace, "true"])
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip(
            "needs user namespaces of ordinary users: sysctl user.max_user_namespaces, no chroot"
        )
    python = interpreter_for(NOBODY)
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        path = f"{directory}/socket"
        command = as_user(NOBODY, [*namespace, python, "-c", ASKED, path])
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        try:
            assert asked.stdout is not None
            assert asked.stdout.readline() == "ready\n"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                assert asked.stdout.readline().split()[1] == "True"
            os.chmod(path, 0o666)
            connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
            subprocess.run(as_user("daemon", [python, "-c", connect, path]), check=True, timeout=20)
            assert asked.stdout.readline().split()[1] == str(bool(namespace))
        finally:
            asked.kill()
            asked.communicate(timeout=10)


# Requests


def line(**request: Any) -> bytes:
    return json.dumps(request).encode()


@pytest.mark.parametrize(
    "content",
    [
        line(command="status"),
        line(command="umount", timeout=3),
        line(command="umount", timeout=0.5),
        line(command="pin", paths=["a/b", "", "\udcff", "x" * 255, "..a"]),
        line(command="new", paths=[], deep=True, count=5, name=None, share=0.5, more=["a"]),
    ],
)
def test_requests(content: bytes) -> None:
    assert messages.decode_request(content) == json.loads(content)


ODD_REQUESTS = [
    pytest.param(b"", id="empty"),
    pytest.param(b"status", id="a word"),
    pytest.param(b"[1]", id="a list"),
    pytest.param(b"null", id="null"),
    pytest.param(b"\xff\xfe\x00", id="bytes"),
    pytest.param(b"{}", id="no command"),
    pytest.param(b'{"command": null}', id="null command"),
    pytest.param(b'{"command": 5}', id="a number as command"),
    pytest.param(b'{"command": ["status"]}', id="a list as command"),
    pytest.param(b'{"command": "status"', id="half"),
    pytest.param(b'{"command": "status"} {"command": "status"}', id="two"),
    pytest.param(b"[" * 60_000, id="nested lists"),
    pytest.param(b'{"a":' * 12_000, id="nested objects"),
    pytest.param(b'{"command": "status", "a": ' + b"[" * 300 + b"]" * 300 + b"}", id="nested"),
    pytest.param(b'{"command": "status", "a": ' + b"9" * 5000 + b"}", id="5000 digits"),
    pytest.param(b'{"command": "umount", "timeout": ' + b"9" * 400 + b"}", id="400 digits"),
    pytest.param(b'{"command": "status", "a": {"b": 1}}', id="an object inside"),
    pytest.param(b'{"command": "umount", "timeout": "soon"}', id="timeout a word"),
    pytest.param(b'{"command": "umount", "timeout": NaN}', id="timeout NaN"),
    pytest.param(b'{"command": "umount", "timeout": Infinity}', id="timeout infinite"),
    pytest.param(b'{"command": "umount", "timeout": 1e999}', id="timeout overflowing"),
    pytest.param(b'{"command": "umount", "timeout": -1}', id="timeout negative"),
    pytest.param(b'{"command": "umount", "timeout": 0}', id="timeout 0"),
    pytest.param(b'{"command": "umount", "timeout": true}', id="timeout true"),
    pytest.param(b'{"command": "umount", "timeout": null}', id="timeout null"),
    pytest.param(b'{"command": "umount", "timeout": ["1"]}', id="timeout a list"),
    pytest.param(b'{"command": "pin", "paths": "a"}', id="paths a word"),
    pytest.param(b'{"command": "pin", "paths": 5}', id="paths a number"),
    pytest.param(b'{"command": "pin", "paths": null}', id="paths null"),
    pytest.param(b'{"command": "pin", "paths": [1]}', id="a path a number"),
    pytest.param(b'{"command": "pin", "paths": [["a"]]}', id="a path a list"),
    pytest.param(b'{"command": "pin", "paths": ["../.."]}', id="paths above"),
    pytest.param(b'{"command": "pin", "paths": ["a/../../b"]}', id="paths above later"),
    pytest.param(b'{"command": "pin", "paths": ["/etc"]}', id="absolute"),
    pytest.param(b'{"command": "pin", "paths": ["a\\u0000b"]}', id="NUL"),
    pytest.param(b'{"command": "pin", "paths": ["\\ud800"]}', id="half a surrogate pair"),
    pytest.param(line(command="pin", paths=["x" * 256]), id="a long name"),
    pytest.param(line(command="pin", paths=["x/" * 2049]), id="a long path"),
    pytest.param(b'{"command": "pin\\u0000", "paths": []}', id="NUL in the command"),
]


@pytest.mark.parametrize("content", ODD_REQUESTS)
def test_odd_requests(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w") as raised:
        messages.decode_request(content)
    assert "\n" not in str(raised.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["command", "paths", "timeout", "wait", "x"]), JSON_VALUES)
    | JSON_VALUES
)
def test_a_request_is_flat_or_refused(value: Any) -> None:
    request, refused = {}, ""
    try:
        request = messages.decode_request(json.dumps(value).encode())
    except ValueError as error:
        refused = str(error)
    assert len(refused.splitlines()) == (0 if request else 1)
    assert isinstance(request.get("command", ""), str)
    for field in request.values():
        for part in field if isinstance(field, list) else [field]:
            assert part is None or isinstance(part, (str, bool, int, float))
            assert not isinstance(part, str) or b"\0" not in os.fsencode(part)
    for path in request.get("paths", []):
        assert ".." not in path.split("/")
        assert not path.startswith("/")


@given(st.binary())
def test_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        messages.decode_request(content)


def test_what_is_checked_fits_into_a_message_to_the_worker() -> None:
    """Escaped it becomes longer; what is cut off would be no message."""
    longest = 0
    for piece in (b"1e15,", b"1e9,", "é".encode(), b"\x7f", b"true,", b"\\u00e9", b"\\udcff"):
        inside = piece * ((messages.MOST_REQUEST_BYTES - 40) // len(piece))
        text = b'["%s"]' % inside
        if piece.endswith(b","):
            text = b"[%s0]" % inside
        content = b'{"command":"x","a":%s}' % text
        assert len(content) <= messages.MOST_REQUEST_BYTES
        request = messages.decode_message(content)
        sent = channel.encode({"do": "client", "request": request})
        assert json.loads(sent)["request"] == request
        longest = max(longest, len(sent))
    assert longest <= min(channel.MESSAGE_BYTES, CHANNEL_BYTES)


# Reports, kept by the supervisor


class Told:
    """Reports, with what was asked of the worker and who was answered."""

    def __init__(self, *, hears: bool = True) -> None:
        self.hears = hears
        self.asked: list[int] = []
        self.answered: list[object] = []
        self.reports = Reports(self._ask, self.answered.append)
        self.clients = [socket.socket() for _ in range(3)]

    def _ask(self, number: int) -> bool:
        if self.hears:
            self.asked.append(number)
        return self.hears

    def close(self) -> None:
        for client in self.clients:
            client.close()


@pytest.fixture
def told() -> Iterator[Told]:
    one = Told()
    yield one
    one.close()


def test_a_report_is_passed_on(told: Told) -> None:
    told.reports.want(told.clients[0], 0.0)
    told.reports.want(told.clients[1], 0.1)
    assert told.answered == []
    told.reports.arrived(1, {"state": "first"}, 0.2)
    assert told.answered == told.clients[:1], "the second asked later, and wants to see more"
    told.reports.arrived(2, {"state": "second"}, 0.3)
    assert told.answered == told.clients[:2]
    assert told.reports.latest == {"state": "second"}
    assert told.reports.came == 0.3


def test_a_later_report_answers_all(told: Told) -> None:
    for client in told.clients:
        told.reports.want(client, 0.0)
    told.reports.arrived(3, {}, 0.1)
    assert told.answered == told.clients
    assert not told.reports.overdue(100)


def test_a_worker_that_does_not_answer_is_waited_for_once(told: Told) -> None:
    told.reports.want(told.clients[0], 0.0)
    assert told.reports.deadlines == [ANSWER_SECONDS]
    told.reports.tick(ANSWER_SECONDS - 0.1)
    assert told.answered == []
    told.reports.tick(ANSWER_SECONDS)
    assert told.answered == told.clients[:1]
    assert told.reports.overdue(ANSWER_SECONDS)
    told.reports.want(told.clients[1], ANSWER_SECONDS + 1)
    assert told.answered == told.clients[:2], "at once"
    assert told.asked == [1], "it has enough to answer"
    told.reports.arrived(1, {}, 10.0)
    assert not told.reports.overdue(10.0)
    told.reports.want(told.clients[2], 10.0)
    assert told.asked == [1, 2]


def test_a_report_is_asked_for_now_and_then(told: Told) -> None:
    told.reports.tick(0.0)
    told.reports.tick(100.0)
    assert told.asked == [1], "not again before it answers"
    told.reports.arrived(1, {}, 100.0)
    told.reports.tick(101.0)
    assert told.asked == [1, 2]
    told.reports.arrived(2, {}, 101.0)
    told.reports.tick(102.0)
    assert told.asked == [1, 2]


def test_a_worker_that_hears_nothing() -> None:
    told = Told(hears=False)
    told.reports.want(told.clients[0], 0.0)
    assert told.answered == told.clients[:1]
    assert told.reports.overdue(ANSWER_SECONDS)
    told.close()


def test_without_a_worker_nobody_waits(told: Told) -> None:
    told.reports.want(told.clients[0], 0.0)
    told.reports.give_up()
    assert told.answered == told.clients[:1]
    assert told.reports.deadlines == []


# A supervisor with a fake worker


def registered(path: Path) -> registration.Registered:
    (found,) = [
        one
        for one in registration.find_mounts(["/run/monarchfs"])
        if one.entry.mountpoint.startswith(f"{path}/")
    ]
    return found


def ask(path: str, content: bytes, seconds: float = 10) -> bytes:
    """All that comes back on one connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(seconds)
        client.connect(path)
        with suppress(BrokenPipeError, ConnectionResetError):  # it has heard enough
            client.sendall(content)
        answer = bytearray()
        with suppress(ConnectionResetError):
            while part := client.recv(1 << 16):
                answer += part
        return bytes(answer)


def connect(client: socket.socket, path: str) -> None:
    """With a time limit, a connection fails at once where too many wait already."""
    wait_for(lambda: client.connect_ex(path) == 0, "a place in the backlog")


def assert_refused(answer: bytes) -> str:
    assert answer.count(b"\n") == 1
    reply = json.loads(answer)
    assert reply["ok"] is False
    assert reply["error"]
    assert "\n" not in reply["error"]
    return str(reply["error"])


def report_of(work: Area) -> dict[str, Any]:
    done = work.run("status", "mnt", "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@requires_root
@requires_fuse
def test_odd_requests_get_one_line_and_nothing_breaks(root_work: Area) -> None:
    root_work.mount()
    found = registered(root_work.path)
    before = report_of(root_work)["worker"]["pid"]
    for parameter in ODD_REQUESTS:
        (content,) = parameter.values
        assert isinstance(content, bytes)
        assert "not valid" in assert_refused(ask(found.socket_path, content + b"\n"))
    for content in (b"x" * (70 << 10), b"x" * (70 << 10) + b"\n", b"\0" * (1 << 20)):
        assert "too long" in assert_refused(ask(found.socket_path, content))
    after = report_of(root_work)
    assert (after["state"], after["worker"]["pid"]) == ("serving", before)
    assert root_work.run("umount", "mnt").returncode == 0


@requires_root
@requires_fuse
def test_slow_and_silent_clients_keep_nobody_out(root_work: Area) -> None:
    root_work.mount()
    path = registered(root_work.path).socket_path
    with ExitStack() as stack:
        idle = []
        for _ in range(200):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.settimeout(10)
            connect(client, path)
            client.sendall(b'{"comm')
            idle.append(client)
        started = Stopwatch()
        assert report_of(root_work)["state"] == "serving"
        started.check(3)
        assert_refused(idle[0].recv(1 << 16))
        assert "in time" in assert_refused(idle[-1].recv(1 << 16))
        slow = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        slow.settimeout(10)
        slow.connect(path)
        for byte in b'{"command": "status"}\n':
            slow.send(bytes([byte]))
        assert json.loads(slow.recv(1 << 16))["ok"] is True
    assert root_work.run("umount", "mnt").returncode == 0


@requires_root
@requires_fuse
def test_two_hundred_at_once_are_all_answered(root_work: Area) -> None:
    root_work.mount()
    found = registered(root_work.path)
    results: list[str] = []

    def one() -> None:
        results.append(control_client.request(found, {"command": "status"}, 20)["state"])

    threads = [threading.Thread(target=one) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["serving"] * 200
    # Those who leave without waiting for their answer are no trouble either.
    for _ in range(200):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(10)
            connect(client, found.socket_path)
            client.sendall(b'{"command": "status"}\n')
    assert report_of(root_work)["state"] == "serving"
    assert root_work.run("umount", "mnt").returncode == 0


@requires_root
@requires_fuse
def test_only_the_owner_and_root_may_ask(root_work: Area) -> None:
    python = interpreter_for(NOBODY)
    root_work.mount()
    path = registered(root_work.path).socket_path
    assert os.stat(path).st_mode & 0o777 == 0o600
    script = (
        "import socket, sys\n"
        "client = socket.socket(socket.AF_UNIX)\n"
        "client.settimeout(10)\n"
        "client.connect(sys.argv[1])\n"
        "try:\n"
        "    client.sendall(sys.argv[2].encode())\n"
        "except BrokenPipeError:\n"
        "    pass\n"
        "sys.stdout.write(client.recv(65536).decode())\n"
    )

    def as_nobody(request: str) -> subprocess.CompletedProcess[str]:
        command = as_user(NOBODY, [python, "-I", "-c", script, path, request])
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)

    requests = ['{"command": "status"}\n', '{"command": "umount", "timeout": 1}\n', ""]
    assert "PermissionError" in as_nobody(requests[0]).stderr
    os.chmod(path, 0o666)  # as if its mode protected nothing
    for request in requests:
        assert "belongs to another user" in assert_refused(as_nobody(request).stdout.encode())
    assert report_of(root_work)["state"] == "serving"
    assert root_work.run("umount", "mnt").returncode == 0


def test_only_the_supervisors_user_may_stand_by(work: Bench) -> None:
    """The user of a mount that root made may ask for much, but does not get its descriptors."""
    interpreter_for(NOBODY)
    work.path.chmod(0o755)
    (work.path / "source").mkdir()
    work.mount(work.path / "source", "--user", "nobody")
    path = registered(work.path).socket_path
    script = (
        "import socket, sys\n"
        "client = socket.socket(socket.AF_UNIX)\n"
        "client.settimeout(10)\n"
        "client.connect(sys.argv[1])\n"
        'client.sendall(b\'{"command": "stand_by"}\\n\')\n'
        "line, fds, _, _ = socket.recv_fds(client, 65536, 64)\n"
        "print(len(fds), line.decode())\n"
    )
    command = as_user(NOBODY, [interpreter_for(NOBODY), "-I", "-c", script, path])
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.startswith("0 "), done.stderr
    assert "cannot be handed over" in done.stdout


@requires_root
@requires_fuse
def test_root_may_ask_a_users_mount(root_work: Area) -> None:
    os.chown(root_work.path / "mnt", *owner_of(NOBODY))
    root_work.mount("--user", NOBODY)
    path = registered(root_work.path).socket_path
    assert (os.stat(path).st_uid, os.stat(path).st_mode & 0o777) == (owner_of(NOBODY)[0], 0o600)
    assert report_of(root_work)["state"] == "serving"
    assert json.loads(ask(path, b'{"command": "status"}\n'))["ok"] is True
    assert root_work.run("umount", "mnt").returncode == 0


def owner_of(user: str) -> tuple[int, int]:
    import pwd

    entry = pwd.getpwnam(user)
    return entry.pw_uid, entry.pw_gid


@requires_root
@requires_fuse
def test_a_worker_that_hangs_is_reported_in_time(root_work: Area) -> None:
    root_work.mount(mode="patient")
    worker = report_of(root_work)["worker"]["pid"]
    os.kill(worker, signal.SIGSTOP)
    for _ in range(3):
        started = Stopwatch()
        done = root_work.run("status", "mnt", "--json")
        report = json.loads(done.stdout)
        started.check(ANSWER_SECONDS + 2)
        assert done.returncode == 1
        assert report["state"] == "worker not answering"
        assert report["worker"]["pid"] == worker
        assert report["age_seconds"] > 1
        assert report["uptime_seconds"] >= report["age_seconds"]
    started = Stopwatch()
    done = root_work.run("refresh", "mnt")
    started.check(2)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "worker does not answer" in done.stderr
    os.kill(worker, signal.SIGCONT)
    wait_for(lambda: report_of(root_work)["state"] == "serving", "the worker to answer again")
    assert report_of(root_work)["age_seconds"] < 1
    assert root_work.run("refresh", "mnt").returncode == 0
    assert root_work.run("umount", "mnt").returncode == 0


@requires_root
@requires_fuse
def test_a_worker_that_hangs_stops_nobody_from_unmounting(root_work: Area) -> None:
    root_work.mount()
    os.kill(report_of(root_work)["worker"]["pid"], signal.SIGSTOP)
    started = Stopwatch()
    assert root_work.run("umount", "mnt", "--timeout", "6").returncode == 0
    started.check(8)


@requires_root
@requires_fuse
def test_a_dead_worker_is_reported_while_another_one_starts(root_work: Area) -> None:
    root_work.mount(mode="silent-later")
    found = registered(root_work.path)
    before = report_of(root_work)["worker"]["pid"]
    os.kill(before, signal.SIGKILL)

    def seen() -> dict[str, Any] | None:
        report = control_client.request(found, {"command": "status"}, 5)
        return report if report["state"] == "restarting" else None

    report = wait_for(seen, "the worker's end to be noticed")
    worker = report["worker"]
    assert worker["pid"] not in (None, before)
    assert (worker["restarts"], worker["error"]) == (1, "the worker was killed by signal 9")
    assert worker["last_death"]["why"] == worker["error"]
    assert report["environment"], "what it said last is still told"
    with pytest.raises(OperationError, match="does not answer"):
        control_client.request(found, {"command": "pin", "paths": ["a"]}, 5)
    assert root_work.run("umount", "mnt", "--timeout", "3").returncode == 0


@requires_root
@requires_fuse
def test_a_supervisor_that_hangs_keeps_no_command_for_ever(root_work: Area) -> None:
    root_work.mount()
    supervisor = registered(root_work.path).entry.supervisor_pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        started = Stopwatch()
        done = root_work.run("status", "mnt", "--json")
        assert started.elapsed() > 4
        started.check(9)
        assert done.returncode == 1
        report = json.loads(done.stdout)
        assert report["state"] == "silent"
        assert "within 5 s" in report["error"]
        assert "monarchfs umount" in report["error"]
        started = Stopwatch()
        done = root_work.run("status", "--json")
        started.check(9)
        states = {one["mountpoint"]: one["state"] for one in json.loads(done.stdout)["mounts"]}
        assert states[f"{root_work.path}/mnt"] == "silent"
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert report_of(root_work)["state"] == "serving"
    assert root_work.run("umount", "mnt").returncode == 0


# Real workers


@requires_root
@requires_fuse
@pytest.mark.parametrize(
    "request_",
    [
        {"command": "pin"},
        {"command": "refresh", "paths": ["nosuch"]},
        {"command": "evict", "paths": ["nosuch/below"]},
        {"command": "unpin", "paths": ["file/below"]},
        {"command": "nosuch", "paths": []},
        {"command": "", "paths": ["x" * 255]},
        {"command": "__init__"},
        {"command": "serve"},
    ],
    ids=str,
)
def test_a_worker_refuses_in_one_line(mounted: tuple[Mount, str], request_: dict[str, Any]) -> None:
    _mount, path = mounted
    assert_refused(ask(path, json.dumps(request_).encode() + b"\n"))


@pytest.fixture(scope="module")
def mounted() -> Iterator[tuple[Mount, str]]:
    """One mount for those who only try to break it: it must be the same afterwards."""
    from tests.support.mounting import bench

    with bench() as work:
        source = work.path / "source"
        source.mkdir()
        (source / "file").write_bytes(b"content")
        mount = work.mount(source)
        worker = mount.worker_pid()
        yield mount, registered(work.path).socket_path
        assert mount.worker_pid() == worker
        assert subprocess.check_output(["cat", f"{mount.path}/file"], timeout=10) == b"content"


@requires_root
@requires_fuse
def test_a_large_request_reaches_the_worker(mounted: tuple[Mount, str]) -> None:
    _mount, path = mounted
    paths = ["é" * 120 for _ in range(260)]
    content = json.dumps({"command": "pin", "paths": paths}, ensure_ascii=False).encode()
    assert 60_000 < len(content) < messages.MOST_REQUEST_BYTES
    assert "no such file" in assert_refused(ask(path, content + b"\n"))


@requires_root
@requires_fuse
def test_pins_hold_what_is_found_later_and_say_so(
    work: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = work.path / "source" / "dir" / "inner"
    inner.mkdir(parents=True)
    for path in (inner / "a", inner.parent / "b"):
        path.write_bytes(b"content")
    mount = work.mount(work.path / "source", "--prefetch", "none")

    def said(command: str, *paths: str) -> str:
        assert main([command, str(mount.path), *paths]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    unseen = " so far, and what else lies there: 1 directory not listed yet"
    assert said("pin", "dir") == f"pinned 0 files, 0 bytes{unseen}"
    os.listdir(mount.path / "dir")
    more = unseen.replace("1 directory not listed", "2 names not looked at")
    assert said("pin", "dir") == f"pinned 0 files, 0 bytes{more}"
    said("warm", "--wait")
    assert said("pin", "dir") == "pinned 2 files, 14 bytes"
    assert said("pin", "dir/inner/a") == "pinned 1 file, 7 bytes"
    both = "evicted 0 files, 0 bytes, kept 2 that are open or pinned"
    assert said("evict", "dir") == both
    above = "kept 1 that are below another pinned directory"
    assert said("unpin", "dir/inner") == f"unpinned 0 files, 0 bytes, {above}"
    assert said("evict", "dir") == both
    assert said("pin", "dir/inner/a") == "pinned 1 file, 7 bytes"
    assert said("unpin", ".") == "unpinned 2 files, 14 bytes"
    assert said("unpin", ".") == "unpinned 0 files, 0 bytes"
    assert said("evict") == "evicted 2 files, 14 bytes"


@requires_root
@requires_fuse
def test_a_command_with_a_mistake_in_it_costs_only_itself(work: Bench) -> None:
    """Whatever a command runs into, the mount goes on."""
    source = work.path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"content")
    mount = work.mount(source)
    worker = mount.worker_pid()
    # A request that is checked less strictly than today: straight into the worker's hands.
    code = (
        "import trio\n"
        "from monarchfs.worker.commands import answer_client\n"
        "class Broken:\n"
        "    def knows(self, command): return True\n"
        "    async def answer(self, request, stream): raise KeyError(request['command'])\n"
        "import socket\n"
        "ours, theirs = socket.socketpair()\n"
        "trio.run(answer_client, Broken(), {'command': 'x'}, theirs.detach())\n"
        "print(ours.recv(4096).decode(), end='')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=30, cwd=REPOSITORY, check=True
    )
    assert "unexpectedly" in assert_refused(done.stdout)
    assert b"KeyError" in done.stderr
    assert mount.worker_pid() == worker


# A client and a daemon that is not what it should be


class Evil(Listener):
    """Listens in a runtime directory of its own, and does to each connection what it is told."""

    def __init__(self, place: Path, serve: Serve) -> None:
        self.registered = registration.Registered(
            str(place / "evil"),
            os.geteuid(),
            registration.Registration("/mnt", 0, "/src", 0, os.getpid(), 0, "/state", 0),
        )
        self._misbehave = serve
        super().__init__(self.registered.socket_path, self._until_it_breaks)

    def _until_it_breaks(self, connection: socket.socket) -> None:
        with suppress(OSError):
            self._misbehave(connection)


def drip(connection: socket.socket) -> None:
    """A byte now and then keeps no deadline from coming."""
    while True:
        connection.send(b" ")
        time.sleep(0.05)


def pour(connection: socket.socket) -> None:
    while True:
        connection.send(b"x" * (1 << 20))


def wait_for_the_end(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


EVIL_REPLIES = {
    "nothing": wait_for_the_end,
    "drip": drip,
    "pour": pour,
    "closed": lambda connection: None,
    "junk": lambda connection: connection.sendall(b"junk\n"),
    "half": lambda connection: connection.sendall(b'{"ok": true'),
    "nested": lambda connection: connection.sendall(b"[" * 100_000 + b"\n"),
    "a list": lambda connection: connection.sendall(b"[]\n"),
    "no result": lambda connection: connection.sendall(b'{"ok": true}\n'),
    "odd ok": lambda connection: connection.sendall(b'{"ok": 1, "result": {}}\n'),
    "bytes": lambda connection: connection.sendall(b"\xff\x00\n"),
}


@pytest.mark.parametrize("name", EVIL_REPLIES)
def test_a_client_survives_any_daemon(tmp_path: Path, name: str) -> None:
    evil = Evil(tmp_path, EVIL_REPLIES[name])
    try:
        started = Stopwatch()
        with pytest.raises(OperationError):
            control_client.request(evil.registered, {"command": "status"}, 1)
        started.check(3)
    finally:
        evil.close()


@requires_root
def test_root_does_not_believe_another_user(tmp_path: Path) -> None:
    """A user's socket where root's should be."""
    place = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    place.chmod(0o777)
    python = interpreter_for(NOBODY)
    script = (
        "import socket, sys\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind(sys.argv[1])\n"
        "listener.listen(1)\n"
        "print('listening', flush=True)\n"
        "connection = listener.accept()[0]\n"
        "connection.recv(65536)\n"
        'connection.sendall(b\'{"ok": true, "result": {}}\\n\')\n'
    )
    command = as_user(NOBODY, [python, "-I", "-c", script, str(place / "evil.sock")])
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            entry = registration.Registration("/mnt", 0, "/src", 0, os.getpid(), 0, "/state", 0)
            with pytest.raises(OperationError, match="somebody else"):
                control_client.request(
                    registration.Registered(str(place / "evil"), 0, entry), {"command": "status"}, 5
                )
            process.kill()
    finally:
        shutil.rmtree(place)


def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(path))
        listener.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        waiting.connect(str(path))
        started = Stopwatch()
        with pytest.raises(OperationError, match="does not answer"):
            control_client.Connection(str(path), 0.3)
        assert started.elapsed() > 0.2
        started.check(2)
        threading.Timer(0.2, lambda: listener.accept()[0].close()).start()
        with control_client.Connection(str(path), 10):
            pass


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.symlink_to("loop.sock"),
        lambda path: os.mkfifo(path),
    ],
    ids=["nothing", "a directory", "a file", "a broken link", "a FIFO"],
)
def test_what_is_no_socket(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.sock")
    with pytest.raises(OperationError, match="does not answer"):
        control_client.Connection(str(tmp_path / "x.sock"), 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        b"[" * 60_000,
        b"{}",
        b'{"mountpoint": 5}',
        json.dumps(dict.fromkeys(registration.Registration.__slots__, None)).encode(),
        b"\0" * (1 << 20),
    ],
    ids=["empty", "junk", "nested", "no fields", "wrong type", "nulls", "huge"],
)
def test_odd_registrations_are_passed_over(tmp_path: Path, content: bytes) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    (runtime / "a.json").write_bytes(content)
    os.mkfifo(runtime / "b.json")
    (runtime / "c.json").mkdir()
    (runtime / "d.json").symlink_to("/etc/passwd")
    (runtime / "e.json").symlink_to("e.json")
    entry = registration.Registration("/mnt", 0, "/src", os.geteuid(), os.getpid(), 0, "/state", 0)
    (runtime / "good.json").write_text(entry.to_json())
    assert [one.entry for one in registration.find_mounts([str(runtime)])] == [entry]
    runtime.chmod(0o777)
    assert registration.find_mounts([str(runtime)]) == []
