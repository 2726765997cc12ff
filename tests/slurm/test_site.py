"""What jobs may write, and what is made of it; which of their mounts share with other nodes; the
site's configuration, and what an administrator installs."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarchfs.cli.main import main
from monarchfs.config.settings import from_mount_options
from monarchfs.slurm import peers, prolog
from monarchfs.slurm.job import (
    MOST_DATASETS,
    Job,
    Request,
    job_from,
    node_name,
    parse_comment,
    parse_dataset_path,
    parse_request,
)
from monarchfs.slurm.peers import expand_nodes, follow_job, port_of, sharing_options
from monarchfs.slurm.prolog import datasets_of, environment_lines
from monarchfs.slurm.site import MOST_DEADLINE, Site, is_below, read_site, site_from
from monarchfs.types import OperationError, TierSize, UsageError
from tests.support.mounting import REPOSITORY, requires_root
from tests.support.programs import execute

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_USER": "alice"}


@pytest.mark.parametrize(
    ("comment", "requests"),
    [
        ("", []),
        ("don't \"worry", []),
        ("xmonarchfs=/a", []),
        ("monarchfs=/a", [Request("/a")]),
        ("monarchfs=//a///b/", [Request("/a/b")]),
        ("run 7 monarchfs=/a\tmonarchfs=/b", [Request("/a"), Request("/b")]),
        (
            "monarchfs=/a:prefetch=all:name=A,/b:freshness=ttl=60",
            [
                Request("/a", "A", (("prefetch", "all"),)),
                Request("/b", None, (("freshness", "ttl=60"),)),
            ],
        ),
        ('monarchfs="/my data":name=A x', [Request("/my data", "A")]),
        ("monarchfs=/my\\ data\\,\\:\\\\", [Request("/my data,:\\")]),
        ('monarchfs="/a\\"b=\\\\":name=A', [Request('/a"b=\\', "A")]),
        ('monarchfs=/a"b c"\\"/\udcff', [Request('/ab c"/\udcff')]),
        (
            "don't monarchfs=/\\$,/b:prefetch=none words don't",
            [Request("/$"), Request("/b", None, (("prefetch", "none"),))],
        ),
        ("monarchfs=/$(reboot)`id`;|&*?~", [Request("/$(reboot)`id`;|&*?~")]),
    ],
)
def test_comments_that_are_understood(comment: str, requests: list[Request]) -> None:
    assert parse_comment(comment) == requests


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ("", "name a directory by its whole path"),
        ("/", "without . and .."),
        ("/a/../etc", "without . and .."),
        ("/a:user=root", "is no option that a job may give"),
        ("/a:prefetch=/etc/shadow", "is not for jobs"),
        ("/a:prefetch=all:prefetch=none", "given twice"),
        ("/a:name=LD_PRELOAD\nx", "is no name for a variable"),
        ("/a:freshness=ttl=x", "is not a time"),
        ("/a:evict=all", "is not known"),
        ('/a"b', "a quotation mark is not closed"),
        ("/a\\", "a backslash stands at the end"),
        ("/a\nexport LD_PRELOAD=/x", "cannot be printed"),
        ("/" + "a" * 5000, "too long"),
        ("/" + "a" * 20000, "more than 16384 char"),
        (",".join(["/a"] * (MOST_DATASETS + 1)), "too many"),
    ],
)
def test_requests_that_are_refused(request_: str, complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_request(request_)
    assert complaint in str(refused.value)


@given(st.text() | st.text(st.sampled_from('mon/ab.,:="\\ \n\udc80')).map("monarchfs=/".__add__))
@example("monarchfs=")
@example('monarchfs="')
@example("monarchfs=/\ud800")
def test_whatever_a_user_writes_is_a_plain_path_or_refused(text: str) -> None:
    try:
        requests = parse_comment(text)
    except UsageError:
        return
    for request in requests:
        assert request.path == os.path.normpath(request.path)
        assert request.path.startswith("/")
        assert ".." not in request.path.split("/")
        assert parse_dataset_path(request.path) == request.path
    job = job_from({**JOB, "SLURM_JOB_COMMENT": text})
    wanted = datasets_of(Site(), job)
    environment = prolog.environment_without_mount(Site(), job, "why")
    lines = environment_lines(environment, by_slurm=True)
    assert len(lines.splitlines()) == len(lines.split("\n")) - 1 == len(wanted) + bool(wanted) + 1
    for line in lines.split("\n")[:-1]:
        assert line.startswith("export MONARCHFS_")
    assert len({one.variable for one in wanted}) == len(wanted)


@given(st.text())
def test_a_warning_stays_on_its_line(warning: str) -> None:
    lines = environment_lines(prolog.environment_of([], [], [warning]), by_slurm=False)
    assert lines.count("\n") == 1
    assert lines.startswith("export MONARCHFS_WARNING=")


def test_mistakes_sums_and_variables() -> None:
    job = job_from({**JOB, "SLURM_JOB_COMMENT": "monarchfs=relative"})
    assert job.requests == ()
    assert job.mistake is not None
    assert "name a directory by its whole path" in job.mistake
    environ = {**JOB, "SLURM_JOB_COMMENT": "monarchfs=/b,/a", "SPANK_MONARCHFS": "/a:name=X"}
    wanted = datasets_of(Site(), job_from(environ))
    found = [f"{one.variable}={one.request.path}" for one in wanted]
    assert found == ["MONARCHFS_DATA_X=/a", "MONARCHFS_DATA_B=/b"]
    comment = "monarchfs=/x/image-net.v1,/y/image_net_v1,/z/ümlaut,/z/...x,/z/\\,\\,"
    wanted = datasets_of(Site(), job_from({**JOB, "SLURM_JOB_COMMENT": comment}))
    names = ("IMAGE_NET_V1", "IMAGE_NET_V1_2", "MLAUT", "X", "SET")
    assert [one.variable for one in wanted] == [f"MONARCHFS_DATA_{name}" for name in names]


NO_JOBS = ("", "0", "-1", "1x", "1;reboot", "../1", "9" * 11, "\u0661", "4294967296")
NO_USERS = ("", "root", "-1", "4294967295", "1 2")


@pytest.mark.parametrize(
    ("name", "text"),
    [*(("JOB_ID", text) for text in NO_JOBS), *(("JOB_UID", text) for text in NO_USERS)],
)
def test_what_is_no_job_and_no_user(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        job_from({**JOB, f"SLURM_{name}": text})


@pytest.mark.parametrize("name", ["../../etc/x", "", ".", "a/b", "a\nb"])
def test_a_nodes_name_is_safe_in_a_files_name(name: str) -> None:
    node = node_name({"SLURMD_NODENAME": name})
    assert node not in ("", ".", "..", name)
    assert "/" not in node


KEY = "1c4b0f3fd05d3f6d1a55"
SHARING = Job(7, 1000, "alice", "", "main", "n02", nodes=3, node_list="n[01-03]")
ON_ONE_NODE = replace(SHARING, nodes=1, node_list="n02")


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
    environ = {**JOB, "SLURM_JOB_NUM_NODES": "2"}
    for name in ("SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        assert job_from({**environ, name: "n[1-2]"}).node_list == "n[1-2]"
    assert job_from(environ).node_list == ""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    monkeypatch.setattr(peers, "find_nginx", lambda: "/usr/sbin/nginx")
    monkeypatch.setattr(peers, "key_and_certificate", lambda _secret: "")
    monkeypatch.setattr(peers, "address_of", lambda _node, _seconds: "10.0.0.2")
    return Site(peer_key=str(key))


def test_a_job_on_several_nodes_shares(site: Site) -> None:
    values = from_mount_options(sharing_options(site, SHARING, KEY))
    assert values == {
        "peers": ("n01", "n02", "n03"),
        "peer_name": "n02",
        "peer_port": port_of(site, KEY),
        "peer_key": site.peer_key,
        "peer_tls": True,
    }


@pytest.mark.parametrize(
    ("job", "listed", "alone", "changes"),
    [
        (SHARING, ["n01", "n02", "n03"], True, []),
        (SHARING, ["n02", "n03", "n04", "n05"], True, [(["n01"], ["n04", "n05"])]),
        (SHARING, ["n02", "n03", "n04"], False, [(["n01"], [])]),
        (SHARING, [], True, []),
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


def test_without_a_key_or_others_it_is_silent(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert sharing_options(replace(site, peer_key=None), SHARING, KEY) == []
    assert sharing_options(site, ON_ONE_NODE, KEY) == []
    assert not caplog.records


CANNOT: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "nginx is not installed": lambda patch: patch.setattr(peers, "find_nginx", lambda: None),
    "pkey: unsupported": lambda patch: patch.setattr(
        peers, "key_and_certificate", Mock(side_effect=OperationError("pkey: unsupported"))
    ),
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
        assert sharing_options(replace(site, **of_site), replace(SHARING, **of_job), KEY) == []
    (record,) = caplog.records
    assert "job 7 of alice: mounts without peers: " in record.getMessage()
    assert words in record.getMessage()


EXAMPLE = REPOSITORY / "slurm" / "monarchfs-slurm.toml"


def job_of(user: str = "alice", account: str = "", partition: str = "main") -> Job:
    return Job(1, 1000, user, account, partition, "n1")


def test_without_a_file_no_job_may_ask_for_anything(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no configuration"):
        read_site(str(tmp_path / "none"))
    assert not Site().roots_for(job_of()) + [one.path for one in Site().given_to(job_of())]


@requires_root
def test_the_example_and_a_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(EXAMPLE.read_bytes())
    path.chmod(0o644)
    site = read_site(str(path))
    assert site.path == str(path)
    assert site.options == ("freshness=immutable", "prefetch=auto", "require_files")
    assert site.budget["/local/monarchfs"].size == TierSize(bytes=1 << 40)
    assert (site.linger_seconds, site.deadline_seconds) == (60.0, 20.0)
    assert site.roots_for(job_of()) == ["/lustre/data"]
    genomics = job_of(account="genomics")
    assert site.roots_for(genomics) == ["/lustre/data", "/lustre/projects/genomics"]
    assert site.given_to(job_of()) == []
    assert site.given_to(job_of(partition="gpu")) == [
        Request("/lustre/data/imagenet", "IMAGENET", (("prefetch", "all"),))
    ]
    (below := tmp_path / "open").mkdir()
    below.chmod(0o777)
    for tier, code, said in (
        (f"{tmp_path}/none/t=1M", 0, f"{path}: right\njobs may ask for datasets below: /lustre/"),
        ("/none/t=1M", 0, "\nwarning: /none/t shares its file system with /, "),
        (f"{path}/t=1M", 1, f"\nproblem: tier {path}/t: {path} is not a directory: name"),
        (f"{below}=1000T", 1, f"\nproblem: tier {below}: its size, 1000T, is more than all"),
        (f"{below}/t=1M", 1, f"tier {below}/t: others than root can change {below}: configure"),
        ("/hangs=1M", 1, "\nproblem: no answer from /hangs within 1 s: see which file system"),
    ):
        if tier == "/hangs=1M":
            monkeypatch.setattr("monarchfs.doctor.run.TIER_SECONDS", 1.0)
            monkeypatch.setattr(
                "monarchfs.doctor.storage.tier", lambda *_: os.read(os.pipe()[0], 1)
            )
        path.write_text(f'roots = "/lustre/data"\ntier = "{tier}"')
        assert main(["job", "check", "--config", str(path)]) == code
        assert said in capsys.readouterr().out


def test_all_that_is_named_must_fit() -> None:
    allow = {"roots": "/a", "users": ["alice", "bob"], "partitions": "gpu"}
    site = site_from({"allow": [allow]}, "f")
    assert site.roots_for(job_of("bob", partition="gpu")) == ["/a"]
    assert site.roots_for(job_of("bob")) == []
    assert site.roots_for(job_of("carol", partition="gpu")) == []


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"rootz": []}, "rootz: this key is not known"),
        ({"roots": []}, "roots: no directory is named"),
        ({"roots": [1]}, "roots: this is neither text nor"),
        ({"tier": "/x"}, "tier: tier '/x' has no size"),
        ({"budget": ["/elsewhere=1G"]}, "budget: /elsewhere is none of the tiers"),
        ({"options": ["nonsense=1"]}, "options: mount option 'nonsense=1' is not known"),
        ({"options": ["user=root"]}, "options: user is not set here"),
        ({"peer_ports": "9000"}, "peer_ports: '9000' is no range of ports"),
        ({"peer_ports": 9000}, "peer_ports: 9000 is no range of ports"),
        ({"deadline_seconds": 0}, "deadline_seconds: a time limit of 0"),
        ({"deadline_seconds": 300}, "deadline_seconds: 300 seconds: use 2 to 45"),
        ({"linger": "long"}, "linger: 'long' is not an interval"),
        ({"wipe": "perhaps"}, "wipe: 'perhaps' is neither"),
        ({"nice": -5}, "nice: '-5' is no priority"),
        ({"allow": {"roots": "/a"}}, "allow: write it as a table in double brackets"),
        ({"allow": [{"roots": "/a", "groups": "x"}]}, "allow: 'groups' is not known"),
        ({"dataset": [{}]}, "dataset: it needs a path"),
        ({"dataset": [{"path": "/a", "options": "name=A,/b"}]}, "dataset: options holds a comma"),
        ({"log": ""}, "log: a path is empty"),
        *(({"record": size}, "record: ") for size in ("10%", "yes", "0", "")),
        ({"record": 5}, "record: "),
    ],
)
def test_mistakes_are_named(table: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        site_from(table, "/etc/x.toml")
    assert str(refused.value).startswith(f"configuration /etc/x.toml: {complaint}")


def test_what_lies_below() -> None:
    paths = ("/a", "/a/b", "/ab", "/", "/c/d", "/c/d/e")
    assert [p for p in paths if is_below(p, ["/a", "/c/d/e"])] == ["/a", "/a/b", "/c/d/e"]


def test_how_large_a_recording_may_be() -> None:
    sizes = [site_from({"record": one}, "f").record_bytes for one in (True, False, "16M", "1G")]
    assert [Site().record_bytes, *sizes] == [0, 64 << 20, 0, 16 << 20, 1 << 30]


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
        timeout=300,
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
    # Those of the job that submitted this one do not count.
    old = {"MONARCHFS_ROOT": "/old", "MONARCHFS_DATA_A_2": "/old", "MONARCHFS_TIER": "/t=1G"}
    unset = "unset MONARCHFS_DATA_A_2\nunset MONARCHFS_ROOT\n"
    # The component of this node, whose number no task has; but none of the submitting job's.
    components = {"SLURM_JOB_ID_HET_GROUP_0": "11", "SLURM_JOB_ID_HET_GROUP_1": "12"}
    told = "export A=b\n"
    for job, said in (("12", told), ("11", told), ("13", ""), ("../env/12", ""), ("", "")):
        for more in (components, components | old):
            done = execute(
                [str(installed / SCRIPTS / "task_prolog")],
                env={"SLURM_JOB_ID": job, "MONARCHFS_RUN": str(tmp_path), **more},
                check=True,
            )
            lines = done.stdout.splitlines(keepends=True)
            is_job = more is not components and job.isdecimal()
            assert "".join(sorted(lines)) == said + (unset if is_job else "")


def test_the_example_is_there_and_the_plugin_where_slurm_looks(installed: Path) -> None:
    example = installed / "usr/local/share/monarchfs/monarchfs-slurm.toml"
    assert example.read_bytes() == EXAMPLE.read_bytes()
    plugin = installed / "plugins" / "monarchfs.so"
    assert plugin.exists() is HEADER.exists()
    if plugin.exists():
        assert os.stat(plugin).st_mode & 0o777 == 0o644
        for symbol in (b"slurm_spank_init_post_opt", b"plugin_type"):
            assert symbol in plugin.read_bytes()
