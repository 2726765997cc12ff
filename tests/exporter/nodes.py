"""The exporter of a node in tests: started, scraped, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.mounting import ENVIRONMENT, MONARCHFS, Mount, as_user, free_port, wait_for
from tests.support.scraping import Scrape, scrape


class Exporter(NamedTuple):
    """``process`` looks for mounts, ``reader`` is the one without privileges, its only child."""

    process: subprocess.Popen[str]
    reader: int
    port: int


@contextmanager
def exporter(*options: str, user: str | None = None) -> Iterator[int]:
    with exporter_process(*options, user=user) as running:
        yield running.port


@contextmanager
def exporter_process(*options: str, user: str | None = None) -> Iterator[Exporter]:
    """One that answers; neither of its processes is there afterwards."""
    port = free_port()
    process = subprocess.Popen(
        as_user(user, [*MONARCHFS, "exporter", "--listen", f"127.0.0.1:{port}", *options]),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )

    def answers() -> bool:
        assert process.poll() is None, process.communicate()[1]
        with suppress(OSError):
            scrape(port)
            return True
        return False

    with process:
        try:
            wait_for(answers, "the exporter to answer")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            reader = int(children.split()[0])
            yield Exporter(process, reader, port)
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(10)
        wait_for(lambda: not os.path.exists(f"/proc/{reader}"), "its reader to end")


def registrations(mountpoint: Path) -> dict[Path, dict[str, Any]]:
    """Of root's mounts there, by their files."""
    entries = {file: json.loads(file.read_text()) for file in Path("/run/monarchfs").glob("*.json")}
    return {file: e for file, e in entries.items() if e["mountpoint"] == str(mountpoint)}


def ups(now: Scrape) -> list[tuple[dict[str, str], float]]:
    return [
        (dict(labels), value)
        for (name, labels), value in now.samples.items()
        if name == "monarchfs_mount_up"
    ]


def up(now: Scrape, mount: Mount) -> float | None:
    """What is said of a mount; None if nothing is."""
    return of(now, mount, "monarchfs_mount_up")


def of(now: Scrape, mount: Mount, name: str, **labels: str) -> float | None:
    """The value of a sample of a mount's; None if there is none."""
    user = mount.user or "root"
    labels |= {"user": user, "source": str(mount.source), "mount": str(mount.path)}
    return now.samples.get((name, frozenset(labels.items())))
