"""What a command has from its caller: signals that are ignored or blocked, a umask, limits."""

import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.support import surroundings, trees
from tests.support.mounting import (
    ENVIRONMENT,
    MONARCHFS,
    Bench,
    Mount,
    as_user,
    assert_one_line,
    requires_mounts,
    run,
)
from tests.support.programs import execute

pytestmark = [*requires_mounts, surroundings.requires_namespaces]

STATES = {
    "signals": (
        "for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())"
    ),
    "rights and limits": (
        "os.umask(0o777)\n"
        "for name, soft in [('AS', 1 << 30), ('FSIZE', 80 << 20), ('NOFILE', 64)]:\n"
        "    which = getattr(resource, 'RLIMIT_' + name)\n"
        "    resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))\n"
    ),
}
BECOME = "import os, resource, signal, sys\n{}\nos.execvp(sys.argv[1], sys.argv[1:])"
STATE_OF = """
import json, os, resource, signal, sys
print(json.dumps([
    os.umask(0), sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
    *(resource.getrlimit(getattr(resource, "RLIMIT_" + n)) for n in ("AS", "FSIZE", "NOFILE")),
]), os.path.ismount(sys.argv[1]))
"""


def after(state: str, command: Sequence[str]) -> list[str]:
    """The command with what a caller did before."""
    return [sys.executable, "-c", BECOME.format(state), *command]


def run_after(
    state: str, *arguments: str, user: str | None = None
) -> subprocess.CompletedProcess[str]:
    return execute(after(state, as_user(user, [*MONARCHFS, *arguments])), cwd="/", env=ENVIRONMENT)


@pytest.fixture
def src(work: Bench) -> Path:
    return trees.write_files(work.path / "src", {f"file{n}": b"content" * 1000 for n in range(3)})


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_every_command_does_what_it_does_elsewhere(work: Bench, src: Path, state: str) -> None:
    """And that of ``run`` gets what it would get."""
    program = [sys.executable, "-c", STATE_OF, str(src)]
    alone = execute(after(state, program), check=True)
    (work.path / "mnt").mkdir()
    mountpoint, tier = f"{work.path}/mnt", work.storage()[:2]
    umount = ["umount", mountpoint]
    commands = [
        ["doctor", str(src), *tier, "--quick"],
        ["plan", str(src), *tier, "--quick"],
        ["mount", str(src), mountpoint, *work.storage()],
        ["warm", mountpoint, "--wait"],
        ["cache", "list"],
        umount,
        ["fsck", f"{work.path}/state"],
        ["run", str(src), *work.storage(), "--", *program],
        ["gc", "--dry-run"],
    ]
    try:
        done = {words[0]: run_after(state, *words) for words in commands}
    finally:
        run_after("pass", *umount)
    failed = {name: one.stderr for name, one in done.items() if one.returncode or one.stderr}
    assert failed == {}
    assert done["warm"].stdout.startswith("resident: 3 files")
    assert alone.stdout.endswith("] False\n")
    assert done["run"].stdout == alone.stdout.replace("] False", "] True")


def without_processes() -> str:
    """A user of Debian's who has none, as the limit of processes counts all of a user's. A test
    that runs elsewhere on this machine, out of sight, may take one of them at the same time."""
    free = {"news", "uucp", "lp", "mail", "proxy", "backup", "list", "irc"}
    return random.choice(sorted(free - {process.username() for process in psutil.process_iter()}))


def hard(name: str, most: int) -> str:
    return f"resource.setrlimit(resource.RLIMIT_{name}, ({most}, {most}))"


TOO_LOW = [
    pytest.param("AS", 1 << 30, "limited to 1.0G", "needs 3.0G", "ulimit -v", id="address space"),
    pytest.param("DATA", 400 << 20, "limited to 400M", "needs 512M", "ulimit -d", id="memory"),
    pytest.param("FSIZE", 80 << 20, "limited to 80M", "needs 1.0G", "ulimit -f", id="file size"),
    pytest.param("NOFILE", 64, "limited to 64", "needs 256", "ulimit -n", id="open files"),
    pytest.param("NPROC", 30, "more processes", "needs 40", "ulimit -u is 30", id="processes"),
]


@pytest.mark.parametrize(("name", "most", "has", "needs", "remedy"), TOO_LOW)
def test_a_limit_that_is_too_low_is_named_before_anything_is_made(
    work: Bench, src: Path, name: str, most: int, has: str, needs: str, remedy: str
) -> None:
    """That of processes is nothing to root, and counts all of a user's."""
    user = without_processes() if name == "NPROC" else None
    work.path.chmod(0o1777)
    (work.path / "mnt").mkdir()
    before = sorted(work.path.rglob("*"))
    state = hard(name, most)
    done = run_after(state, "mount", str(src), f"{work.path}/mnt", *work.storage(), user=user)
    assert_one_line(done, 1, has, needs, remedy)
    done = run_after(state, "doctor", str(src), *work.storage(), "--quick", user=user)
    assert done.returncode == 1
    (line,) = re.findall("^problem +limits .*", done.stdout, re.M)
    assert needs in line
    done = run_after(state, "run", str(src), *work.storage(), "--", "echo", "ran", user=user)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert needs in done.stderr
    assert sorted(work.path.rglob("*")) == before


@pytest.mark.parametrize("command", ["mount", "plan", "run"])
def test_where_no_process_can_start_a_line_says_so(work: Bench, src: Path, command: str) -> None:
    more = {"mount": [str(src)], "run": ["--", "echo", "ran"]}.get(command, [])
    done = run_after(hard("NPROC", 1), command, str(src), *more, user=without_processes())
    assert (done.returncode, "ran" in done.stdout) == (1, False)
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("monarchfs: Resource temporarily unavailable: the limit of processes")
    assert "ulimit -u" in last


def test_a_file_above_the_limit_of_sizes_is_refused_alone(work: Bench, src: Path) -> None:
    os.truncate(src / "file0", (1 << 30) + 1)
    (work.path / "mnt").mkdir()
    arguments = ["mount", str(src), f"{work.path}/mnt", *work.storage("2G")]
    done = run_after(hard("FSIZE", 1 << 30), *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    mount = Mount(src, work.path / "mnt")
    work.mounts.append(mount)
    for name in ("file0", "file1", "file2"):
        run("warm", str(mount.path), str(mount.path / name), "--wait")
    for name, state in {"file0": b"remote", "file1": b"resident", "file2": b"resident"}.items():
        assert os.getxattr(mount.path / name, "user.monarchfs.state") == state
    assert b"File too large" in os.getxattr(mount.path / "file0", "user.monarchfs.reason")
    assert (mount.path / "file1").read_bytes() == b"content" * 1000
    with open(mount.path / "file0", "rb") as file:
        assert file.read(1 << 20) == b"content" * 1000 + bytes((1 << 20) - 7000)


def test_a_worker_without_descriptors_does_not_die_of_a_request(work: Bench, src: Path) -> None:
    mount = work.mount(src)
    worker = mount.worker_pid()
    used = max(map(int, os.listdir(f"/proc/{worker}/fd"))) + 1
    limits = _, most = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (used, most))
    done = run("warm", str(mount.path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)
    assert mount.status()["state"] == "serving"
    assert run("warm", str(mount.path), "--wait").returncode == 0
    assert mount.status()["worker"]["pid"] == worker
