"""What ``monarchfs status`` prints for people; the worst that it and ``umount`` can be asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli import status as cli_status
from monarchfs.cli.main import main
from monarchfs.cli.status_text import format_list, format_report
from monarchfs.control.registration import Registered, Registration
from monarchfs.fuse.mountinfo import read_mountinfo
from monarchfs.supervisor.recover import FoundMount
from monarchfs.text.sizes import format_bytes
from monarchfs.types import OperationError
from tests.support.mounting import MONARCHFS, REPOSITORY, Bench, requires_fuse, requires_root

REPORT = {
    "source": "/lustre/d\udcff",
    "mountpoint": "/mnt/d",
    "state": "serving",
    "data_path": "relay",
    "tiers": [
        {"path": "/dev/shm", "capacity_bytes": 1 << 30, "used_bytes": 1 << 29, "files": 3},
        {"path": "/scratch", "capacity_bytes": 0, "used_bytes": 0, "files": 0},
    ],
    "files": {"known": 10, "resident": 3, "partial": 1},
    "source_io": {
        "read_bytes": 5 << 20,
        "demand_read_bytes": 1,
        "prefetch_read_bytes": 1536,
        "operations": 7,
    },
    "served": {"local_opens": 2, "local_file_bytes": 100 << 30},
    "prefetch": {"queued": 4, "active": 1, "failed": 0},
    "worker": {"pid": None, "restarts": 0},
}


def test_a_report_for_people() -> None:
    assert format_report(REPORT).splitlines() == [
        "/lustre/d\\udcff on /mnt/d",
        "  state     serving, relay",
        "  tier      /dev/shm: 512M of 1.0G (50%), 3 files",
        "  tier      /scratch: 0 bytes of 0 bytes, 0 files",
        "  files     known 10, resident 3, partial 1",
        "  source    read 5.0M, demand read 1 bytes, prefetch read 1.5K, operations 7",
        "  served    local opens 2, local files 100G",
        "  prefetch  queued 4, active 1, failed 0",
        "  worker    pid -, restarts 0",
    ]


def test_peers_are_lines_of_their_own() -> None:
    peers = [
        {"name": "b", "has_files": 7, "read_files": 3, "read_bytes": 1536, "error": None},
        {"name": "c", "has_files": 0, "read_files": 0, "read_bytes": 0, "error": "status 403"},
        {"name": "d", "avoided": True},
    ]
    assert format_report({"peers": peers}).splitlines()[2:] == [
        "  peer      b: has 7 files, gave 3 (1.5K)",
        "  peer      c: has 0 files, gave 0 (0 bytes); does not answer: status 403",
        "  peer      d: has 0 files, gave 0 (0 bytes); does not answer: it failed a moment ago",
    ]


def test_of_many_peers_a_few_are_shown() -> None:
    lines = format_report({"peers": [{"name": f"n{n}"} for n in range(9)]}).splitlines()[2:]
    assert len(lines) == 9
    assert lines[-1].strip() == "and others: see monarchfs peers"


def test_a_report_may_lack_anything() -> None:
    assert format_report({}).splitlines() == ["? on ?", "  state     "]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0K"),
        (10 << 20, "10M"),
        (3 << 39, "1.5T"),
        (2 << 50, "2.0P"),
    ],
)
def test_bytes_read_like_sizes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_what_hangs_or_is_gone_is_said_with_its_age() -> None:
    report = {
        **REPORT,
        "state": "worker not answering",
        "age_seconds": 12.0,
        "uptime_seconds": 3700.0,
        "worker": {"pid": 5, "restarts": 1, "error": None},
    }
    lines = format_report(report).splitlines()
    assert lines[1:3] == [
        "  state     worker not answering, relay",
        "            what follows is 12 s old",
    ]
    assert lines[-2:] == ["  worker    pid 5, restarts 1", "  up        1 h 1 min"]
    report |= {"state": "down", "worker": {"pid": None, "error": "the worker was\nkilled"}}
    assert "down, relay, the worker was\\nkilled" in format_report(report).splitlines()[1]


def test_all_mounts_are_a_table() -> None:
    assert format_list([]) == "nothing is mounted"
    gone = {"source": "/s\n", "mountpoint": "/mnt/\x1b[2J", "state": "dead"}
    assert format_list([REPORT, gone]).splitlines() == [
        "MOUNT POINT   SOURCE           STATE    RESIDENT  LOCAL  USED",
        "/mnt/d        /lustre/d\\udcff  serving  3         100%   512M of 1.0G",
        "/mnt/\\x1b[2J  /s\\n             dead     -         -      -",
    ]


def found(number: int) -> FoundMount:
    registration = Registration(f"/mnt{number}", 0, "/src", 0, os.getpid(), 0, "/state", 0)
    return FoundMount(f"/mnt{number}", "/src", None, Registered("/nowhere", 0, registration))


def test_many_that_say_nothing_take_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def request(registered: Registered, message: object, seconds: float) -> dict[str, Any]:
        given.append(seconds)
        raise OperationError(f"no answer within {seconds:g} s")

    monkeypatch.setattr(cli_status, "request", request)
    monkeypatch.setattr(FoundMount, "supervisor_alive", True)
    monkeypatch.setattr(cli_status, "_ANSWER_SECONDS", 0.0)  # the time for all of them is over
    monkeypatch.setattr(cli_status, "_LEAST_ANSWER_SECONDS", 0.01)
    reports = cli_status.reports_of([found(number) for number in range(40)])
    assert [report["mountpoint"] for report in reports] == [f"/mnt{n}" for n in range(40)]
    assert {report["state"] for report in reports} == {"silent"}
    assert max(given) <= 0.01


# The worst that one may type. No mount is needed: nothing of it is one.


@pytest.fixture
def odd_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dir").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nosuch")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    said, silent = (captured.err, captured.out) if code else (captured.out, captured.err)
    assert silent == ""
    assert said.count("\n") == 1
    assert said.removesuffix("\n").isprintable()
    assert words in said
    assert said.startswith("monarchfs: ") == bool(code)


NO_MOUNT = "is not a monarchfs mount: see monarchfs status"
ODD_PATHS = [
    *("nosuch", "/", "/proc", "/proc/self/fd/0", "/dev/null", "..", "~/x"),
    *("file", "file/x", "dir", "loop", "dangling", "fifo"),
    *("x" * 5000, "a/" * 3000, "two\nlines", "\x1b[2J", "\r\x08", "\udcff", "\u202e", " "),
]


@pytest.mark.parametrize("path", ODD_PATHS, ids=lambda path: ascii(path[:12]))
def test_status_of_what_is_no_mount(
    odd_place: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    assert_one_line(capsys, ["status", path], 1, NO_MOUNT)
    assert_one_line(capsys, ["status", path, "--json", "--watch"], 1, NO_MOUNT)


WORST_STATUS = [
    ([""], 2, "a path is empty"),
    (["a\0b"], 2, "NUL byte"),
    (["dir", "dir"], 2, "unrecognized arguments: dir"),
    (["--yaml"], 2, "--yaml"),
    (["--js"], 2, "--js"),
    (["--json=yes"], 2, "--json"),
    (["--watch", "0"], 2, "0 seconds"),
    (["--watch", "-1"], 2, "'-1' is not a time"),
    (["--watch=-1"], 2, "'-1' is not a time"),
    (["--watch="], 2, "'' is not a time"),
    (["--watch", "2x"], 2, "'2x' is not a time"),
    (["--watch", "1e400"], 2, "'1e400' is not a time"),
    (["--watch", "1e300"], 2, "at most"),
    (["--watch", "100000"], 2, "use 0.1 to 86400"),
    (["--watch", "0.01"], 2, "use 0.1 to 86400"),
    (["--watch", "nan", "dir"], 2, "'nan' is not a time"),
    (["--watch", "inf", "dir"], 2, "'inf' is not a time"),
    (["dir", "--watch", "soon"], 2, "'soon' is not a time"),
    (["dir", "--watch", "2", "--watch", "x"], 2, "'x' is not a time"),
    (["--watch", "dir"], 1, NO_MOUNT),
    (["--watch", "./5"], 1, NO_MOUNT),
    (["--watch", "2", "dir"], 1, NO_MOUNT),
    (["--watch", "2", "3"], 1, NO_MOUNT),
    (["--watch", "--json", "dir"], 1, NO_MOUNT),
]


@pytest.mark.parametrize(("arguments", "code", "words"), WORST_STATUS, ids=str)
def test_status_of_nonsense(
    odd_place: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert_one_line(capsys, ["status", *arguments], code, words)


# In a chroot it is none.
ROOT_IS_A_MOUNT = any(mount.mountpoint == "/" for mount in read_mountinfo())

WORST_UMOUNT = [
    ([], 2, "MOUNTPOINT"),
    ([""], 2, "a path is empty"),
    (["a\0b"], 2, "NUL byte"),
    (["dir", "dir"], 2, "unrecognized arguments: dir"),
    (["--force", "dir"], 2, "--force"),
    (["dir", "--time", "3"], 2, "--time"),
    (["/"], 2, "use umount") if ROOT_IS_A_MOUNT else (["/"], 0, "is not mounted"),
    (["/proc"], 2, "type proc"),
    (["dir", "--timeout"], 2, "expected one argument"),
    *((["dir", "--timeout", text], 2, "is not a time") for text in ("soon", "5x", "", " ", "0x9")),
    *((["dir", "--timeout", text], 2, "is not a time") for text in ("-1", "nan", "inf", "1e400")),
    (["dir", "--timeout", "0"], 2, "0 seconds"),
    (["dir", "--timeout", "1e300"], 2, "1e+06 at most"),
    (["nosuch", "--timeout", "0"], 2, "0 seconds"),
    *(
        ([path], 0, "is not mounted")
        for path in ODD_PATHS
        if path not in ("/", "/proc", "/dev/null")
    ),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), WORST_UMOUNT, ids=lambda value: ascii(value)[:30]
)
def test_umount_of_nonsense(
    odd_place: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    before = sorted(os.listdir(odd_place))
    assert_one_line(capsys, ["umount", *arguments], code, words)
    assert sorted(os.listdir(odd_place)) == before


@pytest.mark.parametrize(
    "arguments", [["status"], ["status", "--json"], ["completion", "bash"]], ids=str
)
def test_output_that_cannot_be_written(arguments: list[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}

    def run(stdout: Any, *command: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, *MONARCHFS, *arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
        )
        return done.returncode, done.stderr

    with open("/dev/full", "w") as full:
        line = "monarchfs: cannot write the output: No space left on device\n"
        assert run(full) == (1, line)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        assert run(nobody) == (0, ""), "whoever reads may leave"
        environment["PYTHONUNBUFFERED"] = "1"
        assert run(nobody) == (0, "")
    assert run(None, "sh", "-c", 'exec "$@" >&-', "sh") == (0, "")


def keys_of(report: dict[str, Any]) -> set[str]:
    found = set(report)
    for value in report.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                found |= set(part)
    return found


@requires_root
@requires_fuse
def test_every_key_is_documented(work: Bench) -> None:
    source = work.path / "source"
    source.mkdir()
    report = work.mount(source).status()
    usage = (REPOSITORY / "docs" / "USAGE.md").read_text()
    section = usage[usage.index("## Looking") :]
    section = section[: section.index("\n## ", 1)]
    section = section.replace("[]`", "`")
    assert [key for key in sorted(keys_of(report)) if f"`{key}`" not in section] == []
    assert {"age_seconds", "uptime_seconds", "left_bytes", "operation_seconds"} <= keys_of(report)
