"""Command lines and what they print: each file of tests/golden/commands is a transcript.

    $ monarchfs pin /mnt/photos a
    < pin {"ok": true, "result": {"files": 1, "bytes": 1536}}
    asked: {"command": "pin", "paths": ["a"]}
    pinned 1 file, 1.5K

A block is a command line (or its words, as JSON, in which ``x*5000`` stands for so many letters),
what the daemon of a mount on /mnt/photos replies to its commands, and what follows from that. A
reply ``@healthy`` is the report of a mount in that state (`fake_daemon.states`). Lines of standard
error and an exit code that is not 0 are marked. Commands run in this process, in a directory
``<dir>`` with files of every kind; they leave it as it was. ``pytest --update-golden`` writes what
follows anew: review the difference.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.cli.main import main
from monarchfs.control.messages import encode_result
from tests.support.fake_daemon import Daemon, Start, only_these, states
from tests.support.golden import DIRECTORY, Golden, unfolded

REPEATED = re.compile(r"^(.*?)(.)\*(\d{3,})$", re.DOTALL)
LONGEST = 3000
ALSO_REQUIRED = "required: MOUNTPOINT, PATH"
"""Python 3.13 names only the first."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    for name in ("COLUMNS", "NO_COLOR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    (tmp_path / "run").mkdir()
    with only_these(tmp_path / "run", monkeypatch) as start:
        yield start
        monkeypatch.undo()
        time.tzset()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "place"
    for name in ("dir", "src", "mnt", "index_is_a_file"):
        (made / name).mkdir(parents=True)
    (made / "file").write_bytes(b"nothing")
    (made / "loop").symlink_to("loop")
    (made / "dangling").symlink_to("nosuch")
    os.mkfifo(made / "fifo")
    (made / "index_is_a_file/index").touch()
    (made / "list").write_text("a\n/mnt/photos/b\n")
    (made / "weights").write_text("1.5\ta\n2\t/mnt/photos/b\n")
    for name, text in (("bare", "1"), ("letters", "x\ta"), ("nan", "nan\ta")):
        (made / name).write_text(text)
    monkeypatch.chdir(made)
    return made


def words_of(line: str) -> list[str]:
    if not line.startswith("["):
        return shlex.split(line)[1:]
    words: list[str] = json.loads(line)
    return [REPEATED.sub(lambda m: m[1] + m[2] * int(m[3]), word) for word in words]


def reply_of(text: str) -> bytes:
    return encode_result(states()[text[1:]]) if text.startswith("@") else text.encode() + b"\n"


def shortened(line: str) -> str:
    return line if len(line) < LONGEST else f"{line[:80]}... ({len(line)} letters)"


@pytest.mark.parametrize("name", sorted(path.name for path in (DIRECTORY / "commands").iterdir()))
def test_commands(
    name: str, start: Start, place: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    daemon: Daemon | None = None
    before = sorted(place.rglob("*"))
    parts = []
    for block in (DIRECTORY / "commands" / name).read_text().split("\n\n"):
        lines = block.splitlines()
        given = [line for line in lines if line.startswith(("# ", "$ ", "< "))]
        replies: dict[str, bytes] = {}
        for line in given:
            if line.startswith("< "):
                _, command, reply = line.split(" ", 2)
                replies[command] = replies.get(command, b"") + reply_of(reply)
        if replies and daemon is None:  # not before: its thread is none of commands that fork
            daemon = start(replies)
        if daemon is not None:
            daemon.answer, daemon.requests = replies, []
        (line,) = [line for line in given if line.startswith("$ ")]
        code = main(words_of(line[2:]))
        out, errors = capsys.readouterr()
        assert (out + errors).replace("\n", "").isprintable()
        if name.startswith("wrong-"):
            assert (len(errors.splitlines()), out) == (1, "") if code else not errors
        shown = [
            *(f"asked: {json.dumps(request)}" for request in (daemon.requests if daemon else ())),
            *unfolded(out),
            *(f"stderr: {line}" for line in errors.splitlines()),
            *([f"exit code {code}"] if code else []),
        ]
        text = "\n".join(shown).replace(str(place), "<dir>").replace(str(place.parent), "<above>")
        text = text.replace(ALSO_REQUIRED, ALSO_REQUIRED.removesuffix(", PATH"))
        parts.append("\n".join([*given, *map(shortened, text.splitlines())]))
    assert sorted(place.rglob("*")) == before
    golden(f"commands/{name}", "\n\n".join(parts) + "\n")
