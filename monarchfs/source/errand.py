"""Small files that one thread reads, one after the other.

A thread's errand costs more than reading some kilobytes does. But nobody is to wait for a file
because another one of the same errand hangs, or has its turn before: what was not begun can be
taken back, and what was read is told at once if somebody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from monarchfs.types import DirRef, SourceChanged, SourceVersion

Wanted = tuple[DirRef, bytes, SourceVersion]
Answer = bytes | OSError | SourceChanged


class Errand:
    """Shared by the event loop and the thread, each step of which is one under the interpreter's
    lock. Constant: ``files``. Changing: ``answers``, by their places in ``files``."""

    def __init__(self, files: Sequence[Wanted], tell: Callable[[], object]) -> None:
        """``tell`` is called in the thread, when there is an answer that somebody waits for."""
        self.files = files
        self.answers: dict[int, Answer] = {}
        self._tell = tell
        self._todo = deque(range(len(files)))
        self._awaited: set[int] = set()

    # -- for the thread

    def __iter__(self) -> Iterator[int]:
        """The places of those that are to be read, each begun as it is taken."""
        while True:
            try:
                place = self._todo.popleft()
            except IndexError:
                return
            yield place

    def answer(self, place: int, answer: Answer) -> None:
        # In this order, as ``wait_for`` has it in the other: one of both sees what the other did.
        self.answers[place] = answer
        if place in self._awaited:
            self._tell()

    # -- for the event loop

    def take(self, place: int) -> bool:
        """Take one back that was not begun; False where it was."""
        try:
            self._todo.remove(place)
        except ValueError:
            return False
        return True

    def take_all(self) -> list[int]:
        """All of those."""
        taken = []
        while self._todo:
            try:
                taken.append(self._todo.popleft())
            except IndexError:
                break
        return taken

    def wait_for(self, place: int) -> Answer | None:
        """The answer; None: ``tell`` is called when it is there."""
        self._awaited.add(place)
        return self.answers.get(place)
