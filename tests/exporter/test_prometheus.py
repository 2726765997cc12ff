"""What is shipped for Prometheus, tried with Prometheus: rules, configuration, dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config.places import ROOT_RUNTIME_DIR
from monarchfs.metrics.names import FAMILIES, NODE_FAMILIES, MetricType
from tests.exporter.nodes import exporter
from tests.support.mounting import (
    REPOSITORY,
    WAIT_SECONDS,
    Bench,
    free_port,
    requires_fuse,
    requires_root,
    run,
    wait_for,
)
from tests.support.prometheus import (
    NO_PROMETHEUS,
    PROMETHEUS,
    PROMTOOL,
    SHIPPED,
    documented_queries,
    needs_promtool,
    samples,
    server,
    takes,
)
from tests.support.scraping import FILES, SIZE, make_files, read_all

DOCUMENT = (REPOSITORY / "docs" / "PROMETHEUS.md").read_text()
JOB = "4711"


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *arguments],
        cwd=SHIPPED,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


@needs_promtool
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml")], ids=str
)
def test_promtool_has_no_complaints(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
    assert done.stderr == ""


@needs_promtool
def test_the_rules_do_what_they_say() -> None:
    done = promtool("test", "rules", "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(("document", "least"), [("PROMETHEUS.md", 4), ("METRICS.md", 11)])
def test_promtool_takes_the_documented_queries(document: str, least: int, tmp_path: Path) -> None:
    queries = documented_queries((REPOSITORY / "docs" / document).read_text())
    assert len(queries) >= least
    takes(queries, tmp_path / "rules.yml")


def rule_names(kind: str) -> list[str]:
    return re.findall(rf"^ +- {kind}: (\S+)$", (SHIPPED / "rules.yml").read_text(), re.MULTILINE)


def test_every_rule_is_tested_and_every_alert_documented() -> None:
    tests = (SHIPPED / "rules_test.yml").read_text()
    assert [name for name in rule_names("record") if f"expr: '{name}'" not in tests] == []
    assert [name for name in rule_names("alert") if tests.count(f"alertname: {name}\n") < 2] == []
    assert [name for name in rule_names("alert") if f"`{name}`" not in DOCUMENT] == []
    assert [name for name in rule_names("record") if f"`{name}`" not in DOCUMENT] == []


def test_rules_and_dashboard_use_metrics_that_exist() -> None:
    known = {family.name for family in (*FAMILIES, *NODE_FAMILIES)}
    known |= {f"{family.name}_bucket" for family in FAMILIES if family.kind is MetricType.HISTOGRAM}
    known |= {name.partition(":")[2].partition(":")[0] for name in rule_names("record")}
    for text in ("\n".join(dashboard_queries()), (SHIPPED / "rules.yml").read_text(), DOCUMENT):
        without_notes = re.sub(r"^ *#.*$|^ *description: .*$", "", text, flags=re.MULTILINE)
        used = set(re.findall(r"(?<![\w./-])(?:\w+:)?(monarchfs_\w+)", without_notes))
        assert used - known == set()


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SHIPPED / "dashboard.json").read_text())
    return content


def dashboard_queries() -> list[str]:
    return [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())
    ]


def test_the_dashboard_is_whole() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    known = variables | {"__rate_interval", "__all"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard())))
    assert used <= known
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["targets"]
        for other in panels:
            if other is not panel:
                assert not overlap(place, other["gridPos"]), (panel["title"], other["title"])


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


# A real server


class Server:
    """A Prometheus that scrapes ``target`` every second, with the shipped rules."""

    def __init__(self, directory: Path, target: str) -> None:
        self.port = free_port()
        command = server(directory, [target], f"127.0.0.1:{self.port}")
        self._log = open(directory / "log", "w")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {error.read().decode()}")
        assert content["status"] == "success", content
        return content["data"]

    def query(self, query: str) -> list[tuple[dict[str, str], float]]:
        return samples(self.get("query", query=query))

    def ready(self) -> bool:
        assert self._process.poll() is None
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@contextmanager
def watching(target: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="monarchfs-test-") as directory:
        running = Server(Path(directory), target)
        try:
            wait_for(running.ready, "Prometheus to be ready")
            yield running
        finally:
            running.close()


@contextmanager
def place_of_a_job() -> Iterator[Path]:
    """A mount point as the prolog makes one, with the set of its jobs beside it."""
    os.makedirs(ROOT_RUNTIME_DIR, mode=0o755, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="test-", dir=ROOT_RUNTIME_DIR))
    place.chmod(0o711)
    (place / "jobs").mkdir(mode=0o700)
    (place / "jobs" / JOB).touch()
    (place / "data").mkdir()
    try:
        yield place / "data"
    finally:
        shutil.rmtree(place, ignore_errors=True)


@requires_root
@requires_fuse
@pytest.mark.skipif(PROMETHEUS is None, reason=NO_PROMETHEUS)
def test_every_query_of_the_dashboard_tells_of_a_real_job(work: Bench) -> None:
    """A job reads a dataset twice through a mount that a real server watches."""
    source = work.path / "src"
    make_files(source)
    with place_of_a_job() as point, exporter() as port, watching(f"127.0.0.1:{port}") as prometheus:
        mount = work.mount(source, point=point)
        try:
            this = f'mount="{point}"'

            def value(query: str) -> float | None:
                found = prometheus.query(query)
                return found[0][1] if found else None

            wait_for(lambda: value(f"monarchfs_mount_up{{{this}}}") == 1, "the mount to be seen")
            read_all(mount)
            mount.wait_idle()
            wait_for(
                lambda: value(f'monarchfs_opens_total{{{this}, served="source"}}') == FILES,
                "the first epoch to be seen",
            )
            read_all(mount)
            wait_for(
                lambda: value(f'monarchfs_opens_total{{{this}, served="local"}}') == FILES,
                "the second epoch to be seen",
            )
            silent = []
            for query in dashboard_queries():
                text = query.replace("$__rate_interval", "1m")
                text = re.sub(r"\$(user|source|instance)", ".*", text)
                assert "$" not in text
                if not prometheus.query(text):
                    silent.append(text)
            assert silent == []
            for variable in dashboard()["templating"]["list"][1:]:
                match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
                assert match is not None
                series = re.sub(r"\$\w+", ".*", match[1])
                assert prometheus.query(f"count by ({match[2]}) ({series})")
            job = f'job_id="{JOB}"'
            jobs = (
                f"monarchfs_mount_job_info{{{job}}} * on (instance, user, source, mount) group_left"
            )
            local = f'{jobs} sum without (served) (monarchfs_opens_total{{served="local"}})'
            opened = f"{jobs} sum without (served) (monarchfs_opens_total)"
            assert value(f"sum by (job_id) ({local}) / sum by (job_id) ({opened})") == 0.5
            spared = (
                f'{jobs} sum without (served) (monarchfs_opened_file_bytes_total{{served="local"}})'
            )
            assert value(f"sum by (job_id) ({spared})") == FILES * SIZE
            # The rules, evaluated by the server.
            for name in rule_names("record"):
                labels = job if name.startswith("job_id:") else this
                wait_for(lambda: value(f"{name}{{{labels}}}") is not None, name)  # noqa: B023
            groups = prometheus.get("rules")["groups"]
            assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
            (target,) = prometheus.get("targets")["activeTargets"]
            assert target["lastError"] == ""
        finally:
            assert run("umount", str(point)).returncode == 0
