"""A socket that answers as a test wants, in place of a daemon's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

Serve = Callable[[socket.socket], None]


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
