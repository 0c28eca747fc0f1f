"""`/metrics` for Prometheus."""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aedit.types import UserError

_HUB = (
    (GaugeMetricFamily, "term", "aedit_term", "Term of the hub that leads."),
    (GaugeMetricFamily, "elapsed_s", "aedit_elapsed_seconds", "Age of the run, without a hub's outages."),
    (GaugeMetricFamily, "progress", "aedit_progress", "Share of the run that is done, from 0 to 1."),
    (GaugeMetricFamily, "round", "aedit_round", "Newest round, if the hub's clock opens rounds."),
    (CounterMetricFamily, "total_steps", "aedit_steps", "Inner steps of all nodes that were accepted."),
    (CounterMetricFamily, "total_tokens", "aedit_tokens", "Tokens of these steps."),
    (CounterMetricFamily, "merges", "aedit_merges", "Anchors made since the hub's process began."),
    (CounterMetricFamily, "merge_s", "aedit_merge_seconds", "Time these merges took."),
)
"""Kind, key in the overview, name (Prometheus appends `_total` to counters), help."""

_NODE = (
    (GaugeMetricFamily, "steps_per_s", "steps_per_second", "Speed while training, waits left out."),
    (GaugeMetricFamily, "pace_steps", "pace_steps", "Inner steps asked for before the next push."),
    (GaugeMetricFamily, "weight", "weight", "Weight of the last push in its merge, from 0 to 1."),
    (GaugeMetricFamily, "staleness", "staleness", "Versions between the last push's base and its merge."),
    (GaugeMetricFamily, "violations", "violations", "Refusals that count towards being excluded."),
    (GaugeMetricFamily, "leased_samples", "leased_samples", "Samples the node holds a lease on."),
    (GaugeMetricFamily, "loss", "loss", "Newest training loss, in nats per token."),
    (CounterMetricFamily, "steps", "steps", "Inner steps since the node's process began."),
    (CounterMetricFamily, "tokens", "tokens", "Tokens since the node's process began."),
    (CounterMetricFamily, "busy_s", "busy_seconds", "Time spent in training steps."),
    (CounterMetricFamily, "wait_s", "wait_seconds", "Time spent waiting for the hub."),
    (CounterMetricFamily, "wire_s", "wire_seconds", "Time spent pushing or pulling, hidden or not."),
    (CounterMetricFamily, "bytes_up", "sent_bytes", "Bytes sent to hubs."),
    (CounterMetricFamily, "bytes_down", "received_bytes", "Bytes received from hubs."),
    (CounterMetricFamily, "accepted", "accepted_pushes", "Pushes that were accepted."),
)

_SERVER = (
    (GaugeMetricFamily, "live", "up", "1 while the lease of a rollout server has not ended, else 0."),
    (GaugeMetricFamily, "lag", "lag_versions", "Versions of the policy that a rollout server is behind."),
    (GaugeMetricFamily, "tokens_per_s", "tokens_per_second", "Speed of generation of late."),
    (GaugeMetricFamily, "running", "running", "Samples that are being generated."),
    (GaugeMetricFamily, "waiting", "waiting", "Samples that wait for a place."),
    (CounterMetricFamily, "idle_s", "idle_seconds", "Time without a request."),
    (CounterMetricFamily, "idle_used_s", "idle_used_seconds", "Idle time that trained the drafter."),
)

_RL = (
    (GaugeMetricFamily, "reward", "reward", "Mean reward of the newest batch."),
    (GaugeMetricFamily, "solved", "solved", "Share of rollouts of the newest batch that are solved."),
    (GaugeMetricFamily, "staleness", "rollout_staleness", "Policy versions by which rollouts are older."),
    (GaugeMetricFamily, "mismatch_kl", "mismatch_kl", "KL of behaviour to trainer, in nats per token."),
    (GaugeMetricFamily, "length", "rollout_length", "Mean tokens per rollout of the newest batch."),
    (CounterMetricFamily, "groups", "groups", "Groups of rollouts."),
    (CounterMetricFamily, "rollouts", "rollouts", "Rollouts of these groups."),
    (CounterMetricFamily, "no_signal", "groups_without_signal", "Groups whose rewards are all equal."),
    (CounterMetricFamily, "rollout_tokens", "rollout_tokens", "Generated tokens."),
    (CounterMetricFamily, "rollout_s", "rollout_seconds", "Time spent generating."),
    (CounterMetricFamily, "compared_s", "compared_seconds", "Time of decoding that has a plain reference."),
    (GaugeMetricFamily, "as_plain_s", "as_plain_seconds", "Time that plain decoding takes for its tokens."),
    (CounterMetricFamily, "passes", "rollout_passes", "Passes of one sample through the policy."),
    (CounterMetricFamily, "idle_used_s", "idle_used_seconds", "Processor time of work in idle time."),
)
_RL_BY = (
    ("arms", "drafter", "rollout_steps", "Steps of the engine by drafter, `off` without one."),
    ("idle_s", "cause", "idle_seconds", "Idle time by cause."),
)


MOST_CONNECTIONS = 16
"""Connections that are served at a time, each by a thread."""
_SILENT_S = 10.0
"""Time without a byte after which a connection is ended."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a peer could fill the disk."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per connection, at most `MOST_CONNECTIONS`: the oldest one is ended for a new one."""

    daemon_threads = True
    request_queue_size = 512
    """Connections that wait to be accepted; beyond, a client tries again after a second."""

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it has just ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection that was answered."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: that a peer has gone or was ended is no error of the hub."""


class MetricsPage(Collector):
    """HTTP server that serves until `close`. overview: returns the hub's status at every request."""

    def __init__(self, overview: Callable[[], Mapping[str, Any]], host: str, port: int) -> None:
        self._overview, registry = overview, CollectorRegistry()
        registry.register(self)
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), _Server, _Handler)
        except OSError as error:
            raise UserError(f"hub.metrics_port: cannot listen on {host}:{port}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Return the port that the server listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of the run, as `prometheus_client` asks for them at every request."""
        now = self._overview()
        for kind, key, name, meaning in _HUB:
            yield kind(name, meaning, value=now[key])
        journal = now["journal"]
        yield GaugeMetricFamily(
            "aedit_journal_bytes", "Size of the newest journal segment.", value=journal["bytes"]
        )
        yield GaugeMetricFamily(
            "aedit_standby", "1 while a standby follows, else 0.", value=float(now["standby"])
        )
        yield from _of_nodes(now["nodes"])
        yield from _of_servers(now["servers"])
        versions = GaugeMetricFamily(
            "aedit_version", "Version of the newest anchor of a unit.", labels=["unit"]
        )
        for unit in now["units"]:
            versions.add_metric([unit["name"]], unit["version"])
        yield versions


def _of_nodes(nodes: list[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the figures of the nodes. Those that have left have counters, and no gauges: these would stay."""
    for kind, key, name, meaning in _NODE:
        family = kind(f"aedit_node_{name}", meaning, labels=["node"])
        for node in nodes:
            if node[key] is not None and (node["live"] or kind is CounterMetricFamily):
                family.add_metric([node["name"]], node[key])
        yield family
    labels = ["node", "reason"]
    refused = CounterMetricFamily("aedit_node_refused_pushes", "Pushes that were refused.", labels=labels)
    for node in nodes:
        for reason, count in node["refused"].items():
            refused.add_metric([node["name"], reason], count)
    yield refused
    if known := [node for node in nodes if node["rl"]]:
        yield from _of_rl(known)


def _of_servers(servers: list[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the figures of the rollout servers. One that is gone has counters, and no gauges but `up`."""
    for kind, key, name, meaning in _SERVER if servers else ():
        family = kind(f"aedit_server_{name}", meaning, labels=["server"])
        for server in servers:
            if server["has_lease"] or key == "live" or kind is CounterMetricFamily:
                family.add_metric([server["name"]], float(server[key]))
        yield family
    if not servers:
        return
    banned = GaugeMetricFamily("aedit_server_banned", "1 for a banned server, else 0.", labels=["server"])
    labels = ["server", "node"]
    accused = CounterMetricFamily("aedit_server_accusations", "Accusations by training nodes.", labels=labels)
    for server in servers:
        banned.add_metric([server["name"]], float(bool(server["banned"])))
        for node, count in server["accused"].items():
            accused.add_metric([server["name"], node], count)
    yield banned
    yield accused


def _of_rl(nodes: list[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the figures of reinforcement learning; a run on text has none."""
    for kind, key, name, meaning in _RL:
        family = kind(f"aedit_node_{name}", meaning, labels=["node"])
        for node in nodes:
            if key in node["rl"] and (node["live"] or kind is CounterMetricFamily):
                family.add_metric([node["name"]], node["rl"][key])
        yield family
    for key, label, name, meaning in _RL_BY:
        counter = CounterMetricFamily(f"aedit_node_{name}", meaning, labels=["node", label])
        for node in nodes:
            for value, count in node["rl"].get(key, {}).items():
                counter.add_metric([node["name"], value], count)
        yield counter
