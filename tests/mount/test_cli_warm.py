"""``monarchfs warm`` and ``why`` on real mounts, and what commands that take paths say of bad ones.

What they print is in tests/golden/commands, what the daemon does in tests/layers/test_warm.py and
tests/layers/test_reasons.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import surroundings, trees
from tests.support.mounting import (
    MONARCHFS,
    Bench,
    Mount,
    assert_refused,
    kill_each,
    requires_mounts,
    run,
    wait_for,
)

pytestmark = requires_mounts

KIB = 1024
SIZES = """
import os, sys
for directory, _, names in os.walk(sys.argv[1]):
    for name in names:
        print(os.lstat(os.path.join(directory, name)).st_size)
"""

FILES = 40
BYTES = 30_000
COMMANDS = ("warm", "evict", "pin", "unpin", "refresh")


def fill(source: Path) -> Path:
    trees.write_files(source, {f"d{n % 4}/file {n}": os.urandom(BYTES) for n in range(FILES)})
    return source


def warm(mount: Mount, *arguments: str) -> dict[str, object]:
    done = run("warm", str(mount.path), *arguments, "--json")
    assert done.stderr == ""
    result: dict[str, object] = json.loads(done.stdout)
    result["code"] = done.returncode
    return result


def test_all_is_copied(work: Bench) -> None:
    mount = work.mount(fill(work.path / "src"), "--prefetch", "none")
    checked = warm(mount, "--check")
    assert (checked["code"], checked["files"], checked["remote"]) == (1, FILES, FILES)
    assert mount.status()["source_io"]["read_bytes"] == 0
    done = run("warm", str(mount.path), "--wait")
    assert (done.returncode, done.stderr) == (0, "")
    size = f"{FILES} files, 1.1M"
    assert done.stdout == f"resident: {size} of {size} (copied now: {size})\n"
    assert warm(mount, "--check")["code"] == 0
    status = mount.status()
    assert status["source_io"]["read_bytes"] == FILES * BYTES
    # Names and attributes, too: nobody asks the source again.
    before = status["source_io"]["operations"]
    listed = subprocess.run(
        [sys.executable, "-c", SIZES, str(mount.path)], capture_output=True, timeout=30, check=True
    )
    assert listed.stdout.count(b"%d\n" % BYTES) == FILES
    assert mount.status()["source_io"]["operations"] == before


def test_an_interrupted_wait_ends_the_waiting_only(work: Bench) -> None:
    source = work.faulty_source(fill(work.path / "src"))
    mount = work.mount(source.path)
    source.faults(delay=0.02)
    command = [*MONARCHFS, "warm", str(mount.path), "--wait"]
    waiting = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )
    wait_for(lambda: mount.status()["files"]["resident"], "the first copies")
    waiting.send_signal(signal.SIGINT)
    out, error = waiting.communicate(timeout=20)
    assert (waiting.returncode, out, error.count("\n")) == (-signal.SIGINT, "", 1)
    assert error.startswith("monarchfs: interrupted the waiting; the mount goes on with it")
    source.faults()
    wait_for(lambda: warm(mount, "--check")["code"] == 0, "copying to end")


def test_on_a_terminal_there_is_a_bar(work: Bench) -> None:
    source = work.faulty_source(fill(work.path / "src"))
    mount = work.mount(source.path)
    source.faults(delay=0.03)
    ours, theirs = surroundings.open_terminal()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*MONARCHFS, "warm", str(mount.path), "--wait"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd="/",
        env=environment,
    )
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # EIO: the other end is closed
            break
    out, _ = process.communicate(timeout=20)
    os.close(ours)
    assert process.returncode == 0
    assert out.startswith(b"resident: ")
    assert b"files" in seen
    assert b"\x1b[" in seen


# Why a file is where it is.


def why(*paths: str | Path) -> list[dict[str, Any]]:
    done = run("why", *map(str, paths), "--json")
    assert done.stderr == ""
    reports: list[dict[str, Any]] = json.loads(done.stdout)["paths"]
    assert done.returncode == any("error" in report for report in reports)
    return reports


def attribute(path: Path, name: str) -> str:
    done = subprocess.run(
        ["getfattr", "--only-values", "-n", f"user.monarchfs.{name}", path],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout


def files_to_explain(work: Bench) -> Path:
    source = work.path / "src"
    trees.write_files(source, {name: os.urandom(60 * KIB) for name in ("a", "d/b", "d/c")})
    (source / "link").symlink_to("d/b")
    (source / "away").symlink_to("/etc")
    (source / "loop").symlink_to("loop")
    os.mkfifo(source / "fifo")
    return source


def test_from_remote_to_resident_and_back(work: Bench) -> None:
    mount = work.mount(files_to_explain(work), tier="100K")
    a, b = mount.path / "a", mount.path / "d" / "b"
    (report,) = why(a)
    assert (report["state"], report["reason"]) == ("remote", "not opened yet")
    assert run("warm", str(mount.path), "a", "--wait").returncode == 0
    done = run("why", str(a))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{a}: resident in {work.path}/tier\n  copied: ")
    assert run("warm", str(mount.path), "d/b", "--wait").returncode == 0
    (report,) = why(b)
    assert report["cause"] == "no room"
    assert report["reason"].startswith("no room: it needs 64K, 24K short when it was wanted; ")
    assert report["reason"] == attribute(b, "reason")
    assert (attribute(a, "state"), attribute(a, "tier")) == ("resident", f"{work.path}/tier")
    done = run("evict", str(mount.path), "a", "--json")
    counts = {"files": 1, "bytes": 60 * KIB, "kept": 0, "not_listed": 0, "not_looked_at": 0}
    assert json.loads(done.stdout) == counts
    assert run("pin", str(mount.path), "link").returncode == 0
    evicted, waiting = why(a, mount.path / "link")
    assert evicted["reason"].startswith("evicted by hand")
    assert "there is now" in waiting["reason"]
    assert (evicted["pinned"], waiting["pinned"]) == (False, True)
    done = run("why", str(mount.path))
    assert done.stdout.startswith(f"{mount.path}: 0 of 2 files (0 bytes of 120K) resident\n")
    assert "  1 evicted\n" in done.stdout
    assert "not listed yet" in done.stdout


def test_what_a_daemon_says_of_bad_paths(work: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line; and all is found before anything is done."""
    mount = work.mount(files_to_explain(work), "--freshness", "immutable")
    for words, refusal in (
        (
            "why {mnt}/nope {mnt}/neither",
            "(and 1 more)",
        ),
        ("why {mnt}/d/nope/deeper", "no such file"),
        ("why {mnt}/a/x", "a is not a directory"),
        ("why {mnt}/away/passwd", "leads out of the mount"),
        ("why {mnt}/loop", "too many symbolic links"),
        ("why {mnt}/" + "x" * 300, "File name too long"),
        ("why {mnt}/" + "x/" * 2000, "no such file"),
        ("why {mnt}/\udcff", "\\udcff: no such file"),
        ("warm {mnt} fifo", "fifo is no file or directory"),
        ("warm {mnt} away", "away: a symbolic link leads out of the mount"),
        *((f"{command} {{mnt}} d nope/deeper", "o such file or directory") for command in COMMANDS),
        *((f"{command} {{mnt}} {'x' * 300}", "ile name too long") for command in COMMANDS),
        *((f"{command} {{mnt}} -- -x", "o such file or directory") for command in COMMANDS),
        ("pin {mnt} d/c nope", "no such file"),
    ):
        assert_refused(mount, capsys, words.split(), 1, refusal)
    assert why(mount.path / "d" / "c")[0]["pinned"] is False
    # By way of links.
    link = work.path / "elsewhere"
    link.symlink_to(mount.path)
    file, odd, linked = why(link / "a", mount.path / "fifo", mount.path / "link")
    assert (file["path"], file["type"]) == (str(mount.path / "a"), "file")
    assert (odd["type"], linked["size_bytes"]) == ("other", 60 * KIB)


def test_without_a_daemon(work: Bench) -> None:
    mount = work.mount(files_to_explain(work))
    worker = mount.worker_pid()
    supervisor = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    kill_each((supervisor, worker))
    wait_for(lambda: run("status", str(mount.path)).returncode, "the daemon to be gone")
    for command in (["why", f"{mount.path}/a"], *([c, str(mount.path), "a"] for c in COMMANDS)):
        done = run(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "monarchfs umount" in done.stderr
