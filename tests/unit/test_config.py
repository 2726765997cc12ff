"""Sizes, layers of settings, defaults, and the JSON between supervisor and worker."""

from __future__ import annotations

import argparse
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.cli.mount import settings_from
from monarchfs.cli.parser import build_parser
from monarchfs.config import (
    Config,
    FreshnessMode,
    FreshnessSetting,
    PrefetchMode,
    TierSpec,
    User,
    values,
)
from monarchfs.config import places as places_module
from monarchfs.config.files import from_file, from_system_file
from monarchfs.config.options import OPTIONS
from monarchfs.config.places import (
    DefaultPlaces,
    build_config,
    dataset_id,
    default_places,
    resolve_user,
    runtime_dirs_to_search,
)
from monarchfs.config.settings import (
    Settings,
    escape_option,
    from_mount_options,
    merge,
    split_options,
)
from monarchfs.types import TierSize, UsageError

GIB = 1 << 30
DAY = 86400


def size(number: int) -> TierSize:
    return TierSize(bytes=number)


UNDERSTOOD: list[tuple[Callable[[object], object], object, list[object]]] = [
    (values.parse_size, size(4096), ["4096"]),
    (values.parse_size, size(512), ["0.5K"]),
    (values.parse_size, size(1 << 20), [" 1M "]),
    (values.parse_size, size(GIB), [GIB, "1G", "1GiB", "1gb"]),
    (values.parse_size, size(3 << 39), ["1.5T"]),
    (values.parse_size, size(2 << 50), ["2P"]),
    (values.parse_size, TierSize(percent=0.5), ["0.5%"]),
    (values.parse_size, TierSize(percent=100.0), ["100%"]),
    (values.parse_tier, TierSpec("/a=b/c", size(64 << 10)), ["/a=b/c=64K"]),
    (values.parse_tier, TierSpec("/a", size(1 << 20)), ["/a=1048576"]),
    (values.parse_rate, 3 << 29, ["1.5G/s"]),
    (values.parse_rate, 4096, [4096]),
    (values.parse_rate, 0, ["0", 0, "off"]),
    (values.parse_seconds, 60, ["60", 60, "1m", "60s"]),
    (values.parse_seconds, 0.5, ["0.5"]),
    (values.parse_seconds, 0, ["0"]),
    (values.parse_seconds, 5400, ["1.5H"]),
    (values.parse_freshness, FreshnessSetting(FreshnessMode.TTL, 3600), ["ttl=1h"]),
    (values.parse_port, 1, ["1"]),
    (values.parse_port, 65535, ["65535"]),
    (values.parse_port, None, ["off"]),
    (values.parse_interval, 90, ["90s", "90", "1.5m"]),
    (values.parse_interval, 6 * 3600, ["6h"]),
    (values.parse_interval, 14 * DAY, ["2w", " 14D "]),
    (values.parse_interval, 0, ["off", "0"]),
]

# What the one line of each says, and what is refused with it.
REFUSED: list[tuple[Callable[[object], object], str, list[object]]] = [
    (
        values.parse_size,
        "write it like|must be|use text",
        [
            *("", "0", "0G", "0%", "-5G", "101%", "G", "%", "12X", "1,5G", "1e3", "nan", "1 G"),
            *("0x10", "5%G", "99999P", "\u0661G", True, None, [1]),
        ],
    ),
    (values.parse_tier, "^tier ", ["", "/scratch", "=1G", "/scratch=", "/scratch=lots"]),
    # Sizes and rates that nobody can mean.
    (
        values.parse_tier,
        r"^tier /dev/shm: .*\b\d+G$",
        [f"/dev/shm={text}" for text in ("16", "500", "1048575", "1B", "16B", "0.5K", "63K")],
    ),
    (values.parse_rate, r"means bytes per second: .* as in \d+M$", ["20", "200", "1000"]),
    (
        values.parse_rate,
        "write it like 20M|use text",
        ["", "fast", "5%", "-1", "0M", "0.1", "99999P", "nan", None, True],
    ),
    (
        values.parse_seconds,
        "as in 60, or 10m or 1h",
        ["", "soon", "-1", "1x", "h", "1 h", "nan", "inf", "9" * 400 + "h"],
    ),
    (values.parse_percent, "use a number from 0 to 99", ["100", "-1", "many", "nan"]),
    (
        values.parse_interval,
        "is not an interval",
        ["", "often", "+1h", "1y", "0.5s", "2000d", "6 h", "1h30m", "nan", "1e3", "h"],
    ),
]


@pytest.mark.parametrize(("parse", "value", "texts"), UNDERSTOOD)
def test_values_that_are_understood(
    parse: Callable[[object], object], value: object, texts: list[object]
) -> None:
    for text in texts:
        assert parse(text) == value, text


@pytest.mark.parametrize(("parse", "words", "texts"), REFUSED)
def test_values_that_are_refused_in_one_line(
    parse: Callable[[object], object], words: str, texts: list[object]
) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=words) as caught:
            parse(text)
        assert "\n" not in str(caught.value), text


# Layers


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["mount", "/src", "/mnt", *arguments])


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "monarchfs.toml"
    file.write_text(
        'tier = ["/one=1G", "/two=2G"]\nfreshness = "open"\ncopy-workers = 2\n'
        'log_level = "debug"\nlocal_threads = 3\n'
    )
    given = parse(
        *("--config", str(file), "-o", "tier=/opt=5G,freshness=ttl=5,copy_workers=9"),
        *("-o", "tier=/opt2=6G,allow_other", "--freshness", "immutable"),
    )
    assert settings_from(given) == Settings(
        tier=(TierSpec("/opt", size(5 * GIB)), TierSpec("/opt2", size(6 * GIB))),
        freshness=FreshnessSetting(FreshnessMode.IMMUTABLE),
        copy_workers=9,
        log_level="debug",
        local_threads=3,
        allow_other=True,
    )


TEXTS = {
    "tier": "/dev/shm=16G",
    "state_dir": "/state",
    "prefetch": "all",
    "freshness": "ttl=1h",
    "evict": "sieve",
    "data_path": "relay",
    "log_file": "/log",
    "log_level": "debug",
    "index": "/index",
    "metrics_port": "9464",
    "touch_source": "1d",
    "scrub": "20M",
    "share": "partition",
    "prefetch_rate": "20M",
    "prefetch_floor": "10",
    "prefetch_jitter": "30s",
    "kernel_resend": "false",
    "standby": "false",
}
TAKE_ANY_TEXT = {
    *("state_dir", "log_file", "index", "prefetch", "peer_key", "peers", "peer_name", "user")
}


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_every_option_from_everywhere(tmp_path: Path, key: str) -> None:
    """A file, mount options, the command line, the environment."""
    text, option, variable = TEXTS.get(key, "1"), OPTIONS[key], f"MONARCHFS_{key.upper()}"
    value, default = option.parse(text), getattr(Settings(), key)
    assert value != default
    (tmp_path / "monarchfs.toml").write_text(f'{key} = "{text}"\n')
    assert_survives_json(config_of(merge({key: value})))
    ways = [["--config", str(tmp_path / "monarchfs.toml")], ["-o", f"{key}={text}"]]
    ways.append(["-o", f"{key.replace('_', '-')}={text}"])
    if option.help:
        flag = f"--{key.replace('_', '-')}"
        ways.append([flag] if option.is_switch else [flag, text])
    for way in ways:
        assert settings_from(parse(*way)) == merge({key: value}), way
    if key not in ("user", "foreground"):
        assert settings_from(parse(), environ={variable: text}) == merge({key: value})
        assert settings_from(parse(), environ={variable: ""}) == Settings()
    if key not in TAKE_ANY_TEXT | {"foreground"}:
        with pytest.raises(UsageError, match=f"environment variable {variable}: "):
            settings_from(parse(), environ={variable: "no sense"})


def test_without_options_all_is_default() -> None:
    assert settings_from(parse()) == Settings()
    assert Settings().freshness == FreshnessSetting(FreshnessMode.TTL, 60.0)
    assert Settings().prefetch == (PrefetchMode.AUTO, None)


def test_every_key_is_a_setting_and_the_other_way_round() -> None:
    assert set(OPTIONS) == set(Settings.__dataclass_fields__)


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_from(
        parse("--tier", "t=1G", "--state-dir", "s", "--prefetch", "list", "--log-file", "../log")
    )
    assert settings.tier == (TierSpec(f"{tmp_path}/t", size(GIB)),)
    assert settings.state_dir == f"{tmp_path}/s"
    assert settings.prefetch == (PrefetchMode.FILE, f"{tmp_path}/list")
    assert settings.log_file == f"{tmp_path.parent}/log"


# Mount options

GENERIC = [
    *("ro", "nosuid", "nodev", "noatime", "nodiratime", "relatime", "sync", "exec", "auto"),
    *("noauto", "nofail", "_netdev", "user", "users", "comment=me", "x-systemd.automount"),
    "defaults",
]


def test_generic_mount_options_change_nothing() -> None:
    for option in GENERIC:
        assert merge(from_mount_options([option])) == Settings(), option


@pytest.mark.parametrize(
    "option", ["rw", "suid", "dev", "fsname=x", "remount", "colour=red", "tier", "freshness", "%"]
)
def test_impossible_mount_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="mount option") as caught:
        from_mount_options([f"ro,{option}"])
    assert "\n" not in str(caught.value)


def test_what_a_mount_option_says_last_counts_and_user_with_a_value_is_ours() -> None:
    assert merge(from_mount_options(["noexec"])).noexec
    assert not merge(from_mount_options(["noexec,exec"])).noexec
    assert merge(from_mount_options(["user=alice"])).user == "alice"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"ro,tier=/a\,b\\c=1G,,x-y", ["ro", r"tier=/a,b\c=1G", "x-y"]),
        ('tier="/a,b=1G",ro', ["tier=/a,b=1G", "ro"]),
        (r"user=a\"b", ['user=a"b']),
        ('a"",b', ["a", "b"]),
    ],
)
def test_options_are_divided_at_commas_that_are_not_escaped(text: str, words: list[str]) -> None:
    assert split_options(text) == words


def test_a_quotation_mark_that_is_not_closed() -> None:
    with pytest.raises(UsageError, match="not closed"):
        split_options('tier="/a=1G')


@given(st.lists(st.text(min_size=1).filter(lambda text: text == text.strip())))
def test_escaped_options_are_split_as_they_were(words: list[str]) -> None:
    assert split_options(",".join(map(escape_option, words))) == words


# Files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# first\ncolour = 1", ["line 2: key 'colour' is not known", "monarchfs mount --help"]),
        ("freshnes = 'open'", ["line 1: key 'freshnes'", "did you mean freshness?"]),
        ("\n[tier]\npath = '/a'", ["line 2: tier:", "is not a value"]),
        ("\n[tiers]\npath = '/a'", ["line 2: key 'tiers'", "did you mean tier?"]),
        ("a.b = 1", ["line 1: key 'a'"]),
        ("\n\ncopy-workers = 0", ["line 3: copy-workers: '0' is not a count"]),
        ("copy-workers = 1\ncopy_workers = 2", ["line 2: copy_workers is given twice"]),
        ("tier = 5G", ["line 1: tier: not TOML", 'tier = "VALUE"']),
        ('user = "alice', ["line 1: user: not TOML", "correct it"]),
        ("x = 1\nx = 2", ["line 2: x: not TOML"]),
        ("a = " + "[" * 100_000, ["not TOML", "nested too deeply"]),
        *(
            (content, ["line 1: "])
            for content in (
                *('tier = "/scratch"', "tier = []", "tier = [5]", 'tier = ["/a=1G", "/a=2G"]'),
                *("allow_other = 3", "copy_workers = true", "source_deadline_seconds = -1"),
                *("start_timeout_seconds = 0", 'prefetch = ""', 'log_level = "loud"'),
                *('evict = "mru"', 'scrub = "fast"', "scrub = true", "metrics_port = 0"),
                *("metrics_port = 65536", "metrics_port = 9464.5", "metrics_port = true"),
            )
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_line_and_key(
    tmp_path: Path, content: str, words: list[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        from_file(str(file))
    for word in (f"configuration {file}", *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"# one\nuser = '\xff'\n")
    for path, words in (
        (tmp_path / "bytes.toml", "line 2: not TOML: no UTF-8"),
        (Path("/dev/zero"), "larger than 1 MiB"),
        (tmp_path, "Is a directory"),
        (tmp_path / "no.toml", r"no\.toml.*No such file"),
    ):
        with pytest.raises(UsageError, match=words):
            from_file(str(path))


def test_a_machine_without_a_file(tmp_path: Path) -> None:
    assert from_system_file(str(tmp_path / "none.toml")) == {}


@pytest.mark.parametrize(("mode", "word"), [(0o664, "written by others"), (0o646, "others")])
def test_the_machines_file_is_roots_alone(tmp_path: Path, mode: int, word: str) -> None:
    file = tmp_path / "system.toml"
    file.write_text("")
    file.chmod(mode)
    if os.geteuid() == 0:
        with pytest.raises(UsageError, match=word):
            from_system_file(str(file))
        os.chown(file, 65534, -1)
    with pytest.raises(UsageError, match="not a file of root's"):
        from_system_file(str(file))
    with pytest.raises(UsageError, match="not a file of root's"):
        from_system_file("/dev/null")


# What the worker is told


def config_of(settings: Settings, source: str = "/lustre/data") -> Config:
    return build_config(
        settings,
        source=source,
        mountpoint="/mnt",
        user=User("alice", 1000, 1000, (1000, 27)),
        places=DefaultPlaces("/cache", "/run/x"),
    )


def assert_survives_json(config: Config) -> None:
    assert Config.from_json(config.to_json().encode("ascii").decode()) == config


@given(
    st.binary(min_size=1, max_size=40),
    st.floats(0.1, 100),
    st.floats(0, 1e7),
    st.integers(1, 1 << 60),
)
def test_a_config_survives_json(raw: bytes, percent: float, seconds: float, count: int) -> None:
    path = "/" + os.fsdecode(raw.replace(b"\0", b"x"))
    settings = Settings(
        tier=(TierSpec(path, TierSize(percent=percent)), TierSpec("/t", size(count))),
        freshness=FreshnessSetting(FreshnessMode.TTL, seconds),
        touch_source=seconds,
        scrub=count,
    )
    config = config_of(settings, source=path)
    assert (config.scrub_bytes_per_second, config.touch_source_seconds) == (count, seconds)
    assert_survives_json(config)


def test_the_default_tier_and_state_follow_the_places() -> None:
    config = config_of(Settings())
    identity = dataset_id("/lustre/data", 1000)
    assert config.tiers == (TierSpec("/cache", TierSize(percent=50.0)),)
    assert config.state_dir == f"/cache/state/{identity}"
    assert (config.dataset_id, config.runtime_dir) == (identity, "/run/x")


def test_a_datasets_name_depends_on_source_and_user() -> None:
    names = {dataset_id(*key) for key in (("/a", 0), ("/a", 1), ("/b", 0), ("/a\udcff", 0))}
    assert len(names) == 4
    assert dataset_id("/a", 0) == dataset_id("/a", 0)


def test_a_users_cache_is_local(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "TMPDIR": "/var/tmp", "XDG_RUNTIME_DIR": str(tmp_path)}
    user = os.geteuid() or 1000  # who owns the directory, or root does
    local = default_places(user, environ, is_network=lambda path: False)
    assert local == DefaultPlaces(f"{tmp_path}/.cache/monarchfs", f"{tmp_path}/monarchfs")
    remote = default_places(user, environ, is_network=lambda path: path.startswith(str(tmp_path)))
    assert remote.cache_dir == f"/var/tmp/monarchfs-{user}"
    bare = default_places(4242, {"HOME": "/nonexistent/home"}, is_network=lambda path: True)
    assert bare == DefaultPlaces("/tmp/monarchfs-4242", "/tmp/monarchfs-4242/run")
    environ["XDG_CACHE_HOME"] = f"{tmp_path}/xdg"
    assert (
        default_places(1000, environ, lambda path: False).cache_dir == f"{tmp_path}/xdg/monarchfs"
    )


def test_roots_places_are_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places_module, "ROOT_RUNTIME_DIR", f"{tmp_path}/monarchfs")
    assert default_places(0, {"HOME": "/root"}, lambda path: True) == DefaultPlaces(
        "/var/cache/monarchfs", f"{tmp_path}/monarchfs"
    )


def test_root_looks_where_users_keep_their_sockets() -> None:
    dirs = runtime_dirs_to_search(0, {}, {0, 1000})
    assert {"/run/monarchfs", "/run/user/1000/monarchfs", "/tmp/monarchfs-1000/run"} <= set(dirs)
    assert "/run/user/1001/monarchfs" not in runtime_dirs_to_search(1000, {}, {1001})


def test_the_user_behind_sudo_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for user in (
        resolve_user(None, {"SUDO_UID": str(nobody.pw_uid)}),
        resolve_user("nobody", {}),
        resolve_user(str(nobody.pw_uid), {}),
    ):
        assert (user.name, user.uid, user.gid) == ("nobody", nobody.pw_uid, nobody.pw_gid)
        assert nobody.pw_gid in user.groups
    assert resolve_user(None, {}).uid == 0
    assert resolve_user(None, {"SUDO_UID": "junk"}).uid == 0


def test_only_root_mounts_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234567)
    with pytest.raises(UsageError, match="only root"):
        resolve_user("root", {})
    assert resolve_user(None, {"SUDO_UID": "0"}).uid == 1234567


@pytest.mark.parametrize("name", ["no-such-user", "4294967294", "-1", "99999999999999999999"])
def test_an_unknown_user_is_named(name: str) -> None:
    with pytest.raises(UsageError, match="there is no user"):
        resolve_user(name, {})
