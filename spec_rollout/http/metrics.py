"""Figures of the HTTP server and of the engine's host, for Prometheus."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class HttpMetrics:
    """Counters of requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "aedit_http_requests", "Requests by route and status", ("route", "status"), registry=self.registry
        )
        self.cancelled = Counter(
            "aedit_http_cancelled", "Requests whose client went away or did not read", registry=self.registry
        )
        self.prompt_tokens = Counter("aedit_http_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.seconds = Histogram(
            "aedit_http_request_seconds", "Time of requests for text", ("route",),
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip

    def follow(self, status: Callable[[], dict[str, Any]]) -> None:
        """Add the figures of a host's `status`."""
        self.registry.register(_HostFigures(status))

    def text(self) -> bytes:
        """Return all figures in the text format of Prometheus."""
        return generate_latest(self.registry)


class _HostFigures(Collector):
    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the figures as they are now."""
        status = self._status()
        tokens = CounterMetricFamily("aedit_serve_tokens", "Tokens that were generated")
        tokens.add_metric([], status["tokens"])
        yield tokens
        over = CounterMetricFamily("aedit_serve_samples", "Samples that are over")
        over.add_metric([], status["over"])
        yield over
        for name, what in (
            ("samples", "Samples that wait or run"),
            ("waiting_run", "Waiting samples of training runs"),
            ("waiting_public", "Waiting samples of others"),
            ("tokens_per_s", "Tokens per second over the last 10 s"),
            ("paused", "1 while generation is paused"),
        ):
            yield GaugeMetricFamily(f"aedit_serve_{name}", what, float(status[name]))
        version = GaugeMetricFamily("aedit_serve_policy_version", "Policy version", labels=("line",))
        running = GaugeMetricFamily("aedit_serve_running", "Samples that are being decoded", labels=("line",))
        kv_bytes = GaugeMetricFamily("aedit_serve_kv_bytes", "Memory of keys and values", labels=("line",))
        for line, figures in status["lines"].items():
            version.add_metric([line], figures["version"])
            running.add_metric([line], figures["running"] + figures["finishing_samples"])
            kv_bytes.add_metric([line], figures["kv_bytes"])
        yield from (version, running, kv_bytes)
