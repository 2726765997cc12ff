"""Standard output and standard error, which may be closed, full, or without a reader.

What cannot be written to standard error is dropped and never changes the outcome of a command.
Python alone would end with exit code 120 (``sys.exit``).
"""

from __future__ import annotations

import io
import os
import signal
import sys

from monarchfs.cli.text import printable

INTERRUPTED = 128 + signal.SIGINT
"""The exit code that a shell shows for who died of SIGINT."""


class _Lossy(io.RawIOBase):
    """A descriptor that accepts everything, even what it cannot write."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        left = memoryview(data).cast("B")
        size = left.nbytes
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            # There is nowhere to tell that the place for telling is full or gone.
            return size
        return size


def prepare_streams() -> None:
    """Opens /dev/null for closed standard descriptors, so that no other file gets their numbers,
    and there are a `sys.stdin` and a `sys.stdout`; and lets `sys.stderr` drop what cannot be
    written. Programs run later get them closed as they were (O_CLOEXEC)."""
    while (lowest := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(lowest)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is sys.__stderr__:
        # Unbuffered: a child that is forked must not print again what its parent has printed.
        sys.stderr = io.TextIOWrapper(
            _Lossy(2),
            encoding=getattr(sys.stderr, "encoding", None),
            errors="backslashreplace",
            line_buffering=True,
            write_through=True,
        )


def complain(message: str, code: int, program: str = "monarchfs") -> int:
    """Prints an error as the one line it has to be; returns ``code``."""
    # A path may hold a line break, bytes that are no text, and what moves a terminal's cursor.
    print(f"{program}: {printable(' '.join(message.splitlines()))}", file=sys.stderr)
    return code


def output_written(code: int, program: str = "monarchfs") -> int:
    """The exit code once all output is written: a full disk fails a command that did everything
    else, a reader who left does not."""
    try:
        sys.stdout.flush()
        return code
    except OSError as error:
        # What is left in the buffer must not fail again when the interpreter ends.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if code or isinstance(error, BrokenPipeError):
            return code
        return complain(f"cannot write the output: {error.strerror}", 1, program)


def die_of_interrupt(code: int) -> int:
    """Ends this process by SIGINT: a shell script stops if its child dies of the signal, and goes
    on after any exit code. Returns ``code`` if SIGINT is blocked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    return code
