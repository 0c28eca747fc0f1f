"""The rank's side of the process that connects it with rollout servers."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from aedit.spec_rollout.remote.handle import FIRST_INDEX, WorkerHandle
from aedit.spec_rollout.remote.settings import LinkSettings
from aedit.spec_rollout.remote.workers_pool import ChildProcess, log_file
from aedit.spec_rollout.server import Channel, Message
from aedit.spec_rollout.training import Restarts

MODULE = "aedit.spec_rollout.remote.link"
SILENT_S = 60.0
"""Time without a message after which the process is ended and started again."""
PAUSES = Restarts(limit=10**9, pause_s=0.25, longest_pause_s=30.0)
"""There is no limit: the rank's own workers go on without servers."""
TOTALS = ("tokens", "samples", "moved", "taken_back", "version_bytes")


class Lane:
    """Messages of one connection, over the channel that all of them share."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number, self._channel = number, channel
        self.inbox: deque[Message] = deque()
        self.reason = ""
        """Why the connection has ended; empty while it has not."""

    @property
    def closed(self) -> bool:
        """Return whether the connection has ended."""
        return bool(self.reason)

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message."""
        if not self.closed:
            self._channel.send(kind, lane=self.number, **fields)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived."""
        found = list(self.inbox)
        self.inbox.clear()
        return found


@dataclass(slots=True)
class ServerLife:
    """A server behind a lane."""

    name: str
    lane: Lane
    ended: Callable[[], None]
    """Called when the rank has taken note of the end."""
    pid: None = None

    @property
    def is_dead(self) -> bool:
        """Return whether the connection has ended."""
        return self.lane.closed

    def death(self) -> str:
        """Return why it has ended."""
        return f"rollout server {self.name}: {self.lane.reason}"

    def end(self) -> None:
        """Forget the lane. Messages that still come from it are dropped."""
        self.ended()


@dataclass(slots=True)
class ServerTotals:
    """Figures of one server over all its connections."""

    index: int
    address: str
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    now: dict[str, int] = field(default_factory=dict)
    losses: int = 0
    violations: int = 0
    handle: WorkerHandle | None = None
    """None while there is no connection."""

    def lost(self, *, violation: bool) -> None:
        """Add the figures of a connection that has ended."""
        self.before = self.figures()
        self.now, self.handle = {}, None
        self.losses += 1
        self.violations += violation

    def figures(self) -> dict[str, int]:
        """Return the totals."""
        return {name: self.before[name] + int(self.now.get(name, 0)) for name in TOTALS}

    def status(self) -> dict[str, Any]:
        """Return the totals and the present state."""
        handle = self.handle
        speed = handle.speed if handle is not None else None
        rate = handle.rows / max(1e-9, speed.token_s(handle.rows)) if handle and speed else 0.0
        return {
            **self.figures(),
            "address": self.address,
            "connected": handle is not None,
            "running": len(handle.samples) if handle else 0,
            "version": handle.version if handle else 0,
            "tokens_per_s": round(rate, 1),
            "losses": self.losses,
            "violations": self.violations,
        }


class LinkProcess:
    """`RemoteWorkers` behind one process, which is started again whenever it ends. Used by one thread."""

    def __init__(
        self,
        settings: LinkSettings,
        report: Callable[[str, Mapping[str, Any]], None],
        *,
        member: Callable[[], tuple[int, int]] = lambda: (0, 0),
        logs: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process.

        Args:
            settings: Settings of the process.
            report: Takes an event and its fields.
            member: Returns index and session of the node, by which the hub knows who accuses a server.
            logs: Directory of its output.
            clock: Monotonic seconds.
        """
        self._settings, self._report, self._logs, self._clock = settings, report, logs, clock
        self._member = member
        self._process: ChildProcess | None = None
        self._lanes: dict[int, tuple[str, Lane]] = {}
        self._new: list[WorkerHandle] = []
        self._waiting: list[WorkerHandle] = []
        self._servers: dict[str, ServerTotals] = {}
        self._indices: set[int] = set()
        """Indices of the workers that the rank has."""
        self._restarts, self._quiet_s, self._version = PAUSES, 0.0, 0
        self._error = ""
        self._away: Sequence[Mapping[str, Any]] = ()
        self._start()

    def look(self) -> Sequence[WorkerHandle]:
        """Read what has arrived; return the servers that were connected to, whose forerunner is gone."""
        if self._process is not None:
            self._read(self._process)
        elif self._restarts.may_start(self._clock()):
            self._start()
        ready = [each for each in self._waiting if each.index not in self._indices]
        self._waiting = [each for each in self._waiting if each.index in self._indices]
        self._indices |= {each.index for each in ready}
        return ready

    def channels(self) -> Sequence[Channel]:
        """Return the channel of the process."""
        return [self._process.channel] if self._process is not None else []

    def waited(self, passed_s: float) -> None:
        """Count a wait of the rank as silence of the process."""
        self._quiet_s += passed_s

    def publish(self, version: int) -> None:
        """Say that a policy version is in the shared memory."""
        self._version = version
        self._send_version()

    def accuse(self, server: str, reason: str, evidence: Mapping[str, Any]) -> None:
        """Leave a server whose tokens were found to be wrong, and report it to the hub."""
        if self._process is not None:
            fields = {"server": server, "reason": reason, "evidence": dict(evidence)}
            self._process.channel.send("accuse", member=self._member(), **fields)

    def status(self) -> Mapping[str, Any]:
        """Return the figures of each server by name, and their sums."""
        servers = {name: each.status() for name, each in self._servers.items()}
        sums = {f"server_{name}": sum(each[name] for each in servers.values()) for name in TOTALS}
        return {
            **sums,
            "servers": servers,
            "servers_connected": sum(each["connected"] for each in servers.values()),
            "servers_away": list(self._away),
            "server_pid": self._process.pid if self._process is not None else None,
            "server_error": self._error,
        }

    def close(self) -> None:
        """End the process."""
        self._report = _report_nothing
        self._end("closed")

    def _start(self) -> None:
        try:
            log = log_file("servers.log", self._logs)
            what = "the connection to rollout servers"
            self._process = ChildProcess.start(what, MODULE, (self._settings.fd,), log)
        except OSError as error:
            self._died(f"the connection to rollout servers could not be started: {error}")
            return
        self._quiet_s = 0.0
        self._process.channel.send("begin", path=sys.path, settings=self._settings.described())
        self._send_version()

    def _send_version(self) -> None:
        if self._process is not None and self._version:
            self._process.channel.send("publish", member=self._member(), version=self._version)

    def _read(self, process: ChildProcess) -> None:
        for message in process.channel.receive():
            self._quiet_s = 0.0
            self._handle(message, process.channel)
        if process.channel.closed or process.is_dead:
            reason = process.death()
            self._end(f"{reason}{self._error and ': ' + self._error}")
        elif self._quiet_s > SILENT_S:
            self._end(f"{process.name} gave no sign of life for {self._quiet_s:.1f} s and was ended")

    def _handle(self, message: Message, channel: Channel) -> None:
        kind = message["kind"]
        if kind == "joined":
            self._joined(message, channel)
        elif kind == "beat":
            self._away = message["places"]
        elif kind == "refused":
            raise ValueError(message["message"])
        elif kind == "error":
            self._error = message["message"]
        elif message["lane"] in self._lanes:
            name, lane = self._lanes[message["lane"]]
            if kind == "lost":
                self._lost(name, lane, message["reason"], message)
                return
            if kind == "report":
                self._servers[name].now = message["server"]
            lane.inbox.append(message)

    def _joined(self, message: Message, channel: Channel) -> None:
        name, number = message["server"], message["lane"]
        lane = Lane(number, channel)
        totals = self._servers.setdefault(
            name, ServerTotals(FIRST_INDEX + len(self._servers), message["address"])
        )
        life = ServerLife(name, lane, ended=lambda: self._indices.discard(totals.index))
        handle = WorkerHandle(
            totals.index,
            life,
            lane,
            message["rows"],
            room=message["room"],
            is_local=False,
            is_ready=True,
            ready_in_s=float("inf"),
        )
        totals.address, totals.handle = message["address"], handle
        self._lanes[number] = name, lane
        self._waiting.append(handle)
        self._report("server_joined", {"server": name, "address": totals.address, "rows": handle.rows})

    def _lost(self, name: str, lane: Lane, reason: str, message: Message | None = None) -> None:
        found = message or {}
        lane.reason = reason
        del self._lanes[lane.number]
        self._waiting = [each for each in self._waiting if each.channel is not lane]
        totals = self._servers[name]
        totals.lost(violation=found.get("violation", False))
        kind = {key: found[key] for key in ("violation", "evidence") if found.get(key)}
        self._report("server_lost", {"server": name, "address": totals.address, "reason": reason, **kind})

    def _end(self, reason: str) -> None:
        """End the process, and with it all connections."""
        process, self._process = self._process, None
        for name, lane in list(self._lanes.values()):
            self._lost(name, lane, reason)
        if process is not None:
            try:
                process.end()
            except TimeoutExpired:  # it hangs in the kernel; its signal is waiting there
                reason = f"process {process.pid} does not end"
        self._died(reason)

    def _died(self, reason: str) -> None:
        self._error = reason
        self._report("servers_lost", {"reason": reason})
        self._restarts = self._restarts.died(
            self._clock(), worked=any(each.now for each in self._servers.values())
        )


def _report_nothing(event: str, fields: Mapping[str, Any]) -> None:
    pass
