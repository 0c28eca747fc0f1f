"""`/metrics` for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aedit.types import UserError

_NODE_GAUGES = ("steps_per_s", "pace_steps", "weight", "staleness", "offences", "leased_samples", "loss")
_NODE_COUNTERS = ("steps", "tokens", "busy_s", "wait_s", "wire_s", "bytes_up", "bytes_down", "accepted")
_HUB_GAUGES = ("term", "elapsed_s", "progress", "round")
_HUB_COUNTERS = ("total_steps", "total_tokens", "merges", "merge_s")


class Page:
    """Serves until `close`. overview: how the hub stands, asked for at every visit."""

    def __init__(self, overview: Callable[[], Mapping[str, Any]], host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(_Numbers(overview))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UserError(f"hub.metrics_port: cannot listen on {host}:{port}: {error.strerror}") from error

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Numbers(Collector):
    def __init__(self, overview: Callable[[], Mapping[str, Any]]) -> None:
        self._overview = overview

    def collect(self) -> Iterator[Metric]:
        now = self._overview()
        for name in _HUB_GAUGES:
            yield GaugeMetricFamily(f"aedit_{name}", f"{name} of the run", value=now[name])
        for name in _HUB_COUNTERS:
            yield CounterMetricFamily(f"aedit_{name}", f"{name} of the run", value=now[name])
        journal = now["journal"]
        yield GaugeMetricFamily("aedit_journal_bytes", "of the newest segment", value=journal["bytes"])
        yield GaugeMetricFamily("aedit_standby", "1: a standby follows", value=float(now["standby"]))
        yield from _of_nodes(now["nodes"])
        versions = GaugeMetricFamily("aedit_version", "newest anchor of a unit", labels=["unit"])
        for unit in now["units"]:
            versions.add_metric([unit["name"]], unit["version"])
        yield versions


def _of_nodes(nodes: list[Mapping[str, Any]]) -> Iterator[Metric]:
    kinds = [(GaugeMetricFamily, name) for name in _NODE_GAUGES]
    for kind, name in [*kinds, *((CounterMetricFamily, name) for name in _NODE_COUNTERS)]:
        family = kind(f"aedit_node_{name}", f"{name} of a node", labels=["node"])
        for node in nodes:
            if node[name] is not None:
                family.add_metric([node["name"]], node[name])
        yield family
    refused = CounterMetricFamily("aedit_node_refused", "pushes that were refused", labels=["node", "reason"])
    for node in nodes:
        for reason, count in node["refused"].items():
            refused.add_metric([node["name"], reason], count)
    yield refused
