"""Runs a command as its parent would have: with the same terminal, process group and signals.

The command stays in this process's group, so Ctrl-C, Ctrl-Z and a shell's job control reach it.
Signals sent to this process alone are passed on. kill(2) does not tell whether the whole group was
meant, and a command must not get a signal twice (some save their state at the first and give up at
the second). So a second child in the group, the witness, blocks all signals and reports which it
got.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from monarchfs.cli.output import complain
from monarchfs.system import inherited
from monarchfs.system.privileges import die_with_parent

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes as of shells (POSIX, 2.8.2); a signal N that ended the command makes 128 + N."""

_PASSED_ON = frozenset(
    (
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1),
        *(signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU, signal.SIGTSTP, signal.SIGCONT),
    )
)
_CHANGED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_WITNESS_SECONDS = 1.0


@contextmanager
def signals_in_pipe(caught: Iterable[signal.Signals]) -> Iterator[int]:
    """A pipe in which signals come as their numbers, but those that are ignored (nohup(1))."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    old = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {
        number: signal.signal(number, lambda _number, _frame: None)  # it only has to exist
        for number in caught
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield reading
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old)
        os.close(reading)
        os.close(writing)


def run_child(command: Sequence[str], prepare: Callable[[], None] | None = None) -> int:
    """Runs ``command`` after ``prepare``, in a child, and returns its exit code as shells do.

    ``prepare`` may raise SystemExit, having said why; other errors are printed, and the code is 1.
    If this process is killed, so is the command. The signals stay blocked: nothing may interrupt
    what the caller does next. For processes of one thread.
    """
    passed_on = {n for n in _PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    witness = _Witness()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if prepare is not None:
                prepare()
            code = _become(command, parent)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except Exception as error:  # noqa: BLE001 - the child must not go on as its parent
            code = complain(f"cannot run {command[0]}: {error}", 1)
        finally:
            os._exit(code)
    try:
        return _wait(pid, passed_on, witness)
    finally:
        witness.close()


def _become(command: Sequence[str], parent: int) -> int:
    for number in _CHANGED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    inherited.restore()
    die_with_parent(parent, signal.SIGKILL)
    name = command[0]
    # Not os.execvp: it fails with EACCES where a directory of $PATH cannot be entered.
    path = name if "/" in name else shutil.which(name) or shutil.which(name, os.F_OK)
    if path is None:
        return complain(f"cannot run {name}: command not found", NOT_FOUND)
    try:
        os.execv(path, list(command))
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        code = NOT_FOUND if missing else NOT_EXECUTABLE
        return complain(f"cannot run {name}: {error.strerror}", code)


def _wait(pid: int, passed_on: set[signal.Signals], witness: _Witness) -> int:
    while True:
        caught = signal.sigwaitinfo(passed_on | {signal.SIGCHLD})
        if caught.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            continue
        # Asked in any case: what it got now must not be taken for a later one.
        group_got_it = witness.got(caught.si_signo)
        if caught.si_code <= 0 and not group_got_it:  # SI_USER and the like; not the kernel's own
            os.kill(pid, caught.si_signo)
        if caught.si_signo == signal.SIGTSTP:
            _stop()


def _stop() -> None:
    """Does what SIGTSTP does: nothing where no shell could continue us (an orphaned process
    group)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


class _Witness:
    """A process in our group that gets what the group gets."""

    def __init__(self) -> None:
        self._asked = 0
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_WITNESS_SECONDS)
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
                die_with_parent(parent, signal.SIGKILL)
                # Our output may be a pipe whose reader waits for its end.
                for number in map(int, os.listdir("/proc/self/fd")):
                    if number != theirs.fileno():
                        os.closerange(number, number + 1)
                _answer(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def got(self, number: int) -> bool:
        """Whether the group got the signal since the last question; no, if nobody answers."""
        self._asked = (self._asked + 1) % 256
        try:
            self._channel.send(bytes([number, self._asked]))
            while answer := self._channel.recv(2):
                if answer[1] == self._asked:  # not one that came too late
                    return bool(answer[0])
        except OSError:
            return False
        return False

    def close(self) -> None:
        self._channel.close()
        os.waitpid(self._pid, 0)


def _answer(channel: socket.socket) -> None:
    while question := channel.recv(2):
        got = signal.sigtimedwait({question[0]}, 0) is not None
        channel.send(bytes([got, question[1]]))
