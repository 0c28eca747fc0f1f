"""Records of hubs and swarms as frozen values, read from their folders or from a reply to `status`.

Values that a node reports (`steps`, seconds, bytes) count from the start of its process and are 0 before its
first report; counts of the hub (`accepted`, `refused`) start with the run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aedit.launch.records.records import Notice
from aedit.launch.records.rl_records import RLMetric, ServerSample, with_evidence
from aedit.launch.records.values import Line, number, text

JOURNAL = ("bytes", "past_bytes")


@dataclass(frozen=True, slots=True)
class NodeSample:
    """State of one node at one time, from its hub."""

    node: int
    name: str
    state: str
    steps: float
    steps_per_s: float
    pace_steps: float
    """Inner steps before the next push, as set by the hub."""

    busy_s: float
    wait_s: float
    """Waiting for the hub: transfer time not overlapped with training."""

    wire_s: float
    """Time of pushes and pulls, overlapped or not."""

    bytes_up: float
    bytes_down: float
    weight: float
    """Merge weight of its last push."""

    staleness: float
    """Versions between the base of its last push and the merge."""

    accepted: int
    refused: Mapping[str, int]
    """Number of refused pushes by reason."""

    rl: RLMetric | None = None
    """Reinforcement learning; None in a run on text."""

    @staticmethod
    def of(line: Line) -> "NodeSample":
        """Return the state in one entry of `nodes` of a hub's line."""
        refused = line.get("refused") or {}
        return NodeSample(
            node=int(line["node"]),
            name=text(line.get("name") or line["node"]),
            state=text(line.get("state") or "?"),
            steps=number(line.get("steps")),
            steps_per_s=number(line.get("steps_per_s")),
            pace_steps=number(line.get("pace_steps")),
            busy_s=number(line.get("busy_s")),
            wait_s=number(line.get("wait_s")),
            wire_s=number(line.get("wire_s")),
            bytes_up=number(line.get("bytes_up")),
            bytes_down=number(line.get("bytes_down")),
            weight=number(line.get("weight")),
            staleness=number(line.get("staleness")),
            accepted=int(line.get("accepted") or 0),
            refused={text(reason): int(count) for reason, count in refused.items()},
            rl=RLMetric.of(line.get("rl")),
        )

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


@dataclass(frozen=True, slots=True)
class HubSample:
    """State of one hub at one time."""

    t: float
    """Seconds since the start of the run, without outages of the hub."""

    term: int
    progress: float
    nodes: tuple[NodeSample, ...]
    versions: tuple[int, ...]
    """Newest anchor version of each unit that this hub owns."""

    pending: int
    """Number of pushes that wait for their quorum."""

    journal_bytes: float
    follows: str
    """HOST:PORT of the hub that leads, if this one is its standby."""

    founder: int | None = None
    """The node that uploaded the initial anchors; None while there are none."""

    anchor_bytes: float = 0.0
    """Size of the initial anchors of the units that this hub owns, as uploaded."""

    servers: tuple[ServerSample, ...] = ()
    """Rollout servers, which are no nodes."""

    left_out: int = 0
    """Number of nodes that the hub knows beside `nodes`: a line and a status are bounded."""

    @staticmethod
    def of(line: Line) -> "HubSample":
        """Return the state in a line of a hub's metrics, or in the reply to `status`."""
        units, journal = line.get("units") or (), line.get("journal") or {}
        versions = line.get("versions") or [unit["version"] for unit in units]
        age_s = line["elapsed_s"] if "elapsed_s" in line else line["t"]
        return HubSample(
            t=float(age_s),
            term=int(line.get("term") or 0),
            progress=number(line.get("progress")),
            nodes=tuple(NodeSample.of(node) for node in line.get("nodes") or ()),
            versions=tuple(int(version) for version in versions),
            pending=int(line.get("pending") or sum(unit["pending"] for unit in units)),
            journal_bytes=number(line.get("journal_bytes", sum(journal.get(k, 0) for k in JOURNAL))),
            follows=text(line.get("follows")),
            founder=None if line.get("founder") is None else int(line["founder"]),
            anchor_bytes=float(line.get("anchor_bytes") or 0.0),
            servers=tuple(ServerSample.of(server) for server in line.get("servers") or ()),
            left_out=int(line.get("nodes_left_out") or 0),
        )


def _as_of(said: NodeSample, node: NodeSample) -> NodeSample:
    """Return the values that the node reported last, with the hub's newest values about it."""
    return replace(
        said,
        state=node.state,
        weight=node.weight,
        staleness=node.staleness,
        accepted=node.accepted,
        refused=node.refused,
    )


@dataclass(frozen=True, slots=True)
class HubRecords:
    """Records of one hub and of its standby, ordered by term, then by time."""

    lines: tuple[HubSample, ...]
    notices: tuple[Notice, ...]
    """Exclusions and changes of the leading hub."""

    evidence: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Evidence of the last accusation of a rollout server, by its name."""

    @property
    def last(self) -> HubSample:
        """Return the newest line, in which nodes without a current report have their last one.

        Needs a line.
        """
        newest, said = self.lines[-1], dict[int, NodeSample]()
        for line in reversed(self.lines):
            said |= {n.node: n for n in line.nodes if n.reports and n.node not in said}
            if len(said) == len(newest.nodes):
                break
        nodes = tuple(_as_of(said.get(node.node, node), node) for node in newest.nodes)
        return replace(newest, nodes=nodes, servers=with_evidence(newest.servers, self.evidence))


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


@dataclass(frozen=True, slots=True)
class PeerSample:
    """One live peer, as another one knows it."""

    name: str
    address: str
    """HOST:PORT; empty for a client."""
    owns: tuple[int, ...]
    """Parts that it owns."""
    keeps: tuple[int, ...]
    """Parts that it follows."""
    state: str
    role: str = ""
    """What it does: `trains`, `keeps parts` or both."""
    steps_per_s: float = 0.0
    """Speed of its node; 0 if it is unknown."""
    model: str = ""
    """Digest of what its node trains; empty without a node."""

    @staticmethod
    def of(line: Line) -> "PeerSample":
        """Return the peer in one entry of `peers`."""
        return PeerSample(
            name=text(line["name"]),
            address=text(line.get("address")),
            owns=tuple(int(part) for part in line.get("owns") or ()),
            keeps=tuple(int(part) for part in line.get("keeps") or ()),
            state=text(line.get("state")),
            role=text(line.get("role")),
            steps_per_s=number(line.get("steps_per_s") or 0.0),
            model=text(line.get("model")),
        )


@dataclass(frozen=True, slots=True)
class PartSample:
    """One part of the model, as its owner reports; all unknown while it has none that answers."""

    owner: str = ""
    """HOST:PORT."""
    in_sync: int = 0
    """Followers that confirm each acknowledged push."""
    hub: HubSample | None = None
    bytes_in: float = 0.0
    """Bytes of pushes that the owner has received since it began to lead."""
    bytes_out: float = 0.0
    """Bytes of anchors that it has given."""
    digest: str = ""
    """Digest of the newest anchors that it has given; empty before it has given all units of the part."""
    trouble: str = ""
    """Fault or former fault of the part, as reported by the peer that was asked; "" without one."""

    @staticmethod
    def of(line: Line | None, trouble: str = "") -> "PartSample":
        """Return the part in one entry of `parts`."""
        if line is None:
            return PartSample(trouble=trouble)
        in_sync = int(line.get("in_sync") or 0)
        traffic = line.get("traffic") or {}
        return PartSample(
            owner=text(line.get("owner")),
            in_sync=in_sync,
            hub=HubSample.of(line),
            bytes_in=number(traffic.get("bytes_in") or 0),
            bytes_out=number(traffic.get("bytes_out") or 0),
            digest=text(traffic.get("digest")),
            trouble=trouble,
        )


@dataclass(frozen=True, slots=True)
class SwarmSample:
    """Peers and parts at one time."""

    peers: tuple[PeerSample, ...]
    parts: tuple[PartSample, ...]

    @staticmethod
    def of(said: Mapping[str, Any]) -> "SwarmSample":
        """Return the state in a reply to `status`."""
        troubles = list(map(text, said.get("troubles") or ()))
        troubles += [""] * (len(said["parts"]) - len(troubles))
        return SwarmSample(
            tuple(PeerSample.of(peer) for peer in said["peers"]),
            tuple(PartSample.of(*both) for both in zip(said["parts"], troubles, strict=False)),
        )

    @property
    def hub(self) -> HubSample | None:
        """Return the state of the first part whose owner answers: all nodes take part in each."""
        return next((part.hub for part in self.parts if part.hub is not None), None)
