"""Bad input: one line that names the thing and the remedy, the right exit code, nothing left.
Names of any bytes: no output moves a cursor or begins a line, and JSON gives them back."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from monarchfs.cli.main import main
from monarchfs.cli.parser import build_parser, commands_of
from monarchfs.cli.umount import say_that_it_waits
from monarchfs.fuse import mount as mount_module
from monarchfs.fuse.connection import FuseConnection
from monarchfs.fuse.mountinfo import Mount as Entry
from monarchfs.supervisor.probe import OpenedSource, seems_unmounted
from monarchfs.supervisor.recover import FoundMount
from monarchfs.types import OperationError
from tests.support import mounting, on_disk
from tests.support.fake_mounts import NOBODY, Area, area, assert_refused, device_mode
from tests.support.mounting import run

pytestmark = mounting.requires_mounts


def mount_words(*arguments: str) -> list[str]:
    storage = {"--tier": "tier=10M", "--state-dir": "state"}
    given = [
        word for key, value in storage.items() if key not in arguments for word in (key, value)
    ]
    return ["mount", *arguments, *given]


@pytest.fixture(scope="module")
def odd_things() -> Iterator[Area]:
    """No row below changes them."""
    with TemporaryDirectory(prefix="monarchfs-test-") as path, area(Path(path), None) as work:
        for name in ("src/inner", "mnt/below", "elsewhere", "foreign", "shared"):
            (work.path / name).mkdir()
        (work.path / "private").mkdir(0o700)
        shutil.chown(work.path / "foreign", NOBODY)
        (work.path / "shared").chmod(0o777)
        (work.path / "file").touch()
        os.mkfifo(work.path / "fifo")
        links = {"loop": "loop", "link": "src", "state link": "elsewhere"}
        for name, target in links.items():
            (work.path / name).symlink_to(target)
        yield work


LONG = "x" * 5000
FAILED, WRONG = 1, 2
"""What cannot even be asked about has failed; what is the wrong thing was used wrongly."""

REFUSED: list[tuple[list[str], int, str]] = [
    (["nosuch", "mnt"], WRONG, "nosuch does not exist"),
    (["file", "mnt"], WRONG, "file is not a directory"),
    (["loop", "mnt"], WRONG, "loop of symbolic links"),
    (["private", "mnt", "--user", NOBODY], FAILED, "cannot be read by nobody"),
    (["\x1b[31msrc\nno\udcffsuch", "mnt"], WRONG, "does not exist"),
    (["src", "nomnt"], WRONG, "mkdir"),
    (["src", "file"], WRONG, "file is not a directory"),
    (["src", LONG], FAILED, "File name too long"),
    (["src", "src/inner"], WRONG, "inside the source"),
    (["mnt/below", "mnt"], WRONG, "hide the source"),
    (["src", "mnt", "--tier", "tier=8000P"], WRONG, "8000.0P"),
    (["src", "mnt", "--tier", "no/such/dir=1G"], WRONG, "does not exist"),
    (["src", "mnt", "--tier", "link/t=1G"], WRONG, "inside the source"),
    (["src", "mnt", "--tier", ".=1G"], WRONG, "inside tier"),
    (["src", "mnt", "--tier", "mnt/t=1G"], WRONG, "inside the mount point"),
    (["src", "mnt", "--tier", "/proc/t=1G"], WRONG, "no size"),
    # A directory that only the kernel refuses to make is found out late.
    (["src", "mnt", "--state-dir", "/proc/s"], FAILED, "/proc/s"),
    (["src", "mnt", "--state-dir", "src/s"], WRONG, "inside the source"),
    (["src", "mnt", "--state-dir", "foreign"], WRONG, "belongs to nobody"),
    (["src", "mnt", "--state-dir", "shared"], WRONG, "written by others"),
    (["src", "mnt", "--state-dir", "state link"], WRONG, "not a directory"),
    (["src", "mnt", "--prefetch", "src/../nolist"], WRONG, "nolist cannot be read by root"),
    (["src", "mnt", "--prefetch", "fifo"], WRONG, "a readable list"),
    (["src", "mnt", "--log-file", "src"], WRONG, "cannot be written"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    REFUSED,
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_is_not_mounted(odd_things: Area, arguments: list[str], code: int, words: str) -> None:
    assert_refused(odd_things, mount_words(*arguments), code, words)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("fail", ["the index is on fire"]),
        ("crash", ["exit code 3", "this worker is broken"]),
        ("silent", ["did not become ready"]),
    ],
)
def test_a_worker_that_does_not_start(root_work: Area, mode: str, words: list[str]) -> None:
    arguments = mount_words("src", "mnt", "-o", "start_timeout_seconds=2")
    if mode == "fail":
        assert_refused(root_work, arguments, 1, "on fire", mode=mode)
        assert not (root_work.path / "state").exists(), "a fresh one is taken back"
    # What the worker put into its state directory stays, so it is there beforehand.
    (root_work.path / "state").mkdir(mode=0o700)
    for name in ("index", "lock", "worker.log"):
        (root_work.path / "state" / name).touch()
    assert_refused(root_work, arguments, 1, "cannot serve", *words, mode=mode)


def test_a_program_that_the_user_may_not_run(root_work: Area) -> None:
    python = root_work.path / "private" / "python3"
    python.parent.mkdir(mode=0o700)
    python.symlink_to(sys.executable)
    root_work.python = str(python)
    arguments = mount_words("src", "mnt", "--user", NOBODY)
    assert_refused(root_work, arguments, 1, "nobody may not run", str(python))


def test_what_a_user_may_not(place: Path) -> None:
    with device_mode(0o666), area(place, NOBODY) as work:

        def refused(code: int, *words: str, options: tuple[str, ...] = ()) -> None:
            assert_refused(work, mount_words("src", "mnt", *options), code, *words)

        with device_mode(0o600):
            refused(1, "/dev/fuse", "0666")
        refused(2, "only root", options=("--user", "root"))
        passthrough = ("-o", "data_path=passthrough")
        refused(2, "only mounts made by root may use it, outside of", options=passthrough)
        refused(2, "/usr/share", "not writable", options=("--tier", "/usr/share/t=1G"))
        if "user_allow_other" not in map(str.strip, Path("/etc/fuse.conf").read_text().split("\n")):
            allow = ("-o", "allow_other")
            refused(1, "allow_other is not allowed", "/etc/fuse.conf", options=allow)
        runtime = work.path / "run" / "monarchfs"
        runtime.mkdir()
        runtime.chmod(0o777)
        refused(2, "run/monarchfs", "XDG_RUNTIME_DIR")
        runtime.rmdir()
        point = work.path / "mnt"
        os.chown(point, 0, 0)
        refused(
            1, f"on {point}: user has no write access to mountpoint {point}: use a directory of"
        )


def test_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(words: str, device: Path = Path("/dev/null")) -> None:
        with pytest.raises(OperationError, match=words):
            mount_module.check_device(str(device))

    refused("modprobe fuse", tmp_path / "fuse")
    (tmp_path / "fuse").write_bytes(b"")
    refused("is not a device", tmp_path / "fuse")
    monkeypatch.setattr(mount_module, "may_mount", lambda: False)
    monkeypatch.setattr(mount_module, "MTAB", str(tmp_path / "mtab"))
    refused(r"cannot unmount without .*/mtab: have it made")
    monkeypatch.setattr(mount_module, "SYSTEM_PATH", str(tmp_path))
    refused("install the package fuse3")
    # With such pages nobody has run it.
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 65536}[name])
    refused("have 64 KiB, ")


def test_who_waits_for_an_unmount_is_told_that_requests_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FuseConnection, "waiting", 2)
    found = FoundMount("/data", "/source", entry("/data", "fuse.monarchfs"), None)
    monkeypatch.setattr("monarchfs.cli.umount.read_mountinfo", lambda: [found.mount])
    say_that_it_waits(found, time.monotonic() + 7)
    said = capsys.readouterr().err
    assert "somebody; 2 requests of it without an answer: wa" in said
    assert "for 7 s at most" in said


def test_what_users_register_fails_no_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = FoundMount("/" + "x" * 30_000, "/source", entry("/data", "fuse.monarchfs"), None)
    monkeypatch.setattr("monarchfs.cli.check.find_all", lambda _search: [long] * 1000)
    assert main(["check"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("monarchfs: OK: the daemon of /xxx")
    assert (said.count("not to be found"), said[-20:]) == (20, "; ...; 1,000 mounts\n")


def test_help_and_version_are_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["version"], ["help"], *(["help", one] for one in commands_of(build_parser()))):
        name, command = words[0], words[1:]
        assert main(words) == 0
        said = capsys.readouterr().out
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*command, f"--{name}"])
        assert said == capsys.readouterr().out
        assert not command or f"examples:\n  monarchfs {command[0]}" in said


@pytest.mark.parametrize(
    ("fstype", "options", "words", "problem"),
    [
        ("tmpfs", "size=24M", ["500M", "24M", "80%"], "which has 24M"),
        # It counts nothing: what is free, and what files take, is not known.
        ("ramfs", "mode=755", ["ramfs", "has no size"], "(ramfs) has no size"),
    ],
)
def test_a_tier_that_its_file_system_cannot_hold(
    root_work: Area, fstype: str, options: str, words: list[str], problem: str
) -> None:
    small = root_work.path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", fstype, "-o", options, "none", small], check=True)
    try:
        # In a directory that is not there yet, too.
        for tier in ("small", "small/below"):
            sized = ["--tier", f"{tier}=500M"]
            assert_refused(root_work, mount_words("src", "mnt", *sized), 2, tier, *words)
        done = root_work.run("doctor", "src", "--quick", *sized)
        assert (done.returncode, problem in done.stdout) == (1, True), done.stdout
        if fstype == "tmpfs":
            done = root_work.run(*mount_words("src", "mnt", "--tier", "small=24M"))
            assert (done.returncode, done.stderr) == (0, "")
            assert root_work.run("umount", "mnt").returncode == 0
    finally:
        subprocess.run(["umount", small], check=True)


def test_names_may_stand_before_and_behind_options() -> None:
    words = ["cache", "remove", "a", "--yes", "b", "--tier", "/t", "c"]
    parsed = build_parser().parse_args(words)
    assert (parsed.name, parsed.yes, parsed.tier) == (["a", "b", "c"], True, ["/t"])


def test_a_mount_is_no_source(work: mounting.Bench) -> None:
    (work.path / "source" / "below").mkdir(parents=True)
    (work.path / "other").mkdir()
    mount = work.mount(work.path / "source")
    for path in (mount.path, mount.path / "below"):
        words = (str(path), f"{work.path}/other", "--state-dir", f"{work.path}/another")
        mounting.assert_one_line(run("mount", *words), 2, "is a mount of monarchfs")


# A dataset whose file system is not mounted on this node: an empty directory beside others


def entry(point: str, fstype: str, source: str = "none") -> Entry:
    return Entry(1, 0, 0, 7, "/", point, "rw", fstype, source, "rw")


def source(*, empty: bool = True, device: int = 1) -> OpenedSource:
    return OpenedSource(-1, "/data/b", ((device, 5), (1, 4), (1, 2)), empty)


@pytest.mark.parametrize(
    ("mounts", "beside"),
    [
        ([], None),
        ([entry("/data/a", "lustre")], "/data/a"),
        ([entry("/data/a", "ext4", "/dev/sdb1")], "/data/a"),
        ([entry("/data/a", "tmpfs")], None),
        ([entry("/data/a", "fuse.monarchfs")], None),
        ([entry("/data/a/deeper", "lustre"), entry("/data", "lustre")], None),
        ([entry("/data/a", "lustre"), entry("/data/b", "lustre")], None),
    ],
)
def test_what_lies_beside_it_tells(mounts: list[Entry], beside: str | None) -> None:
    assert seems_unmounted(source(), mounts) == beside
    assert seems_unmounted(source(empty=False), mounts) is None
    assert seems_unmounted(source(device=9), mounts) is None


def test_an_unmounted_source_is_told_or_refused(
    work: mounting.Bench, faulty: mounting.FaultySource
) -> None:
    dataset = work.path / "dataset"
    dataset.mkdir()
    says = f"source {dataset} is empty, and no file system is mounted on it, as on {faulty.path}"
    umount = ("umount", f"{work.path}/mnt")

    for form in (["--require-files"], ["-o", "require_files"]):
        mounting.assert_one_line(work.try_to_mount(dataset, *form), 1, says)
        assert not (work.path / "state").exists()
    done = work.try_to_mount(dataset)
    assert (done.returncode, done.stderr.count("\n"), says in done.stderr) == (0, 1, True)
    assert run(*umount).returncode == 0

    for more, code, out in ((["--require-files"], 1, ""), ([], 0, "ran\n")):
        done = run("run", str(dataset), *work.storage(), *more, "--", "echo", "ran")
        assert (done.returncode, done.stdout, done.stderr.count(says)) == (code, out, 1)
    assert says in run("doctor", str(dataset), "--quick", *work.storage()).stdout
    (dataset / "below").mkdir()
    done = work.try_to_mount(dataset, "--require-files")
    assert (done.returncode, done.stderr) == (0, "")
    assert run(*umount).returncode == 0
    done = work.try_to_mount(f"{work.path}/datast/below")
    mounting.assert_one_line(done, 2, f"did you mean {dataset}/below?")


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
        command = [*mounting.MONARCHFS, *words]
        done = subprocess.run(command, capture_output=True, cwd=self.path, env=mounting.ENVIRONMENT)
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


@mounting.needs_mounts
def test_every_command_shows_them_escaped_and_gives_them_back(work: mounting.Bench) -> None:
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
