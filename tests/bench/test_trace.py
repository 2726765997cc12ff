"""The trace of one read: it sees C and Python, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.mounting import requires_fuse
from tests.support.programs import execute
from tests.support.surroundings import REPOSITORY, program


@requires_fuse
@program("gcc")
@program("addr2line")
@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("resident", ["opens_answer", "resident_enter", "resident_leave"]),
        ("cold-small", ["opens_answer", "small_read", "SmallFiles.run", "resident_put"]),
    ],
)
def test_a_read_from_its_open_to_its_copy(tmp_path: Path, case: str, shown: list[str]) -> None:
    command = [sys.executable, "-m", "bench.trace", case, "--json", "--data-path", "relay"]
    done = execute(command, cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    functions = [step["function"] for step in said["all"]["order"]]
    assert [name for name in functions if name in shown] == shown
    assert len(functions) == said["all"]["functions"] >= said["read"]["functions"] > len(shown)
    assert (said["all"]["changes"] > 0) == (case == "cold-small")
    assert list(tmp_path.iterdir()) == []
