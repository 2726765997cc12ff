"""What a command has from its caller: signals that are ignored or blocked, a umask, limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import surroundings
from tests.support.mounting import ENVIRONMENT, MONARCHFS, Bench, as_user, requires_mounts

pytestmark = [*requires_mounts, surroundings.requires_namespaces]

STATES = {
    "children ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "signals blocked": "signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())",
    "no rights for the owner": "os.umask(0o777)",
}
BECOME = "import os, resource, signal, sys; {}; os.execv(sys.argv[1], sys.argv[1:])"
STATE_OF = """
import json, os, signal
print(json.dumps([
    os.umask(0), sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN,
]))
"""


def after(state: str, command: Sequence[str]) -> list[str]:
    """The command with what a caller did before."""
    return [sys.executable, "-c", BECOME.format(state), *command]


def run_after(
    state: str, *arguments: str, user: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        after(state, as_user(user, [*MONARCHFS, *arguments]) if user else [*MONARCHFS, *arguments]),
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env=ENVIRONMENT,
        check=False,
    )


@pytest.fixture
def src(work: Bench) -> Path:
    source = work.path / "src"
    source.mkdir()
    for number in range(3):
        (source / f"file{number}").write_bytes(b"content" * 1000)
    return source


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_every_command_does_what_it_does_elsewhere(work: Bench, src: Path, state: str) -> None:
    mountpoint = work.path / "mnt"
    mountpoint.mkdir()
    tier = ["--tier", f"{work.path}/tier=1G"]
    storage = [*tier, "--state-dir", f"{work.path}/state"]
    umount = ["umount", str(mountpoint)]
    commands = [
        ["doctor", str(src), *tier, "--quick"],
        ["plan", str(src), *tier, "--quick"],
        ["mount", str(src), str(mountpoint), *storage],
        ["warm", str(mountpoint), "--wait"],
        ["cache", "list"],
        umount,
        ["fsck", f"{work.path}/state"],
        ["run", str(src), *storage, "--", "stat", "-f", "-c", "%T", str(src)],
        ["gc", "--dry-run"],
    ]
    try:
        done = {words[0]: run_after(state, *words) for words in commands}
    finally:
        run_after("pass", *umount)
    assert {name: (one.returncode, one.stderr) for name, one in done.items()} == dict.fromkeys(
        done, (0, "")
    )
    assert done["warm"].stdout.startswith("resident: 3 files")
    assert done["run"].stdout == "fuseblk\n"


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_command_of_run_gets_what_it_would_get(work: Bench, src: Path, state: str) -> None:
    program = [sys.executable, "-c", STATE_OF]
    alone = subprocess.run(after(state, program), capture_output=True, text=True, check=True)
    storage = ["--tier", f"{work.path}/tier=1G", "--state-dir", f"{work.path}/state"]
    done = run_after(state, "run", str(src), *storage, "--", *program)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(alone.stdout)
