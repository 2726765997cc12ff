"""GlusterFS on this machine: a real distributed file system, its servers and its client."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.harness import Unusable, detach, wait_for

BRICKS = 3
PROGRAMS = ("glusterd", "gluster", "mount.glusterfs")
DAEMONS = ("glusterd", "glusterfsd", "glusterfs")


@contextmanager
def gluster_volume(place: Path, name: str = "bench", *, replicas: int = 0) -> Iterator[Path]:
    """The mount point of an empty volume of three bricks, all below ``place``: distributed, or with
    so many ``replicas`` of each file.

    Everything is stopped afterwards. Raises Unusable without root or GlusterFS, and where a
    glusterd runs already: its volumes are not ours to touch.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        raise Unusable("GlusterFS takes root and apt-get install glusterfs-server glusterfs-client")
    if _daemons():
        raise Unusable("a GlusterFS daemon runs here already")
    host = socket.gethostname()  # gluster refuses 127.0.0.1
    state, point = place / "state", place / "mnt"
    for folder in (state, point):
        folder.mkdir(parents=True)
    folders = [place / f"brick{number}" for number in range(BRICKS)]
    kind = ["replica", str(replicas)] if replicas else []
    daemon = subprocess.Popen(
        ["glusterd", "--no-daemon", "--log-file", str(state / "glusterd.log")],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: _ask("volume", "list") is not None, "glusterd", 30, 0.2)
        words = [f"{host}:{folder}" for folder in folders]
        _must("volume", "create", name, *kind, *words, "force")
        _must("volume", "start", name)
        subprocess.run(["mount", "-t", "glusterfs", f"{host}:/{name}", str(point)], check=True)
        yield point
    finally:
        detach(point)
        _ask("volume", "stop", name, "force")
        _ask("volume", "delete", name)
        for process in _daemons():
            process.send_signal(signal.SIGTERM)
        psutil.wait_procs(_daemons(), 10)
        for process in _daemons():
            process.kill()
        daemon.wait()


def bricks() -> list[psutil.Process]:
    """The servers of the volume that still live."""
    return [one for one in _daemons() if one.name() == "glusterfsd"]


def _daemons() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["name"]) if one.info["name"] in DAEMONS]


def _ask(*words: str) -> str | None:
    """None where it failed."""
    done = subprocess.run(
        ["gluster", "--mode=script", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def _must(*words: str) -> None:
    if _ask(*words) is None:
        raise Unusable(f"gluster {' '.join(words[:2])} failed: see its logs in /var/log/glusterfs")
