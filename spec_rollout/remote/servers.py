"""The rank's side of the process that connects it with rollout servers, and the figures of each server."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import TimeoutExpired
from typing import Any

from aedit.child import Restarts
from aedit.spec_rollout.remote.links import LinkSettings
from aedit.spec_rollout.remote.workers import ChildProcess, Lane, WorkerHandle
from aedit.spec_rollout.server import Channel, Message

MODULE = "aedit.spec_rollout.remote.link"
FIRST_INDEX = 1 << 16
"""Indices of servers begin here; those of a rank's own processes are below."""
SILENT_S = 60.0
"""Time without a message after which the process is ended and started again."""
PAUSES = Restarts(limit=10**9, pause_s=0.25, longest_pause_s=30.0)
"""There is no limit: the rank's own workers go on without servers."""
TOTALS = ("tokens", "samples", "moved", "taken_back", "version_bytes")


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

    def disconnected(self, *, violation: bool) -> None:
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
    """Servers behind one process, which is started again whenever it ends. Used by one thread."""

    def __init__(
        self,
        settings: LinkSettings,
        report: Callable[[str, Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process.

        Args:
            settings: The servers, and the policy.
            report: Takes an event and its fields.
            clock: Monotonic seconds.
        """
        self._settings, self._report, self._clock = settings, report, clock
        self._process: ChildProcess | None = None
        self._lanes: dict[int, tuple[str, Lane]] = {}
        self._waiting: list[WorkerHandle] = []
        """Servers that were connected to and that the rank does not know yet."""
        self._servers: dict[str, ServerTotals] = {}
        self._restarts, self._quiet_s, self._version = PAUSES, 0.0, 0
        self._error = ""
        self._away: Sequence[Mapping[str, Any]] = ()
        self._start()

    def look(self, workers: dict[int, WorkerHandle]) -> None:
        """Read what has arrived; add the servers that were connected to, whose forerunner is gone."""
        if self._process is not None:
            self._read(self._process)
        elif self._restarts.may_start(self._clock()):
            self._start()
        for each in self._waiting:
            workers.setdefault(each.index, each)
        self._waiting = [each for each in self._waiting if workers[each.index] is not each]

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
            self._process.channel.send("accuse", member=self._settings.member(), **fields)

    def status(self) -> Mapping[str, Any]:
        """Return the figures of each server by name, and their sums."""
        servers = {name: each.status() for name, each in self._servers.items()}
        sums = {f"server_{name}": sum(each[name] for each in servers.values()) for name in TOTALS}
        return {
            **sums,
            "servers": servers,
            "servers_connected": sum(each["connected"] for each in servers.values()),
            "servers_away": list(self._away),
            "server_pid": self._process.process.pid if self._process is not None else None,
            "server_error": self._error,
        }

    def close(self) -> None:
        """End the process."""
        self._report = lambda event, fields: None
        self._end("closed")

    def _start(self) -> None:
        logs = self._settings.logs
        try:
            self._process = ChildProcess.start(
                "the connection to rollout servers",
                MODULE,
                {"settings": self._settings.to_json()},
                (self._settings.fd,),
                logs and logs / "servers.log",
            )
        except OSError as error:
            self._died(f"the connection to rollout servers could not be started: {error}")
            return
        self._quiet_s = 0.0
        self._send_version()

    def _send_version(self) -> None:
        if self._process is not None and self._version:
            self._process.channel.send("publish", member=self._settings.member(), version=self._version)

    def _read(self, process: ChildProcess) -> None:
        messages, any_came = process.receive()
        self._quiet_s = 0.0 if any_came else self._quiet_s
        for name, lane in self._lanes.values():
            for each in lane.inbox:
                if each.HasField("figures"):
                    self._servers[name].now = json.loads(each.figures.json)["link"]["totals"]
        for message in messages:
            self._handle(message, process)
        if process.channel.closed or process.is_dead:
            reason = process.death()
            self._end(f"{reason}{self._error and ': ' + self._error}")
        elif self._quiet_s > SILENT_S:
            self._end(f"{process.name} gave no sign of life for {self._quiet_s:.1f} s and was ended")

    def _handle(self, message: Message, process: ChildProcess) -> None:
        kind = message["kind"]
        if kind == "joined":
            self._joined(message, process)
        elif kind == "beat":
            self._away = message["places"]
        elif kind == "refused":
            raise ValueError(message["message"])
        elif kind == "error":
            self._error = message["message"]
        elif kind == "lost" and message["lane"] in self._lanes:
            self._lost(message["lane"], message["reason"], message)

    def _joined(self, message: Message, process: ChildProcess) -> None:
        name, number = message["server"], message["lane"]
        totals = self._servers.setdefault(
            name, ServerTotals(FIRST_INDEX + len(self._servers), message["address"])
        )
        handle = WorkerHandle(
            totals.index,
            name,
            process.lane(number),
            message["rows"],
            room=message["room"],
            is_ready=True,
            ready_in_s=float("inf"),
        )
        totals.address, totals.handle = message["address"], handle
        self._lanes[number] = name, handle.lane
        self._waiting.append(handle)
        self._report("server_joined", {"server": name, "address": totals.address, "rows": handle.rows})

    def _lost(self, number: int, reason: str, message: Message | None = None) -> None:
        found = message or {}
        name, lane = self._lanes.pop(number)
        lane.reason = reason
        if self._process is not None:
            self._process.lanes.pop(number, None)
        self._waiting = [each for each in self._waiting if each.lane is not lane]
        totals = self._servers[name]
        totals.disconnected(violation=found.get("violation", False))
        kind = {key: found[key] for key in ("violation", "evidence") if found.get(key)}
        self._report("server_lost", {"server": name, "address": totals.address, "reason": reason, **kind})

    def _end(self, reason: str) -> None:
        """End the process, and with it all connections."""
        process, self._process = self._process, None
        for number in list(self._lanes):
            self._lost(number, reason)
        if process is not None:
            try:
                process.end()
            except TimeoutExpired:  # it hangs in the kernel; its signal is waiting there
                reason = f"process {process.process.pid} does not end"
        self._died(reason)

    def _died(self, reason: str) -> None:
        self._error = reason
        self._report("servers_lost", {"reason": reason})
        self._restarts = self._restarts.died(
            self._clock(), worked=any(each.now for each in self._servers.values())
        )
