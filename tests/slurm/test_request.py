"""What jobs may write, and what is made of it."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarchfs.slurm.job import (
    MOST_DATASETS,
    Request,
    job_from,
    node_name,
    parse_comment,
    parse_dataset_path,
    parse_request,
)
from monarchfs.slurm.prolog import datasets_of, environment_lines
from monarchfs.slurm.site import Site
from monarchfs.types import UsageError

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_USER": "alice"}


@pytest.mark.parametrize(
    ("comment", "requests"),
    [
        ("", []),
        ("don't \"worry", []),
        ("monarchfs", []),
        ("xmonarchfs=/a", []),
        ("monarchfs=/a", [Request("/a")]),
        ("monarchfs=//a///b/", [Request("/a/b")]),
        ("run 7 monarchfs=/a\tmonarchfs=/b", [Request("/a"), Request("/b")]),
        ("monarchfs=/a,/b", [Request("/a"), Request("/b")]),
        (
            "monarchfs=/a:prefetch=all:name=A,/b:freshness=ttl=60",
            [
                Request("/a", "A", (("prefetch", "all"),)),
                Request("/b", None, (("freshness", "ttl=60"),)),
            ],
        ),
        ('monarchfs="/my data":name=A x', [Request("/my data", "A")]),
        ("monarchfs=/my\\ data\\,\\:\\\\", [Request("/my data,:\\")]),
        ('monarchfs="/a,b":evict=lru', [Request("/a,b", None, (("evict", "lru"),))]),
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
        ("/a,,/b", "name a directory by its whole path"),
        ("/a:prefetch", "is no option that a job may give"),
        ("/a:user=root", "is no option that a job may give"),
        ("/a:allow_other", "is no option that a job may give"),
        ("/a:prefetch=/etc/shadow", "is not for jobs"),
        ("/a:prefetch=all:prefetch=none", "given twice"),
        ("/a:name=A:name=B", "given twice"),
        ("/a:name=LD_PRELOAD\nx", "is no name for a variable"),
        ("/a:freshness=ttl=x", "is not a time"),
        ("/a:evict=all", "is not known"),
        ('/a"b', "a quotation mark is not closed"),
        ("/a\\", "a backslash stands at the end"),
        ("/a\nexport LD_PRELOAD=/x", "cannot be printed"),
        ("/a\u2028b", "cannot be printed"),
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
    lines = environment_lines(wanted, [one.request.path for one in wanted], [])
    assert len(lines.splitlines()) == len(lines.split("\n")) - 1 == len(wanted) + bool(wanted)
    for line in lines.split("\n")[:-1]:
        assert line.startswith("export MONARCHFS_")
    assert len({one.variable for one in wanted}) == len(wanted)


@given(st.text())
def test_a_warning_stays_on_its_line(warning: str) -> None:
    lines = environment_lines([], [], [warning])
    assert lines.count("\n") == 1
    assert lines.startswith("export MONARCHFS_WARNING=")


def test_a_mistake_is_no_error() -> None:
    job = job_from({**JOB, "SLURM_JOB_COMMENT": "monarchfs=relative"})
    assert job.requests == ()
    assert job.mistake is not None
    assert "name a directory by its whole path" in job.mistake


def test_the_plugin_and_the_comment_are_added_up() -> None:
    environ = {**JOB, "SLURM_JOB_COMMENT": "monarchfs=/b,/a", "SPANK_MONARCHFS": "/a:name=X"}
    wanted = datasets_of(Site(), job_from(environ))
    assert [(one.request.path, one.variable) for one in wanted] == [
        ("/a", "MONARCHFS_DATA_X"),
        ("/b", "MONARCHFS_DATA_B"),
    ]


def test_variables_are_plain_and_each_is_another() -> None:
    comment = "monarchfs=/x/image-net.v1,/y/image_net_v1,/z/ümlaut,/z/...x,/z/\\,\\,"
    wanted = datasets_of(Site(), job_from({**JOB, "SLURM_JOB_COMMENT": comment}))
    assert [one.variable for one in wanted] == [
        "MONARCHFS_DATA_IMAGE_NET_V1",
        "MONARCHFS_DATA_IMAGE_NET_V1_2",
        "MONARCHFS_DATA_MLAUT",
        "MONARCHFS_DATA_X",
        "MONARCHFS_DATA_SET",
    ]


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
