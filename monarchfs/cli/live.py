"""A screen that is drawn again and again, or lines: ``status --watch`` and ``top``."""

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

from monarchfs.cli.child import signals_in_pipe

Seen = TypeVar("Seen")

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_CAUGHT = (signal.SIGWINCH, signal.SIGCONT, signal.SIGINT, *_ENDING)


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


def show(
    view: LiveView[Any], interval: float, *, as_json: bool = False, screen: bool = True
) -> int:
    """Shows what is looked at, every ``interval`` seconds, until q or Ctrl-C on a terminal; returns
    0. Without ``screen`` the lines, there too."""
    console = Console()
    try:
        if as_json or not screen or not console.is_terminal or console.is_dumb_terminal:
            for seen in _looks(view, interval, threading.Event()):
                text = json.dumps(view.to_json(seen)) if as_json else "\n".join(view.lines(seen))
                print(text, flush=True)
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


def _show_on_screen(console: Console, view: LiveView[Any], interval: float) -> None:
    """Looks in a thread of its own, so that keys work while a mount does not answer; nobody waits
    for that thread. It ends itself by a signal once the terminal is restored."""
    samples: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tick = os.eventfd(0)  # never closed: the thread may use it when all this is over
    ended = threading.Event()

    def sample() -> None:
        for seen in _looks(view, interval, ended):
            samples.put(seen)
            os.eventfd_write(tick, 1)
        samples.put(None)
        os.eventfd_write(tick, 1)

    ended_by: signal.Signals | None = None
    with signals_in_pipe(_CAUGHT) as signals, _keys_at_once() as keyboards:
        threading.Thread(target=sample, daemon=True).start()
        with Live("asking ...", console=console, screen=True, auto_refresh=False) as live:
            while ended_by is None:
                live.refresh()
                awake = select.select([tick, signals, *keyboards], [], [])[0]
                if any(keyboard in awake and _says_quit(keyboard) for keyboard in keyboards):
                    break
                caught = os.read(signals, 1 << 12) if signals in awake else b""
                if signal.SIGINT in caught:
                    break
                ended_by = next((one for one in _ENDING if one in caught), None)
                if tick in awake:
                    os.eventfd_read(tick)
                    seen = [samples.get() for _ in range(samples.qsize())]
                    if None in seen:
                        break
                    footer = f"q quits · every {interval:g} s · {time.strftime('%H:%M:%S')}"
                    live.update(view.draw(seen[-1], console.height, footer))
    ended.set()
    if ended_by is not None:
        signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)


def _says_quit(keyboard: int) -> bool:
    try:
        keys = os.read(keyboard, 64)
    except OSError:
        return True  # the terminal is gone
    return not keys or b"q" in keys or b"Q" in keys or b"\x03" in keys


@contextmanager
def _keys_at_once() -> Iterator[list[int]]:
    """The keyboard, if there is one: keys are read as they are typed, and not shown."""
    if not sys.stdin.isatty():
        yield []
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield [keyboard]
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
