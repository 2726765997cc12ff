"""Prometheus' server in tests: the shipped configuration, made quick, and how it is started."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounting import REPOSITORY
from tests.support.programs import execute

SHIPPED = REPOSITORY / "prometheus"


def program(name: str) -> str | None:
    """One of Debian's package prometheus: named in the environment, on PATH, or where
    .ci/cluster-packages has put it."""
    unpacked = REPOSITORY / "build" / "prometheus" / "usr" / "bin" / name
    return (
        os.environ.get(name.upper())
        or shutil.which(name)
        or (str(unpacked) if unpacked.exists() else None)
    )


PROMETHEUS = program("prometheus")
NO_PROMETHEUS = "needs prometheus: .ci/cluster-packages build/prometheus"


def server(directory: Path, targets: Sequence[str], listen: str) -> list[str]:
    """The command of a server that scrapes ``targets`` every second, with the shipped rules; its
    files are written to ``directory``."""
    (directory / "rules.yml").write_text((SHIPPED / "rules.yml").read_text())
    config = (SHIPPED / "prometheus.yml").read_text().replace("30s", "1s").replace("10s", "1s")
    named = ", ".join(f'"{target}"' for target in targets)
    config = re.sub(r"targets: \[.*\]", f"targets: [{named}]", config)
    (directory / "prometheus.yml").write_text(config)
    assert PROMETHEUS is not None
    return [
        PROMETHEUS,
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={listen}",
    ]


def samples(data: Any) -> list[tuple[dict[str, str], float]]:
    return [(one["metric"], float(one["value"][1])) for one in data["result"]]


PROMTOOL = program("promtool")


needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool: .ci/cluster-packages build/prometheus"
)


def documented_queries(document: str) -> list[str]:
    blocks = re.findall(r"^```promql\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    # A line that is indented belongs to the one before.
    return [query for block in blocks for query in re.split(r"\n(?! )", block.rstrip())]


def takes(queries: list[str], file: Path) -> None:
    """Has promtool read the queries, as rules in ``file``; fails the test if it does not."""
    assert PROMTOOL is not None
    rules = [{"record": f"query:{n}", "expr": query} for n, query in enumerate(queries)]
    # JSON is YAML.
    file.write_text(json.dumps({"groups": [{"name": "documented", "rules": rules}]}))
    done = execute([PROMTOOL, "check", "rules", str(file)])
    assert done.returncode == 0, done.stderr
    assert f"{len(queries)} rules found" in done.stdout
