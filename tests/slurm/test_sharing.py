"""Which of a job's mounts share with the job's other nodes, and by which options."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.config.settings import from_mount_options
from monarchfs.slurm import peers
from monarchfs.slurm.job import Job, job_from
from monarchfs.slurm.peers import expand_nodes, follow_job, port_of, sharing_options
from monarchfs.slurm.site import Site
from monarchfs.types import OperationError, UsageError

KEY = "1c4b0f3fd05d3f6d1a55"
JOB = Job(7, 1000, "alice", "", "main", "n02", nodes=3, node_list="n[01-03]")
ON_ONE_NODE = replace(JOB, nodes=1, node_list="n02")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,login", ["n1", "login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-11,3],x", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu3", "x"]),
        ("r[1-2]n[7,9]-ib", ["r1n7-ib", "r1n9-ib", "r2n7-ib", "r2n9-ib"]),
        ("a[099-101].x", ["a099.x", "a100.x", "a101.x"]),
    ],
)
def test_a_list_of_nodes(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "n[", "n[]", "n[1-]", "n[a-b]", "n[3-1]", "a b", "a/b", "-a"),
        *("n[1-99999999]", "n[1-999][1-999]"),
    ],
)
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(UsageError):
        expand_nodes(text)


@given(st.text(alphabet="n1-9,[]x/ ", max_size=30))
def test_any_text_is_a_list_of_nodes_or_none(text: str) -> None:
    try:
        names = expand_nodes(text)
    except UsageError:
        return
    assert names
    assert not any(set(name) & set(",[]/ ") for name in names)


def test_the_port_is_one_of_the_sites() -> None:
    for last in (2000, 2009):
        site = Site(peer_ports=(2000, last))
        assert {port_of(site, f"{n:020x}") for n in range(100)} == set(range(2000, last + 1))


def test_slurm_says_which_nodes() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_NUM_NODES": "2"}
    for name in ("SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        assert job_from({**environ, name: "n[1-2]"}).node_list == "n[1-2]"
    assert job_from(environ).node_list == ""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    monkeypatch.setattr(peers, "find_nginx", lambda: "/usr/sbin/nginx")
    monkeypatch.setattr(peers, "address_of", lambda _node, _seconds: "10.0.0.2")
    return Site(peer_key=str(key))


def test_a_job_on_several_nodes_shares(site: Site) -> None:
    values = from_mount_options(sharing_options(site, JOB, KEY))
    assert values == {
        "peers": ("n01", "n02", "n03"),
        "peer_name": "n02",
        "peer_port": port_of(site, KEY),
        "peer_key": site.peer_key,
    }


@pytest.mark.parametrize(
    ("job", "listed", "alone", "changes"),
    [
        (JOB, ["n01", "n02", "n03"], True, []),
        (JOB, ["n02", "n03", "n04", "n05"], True, [(["n01"], ["n04", "n05"])]),
        (JOB, ["n02", "n03", "n04"], False, [(["n01"], [])]),
        (JOB, ["n01", "n02", "n03", "n04"], False, []),
        (JOB, [], True, []),
        (ON_ONE_NODE, ["n01", "n02"], True, [([], ["n01"])]),
    ],
)
def test_a_mount_of_an_earlier_job_shares_with_the_nodes_of_the_next_one(
    site: Site,
    job: Job,
    listed: list[str],
    alone: bool,
    changes: list[tuple[list[str], list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[tuple[list[str], list[str]]] = []

    def request(_daemon: object, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert 0 < seconds <= 9
        if not listed:
            raise OperationError("the mount does not answer")
        if message["command"] == "peers":
            return {"name": "n02", "peers": [{"name": one} for one in listed if one != "n02"]}
        assert (message["command"], message["timeout"]) == ("change_peers", seconds)
        made.append((message["add"], message["remove"]))
        return {}

    monkeypatch.setattr(peers, "request", request)
    mount: Any = None
    follow_job(replace(site, peer_key=None), job, mount, 9, alone=alone)
    assert not made
    follow_job(site, job, mount, 9, alone=alone)
    assert made == changes
    assert bool(caplog.records) == (not listed)


def test_without_a_key_or_another_node_nothing_is_said(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    assert sharing_options(replace(site, peer_key=None), JOB, KEY) == []
    assert sharing_options(site, ON_ONE_NODE, KEY) == []
    assert not caplog.records


CANNOT: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "nginx is not installed": lambda patch: patch.setattr(peers, "find_nginx", lambda: None),
    "_replicas": lambda patch: patch.setitem(sys.modules, "monarchfs.peers._replicas", None),
    "n02 is 127.0.1.1 on this node: see /etc/hosts": lambda patch: patch.setattr(
        peers, "address_of", lambda _node, _seconds: "127.0.1.1"
    ),
}


@pytest.mark.parametrize(
    ("words", "of_site", "of_job"),
    [
        *((words, {}, {}) for words in CANNOT),
        ("No such file", {"peer_key": "/none"}, {}),
        ("chmod 0400", {"peer_key": "/etc/passwd"}, {}),
        ("is no list of nodes", {}, {"node_list": ""}),
        ("n09 is none of the job's nodes", {}, {"node": "n09"}),
    ],
)
def test_a_node_that_cannot_share_says_why_and_goes_on_alone(
    site: Site,
    words: str,
    of_site: dict[str, Any],
    of_job: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    CANNOT.get(words, id)(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert sharing_options(replace(site, **of_site), replace(JOB, **of_job), KEY) == []
    (record,) = caplog.records
    assert "job 7 of alice: mounts without peers: " in record.getMessage()
    assert words in record.getMessage()
