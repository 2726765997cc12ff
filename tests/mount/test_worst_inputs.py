"""The worst that `monarchfs mount` can be given: one line each, and nothing is left."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_mounts import Area, area, assert_refused
from tests.support.mounting import requires_mounts

pytestmark = requires_mounts

LONG = "x" * 5000


@pytest.fixture
def work() -> Iterator[Area]:
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    with area(path, None) as opened:
        yield opened
    shutil.rmtree(path)


def nothing(work: Area) -> None:
    pass


def fifo(work: Area) -> None:
    os.mkfifo(work.path / "fifo")


def dangling(work: Area) -> None:
    (work.path / "dangling").symlink_to("nowhere")


def a_socket(work: Area) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(work.path / "socket"))


def a_state_file(work: Area) -> None:
    (work.path / "state").write_bytes(b"not a directory")


def bad_files(work: Area) -> None:
    (work.path / "binary.toml").write_bytes(bytes(range(256)))
    (work.path / "deep.toml").write_text("a = " + "[" * 50_000)
    (work.path / "open.toml").write_text('user = "alice')
    (work.path / "table.toml").write_text("# sizes\n[tier]\nsize = 5")
    (work.path / "nul.toml").write_text('tier = ["/a\\u0000=1G"]')
    (work.path / "nobody.toml").write_text('user = "a\\u0000"')
    (work.path / "typo.toml").write_text('\nfreshnes = "open"')


def unreadable(work: Area) -> None:
    (work.path / "mnt" / "below").mkdir()


PLACES = [
    pytest.param(fifo, ["fifo", "mnt"], ["not a directory"], id="source a fifo"),
    pytest.param(a_socket, ["socket", "mnt"], ["not a directory"], id="source a socket"),
    pytest.param(nothing, ["/dev/null", "mnt"], ["not a directory"], id="source a device"),
    pytest.param(nothing, [LONG, "mnt"], ["File name too long"], id="source too long"),
    pytest.param(nothing, ["src", LONG], ["File name too long"], id="mount point too long"),
    pytest.param(nothing, ["src", ""], ["empty"], id="mount point empty"),
    pytest.param(dangling, ["src", "dangling"], ["does not exist"], id="mount point dangling"),
    pytest.param(dangling, ["dangling", "mnt"], ["does not exist"], id="source dangling"),
    pytest.param(fifo, ["src", "fifo"], ["not a directory"], id="mount point a fifo"),
    pytest.param(nothing, ["src", "/"], ["hide the source"], id="mount over everything"),
    pytest.param(nothing, ["/", "mnt"], ["inside the source"], id="mount everything"),
    pytest.param(unreadable, ["mnt/below", "mnt"], ["hide the source"], id="source hidden"),
    pytest.param(nothing, ["src\nnosuch", "mnt"], ["does not exist"], id="line break"),
    pytest.param(nothing, ["\x1b[31msrc", "mnt"], ["does not exist"], id="escape sequence"),
    pytest.param(nothing, ["src", "mnt", "more"], ["unrecognized"], id="a third place"),
]


@pytest.mark.parametrize(("prepare", "arguments", "words"), PLACES)
def test_places(
    work: Area, prepare: Callable[[Area], None], arguments: list[str], words: list[str]
) -> None:
    prepare(work)
    # What cannot even be asked about has failed; what is the wrong thing was used wrongly.
    code = 1 if "File name too long" in words else 2
    assert_refused(work, ["mount", *arguments, *work.storage], code, *words)


VALUES = [
    pytest.param(nothing, ["--tier", "=1G"], ["PATH=SIZE"], id="tier without a path"),
    pytest.param(nothing, ["--tier", "tier="], ["is not a size"], id="tier without a size"),
    pytest.param(nothing, ["--tier", ""], ["PATH=SIZE"], id="tier empty"),
    pytest.param(nothing, ["--tier", "tier=nan"], ["'nan' is not a size"], id="size no number"),
    pytest.param(nothing, ["--tier", "tier=1e9G"], ["'1e9G'"], id="size with exponent"),
    pytest.param(nothing, ["--tier", "tier=99999999P"], ["that a tier can have"], id="size huge"),
    pytest.param(nothing, ["--tier", f"tier={'9' * 5000}"], ["is not a size"], id="size digits"),
    pytest.param(nothing, ["--tier", f"tier={'9' * 400}.5G"], ["is not a size"], id="size inf"),
    pytest.param(nothing, ["--tier", "tier=1.5.5G"], ["'1.5.5G'"], id="two points"),
    pytest.param(nothing, ["--tier", f"{LONG}=1G"], ["File name too long"], id="tier too long"),
    pytest.param(nothing, ["--state-dir", ""], ["--state-dir", "empty"], id="state empty"),
    pytest.param(a_state_file, [], ["is not a directory"], id="state a file"),
    pytest.param(nothing, ["--freshness", "ttl=inf"], ["'inf'"], id="ttl for ever"),
    pytest.param(nothing, ["--freshness", "ttl=nan"], ["'nan'"], id="ttl no number"),
    pytest.param(nothing, ["--freshness", "ttl=-1"], ["'-1'"], id="ttl negative"),
    pytest.param(nothing, ["--freshness", "ttl=1e999"], ["'1e999'"], id="ttl huge"),
    pytest.param(nothing, ["--freshness", ""], ["freshness ''"], id="freshness empty"),
    pytest.param(nothing, ["--scrub=-5M"], ["is not a rate"], id="scrub negative"),
    pytest.param(nothing, ["--scrub", "50%"], ["is not a rate"], id="scrub a share"),
    pytest.param(nothing, ["--user", ""], ["user's name is empty"], id="user empty"),
    pytest.param(nothing, ["--user", "-1"], ["no user"], id="user negative"),
    pytest.param(nothing, ["--prefetch", ""], ["prefetch has no value"], id="prefetch empty"),
    pytest.param(nothing, ["--prefetch", "src"], ["src", "a readable list"], id="list a directory"),
    pytest.param(fifo, ["--prefetch", "fifo"], ["fifo", "a readable list"], id="list a fifo"),
    pytest.param(nothing, ["--log-file", "src"], ["cannot be written"], id="log a directory"),
    pytest.param(nothing, ["--log-file", ""], ["empty"], id="log empty"),
    pytest.param(nothing, ["-o", "copy_workers=0"], ["not a count"], id="no workers"),
    pytest.param(nothing, ["-o", f"copy_workers={'9' * 5000}"], ["not a count"], id="workers"),
    pytest.param(nothing, ["-o", "reserve_percent=100"], ["not a share"], id="all reserved"),
    pytest.param(nothing, ["-o", "start_timeout_seconds=0"], ["0 seconds"], id="no time"),
    pytest.param(nothing, ["-o", "allow_other=perhaps"], ["neither yes nor no"], id="perhaps"),
    pytest.param(nothing, ["-o", "noexec=5"], ["neither yes nor no"], id="noexec"),
    pytest.param(nothing, ["-o", 'user="alice'], ["quotation mark"], id="open quotes"),
    pytest.param(nothing, ["-o", "=5"], ["mount option '=5'"], id="no name"),
    pytest.param(nothing, ["-o", "foreground\ncolour"], ["not known"], id="option over lines"),
    pytest.param(nothing, ["-o"], ["expected one argument"], id="-o of nothing"),
    pytest.param(nothing, ["--config", "src"], ["Is a directory"], id="config a directory"),
    pytest.param(nothing, ["--config", "/dev/zero"], ["larger than 1 MiB"], id="config endless"),
    pytest.param(bad_files, ["--config", "binary.toml"], ["no UTF-8"], id="config binary"),
    pytest.param(bad_files, ["--config", "deep.toml"], ["too deeply"], id="config deep"),
    pytest.param(bad_files, ["--config", "open.toml"], ["line 1: user"], id="config cut off"),
    pytest.param(bad_files, ["--config", "table.toml"], ["line 2: tier"], id="config a table"),
    pytest.param(bad_files, ["--config", "nul.toml"], ["line 1: tier", "NUL"], id="config NUL"),
    pytest.param(bad_files, ["--config", "nobody.toml"], ["user", "NUL"], id="config user NUL"),
    pytest.param(bad_files, ["--config", "typo.toml"], ["line 2", "mean freshness?"], id="typo"),
]


@pytest.mark.parametrize(("prepare", "arguments", "words"), VALUES)
def test_values(
    work: Area, prepare: Callable[[Area], None], arguments: list[str], words: list[str]
) -> None:
    prepare(work)
    command = ["mount", "src", "mnt"]
    if "--tier" not in arguments:
        command += ["--tier", "tier=10M"]
    if "--state-dir" not in arguments:
        command += ["--state-dir", "state"]
    assert_refused(work, [*command, *arguments], 2, *words)
