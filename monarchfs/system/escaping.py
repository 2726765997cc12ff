"""Text of others' making, such as names of files, where people read it: on a terminal, in a log."""

from __future__ import annotations

import logging


def printable(value: object) -> str:
    """``value`` on one line that does nothing to a terminal: a path may hold line breaks, escape
    sequences and bytes that are no text."""
    text = str(value).encode(errors="backslashreplace").decode()
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class OneLine(logging.Formatter):
    """What a message quotes makes no line of its own, nor moves a cursor; a traceback keeps its
    lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.exc_info or record.exc_text or record.stack_info:
            return "\n".join(map(printable, text.split("\n")))
        return printable(text)
