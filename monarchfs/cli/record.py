"""``monarchfs record``: what a mount answers, event by event, in a file."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from monarchfs.cli.ask import AGAIN_SECONDS, ASK_SECONDS, BACK_SECONDS
from monarchfs.cli.child import run_child, signals_in_pipe
from monarchfs.cli.output import Progress
from monarchfs.config.places import Search, search_of
from monarchfs.config.values import parse_seconds, parse_size
from monarchfs.control.client import Connection, connect
from monarchfs.control.messages import SILENCE_SECONDS
from monarchfs.insight.recording import EVENT, MOST_SAMPLE, File, RecordingWriter
from monarchfs.supervisor.recover import require_daemon
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import counted, format_bytes, format_seconds
from monarchfs.types import OperationError, UsageError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_FLUSH_SECONDS = 2.0
"""What was received reaches the file in this time: a recorder that is killed loses no more."""

HIDDEN = {
    "lookups": "names that the kernel remembers",
    "opens": "opens (the mount is immutable: the kernel opens files by itself)",
    "reads": "reads from the page cache",
    "passthrough": "reads that the kernel passes through to local copies above 1 MiB",
}


def record_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The command's exit code where there is one, else 0."""
    if arguments.seconds is not None and arguments.argv:
        raise UsageError("either --seconds or a command: leave out one of them")
    if arguments.argv == []:
        raise UsageError("there is no command behind --")
    seconds = None if arguments.seconds is None else parse_seconds(arguments.seconds)
    arguments.sample, arguments.max_size = _sample(arguments.sample), _size(arguments.max_size)
    search = search_of(environ)
    if arguments.argv is None:
        return _record(arguments, search, seconds)
    return _record_command(arguments, search)


def _sample(text: str) -> int:
    if text.isdecimal() and 0 < int(text) <= MOST_SAMPLE and not int(text) & (int(text) - 1):
        return int(text)
    raise UsageError(f"--sample {text}: give a power of two, up to {MOST_SAMPLE}")


def _size(text: str) -> int:
    size = parse_size(text).bytes
    if size is None:
        raise UsageError(f"--max-size {text}: give a number of bytes, as 256M")
    return size


def _begin(arguments: argparse.Namespace, search: Search) -> EventRecorder:
    facts = {} if arguments.argv is None else {"command": arguments.argv}
    most, file = arguments.max_size, arguments.output
    return EventRecorder(arguments.mountpoint, search, file, facts, arguments.sample, most)


def _record(arguments: argparse.Namespace, search: Search, seconds: float | None) -> int:
    with signals_in_pipe(_ENDING) as end, Progress() as progress:
        recorder = _begin(arguments, search)
        for _ in recorder.follow(end, seconds):
            progress.show(
                f"recording {arguments.mountpoint}: {format_seconds(recorder.seconds)},"
                f" {recorder.events:,} events, {format_bytes(recorder.written)}"
            )
    print(_summary(recorder, arguments.output), file=sys.stderr)
    return 0


def _record_command(arguments: argparse.Namespace, search: Search) -> int:
    """The command has the terminal, its signals and this process; another one records."""
    told, tells = os.pipe()
    end, ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(told)
            os.close(ends)
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)  # it ends when the command has
            with open(tells, "w", encoding="utf-8", errors="backslashreplace") as answers:
                _record_in_child(arguments, search, end, answers)
        finally:
            os._exit(0)
    os.close(tells)
    os.close(end)
    with open(told, encoding="utf-8") as answers:
        error = json.loads(answers.readline() or '"the recorder died"')
        if error:
            os.waitpid(pid, 0)
            raise OperationError(error)
        code = run_child(arguments.argv)
        os.close(ends)
        print(answers.readline().rstrip("\n") or "monarchfs: the recorder died", file=sys.stderr)
    os.waitpid(pid, 0)
    return code


def _record_in_child(
    arguments: argparse.Namespace, search: Search, end: int, answers: TextIO
) -> None:
    """Two lines: the error that keeps it from recording, if there is one; and the summary."""
    try:
        recorder = _begin(arguments, search)
        print('""', file=answers, flush=True)
    except Exception as error:  # noqa: BLE001 - the parent says it
        print(json.dumps(str(error)), file=answers)
        return
    try:
        for _ in recorder.follow(end, None):
            pass
        print(_summary(recorder, arguments.output), file=answers)
    except Exception as error:  # noqa: BLE001 - the same
        print(printable(f"monarchfs: the recording failed: {error}"), file=answers)


def _summary(recorder: EventRecorder, output: str) -> str:
    parts = [
        f"{counted(recorder.events, 'event')} of {counted(recorder.files, 'file')} in"
        f" {format_seconds(recorder.seconds)}: {output}, {format_bytes(recorder.written)}"
    ]
    if recorder.sample > 1:
        parts.append(f"one of {recorder.sample} files was recorded")
    if recorder.lost:
        parts.append(f"{recorder.lost:,} events were lost")
    if recorder.stopped:
        parts.append(f"it ended early: {recorder.stopped}")
    if recorder.hidden == ["lookups"]:
        parts.append("it has every open and read")
    parts.append(f"not seen: {', '.join(HIDDEN[kind] for kind in recorder.hidden)}")
    return printable(f"monarchfs: {'; '.join(parts)}")


# Events of a mount, also across restarts of its worker.


def open_events(
    mountpoint: str, search: Search, options: Mapping[str, int]
) -> tuple[Connection, dict[str, Any]]:
    """A connection on which events come, and what the mount says of itself before. Raises
    OperationError if it cannot be recorded, or is gone."""
    connection = connect(require_daemon(mountpoint, search), ASK_SECONDS)
    try:
        connection.ask({"command": "record", **options})
        return connection, connection.next(SILENCE_SECONDS)[0]["progress"]
    except (OperationError, ConnectionError) as error:
        connection.__exit__()
        raise OperationError(str(error)) from None


def hidden_by(facts: Mapping[str, Any]) -> list[str]:
    """What is never in events, as in HIDDEN."""
    passes = ["passthrough"] if facts["data_path"] == "passthrough" else []
    return [*facts["hidden"], *passes]


class EventRecorder:
    """Changing: ``events``, ``lost``, ``sample`` (one of so many files is recorded), ``stopped``
    (why it ended by itself), the file's length; and what is to be said at the end."""

    def __init__(
        self,
        mountpoint: str,
        search: Search,
        output: str,
        facts: Mapping[str, Any],
        sample: int,
        most_bytes: int,
    ) -> None:
        """Raises OperationError if the mount cannot be recorded: ``output`` is then as it was."""
        self._mountpoint, self._search = mountpoint, search
        self._most_bytes = most_bytes
        self._connection, head = open_events(mountpoint, search, {"sample": sample})
        self._origin_ns: int = head["origin_ns"]
        self._last_ns = self._origin_ns
        try:
            self._stream = open(output, "wb")  # noqa: SIM115 - closed by `follow`
        except OSError as error:
            self._connection.__exit__()
            raise OperationError(f"cannot write {output}: {error.strerror}") from None
        self._writer = RecordingWriter(
            self._stream, head["begun"], {**facts, **head["facts"]}, self._origin_ns
        )
        self._gaps: list[list[float]] = []
        self._processes: dict[str, str] = {}
        self._lost_before = self._lost_now = 0
        self._flushed = 0.0
        self._inos: set[int] = set()
        self.sample = sample
        self.events = 0
        self.stopped = ""
        self.hidden = hidden_by(head["facts"])

    @property
    def lost(self) -> int:
        return self._lost_before + self._lost_now

    @property
    def files(self) -> int:
        return len(self._inos)

    @property
    def written(self) -> int:
        return self._writer.written

    @property
    def seconds(self) -> float:
        return (time.monotonic_ns() - self._origin_ns) / 1e9

    def _since(self, at_ns: int) -> float:
        return round((at_ns - self._origin_ns) / 1e9, 3)

    def follow(self, end: int, seconds: float | None) -> Iterator[None]:
        """Until ``end`` is readable, or for so many seconds, or as long as there is a mount and
        room; then the recording is complete. Yields whenever something came."""
        while True:
            try:
                with self._connection as connection:
                    yield from self._receive(connection, end, seconds)
                break
            except ConnectionError:
                self._lost_before, self._lost_now = self.lost, 0
            if not self._is_back(end):
                break
        facts: dict[str, Any] = {"dropped": self.lost, "sampled": self.sample}
        facts |= {"processes": self._processes, "gaps": self._gaps}
        if self.stopped:
            facts["stopped"] = self.stopped
        self._writer.finish(round(self.seconds, 6), facts)
        self._stream.close()

    def _is_back(self, end: int) -> bool:
        """Waits for the worker that follows; False if there is none any more."""
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            try:
                self._connection, head = open_events(
                    self._mountpoint, self._search, {"sample": self.sample}
                )
                began = head["origin_ns"]
                self._gaps.append([self._since(self._last_ns), self._since(began)])
                self._last_ns = began
                return True
            except OperationError as error:
                if time.monotonic() > deadline:
                    self.stopped = str(error)
                    return False
            try:
                require_daemon(self._mountpoint, self._search)
            except OperationError as error:
                self.stopped = str(error)
                return False
            if select.select([end], [], [], AGAIN_SECONDS)[0]:
                return False

    def _receive(self, connection: Connection, end: int, seconds: float | None) -> Iterator[None]:
        going = True
        while True:
            if going and self._is_over(connection, end, seconds):
                going = False
                connection.no_more()
            message, content = connection.next(SILENCE_SECONDS)
            if (progress := message.get("progress")) is None:
                return
            self._take(progress, content)
            yield
            if self.written >= self._most_bytes and not self.stopped:
                self.stopped = "the file is full"

    def _is_over(self, connection: Connection, end: int, seconds: float | None) -> bool:
        """Waits until it is, or the mount says something."""
        if self.stopped:
            return True
        left = None if seconds is None else max(0.0, seconds - self.seconds)
        ready = select.select(
            [end, connection.fileno()], [], [], 0 if connection.received else left
        )[0]
        return end in ready or (left is not None and self.seconds + 1e-3 >= (seconds or 0))

    def _take(self, progress: Mapping[str, Any], content: bytes) -> None:
        writer = self._writer
        self._last_ns = time.monotonic_ns()
        self._lost_now = progress["lost"]
        self.sample = progress["sampled"]
        self._processes |= progress["processes"]
        files = {int(ino): File(*file) for ino, file in progress["files"].items()}
        self._inos |= {ino for ino, file in files.items() if not file.is_directory}
        writer.add_files(files)
        if not self.stopped:
            writer.add_packed(content)
            self.events += len(content) // EVENT.size
        full = writer.written + writer.pending_bytes > self._most_bytes
        if full or self._last_ns - self._flushed > _FLUSH_SECONDS * 1e9:
            self._flushed = self._last_ns
            writer.flush()
