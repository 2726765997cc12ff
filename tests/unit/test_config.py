"""Settings: values, layers, files, the environment, for whom they count, what workers are told."""

import argparse
import json
import os
import pwd
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.cli.mount import settings_from
from monarchfs.cli.parser import build_parser
from monarchfs.config import Config, FreshnessMode, FreshnessSetting, TierSpec, User, values
from monarchfs.config.files import from_file, from_system_file
from monarchfs.config.options import OPTIONS
from monarchfs.config.personal import read_personal
from monarchfs.config.places import DefaultPlaces, build_config, default_places, resolve_user
from monarchfs.config.settings import (
    Settings,
    escape_option,
    from_mount_options,
    merge,
    set_by_profile,
    split_options,
)
from monarchfs.slurm import daemon
from monarchfs.types import EvictionPolicy, TierSize, UsageError
from tests.support import surroundings
from tests.support.fake_mounts import NOBODY, Area, area
from tests.support.mounting import MONARCHFS, requires_fuse, requires_root
from tests.support.programs import execute

GIB = 1 << 30
DAY = 86400


def size(number: int) -> TierSize:
    return TierSize(bytes=number)


UNDERSTOOD: list[tuple[Callable[[object], object], object, list[object]]] = [
    (values.parse_size, size(512), ["0.5K"]),
    (values.parse_size, size(GIB), [GIB, "1G", "1GiB", "1gb", " 1024M "]),
    (values.parse_size, size(2 << 50), ["2P"]),
    (values.parse_size, TierSize(percent=0.5), ["0.5%"]),
    (values.parse_tier, TierSpec("/a=b/c", size(64 << 10)), ["/a=b/c=64K"]),
    (values.parse_rate, 3 << 29, ["1.5G/s"]),
    (values.parse_rate, 0, ["0", 0, "off"]),
    (values.parse_seconds, 60, ["60", 60, "1m", "60s"]),
    (values.parse_seconds, 5400, ["1.5H"]),
    (values.parse_freshness, FreshnessSetting(FreshnessMode.TTL, 3600), ["ttl=1h"]),
    (values.parse_port, 65535, ["65535"]),
    (values.parse_port, None, ["off"]),
    (values.parse_interval, 90, ["90s", "90", "1.5m"]),
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
    # Sizes and rates that nobody can mean.
    (
        values.parse_tier,
        r"^tier /dev/shm: .*\b\d+G$",
        [f"/dev/shm={text}" for text in ("500", "1048575", "1B", "63K")],
    ),
    (values.parse_rate, r"means bytes per second: .* as in \d+M$", ["20", "200", "1000"]),
    (values.parse_freshness, "use 100 years at most", ["ttl=99999999999", "ttl=2000000w"]),
    (values.parse_percent, "use a number from 0 to 99", ["100", "-1", "many", "nan"]),
    (values.parse_interval, "is not an interval", ["", "often", "1y", "2000d", "6 h", "1h30m"]),
]


@pytest.mark.parametrize(("parse", "value", "texts"), UNDERSTOOD)
def test_accepted(parse: Callable[[object], object], value: object, texts: list[object]) -> None:
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


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["mount", "/src", "/mnt", *arguments])


TEXTS = {
    "tier": "/dev/shm=0.3%",
    "state_dir": "/state",
    "prefetch": "all",
    "freshness": "ttl=1h",
    "evict": "sieve",
    "data_path": "relay",
    "log_file": "/log",
    "log_level": "debug",
    "metrics_port": "9464",
    "touch_source": "1d",
    "scrub": "20M",
    "share": "partition",
    "prefetch_rate": "20M",
    "prefetch_floor": "10",
    "profile": "small-files",
    "prefetch_jitter": "30s",
    "kernel_resend": "false",
    "standby": "false",
}
TAKE_ANY_TEXT = {*("state_dir", "log_file", "prefetch", "peer_key", "peers", "peer_name", "user")}


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_every_option_from_everywhere(tmp_path: Path, key: str) -> None:
    """A file, mount options, the command line, the environment."""
    text, option, variable = TEXTS.get(key, "1"), OPTIONS[key], f"MONARCHFS_{key.upper()}"
    value, default = option.parse(text), getattr(Settings(), key)
    assert value != default
    (tmp_path / "monarchfs.toml").write_text(f'{key} = "{text}"\n')
    config = build_config(
        merge({key: value}),
        source="/lustre/\udcff",
        mountpoint="/mnt",
        user=User("alice", 1000, 1000, (1000, 27)),
        places=DefaultPlaces("/cache", "/run/x"),
    )
    assert Config.from_json(config.to_json().encode("ascii").decode()) == config
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


def test_what_a_mount_option_says_last_counts_and_user_with_a_value_is_ours() -> None:
    assert merge(from_mount_options(["ro", "nosuid", "_netdev", "users"])) == Settings()
    assert merge(from_mount_options(["noexec"])).noexec
    assert not merge(from_mount_options(["noexec,exec"])).noexec
    assert merge(from_mount_options(["user=alice"])).user == "alice"
    for text, words in (
        (r"ro,tier=/a\,b\\c=1G,,x-y", ["ro", r"tier=/a,b\c=1G", "x-y"]),
        ('tier="/a,b=1G",ro', ["tier=/a,b=1G", "ro"]),
        (r"user=a\"b", ['user=a"b']),
        ('a"",b', ["a", "b"]),
    ):
        assert split_options(text) == words
    with pytest.raises(UsageError, match="not closed"):
        split_options('tier="/a=1G')


@given(st.lists(st.text(min_size=1).filter(lambda text: text == text.strip())))
def test_escaped_options_are_split_as_they_were(words: list[str]) -> None:
    assert split_options(",".join(map(escape_option, words))) == words


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# first\ncolour = 1", ["line 2: key 'colour' is not known", "monarchfs mount --help"]),
        ("freshnes = 'open'", ["line 1: key 'freshnes'", "did you mean freshness?"]),
        ("\n[tier]\npath = '/a'", ["line 2: tier:", "is not a value"]),
        ("\n[tiers]\npath = '/a'", ["line 2: key 'tiers'", "did you mean tier?"]),
        ("\n\ncopy-workers = 0", ["line 3: copy-workers: '0' is not a count"]),
        ("copy-workers = 1\ncopy_workers = 2", ["line 2: copy_workers is given twice"]),
        ("tier = 5G", ["line 1: tier: not TOML", 'tier = "VALUE"']),
        ("a = " + "[" * 100_000, ["not TOML", "nested too deeply"]),
        ('tier = ["/a=1G", "/a=2G"]', ["line 1: "]),
        ("allow_other = 3", ["line 1: "]),
        ("metrics_port = 9464.5", ["line 1: "]),
    ],
)
def test_errors_are_told_by_line_and_key(tmp_path: Path, content: str, words: list[str]) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        from_file(str(file))
    for word in (f"configuration {file}", *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_a_users_cache_is_local(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "TMPDIR": "/var/tmp", "XDG_RUNTIME_DIR": str(tmp_path)}
    user = os.geteuid() or 1000  # who owns the directory, or root does
    local = default_places(user, environ, lambda path: "disk")
    assert local == DefaultPlaces(f"{tmp_path}/.cache/monarchfs", f"{tmp_path}/monarchfs")
    bare = default_places(4242, {"HOME": "/nonexistent/home"}, lambda path: "network")
    assert (bare.cache_dir, bare.runtime_dir) == ("/tmp/monarchfs-4242", "/tmp/monarchfs-4242/run")
    environ["XDG_CACHE_HOME"] = f"{tmp_path}/xdg"
    assert (
        default_places(1000, environ, lambda path: "disk").cache_dir == f"{tmp_path}/xdg/monarchfs"
    )


@pytest.mark.parametrize(
    ("scratch", "elsewhere", "found"),
    [
        ({"SLURM_TMPDIR": "disk", "TMPDIR": "disk"}, "disk", "SLURM_TMPDIR"),
        ({"SLURM_TMPDIR": "memory", "TMPDIR": "disk"}, "disk", "TMPDIR"),
        ({"TMPDIR": "network"}, "disk", "/tmp"),
        ({"TMPDIR": "memory"}, "network", "TMPDIR"),
        ({"TMPDIR": "network"}, "memory", "/tmp"),
    ],
)
def test_with_a_home_on_the_network_copies_lie_on_the_nodes_scratch_disk(
    tmp_path: Path, scratch: dict[str, str], elsewhere: str, found: str
) -> None:
    (tmp_path / "home").mkdir()
    kinds = {f"{tmp_path}/home/.cache": "network"}
    environ = {"HOME": f"{tmp_path}/home"}
    for variable, kind in scratch.items():
        environ[variable] = f"{tmp_path}/{variable}"
        (tmp_path / variable).mkdir()
        kinds[environ[variable]] = kind
    user = os.geteuid() or 1000
    places = default_places(user, environ, lambda path: kinds.get(path, elsewhere))
    assert places.cache_dir == f"{environ.get(found, found)}/monarchfs-{user}"
    assert places.reason == f"{tmp_path}/home/.cache is on a network file system"


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
    monkeypatch.setattr(os, "geteuid", lambda: 1234567)
    assert resolve_user(None, {"SUDO_UID": "0"}).uid == 1234567


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of configuration of who runs this, root or not; HOME is its parent."""
    entry = pwd.getpwuid(os.geteuid())
    mine = pwd.struct_passwd((*entry[:5], str(tmp_path), entry[6]))
    monkeypatch.setattr("monarchfs.config.personal.pwd.getpwuid", lambda _uid: mine)
    system = tmp_path / "system.toml"
    # Whose file it has to be is another matter.
    monkeypatch.setattr(
        "monarchfs.cli.mount.from_system_file",
        lambda: from_file(str(system)) if system.exists() else {},
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config" / "monarchfs").mkdir(parents=True)
    return tmp_path / ".config"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


def test_the_nearer_to_the_command_the_stronger(home: Path) -> None:
    threads = "copy_workers = {0}\nsource_threads = {0}\nlocal_threads = {0}\n"
    tiers = 'tier = ["/one=1G", "/two=2G"]\n'
    write(home.parent / "system.toml", tiers + threads.format(1) + "scrub = '1M'\nevict = 'lru'\n")
    write(home / "monarchfs.toml", threads.format(2) + "scrub = '2M'\n")
    other = write(home / "other.toml", threads.format(3))
    environ = {"HOME": str(home.parent), "MONARCHFS_COPY_WORKERS": "4"}
    environ["MONARCHFS_SOURCE_THREADS"] = "4"
    words = ["--freshness", "open", "-o", "copy_workers=5,freshness=ttl=5,allow_other"]
    words += ["-o", "tier=/opt=5G", "-o", "tier=/opt2=6G"]
    without_the_standard_files = Settings(
        tier=(TierSpec("/opt", size(5 * GIB)), TierSpec("/opt2", size(6 * GIB))),
        allow_other=True,
        copy_workers=5,
        source_threads=4,
        local_threads=3,
        freshness=FreshnessSetting(FreshnessMode.OPEN),
    )
    wanted = replace(
        without_the_standard_files, local_threads=2, scrub=2 << 20, evict=EvictionPolicy.LRU
    )
    assert settings_from(parse(*words), environ=environ) == wanted
    named = parse(*words, "--config", str(other))
    assert settings_from(named, environ=environ) == without_the_standard_files
    environ["MONARCHFS_CONFIG"] = str(other)
    assert settings_from(parse(*words), environ=environ) == without_the_standard_files
    write(other, "profile = 'small-files'\nprefetch = 'access'\n")
    chosen = settings_from(parse(*words[2:4]), environ=environ)
    assert set_by_profile(chosen) == []  # a file, the environment and -o say otherwise
    chosen = settings_from(parse("--profile", "training"), environ=environ)
    assert set_by_profile(chosen) == ["freshness=immutable"]
    null = parse("--config", "/dev/null")
    assert settings_from(null, environ=environ).local_threads == Settings().local_threads


@pytest.mark.parametrize("name", ["monarchfs.toml", "monarchfs/config.toml"])
def test_the_users_file(home: Path, name: str) -> None:
    file = write(home / name, 'tier = "/scratch=1G"\n')
    environ = {"HOME": str(home.parent)}
    assert settings_from(parse(), environ=environ).tier == (
        TierSpec("/scratch", TierSize(bytes=1 << 30)),
    )
    assert read_personal(environ, None).file == str(file)
    file.chmod(0o666)
    with pytest.raises(UsageError, match="written by others"):
        settings_from(parse(), environ=environ)
    write(file, "freshnes = 1\n")
    with pytest.raises(UsageError, match=rf"{name}, line 1: .* did you mean freshness"):
        settings_from(parse(), environ=environ)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match="not a file of yours"):
        settings_from(parse(), environ=environ)


def test_the_variable_of_tiers_takes_several() -> None:
    environ = {"MONARCHFS_TIER": r"/dev/shm=16G,/scr\,atch=80%"}
    assert [tier.path for tier in settings_from(parse(), environ=environ).tier or ()] == [
        *("/dev/shm", "/scr,atch")
    ]
    told = {"MONARCHFS_ROOT": "/run/x", "MONARCHFS_DATA_PATH": "/run/y", "MONARCHFS_WARNING": "no"}
    assert settings_from(parse(), environ=told) == Settings()
    assert read_personal(told, None).unknown == ()
    assert read_personal({"MONARCHFS_TEIR": "x"}, None).unknown == ("MONARCHFS_TEIR",)
    assert settings_from(parse(), environ={"MONARCHFS_FOREGROUND": "1"}).foreground is False


@requires_root
@pytest.mark.parametrize(
    ("arguments", "sudo"), [(["--user", NOBODY], ""), (["-o", f"user={NOBODY}"], ""), ([], "1000")]
)
def test_root_takes_nothing_of_whom_it_helps(home: Path, arguments: list[str], sudo: str) -> None:
    write(home / "monarchfs.toml", "copy_workers = 2\n")
    environ = {
        "HOME": str(home.parent),
        "SUDO_UID": sudo,
        "MONARCHFS_STATE_DIR": "/etc",
        "MONARCHFS_CONFIG": str(home / "monarchfs.toml"),
    }
    settings = settings_from(parse(*arguments), environ=environ)
    assert (settings.state_dir, settings.copy_workers) == (None, Settings().copy_workers)
    environ["SUDO_UID"] = ""
    mine = settings_from(parse(), environ=environ)
    assert (mine.state_dir, mine.copy_workers) == ("/etc", 2)


@requires_root
def test_roots_own_file_is_not_that_of_whose_home_it_was_left(tmp_path: Path) -> None:
    (tmp_path / ".config").mkdir()
    write(tmp_path / ".config" / "monarchfs.toml", "copy_workers = 2\n")
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    assert read_personal(environ, None).file != str(tmp_path / ".config" / "monarchfs.toml")


def test_a_prolog_and_mount8_hand_nothing_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCHFS_FRESHNESS", "nonsense")
    assert not [name for name in daemon.clean_environment() if name.startswith("MONARCHFS_")]
    (tmp_path / "mnt").mkdir()
    helper = [sys.executable, "-m", "monarchfs.cli.mount_helper", "-f"]
    assert "none does not exist" in execute([*helper, f"{tmp_path}/none", f"{tmp_path}/mnt"]).stderr


@pytest.fixture
def users_area(open_device: None) -> Iterator[Area]:
    with TemporaryDirectory(prefix="monarchfs-test-") as place, area(Path(place), NOBODY) as opened:
        yield opened


@requires_root
@requires_fuse
def test_doctor_names_what_of_an_ordinary_users_counts(users_area: Area) -> None:
    work = users_area
    (work.path / "conf").mkdir()
    file = write(work.path / "conf" / "monarchfs.toml", f'state_dir = "{work.path}/state"\n')
    os.chown(file, pwd.getpwnam(NOBODY).pw_uid, -1)
    environment = {**work.environment, "XDG_CONFIG_HOME": str(work.path / "conf")}
    environment["MONARCHFS_TIER"] = f"{work.path}/tier=10M"
    environment["MONARCHFS_TEIR"] = "x"
    done = execute(
        work.command("doctor", "src", "--quick", "--json"), cwd=work.path, env=environment
    )
    (check,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "configuration"]
    assert check["files"][-1] == str(file)
    assert check["variables"] == ["MONARCHFS_TIER"]
    assert "MONARCHFS_TEIR" in check["detail"]


@requires_fuse
def test_switches_of_run_have_variables(tmp_path: Path) -> None:
    if os.geteuid() == 0 and (why := surroundings.no_namespaces()):
        pytest.skip(why)
    environment = {**os.environ, "MONARCHFS_STRICT": "yes"}
    environment.pop("SUDO_UID", None)
    command = [*MONARCHFS, "run", str(tmp_path), "--tier", f"{tmp_path}/no/such=1G"]
    for more, code in (([], 2), (["--user", NOBODY], 0 if os.geteuid() == 0 else 2)):
        done = execute([*command, *more, "--", "true"], env=environment)
        assert done.returncode == code
