"""What a worker that was taken over may say to its supervisor: nobody waits, the log is readable.

What it may have the kernel read is in tests/mount/test_backing.py.
"""

import base64
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from monarchfs.control import client
from tests.support import fake_mounts
from tests.support.fake_mounts import status
from tests.support.mounting import Bench, as_user, fuse_mounts, requires_mounts, wait_for
from tests.unit.test_messages import MESSAGES
from tests.unit.test_messages import VALUES as SOME_VALUES

pytestmark = requires_mounts

ANSWER_SECONDS = 5.0


class Mad:
    def __init__(self, work: fake_mounts.Area) -> None:
        self.work = work
        self.found = fake_mounts.registered(work)
        self.supervisor = self.found.entry.supervisor_pid
        self.worker = self.status()["worker"]["pid"]

    def ask(self, command: str, content: bytes = b"", **more: object) -> dict[str, Any]:
        message = {"command": command, "content": base64.b64encode(content).decode(), **more}
        return client.request(self.found, message, ANSWER_SECONDS)

    def status(self) -> dict[str, Any]:
        return client.request(self.found, {"command": "status"}, ANSWER_SECONDS)

    def log(self) -> bytes:
        return (self.work.path / "state" / "supervisor.log").read_bytes()


@pytest.fixture(scope="module")
def mad() -> Iterator[Mad]:
    with (
        tempfile.TemporaryDirectory(prefix="monarchfs-test-") as path,
        fake_mounts.area(Path(path), None) as work,
    ):
        work.mount(mode="mad")
        yield Mad(work)
        fake_mounts.umount(work)
        fake_mounts.assert_unmounted(work)


def test_how_many_lines_were_left_out_is_said(mad: Mad) -> None:
    """It comes first: of the others, lines are left out as well."""
    before = len(mad.log())
    mad.ask("say", b'{"event": "failed", "error": "again"}', times=3000)

    def counted() -> bool:
        lines = mad.log()[before:].decode().splitlines()
        said = sum(line.endswith("worker: again") for line in lines)
        more = [int(line.split()[3]) for line in lines if "more lines about workers" in line]
        # Also another line about it may have been left out.
        return said < 100 and 3000 <= said + sum(more) <= 3005

    wait_for(counted, "the lines that were left out to be counted")


FORGED = "gone\n2026-01-01 00:00:00,000 INFO forged\r\x1b[2J\u202e\udcff" + "x" * 30_000


WORDS_FOR_THE_LOG = {
    "words": json.dumps({"event": "failed", "error": FORGED}).encode(),
    "no words": json.dumps({"event": "failed", "error": [FORGED]}).encode(),
    "no event": json.dumps({FORGED: 1}).encode(),
    "no text": b"\xff" * 40_000,
    "deep": b"[" * 40_000,
}


@pytest.mark.parametrize("kind", WORDS_FOR_THE_LOG)
def test_its_words_neither_forge_nor_fill_the_log(mad: Mad, kind: str) -> None:
    before, dropped = len(mad.log()), not_understood(mad)
    mad.ask("say", WORDS_FOR_THE_LOG[kind], times=2000)
    if kind != "words":
        wait_for(lambda: not_understood(mad) == dropped + 2000, "all of it to be read")
    check(mad)
    came = mad.log()[before:]
    assert len(came) < 40_000
    lines = came.decode("ascii").splitlines()  # nothing else than ASCII, here
    assert all(line.isprintable() and len(line) < 2000 for line in lines)
    assert not any(line.startswith("2026-01-01 00:00:00,000") for line in lines)


def not_understood(mad: Mad) -> int:
    return int(mad.status()["worker"]["not_understood"])


VALUES = st.recursive(
    SOME_VALUES
    | st.integers(-(10**400), 10**400)
    | st.sampled_from(["\0", "\udcff", "\ud800\udc00", "ready", "loaded", "status", "back"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KEYS = ["state", "worker", "passthrough", "files", "tiers", "served", "source", "age_seconds"]
STATUSES = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), VALUES, max_size=4) | VALUES
WORDS = (
    MESSAGES
    | st.binary(max_size=100)
    | st.integers(1, 2000).map(lambda depth: b"[" * depth + b"]" * depth)
    | st.integers(1, 4000).map(lambda size: b'{"event": "failed", "error": "' + b"x" * size + b'"}')
    | st.sampled_from([b"NaN", b'{"event":1e999}', b"1" * 9000, b"\xff\xfe{\0}\0", b'"\\ud800"'])
)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(WORDS, st.integers(0, 40)), max_size=5))
@example([(b'{"event": "status", "number": 1, "status": {"worker": [1]}}', 0)])
@example([(b'{"event": "back", "number": 1, "files": [[0, "a", 1]]}', 33)])
def test_whatever_it_says(mad: Mad, messages: list[tuple[bytes, int]]) -> None:
    for content, descriptors in messages:
        if content:
            mad.ask("say", content, descriptors=descriptors)
    check(mad)


def reported(status: bytes) -> bytes:
    return b'{"event": "status", "number": NUMBER, "status": ' + status + b"}"


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(STATUSES.map(lambda value: json.dumps(value).encode()))
@example(b'{"worker": [1]}')
@example(b'{"passthrough": "no"}')
@example(b'{"files": ' + b"[" * 980 + b"]" * 980 + b"}")
@example(b'{"files": ' + b'{"a":' * 980 + b"1" + b"}" * 980 + b"}")
@example(b'{"files": {"known": NaN, "resident": 1e999, "partial": ' + b"9" * 4000 + b"}}")
@example(b'{"state": ["serving"], "source": "\\u001b[2J", "tiers": [1, {"path": 2}]}')
def test_whatever_it_says_of_itself(mad: Mad, said: bytes) -> None:
    mad.ask("report", reported(said))
    try:
        check(mad)
    finally:
        mad.ask("report", reported(b'{"state": "serving"}'))


def check(mad: Mad) -> None:
    """It answers, in time, with what can be understood; it is who it was, and so is its worker."""
    started = time.monotonic()
    found = mad.status()
    assert time.monotonic() - started < ANSWER_SECONDS
    assert found["source"] == f"{mad.work.path}/src"
    assert found["mountpoint"] == f"{mad.work.path}/mnt"
    assert isinstance(found["state"], str)
    assert (found["worker"]["pid"], found["worker"]["restarts"]) == (mad.worker, 0)
    assert isinstance(found["passthrough"]["registered"], int)
    assert all(isinstance(tier, dict) for tier in found.get("tiers", []))
    assert fake_mounts.is_plain(found)
    assert len(os.listdir(f"/proc/{mad.supervisor}/fd")) < 40, "what came was closed"


def test_a_descriptor_on_the_mount_itself_blocks_nobody(mad: Mad) -> None:
    """close(2) of one asks the worker (FUSE_FLUSH), which does not answer."""
    with suppress(Exception):  # the worker is stopped before it answers, or after
        mad.ask("lend", b'{"event": "back", "number": 1, "files": []}')
    stopped = psutil.STATUS_STOPPED
    wait_for(lambda: psutil.Process(mad.worker).status() == stopped, "the worker to be stopped")
    for _ in range(3):
        assert mad.status()["worker"]["pid"] == mad.worker
    os.kill(mad.worker, signal.SIGCONT)
    wait_for(lambda: status(mad.work)["state"] == "serving", "the worker to go on")


def test_what_it_prints_in_the_foreground_is_shown_with_care(tmp_path: Path) -> None:
    """Standard error of root's mount may be a journal, or root's terminal."""
    with fake_mounts.area(tmp_path, None) as work:
        command = work.command("mount", "src", "mnt", *work.storage, "-f", mode="mad")
        with open(work.path / "said", "wb") as said:
            process = subprocess.Popen(
                command, cwd=work.path, env=work.environment, stdout=said, stderr=said
            )
        wait_for(lambda: fuse_mounts(str(work.path)), "the mount")
        wait_for(lambda: b"serving" in (work.path / "said").read_bytes(), "the supervisor")
        mad = Mad(work)
        mad.ask("print", b"\x1b[2Jgone\r" + b"y" * 10_000 + b"\nmonarchfs: forged\x07\n")
        for _ in range(20):
            mad.ask("print", b"again and again\n", times=1000)

        told = 0

        def is_heard() -> bool:
            nonlocal told
            mad.ask("print", b"that was all\n")
            told += 1
            return b"that was all" in (work.path / "said").read_bytes()

        wait_for(is_heard, "all of that to be read")
        mad.ask("print", b"without an end")
        fake_mounts.umount(work)
        assert process.wait(20) == 0
        output = (work.path / "said").read_bytes().decode()
    assert len(output) < 200_000
    lines = output.splitlines()
    assert all(line.isprintable() and len(line) < 10_000 for line in lines)
    assert r"\x1b[2Jgone\ryyy" in output
    assert "without an end" in output
    counts = [int(line.split()[1]) for line in lines if line.endswith("were left out")]
    said_lines = lines.count("again and again") + lines.count("that was all")
    assert said_lines + sum(counts) == 20_000 + told


LOOK = """
import ctypes, os, sys
pid, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
found = libc.syscall(438, os.pidfd_open(pid), 0, 0)  # pidfd_getfd(2)
print("taken" if found >= 0 else os.strerror(ctypes.get_errno()))
try:
    print(len(os.listdir(f"/proc/{pid}/fd")) > 0)
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize("closed", [True, False], ids=["roots", "own"])
def test_the_worker_of_roots_mount_is_closed_to_its_user(work: Bench, closed: bool) -> None:
    """And works as ever; that of a user's own mount is the user's to look into."""
    python = fake_mounts.interpreter_for(fake_mounts.NOBODY)
    (work.path / "src").mkdir()
    (work.path / "src" / "file").write_bytes(b"content")
    work.path.chmod(0o777)
    with fake_mounts.device_mode(0o666):
        if closed:
            mount = work.mount(work.path / "src", "--user", fake_mounts.NOBODY)
        else:
            mount = work.mount(work.path / "src", user=fake_mounts.NOBODY)
    reader = as_user(fake_mounts.NOBODY, ["cat", str(mount.path / "file")])
    assert subprocess.check_output(reader, timeout=60) == b"content"
    looker = as_user(fake_mounts.NOBODY, [python, "-I", "-c", LOOK, str(mount.worker_pid())])
    seen = subprocess.check_output(looker, text=True, timeout=60).splitlines()
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    restricted = yama.exists() and yama.read_text().strip() != "0"
    if closed:
        assert seen == ["Operation not permitted", "Permission denied"]
    else:
        assert seen == ["Operation not permitted" if restricted else "taken", "True"]
    # It can be replaced, and says where it hangs.
    os.kill(mount.worker_pid(), signal.SIGKILL)
    wait_for(lambda: mount.status()["state"] == "serving", "the next worker")
    assert subprocess.check_output(reader, timeout=60) == b"content"
