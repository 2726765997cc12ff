"""Asking a mount for its metrics, as Prometheus does, and taking the answer apart."""

import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support import trees
from tests.support.mounting import WAIT_SECONDS, Mount

SECONDS = 10.0


@dataclass
class Scrape:
    text: str
    kinds: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)
    labels: dict[str, set[str]] = field(default_factory=dict)
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        return sum(value for (known, _labels), value in self.samples.items() if known == name)


def parse(text: str) -> Scrape:
    scrape = Scrape(text)
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name not in scrape.kinds, f"{name} comes twice"
        scrape.kinds[name] = family.type
        scrape.helps[name] = family.documentation
        scrape.labels[name] = {label for s in family.samples for label in s.labels} - {"le"}
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in scrape.samples, f"{key} comes twice"
            scrape.samples[key] = sample.value
    return scrape


def scrape(port: int, seconds: float = SECONDS) -> Scrape:
    with closing(HTTPConnection("127.0.0.1", port, timeout=seconds)) as connection:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return parse(answer.read().decode())


FILES, SIZE = 12, 50_000


READ_ALL = "import sys; [open(path, 'rb').read() for path in sys.argv[1:]]"


def make_files(directory: Path, count: int = FILES, size: int = SIZE) -> None:
    directory.mkdir(exist_ok=True)
    for n in range(count):
        (directory / f"f{n}").write_bytes(trees.random_bytes(size, n))


def read_all(mount: Mount, names: list[str] | None = None) -> None:
    names = names or [f"f{n}" for n in range(FILES)]
    paths = [str(mount.path / name) for name in names]
    subprocess.run([sys.executable, "-c", READ_ALL, *paths], check=True, timeout=WAIT_SECONDS)


def sums_are_right(now: Scrape) -> None:
    """Each histogram's buckets rise to its count."""
    for name, kind in now.kinds.items():
        if kind != "histogram":
            continue
        for (known, labels), count in now.samples.items():
            if known != f"{name}_count":
                continue
            assert now.samples[f"{name}_bucket", labels | {("le", "+Inf")}] == count
            buckets = sorted(
                (float(dict(others)["le"]), value)
                for (other, others), value in now.samples.items()
                if other == f"{name}_bucket" and labels < others
            )
            values = [value for _bound, value in buckets]
            assert values == sorted(values)
            assert (now.samples[f"{name}_sum", labels] > 0) == (count > 0)


def waits_are_right(now: Scrape) -> None:
    """Every request waited for something. While none is under way."""
    waited = now.total("monarchfs_wait_seconds_total")
    took = now.total("monarchfs_request_duration_seconds_sum")
    assert abs(waited - took) < 1e-6 * took
