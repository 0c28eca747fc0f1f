"""Rollout servers that a rank uses beside its own workers, and the process that connects it with them.

Servers are known by their addresses, or by the hub that lists them.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, Literal

from aedit.spec_rollout.remote.links import LinkSettings
from aedit.spec_rollout.remote.publisher import version_layout
from aedit.spec_rollout.remote.shared_weights import SharedWeights
from aedit.spec_rollout.remote.workers import ChildProcess, Lane, WorkerHandle
from aedit.spec_rollout.server import Channel, Message
from aedit.spec_rollout.training import Restarts
from aedit.types import (
    Layout,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TensorLayout,
    UnitLayout,
    check,
    checked,
)

MODULE = "aedit.spec_rollout.remote.link"
FIRST_INDEX = 1 << 16
"""Indices of servers begin here; those of a rank's own processes are below."""
SILENT_S = 60.0
"""Time without a message after which the process is ended and started again."""
PAUSES = Restarts(limit=10**9, pause_s=0.25, longest_pause_s=30.0)
"""There is no limit: the rank's own workers go on without servers."""
TOTALS = ("tokens", "samples", "moved", "taken_back", "version_bytes")
BLOCK = re.compile(r"(.*?\.\d+)\.")
"""Name of a transformer block at the start of a tensor's name."""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Rollout servers of one rank; see `WorkerSource`."""

    addresses: tuple[str, ...] = ()
    """HOST:PORT of servers that are always tried."""
    hubs: tuple[str, ...] = ()
    """HOST:PORT of hubs; the first one lists the servers of the run."""
    standby: str = ""
    """Address of the first hub's standby."""
    run: str = ""
    """Name of the run, equal on the servers."""
    trainer: str = ""
    """Name of this node in logs."""
    rank: NonNegativeInt = 0
    keys: Path | None = None
    """Folder of the node's keys; None: plaintext."""
    layout: Layout | None = None
    """Sync units of the model, equal on the servers; None: one unit per transformer block, and `rest`."""
    dtype: str = ""
    """Dtype of the versions that servers are given, equal on them: bf16, fp32 or fp64; empty: that of the
    workers."""
    on_new_version: Literal["recompute", "finish"] = "recompute"
    """Samples that are running at a server when a new version comes continue with it, or end with theirs."""
    silent_s: PositiveFloat = 5.0
    """Seconds without a sign of life after which a server is given up and its samples continue elsewhere."""
    stalled_s: PositiveFloat = 60.0
    """Seconds without a token of a sample after which this sample continues elsewhere, and time in which a
    server must answer the request to return one."""
    connect_s: PositiveFloat = 10.0
    """Limit of the time until a server answers."""
    poll_s: PositiveFloat = 3.0
    """Interval of the questions for the list of servers."""
    ring: PositiveInt = 8
    """Policy versions that are kept, to send others only what has changed since."""
    auditor: str = ""
    """Function as `package.module:name` that is called with `LinkSettings` and returns an `Auditor`; empty:
    what has the right form is delivered at once."""
    audit_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the audit, which JSON can hold."""
    member: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns index and session of this node at the hub, which takes accusations of servers from members."""
    logs: Path | None = None
    """Directory of the process's output; None discards it."""

    def __post_init__(self) -> None:
        known = ("", "bf16", "fp32", "fp64")
        check(self.dtype in known, "Servers: dtype", f"must be one of {', '.join(known[1:])}", self.dtype)
        check(bool(self.addresses or self.hubs), "addresses", "must name a server, or hubs one", "none")
        check(len(set(self.addresses)) == len(self.addresses), "addresses", "must differ", self.addresses)
        for address in (*self.addresses, *self.hubs):
            host, _, port = address.rpartition(":")
            fits = bool(host) and port.isdigit() and 0 < int(port) < 1 << 16
            check(fits, "addresses", "must be HOST:PORT", repr(address))

    @classmethod
    def at(cls, *addresses: str, **settings: Any) -> "Servers":
        """Return servers at these addresses, HOST:PORT each; no hub is needed."""
        return cls(addresses=addresses, **settings)

    def start(
        self,
        weights: SharedWeights,
        vocabulary: int,
        tokenizer: str,
        report: Callable[[str, Mapping[str, Any]], None],
    ) -> "LinkProcess":
        """Start the process that connects to the servers, and return at once.

        Args:
            weights: Shared memory with the policy.
            vocabulary: Number of token ids.
            tokenizer: Directory of a saved tokenizer; empty: none.
            report: Takes an event and its fields.

        Raises:
            ValueError: The policy has not the units or the dtype that servers expect.
        """
        specs = tuple((name, tuple(shape), dtype) for name, shape, dtype in weights.described()["specs"])
        layout = self.layout or layout_of([(name, shape) for name, shape, _ in specs])
        version_layout(specs, layout, self.dtype)
        settings = LinkSettings(
            addresses=self.addresses,
            hubs=self.hubs,
            standby=self.standby,
            run=self.run,
            trainer=self.trainer or secrets.token_hex(4),
            rank=self.rank,
            keys=str(self.keys or ""),
            layout=layout,
            specs=specs,
            dtype=self.dtype,
            fd=weights.fd,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            on_new_version=self.on_new_version,
            silent_s=self.silent_s,
            stalled_s=self.stalled_s,
            connect_s=self.connect_s,
            poll_s=self.poll_s,
            ring=self.ring,
            auditor=self.auditor,
            audit_options=dict(self.audit_options),
        )
        return LinkProcess(settings, report, member=self.member, logs=self.logs)


def layout_of(tensors: list[tuple[str, tuple[int, ...]]]) -> Layout:
    """Return one unit per transformer block, after the unit `rest`, as `LayerSync` divides such models.

    tensors: name and shape of each tensor.
    """
    units: dict[str, list[TensorLayout]] = {"rest": []}
    for name, shape in tensors:
        found = BLOCK.match(name)
        units.setdefault(found[1] if found else "rest", []).append(TensorLayout(name, shape))
    return Layout(tuple(UnitLayout(name, tuple(parts)) for name, parts in units.items() if parts))


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

    def forget(self, worker: WorkerHandle) -> None:
        """Note that the rank has forgotten a server whose connection has ended."""
        self._indices.discard(worker.index)

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
            "server_pid": self._process.process.pid if self._process is not None else None,
            "server_error": self._error,
        }

    def close(self) -> None:
        """End the process."""
        self._report = lambda event, fields: None
        self._end("closed")

    def _start(self) -> None:
        try:
            self._process = ChildProcess.start(
                "the connection to rollout servers",
                MODULE,
                {"settings": self._settings.described()},
                (self._settings.fd,),
                self._logs and self._logs / "servers.log",
            )
        except OSError as error:
            self._died(f"the connection to rollout servers could not be started: {error}")
            return
        self._quiet_s = 0.0
        self._send_version()

    def _send_version(self) -> None:
        if self._process is not None and self._version:
            self._process.channel.send("publish", member=self._member(), version=self._version)

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
