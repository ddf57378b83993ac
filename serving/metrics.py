"""GET /metrics: the engine's plain counters in Prometheus' format.

The registry belongs to the app, so two apps in one process don't meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import sparsejax
from sparsejax import metrics as counters
from sparsejax.serving.state import ServerState

PREFIX = "sparsejax:"


async def metrics(http: HTTPRequest) -> Response:
    """Everything there is to scrape; before the engine is up only what is known then."""
    exporter: Exporter = http.app.state.metrics
    return Response(
        prometheus_client.generate_latest(exporter.registry), media_type=prometheus_client.CONTENT_TYPE_PLAIN_0_0_4
    )


class Exporter(Collector):
    """Turns `sparsejax.metrics` values into families at scrape time."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        served = self._state.attached
        groups: dict[str, Mapping[str, Any]] = {"build": {"version": sparsejax.__version__}}
        for name, facts in (served.info if served else {}).items():
            groups[name] = {**groups.get(name, {}), **facts}
        for name, facts in groups.items():
            family = InfoMetricFamily(f"{PREFIX}{name}", f"Facts about the {name.replace('_', ' ')}")
            family.add_metric([], {_label(key): str(value) for key, value in facts.items()})
            yield family
        gauge = GaugeMetricFamily(f"{PREFIX}http_requests_active", "HTTP requests that wait for tokens")
        gauge.add_metric([], self._state.active_requests)
        yield gauge
        if served is None:
            return
        labels = {"model_name": served.model_names[0], "engine": "0"}
        for metric in served.engine.metrics.all():
            yield _family(metric, labels)


def _family(metric: counters.Metric, labels: Mapping[str, str]) -> Metric:
    names = [*labels, metric.label] if metric.label else list(labels)
    name = PREFIX + metric.name

    def values(label_value: str) -> list[str]:
        return [*labels.values(), label_value] if metric.label else list(labels.values())

    if isinstance(metric, counters.Histogram):
        histogram = HistogramMetricFamily(name, metric.help, labels=names)
        bounds = [*map(str, metric.bounds), "+Inf"]
        for label_value, counts, total in metric.samples():
            histogram.add_metric(values(label_value), list(zip(bounds, counts, strict=True)), total)
        return histogram
    if isinstance(metric, counters.Gauge):
        family: Any = GaugeMetricFamily(name, metric.help, labels=names)
    elif isinstance(metric, counters.Counter):
        family = CounterMetricFamily(name, metric.help, labels=names)
    else:
        raise TypeError(f"{metric.name} is a {type(metric).__name__}, which can't be exported")
    for label_value, value in metric.samples():
        family.add_metric(values(label_value), value)
    return family


def _label(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
