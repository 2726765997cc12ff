"""Bad input on the command line: one clear line says so, and nothing else is said."""

from __future__ import annotations

import pytest

from monarchfs.cli.main import main
from tests.mounting import Mount


def assert_refused(
    mount: Mount, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    """``{mnt}`` stands for the mount point, in the arguments and in what is to be said."""
    named = [argument.replace("{mnt}", str(mount.path)) for argument in arguments]
    assert main(named) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("monarchfs: ")
    assert captured.err.count("\n") == 1
    assert words.replace("{mnt}", str(mount.path)) in captured.err
