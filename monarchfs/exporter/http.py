"""``GET /metrics``: the page of a mount, or of a node, as Prometheus reads it (exposition format
0.0.4)."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from itertools import accumulate, chain, starmap

import trio
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from monarchfs.metrics import NS
from monarchfs.metrics.names import FAMILIES, Durations, Family, MetricType, Sample, Values
from monarchfs.system import http_server
from monarchfs.system.http_server import HttpRequest, HttpResponse
from monarchfs.system.threads import run_sync

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def serve(listener: socket.socket, page: Callable[[], Awaitable[bytes]]) -> None:
    """Answer with what ``page`` gives until ``listener`` (already listening) is shut down."""

    async def answer(request: HttpRequest) -> HttpResponse:
        if request.path != PATH:
            return HttpResponse(b"The metrics are at /metrics\n", HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(
                b"Use GET\n", HTTPStatus.METHOD_NOT_ALLOWED, headers="Allow: GET, HEAD\r\n"
            )
        return HttpResponse(await page(), content_type=CONTENT_TYPE)

    await http_server.serve(listener, answer)


class Exporter:
    """The page of one worker. Constant: what gives the values, and the listening socket, which the
    supervisor owns too."""

    def __init__(self, values: Callable[[], Values], descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._values = values
        self._listener = socket.socket(fileno=descriptor)
        self._one_at_a_time = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Answer until the supervisor shuts the socket down."""
        await serve(self._listener, self._page)

    async def _page(self) -> bytes:
        now = self._values()
        page = partial(exposition, {family: now[family] for family in FAMILIES}, process=True)
        return await run_sync(page, limiter=self._one_at_a_time, abandon_on_cancel=True)


# The text.


def exposition(values: Values, *, process: bool = False) -> bytes:
    """The metrics in ``values``, in its order; then those of this ``process``, of which the kernel
    tells in some files of /proc. For a thread."""
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
