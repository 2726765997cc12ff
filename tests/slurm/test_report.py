"""Reports of jobs: what is counted, and who may read it."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from monarchfs.slurm.daemon import serves
from monarchfs.slurm.report import (
    add_verdict,
    counts_between,
    dataset_report,
    find_reports,
    job_report,
    job_totals,
    keep_report,
    page,
    unmounted_report,
)
from tests.support.fake_mounts import interpreter_for
from tests.support.golden import Golden
from tests.support.mounting import Bench, assert_one_line, requires_root, run


def status(**changes: Any) -> dict[str, Any]:
    """A mount's status, of which single values can be given as SECTION__KEY."""
    served = {"local_opens": 30, "source_opens": 10}
    result: dict[str, Any] = {
        "served": served | {"local_file_bytes": 3000, "source_file_bytes": 1000},
        "uptime_seconds": 100.0,
        "tiers": [{"used_bytes": 50, "peak_used_bytes": 70}, {"used_bytes": 5}],
        "files": {"resident": 9},
        "prefetch": {"completed": 9, "failed": 0, "refused": 0, "idle_since_uptime_seconds": 60.0},
        "source_io": {"read_bytes": 900, "operations": 30},
        "worker": {"restarts": 0},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        result[section] = {**result[section], key: value} if key else value
    return result


def report(before: Any, after: Any, shared: tuple[int, ...] = ()) -> dict[str, Any]:
    return dataset_report(before, after, variable="V", source="/data", shared_with=shared)


def test_a_verdict_comes_into_the_report_of_its_dataset(tmp_path: Path) -> None:
    directory = str(tmp_path / "reports")
    verdict = {"kind": "mixed", "lines": ["bound", "for", "remedy"], "files": ["/r/1.rec"]}
    path = f"{directory}/1.n1.json"
    uid = os.geteuid()
    assert not add_verdict(path, uid, "/lustre/a", verdict, 30)
    one = report(status(), status())
    whole = job_report(1, "alice", "n1", 0.0, 1.0, [one, {**one, "source": "/other"}])
    keep_report(directory, whole, uid, 30)
    assert add_verdict(path, uid, one["source"], verdict, 30)
    (found,) = find_reports(directory, 1)
    assert [dataset.get("verdict") for dataset in found["datasets"]] == [verdict, None]
    text = (tmp_path / "reports" / "1.n1.txt").read_text()
    lines = text[text.index("verdict") :].splitlines()[:4]
    assert lines[0] == "verdict          bound"
    assert [line.strip() for line in lines[1:]] == ["for", "remedy", "/r/1.rec"]


NOT_RESIDENT, AT_ONCE = ({"resident_after_seconds": seconds} for seconds in (None, 0.0))
LOCAL = {"local_opens": 3}
BEFORE = status(uptime_seconds=50.0, served__local_opens=10, source_io__read_bytes=800)
COUNTED: dict[str, tuple[dict[str, Any] | None, dict[str, Any], dict[str, Any]]] = {
    "a job that had the mount for itself": (
        None,
        status(),
        {
            **{"local_open_share": 0.75, "local_byte_share": 0.75, "spared_bytes": 4000 - 900},
            **{"spared_opens": 30, "resident_after_seconds": 60.0, "peak_used_bytes": 75},
            **{"copies_failed": 0, "worker_restarts": 0},
        },
    ),
    "only what came while the job was there": (
        BEFORE,
        status(prefetch__failed=2),
        {
            **{"local_opens": 20, "source_opens": 0, "source_read_bytes": 100, "copies_failed": 2},
            "shared_with": [8, 9],
        },
    ),
    "what another worker went on counting is one count": (
        status(),
        status(served__local_opens=400, worker__restarts=1),
        {"local_opens": 400 - 30, "worker_restarts": 1},
    ),
    "resident while it was there": (BEFORE, status(), {"resident_after_seconds": 10.0}),
    "resident before": (status(uptime_seconds=70.0), status(), AT_ONCE),
    "was local": (None, status(served=LOCAL, source_io={}, prefetch={}), AT_ONCE),
    "not idle": (None, status(prefetch__idle_since_uptime_seconds=None), NOT_RESIDENT),
    "a copy was refused": (None, status(prefetch__refused=1), NOT_RESIDENT),
    "a copy failed": (None, status(prefetch__failed=1), NOT_RESIDENT),
    "a copy was evicted": (None, status(evictions={"policy": 1}), NOT_RESIDENT),
    "nothing is resident": (None, status(files__resident=0), NOT_RESIDENT),
}


@pytest.mark.parametrize("case", COUNTED)
def test_what_is_counted(case: str) -> None:
    before, after, expected = COUNTED[case]
    one = report(before, after, (8, 9))
    assert {key: one[key] for key in expected} == expected


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"served": None, "tiers": [None], "worker": {"restarts": "x"}},
        status(served=None, prefetch__idle_since_uptime_seconds=math.inf, source_io=None),
        {"served": {"local_opens": math.inf}, "source_io": {"read_bytes": 10**400}},
        {"state": ["serving"], "tiers": 1, "files": []},
    ],
)
def test_a_status_that_says_little(odd: dict[str, Any]) -> None:
    assert not serves(odd)
    one = report(None, odd)
    assert one["local_open_share"] is None
    assert one["spared_bytes"] == 0
    assert set(counts_between(status(), odd).values()) == {0}, "none is below that"
    assert "-" in page(job_report(1, "alice", "n1", 0, 1, [one]))


def test_the_pages(golden: Golden) -> None:
    """Of datasets that were mounted, were not, did not answer; and what all nodes of a job read."""

    def on(node: str, read: int, peers: int, *, whole: bool = True) -> dict[str, Any]:
        idle = 60.0 if whole else None
        now = status(
            source_io__read_bytes=read,
            served__peer_bytes=peers,
            prefetch__idle_since_uptime_seconds=idle,
            tiers=[{"used_bytes": 3000}],
        )
        return job_report(7, "alice", node, 1000, 1001, [report(None, now), report(None, None)])

    unmounted = unmounted_report("W", "/other", "it hangs")
    datasets = [report(None, status(), (8,)), unmounted, report(None, None)]
    nodes = [on("n1", 1100, 2000), on("n2", 900, 0), on("n3", 1300, 1000, whole=False)]
    pages = [page(job_report(7, "alice", "n1", 1000, 1090, datasets)), *map(page, nodes)]
    assert job_totals(nodes[:1]) == ""
    pages += [job_totals(nodes), job_totals([on("n1", 1, 0, whole=False), nodes[2]])]
    golden(
        "job-report.txt", "\n".join(re.sub(r"\d{4}-[\d-]+ [\d:]+", "<then>", one) for one in pages)
    )


@requires_root
def test_a_report_is_its_users_alone(work: Bench) -> None:
    directory = work.path / "reports"
    for node in ("n1", "n2"):
        keep_report(str(directory), job_report(7, "nobody", node, 0, 1, []), 65534, 5)
    assert sorted(os.listdir(directory)) == ["7.n1.json", "7.n1.txt", "7.n2.json", "7.n2.txt"]
    for path in directory.iterdir():
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (65534, 0o400)
    interpreter_for("nobody")
    done = run("report", "7", "--dir", str(directory), "--json", user="nobody")
    assert [one["node"] for one in json.loads(done.stdout)["nodes"]] == ["n1", "n2"]
    done = run("report", "7", "--dir", str(directory), user="daemon")
    assert_one_line(done, 1, "the report of job 7 is another user's: ask root")


def test_a_path_in_a_report_moves_no_cursor(tmp_path: Path) -> None:
    one = unmounted_report("V", "/a\x1b[2J\nb", "why")
    keep_report(str(tmp_path / "r"), job_report(7, "x", "n1", 0, 1, [one]), os.geteuid(), 5)
    done = run("report", "7", "--dir", str(tmp_path / "r"))
    assert (done.returncode, "\x1b" in done.stdout) == (0, False)
