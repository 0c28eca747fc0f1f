"""Records of rollout servers as frozen values, from a hub's lines, its events, or its reply to `status`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from aedit.launch.records.values import Line, counts, number, text

KEY_FILE = "signing.key"
"""File with a server's key in its folder. Folders of nodes and hubs do not have it."""


@dataclass(frozen=True, slots=True)
class ServerSample:
    """State of one rollout server at one time, from the hub's directory."""

    name: str
    address: str
    role: str
    state: str
    live: bool
    lag: float
    """Versions of the policy that it is behind the hub."""

    tokens_per_s: float
    """Speed of late, as the server says."""

    running: float
    waiting: float
    idle_s: float
    """Time without a request, since its process began."""

    idle_used_s: float
    """Part of `idle_s` in which it trained the drafter."""

    accused: Mapping[str, float]
    """Number of accusations by node."""

    reason: str
    """Reason of the last accusation."""

    banned: str
    """Reason of the ban; empty if there is none."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Evidence of the last accusation."""

    @staticmethod
    def of(line: Line) -> "ServerSample":
        """Return the state in one entry of `servers` of a hub's line."""
        evidence = line.get("evidence")
        return ServerSample(
            name=text(line["name"]),
            address=text(line.get("address")),
            role=text(line.get("role") or "rollout"),
            state=text(line.get("state") or "?"),
            live=bool(line.get("live")),
            lag=number(line.get("lag")),
            tokens_per_s=number(line.get("tokens_per_s")),
            running=number(line.get("running")),
            waiting=number(line.get("waiting")),
            idle_s=number(line.get("idle_s")),
            idle_used_s=number(line.get("idle_used_s")),
            accused=counts(line.get("accused")),
            reason=text(line.get("reason")),
            banned=text(line.get("banned")),
            evidence=evidence if isinstance(evidence, Mapping) else {},
        )

    @property
    def evidence_line(self) -> str:
        """Return the evidence in one line for a person."""
        return ", ".join(f"{text(name)} {text(value)}" for name, value in self.evidence.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWork:
    """Work of one rollout server for one node, as the node counts it, since the node's process began."""

    tokens: float
    samples: float
    """Samples that it has finished."""

    taken_back: float
    """Samples that were taken from it and finished elsewhere."""

    losses: float
    """Connections that have ended."""

    violations: float
    """Connections that ended because of what it sent."""

    @staticmethod
    def by_name(value: object) -> "dict[str, ServerWork]":
        """Return the servers in `rl.servers` of a line of metrics; {} if it has none."""
        known = value.items() if isinstance(value, Mapping) else ()
        found = {}
        for name, figures in known:
            finite = {each: count for each, count in counts(figures).items() if isfinite(count)}
            found[text(name)] = ServerWork(**{each: finite.get(each, 0.0) for each in ServerWork.__slots__})
        return found


def with_evidence(
    servers: Iterable[ServerSample], known: Mapping[str, Mapping[str, Any]]
) -> tuple[ServerSample, ...]:
    """Return the servers, those without evidence with what is known of theirs by name."""
    return tuple(
        server
        if server.evidence or not server.accused
        else replace(server, evidence=known.get(server.name, {}))
        for server in servers
    )
