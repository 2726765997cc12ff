"""The site's configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from monarchfs.slurm.job import Job
from monarchfs.slurm.request import Request
from monarchfs.slurm.site import Site, is_below, read_site, site_from
from monarchfs.types import TierSize, UsageError
from tests.support.mounting import REPOSITORY, requires_root

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


NO_SIZES: list[Any] = ["10%", "yes", "0", 5, [], ""]


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
        ({"options": ["peer_port=1"]}, "options: peer_port is not set here"),
        ({"peer_ports": "9000"}, "peer_ports: '9000' is no range of ports"),
        ({"peer_ports": "9-9000"}, "peer_ports: '9-9000' is no range of ports"),
        ({"peer_ports": 9000}, "peer_ports: 9000 is no range of ports"),
        ({"options": ["tier=/x=1G"]}, "options: tier is not set here"),
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
        *(({"record": size}, "record: ") for size in NO_SIZES),
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
