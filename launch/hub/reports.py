"""Metrics and events of a hub: a line of metrics every few seconds, events as they happen."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from aedit.async_sgd.hub import listed_members, status_of_nodes, status_of_run
from aedit.async_sgd.journal import Ledger
from aedit.async_sgd.replication import Leadership
from aedit.async_sgd.rules import records
from aedit.async_sgd.service import HubWorker, ServerDirectory, json_line
from aedit.launch.records import Clock, Recorder
from aedit.proto.rpc import MESSAGE_BYTES

LINE_EVERY_S = 2.0
_MOST_EVENT_BYTES = 2**18
"""Most bytes of a status as JSON. The rest of a message is for the lines."""
_MARGIN_BYTES = 4096
_AT_ONCE = 32
"""Members of a status that are looked at while the lock is held."""
_EVENTS = 256
"""Newest events that are kept in memory for `status`; the file has all."""

_OF_NODES = [
    "node",
    "name",
    "state",
    "steps",
    "steps_per_s",
    "pace_steps",
    "busy_s",
    "wait_s",
    "wire_s",
    "bytes_up",
    "bytes_down",
    "loss",
    "weight",
    "staleness",
    "accepted",
    "refused",
    "rl",
]


_OF_SERVERS = [
    "name",
    "role",
    "address",
    "state",
    "live",
    "serial",
    "lag",
    "rows",
    "tokens_per_s",
    "running",
    "waiting",
    "idle_s",
    "idle_used_s",
    "accused",
    "reason",
    "banned",
]
"""Evidence is an event: it may be long."""


class Reports:
    """Writer of `metrics.jsonl` and `events.jsonl` in the hub's folder; also gives the reply to `status`."""

    def __init__(self, directory: Path) -> None:
        self._clock = Clock()
        self._files = Recorder(directory, self._clock, writes=True)
        self._lock = threading.Lock()
        self._lines = MetricBuffer()
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._names: dict[int, str] = {}

    def start(self, elapsed_s: float, names: Mapping[int, str]) -> None:
        """Continue at `elapsed_s` seconds of the run. names: by node."""
        self._clock.start(elapsed_s)
        self._names |= names

    def event(self, event: str, **values: Any) -> None:
        """Write an event."""
        with self._lock:
            t = round(self._clock.elapsed_s, 3)
            self._events.append({"t": t, "event": event, **values})
            self._files.event(event, t=t, **values)

    def record_applied(self, record: records.Record) -> None:
        """Write the event that describes an applied record, if it has one."""
        match record:
            case records.Founded(layout, _, num_samples):
                self._clock.start(0.0)  # the run begins now, for its nodes and in the metrics
                numel = sum(unit.numel for unit in layout.units)
                self.event("founded", units=len(layout.units), parameters=numel, samples=num_samples)
            case records.Joined(name, node):
                self._names[node] = name
                self.event("join", node=node, name=name)
            case records.Left(node, reason, excluded):
                event = "excluded" if excluded else "leave"
                self.event(event, node=node, name=self._names.get(node), reason=reason)
            case records.Refused():
                self.event(
                    "refused", node=record.node, unit=record.unit, seq=record.seq, reason=record.reason
                )
            case records.Garbled(node, unit, reason):
                self.event("garbled", node=node, unit=unit, reason=reason)
            case records.Led(term):
                self.event("lead", term=term)
            case records.Banned(server, _, reason):
                self.event("banned", server=server, reason=reason)
            case records.RoundOpened(number):
                self.event("round_opened", round=number)  # no node has pushed for it yet

    def line(self, values: Mapping[str, Any]) -> None:
        """Write a line of metrics."""
        with self._lock:
            t = round(self._clock.elapsed_s, 3)
            self._lines.add({"t": t, **values})
            self._files.metrics(t=t, **values)

    def status(self, now: Mapping[str, Any], after: int) -> str:
        """Return as JSON `now`, the latest events, and the metrics lines after the first `after` ones."""
        with self._lock:
            lines, count, events = self._lines.after(after), self._lines.count, list(self._events)
        said = newest_texts([json_line(event) for event in events], _MOST_EVENT_BYTES)
        head = json_line({**now, "num_lines": count})
        room = MESSAGE_BYTES - _MARGIN_BYTES - len(head) - sum(map(len, said)) - 2 * len(said)
        shown = ", ".join(newest_texts(lines, room))
        return f'{head[:-1]}, "events": [{", ".join(said)}], "lines": [{shown}]}}'

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def overview(
    ledger: Ledger, engine: HubWorker, directory: ServerDirectory, leadership: Leadership
) -> dict[str, Any]:
    """Return the state of the hub as JSON values; numbers may be NaN."""
    with ledger.lock:
        at_s, shown = ledger.clock(), listed_members(ledger.hub.state)
        run = status_of_run(ledger.hub, at_s)
        servers = directory.status(at_s)
        merges, merge_s = engine.merges, engine.merge_s
    nodes: list[dict[str, Any]] = []
    for start in range(0, len(shown), _AT_ONCE):
        with ledger.lock:  # briefly: members wait for it
            nodes += status_of_nodes(ledger.hub, shown[start : start + _AT_ONCE], at_s)
    segment, offset = ledger.journal.position
    in_sync, electors = leadership.in_sync()
    return run | {
        "nodes": nodes,
        "journal": {"segment": segment, "bytes": offset, "past_bytes": ledger.past_bytes},
        "merges": merges,
        "merge_s": round(merge_s, 4),
        "standby": in_sync > 0,
        "in_sync": in_sync,
        "electors": electors,
        "servers": servers,
    }


def metrics(overview: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line of metrics from an overview."""
    units = overview["units"]
    return {
        "term": overview["term"],
        "elapsed_s": round(overview["elapsed_s"], 3),
        "progress": overview["progress"],
        "steps": overview["total_steps"],
        "tokens": overview["total_tokens"],
        "round": overview["round"],
        "founder": overview["founder"],
        "anchor_bytes": overview["anchor_bytes"],
        "nodes": [{name: node[name] for name in _OF_NODES} for node in overview["nodes"]],
        "nodes_left_out": overview["nodes_left_out"],
        "versions": [unit["version"] for unit in units],
        "pending": sum(unit["pending"] for unit in units),
        "norms": [unit["norm"] for unit in units],
        "journal_bytes": overview["journal"]["bytes"] + overview["journal"]["past_bytes"],
        "merges": overview["merges"],
        "merge_s": overview["merge_s"],
        "standby": overview["standby"],
        "servers": [{name: server[name] for name in _OF_SERVERS} for server in overview["servers"]],
    }


MOST_LINE_BYTES = 2**20
"""Most bytes of all lines as JSON: a status with them stays below the largest message."""


def newest_texts(texts: Sequence[str], most_bytes: int) -> list[str]:
    """Return the last of `texts` that take at most `most_bytes` together, each with a separator of two."""
    ends = accumulate(len(text) + 2 for text in reversed(texts))
    fit = sum(end <= most_bytes for end in ends)
    return list(texts[len(texts) - fit :])


class MetricBuffer:
    """Metric lines. Of a long run it keeps every 2nd, 4th, 8th... line, and the newest. Not thread-safe."""

    def __init__(self, most_bytes: int = MOST_LINE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lines: list[tuple[int, str]] = []
        self._num_bytes = 0
        self._every = 1
        self.count = 0
        """Lines that have ever been added."""

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the newest line."""
        if self._lines and self._lines[-1][0] % self._every:
            self._num_bytes -= len(self._lines.pop()[1])
        text = json_line(values)
        self._lines.append((self.count, text))
        self._num_bytes += len(text)
        self.count += 1
        while self._num_bytes > self._most_bytes and len(self._lines) > 1:
            self._thin_out()

    def after(self, count: int) -> list[str]:
        """Return the kept lines that were added after the first `count`, as JSON."""
        return [text for number, text in self._lines if number >= count]

    def _thin_out(self) -> None:
        self._every *= 2
        *before, newest_texts = self._lines
        self._lines = [*(line for line in before if line[0] % self._every == 0), newest_texts]
        self._num_bytes = sum(len(text) for _, text in self._lines)
        if len(self._lines) == 2 and self._num_bytes > self._most_bytes:
            self._lines, self._num_bytes = [newest_texts], len(newest_texts[1])
