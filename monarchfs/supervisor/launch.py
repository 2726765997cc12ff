"""A worker's process, and what is known of it; how programs of ours are run."""

from __future__ import annotations

import os
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

import monarchfs
from monarchfs.config import User
from monarchfs.fuse.mount import SYSTEM_PATH
from monarchfs.supervisor.channel import WorkerChannel
from monarchfs.supervisor.identity import popen_as
from monarchfs.supervisor.vital_signs import Activity
from monarchfs.system.limits import explained
from monarchfs.system.privileges import die_with_parent
from monarchfs.system.process_stat import stat_fields
from monarchfs.types import OperationError

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT})

_CLOSED_SECONDS = 1.0
_MOST_THREADS = 64
_MOST_FRAMES = 12


def module_command(module: str) -> tuple[str, ...]:
    """How a module of ours is run: isolated from the user's environment and directory. A package
    that was installed with ``pip --user`` is only found without isolation; the working directory is
    ``/`` then."""
    ours = os.path.realpath(os.path.dirname(monarchfs.__file__))
    user_site = os.path.realpath(site.getusersitepackages())
    isolation = "-E" if ours.startswith(user_site + "/") else "-I"
    return (sys.executable, isolation, "-X", "utf8", "-m", module)


def thread_states(process: str) -> list[bytes]:
    """What the threads of a process do (proc_pid_stat(5), field 3), by its directory in /proc;
    empty if it is gone."""
    try:
        threads = os.listdir(f"{process}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [fields[0] for one in threads if (fields := stat_fields(f"{process}/task/{one}"))]


def has_only_threads(states: bytes, process: str) -> bool:
    """Whether each thread of a process is in one of these states, or gone; not where that cannot be
    seen."""
    try:
        return all(state in states for state in thread_states(process))
    except OSError:
        return False


class WorkerProcess:
    """A worker's process, the channel to it, and the socket on which its libfuse gets FUSE_INIT.
    ``error``: what it said of its end, in words for a log."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: WorkerChannel, init: socket.socket
    ):
        self.process = process
        self._directory = f"/proc/{process.pid}"
        self.channel = channel
        self.init = init
        self.error = ""
        self._killed = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """As ``Popen.returncode``; None while it lives, and where that cannot be seen yet."""
        code = self.process.poll()
        if code is not None:
            return code
        # What its first thread left, while others cannot die (proc_pid_stat(5), fields 3 and 52).
        fields = self._stat_fields()
        if not fields:
            return self.process.poll()
        if fields[0] not in (b"Z", b"X") or int(fields[49]) == 0:
            return None
        return os.waitstatus_to_exitcode(int(fields[49]))

    def _stat_fields(self) -> list[bytes]:
        """As the function; where this process may open no file now, of one that lives."""
        try:
            return stat_fields(self._directory)
        except OSError:
            return [b"?"]

    def kill(self) -> None:
        """Have it die; it may take its time (`is_gone`)."""
        self._killed = True
        self.process.kill()

    @property
    def was_killed(self) -> bool:
        """Whether somebody else killed it (SIGKILL): that says nothing about it."""
        return not self._killed and self.exit_code == -signal.SIGKILL

    @property
    def lacked(self) -> bool:
        """Whether it ended because of a limit that others had reached."""
        return self.exit_code == os.EX_TEMPFAIL

    def activity(self) -> Activity | None:
        """What its threads are doing now; None where that cannot be seen. Blocks for nothing."""
        try:
            fields = stat_fields(f"{self._directory}/task/{self.pid}")
            rests = not any(state in b"RD" for state in thread_states(self._directory))
        except OSError:
            return None
        if not fields:
            return None
        # proc_pid_stat(5): state, utime and stime.
        cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
        return Activity(fields[0] == b"R", cpu_seconds, rests)

    @property
    def reaped(self) -> bool:
        """Whether nothing is left of it."""
        return self.process.poll() is not None

    def is_quiet(self) -> bool:
        """Whether none of its threads can run any more: each is gone, or dead, or waits in the
        kernel in a state that no signal ends (a killed one dies when it comes back)."""
        return self.reaped or has_only_threads(b"ZXD", self._directory)

    def is_gone(self) -> bool:
        """Whether it ended, or at least all of it that does not hang in the kernel."""
        if self.process.poll() is not None:
            return True
        # The first thread is a zombie while others cannot die yet (proc_pid_stat(5), field 3).
        fields = self._stat_fields()
        return not fields or fields[0] in (b"Z", b"X")

    def has_ended(self, now: float) -> bool:
        """Whether it is gone. One that closed its channel a second ago is killed, as it may be
        unable to end."""
        if self.is_gone():
            return True
        closed_at = self.channel.closed_at
        if closed_at is not None and now >= closed_at + _CLOSED_SECONDS:
            self.kill()
            self.channel.closed_at = now
        return False

    def wait_gone(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds; whether it is gone."""
        deadline = time.monotonic() + timeout
        while not self.is_gone():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                self.process.wait(min(left, 0.05))
            except subprocess.TimeoutExpired:
                continue
        return True

    @property
    def crashed(self) -> bool:
        """Whether it died as a process does whose mapped file is damaged: LMDB maps the index."""
        return self.exit_code in _CRASHES

    def stop(self, patience: float = 1.0) -> None:
        """Tells it to stop; kills it after ``patience`` seconds; leaves it behind if it does not
        die within another. Idempotent."""
        self.channel.send({"do": "stop"})
        if not self.wait_gone(patience):
            self.kill()
            self.wait_gone(1.0)
        self.channel.close()
        self.init.close()

    def describe_end(self) -> str:
        """How it ended, for a log line."""
        code = self.exit_code
        if code is None:
            return "was killed and hangs in the kernel"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{how} ({self.error})" if self.error else how


def spawn_as(
    user: User, command: list[str], inherited: Sequence[int], *, stdout: int, stderr: int | None
) -> subprocess.Popen[bytes]:
    """Starts a program of ours as ``user``, with a clean environment. The kernel kills it if this
    process dies: who gets the locks next has the index and the tiers alone. Raises
    OperationError."""
    try:
        return subprocess.Popen(
            command,
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
            cwd="/",
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # Ctrl-C at a terminal is for this process, which ends the other one in order.
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
            **popen_as(user),
        )
    except PermissionError:
        raise OperationError(
            f"{user.name} may not run {command[0]}: install monarchfs where every user can read it"
        ) from None
    except OSError as error:
        raise OperationError(f"cannot run {command[0]}: {explained(error)}") from None
    except subprocess.SubprocessError as error:  # of preexec_fn, for want of memory
        raise OperationError(f"cannot run {command[0]}: {error}") from None


def describe_threads(pid: int) -> list[str]:
    """A line for each thread: name, state, system call, and for root the kernel's stack
    (proc_pid_stack(5)). Empty where they cannot be seen. Blocks for nothing."""
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []
    lines = [_describe_thread(pid, thread) for thread in threads[:_MOST_THREADS]]
    if len(threads) > _MOST_THREADS:
        lines.append(f"and {len(threads) - _MOST_THREADS} more threads")
    return lines


def _describe_thread(pid: int, thread: int) -> str:
    name, state = (
        _read_about(pid, thread, "comm"),
        _read_about(pid, thread, "stat").rpartition(") ")[2][:1],
    )
    where = [f"in {wait}"] if (wait := _read_about(pid, thread, "wchan")) not in ("", "0") else []
    if call := _read_about(pid, thread, "syscall"):
        where.append(f"call {call.split(' ')[0]}")
    frames = _read_about(pid, thread, "stack").splitlines()[:_MOST_FRAMES]
    if frames:
        where.append("kernel: " + " < ".join(frame.rpartition("] ")[2] for frame in frames))
    return f"thread {thread} ({name}) {state or 'gone'}: {', '.join(where) or 'running'}"


def _read_about(pid: int, thread: int, file: str) -> str:
    try:
        with open(
            f"/proc/{pid}/task/{thread}/{file}", encoding="ascii", errors="replace"
        ) as opened:
            return opened.read().strip()
    except OSError:
        return ""
