"""Bad input: one line that names the thing and the remedy, the right exit code, nothing left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarchfs.cli.main import main
from monarchfs.cli.parser import build_parser, commands_of
from monarchfs.cli.umount import say_that_it_waits
from monarchfs.fuse import mount as mount_module
from monarchfs.fuse.connection import FuseConnection
from monarchfs.fuse.mountinfo import find_mount
from monarchfs.supervisor.recover import FoundMount
from monarchfs.types import OperationError
from tests.support.fake_mounts import NOBODY, Area, area, assert_refused, device_mode
from tests.support.mounting import Bench, requires_mounts, run

pytestmark = requires_mounts


@pytest.fixture
def users_area(place: Path) -> Iterator[Area]:
    with device_mode(0o666), area(place, NOBODY) as opened:
        yield opened


def with_storage(work: Area, *arguments: str) -> list[str]:
    return ["mount", *arguments, *work.storage]


def make_file(work: Area, name: str) -> None:
    (work.path / name).write_bytes(b"")


Prepare = Callable[[Area], None]


def nothing(work: Area) -> None:
    pass


def loop(work: Area) -> None:
    (work.path / "loop").symlink_to("loop")


def inside_source(work: Area) -> None:
    (work.path / "src" / "inner").mkdir()


def link_into_source(work: Area) -> None:
    (work.path / "link").symlink_to("src")


def foreign_state(work: Area) -> None:
    (work.path / "state").mkdir()
    shutil.chown(work.path / "state", NOBODY)


def shared_state(work: Area) -> None:
    (work.path / "state").mkdir()
    (work.path / "state").chmod(0o777)


def state_is_a_link(work: Area) -> None:
    (work.path / "elsewhere").mkdir()
    (work.path / "state").symlink_to("elsewhere")


def a_file(work: Area) -> None:
    make_file(work, "file")


def private_source(work: Area) -> None:
    (work.path / "src").chmod(0o700)


BAD_PLACES = [
    pytest.param(nothing, ["nosuch", "mnt"], 2, ["nosuch", "does not exist"], id="no source"),
    pytest.param(a_file, ["file", "mnt"], 2, ["file is not a directory"], id="source a file"),
    pytest.param(loop, ["loop", "mnt"], 2, ["loop of symbolic links"], id="source a loop"),
    pytest.param(
        private_source,
        ["src", "mnt", "--user", NOBODY],
        1,
        ["cannot be read by nobody"],
        id="source unreadable",
    ),
    pytest.param(nothing, ["src", "nomnt"], 2, ["nomnt", "mkdir"], id="no mount point"),
    pytest.param(a_file, ["src", "file"], 2, ["file is not a directory"], id="mount point a file"),
    pytest.param(inside_source, ["src", "src/inner"], 2, ["inside the source"], id="mount inside"),
    pytest.param(inside_source, ["src/inner", "src"], 2, ["hide the source"], id="source inside"),
]


@pytest.mark.parametrize(("prepare", "arguments", "code", "words"), BAD_PLACES)
def test_source_and_mount_point(
    root_work: Area, prepare: Prepare, arguments: list[str], code: int, words: list[str]
) -> None:
    prepare(root_work)
    assert_refused(root_work, with_storage(root_work, *arguments), code, *words)


BAD_STORAGE = [
    pytest.param(nothing, ["--tier", "tier=10B"], ["10B", "16G"], id="nearly nothing"),
    pytest.param(nothing, ["--tier", "tier=8000P"], ["tier", "8000.0P", "80%"], id="no such disk"),
    pytest.param(nothing, ["--tier", "t=1G", "--tier", "t=2G"], ["twice"], id="tier twice"),
    pytest.param(nothing, ["--tier", "no/such/dir=1G"], ["does not exist"], id="tier too deep"),
    pytest.param(a_file, ["--tier", "file=1G"], ["not a directory"], id="tier a file"),
    pytest.param(a_file, ["--tier", "file/t=1G"], ["not a directory"], id="tier below a file"),
    pytest.param(nothing, ["--tier", "src/t=1G"], ["inside the source"], id="tier in source"),
    pytest.param(
        link_into_source, ["--tier", "link/t=1G"], ["inside the source"], id="tier through a link"
    ),
    pytest.param(nothing, ["--tier", ".=1G"], ["the source", "inside tier"], id="source in tier"),
    pytest.param(nothing, ["--tier", "mnt/t=1G"], ["inside the mount point"], id="tier in mount"),
    pytest.param(nothing, ["--tier", "/proc/t=1G"], ["/proc/t", "no size"], id="tier in proc"),
    pytest.param(nothing, ["--state-dir", "/proc/s"], ["/proc/s"], id="state cannot be made"),
    pytest.param(nothing, ["--state-dir", "src/s"], ["inside the source"], id="state in source"),
    pytest.param(foreign_state, [], ["belongs to nobody", "--state-dir"], id="state of another"),
    pytest.param(shared_state, [], ["written by others"], id="state open to others"),
    pytest.param(state_is_a_link, [], ["not a directory"], id="state a link"),
]


@pytest.mark.parametrize(("prepare", "arguments", "words"), BAD_STORAGE)
def test_storage(root_work: Area, prepare: Prepare, arguments: list[str], words: list[str]) -> None:
    prepare(root_work)
    command = ["mount", "src", "mnt", *arguments]
    if "--tier" not in arguments:
        command += ["--tier", "tier=10M"]
    if "--state-dir" not in arguments:
        command += ["--state-dir", "state"]
    # A directory that only the kernel refuses to make is found out late: exit 1.
    code = 1 if "/proc/s" in arguments else 2
    assert_refused(root_work, command, code, *words)


def test_a_missing_prefetch_list(root_work: Area) -> None:
    arguments = with_storage(root_work, "src", "mnt", "--prefetch", "src/../nolist")
    assert_refused(root_work, arguments, 2, "nolist", "No such file", "access")


WORKER_FAILURES = [
    pytest.param("fail", ["the index is on fire"], id="says why"),
    pytest.param("crash", ["exit code 3", "this worker is broken"], id="crashes"),
    pytest.param("silent", ["did not become ready"], id="says nothing"),
]


@pytest.mark.parametrize(("mode", "words"), WORKER_FAILURES)
def test_a_worker_that_does_not_start(root_work: Area, mode: str, words: list[str]) -> None:
    # What the worker put into its state directory stays, so it is there beforehand.
    (root_work.path / "state").mkdir(mode=0o700)
    for name in ("index", "lock", "worker.log"):
        make_file(root_work, f"state/{name}")
    arguments = with_storage(root_work, "src", "mnt", "-o", "start_timeout_seconds=2")
    assert_refused(root_work, arguments, 1, "cannot serve", *words, mode=mode)


def test_a_fresh_state_directory_is_taken_back(root_work: Area) -> None:
    assert_refused(root_work, with_storage(root_work, "src", "mnt"), 1, "on fire", mode="fail")
    assert not (root_work.path / "state").exists()


def test_a_program_that_the_user_may_not_run(root_work: Area) -> None:
    private = root_work.path / "private"
    private.mkdir(mode=0o700)
    python = private / "python3"
    python.symlink_to(sys.executable)
    root_work.python = str(python)
    arguments = with_storage(root_work, "src", "mnt", "--user", NOBODY)
    assert_refused(root_work, arguments, 1, "nobody may not run", str(python))


def test_a_user_needs_the_device(place: Path) -> None:
    with device_mode(0o600), area(place, NOBODY) as work:
        assert_refused(work, with_storage(work, "src", "mnt"), 1, "/dev/fuse", "0666")


def test_a_user_cannot_mount_for_another(users_area: Area) -> None:
    arguments = with_storage(users_area, "src", "mnt", "--user", "root")
    assert_refused(users_area, arguments, 2, "only root")


def test_a_users_tier_must_be_writable(users_area: Area) -> None:
    arguments = ["mount", "src", "mnt", "--tier", "/usr/share/t=1G", "--state-dir", "state"]
    assert_refused(users_area, arguments, 2, "/usr/share", "not writable")


def test_a_user_mounts_only_on_own_directories(users_area: Area) -> None:
    os.chown(users_area.path / "mnt", 0, 0)
    point = f"{users_area.path}/mnt"
    words = (
        f"on {point}: user has no write access to mountpoint {point}: use a directory of your own"
    )
    assert_refused(users_area, with_storage(users_area, "src", "mnt"), 1, words)


def test_a_user_needs_leave_for_allow_other(users_area: Area) -> None:
    with open("/etc/fuse.conf") as file:
        if any(line.strip() == "user_allow_other" for line in file):
            pytest.skip("needs a machine without user_allow_other in /etc/fuse.conf")
    arguments = with_storage(users_area, "src", "mnt", "-o", "allow_other")
    assert_refused(users_area, arguments, 1, "allow_other is not allowed", "/etc/fuse.conf")


def test_a_runtime_directory_open_to_others(users_area: Area) -> None:
    (users_area.path / "run" / "monarchfs").mkdir()
    (users_area.path / "run" / "monarchfs").chmod(0o777)
    arguments = with_storage(users_area, "src", "mnt")
    assert_refused(users_area, arguments, 2, "run/monarchfs", "XDG_RUNTIME_DIR")


def test_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="modprobe fuse"):
        mount_module.check_device(str(tmp_path / "fuse"))
    (tmp_path / "fuse").write_bytes(b"")
    with pytest.raises(OperationError, match="is not a device"):
        mount_module.check_device(str(tmp_path / "fuse"))
    monkeypatch.setattr(mount_module, "may_mount", lambda: False)
    monkeypatch.setattr(mount_module, "MTAB", str(tmp_path / "mtab"))
    with pytest.raises(OperationError, match=r"cannot unmount without .*/mtab: have it made"):
        mount_module.check_device("/dev/null")
    monkeypatch.setattr(mount_module, "SYSTEM_PATH", str(tmp_path))
    with pytest.raises(OperationError, match="install the package fuse3"):
        mount_module.check_device("/dev/null")


def test_pages_with_which_nobody_has_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 65536}[name])
    with pytest.raises(OperationError, match="have 64 KiB, "):
        mount_module.check_device("/dev/null")


@pytest.mark.parametrize(
    ("waiting", "words"), [(2, "somebody; 2 requests of it without an answer: wa"), (0, "body: wa")]
)
def test_who_waits_for_an_unmount_is_told_that_requests_hang(
    waiting: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FuseConnection, "waiting", waiting)
    mounted = find_mount("/proc")
    assert mounted is not None
    found = FoundMount("/data", "/source", mounted._replace(mountpoint="/data"), None)
    monkeypatch.setattr("monarchfs.cli.umount.read_mountinfo", lambda: [found.mount])
    say_that_it_waits(found, time.monotonic() + 7)
    said = capsys.readouterr().err
    assert words in said
    assert "for 7 s at most" in said


def test_bytes_that_are_no_text_do_not_break_the_line(root_work: Area) -> None:
    done = subprocess.run(
        [*map(os.fsencode, root_work.command("mount")), b"no\xff\nsuch", b"mnt"],
        capture_output=True,
        cwd=root_work.path,
        env=root_work.environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.count(b"\n") == 1
    assert b"does not exist" in done.stderr


@pytest.mark.parametrize("command", commands_of(build_parser()))
def test_every_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        build_parser().parse_args([command, "--help"])
    assert exited.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  monarchfs {command}" in text


def test_help_and_version_are_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> str:
        if words[-1].startswith("--"):
            with pytest.raises(SystemExit, match=r"^0$"):
                main(words)
        else:
            assert main(words) == 0
        return capsys.readouterr().out

    assert printed("help") == printed("--help")
    assert printed("version") == printed("--version")
    assert printed("version").startswith("monarchfs ")
    for command in commands_of(build_parser()):
        assert printed("help", command) == printed(command, "--help")


def test_a_tier_larger_than_its_file_system(root_work: Area) -> None:
    place = root_work.path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24M", "none", place], check=True)
    try:
        command = ["mount", "src", "mnt", "--state-dir", "state", "--tier"]
        # In a directory that is not there yet, too.
        for tier in ("small", "small/below"):
            assert_refused(root_work, [*command, f"{tier}=500M"], 2, tier, "500M", "24M", "80%")
            done = root_work.run("doctor", "src", "--quick", "--tier", f"{tier}=500M")
            assert done.returncode == 1
            assert "which has 24M" in done.stdout
        done = root_work.run(*command, "small=24M")
        assert (done.returncode, done.stderr) == (0, "")
        assert root_work.run("umount", "mnt").returncode == 0
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_tier_on_a_file_system_without_a_size(root_work: Area) -> None:
    """ramfs counts nothing: what is free, and what files take, is not known."""
    place = root_work.path / "ram"
    place.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", place], check=True)
    try:
        command = ["mount", "src", "mnt", "--state-dir", "state", "--tier"]
        for tier in ("ram", "ram/below"):
            assert_refused(root_work, [*command, f"{tier}=1G"], 2, tier, "ramfs", "has no size")
            done = root_work.run("doctor", "src", "--quick", "--tier", f"{tier}=1G")
            assert done.returncode == 1
            assert "(ramfs) has no size" in done.stdout
    finally:
        subprocess.run(["umount", place], check=True)


def test_names_may_stand_before_and_behind_options() -> None:
    words = ["a", "--yes", "b", "--tier", "/t", "c"]
    parsed = build_parser().parse_args(["cache", "remove", *words])
    assert (parsed.what, parsed.name, parsed.yes, parsed.tier) == (
        "remove",
        ["a", "b", "c"],
        True,
        ["/t"],
    )


def test_a_mount_is_no_source(work: Bench) -> None:
    source, other = work.path / "source", work.path / "other"
    for directory in (source / "below", other):
        directory.mkdir(parents=True)
    mount = work.mount(source)
    for path in (mount.path, mount.path / "below"):
        done = run("mount", str(path), str(other), "--state-dir", str(work.path / "another"))
        assert (done.returncode, "is a mount of monarchfs" in done.stderr) == (2, True), done.stderr
