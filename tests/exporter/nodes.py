"""The exporter of a node in tests: started, scraped, ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.support.mounting import MONARCHFS, Mount, as_user, free_port, wait_for
from tests.support.scraping import Scrape, scrape


@contextmanager
def exporter(*options: str, user: str | None = None) -> Iterator[int]:
    """The port of an exporter that answers."""
    with exporter_process(*options, user=user) as (_process, port):
        yield port


@contextmanager
def exporter_process(
    *options: str, user: str | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Its first process, the one that looks for mounts, and the port."""
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SUDO_", "XDG_"))}
    process = subprocess.Popen(
        as_user(user, [*MONARCHFS, "exporter", "--listen", f"127.0.0.1:{port}", *options]),
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd="/",
    )
    try:
        wait_answering(process, port)
        yield process, port
    finally:
        reader = reader_of(process.pid)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(10)
        if reader is not None:
            wait_for(lambda: not os.path.exists(f"/proc/{reader}"), "its reader to end")


def wait_answering(process: subprocess.Popen[Any], port: int) -> None:
    """Until an exporter that was just started serves."""

    def answers() -> bool:
        assert process.poll() is None
        with suppress(OSError):
            scrape(port)
            return True
        return False

    wait_for(answers, "the exporter to answer")


def reader_of(pid: int) -> int | None:
    """The process without privileges: the only child; None if it is not there."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = file.read().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


def up(now: Scrape, mount: Mount) -> float | None:
    """What is said of a mount; None if nothing is."""
    return of(now, mount, "monarchfs_mount_up")


def of(now: Scrape, mount: Mount, name: str, **labels: str) -> float | None:
    """The value of a sample of a mount's; None if there is none."""
    user = mount.user or "root"
    return now.samples.get(
        (
            name,
            frozenset(
                {
                    "user": user,
                    "source": str(mount.source),
                    "mount": str(mount.path),
                    **labels,
                }.items()
            ),
        )
    )
