"""Options from everywhere (command line, -o, fstab, TOML): understood, or refused in one line."""

import io
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monarchfs.cli.mount_helper import _options as helper_options
from monarchfs.cli.output import complain
from monarchfs.cli.parser import MOUNT_OPTIONS, build_parser
from monarchfs.config.files import from_content, toml_table
from monarchfs.config.options import OPTIONS, flag_of
from monarchfs.config.settings import Layer, Settings, from_mount_options, merge
from monarchfs.slurm.site import Site, site_from
from monarchfs.types import UsageError

# What options are made of, so that more than the first word is ever parsed.
WORDS = st.sampled_from(
    [*OPTIONS, "rw", "exec", "suid", "_netdev", "x-systemd.automount", "fsname", "remount"]
)
PIECES = st.sampled_from(
    [
        *('"', ",", "\\", "=", "%", "\0", "\n", "\r", "\x1b[2J", "\udcff", "../", "/"),
        *("$(id)", "`id`", ";id", "|", "&&", "~", "*", " ", "\u202e", "\ud800", "9" * 30),
        *("1e309", "nan", "inf", "-1", "0x10", "٣", "½", "1_000", "50%", "16G", "ttl=60"),
    ]
)
VALUES = st.lists(PIECES | st.text(max_size=8), max_size=6).map("".join)
LISTED = st.lists(
    st.tuples(WORDS | VALUES, st.sampled_from(["", "="]), VALUES).map("".join), max_size=5
).map(",".join)
PLAIN = VALUES | st.integers() | st.floats() | st.booleans() | st.lists(VALUES, max_size=3)
ANYTHING = st.recursive(
    PLAIN | st.none() | st.dates() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALUES, inner, max_size=3),
)


def refused_or(call: Callable[[], Any]) -> Any:
    """What a call returns; None where it refuses in a line that does nothing to a terminal."""
    try:
        return call()
    except UsageError as error:
        printed = io.StringIO()
        with redirect_stderr(printed):
            complain(str(error), 2)
        line = printed.getvalue()
        assert line.startswith("monarchfs: ")
        assert line.endswith("\n")
        assert line[:-1].isprintable()
        return None


def check(read: Callable[[], Layer]) -> None:
    """No layer holds a key that is not a setting, nor a path that depends on where one is."""
    layer = refused_or(read)
    if layer is None:
        return
    assert set(layer) <= {field.name for field in fields(Settings)}
    merged = merge(layer)
    for path in (merged.state_dir, merged.log_file, merged.prefetch[1]):
        assert path is None or (os.path.isabs(path) and "\0" not in path)
        assert path is None or ".." not in path.split("/")
    for tier in merged.tier or ():
        assert os.path.isabs(tier.path)
        assert "\0" not in tier.path
        assert (tier.size.bytes or 0) < 1 << 63


@given(LISTED | st.text())
@example("tier=/a=1G,tier=/a=1G")
@example('tier="/a,b=1G",state_dir=\\')
@example("user=")
@example("prefetch=../../etc/passwd")
def test_mount_options(text: str) -> None:
    check(lambda: from_mount_options([text]))


@given(LISTED, st.booleans())
def test_what_mount_gives_its_helper(text: str, sloppy: bool) -> None:
    """What the helper hands on means the same, or nothing: no word becomes another option."""
    words = refused_or(lambda: helper_options([text], sloppy=sloppy))
    if words is None:
        return
    direct = refused_or(lambda: from_mount_options(words))
    joined = refused_or(lambda: from_mount_options([",".join(words)]))
    assert direct == joined


@pytest.mark.parametrize("key", sorted(OPTIONS))
@settings(max_examples=40)
@given(value=ANYTHING)
@example(value="")
@example(value="\0")
@example(value="9" * 5000)
@example(value=float("nan"))
@example(value=1 << 70)
@example(value=[])
@example(value={"a": 1})
@example(value="\ud800")
def test_each_setting_takes_any_value(key: str, value: object) -> None:
    check(lambda: {key: OPTIONS[key].parse(value)})


@given(st.binary())
@example(b"\xef\xbb\xbfuser = 'x'")
@example(b"[" * 100_000)
@example(b"a." * 3_000 + b"a = 1")
@example(b"tier = [" + b"'/a=1G'," * 2_000 + b"]")
@example(b"copy_workers = " + b"9" * 5_000)
@example(b"user = 1979-05-27T07:32:00Z")
def test_a_file_of_any_bytes(content: bytes) -> None:
    check(lambda: from_content("/etc/x.toml", content))


def toml_of(table: dict[str, Any]) -> bytes:
    """As much of TOML as is needed; text that TOML cannot hold is left to be wrong."""

    def one(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return "[" + ", ".join(map(one, value)) + "]"
        if isinstance(value, str):
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return str(value)

    lines = [f"{one(key)} = {one(value)}" for key, value in table.items()]
    return "\n".join(lines).encode(errors="surrogatepass")


@given(st.dictionaries(WORDS | VALUES, PLAIN, max_size=4))
def test_a_file_of_any_settings(table: dict[str, Any]) -> None:
    check(lambda: from_content("/etc/x.toml", toml_of(table)))


SITE_KEYS = st.sampled_from(
    [
        *("roots", "tier", "budget", "options", "allow", "dataset", "log", "deadline_seconds"),
        *("linger", "wipe", "nice", "run_dir", "cache_dir", "report_dir"),
    ]
)
SITE_TABLES = st.dictionaries(
    st.sampled_from(["path", "options", "index", "users", "roots"]), ANYTHING
)


@given(st.dictionaries(SITE_KEYS, ANYTHING | st.lists(SITE_TABLES, max_size=2), max_size=4))
def test_a_sites_configuration_of_any_settings(table: dict[str, Any]) -> None:
    site = refused_or(lambda: site_from(table, "/etc/monarchfs-slurm.toml"))
    if site is not None:
        assert isinstance(site, Site)
        for allow in site.allow:
            assert all(os.path.isabs(root) for root in allow.roots)


@given(st.binary())
def test_a_sites_configuration_of_any_bytes(content: bytes) -> None:
    refused_or(lambda: site_from(toml_table("/etc/x.toml", content), "/etc/x.toml"))


COMMANDS = st.sampled_from(
    [
        *("mount", "status", "umount", "warm", "why", "run", "fsck", "report", "--", "-o", "-"),
        *("--tier", "--config", "--json", "--timeout", "-f"),
        *(f"--{flag_of(one)}" for one in MOUNT_OPTIONS),
    ]
)


@given(st.lists(COMMANDS | VALUES, max_size=6))
def test_a_command_line_of_any_words(words: list[str]) -> None:
    """Only parsed: whatever it means, it says so in one line, and never as a traceback."""
    printed = io.StringIO()
    with redirect_stderr(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", io.StringIO())  # --help and --version
        try:
            parsed = refused_or(lambda: build_parser().parse_args(words))
        except SystemExit:
            assert {"-h", "--help", "--version"} & set(words)
            return
    assert printed.getvalue() == ""
    if parsed is not None:
        assert parsed.command in words
