"""The site's configuration, and what an administrator installs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monarchfs.slurm.job import Job, Request
from monarchfs.slurm.site import MOST_DEADLINE, Site, is_below, read_site, site_from
from monarchfs.types import TierSize, UsageError
from tests.support.mounting import REPOSITORY, requires_root
from tests.support.programs import execute

EXAMPLE = REPOSITORY / "slurm" / "monarchfs-slurm.toml"


def job(user: str = "alice", account: str = "", partition: str = "main") -> Job:
    return Job(1, 1000, user, account, partition, "n1")


def test_without_a_file_no_job_may_ask_for_anything(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no configuration"):
        read_site(str(tmp_path / "none"))
    assert Site().roots_for(job()) == []
    assert Site().given_to(job()) == []


@requires_root
def test_the_example(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(EXAMPLE.read_bytes())
    path.chmod(0o644)
    site = read_site(str(path))
    assert site.path == str(path)
    assert site.options == ("freshness=immutable", "prefetch=auto")
    assert site.budget["/local/monarchfs"].size == TierSize(bytes=1 << 40)
    assert (site.linger_seconds, site.deadline_seconds) == (60.0, 20.0)
    assert site.roots_for(job()) == ["/lustre/data"]
    genomics = job(account="genomics")
    assert site.roots_for(genomics) == ["/lustre/data", "/lustre/projects/genomics"]
    assert site.given_to(job()) == []
    assert site.given_to(job(partition="gpu")) == [
        Request("/lustre/data/imagenet", "IMAGENET", (("prefetch", "all"),))
    ]


def test_all_that_is_named_must_fit() -> None:
    table = {
        "allow": [{"roots": "/a", "users": ["alice", "bob"], "partitions": "gpu"}],
        "dataset": [{"path": "/b", "accounts": ["x"]}],
    }
    site = site_from(table, "f")
    assert site.roots_for(job("bob", partition="gpu")) == ["/a"]
    assert site.roots_for(job("bob")) == []
    assert site.roots_for(job("carol", partition="gpu")) == []
    assert site.given_to(job(account="x")) == [Request("/b")]
    assert site.given_to(job()) == []


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"rootz": []}, "rootz: this key is not known"),
        ({"roots": []}, "roots: no directory is named"),
        ({"roots": ["relative"]}, "roots: 'relative' is no dataset"),
        ({"roots": [1]}, "roots: this is neither text nor"),
        ({"tier": "/x"}, "tier: tier '/x' has no size"),
        ({"budget": ["/elsewhere=1G"]}, "budget: /elsewhere is none of the tiers"),
        ({"options": ["nonsense=1"]}, "options: mount option 'nonsense=1' is not known"),
        ({"options": ["user=root"]}, "options: user is not set here"),
        ({"peer_ports": "9000"}, "peer_ports: '9000' is no range of ports"),
        ({"peer_ports": "9-9000"}, "peer_ports: '9-9000' is no range of ports"),
        ({"peer_ports": 9000}, "peer_ports: 9000 is no range of ports"),
        ({"deadline_seconds": 0}, "deadline_seconds: a time limit of 0"),
        ({"deadline_seconds": True}, "deadline_seconds: True is not a value"),
        ({"deadline_seconds": 300}, "deadline_seconds: 300 seconds: use 2 to 45"),
        ({"linger": "long"}, "linger: 'long' is not an interval"),
        ({"wipe": "perhaps"}, "wipe: 'perhaps' is neither"),
        ({"nice": -5}, "nice: '-5' is no priority"),
        ({"allow": {"roots": "/a"}}, "allow: write it as a table in double brackets"),
        ({"allow": [{}]}, "allow: no directory is named"),
        ({"allow": [{"roots": "/a", "groups": "x"}]}, "allow: 'groups' is not known"),
        ({"dataset": [{}]}, "dataset: it needs a path"),
        ({"dataset": [{"path": "/a", "options": "x=1"}]}, "dataset: /x: 'x=1' is no option"),
        ({"dataset": [{"path": "/a", "options": "name=A,/b"}]}, "dataset: options holds a comma"),
        ({"log": ""}, "log: a path is empty"),
        *(({"record": size}, "record: ") for size in ("10%", "yes", "0", "")),
        ({"record": 5}, "record: "),
        ({"record": []}, "record: "),
    ],
)
def test_mistakes_are_named(table: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        site_from(table, "/etc/x.toml")
    assert str(refused.value).startswith(f"configuration /etc/x.toml: {complaint}")


@pytest.mark.parametrize(
    ("path", "below"),
    [("/a", True), ("/a/b", True), ("/ab", False), ("/", False), ("/c/d", False), ("/c/d/e", True)],
)
def test_what_lies_below(path: str, below: bool) -> None:
    assert is_below(path, ["/a", "/c/d/e"]) is below


@pytest.mark.parametrize(
    ("value", "size"), [(True, 64 << 20), (False, 0), ("16M", 16 << 20), ("1G", 1 << 30)]
)
def test_how_large_a_recording_may_be(value: object, size: int) -> None:
    assert site_from({"record": value}, "f").record_bytes == size
    assert Site().record_bytes == 0


def test_every_key_is_documented() -> None:
    text = (REPOSITORY / "docs" / "SLURM.md").read_text()
    table = text[text.index("### Configuration") : text.index("### What happens on a node")]
    documented = set(re.findall(r"^\| `\[*([a-z_]+)\]*` \|", table, flags=re.M))
    assert len(documented) == 18
    for key in documented:
        with pytest.raises(UsageError, match=f"^configuration f: {key}: (?!this key is not known)"):
            site_from({key: object()}, "f")


# What an administrator gets of ``make install-system`` for Slurm

SCRIPTS = "usr/local/lib/monarchfs/slurm"
HEADER = Path("/usr/include/slurm/spank.h")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    words = [f"DESTDIR={root}", f"INSTALLED={root}/opt/bin", "PLUGINDIR=/plugins"]
    done = execute(
        ["make", "-s", "install-system", *words, f"BUILD={root}/build", f"PAGES={root}/man"],
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert ("no Slurm headers" in done.stdout) is not HEADER.exists()
    return root


@pytest.mark.parametrize("step", ["prolog", "epilog"])
def test_the_scripts_run_the_command_that_was_installed(installed: Path, step: str) -> None:
    program = installed / "opt" / "bin" / "monarchfs"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$@" > {installed}/called\nexit 5\n')
    program.chmod(0o755)
    # As slurmd runs it: there is no PATH that anybody could rely on.
    subprocess.run([str(installed / SCRIPTS / step), "--config", "/x"], env={}, check=True)
    assert (installed / "called").read_text() == f"job {step} --config /x\n"


@pytest.mark.parametrize("step", ["prolog", "epilog"])
def test_the_scripts_end_after_the_deadline_and_before_slurm_gives_up(step: str) -> None:
    found = re.search(r"^timeout -k (\d+) (\d+) ", (REPOSITORY / "slurm" / step).read_text(), re.M)
    assert found is not None
    grace, limit = map(int, found.groups())
    document = (REPOSITORY / "docs" / "SLURM.md").read_text()
    advised = re.search(r"^ +BatchStartTimeout=(\d+)$", document, re.M)
    assert advised is not None
    assert MOST_DEADLINE < limit < limit + grace < int(advised[1])
    assert f"{limit + grace} seconds after which the scripts end" in " ".join(document.split())


def test_the_task_prolog_prints_what_the_prolog_wrote(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "12").write_text("export A=b\n")
    for job, said in (("12", "export A=b\n"), ("13", ""), ("../env/12", ""), ("", "")):
        done = execute(
            [str(installed / SCRIPTS / "task_prolog")],
            env={"SLURM_JOB_ID": job, "MONARCHFS_RUN": str(tmp_path)},
            check=True,
        )
        assert done.stdout == said


def test_the_example_is_there_and_the_plugin_where_slurm_looks(installed: Path) -> None:
    example = installed / "usr/local/share/monarchfs/monarchfs-slurm.toml"
    assert example.read_bytes() == EXAMPLE.read_bytes()
    plugin = installed / "plugins" / "monarchfs.so"
    assert plugin.exists() is HEADER.exists()
    if plugin.exists():
        assert os.stat(plugin).st_mode & 0o777 == 0o644
        for symbol in (b"slurm_spank_init_post_opt", b"plugin_type"):
            assert symbol in plugin.read_bytes()
