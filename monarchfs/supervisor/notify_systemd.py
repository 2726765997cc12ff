"""Reports to a service manager by the protocol of sd_notify(3), one datagram a message.

systemd names its socket in $NOTIFY_SOCKET for services of ``Type=notify``, and with
``WatchdogSec=`` in $WATCHDOG_USEC the interval of the reports (sd_watchdog_enabled(3)).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


class ServiceManager:
    """The service manager of this process; without one all methods do nothing. None blocks or
    raises.

    Constant: the socket's address, the watchdog's interval. Changing: when it was last told, and
    whether it was told of the end.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        seconds = _watchdog_seconds(environ)
        # Twice as often as it has to be, as sd_watchdog_enabled(3) recommends.
        self._every = None if seconds is None else seconds / 2
        self._next_beat = 0.0
        self._stopping = False

    def ready(self, status: str) -> None:
        """The service can be used; ``status`` is shown with its state."""
        self._tell(f"READY=1\nSTATUS={' '.join(status.splitlines())}")

    def extend(self, seconds: float) -> None:
        """The start takes longer, and may take ``seconds`` more from now on (systemd 236)."""
        self._tell(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def beat(self, now: float) -> None:
        """To be called by the watched loop all the time; ``now`` is time.monotonic()."""
        if self._every is not None and now >= self._next_beat:
            self._next_beat = now + self._every
            self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        """The service is ending; told once."""
        if not self._stopping:
            self._stopping = True
            self._tell("STOPPING=1")

    def _tell(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(errors="backslashreplace"), self._address)
        except OSError as error:
            log.warning("cannot tell the service manager %s: %s", message[:10], error.strerror)


def _address(text: str) -> str:
    """A path, or a name in the abstract namespace (unix(7)); anything else is none."""
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else ""


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    interval, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or int(interval) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(interval) / 1e6
