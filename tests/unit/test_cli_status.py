"""What ``monarchfs status`` prints for people; the worst that it and ``umount`` can be asked."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from monarchfs.cli import status as cli_status
from monarchfs.cli.main import main
from monarchfs.control.registration import Registered, Registration
from monarchfs.fuse.mountinfo import read_mountinfo
from monarchfs.supervisor.recover import FoundMount
from monarchfs.text.sizes import format_bytes
from monarchfs.types import OperationError
from tests.support.fake_daemon import healthy
from tests.support.mounting import MONARCHFS, REPOSITORY, Bench, requires_fuse, requires_root


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


# In a chroot it is none.
ROOT_IS_A_MOUNT = any(mount.mountpoint == "/" for mount in read_mountinfo())


def test_umount_of_the_root(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["umount", "/"])
    captured = capsys.readouterr()
    if ROOT_IS_A_MOUNT:
        assert (code, captured.out, "use umount" in captured.err) == (2, "", True)
    else:
        assert (code, captured.out, captured.err) == (0, "/ is not mounted\n", "")


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
def test_every_key_is_documented_and_in_the_report_of_the_fake_daemon(work: Bench) -> None:
    source = work.path / "source"
    source.mkdir()
    report = work.mount(source).status()
    usage = (REPOSITORY / "docs" / "USAGE.md").read_text()
    section = usage[usage.index("## Looking") :]
    section = section[: section.index("\n## ", 1)]
    section = section.replace("[]`", "`")
    assert [key for key in sorted(keys_of(report)) if f"`{key}`" not in section] == []
    assert {"age_seconds", "uptime_seconds", "left_bytes", "operation_seconds"} <= keys_of(report)
    assert keys_of(healthy()) == keys_of(report) - {"private"}, "tests/support/status.json"
