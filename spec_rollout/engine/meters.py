"""Measurements of a step of the engine and of all steps."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from aedit.spec_rollout.choose import bucket
from aedit.spec_rollout.drafters import OFF, Arm
from aedit.spec_rollout.sampling import Rollout


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Result of one step. rollouts[i] has got counts[i] tokens, the last ones of its lists."""

    rollouts: tuple[Rollout, ...] = ()
    """Rollouts of rows 0 .. B - 1 before the step; empty if there was nothing to do."""
    counts: tuple[int, ...] = ()
    """Number of new tokens of each row, at least 1."""
    finished: tuple[Rollout, ...] = ()
    """Those of the rollouts that have ended."""
    arm: Arm = OFF
    nodes: int = 0
    """Drafted nodes per row that were verified."""
    accepted: tuple[int, ...] = ()
    """Accepted drafted nodes of each row, including those beyond the end of the rollout."""
    total_s: float = 0.0
    """Wall time."""
    cost_s: float = 0.0
    """Processor time on a CPU, device time on CUDA."""
    draft_s: float = 0.0
    """The part of `cost_s` that drafting took."""


@dataclass(slots=True)
class _Steps:
    """Steps at about as many rows."""

    total_s: float = 0.0
    plain_steps: float = 0.0
    """Steps that plain decoding takes for their tokens: tokens per row."""
    timed_s: float = 0.0
    """Time of those that had no drafts."""
    num_timed: int = 0

    @property
    def as_plain_s(self) -> float:
        """Return the time that plain decoding takes for these steps' tokens."""
        return self.plain_steps * self.timed_s / self.num_timed


@dataclass(slots=True)
class SpeedUp:
    """Comparison of all steps with those that had no drafts, at as many rows (`bucket`).

    A batch has many rows at first and few at its end, and the chooser of the arm decodes plainly rather with
    many: tokens per second of all plain steps would be another workload's.
    """

    _by_rows: defaultdict[int, _Steps] = field(default_factory=lambda: defaultdict(_Steps))

    def add(self, rows: int, tokens: int, total_s: float, *, plain: bool) -> None:
        """Count a step of so many rows that has made these tokens."""
        if not rows:
            return
        steps = self._by_rows[bucket(rows)]
        steps.total_s += total_s
        steps.plain_steps += tokens / rows
        if plain:
            steps.timed_s += total_s
            steps.num_timed += 1

    def figures(self) -> Mapping[str, float]:
        """Return `compared_s`, the time of steps at numbers of rows for which a plain step was timed.

        And `as_plain_s`, the time that plain decoding takes for their tokens. Both are 0 before a plain step.
        """
        known = [steps for steps in self._by_rows.values() if steps.num_timed]
        return {
            "compared_s": sum(steps.total_s for steps in known),
            "as_plain_s": sum(steps.as_plain_s for steps in known),
        }


@dataclass(slots=True)
class Meters:
    """Counters of all steps. A pass is one sample going through the policy in one step."""

    num_steps: int = 0
    num_passes: int = 0
    num_tokens: int = 0
    num_finished: int = 0
    total_s: float = 0.0
    cost_s: float = 0.0
    draft_s: float = 0.0
    plain_s: float = 0.0
    plain_tokens: int = 0
    """Of steps without drafts."""
    arms: Counter[str] = field(default_factory=Counter)
    """Number of steps by arm."""
    speed_up: SpeedUp = field(default_factory=SpeedUp)
    _reached: list[int] = field(default_factory=list)
    """At [n - 1], passes with n or more drafted nodes on a path."""
    _accepted: list[int] = field(default_factory=list)
    """At [n - 1], passes with n or more accepted nodes."""

    def add(self, step: Step) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_passes += len(step.counts)
        self.num_tokens += sum(step.counts)
        self.num_finished += len(step.finished)
        self.total_s += step.total_s
        self.cost_s += step.cost_s
        self.draft_s += step.draft_s
        if step.arm.is_off:
            self.plain_s += step.total_s
            self.plain_tokens += sum(step.counts)
        self.arms[str(step.arm)] += 1
        self.speed_up.add(len(step.counts), sum(step.counts), step.cost_s, plain=step.arm.is_off)
        if step.nodes:
            self._add_draft(min(step.nodes, step.arm.depth), step.accepted)

    def _add_draft(self, depth: int, accepted: Sequence[int]) -> None:
        missing = depth - len(self._reached)
        if missing > 0:
            self._reached += [0] * missing
            self._accepted += [0] * missing
        for i in range(depth):
            self._reached[i] += len(accepted)
        for count in accepted:
            for i in range(count):
                self._accepted[i] += 1

    def status(self) -> dict[str, object]:
        """Return the figures by name.

        `tokens_per_s` and `accepted_length` (tokens per pass) are 0 before the first step.
        `accepted_by_position[i]` is the share, of passes that drafted i + 1 tokens or more in a path, whose
        first i + 1 tokens were accepted.
        """
        return {
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "finished": self.num_finished,
            "tokens_per_s": self.num_tokens / self.total_s if self.total_s else 0.0,
            "accepted_length": self.num_tokens / self.num_passes if self.num_passes else 0.0,
            "accepted_by_position": [a / r for a, r in zip(self._accepted, self._reached, strict=True)],
            "draft_share": self.draft_s / self.cost_s if self.cost_s else 0.0,
            "arms": dict(self.arms),
        }


class Stopwatch:
    """Timer from its construction to `stop`.

    It measures time of `clock` on a CPU, and device time on CUDA, as the host runs ahead of the device.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._clock, self._events = clock, None
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events[0].record()
        self._began_s = self._ended_s = clock()

    def stop(self) -> None:
        """Record the end."""
        self._ended_s = self._clock()
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Return the measured seconds. On CUDA it waits until the device has reached the end."""
        if self._events is None:
            return self._ended_s - self._began_s
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


DECAY = 0.99
"""Weight of a step's measurement after each further step."""
OUTLIER_FACTOR = 4.0
"""Measurements are clipped to this multiple of the expected time."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Speed of an engine: with B running samples each gets a token every fixed_s + B * row_s seconds."""

    fixed_s: float
    row_s: float
    prefill_s: float
    """Seconds per token that is computed again."""

    def token_s(self, live: int) -> float:
        """Return the seconds per token of each sample."""
        return self.fixed_s + live * self.row_s


class SpeedMeter:
    """Estimate of an engine's speed from its steps.

    Least squares with decay of the seconds per token over the number of running samples.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, B, B^2, y, B y

    def add(self, live: int, token_s: float) -> None:
        """Add a step with `live` running samples that took `token_s` seconds per token of a sample."""
        current = self.speed()
        if current is not None:
            token_s = min(token_s, OUTLIER_FACTOR * current.token_s(live))
        terms = (1.0, live, live * live, token_s, live * token_s)
        self._sums = [DECAY * old + more for old, more in zip(self._sums, terms, strict=True)]

    def speed(self) -> EngineSpeed | None:
        """Return the estimate, or None before the first step.

        Computing a token again costs at most what one more sample costs.
        """
        count, b, bb, y, by = self._sums
        if not count:
            return None
        spread = bb * count - b * b
        slope = max(0.0, (by * count - b * y) / spread) if spread > 1e-6 * bb * count else 0.0
        slope = min(slope, y / b)
        return EngineSpeed((y - slope * b) / count, slope, slope)
