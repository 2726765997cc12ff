"""A screen that is drawn again and again, or lines: ``monarchfs status --watch`` and ``top``."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
import tty
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

from monarchfs.cli.child import signals_in_pipe
from monarchfs.cli.rates import History, MountView, number
from monarchfs.cli.screen import draw, draw_list
from monarchfs.cli.status_text import Report, list_row
from monarchfs.cli.text import format_count, format_share, printable
from monarchfs.system.sizes import format_bytes

Seen = TypeVar("Seen")

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_TICK = b"\0"
"""On the wake-up pipe, where signals come as their numbers: a sample has come."""


class LiveView(ABC, Generic[Seen]):
    """What is shown again and again. Changing: what was seen before."""

    @abstractmethod
    def look(self) -> Seen | None:
        """What there is now; None: it is over. May take seconds, and raises nothing."""

    @abstractmethod
    def to_json(self, seen: Seen) -> object:
        """What was seen, for programs."""

    @abstractmethod
    def lines(self, seen: Seen) -> Iterable[str]:
        """The same as plain lines, with the time before each."""

    @abstractmethod
    def draw(self, seen: Seen, height: int, footer: str) -> RenderableType:
        """The same in so many lines, with a footer."""


class MountsView(LiveView["MountView | list[Report]"]):
    """``status --watch``: one mount, or the list of all."""

    def __init__(self, reports: Callable[[], Report | list[Report]]) -> None:
        """``reports`` is one mount's report, or those of all. May take seconds; raises nothing."""
        self._reports = reports
        self._history = History()

    def look(self) -> MountView | list[Report]:
        seen = self._reports()
        return seen if isinstance(seen, list) else self._history.add(time.monotonic(), seen)

    def to_json(self, seen: MountView | list[Report]) -> object:
        return {"mounts": seen} if isinstance(seen, list) else seen.report

    def lines(self, seen: MountView | list[Report]) -> Iterator[str]:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S")
        if isinstance(seen, MountView):
            yield f"{clock} {_line(seen)}"
            return
        for report in seen:
            mountpoint, _source, state, resident, local, used = list_row(report)
            yield f"{clock} {mountpoint} {state}: resident {resident}, local {local}, used {used}"
        if not seen:
            yield f"{clock} nothing is mounted"

    def draw(self, seen: MountView | list[Report], height: int, footer: str) -> RenderableType:
        if isinstance(seen, list):
            return draw_list(seen, footer=footer)
        return draw(seen, footer=footer)


def show(
    view: LiveView[Any], interval: float, *, as_json: bool = False, screen: bool = True
) -> int:
    """Shows what is looked at, every ``interval`` seconds, until q or Ctrl-C on a terminal; returns
    0. Without ``screen`` the lines, there too."""
    console = Console()
    try:
        if as_json:
            for seen in _looks(view, interval, threading.Event()):
                print(json.dumps(view.to_json(seen)), flush=True)
        elif not screen or not console.is_terminal or console.is_dumb_terminal:
            for seen in _looks(view, interval, threading.Event()):
                print("\n".join(view.lines(seen)), flush=True)
        else:
            _show_on_screen(console, view, interval)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Whoever read it has seen enough. What is left in the buffer must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _looks(view: LiveView[Seen], interval: float, ended: threading.Event) -> Iterator[Seen]:
    following = time.monotonic()
    while not ended.is_set() and (seen := view.look()) is not None:
        now = time.monotonic()
        yield seen
        following = max(following + interval, now)
        ended.wait(max(0.0, following - time.monotonic()))


def _line(view: MountView) -> str:
    report, now, rates = view.report, view.details, view.rates
    text = f"{printable(report.get('mountpoint', '?'))} {printable(report.get('state', '?'))}"
    if "files" not in now or view.old_seconds >= 1:
        return text + (f": {printable(report['error'])}" if report.get("error") else "")
    opens = [number(now, "served", f"{where}_opens") for where in ("local", "source")]
    parts = [
        f"local {format_share(opens[0], sum(opens))} of {format_count(sum(opens))} opens",
        f"resident {format_count(number(now, 'files', 'resident'))}"
        f" of {format_count(number(now, 'files', 'known'))} known",
        f"queued {format_count(number(now, 'prefetch', 'queued'))}",
        f"stuck {format_count(number(now, 'source_io', 'stuck'))}",
    ]
    if rates is not None:
        share = rates.local_share
        parts[0] += f" (now {'-' if share is None else format_share(share, 1)})"
        parts += [
            f"copied {rates.copied_files:.1f} files/s",
            f"source {format_bytes(rates.source_bytes)}/s"
            f" (demand {format_bytes(rates.demand_bytes)}/s)",
            f"{rates.operations:.1f} operations/s",
            f"served {format_bytes(rates.served_bytes)}/s",
        ]
    return f"{text}: {', '.join(parts)}"


class _Sampler:
    """Looks in a thread of its own, so that keys work while a mount does not answer."""

    def __init__(self, view: LiveView[Any], interval: float, wake: int) -> None:
        self.seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.over = False
        self._view, self._interval, self._wake = view, interval, wake
        self._ended = threading.Event()
        # Nobody waits for one that waits for a mount.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for seen in _looks(self._view, self._interval, self._ended):
            if self._ended.is_set():
                return
            self.seen.put(seen)
            os.write(self._wake, _TICK)
        self.over = True
        os.write(self._wake, _TICK)

    def end(self) -> bool:
        """Whether it is gone, and the wake-up pipe may be closed."""
        self._ended.set()
        self._thread.join(0.1)
        return not self._thread.is_alive()


def _show_on_screen(console: Console, view: LiveView[Any], interval: float) -> None:
    drawn: RenderableType = "asking ..."
    footer = f"q quits · every {interval:g} s"
    with _wake_ups(view, interval) as (wake, sampler), _keys_at_once():
        keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        ended_by: signal.Signals | None = None
        with Live(drawn, console=console, screen=True, auto_refresh=False) as live:
            while ended_by is None and not sampler.over:
                live.update(drawn, refresh=True)
                awake = select.select([wake] if keyboard is None else [wake, keyboard], [], [])[0]
                if keyboard in awake and _says_quit(keyboard):
                    break
                caught = os.read(wake, 1 << 12) if wake in awake else b""
                if signal.SIGINT in caught:
                    break
                ended_by = next((one for one in _ENDING if one in caught), None)
                while not sampler.seen.empty():
                    said = f"{footer} · {time.strftime('%H:%M:%S')}"
                    drawn = view.draw(sampler.seen.get(), console.height, said)
    if ended_by is not None:
        signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)


def _says_quit(keyboard: int | None) -> bool:
    assert keyboard is not None
    try:
        keys = os.read(keyboard, 64)
    except OSError:
        return True  # the terminal is gone
    return not keys or b"q" in keys or b"Q" in keys or b"\x03" in keys


@contextmanager
def _wake_ups(view: LiveView[Any], interval: float) -> Iterator[tuple[int, _Sampler]]:
    """A pipe that is readable when there is something to do: a sample, a new size of the terminal,
    a signal that is to end the program once the terminal is restored."""
    caught = (signal.SIGWINCH, signal.SIGCONT, signal.SIGINT, *_ENDING)
    try:
        with signals_in_pipe(caught) as pipe:
            sampler = _Sampler(view, interval, pipe[1])
            yield pipe[0], sampler
    finally:
        for descriptor in pipe if sampler.end() else ():
            os.close(descriptor)


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys are read as they are typed, and not shown."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
