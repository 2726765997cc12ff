"""Sizes, layers of settings, defaults, and the JSON between supervisor and worker."""

from __future__ import annotations

import argparse
import os
import pwd
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.cli.mount import settings_from
from monarchfs.cli.parser import build_parser
from monarchfs.config import (
    Config,
    DataPath,
    FreshnessMode,
    FreshnessSetting,
    PrefetchMode,
    TierSpec,
    User,
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
from monarchfs.config.values import (
    parse_freshness,
    parse_percent,
    parse_rate,
    parse_seconds,
    parse_size,
    parse_tier,
)
from monarchfs.types import EvictionPolicy, TierSize, UsageError

ALICE = User("alice", 1000, 1000, (1000, 27))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("500M", 500 << 20),
        ("16G", 16 << 30),
        ("16GiB", 16 << 30),
        ("16gb", 16 << 30),
        ("1.5T", 3 << 39),
        ("0.5K", 512),
        ("2P", 2 << 50),
        (" 1M ", 1 << 20),
        (1 << 30, 1 << 30),
    ],
)
def test_sizes_are_powers_of_1024(text: object, size: int) -> None:
    assert parse_size(text) == TierSize(bytes=size)


@pytest.mark.parametrize(("text", "percent"), [("80%", 80.0), ("0.5%", 0.5), ("100%", 100.0)])
def test_sizes_can_be_a_share(text: str, percent: float) -> None:
    assert parse_size(text) == TierSize(percent=percent)


NONSENSE_SIZES = [
    *("", "0", "0G", "0%", "-5G", "101%", "1000%", "G", "%", "12X", "1,5G", "1e3", "nan", "inf"),
    *("1 G", "0x10", "5%G", "99999P", "\u0661G", True, None, [1]),
]


@pytest.mark.parametrize("text", NONSENSE_SIZES)
def test_nonsense_sizes_are_refused_in_one_line(text: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    message = str(caught.value)
    assert "\n" not in message
    assert "write it like" in message or "must be" in message or "use text" in message


@pytest.mark.parametrize("size", ["16", "500", "1048575", "1B", "16B", "0.5K", "63K"])
def test_sizes_nobody_can_mean_are_refused_in_one_line(size: str) -> None:
    with pytest.raises(UsageError, match=r"^tier /dev/shm: .*\b\d+G$"):
        parse_tier(f"/dev/shm={size}")
    assert parse_tier("/dev/shm=64K").size.bytes == 64 << 10
    assert parse_tier("/dev/shm=1048576").size.bytes == 1 << 20


@pytest.mark.parametrize("rate", ["20", "200", "1000"])
def test_rates_nobody_can_mean_are_refused_in_one_line(rate: str) -> None:
    with pytest.raises(UsageError, match=rf"as in {rate}M$"):
        parse_rate(rate)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 60), (60, 60), ("0", 0), ("0.5", 0.5), ("90s", 90), ("10m", 600), ("1.5H", 5400)],
)
def test_times_may_have_a_unit(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds
    assert parse_freshness(f"ttl={text}").ttl_seconds == seconds
    assert parse_freshness("ttl=1h").ttl_seconds == 3600


@pytest.mark.parametrize(
    "text", ["", "soon", "-1", "1x", "h", "1 h", "nan", "inf", "9" * 400 + "h"]
)
def test_nonsense_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="as in 60, or 10m or 1h"):
        parse_seconds(text)


def test_a_tiers_path_may_hold_equals_signs() -> None:
    assert parse_tier("/a=b/c=1M") == TierSpec("/a=b/c", TierSize(bytes=1 << 20))


@pytest.mark.parametrize("text", ["", "/scratch", "=1G", "/scratch=", "/scratch=lots"])
def test_a_tier_needs_path_and_size(text: str) -> None:
    with pytest.raises(UsageError, match="tier"):
        parse_tier(text)


@pytest.mark.parametrize("text", ["100", "-1", "many", "nan"])
def test_the_reserve_is_below_100_percent(text: str) -> None:
    with pytest.raises(UsageError):
        parse_percent(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("20M", 20 << 20), ("1.5G/s", 3 << 29), (4096, 4096), ("0", 0), (0, 0), ("off", 0)],
)
def test_rates_are_bytes_per_second(text: object, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "5%", "-1", "0M", "0.1", "99999P", "nan", None, True])
def test_nonsense_rates_are_refused(text: object) -> None:
    with pytest.raises(UsageError):
        parse_rate(text)


def test_options_are_divided_at_commas_that_are_not_escaped() -> None:
    assert split_options(r"ro,tier=/a\,b\\c=1G,,x-y") == ["ro", r"tier=/a,b\c=1G", "x-y"]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    return build_parser().parse_args(["mount", "/src", "/mnt", *arguments])


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "monarchfs.toml"
    file.write_text(
        'tier = ["/one=1G", "/two=2G"]\nfreshness = "open"\ncopy-workers = 2\n'
        'log_level = "debug"\nlocal_threads = 3\n'
    )
    settings = settings_from(
        parse(
            [
                *("--config", str(file), "-o", "tier=/opt=5G,freshness=ttl=5,copy_workers=9"),
                *("-o", "tier=/opt2=6G,allow_other", "--freshness", "immutable"),
            ]
        )
    )
    assert settings == Settings(
        tier=(
            TierSpec("/opt", TierSize(bytes=5 << 30)),
            TierSpec("/opt2", TierSize(bytes=6 << 30)),
        ),
        freshness=FreshnessSetting(FreshnessMode.IMMUTABLE),
        copy_workers=9,
        log_level="debug",
        local_threads=3,
        allow_other=True,
    )


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_eviction_and_scrubbing_from_everywhere(tmp_path: Path, policy: EvictionPolicy) -> None:
    file = tmp_path / "monarchfs.toml"
    file.write_text(f'evict = "{policy.value}"\nscrub = "20M"\n')
    wanted = Settings(evict=policy, scrub=20 << 20)
    assert settings_from(parse(["--config", str(file)])) == wanted
    assert settings_from(parse(["-o", f"evict={policy.value},scrub=20M"])) == wanted
    assert settings_from(parse(["--evict", policy.value, "--scrub", "20M"])) == wanted
    config = build_config(
        wanted, source="/s", mountpoint="/m", user=ALICE, places=DefaultPlaces("/cache", "/run/x")
    )
    assert (config.evict, config.scrub_bytes_per_second) == (policy, 20 << 20)


@pytest.mark.parametrize("data_path", DataPath)
def test_the_data_path_from_everywhere(tmp_path: Path, data_path: DataPath) -> None:
    file = tmp_path / "monarchfs.toml"
    file.write_text(f'data_path = "{data_path.value}"\n')
    wanted = Settings(data_path=data_path)
    assert settings_from(parse(["--config", str(file)])) == wanted
    assert settings_from(parse(["-o", f"data_path={data_path.value}"])) == wanted
    assert settings_from(parse(["-o", f"data-path={data_path.value}"])) == wanted
    assert settings_from(parse(["--data-path", data_path.value])) == wanted
    config = build_config(
        wanted, source="/s", mountpoint="/m", user=ALICE, places=DefaultPlaces("/cache", "/run/x")
    )
    assert config.data_path is data_path


@pytest.mark.parametrize(
    ("text", "port"), [("9464", 9464), ("1", 1), ("65535", 65535), ("off", None)]
)
def test_a_metrics_port_from_everywhere(tmp_path: Path, text: str, port: int | None) -> None:
    file = tmp_path / "monarchfs.toml"
    file.write_text(f"metrics_port = {port or repr(text)}\n")
    wanted = Settings(metrics_port=port)
    assert settings_from(parse(["--config", str(file)])) == wanted
    assert settings_from(parse(["-o", f"metrics_port={text}"])) == wanted
    assert settings_from(parse(["--metrics-port", text])) == wanted
    config = build_config(
        wanted, source="/s", mountpoint="/m", user=ALICE, places=DefaultPlaces("/cache", "/run/x")
    )
    assert config.metrics_port == port


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90s", 90), ("30m", 1800), ("6h", 21600), ("1d", 86400), ("2w", 1209600)),
        *(("1.5h", 5400), ("off", 0), ("0", 0), ("45", 45), (" 1D ", 86400), ("1s", 1)),
    ],
)
def test_intervals(text: str, seconds: float) -> None:
    assert settings_from(parse(["--touch-source", text])).touch_source == seconds
    assert settings_from(parse(["-o", f"touch_source={text}"])).touch_source == seconds


@pytest.mark.parametrize(
    "text", ["", "often", "+1h", "1y", "0.5s", "2000d", "6 h", "1h30m", "nan", "1e3", "h"]
)
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(UsageError, match="interval"):
        settings_from(parse(["--touch-source", text]))


def test_without_options_all_is_default() -> None:
    assert settings_from(parse([])) == Settings()
    assert Settings().freshness == FreshnessSetting(FreshnessMode.TTL, 60.0)
    assert Settings().prefetch == (PrefetchMode.AUTO, None)


def test_every_key_is_a_setting_and_the_other_way_round() -> None:
    assert set(OPTIONS) == set(Settings.__dataclass_fields__)


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_from(
        parse(["--tier", "t=1G", "--state-dir", "s", "--prefetch", "list", "--log-file", "../log"])
    )
    assert settings.tier == (TierSpec(f"{tmp_path}/t", TierSize(bytes=1 << 30)),)
    assert settings.state_dir == f"{tmp_path}/s"
    assert settings.prefetch == (PrefetchMode.FILE, f"{tmp_path}/list")
    assert settings.log_file == f"{tmp_path.parent}/log"


@pytest.mark.parametrize(
    "option",
    [
        *("ro", "nosuid", "nodev", "noatime", "nodiratime", "relatime", "sync", "exec", "auto"),
        *("noauto", "nofail", "_netdev", "user", "users", "comment=me", "x-systemd.automount"),
        "defaults",
    ],
)
def test_generic_mount_options_change_nothing(option: str) -> None:
    assert merge(from_mount_options([option])) == Settings()


@pytest.mark.parametrize(
    "option", ["rw", "suid", "dev", "fsname=x", "remount", "colour=red", "tier", "freshness", "%"]
)
def test_impossible_mount_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="mount option") as caught:
        from_mount_options([f"ro,{option}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "noexec"), [("noexec", True), ("noexec,exec", False)])
def test_noexec_counts_as_said_last(option: str, noexec: bool) -> None:
    assert merge(from_mount_options([option])).noexec is noexec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('tier="/a,b=1G",ro', ["tier=/a,b=1G", "ro"]),
        (r"user=a\"b", ['user=a"b']),
        ('a"",b', ["a", "b"]),
    ],
)
def test_quotation_marks_in_mount_options(text: str, words: list[str]) -> None:
    assert split_options(text) == words


def test_a_quotation_mark_that_is_not_closed() -> None:
    with pytest.raises(UsageError, match="not closed"):
        split_options('tier="/a=1G')


@given(st.lists(st.text(min_size=1).filter(lambda text: text == text.strip())))
def test_escaped_options_are_split_as_they_were(words: list[str]) -> None:
    assert split_options(",".join(map(escape_option, words))) == words


def test_user_with_a_value_is_ours_not_fstabs() -> None:
    assert merge(from_mount_options(["user=alice"])).user == "alice"


@pytest.mark.parametrize(
    "content",
    [
        "tier = 5G",
        'colour = "red"',
        'tier = "/scratch"',
        "tier = []",
        "tier = [5]",
        "allow_other = 3",
        "copy_workers = 0",
        "copy_workers = true",
        "source_deadline_seconds = -1",
        "start_timeout_seconds = 0",
        'prefetch = ""',
        'log_level = "loud"',
        'evict = "mru"',
        'scrub = "fast"',
        "scrub = true",
        "metrics_port = 0",
        "metrics_port = 65536",
        "metrics_port = 9464.5",
        "metrics_port = true",
        'tier = ["/a=1G", "/a=2G"]',
        "[table]\nx = 1",
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=r"configuration .*bad\.toml") as caught:
        from_file(str(file))
    assert "\n" not in str(caught.value)


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


def test_a_file_that_is_no_text_and_one_without_end(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"# one\nuser = '\xff'\n")
    with pytest.raises(UsageError, match="line 2: not TOML: no UTF-8"):
        from_file(str(tmp_path / "bytes.toml"))
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        from_file("/dev/zero")
    with pytest.raises(UsageError, match="Is a directory"):
        from_file(str(tmp_path))


def test_the_machines_file_is_the_lowest_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, own = tmp_path / "system.toml", tmp_path / "own.toml"
    system.write_text('evict = "lru"\ncopy_workers = 9\nlog_level = "debug"')
    own.write_text("source_threads = 3")
    # Whose file it has to be is another matter.
    monkeypatch.setattr("monarchfs.cli.mount.from_system_file", lambda: from_file(str(system)))
    settings = settings_from(parse(["-o", "copy_workers=8", "--log-level", "error"]))
    assert settings == Settings(evict=EvictionPolicy.LRU, copy_workers=8, log_level="error")
    assert settings_from(parse(["--config", str(own)])) == Settings(source_threads=3)


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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.toml.*No such file"):
        from_file(str(tmp_path / "no.toml"))


paths = st.binary(min_size=1, max_size=40).map(
    lambda raw: "/" + os.fsdecode(raw.replace(b"\0", b"x"))
)
sizes = st.one_of(
    st.builds(TierSize, bytes=st.integers(1, 1 << 60)),
    st.builds(TierSize, percent=st.floats(0.1, 100)),
)
configs = st.builds(
    Config,
    source=paths,
    mountpoint=paths,
    tiers=st.lists(st.builds(TierSpec, paths, sizes), min_size=1, max_size=3).map(tuple),
    state_dir=paths,
    runtime_dir=paths,
    dataset_id=st.just("0123456789abcdef"),
    user=st.builds(
        User,
        st.text(max_size=8),
        st.integers(0, 2**32 - 2),
        st.integers(0, 2**32 - 2),
        st.lists(st.integers(0, 2**32 - 2)).map(tuple),
    ),
    prefetch=st.sampled_from(PrefetchMode),
    prefetch_list=st.none() | paths,
    freshness=st.builds(FreshnessSetting, st.sampled_from(FreshnessMode), st.floats(0, 1e6)),
    evict=st.sampled_from(EvictionPolicy),
    data_path=st.sampled_from(DataPath),
    scrub_bytes_per_second=st.integers(0, 1 << 60),
    metrics_port=st.none() | st.integers(1, 65535),
    touch_source_seconds=st.floats(0, 1e7),
    allow_other=st.booleans(),
    log_file=st.none() | paths,
)


@given(configs)
def test_a_config_survives_json(config: Config) -> None:
    text = config.to_json()
    assert Config.from_json(text.encode("ascii").decode()) == config


def test_the_default_tier_and_state_follow_the_places() -> None:
    config = build_config(
        Settings(),
        source="/lustre/data",
        mountpoint="/mnt",
        user=ALICE,
        places=DefaultPlaces("/cache", "/run/x"),
    )
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


def test_xdg_cache_home_comes_before_home(tmp_path: Path) -> None:
    environ = {"HOME": "/somewhere", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert default_places(1000, environ, lambda path: False).cache_dir == (
        f"{tmp_path}/cache/monarchfs"
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
