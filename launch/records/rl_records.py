"""Records of reinforcement learning and of rollout servers, from metrics, events and `status`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

from aedit.launch.records.values import Line, counts, number, text
from aedit.types import RL_REPORT

_NEWEST = (
    "reward",
    "solved",
    "mismatch_kl",
    "mismatch_kl_masked",
    "mismatch_kl_unmasked",
    "reference_kl",
    "clip_share",
    "entropy",
    "length",
    "length_max",
    "staleness",
    "staleness_max",
)
_TOTALS = (
    "groups",
    "rollouts",
    "no_signal",
    "retried",
    "excluded",
    "rollout_tokens",
    "rollout_s",
    "worker_s",
    "reward_s",
    "train_s",
    "supervised_steps",
    "compared_s",
    "as_plain_s",
    "passes",
    "idle_used_s",
)
_OF_DRAFTER = ("steps", "published", "adopted", "refused", "accepted_length", "version")
KEY_FILE = "signing.key"
"""File with a server's key in its folder. Folders of nodes and hubs do not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterMetric:
    """State of a node's drafter. NaN where unknown."""

    steps: float
    """Training steps so far."""

    published: float
    adopted: float
    """Published drafters that the engine has taken."""

    refused: float
    """Trained drafters that the gate has refused."""

    accepted_length: float
    version: float

    @staticmethod
    def of(value: object) -> "DrafterMetric | None":
        """Return the state in `rl.drafter`; None if the node has no trained drafter."""
        if not isinstance(value, Mapping) or not value:
            return None
        return DrafterMetric(**{name: number(value.get(name)) for name in _OF_DRAFTER})


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
        """Return the evidence in one line."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RLMetric:
    """State of one node's reinforcement learning. NaN where unknown.

    Seconds, tokens and counts are running totals, all else is of the newest batch.
    """

    reward: float
    """Mean over rollouts."""

    solved: float
    """Share of rollouts whose reward reaches `reward.solved`."""

    mismatch_kl: float
    """Estimate of KL(behaviour || trainer), in nats per token."""

    mismatch_kl_masked: float
    """The same over tokens that the loss has clipped."""

    mismatch_kl_unmasked: float
    """The same over the others."""

    reference_kl: float
    """KL divergence to the policy at the start, with `rl.kl` above 0."""

    clip_share: float
    """Share of tokens that the loss has clipped."""

    entropy: float
    length: float
    """Mean tokens per rollout."""

    length_max: float
    staleness: float
    """Policy versions between generation and training, mean over tokens or rollouts."""

    staleness_max: float

    groups: float
    """Groups trained or left out."""

    rollouts: float
    no_signal: float
    """Groups whose rewards were all equal."""

    retried: float
    """Rollouts generated again."""

    excluded: float
    """Rollouts whose reward is None."""

    rollout_tokens: float
    rollout_s: float
    """Seconds of generation, or of waiting for the processes that generate."""

    worker_s: float
    """Seconds in which those processes have generated, mean over them; 0 without."""

    reward_s: float
    """Seconds of waiting for rewards after the last rollout."""

    train_s: float
    supervised_steps: float
    compared_s: float
    """Seconds of steps of the engine at numbers of rows for which steps without drafts were timed."""

    as_plain_s: float
    """Seconds in which steps without drafts make their tokens."""

    passes: float
    """Passes of one sample through the policy."""

    idle_used_s: float
    """Processor time of idle work."""

    arms: Mapping[str, float] = field(default_factory=dict)
    """Steps of the engine by arm."""

    idle_s: Mapping[str, float] = field(default_factory=dict)
    """Waiting by cause."""

    drafter: DrafterMetric | None = None
    servers: Mapping[str, ServerWork] = field(default_factory=dict)
    """Work of each rollout server for the node's first rank."""

    @property
    def generation_s(self) -> float:
        """Return the seconds of generation, also of the part in which nothing waited."""
        return self.worker_s if self.worker_s > 0 else self.rollout_s

    @staticmethod
    def of(value: object) -> "RLMetric | None":
        """Return the state in `rl` of a line of metrics; None if the line has none."""
        if not isinstance(value, Mapping):
            return None
        return RLMetric(
            **{name: number(value.get(name)) for name in (*_NEWEST, *_TOTALS)},
            arms=counts(value.get("arms")),
            idle_s=counts(value.get("idle_s")),
            drafter=DrafterMetric.of(value.get("drafter")),
            servers=ServerWork.by_name(value.get("servers")),
        )

    def report(self) -> dict[str, float]:
        """Return the finite values that a node reports to its hub, by names of `RL_REPORT`."""
        named = {name: getattr(self, name) for name in (*_NEWEST, *_TOTALS)}
        named["rollout_s"] = self.generation_s
        named |= {f"idle_s/{cause}": seconds for cause, seconds in self.idle_s.items()}
        for arm, steps in self.arms.items():
            drafter = arm.partition(":")[0]
            name = f"arms/{drafter}" if f"arms/{drafter}" in RL_REPORT else "arms/other"
            named[name] = named.get(name, 0.0) + steps
        return {name: named[name] for name in RL_REPORT if isfinite(named.get(name, nan))}


@dataclass(frozen=True, slots=True)
class RLEvalEvent:
    """Greedy answers to held-out problems."""

    t: float
    step: float
    round: int
    solved: float
    """Share of the problems."""

    reward: float
    length: float
    """Mean tokens per answer."""

    problems: float

    @staticmethod
    def of(line: Line) -> "RLEvalEvent":
        """Return the values of an `rl_eval` event."""
        return RLEvalEvent(
            float(line["t"]),
            int(line["step"]),
            int(line.get("round") or 0),
            *(number(line.get(name)) for name in ("solved", "reward", "length", "problems")),
        )


def reward_error(line: Line) -> str:
    """Return a `reward_error` event as text: the function, `file:number`, the sample and the message."""
    place = f" ({Path(str(line['line'])).name})" if line.get("line") else ""
    sample = f", sample {line['sample']}" if line.get("sample") is not None else ""
    return f"{line.get('function')}{place}{sample}: {line.get('message')}"


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
