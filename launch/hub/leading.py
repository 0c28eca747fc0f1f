"""A hub that leads: its ledger, worker, request guard and driver; its metrics, events and status.

A hub writes a line of metrics every few seconds, and events as they happen.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aedit.async_sgd.hub import Member, listed_members, status_of_nodes, status_of_run
from aedit.async_sgd.journal import JournalBroken, Ledger, NoSpace, moved_aside
from aedit.async_sgd.replication import LEASE_S, Leadership
from aedit.async_sgd.rules import Record, records
from aedit.async_sgd.service import (
    Driver,
    HelloResponder,
    HubWorker,
    RequestGuard,
    ServerDirectory,
    json_line,
)
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.records import Alerts, Clock, HubWatch, Recorder
from aedit.proto.rpc import MESSAGE_BYTES, CallCost
from aedit.system import num_cores

if TYPE_CHECKING:
    from aedit.launch.hub.uplink import Uplink

log = logging.getLogger(__name__)
MOST_LINE_BYTES = 2**20
"""Most bytes of all lines as JSON: a status with them stays below the largest message."""
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
_VOTERS_S = 0.1
"""Interval at which the hub looks for replicas and nodes that have come or gone."""


class Reports:
    """Writer of `metrics.jsonl` and `events.jsonl` in the hub's folder; also gives the reply to `status`."""

    def __init__(self, directory: Path) -> None:
        self._clock = Clock()
        self._files = Recorder(directory, self._clock, writes=True)
        self._lock = threading.Lock()
        self._lines = MetricBuffer()
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._names: dict[int, str] = {}

    def start(self, elapsed_s: float, members: Iterable[Member] = ()) -> None:
        """Continue at `elapsed_s` seconds of the run, with these members, live or not."""
        self._clock.start(elapsed_s)
        self._names |= {member.node: member.name for member in members if member.name}

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
            case records.Accepted(push) if not push.base:
                self.event("first_anchor", node=push.node, unit=push.unit)
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
            self._every *= 2
            *before, newest = self._lines
            self._lines = [*(line for line in before if line[0] % self._every == 0), newest]
            self._num_bytes = sum(len(text) for _, text in self._lines)
            if len(self._lines) == 2 and self._num_bytes > self._most_bytes:
                self._lines, self._num_bytes = [newest], len(newest[1])

    def after(self, count: int) -> list[str]:
        """Return the kept lines that were added after the first `count`, as JSON."""
        return [text for number, text in self._lines if number >= count]


class LeadingHub:
    """Components of a hub that leads, from construction to `stop`."""

    def __init__(
        self,
        endpoint: HubEndpoint,
        ledger: Ledger,
        reports: Reports,
        responder: HelloResponder,
        leadership: Leadership,
        cost: CallCost,
    ) -> None:
        state, config = ledger.hub.state, endpoint.config
        reports.start(state.elapsed_s, state.members)
        self._endpoint, self._config = endpoint, config
        self._reports, self.ledger, self.leadership = reports, ledger, leadership
        self.engine = HubWorker(
            self.ledger,
            reports.event,
            snapshot_bytes=config.hub.snapshot_bytes,
            mergers=config.hub.threads or max(1, num_cores() // 2),
            ends_with_run=not endpoint.stays,
            call_s=lambda: cost.call_s,
        )
        self.guard = RequestGuard(self.ledger, self.engine, config.name, leadership, responder.part)
        self.driver = Driver(self.guard, responder, self._status)
        self.directory = ServerDirectory(self.guard, reports.event)
        self._watch = HubWatch(config.alerts, endpoint.directory)
        self._alerts = Alerts(config.alerts, config.name, "hub", reports.event)
        self.uplink: Uplink | None = None
        self.has_resigned = False
        """True once it leads no more because its disk is full; it may follow the next leader."""
        self._in_sync = 0
        self._live, self._changes = list[int](), -1
        """Votes of the live nodes, after so many changes of the roster."""
        self._stopping = threading.Event()
        self._lines = threading.Thread(target=self._write_lines, name="lines", daemon=True)
        self._twins: dict[int, str] = {}
        """Second addresses of replicas for which there was an event, by identity."""
        self._voters = threading.Thread(target=self._look_at_voters, name="voters", daemon=True)

    def begin(self, records: Sequence[Record]) -> None:
        """Commit the records with which this hub begins to lead.

        Raises NoSpace or JournalBroken if the journal cannot be written.
        """
        with self.ledger.lock:
            position = self.ledger.commit(records)
        self.ledger.journal.sync(position)
        self.leadership.attach(self.ledger, position)

    def start(self) -> None:
        """Start the threads that merge, write metrics, and follow replicas and nodes that come and go."""
        self.engine.start()
        self._lines.start()
        self._voters.start()

    def join_parent(self, uplink: "Uplink") -> None:
        """Start the connection that makes this hub a node of its parent hub."""
        self.uplink = uplink
        uplink.start()

    @property
    def is_over(self) -> bool:
        """Return whether this hub has ended.

        `failure`, `guard.replaced` and `guard.lacking` give the reason if the run has not.
        """
        return self.engine.over.is_set() or self.guard.replaced.is_set() or bool(self.guard.lacking)

    @property
    def failure(self) -> str:
        """Return the reason of a failure, "" without one."""
        return self.engine.failure

    def stop(self) -> None:
        """Stop the engine and write a final snapshot."""
        self._stopping.set()
        if self.uplink is not None:
            self.uplink.stop()
        self.engine.stop()
        for thread in (self._lines, self._voters):
            if thread.is_alive():
                thread.join(timeout=5)
        self._reports.line(metrics(self.overview()))  # the last line is the source of the report
        if not (self.failure or self.guard.lacking or self.guard.replaced.is_set()):
            self._reports.event("snapshot", bytes=self.ledger.snapshot())
        self._reports.event("stop", reason=self.failure)

    def hand_over(self, limit_s: float) -> None:
        """Let another replica lead, if one is in sync; return when it does, or after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        handed = self.num_members() > 0 and self.leadership.hand_over()
        while handed and not self.guard.replaced.is_set() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def num_members(self) -> int:
        """Return the number of live nodes."""
        with self.ledger.lock:
            return len(self.ledger.hub.state.live)

    def overview(self) -> dict[str, Any]:
        """Return the current state, see `reports.overview`."""
        return overview(self.ledger, self.engine, self.directory, self.leadership)

    def _status(self, after: int) -> str:
        own = dict[str, Any](run=self._config.name, traffic=self.driver.exchange.status())
        own["alerts"] = list(self._alerts.active.values())
        own["set_aside"] = moved_aside(self._endpoint.directory)
        own["twins"] = [f"{address} and {other}" for other, address in self.leadership.twins.values()]
        return self._reports.status(self.overview() | own, after)

    def _write_lines(self) -> None:
        while not self._stopping.wait(LINE_EVERY_S):
            try:
                self.ledger.journal.check_place()  # also without pushes, when nothing is synced
            except JournalBroken as error:
                self.engine.fail(error)
                return
            now = self.overview()
            self._reports.line(metrics(now))
            self._alerts.update(self._watch.alerts(now, time.monotonic()))

    def _resign(self, reason: str) -> None:
        """Lead no more: another hub, or this one once it has room, can be elected."""
        log.error("%s", reason)
        self._reports.event("resign", reason=reason)
        with self.ledger.lock:
            configs = self.ledger.hub.state.configs
        self.has_resigned = True
        self.leadership.resign(configs)

    def _look_at_voters(self) -> None:
        while not self._stopping.wait(_VOTERS_S) and self.leadership.has_others and not self.is_over:
            self.look_at_voters()

    def look_at_voters(self) -> None:
        """Note which standbys and nodes have come or gone, and whether this hub leads any more."""
        ledger, roster = self.ledger, self.ledger.hub.state.roster
        with ledger.lock:
            if self._changes != roster.changes:
                self._live, self._changes = [roster.live[one].voter for one in roster.order], roster.changes
            extent = (ledger.hub.state.term, *ledger.journal.position)
        has_room_again = False
        try:
            is_full = self.engine.full_s is not None
            self.leadership.tick(self._live, ledger.journal.complete, extent, is_full=is_full)
            has_room_again = self.leadership.only_sends and self.leadership.has_room()
        except NoSpace as error:
            self.engine.is_full(error)
        except (JournalBroken, OSError) as error:
            self.engine.fail(error)
        if not self.leadership.holds_lease():
            self.guard.ask_the_others()  # it may have been replaced while it could not be reached
        if (self.engine.full_s or 0.0) >= LEASE_S and self.leadership.has_successor(ledger.journal.complete):
            self._resign(f"the disk of {self._endpoint.directory} is full: a standby may lead")
        elif has_room_again:
            self._resign(f"there is room on the disk of {self._endpoint.directory}: this hub can be elected")
        if not self.leadership.leads:
            self.guard.end_term()
        elif (first := self._endpoint.successor) and self.leadership.hand_over(first):
            self._reports.event("hand_over", to=first)
        for replica, (other, address) in list(self.leadership.twins.items()):
            if self._twins.get(replica) != address:
                self._twins[replica] = address
                self._reports.event("twin", addresses=[other, address])
        now = self.leadership.in_sync()[0]
        if now != self._in_sync:
            event = "standby_follows" if now > self._in_sync else "standby_lost"
            self._reports.event(event, in_sync=now)
        self._in_sync = now
