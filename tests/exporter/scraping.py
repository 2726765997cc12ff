"""Asking a mount for its metrics, as Prometheus does, and taking the answer apart."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection

from prometheus_client.parser import text_string_to_metric_families

SECONDS = 10.0


@dataclass
class Scrape:
    """``kinds`` by the names of the families, as exported; ``samples`` by name and labels."""

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
    """Raises OSError where there is no answer within ``seconds``."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=seconds)) as connection:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return parse(answer.read().decode())
