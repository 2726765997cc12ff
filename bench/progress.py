"""What a run shows of itself: a line that changes on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

REFRESHES_PER_SECOND = 2


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


class Progress:
    """A context manager, for ``count`` measurements one after the other.

    Changing: the measurement that runs, what it says that it does, and when it began.
    """

    def __init__(self, count: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._count = count
        self._number = 0
        self._name = self._doing = ""
        self._minutes = 0.0
        self._began = self._step_began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        return self

    def begin(self, name: str, minutes: float) -> None:
        """``minutes`` is about how long it takes."""
        self._number += 1
        self._name, self._doing, self._minutes = name, "", minutes
        self._began = self._step_began = time.monotonic()
        if not self._console.is_terminal:
            self._print(f"[{self._number}/{self._count}] {name}: about {minutes:g} min")
            return
        self._live = Live(
            console=self._console,
            get_renderable=self.line,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
        )
        self._live.start()

    def say(self, doing: str) -> None:
        """What is being done now."""
        if doing == self._doing:
            return
        self._doing = doing
        if self._live is None:
            self._print(f"  {clock(time.monotonic() - self._began):>5}  {doing}")

    def end(self) -> None:
        """The line goes: something else can be printed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        self._console.print(Text(text))

    def line(self) -> Text:
        """Of a terminal."""
        spent = f"{clock(time.monotonic() - self._began)} of about {clock(60 * self._minutes)}"
        text = Text(f"[{self._number}/{self._count}] ", no_wrap=True, overflow="ellipsis")
        text.append(self._name, "bold")
        text.append(f"  {spent}  ", "dim")
        text.append(self._doing)
        return text

    def __exit__(self, *_: object) -> None:
        self.end()
