"""The text that Prometheus reads (exposition format 0.0.4). For a thread."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain, starmap

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from monarchfs.metrics import NS
from monarchfs.metrics.names import Durations, Family, MetricType, Sample, Values

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(values: Values, *, process: bool = False) -> bytes:
    """The metrics in ``values``, in its order; then those of this ``process``, of which the kernel
    tells in some files of /proc."""
    more = ProcessCollector(registry=None).collect() if process else ()
    return generate_latest(_Collected(chain(starmap(_metric, values.items()), more)))


class _Collected(Collector):
    """What ``generate_latest`` writes out, once."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _metric(family: Family, samples: Iterable[Sample]) -> Metric:
    if family.kind is MetricType.HISTOGRAM:
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, value in samples:
            assert isinstance(value, Durations)
            bounds = [*(repr(bound / NS) for bound in value.bounds_ns), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            histogram.add_metric(_printable(labels), buckets, value.total_ns / NS)
        return histogram
    kind = CounterMetricFamily if family.kind is MetricType.COUNTER else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in samples:
        assert not isinstance(value, Durations)
        metric.add_metric(_printable(labels), value)
    return metric


def _printable(labels: tuple[str, ...]) -> list[str]:
    # A path may hold bytes that are no text.
    return [label.encode(errors="backslashreplace").decode() for label in labels]
