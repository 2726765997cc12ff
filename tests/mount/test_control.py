"""The control socket: who may ask, what is refused, what hangs, and what is written about it."""

import json
import os
import pwd
import re
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.cli.main import main
from monarchfs.control import client as control_client
from monarchfs.control import messages, registration
from monarchfs.supervisor import channel, supervise
from monarchfs.supervisor.reports import ANSWER_SECONDS
from monarchfs.types import OperationError
from monarchfs.worker import commands
from monarchfs.worker.bootstrap import CHANNEL_BYTES
from tests.support import mounting
from tests.support.fake_daemon import Daemon, Serve
from tests.support.fake_mounts import NOBODY, Area, interpreter_for, registered, status
from tests.support.programs import Running, execute
from tests.support.timing import Stopwatch
from tests.support.trees import write_files
from tests.unit.test_messages import VALUES

DOCUMENT = (mounting.REPOSITORY / "docs" / "CONTROL.md").read_text()


def test_the_document_has_every_command_and_the_limits() -> None:
    documented = re.findall(r"^### `(\w+)`$", DOCUMENT, re.MULTILINE)
    assert sorted(documented) == sorted({*supervise.COMMANDS, *commands.COMMANDS})
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
print(peers.may_ask(listener.accept()[0], os.geteuid()), flush=True)
"""


@mounting.requires_root
def test_root_may_ask_also_from_outside_of_a_user_namespace(place: Path) -> None:
    """There, users cannot be told apart."""
    namespace = ("unshare", "--user", "--map-current-user")
    probe = mounting.as_user(NOBODY, [*namespace, "true"])
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip(
            "needs user namespaces of ordinary users: sysctl user.max_user_namespaces, no chroot"
        )
    python = interpreter_for(NOBODY)
    place.chmod(0o777)
    path = f"{place}/socket"
    command = mounting.as_user(NOBODY, [*namespace, python, "-c", ASKED, path])
    with Running(command, cwd=mounting.REPOSITORY) as asked:
        try:
            assert asked.line() == "ready\n"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                assert asked.line() == "True\n"
        finally:
            asked.kill()


ODD_REQUESTS = [
    *(b"", b"status", b"[1]", b"null", b"\xff\xfe\x00", b"{}", b'{"command": "status"'),
    *(b'{"command": null}', b'{"command": ["status"]}', b'{"command": "pin\\u0000", "paths": []}'),
    b'{"command": "status"} {"command": "status"}',
    *(b"[" * 60_000, b'{"a":' * 12_000),
    b'{"command": "status", "a": ' + b"[" * 300 + b"]" * 300 + b"}",
    b'{"command": "status", "a": ' + b"9" * 5000 + b"}",
    b'{"command": "status", "a": {"b": 1}}',
    *(
        b'{"command": "umount", "timeout": %s}' % timeout
        for timeout in (b'"soon"', b"NaN", b"1e999", b"-1", b"0", b"true", b"null", b"9" * 400)
    ),
    *(
        b'{"command": "pin", "paths": %s}' % paths
        for paths in (b'"a"', b"5", b"null", b"[1]", b'[["a"]]', b'["../.."]', b'["a/../../b"]')
    ),
    *(
        b'{"command": "pin", "paths": ["%s"]}' % path
        for path in (b"/etc", b"a\\u0000b", b"\\ud800", b"x" * 256, b"x/" * 2049)
    ),
]


@pytest.mark.parametrize("content", ODD_REQUESTS, ids=lambda content: str(content[:40]))
def test_odd_requests_are_refused(content: bytes) -> None:
    """In one line (tests/hostile/test_socket.py), and nothing breaks."""
    with pytest.raises(ValueError, match=r"\w"):
        messages.decode_request(content)


JSON_VALUES = VALUES | st.text()


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


def assert_refused(answer: bytes) -> str:
    assert answer.count(b"\n") == 1
    reply = json.loads(answer)
    assert reply["ok"] is False
    assert reply["error"]
    assert "\n" not in reply["error"]
    return str(reply["error"])


@mounting.needs_mounts
def test_slow_and_silent_clients_and_a_supervisor_that_hangs(root_work: Area) -> None:
    root_work.mount()
    path = registered(root_work).socket_path
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(200)]
        for client in idle:
            client.settimeout(10)
            # With a time limit, it fails at once where too many wait already.
            mounting.wait_for(lambda: client.connect_ex(path) == 0, "a place in the backlog")  # noqa: B023
            client.sendall(b'{"comm')
        started = Stopwatch()
        assert status(root_work)["state"] == "serving"
        started.check(3)
        assert_refused(idle[0].recv(1 << 16))
        assert "in time" in assert_refused(idle[-1].recv(1 << 16))
        slow = stack.enter_context(socket.socket(socket.AF_UNIX))
        slow.settimeout(10)
        slow.connect(path)
        for byte in b'{"command": "status"}\n':
            slow.send(bytes([byte]))
        assert json.loads(slow.recv(1 << 16))["ok"] is True
    # A supervisor that hangs keeps no command for ever.
    supervisor = registered(root_work).entry.supervisor_pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        started = Stopwatch()
        done = root_work.run("status", "mnt", "--json")
        assert started.elapsed() > 4
        started.check(9)
        report = json.loads(done.stdout)
        assert (done.returncode, report["state"]) == (1, "silent")
        assert "within 5 s" in report["error"]
        assert "monarchfs umount" in report["error"]
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert status(root_work)["state"] == "serving"


ASKING = """
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.settimeout(10)
client.connect(sys.argv[1])
try:
    client.sendall(sys.argv[2].encode())
except BrokenPipeError:
    pass
line, fds, _, _ = socket.recv_fds(client, 65536, 64)
assert not fds
sys.stdout.write(line.decode())
"""


def as_nobody(path: str, request: str) -> subprocess.CompletedProcess[str]:
    return execute(
        mounting.as_user(NOBODY, [interpreter_for(NOBODY), "-I", "-c", ASKING, path, request])
    )


@mounting.needs_mounts
def test_only_the_owner_and_root_may_ask(root_work: Area) -> None:
    root_work.mount()
    path = registered(root_work).socket_path
    assert os.stat(path).st_mode & 0o777 == 0o600
    requests = ['{"command": "status"}\n', '{"command": "umount", "timeout": 1}\n', ""]
    assert "PermissionError" in as_nobody(path, requests[0]).stderr
    os.chmod(path, 0o666)  # as if its mode protected nothing
    for request in requests:
        refusal = assert_refused(as_nobody(path, request).stdout.encode())
        assert "belongs to another user" in refusal
    assert status(root_work)["state"] == "serving"


@mounting.needs_mounts
def test_only_the_supervisors_user_may_stand_by(root_work: Area) -> None:
    """The user of a mount that root made may ask for much, as root may, but does not get its
    descriptors."""
    user = pwd.getpwnam(NOBODY)
    os.chown(root_work.path / "mnt", user.pw_uid, user.pw_gid)
    root_work.mount("--user", NOBODY)
    path = registered(root_work).socket_path
    assert (os.stat(path).st_uid, os.stat(path).st_mode & 0o777) == (user.pw_uid, 0o600)
    assert status(root_work)["state"] == "serving"
    assert json.loads(as_nobody(path, '{"command": "status"}\n').stdout)["ok"] is True
    refused = as_nobody(path, '{"command": "stand_by"}\n')
    assert "cannot be handed over" in assert_refused(refused.stdout.encode())


@mounting.needs_mounts
def test_a_worker_that_hangs_is_reported_in_time(root_work: Area) -> None:
    root_work.mount(mode="patient")
    worker = status(root_work)["worker"]["pid"]
    os.kill(worker, signal.SIGSTOP)
    for seconds in (ANSWER_SECONDS + 2, ANSWER_SECONDS):  # it is waited for once
        started = Stopwatch()
        done = root_work.run("status", "mnt", "--json")
        report = json.loads(done.stdout)
        started.check(seconds)
        assert (done.returncode, report["state"]) == (1, "worker not answering")
        assert report["worker"]["pid"] == worker
        assert report["uptime_seconds"] >= report["age_seconds"] > 1
    started = Stopwatch()
    mounting.assert_one_line(root_work.run("refresh", "mnt"), 1, "worker does not answer")
    started.check(2)
    os.kill(worker, signal.SIGCONT)
    mounting.wait_for(lambda: status(root_work)["state"] == "serving", "the worker to answer again")
    assert status(root_work)["age_seconds"] < 1
    assert root_work.run("refresh", "mnt").returncode == 0
    # And it stops nobody from unmounting.
    os.kill(worker, signal.SIGSTOP)
    started = Stopwatch()
    assert root_work.run("umount", "mnt", "--timeout", "6").returncode == 0
    started.check(8)


@mounting.needs_mounts
def test_pins_hold_what_is_found_later(
    work: mounting.Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"dir/inner/a": b"content", "dir/b": b"content"}
    mount = work.mount(write_files(work.path / "source", files), "--prefetch", "none")

    def said(command: str, *paths: str) -> str:
        assert main([command, str(mount.path), *paths]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    unseen = "pinned 0 files, 0 bytes so far, and what else lies there: "
    assert said("pin", "dir") == f"{unseen}1 directory not listed yet"
    os.listdir(mount.path / "dir")
    assert said("pin", "dir") == f"{unseen}2 names not looked at yet"
    said("warm", "--wait")
    assert said("pin", "dir") == "pinned 2 files, 14 bytes"
    both = "evicted 0 files, 0 bytes, kept 2 that are open or pinned"
    assert said("evict", "dir") == both
    above = "kept 1 that are below another pinned directory"
    assert said("unpin", "dir/inner") == f"unpinned 0 files, 0 bytes, {above}"
    assert said("evict", "dir") == both
    assert said("pin", "dir/inner/a") == "pinned 1 file, 7 bytes"
    assert said("unpin", ".") == "unpinned 2 files, 14 bytes"
    assert said("unpin", ".") == "unpinned 0 files, 0 bytes"
    assert said("evict") == "evicted 2 files, 14 bytes"


def test_a_command_with_a_mistake_in_it_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a command runs into, the worker goes on."""
    answer = AsyncMock(side_effect=KeyError("x"))
    broken: Any = SimpleNamespace(answer=answer)
    ours, theirs = socket.socketpair()
    with ours:
        trio.run(commands.answer_client, broken, {"command": "pin"}, theirs.detach())
        assert "unexpectedly" in assert_refused(ours.recv(4096))
    assert "KeyError" in caplog.text


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


EVIL_REPLIES: dict[str, Serve] = {
    "nothing": wait_for_the_end,
    "drip": drip,
    "pour": pour,
    **{
        name: methodcaller("sendall", reply)
        for name, reply in {
            "closed": b"",
            "progress": b'{"progress": {"checked": 1}}\n',
            "odd progress": b'{"progress": 5}\n',
            "junk": b"junk\n",
            "half": b'{"ok": true',
            "nested": b"[" * 100_000 + b"\n",
            "a list": b"[]\n",
            "no result": b'{"ok": true}\n',
            "odd ok": b'{"ok": 1, "result": {}}\n',
            "bytes": b"\xff\x00\n",
        }.items()
    },
}


@pytest.mark.parametrize("name", EVIL_REPLIES)
def test_a_client_survives_any_daemon(place: Path, name: str) -> None:
    def serve(connection: socket.socket) -> None:
        with suppress(OSError):
            EVIL_REPLIES[name](connection)

    place.chmod(0o755)
    evil = Daemon(place, serve)
    try:
        (found,) = registration.find_mounts([str(place)])
        started = Stopwatch()
        with pytest.raises(OperationError, match=r"\w"):
            control_client.request(found, {"command": "status"}, 0.3)
        with control_client.connect(found, 5) as connection, pytest.raises(OperationError):
            connection.request({"command": "refresh"}, 0.3, progress=lambda _: None)
        started.check(3)
    finally:
        evil.close()


def test_a_full_backlog_and_what_is_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        started = Stopwatch()
        with pytest.raises(OperationError, match="does not answer"):
            control_client.Connection(str(path), 0.3)
        assert started.elapsed() > 0.2
        started.check(2)
        threading.Timer(0.2, lambda: listener.accept()[0].close()).start()
        with control_client.Connection(str(path), 10):
            pass
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "broken link").symlink_to("loop.sock")
    os.mkfifo(tmp_path / "FIFO")
    for name in ("nothing", "directory", "file", "broken link", "FIFO"):
        with pytest.raises(OperationError, match="does not answer"):
            control_client.Connection(f"{tmp_path}/{name}", 1)
