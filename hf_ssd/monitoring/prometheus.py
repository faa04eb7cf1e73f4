"""A monitor's figures for Prometheus. Needs `pip install "hf-ssd[monitor]"`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .monitor import Monitor
from .window import Latency

GAUGES = {
    "hit_rate": "Share of outcomes that the speculation cache held, over the window.",
    "acceptance": "Share of tested positions at which a draft token was accepted, over the window.",
    "tokens_per_round": "Tokens per target forward, over the window.",
    "target_utilisation": "Share of the rounds' time in which the target computed, over the window.",
    "assistant_utilisation": "Share of the rounds' time in which the assistant computed, over the window.",
}


class MonitorCollector(Collector):
    """Hands a monitor's figures to `prometheus_client` when they are asked for.

    ```python
    prometheus_client.REGISTRY.register(MonitorCollector(monitor))
    ```

    Args:
        monitor: The monitor.
        labels: Labels of every figure, such as the model's name.
    """

    def __init__(self, monitor: Monitor, labels: dict[str, str] | None = None) -> None:
        self._monitor = monitor
        self._labels = labels or {}

    def describe(self) -> list[Metric]:
        return []  # so that registering two of them is no clash of names before there are labels

    def collect(self) -> Iterator[Metric]:
        figures = self._monitor.figures()
        names, values = list(self._labels), list(self._labels.values())
        for name, help_text in GAUGES.items():
            value = getattr(figures, name)
            if value is not None:
                gauge = GaugeMetricFamily(f"hf_ssd_{name}", help_text, labels=names)
                gauge.add_metric(values, value)
                yield gauge
        latencies = GaugeMetricFamily(
            "hf_ssd_round_seconds", "Duration of a round, over the window.", labels=[*names, "outcome", "quantile"]
        )
        for outcome, latency in (("hit", figures.hit_latency), ("miss", figures.miss_latency)):
            for quantile, milliseconds in _quantiles(latency):
                latencies.add_metric([*values, outcome, quantile], milliseconds / 1e3)
        yield latencies
        tokens = CounterMetricFamily("hf_ssd_tokens", "Tokens generated.", labels=names)
        tokens.add_metric(values, self._monitor.num_tokens)
        yield tokens
        calls = CounterMetricFamily("hf_ssd_calls", "Calls of generate() that have ended.", labels=[*names, "mode"])
        for mode, count in list(self._monitor.num_calls.items()):
            calls.add_metric([*values, mode], count)
        yield calls
        events = CounterMetricFamily("hf_ssd_events", "Events of the monitor.", labels=[*names, "kind"])
        for kind, count in list(self._monitor.num_events.items()):
            events.add_metric([*values, kind.value], count)
        yield events


def prometheus_text(monitor: Monitor) -> str:
    """The figures in Prometheus' text format, for a page that is asked for them."""
    registry = CollectorRegistry()
    registry.register(MonitorCollector(monitor))
    return generate_latest(registry).decode()


def _quantiles(latency: Latency | None) -> list[tuple[str, float]]:
    if latency is None:
        return []
    return [("0.5", latency.p50_ms), ("0.95", latency.p95_ms), ("0.99", latency.p99_ms)]
