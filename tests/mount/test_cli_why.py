"""``monarchfs why`` on real mounts; what commands that take paths say of bad input."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.fuse.mountinfo import split_below
from tests.support import trees
from tests.support.mounting import (
    Bench,
    Mount,
    assert_refused,
    bench,
    requires_fuse,
    requires_root,
    run,
    wait_for,
)
from tests.support.timing import Stopwatch

KIB = 1024


def fill(source: Path) -> Path:
    trees.write_files(source, {name: os.urandom(60 * KIB) for name in ("a", "d/b", "d/c")})
    (source / "link").symlink_to("d/b")
    (source / "away").symlink_to("/etc")
    (source / "loop").symlink_to("loop")
    os.mkfifo(source / "fifo")
    return source


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    """For tests that copy nothing."""
    with bench() as work:
        yield work.mount(fill(work.path / "src"), "--freshness", "immutable")


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


@requires_root
@requires_fuse
def test_from_remote_to_resident_and_back(work: Bench) -> None:
    mount = work.mount(fill(work.path / "src"), tier="100K")
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


@requires_root
@requires_fuse
def test_a_source_that_hangs(work: Bench) -> None:
    source = work.faulty_source(fill(work.path / "src"))
    mount = work.mount(source.path, "--freshness", "ttl=0")
    assert run("warm", str(mount.path), "a", "--wait").returncode == 0
    source.faults(hang=["lookup a", "getattr a", "lookup d", "getattr d", "getattr", "lookup"])
    started = Stopwatch()
    (report,) = why(mount.path / "a")
    assert (report["state"], report["source_responding"]) == ("resident", False)
    done = run("why", str(mount.path / "a"))
    assert done.stdout.endswith("  the source does not answer: this is what is known without it\n")
    done = run("why", str(mount.path / "d" / "c"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "the source does not answer, and nothing is known of it here" in done.stderr
    started.check(30)
    source.faults()


@requires_root
@requires_fuse
def test_one_that_fails_is_told_of(work: Bench) -> None:
    source = work.faulty_source(fill(work.path / "src"))
    mount = work.mount(source.path)
    source.faults(fail={"read a": 5})
    assert run("warm", str(mount.path), "a").returncode == 0
    wait_for(lambda: why(mount.path / "a")[0]["cause"] == "copying failed", "the failure")
    (report,) = why(mount.path / "a")
    assert report["reason"].startswith("copying failed: Input/output error (")
    assert "; it is tried again in " in report["reason"]
    source.faults()
    wait_for(lambda: why(mount.path / "a")[0]["state"] == "resident", "the next try")


@requires_root
@requires_fuse
def test_by_way_of_links_and_some_of_many(mount: Mount, work: Bench) -> None:
    link = work.path / "elsewhere"
    link.symlink_to(mount.path)
    reports = why(link / "a", mount.path / "nope", mount.path / "fifo", mount.path / "link")
    by_path = {report["path"]: report for report in reports}
    assert by_path[str(mount.path / "a")]["type"] == "file"
    assert by_path[str(mount.path / "fifo")]["type"] == "other"
    assert by_path[str(mount.path / "link")]["size_bytes"] == 60 * KIB
    assert "nope: no such file" in by_path[str(mount.path / "nope")]["error"]
    done = run("why", str(mount.path / "a"), str(mount.path / "nope"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stdout.startswith(f"{mount.path}/a: ")


BAD_WHY = [
    ([], 2, "PATH"),
    (["{mnt}/nope"], 1, "{mnt}/nope: no such file or directory"),
    (["{mnt}/nope", "{mnt}/neither"], 1, "(and 1 more)"),
    (["{mnt}/d/nope/deeper"], 1, "no such file"),
    (["{mnt}/a/x"], 1, "a is not a directory"),
    (["{mnt}/away"], 1, "leads out of the mount"),
    (["{mnt}/away/passwd"], 1, "leads out of the mount"),
    (["{mnt}/loop"], 1, "too many symbolic links"),
    ([""], 2, "empty"),
    (["/"], 2, "/ is not in a monarchfs mount"),
    (["/etc/passwd"], 2, "/etc/passwd is not in a monarchfs mount"),
    (["/proc/self/root"], 2, "is not in a monarchfs mount"),
    (["{mnt}x"], 2, "is not in a monarchfs mount"),
    (["{mnt}/.."], 2, "is not in a monarchfs mount"),
    (["{mnt}/../a"], 2, "is not in a monarchfs mount"),
    (["{mnt}", "a"], 2, "name it as MOUNTPOINT/PATH"),
    (["nowhere"], 2, "is not in a monarchfs mount"),
    (["{mnt}/" + "x" * 300], 1, "File name too long"),
    (["{mnt}/" + "x/" * 2000], 1, "no such file"),
    (["{mnt}/a\nb"], 1, "a b: no such file"),
    (["{mnt}/\udcff"], 1, "\\udcff: no such file"),
    (["{mnt}/a", "--wait"], 2, "--wait"),
    (["{mnt}/a", "--jso"], 2, "--jso"),
    (["-x"], 2, "PATH"),
    (["{mnt}/a\0b"], 2, "NUL"),
]


OTHERS = ("warm", "evict", "pin", "unpin", "refresh")

BAD_PATHS = [
    ([], 2, "MOUNTPOINT"),
    (["{mnt}", "nope"], 1, "o such file or directory"),
    (["{mnt}", "nope/deeper"], 1, "o such file or directory"),
    (["{mnt}", "d", "nope"], 1, "o such file or directory"),
    (["{mnt}", "/etc/passwd"], 2, "/etc/passwd is not below"),
    (["{mnt}", "{mnt}x"], 2, "is not below"),
    (["{mnt}", "{mnt}/../x"], 2, "is not below"),
    (["{mnt}", ".."], 2, ".. is not below"),
    (["{mnt}", "a/../.."], 2, "is not below"),
    (["{mnt}", "/"], 2, "/ is not below"),
    (["{mnt}", ""], 2, "a path is empty"),
    (["{mnt}", "a\0b"], 2, "NUL"),
    (["{mnt}", "a\nb"], 1, "o such file or directory"),
    (["{mnt}", "x" * 300], 1, "ile name too long"),
    (["{mnt}", "x/" * 2000], 1, "o such file or directory"),
    (["{mnt}", "\udcff"], 1, "o such file or directory"),
    (["{mnt}", "--", "-x"], 1, "o such file or directory"),
    (["{mnt}/d", "b"], 2, "is not below {mnt}:"),
    (["{mnt}x", "a"], 1, "is not a monarchfs mount"),
    (["/proc", "self"], 1, "/proc is not a monarchfs mount"),
    (["/nowhere/at/all", "a"], 1, "is not a monarchfs mount"),
    (["", "a"], 2, "empty"),
    (["{mnt}", "a", "--watch"], 2, "--watch"),
    (["{mnt}", "a", "-x"], 2, "-x"),
    (["{mnt}", "a", "--json=1"], 2, "--json"),
]


BAD_WARM = [
    (["{mnt}", "nope"], 1, "nope: no such file or directory in the mount"),
    (["{mnt}", "a/x"], 1, "a is not a directory"),
    (["{mnt}", "fifo"], 1, "fifo is no file or directory"),
    (["{mnt}", "away"], 1, "away: a symbolic link leads out of the mount"),
    (["{mnt}", "away/passwd"], 1, "leads out of the mount"),
    (["{mnt}", "--check", "--wait"], 2, "--check only looks"),
    (["{mnt}", "--check", "--metadata"], 2, "--check only looks"),
    (["{mnt}", "--wait=5"], 2, "--wait"),
    (["{mnt}", "--chec"], 2, "--chec"),
    (["{mnt}", "-x"], 2, "-x"),
    (["{mnt}x"], 1, "is not a monarchfs mount"),
    ([""], 2, "empty"),
]

BAD_INPUT = [("why", *row) for row in BAD_WHY] + [("warm", *row) for row in BAD_WARM]
BAD_INPUT += [(command, *row) for row in BAD_PATHS for command in OTHERS]


@requires_root
@requires_fuse
@pytest.mark.parametrize(("command", "arguments", "code", "words"), BAD_INPUT)
def test_bad_input(
    mount: Mount,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert_refused(mount, capsys, [command, *arguments], code, words)


@requires_root
@requires_fuse
def test_all_is_found_before_anything_is_done(mount: Mount) -> None:
    done = run("pin", str(mount.path), "d/c", "nope")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert why(mount.path / "d" / "c")[0]["pinned"] is False


@requires_root
@requires_fuse
def test_without_a_daemon(work: Bench) -> None:
    mount = work.mount(fill(work.path / "src"))
    with open(next(Path(f"/proc/{mount.worker_pid()}").glob("stat"))) as stat:
        supervisor = int(stat.read().rpartition(")")[2].split()[1])
    worker = mount.worker_pid()
    for pid in (supervisor, worker):
        os.kill(pid, 9)
    wait_for(lambda: run("status", str(mount.path)).returncode, "the daemon to be gone")
    for command in (["why", f"{mount.path}/a"], *([c, str(mount.path), "a"] for c in OTHERS)):
        done = run(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "monarchfs umount" in done.stderr


def test_where_a_path_is_split(tmp_path: Path) -> None:
    mounts = ["/mnt/data", "/mnt/data/inner", str(tmp_path / "here")]
    (tmp_path / "link").symlink_to("here/d")
    (tmp_path / "loop").symlink_to("loop")
    for path, expected in (
        ("/mnt/data", ("/mnt/data", "")),
        ("/mnt/data/a/b", ("/mnt/data", "a/b")),
        ("/mnt/data/inner/x", ("/mnt/data/inner", "x")),
        ("/mnt/database", None),
        ("/mnt", None),
        ("/", None),
        (f"{tmp_path}/link/x", (f"{tmp_path}/here", "d/x")),
        (f"{tmp_path}/loop/x", None),
    ):
        assert split_below(path, mounts) == expected
