"""Lines of metrics and events as frozen values, and how any such line becomes a record.

`record_of` reads a field by its type. A field without a default is needed: one of `BAD_LINE` is raised if its
value is missing or unusable. Any other value that is missing, null or no number gives the default.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from aedit.types import RL_REPORT, printable

Line = Mapping[str, Any]
R = TypeVar("R")

BAD_LINE = (KeyError, TypeError, ValueError, OverflowError, AttributeError)
"""Exceptions of reading a line of another program."""
KEY_FILE = "signing.key"
"""File with a server's key in its folder. Folders of nodes and hubs do not have it."""
IN_WAIT = "in a wait"
"""Text of a notice of an evaluation after which the node goes on waiting."""
DRAFTER = ("steps", "published", "adopted", "refused", "accepted_length", "version", "starved", "rests")


def text(value: object) -> str:
    """Return the value as text without control characters, which peers may have chosen; "" for null."""
    return "" if value is None else printable(str(value))


def float_or_nan(value: object) -> float:
    """Return the value as a float; NaN for null, text and any other value that is not a number."""
    return float(value) if isinstance(value, int | float) else nan


def _counts(value: object) -> dict[str, float]:
    """Return the numbers of an object by name, without those that are not numbers; {} if it is no object."""
    known = value.items() if isinstance(value, Mapping) else ()
    return {str(name): float(each) for name, each in known if isinstance(each, int | float)}


def _floats(values: object) -> tuple[float, ...]:
    """Return the values of a list as floats, NaN for each that is not a number; () for what is no list."""
    if not isinstance(values, list):
        return ()
    return tuple(values) if {*map(type, values)} == {float} else tuple(map(float_or_nan, values))


_READ: dict[Any, Callable[[Any], Any]] = {
    float: float_or_nan,
    int: lambda value: int(value or 0),
    str: text,
    bool: bool,
    tuple[int, ...]: lambda values: tuple(map(int, values or ())),
    tuple[str, ...]: lambda values: tuple(map(text, values or ())),
    tuple[float, ...]: _floats,
    Mapping[str, float]: _counts,
    Mapping[str, int]: lambda values: {text(name): int(each) for name, each in (values or {}).items()},
    Mapping[str, Any]: lambda values: values if isinstance(values, Mapping) else {},
    Mapping[str, Mapping[str, float]]: lambda values: (
        {text(name): _counts(each) for name, each in values.items()} if isinstance(values, Mapping) else {}
    ),
}
"""Reader of a value by the type of its field; other fields are given to `record_of`."""


@cache
def _readers(cls: type) -> tuple[tuple[str, str, bool, Any, Callable[[Any], Any]], ...]:
    """Return name, key, need, type of values that are taken as they are, and reader of others, of each field.

    That is of each that `record_of` reads.
    """
    found = []
    hints = get_type_hints(cls)
    for each in fields(cls):
        needed = each.default is MISSING and each.default_factory is MISSING
        hint = hints[each.name]
        read = float if needed and hint is float else int if needed and hint is int else _READ.get(hint)
        if read is not None:
            exact = hint if hint in (float, int, bool) else None
            found.append((each.name, each.metadata.get("key", each.name), needed, exact, read))
    return tuple(found)


def record_of(cls: type[R], line: Line, **own: Any) -> R:
    """Return a record of `cls` from a parsed line. own: fields that are not read from it by their type."""
    hashable: Any = cls
    for name, key, needed, exact, read in _readers(hashable):
        if name in own:
            continue
        value = line.get(key)
        if type(value) is exact:
            own[name] = value
        # Empty text gives the default as well.
        elif value is not None and (value != "" or needed):
            own[name] = read(value)
        elif needed:
            raise KeyError(f"{key} is missing or null")
    return cls(**own)


def under(key: str, **default: Any) -> Any:
    """Return a field whose value has this key in a line."""
    return field(metadata={"key": key}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLMetric:
    """State of one node's reinforcement learning. NaN where unknown.

    Seconds, tokens and counts are running totals, all else is of the newest batch.
    """

    reward: float = nan
    """Mean over rollouts."""

    solved: float = nan
    """Share of rollouts whose reward reaches `reward.solved`."""

    mismatch_kl: float = nan
    """Estimate of KL(behaviour || trainer), in nats per token."""

    mismatch_kl_masked: float = nan
    """The same over tokens that the loss has clipped."""

    mismatch_kl_unmasked: float = nan
    """The same over the others."""

    reference_kl: float = nan
    """KL divergence to the policy at the start, with `rl.kl` above 0."""

    clip_share: float = nan
    """Share of tokens that the loss has clipped."""

    entropy: float = nan
    length: float = nan
    """Mean tokens per rollout."""

    length_max: float = nan
    staleness: float = nan
    """Policy versions between generation and training, mean over tokens or rollouts."""

    staleness_max: float = nan
    groups: float = nan
    """Groups trained or left out."""

    rollouts: float = nan
    no_signal: float = nan
    """Groups whose rewards were all equal."""

    retried: float = nan
    """Rollouts generated again."""

    excluded: float = nan
    """Rollouts whose reward is None."""

    digest: float = nan
    """Sum of a checksum of each trained rollout; equal in runs whose rollouts are equal."""

    rollout_tokens: float = nan
    rollout_s: float = nan
    """Seconds of generation, or of waiting for the processes that generate."""

    worker_s: float = nan
    """Seconds in which those processes have generated, mean over them; 0 without."""

    worker_idle_s: float = nan
    """Seconds in which they had no sample since their first one, mean over them: `rl.max_staleness` admitted
    no more, or others had the last ones."""

    reward_s: float = nan
    """Seconds of waiting for rewards after the last rollout."""

    train_s: float = nan
    supervised_steps: float = nan
    compared_s: float = nan
    """Cost in seconds of steps of the engine at numbers of rows for which steps without drafts were timed."""

    as_plain_s: float = nan
    """Seconds in which steps without drafts make their tokens."""

    as_plain_error_s: float = nan
    """Standard error of `as_plain_s`, over pairs of stretches of steps with and without drafts."""

    drafting_bound: float = nan
    """Speed-up over plain decoding if every draft were accepted, of the first rank; NaN if not measured."""

    passes: float = nan
    """Passes of one sample through the policy."""

    idle_used_s: float = nan
    """Processor time of idle work."""

    idle_usable_s: float = nan
    """Seconds of the waits in which a drafter's trainer was let run."""

    arms: Mapping[str, float] = field(default_factory=dict)
    """Steps of the engine by arm."""

    idle_s: Mapping[str, float] = field(default_factory=dict)
    """Waiting by cause."""

    used_s: Mapping[str, float] = field(default_factory=dict)
    """Processor time of the drafter's trainer by the cause of the wait that it used."""

    pool: Mapping[str, float] = field(default_factory=dict)
    """Samples that nodes of one world generate for each other: `given` to others, `moved`: of these, those
    that had begun, `received` from them, `taken_back` as they were late, `helped`: generated for others in
    `helped_s` seconds; and the tokens, messages and bytes. Empty without a pool."""

    drafter: Mapping[str, float] = field(default_factory=dict)
    """State of the node's drafter by `DRAFTER`, NaN where unknown; empty if it has no trained one: training
    steps so far, published drafters and those that the engine has taken, trained ones that the gate has
    refused; `starved` is 1 while its trainer gets hardly any processor time, `rests` while it leaves waits
    unused, as its last drafters were not better."""

    servers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Work of each rollout server for the node's first rank, since the node's process began: `tokens`,
    `samples` finished, samples `taken_back` and finished elsewhere, ended connections (`losses`), and those
    that ended because of what the server sent (`violations`)."""

    @property
    def generation_s(self) -> float:
        """Return the seconds of generation, also of the part in which nothing waited."""
        return self.worker_s if self.worker_s > 0 else self.rollout_s

    @staticmethod
    def of(value: object) -> "RLMetric | None":
        """Return the state in `rl` of a line of metrics; None if the line has none."""
        if not isinstance(value, Mapping):
            return None
        own = value.get("drafter")
        known = own if isinstance(own, Mapping) else {}
        drafter = {name: float_or_nan(known.get(name)) for name in DRAFTER if known}
        return record_of(RLMetric, value, drafter=drafter)

    def report(self) -> dict[str, float]:
        """Return the finite values that a node reports to its hub, by names of `RL_REPORT`."""
        named = {"rollout_s": self.generation_s}
        named |= {f"idle_s/{cause}": seconds for cause, seconds in self.idle_s.items()}
        for arm, steps in self.arms.items():
            drafter = arm.partition(":")[0]
            name = f"arms/{drafter}" if f"arms/{drafter}" in RL_REPORT else "arms/other"
            named[name] = named.get(name, 0.0) + steps
        known = ((name, named.get(name, getattr(self, name, nan))) for name in RL_REPORT)
        return {name: value for name, value in known if isfinite(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """State of one node, about once a second. Tokens and all seconds are running totals."""

    t: float
    """Seconds since the run began."""

    step: int
    round: int = 0
    tokens: float
    loss: float = nan
    """Mean training loss since the previous line, in nats per token."""

    lr: float = nan
    grad_norm: float = nan
    busy_s: float = nan
    """In training steps, including a simulated slowdown."""

    wait_s: float = nan
    """Waiting for other nodes."""

    idle_used_s: float = nan
    """Part of `wait_s` used by idle work."""

    other_s: float = nan
    """In evaluation and checkpoints."""

    progress: float = nan
    """Share of the run that is done, in [0, 1]."""

    rl: RLMetric | None = None
    """Reinforcement learning; None in a run on text."""

    drafter: Mapping[str, float] = field(default_factory=dict)
    """In a run on text, the state of the node's drafter: training steps so far, drafters that its gate has
    `published` and `refused`, and tokens per pass on held-out text (`accepted_length`); empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent:
    """Start of an attempt at `step`; later steps of earlier attempts are invalid."""

    t: float
    step: int = 0
    attempt: int = 0
    units: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """One round of one node. Tuples are per unit, NaN where a value is missing."""

    t: float
    id: int
    step: int
    bytes: float = nan
    norms: tuple[float, ...] = ()
    distrusted: tuple[int, ...] = ()
    """Units in which this node was distrusted."""

    effective_nodes: tuple[float, ...] = ()
    rolled_back: tuple[int, ...] = ()
    num_nodes: int = under("nodes", default=0)
    refused: tuple[int, ...] = ()
    """Units of which the hub refused this node's last push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEvent:
    """Loss on held-out text, or greedy answers to held-out problems."""

    t: float
    step: float
    round: int = 0
    loss: float = nan
    """In nats per token."""

    solved: float = nan
    """Share of the problems."""

    reward: float = nan
    length: float = nan
    """Mean tokens per answer."""

    problems: float = nan


@dataclass(frozen=True, slots=True)
class Notice:
    """Any event as text."""

    t: float
    event: str
    text: str

    @staticmethod
    def of(line: Line) -> "Notice":
        """Return any event as text."""
        message = line.get("message") or line.get("error") or line.get("reason") or ""
        if line.get("in_wait"):
            message = IN_WAIT
        if line["event"] == "heal":
            message = f"healed at round {line.get('round')} from node {line.get('from_node')}"
        if line["event"] == "reward_error":  # function, `file:number`, sample, message
            place = f" ({Path(str(line['line'])).name})" if line.get("line") else ""
            sample = f", sample {line['sample']}" if line.get("sample") is not None else ""
            message = f"{line.get('function')}{place}{sample}: {line.get('message')}"
        return Notice(float(line["t"]), text(line["event"]), text(message))
