"""Records of hubs, of their rollout servers and of swarms, from folders or from a reply to `status`.

Values that a node reports (`steps`, seconds, bytes) count from the start of its process and are 0 before its
first report; counts of the hub (`accepted`, `refused`) start with the run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import nan
from typing import Any

from aedit.launch.records.records import Line, Notice, RLMetric, float_or_nan, record_of, text


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """State of one node at one time, from its hub."""

    node: int
    name: str
    state: str = "?"
    steps: float = nan
    steps_per_s: float = nan
    pace_steps: float = nan
    """Inner steps before the next push, as set by the hub."""

    busy_s: float = nan
    wait_s: float = nan
    """Waiting for the hub: transfer time not overlapped with training."""

    wire_s: float = nan
    """Time of pushes and pulls, overlapped or not."""

    bytes_up: float = nan
    bytes_down: float = nan
    weight: float = nan
    """Merge weight of its last push."""

    staleness: float = nan
    """Versions between the base of its last push and the merge."""

    accepted: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    """Number of refused pushes by reason."""

    rl: RLMetric | None = None
    """Reinforcement learning; None in a run on text."""

    @staticmethod
    def of(line: Line) -> "NodeSample":
        """Return the state in one entry of `nodes` of a hub's line."""
        name = text(line.get("name") or line["node"])
        return record_of(NodeSample, line, name=name, rl=RLMetric.of(line.get("rl")))

    @property
    def reports(self) -> bool:
        """Return whether the hub has a report of the node.

        It has none before the first heartbeat, after the node has left, and just after a restart of the hub.
        """
        return self.steps > 0 or self.bytes_up > 0 or self.bytes_down > 0

    @property
    def excluded(self) -> str:
        """Return the reason of the exclusion; "" if the node was not excluded."""
        return self.state.removeprefix("excluded: ") if self.state.startswith("excluded") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSample:
    """State of one rollout server at one time, from the hub's directory."""

    name: str
    address: str = ""
    state: str = "?"
    live: bool = False
    lag: float = nan
    """Versions of the policy that it is behind the hub."""

    tokens_per_s: float = nan
    """Recent speed, as the server reports it."""

    running: float = nan
    waiting: float = nan
    idle_s: float = nan
    """Time without a request, since its process began."""

    idle_used_s: float = nan
    """Part of `idle_s` in which it trained the drafter."""

    accused: Mapping[str, float] = field(default_factory=dict)
    """Number of accusations by node."""

    reason: str = ""
    """Reason of the last accusation."""

    banned: str = ""
    """Reason of the ban; empty if there is none."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Evidence of the last accusation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSample:
    """State of one hub at one time."""

    t: float
    """Seconds since the start of the run, without outages of the hub."""

    term: int = 0
    progress: float = nan
    nodes: tuple[NodeSample, ...]
    versions: tuple[int, ...]
    """Newest anchor version of each unit that this hub owns."""

    pending: int
    """Number of pushes that wait for their quorum."""

    journal_bytes: float
    follows: str = ""
    """HOST:PORT of the hub that leads, if this one is its standby."""

    disk_full: str = ""
    """Why a standby cannot write; empty if it can."""

    set_aside: tuple[str, ...] = ()
    """Folders with records that a standby had and its leader did not."""

    twins: tuple[str, ...] = ()
    """Processes that were started from copies of one folder."""

    founder: int | None
    """The node that uploaded the initial anchors; None while there are none."""

    anchor_bytes: float = 0.0
    """Size of the initial anchors of the units that this hub owns, as uploaded."""

    servers: tuple[ServerSample, ...]
    """Rollout servers, which are no nodes."""

    nodes_left_out: int = 0
    """Number of nodes that the hub knows beside `nodes`: a line and a status are bounded."""

    @staticmethod
    def of(line: Line) -> "HubSample":
        """Return the state in a line of a hub's metrics, or in the reply to `status`."""
        units, journal = line.get("units") or (), line.get("journal") or {}
        own_bytes = journal.get("bytes", 0) + journal.get("past_bytes", 0)
        return record_of(
            HubSample,
            line,
            t=float(line["elapsed_s"] if "elapsed_s" in line else line["t"]),
            nodes=tuple(map(NodeSample.of, line.get("nodes") or ())),
            versions=tuple(map(int, line.get("versions") or [unit["version"] for unit in units])),
            pending=int(line.get("pending") or sum(unit["pending"] for unit in units)),
            journal_bytes=float_or_nan(line.get("journal_bytes", own_bytes)),
            founder=None if line.get("founder") is None else int(line["founder"]),
            servers=tuple(record_of(ServerSample, server) for server in line.get("servers") or ()),
            twins=tuple(map(str, line.get("twins") or ())),
            set_aside=tuple(f"{one['path']} ({one['bytes']} bytes)" for one in line.get("set_aside") or ()),
        )


@dataclass(frozen=True, slots=True)
class HubRecords:
    """Records of one hub and of its standby, ordered by term, then by time."""

    lines: tuple[HubSample, ...]
    notices: tuple[Notice, ...]
    """Exclusions and changes of the leading hub."""

    evidence: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Evidence of the last accusation of a rollout server, by its name."""

    alerts: tuple[str, ...] = ()
    """Texts of the active alerts."""

    @property
    def last(self) -> HubSample:
        """Return the newest line, in which nodes without a current report have their last one.

        Needs a line.
        """
        newest, reported = self.lines[-1], dict[int, NodeSample]()
        for line in reversed(self.lines):
            reported |= {n.node: n for n in line.nodes if n.reports and n.node not in reported}
            if len(reported) == len(newest.nodes):
                break
        nodes = [
            replace(
                reported.get(now.node, now),
                state=now.state,
                weight=now.weight,
                staleness=now.staleness,
                accepted=now.accepted,
                refused=now.refused,
            )
            for now in newest.nodes
        ]
        servers = [
            replace(server, evidence=self.evidence.get(server.name, {}))
            if server.accused and not server.evidence
            else server
            for server in newest.servers
        ]
        return replace(newest, nodes=tuple(nodes), servers=tuple(servers))


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a run over all its nodes and hubs."""

    accepted: int
    refused: Mapping[str, int]
    merges: int
    """Anchors made after the first one of each unit."""

    versions: tuple[int, ...]
    bytes_up: float
    bytes_down: float
    excluded: tuple[tuple[str, str], ...]
    """Name and reason."""

    founder: str
    """Name of the node that uploaded the initial anchors; empty while there are none."""

    anchor_bytes: float
    """Size of these anchors: a part of `bytes_up`."""


def totals(hubs: Sequence[HubRecords]) -> Totals | None:
    """Return the totals over hubs that split the units; None if none has written anything.

    Bytes are those of the last reports, at most some seconds before the nodes' end.
    """
    last = [hub.lines[-1] for hub in hubs if hub.lines]
    if not last:
        return None
    # Once its founder has left, a hub names the node that joined next.
    founded = [next((line for line in hub.lines if line.founder is not None), None) for hub in hubs]
    founders = {n.name for line in founded if line for n in line.nodes if n.node == line.founder}
    nodes = [node for hub in last for node in hub.nodes]
    refused: Counter[str] = Counter()
    for node in nodes:
        refused.update(node.refused)
    versions = tuple(version for hub in last for version in hub.versions)
    # A node reports its bytes to and from all hubs to each hub: one suffices.
    longest = max((hub.lines for hub in hubs), key=len)
    return Totals(
        accepted=sum(node.accepted for node in nodes),
        refused=refused,
        merges=sum(max(version - 1, 0) for version in versions),
        versions=versions,
        bytes_up=sum(gained(up) for up in by_node(longest, "bytes_up").values()),
        bytes_down=sum(gained(down) for down in by_node(longest, "bytes_down").values()),
        excluded=tuple(sorted({(node.name, node.excluded) for node in nodes if node.excluded})),
        founder=", ".join(sorted(founders)),
        anchor_bytes=sum(hub.anchor_bytes for hub in last if hub.founder is not None),
    )


def by_node(lines: Iterable[HubSample], field: str) -> dict[int, list[float]]:
    """Return a value per node and line; lines without a report of the node are skipped."""
    found: dict[int, list[float]] = {}
    for line in lines:
        for node in line.nodes:
            if node.reports:
                found.setdefault(node.node, []).append(getattr(node, field))
    return found


def gained(counts: Sequence[float]) -> float:
    """Return the total of a counter that restarts at 0 with its process."""
    total = before = 0.0
    for count in counts:
        total += count - before if count >= before else count
        before = count
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSample:
    """One live peer, as another one knows it."""

    name: str
    address: str = ""
    """HOST:PORT; empty for a client."""
    owns: tuple[int, ...] = ()
    """Parts that it owns."""
    keeps: tuple[int, ...] = ()
    """Parts that it follows."""
    state: str = ""
    role: str = ""
    """What it does: `trains`, `keeps parts` or both."""
    steps_per_s: float = 0.0
    """Speed of its node; 0 if it is unknown."""
    model: str = ""
    """Digest of what its node trains; empty without a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSample:
    """One part of the model, as its owner reports; all unknown while no owner answers."""

    owner: str = ""
    """HOST:PORT."""
    in_sync: int = 0
    """Followers that confirm each acknowledged push."""
    hub: HubSample | None
    bytes_in: float = 0.0
    """Bytes of pushes that the owner has received since it began to lead."""
    bytes_out: float = 0.0
    """Bytes of anchors that it has given."""
    digest: str = ""
    """Digest of the newest anchors that it has given; empty before it has given all units of the part."""
    trouble: str
    """Fault or former fault of the part, as reported by the peer that was asked; "" without one."""


@dataclass(frozen=True, slots=True)
class SwarmSample:
    """Peers and parts at one time."""

    peers: tuple[PeerSample, ...]
    parts: tuple[PartSample, ...]

    @staticmethod
    def of(status: Mapping[str, Any]) -> "SwarmSample":
        """Return the state in a reply to `status`."""
        troubles = (status.get("troubles") or ())[: len(status["parts"])]
        parts = []
        for line, trouble in zip_longest(status["parts"], troubles):
            own = line or {}
            known = {**(own.get("traffic") or {}), "owner": own.get("owner"), "in_sync": own.get("in_sync")}
            hub = None if line is None else HubSample.of(line)
            parts.append(record_of(PartSample, known, hub=hub, trouble=text(trouble)))
        return SwarmSample(tuple(record_of(PeerSample, peer) for peer in status["peers"]), tuple(parts))

    @property
    def hub(self) -> HubSample | None:
        """Return the state of the first part whose owner answers: all nodes take part in each."""
        return next((part.hub for part in self.parts if part.hub is not None), None)
