"""Running other programs."""

import subprocess
from collections.abc import Sequence
from os import PathLike
from typing import IO, Any

Words = Sequence[str | PathLike[str]]


def execute(
    words: Words, *, timeout: float = 100, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, check=check, **more
    )


def ip(pid: int, words: str) -> None:
    """ip(8) in the network namespace of a process."""
    execute(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *words.split()], check=True)


class Running(subprocess.Popen[str]):
    """A program that is told and says lines of text."""

    stdin: IO[str]
    stdout: IO[str]

    def __init__(self, words: Words, **more: Any) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__(words, text=True, **{**pipes, **more})

    def tell(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def line(self) -> str:
        return self.stdout.readline()
