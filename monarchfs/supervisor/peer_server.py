"""The mount's web server for peers: started with the mount, restarted if it dies, ended with it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

from monarchfs.peers import web_server
from monarchfs.peers.nodes import Peers
from monarchfs.peers.web_server import WebServerOptions
from monarchfs.system.parent_death import die_with_parent

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""A server that lived for so long is started again at once."""
END_SECONDS = 1.0


class PeerServer:
    """One nginx.

    Constant: its program and options, whose process it is, and the socket of the workers. Changing:
    ``peers``, whom it serves; the process, when it was started, when the next one may be, and the
    pause before that one.
    """

    def __init__(
        self,
        program: str,
        options: WebServerOptions,
        identity: Mapping[str, Any],
        listener: socket.socket,
        peers: Peers,
    ) -> None:
        """``identity``: arguments of ``subprocess.Popen``; ``listener``: where workers answer the
        server, closed in the end."""
        self.listener = listener
        self.peers = peers
        self._program = program
        self._options = options
        self._identity = identity
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._next = 0.0
        self._pause = FIRST_PAUSE_SECONDS

    def tick(self, now: float) -> None:
        """Start it if it does not run."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if now - self._started >= STEADY_SECONDS:
                self._pause = FIRST_PAUSE_SECONDS
            log.warning(
                "nginx ended (%s): peers get nothing from here for %g s: see %s",
                code, self._pause, self._options.directory / "nginx.log",
            )  # fmt: skip
            self._next = now + self._pause
            self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)
        if now < self._next:
            return
        try:
            self._process = web_server.start(
                self._options,
                self._program,
                self._identity,
                partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
            self._started = now
        except OSError as error:
            log.warning("cannot start nginx: %s", error)
            self._next = now + self._pause
            self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)

    @property
    def pid(self) -> int | None:
        """Of the process that runs, if one does."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def close(self) -> None:
        """End it; what it serves is cut off."""
        self.listener.close()
        process, self._process = self._process, None
        self._next = float("inf")
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
