"""Settings from the environment and from a user's own file: which wins, and for whom they count."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from monarchfs.cli.mount import settings_from
from monarchfs.cli.parser import build_parser
from monarchfs.config import FreshnessMode, FreshnessSetting, TierSpec
from monarchfs.config.files import from_file
from monarchfs.config.personal import read_personal
from monarchfs.config.settings import Settings
from monarchfs.slurm import daemon
from monarchfs.types import EvictionPolicy, TierSize, UsageError
from tests.support import surroundings
from tests.support.fake_mounts import NOBODY, Area, area, device_mode
from tests.support.mounting import MONARCHFS, requires_fuse, requires_root


def parse(arguments: Sequence[str] = ()) -> argparse.Namespace:
    return build_parser().parse_args(["mount", "/src", "/mnt", *arguments])


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
    write(home.parent / "system.toml", threads.format(1) + "scrub = '1M'\nevict = 'lru'\n")
    write(home / "monarchfs.toml", threads.format(2) + "scrub = '2M'\n")
    other = write(home / "other.toml", threads.format(3))
    environ = {"HOME": str(home.parent), "MONARCHFS_COPY_WORKERS": "4"}
    environ["MONARCHFS_SOURCE_THREADS"] = "4"
    words = ["--freshness", "open", "-o", "copy_workers=5"]
    without_the_standard_files = Settings(
        copy_workers=5,
        source_threads=4,
        local_threads=3,
        freshness=FreshnessSetting(FreshnessMode.OPEN),
    )
    wanted = replace(
        without_the_standard_files, local_threads=2, scrub=2 << 20, evict=EvictionPolicy.LRU
    )
    assert settings_from(parse(words), environ=environ) == wanted
    named = parse([*words, "--config", str(other)])
    assert settings_from(named, environ=environ) == without_the_standard_files
    environ["MONARCHFS_CONFIG"] = str(other)
    assert settings_from(parse(words), environ=environ) == without_the_standard_files
    null = parse(["--config", "/dev/null"])
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


def test_what_slurms_jobs_are_told_is_no_setting() -> None:
    told = {"MONARCHFS_ROOT": "/run/x", "MONARCHFS_DATA_PATH": "/run/y", "MONARCHFS_WARNING": "no"}
    assert settings_from(parse(), environ=told) == Settings()
    assert read_personal(told, None).unknown == ()
    assert read_personal({"MONARCHFS_TEIR": "x"}, None).unknown == ("MONARCHFS_TEIR",)
    assert settings_from(parse(), environ={"MONARCHFS_FOREGROUND": "1"}).foreground is False


@requires_root
@pytest.mark.parametrize(
    ("arguments", "sudo"), [(["--user", NOBODY], ""), (["-o", f"user={NOBODY}"], ""), ([], "1000")]
)
def test_root_takes_nothing_from_whom_it_acts_for(
    home: Path, arguments: list[str], sudo: str
) -> None:
    write(home / "monarchfs.toml", "copy_workers = 2\n")
    environ = {
        "HOME": str(home.parent),
        "SUDO_UID": sudo,
        "MONARCHFS_STATE_DIR": "/etc",
        "MONARCHFS_CONFIG": str(home / "monarchfs.toml"),
    }
    settings = settings_from(parse(arguments), environ=environ)
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
    done = subprocess.run(
        [*helper, f"{tmp_path}/none", f"{tmp_path}/mnt"], capture_output=True, text=True
    )
    assert "none does not exist" in done.stderr


@pytest.fixture
def users_area() -> Iterator[Area]:
    with (
        TemporaryDirectory(prefix="monarchfs-test-") as place,
        device_mode(0o666),
        area(Path(place), NOBODY) as opened,
    ):
        yield opened


@requires_root
@requires_fuse
def test_an_ordinary_users_own_count(users_area: Area) -> None:
    work = users_area
    (work.path / "src" / "file").write_text("content")
    (work.path / "conf").mkdir()
    file = write(work.path / "conf" / "monarchfs.toml", f'state_dir = "{work.path}/state"\n')
    os.chown(file, pwd.getpwnam(NOBODY).pw_uid, -1)
    environment = {**work.environment, "XDG_CONFIG_HOME": str(work.path / "conf")}
    environment["MONARCHFS_TIER"] = f"{work.path}/tier=10M"

    def command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            work.command(*words),
            capture_output=True,
            text=True,
            cwd=work.path,
            env={**environment, **more},
            timeout=60,
            check=False,
        )

    done = command("mount", "src", "mnt", MONARCHFS_FRESHNESS="soon")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "environment variable MONARCHFS_FRESHNESS: " in done.stderr
    done = command("mount", "src", "mnt")
    assert (done.returncode, done.stderr) == (0, "")
    assert (work.path / "state").is_dir()
    assert (work.path / "tier").is_dir()
    assert command("umount", "mnt").returncode == 0

    done = command("doctor", "src", "--quick", "--json", MONARCHFS_TEIR="x")
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
        done = subprocess.run(
            [*command, *more, "--", "true"], env=environment, capture_output=True, check=False
        )
        assert done.returncode == code
