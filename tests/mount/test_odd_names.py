"""Names of any bytes: no output moves a cursor or begins a line, and JSON gives them back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import on_disk
from tests.support.mounting import ENVIRONMENT, MONARCHFS, Bench, needs_mounts

ODD = b"a\x1b[31m\nb\xff\xe2\x80\xae\x07c"
"""A colour, a line break, a byte that is no text, a right-to-left override and a bell."""
NAME = os.fsdecode(ODD)


class Oddities:
    """A source, a mount point, a tier and files that are all called so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source, self.point = path / f"src{NAME}", path / f"mnt{NAME}"
        self.point.mkdir()
        (self.source / f"dir{NAME}").mkdir(parents=True)
        self.file = f"dir{NAME}/file{NAME}"
        (self.source / self.file).write_text("content")
        tier, state = f"{path}/tier{NAME}=10M", f"{path}/state{NAME}"
        self.storage = ["--tier", tier, "--state-dir", state, "--log-file", f"{path}/log"]

    def run(self, *words: str, code: int = 0) -> str:
        """What a command prints, which is nothing that a terminal would obey."""
        command = [*MONARCHFS, *words]
        done = subprocess.run(command, capture_output=True, cwd=self.path, env=ENVIRONMENT)
        assert done.returncode == code, (words[0], done.stderr)
        for output in (done.stdout, done.stderr):
            for line in output.decode(errors="surrogateescape").splitlines():
                assert line.isprintable(), (words[0], line)
                assert not line.startswith("b"), (words[0], line)
        return done.stdout.decode() + done.stderr.decode()

    def ask(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code))


def texts(value: object) -> Iterator[str]:
    """All texts in an object of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)


@needs_mounts
def test_every_command_shows_them_escaped_and_gives_them_back(work: Bench) -> None:
    odd = Oddities(work.path)
    source, point, file = os.fspath(odd.source), os.fspath(odd.point), odd.file
    shown = r"a\x1b[31m"
    assert odd.run("mount", source, point, *odd.storage) == ""
    try:
        assert shown in odd.run("mount", source, point, *odd.storage, code=1)
        answer = odd.ask("status", point)
        assert set(texts(answer)) >= {source, point}
        shown_by_ps = Path(f"/proc/{answer['worker']['pid']}/cmdline").read_bytes()
        assert os.fsencode(point) in shown_by_ps.split(b"\0")
        path = os.path.join(point, file)
        assert shown in odd.run("warm", point, file)
        assert shown in odd.run("why", path)
        assert shown in odd.run("status")
        assert shown in odd.run("status", path, code=1)
        assert shown in odd.run("pin", point, "../" + NAME, code=2)
        assert shown in odd.run("evict", point, NAME + "x", code=1)
        for command in ("pin", "unpin", "refresh", "evict"):
            odd.run(command, point, file)
        assert shown in odd.run("doctor", source, "--quick", *odd.storage[:2])
        odd.run("warm", path, "--wait")
        assert path in set(texts(odd.ask("why", path)))
        assert any(file in text for text in texts(odd.ask("why", path + "x", code=1)))
    finally:
        assert odd.run("umount", point) == ""
    assert shown in odd.run("umount", point)
    assert source in set(texts(odd.ask("plan", source, "--quick", *odd.storage[:4])))
    for segment in on_disk.segments(odd.path / f"tier{NAME}"):
        segment.unlink()
    state = odd.storage[3]
    assert shown in odd.run("fsck", state, code=1)
    assert state in set(texts(odd.ask("fsck", state, code=1)))
    assert shown in odd.run("fsck", state + "x", code=2)
    done = odd.run("run", source, *odd.storage, "--report", "--", "true")
    assert shown in done
    assert shown in odd.run("run", source + "x", "--", "true", code=2)
    assert shown in odd.run("mount", source + "x", point, code=2)
    assert shown in odd.run("mount", source, point, "--tier", f"/no{NAME}/x=1G", code=2)
    assert shown in odd.run("mount", source, point, "-o", f"x{NAME}", code=2)
    assert shown in odd.run(f"x{NAME}", code=2)
    for line in (odd.path / "log").read_text().splitlines():
        assert line.isprintable(), line
