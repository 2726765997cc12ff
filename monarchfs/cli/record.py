"""``monarchfs record``: what a mount answers, event by event, in a file."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from monarchfs.cli.child import run_child, signals_in_pipe
from monarchfs.cli.progress import Progress
from monarchfs.cli.recorder import HIDDEN, EventRecorder
from monarchfs.cli.text import counted, printable
from monarchfs.config.places import search_of
from monarchfs.config.values import parse_seconds, parse_size
from monarchfs.insight.recording import MOST_SAMPLE
from monarchfs.supervisor.recover import require_daemon
from monarchfs.system.sizes import format_bytes, format_seconds
from monarchfs.types import OperationError, UsageError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def record_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The command's exit code where there is one, else 0. Raises UsageError, OperationError."""
    if arguments.seconds is not None and arguments.argv:
        raise UsageError("either --seconds or a command: leave out one of them")
    if arguments.argv == []:
        raise UsageError("there is no command behind --")
    seconds = None if arguments.seconds is None else parse_seconds(arguments.seconds)
    sample, most_bytes = _sample(arguments.sample), _size(arguments.max_size)
    mountpoint, output = arguments.mountpoint, arguments.output
    search = search_of(environ)
    require_daemon(mountpoint, search)  # before the file is made
    with _new(output) as stream:
        facts = {} if arguments.argv is None else {"command": arguments.argv}
        recorder = EventRecorder(
            mountpoint, search, stream, facts, sample=sample, most_bytes=most_bytes
        )
        if arguments.argv is None:
            return _record(recorder, mountpoint, output, seconds)
        return _record_command(recorder, output, arguments.argv)


def _sample(text: str) -> int:
    if text.isdecimal() and 0 < int(text) <= MOST_SAMPLE and not int(text) & (int(text) - 1):
        return int(text)
    raise UsageError(f"--sample {text}: give a power of two, up to {MOST_SAMPLE}")


def _size(text: str) -> int:
    size = parse_size(text).bytes
    if size is None:
        raise UsageError(f"--max-size {text}: give a number of bytes, as 256M")
    return size


@contextmanager
def _new(output: str) -> Iterator[BinaryIO]:
    """A file that takes its place when the recording has begun, and is removed if it does not."""
    try:
        stream = Path(output).open("wb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OperationError(f"cannot write {output}: {error.strerror}") from None
    with stream:
        try:
            yield stream
        except OperationError:
            if not stream.tell():
                Path(output).unlink(missing_ok=True)
            raise


def _record(recorder: EventRecorder, mountpoint: str, output: str, seconds: float | None) -> int:
    with _signals() as end, Progress() as progress:
        for _ in recorder.follow(recorder.connect(), end, seconds):
            progress.show(
                f"recording {mountpoint}: {format_seconds(recorder.seconds)},"
                f" {recorder.events:,} events, {format_bytes(recorder.written)}"
            )
        recorder.finish()
    print(_summary(recorder, output), file=sys.stderr)
    return 0


def _record_command(recorder: EventRecorder, output: str, argv: Sequence[str]) -> int:
    """The command has the terminal, its signals and this process; another one records."""
    told, tells = os.pipe()
    end, ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(told)
            os.close(ends)
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)  # it ends when the command has
            code = _record_in_child(recorder, output, end, tells)
        finally:
            os._exit(code)
    os.close(tells)
    os.close(end)
    with open(told, encoding="utf-8") as answers:
        error = json.loads(answers.readline() or '"the recorder died"')
        if error:
            os.waitpid(pid, 0)
            raise OperationError(error)
        code = run_child(argv)
        os.close(ends)
        print(answers.readline().rstrip("\n") or "monarchfs: the recorder died", file=sys.stderr)
    os.waitpid(pid, 0)
    return code


def _record_in_child(recorder: EventRecorder, output: str, end: int, tells: int) -> int:
    with open(tells, "w", encoding="utf-8", errors="backslashreplace") as answers:
        try:
            connection = recorder.connect()
            print('""', file=answers, flush=True)
        except Exception as error:  # noqa: BLE001 - the parent says it
            print(json.dumps(str(error)), file=answers, flush=True)
            return 1
        try:
            for _ in recorder.follow(connection, end, None):
                pass
            recorder.finish()
            print(_summary(recorder, output), file=answers)
        except Exception as error:  # noqa: BLE001 - the same
            print(printable(f"monarchfs: the recording failed: {error}"), file=answers)
            return 1
    return 0


@contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that is readable once a signal says that it is over."""
    try:
        with signals_in_pipe(_ENDING) as pipe:
            yield pipe[0]
    finally:
        for descriptor in pipe:
            os.close(descriptor)


def _summary(recorder: EventRecorder, output: str) -> str:
    """One line."""
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
