"""Lines of `metrics.jsonl` and `events.jsonl` as frozen values.

Each `of` converts one parsed line and raises KeyError, TypeError, ValueError or OverflowError if a value is
missing that the views need; any other value that is missing, null or not a number becomes NaN or empty.
"""

from dataclasses import dataclass

from aedit.launch.records.rl_records import RLMetric, reward_error
from aedit.launch.records.values import Line, number, numbers, text


@dataclass(frozen=True, slots=True)
class Metric:
    """State of one node, about once a second. Tokens and all seconds are running totals."""

    t: float
    """Seconds since the run began."""

    step: int
    round: int
    tokens: float
    loss: float
    """Mean training loss since the previous line, in nats per token."""

    lr: float
    grad_norm: float
    busy_s: float
    """In training steps, including a simulated slowdown."""

    wait_s: float
    """Waiting for other nodes."""

    idle_used_s: float
    """Part of `wait_s` used by idle work."""

    other_s: float
    """In evaluation and checkpoints."""

    progress: float
    """Share of the run that is done, in [0, 1]."""

    rl: RLMetric | None = None
    """Reinforcement learning; None in a run on text."""

    @staticmethod
    def of(line: Line) -> "Metric":
        """Return the values of a line of `metrics.jsonl`."""
        return Metric(
            t=float(line["t"]),
            step=int(line["step"]),
            round=int(line.get("round") or 0),
            tokens=float(line["tokens"]),
            loss=number(line.get("loss")),
            lr=number(line.get("lr")),
            grad_norm=number(line.get("grad_norm")),
            busy_s=number(line.get("busy_s")),
            wait_s=number(line.get("wait_s")),
            idle_used_s=number(line.get("idle_used_s")),
            other_s=number(line.get("other_s")),
            progress=number(line.get("progress")),
            rl=RLMetric.of(line.get("rl")),
        )


@dataclass(frozen=True, slots=True)
class StartEvent:
    """Start of an attempt at `step`; later steps of earlier attempts are invalid."""

    t: float
    step: int
    attempt: int
    device: str
    ranks: int
    params: float
    units: tuple[str, ...]

    @staticmethod
    def of(line: Line) -> "StartEvent":
        """Return the values of a `start` event."""
        return StartEvent(
            t=float(line["t"]),
            step=int(line.get("step") or 0),
            attempt=int(line.get("attempt") or 0),
            device=str(line.get("device") or "?"),
            ranks=int(line.get("ranks") or 1),
            params=number(line.get("params")),
            units=tuple(str(unit) for unit in line.get("units") or ()),
        )


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """One round of one node. Tuples are per unit, NaN where a value is missing."""

    t: float
    id: int
    step: int
    bytes: float
    norms: tuple[float, ...]
    distrusted: tuple[int, ...]
    """Units in which this node was distrusted."""

    effective_nodes: tuple[float, ...]
    rolled_back: tuple[int, ...]
    num_nodes: int
    refused: tuple[int, ...] = ()
    """Units of which the hub refused this node's last push."""

    @staticmethod
    def of(line: Line) -> "RoundEvent":
        """Return the values of a `round` or `round_refused` event."""
        return RoundEvent(
            t=float(line["t"]),
            id=int(line["id"]),
            step=int(line["step"]),
            bytes=number(line.get("bytes")),
            norms=numbers(line.get("norms")),
            distrusted=tuple(int(unit) for unit in line.get("distrusted") or ()),
            effective_nodes=numbers(line.get("effective_nodes")),
            rolled_back=tuple(int(unit) for unit in line.get("rolled_back") or ()),
            num_nodes=int(line.get("nodes") or 0),
            refused=tuple(int(unit) for unit in line.get("refused") or ()),
        )


@dataclass(frozen=True, slots=True)
class EvalEvent:
    """Loss on held-out text, in nats per token."""

    t: float
    step: float
    round: int
    loss: float

    @staticmethod
    def of(line: Line) -> "EvalEvent":
        """Return the values of an `eval` event."""
        return EvalEvent(
            float(line["t"]), int(line["step"]), int(line.get("round") or 0), number(line.get("loss"))
        )


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """A complete checkpoint on disk."""

    t: float
    step: int
    round: int
    seconds: float
    bytes: float

    @staticmethod
    def of(line: Line) -> "CheckpointEvent":
        """Return the values of a `checkpoint` event."""
        return CheckpointEvent(
            t=float(line["t"]),
            step=int(line["step"]),
            round=int(line["round"]),
            seconds=number(line.get("seconds")),
            bytes=number(line.get("bytes")),
        )


@dataclass(frozen=True, slots=True)
class Notice:
    """Any event as text."""

    t: float
    event: str
    text: str

    @staticmethod
    def of(line: Line) -> "Notice":
        """Return any event as text."""
        said = line.get("message") or line.get("error") or line.get("reason") or ""
        if line["event"] == "heal":
            said = f"healed at round {line.get('round')} from node {line.get('from_node')}"
        if line["event"] == "reward_error":
            said = reward_error(line)
        return Notice(float(line["t"]), text(line["event"]), text(said))
