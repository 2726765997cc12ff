"""What is shipped for Prometheus, tried with Prometheus: rules, configuration, dashboard."""

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
from tests.exporter.test_node import exporter
from tests.support import mounting
from tests.support.programs import execute
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
from tests.support.scraping import FILES, make_files, read_all

DOCUMENT = (mounting.REPOSITORY / "docs" / "PROMETHEUS.md").read_text()
METRICS = (mounting.REPOSITORY / "docs" / "METRICS.md").read_text()
JOB = "4711"


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"],
)
def test_promtool_has_no_complaints_and_the_rules_do_what_they_say(arguments: str) -> None:
    assert PROMTOOL is not None
    done = execute([PROMTOOL, *arguments.split()], cwd=SHIPPED)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "SUCCESS" in done.stdout


@needs_promtool
@pytest.mark.parametrize(("document", "least"), [("PROMETHEUS.md", 4), ("METRICS.md", 11)])
def test_promtool_takes_the_documented_queries(document: str, least: int, tmp_path: Path) -> None:
    queries = documented_queries((mounting.REPOSITORY / "docs" / document).read_text())
    assert len(queries) >= least
    takes(queries, tmp_path / "rules.yml")


def rule_names(kind: str) -> list[str]:
    return re.findall(rf"^ +- {kind}: (\S+)$", (SHIPPED / "rules.yml").read_text(), re.MULTILINE)


def test_every_rule_is_tested_and_documented() -> None:
    tests = (SHIPPED / "rules_test.yml").read_text()
    records, alerts = rule_names("record"), rule_names("alert")
    assert [name for name in records if f"expr: '{name}'" not in tests] == []
    assert [name for name in alerts if tests.count(f"alertname: {name}\n") < 2] == []
    assert [name for name in (*alerts, *records) if f"`{name}`" not in DOCUMENT] == []
    # In rules, dashboard and documentation.
    known = {family.name for family in (*FAMILIES, *NODE_FAMILIES)}
    histograms = [one.name for one in FAMILIES if one.kind is MetricType.HISTOGRAM]
    known |= {f"{name}_{end}" for name in histograms for end in ("bucket", "sum", "count")}
    known |= {name.partition(":")[2].partition(":")[0] for name in rule_names("record")}
    rules = (SHIPPED / "rules.yml").read_text()
    for text in ("\n".join(dashboard_queries()), rules, DOCUMENT, METRICS):
        without_notes = re.sub(r"^ *#.*$|^ *description: .*$", "", text, flags=re.MULTILINE)
        used = set(re.findall(r"(?<![\w./-])(?:\w+:)?(monarchfs_\w+)", without_notes))
        assert used - known == set()


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SHIPPED / "dashboard.json").read_text())
    return content


def dashboard_queries() -> list[str]:
    return [query["expr"] for panel in dashboard()["panels"] for query in panel.get("targets", ())]


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process, self._port = process, port

    def _fetch(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{path}", timeout=10) as answer:
            content: bytes = answer.read()
            return content

    def get(self, path: str, **parameters: str) -> Any:
        try:
            content = json.loads(self._fetch(f"api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {error.read().decode()}")
        assert content["status"] == "success", content
        return content["data"]

    def query(self, query: str) -> list[tuple[dict[str, str], float]]:
        return samples(self.get("query", query=query))

    def ready(self) -> bool:
        assert self._process.poll() is None
        try:
            self._fetch("-/ready")
        except OSError:
            return False
        return True


@contextmanager
def watching(exporter_port: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="monarchfs-test-") as name:
        directory, port = Path(name), mounting.free_port()
        with (directory / "log").open("wb") as log:
            command = server(directory, [f"127.0.0.1:{exporter_port}"], f"127.0.0.1:{port}")
            process = subprocess.Popen(command, stdout=log, stderr=log)
        running = Server(process, port)
        try:
            mounting.wait_for(running.ready, "Prometheus to be ready")
            yield running
        finally:
            process.terminate()
            process.wait(30)


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


@mounting.requires_root
@mounting.requires_fuse
@pytest.mark.skipif(PROMETHEUS is None, reason=NO_PROMETHEUS)
def test_every_query_of_the_dashboard_tells_of_a_real_job(work: mounting.Bench) -> None:
    """A job reads a dataset twice through a mount that a real server watches."""
    source = work.path / "src"
    make_files(source)
    with place_of_a_job() as point, exporter() as node, watching(node.port) as prometheus:
        mount = work.mount(source, point=point)
        try:
            this = f'mount="{point}"'

            def value(query: str) -> float | None:
                found = prometheus.query(query)
                return found[0][1] if found else None

            mounting.wait_for(
                lambda: value(f"monarchfs_mount_up{{{this}}}") == 1, "the mount to be seen"
            )
            read_all(mount)
            mount.wait_idle()
            mounting.wait_for(
                lambda: value(f'monarchfs_opens_total{{{this}, served="source"}}') == FILES,
                "the first epoch to be seen",
            )
            read_all(mount)
            mounting.wait_for(
                lambda: value(f'monarchfs_opens_total{{{this}, served="local"}}') == FILES,
                "the second epoch to be seen",
            )
            share = documented_queries(DOCUMENT)[0]
            assert JOB in share
            assert value(share) == 0.5, "of all opens of the job"
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
            # The rules, evaluated by the server.
            for name in rule_names("record"):
                labels = job if name.startswith("job_id:") else this
                mounting.wait_for(lambda: value(f"{name}{{{labels}}}") is not None, name)  # noqa: B023
            groups = prometheus.get("rules")["groups"]
            assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
            (target,) = prometheus.get("targets")["activeTargets"]
            assert target["lastError"] == ""
        finally:
            assert mounting.run("umount", str(point)).returncode == 0
