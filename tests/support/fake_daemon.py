"""A socket that answers as a test wants, in place of a daemon's; a mount in fixed states."""

import copy
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config import places
from monarchfs.control import messages
from monarchfs.control.registration import Registration, own_mount_namespace
from monarchfs.supervisor import recover
from monarchfs.system.process_stat import start_ticks

Serve = Callable[[socket.socket], None]
Report = dict[str, Any]

SOURCE, MOUNTPOINT = "/lustre/photos", "/mnt/photos"


class Listener:
    """A thread hands each connection to ``serve``, one after the other, and closes it then."""

    def __init__(self, path: str, serve: Serve) -> None:
        self._serve = serve
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._serve(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


class Daemon(Listener):
    """Registered in ``directory`` as that of a mount on ``mountpoint``. Every connection is handed
    to ``serve`` after its request was read; or it gets the reply in there by its command."""

    def __init__(
        self, directory: Path, serve: Serve | Mapping[str, bytes], mountpoint: str = MOUNTPOINT
    ) -> None:
        stem = directory / os.path.basename(mountpoint)
        self.requests: list[dict[str, Any]] = []
        self.answer = serve
        self.path = f"{stem}.sock"
        super().__init__(self.path, self._read)
        entry = Registration(
            *(mountpoint, own_mount_namespace(), SOURCE, os.geteuid()),
            *(os.getpid(), start_ticks(os.getpid()) or 0, "/var/cache/monarchfs/state", 1),
        )
        Path(f"{stem}.json").write_text(entry.to_json())

    def _read(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            line = lines.readline()
        if line:
            self.requests.append(messages.decode_message(line))
            self._reply(connection)

    def _reply(self, connection: socket.socket) -> None:
        if callable(self.answer):
            self.answer(connection)
            return
        connection.sendall(self.answer[self.requests[-1]["command"]])
        while connection.recv(1 << 16):
            pass  # what comes behind a request, until its end


Start = Callable[..., Daemon]


@contextmanager
def only_these(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """``start(serve, mountpoint)`` makes a `Daemon`; commands that run in this process see those
    and no mount of this machine."""
    directory.chmod(0o755)
    monkeypatch.setattr(places, "runtime_dirs_to_search", lambda *_: [str(directory)])
    monkeypatch.setattr(recover, "read_mountinfo", list)
    running: list[Daemon] = []

    def start(serve: Serve | Mapping[str, bytes], mountpoint: str = MOUNTPOINT) -> Daemon:
        running.append(Daemon(directory, serve, mountpoint))
        return running[-1]

    try:
        yield start
    finally:
        for one in running:
            one.close()


def healthy() -> Report:
    """The report of a mount that serves and copies nothing; its keys are those of a real one."""
    report: Report = json.loads(Path(__file__).with_name("status.json").read_text())
    return report


def changed(report: Mapping[str, Any], **sections: Any) -> Report:
    """A copy with other values: of a section those that are given, else the whole value."""
    other = copy.deepcopy(dict(report))
    for name, value in sections.items():
        if isinstance(value, dict) and isinstance(other.get(name), dict):
            other[name] |= value
        else:
            other[name] = value
    return other


def states() -> dict[str, Report]:
    well = healthy()
    fast, slow = well["tiers"]
    long_ago = {"why": "the worker was killed by SIGKILL", "unix_seconds": time.time() - 40_000}
    trouble = "the workers before it died one after the other, so it only serves the source"
    others = [
        {"name": "b", "has_files": 7, "read_files": 3, "read_bytes": 1536, "error": None},
        {"name": "c", "has_files": 0, "read_files": 0, "read_bytes": 0, "error": "status 403"},
        {"name": "d", "avoided": True},
        *({"name": f"n{number}"} for number in range(7)),
    ]
    return {
        "healthy": well,
        "copying": changed(
            well,
            files={"known": 1_234_567, "copying": 6},
            prefetch={"queued": 40, "active": 6, "left_bytes": 5 << 20, "scanning": True},
        ),
        "full": changed(
            well,
            tiers=[
                {**fast, "used_bytes": 1 << 30, "files": 30},
                {**slow, "out_of_service": "its disk is full"},
            ],
            prefetch={"refused": 1999},
            index={"frozen": "its disk is\nfull"},
        ),
        "worker not answering": changed(
            well, state="worker not answering", age_seconds=12.0, worker={"last_death": long_ago}
        ),
        "safe mode": changed(
            well, state="safe mode", worker={"restarts": 5, "error": trouble, "retry_seconds": 60.0}
        ),
        "down": changed(
            well, state="down", age_seconds=12.0, worker={"pid": None, "error": "it was\nkilled"}
        ),
        "peers": changed(well, peers=others, served={"peer_opens": 20, "peer_file_bytes": 2000}),
        "inode numbers change": changed(well, source_io={"renumbered_files": 1200}),
        "odd names": changed(
            well,
            source="/lustre/d\udcff\x1b[2J",
            tiers=[{**fast, "path": "/tier\r\x08\u202e"}],
            state="\x1b[31m",
        ),
        "nothing is said": {"state": ""},
    }
