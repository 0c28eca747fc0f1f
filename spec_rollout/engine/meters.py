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
    passes: tuple[int, ...] = ()
    """Passes of each row that have made them; empty: one each."""
    finished: tuple[Rollout, ...] = ()
    """Those of the rollouts that have ended."""
    arm: Arm = OFF
    nodes: int = 0
    """Drafted nodes per row that were verified; the mean, rounded up."""
    verified: tuple[int, ...] = ()
    """The same of each row; empty: `nodes` each."""
    accepted: tuple[int, ...] = ()
    """Accepted drafted nodes of each row, including those beyond the end of the rollout."""
    total_s: float = 0.0
    """Wall time."""
    cost_s: float = 0.0
    """Processor time on a CPU, device time on CUDA. It includes what the chooser took after the last step."""
    overhead_s: float = 0.0
    """The part of `cost_s` for choosing, and for drafters and sinks that follow the samples; 0 on CUDA."""
    draft_s: float = 0.0
    """The part of `cost_s` that drafting took."""


@dataclass(slots=True)
class _StepCosts:
    """Consecutive steps at about as many rows."""

    cost_s: float = 0.0
    steps: float = 0.0
    """Plain steps for the same tokens: tokens per row."""


@dataclass(slots=True)
class _Rows:
    """Stretches at about as many rows: plain, drafted, plain."""

    before: _StepCosts = field(default_factory=_StepCosts)
    drafted: _StepCosts = field(default_factory=_StepCosts)
    after: _StepCosts = field(default_factory=_StepCosts)
    compared_s: float = 0.0
    """Cost of all plain steps, with choosing and collecting."""
    plain_s: float = 0.0
    """The same without."""

    def pair(self) -> tuple[float, float] | None:
        """Return the cost of the drafted stretch, and that of its tokens in plain steps beside it."""
        steps = self.before.steps + self.after.steps
        if not steps or not self.drafted.steps:
            return None
        plain_s = (self.before.cost_s + self.after.cost_s) / steps
        return self.drafted.cost_s, self.drafted.steps * plain_s


class SpeedUp:
    """Speed-up of all steps over decoding without a drafter, chooser or collection of features.

    Each stretch of drafted steps is compared with the plain steps before and after it at as many rows
    (`bucket`): texts grow, and machines change their speed. Costs of plain steps for choosing and collecting
    are taken off the reference, and count for the engine.
    """

    def __init__(self) -> None:
        self._by_rows: defaultdict[int, _Rows] = defaultdict(_Rows)
        self._pairs = [0.0] * 6  # number of pairs (x, y), and sums of x, y, x^2, x y, y^2

    def add(self, rows: int, tokens: int, cost_s: float, *, plain: bool, overhead_s: float = 0.0) -> None:
        """Count a step.

        Args:
            rows: Running rows.
            tokens: Tokens that it has made.
            cost_s: Its cost with everything.
            plain: Nothing was drafted.
            overhead_s: The part of the cost that an engine without drafters does not have.
        """
        if not rows:
            return
        at = self._by_rows[bucket(rows)]
        if plain:
            at.after.cost_s += cost_s - overhead_s
            at.after.steps += tokens / rows
            at.compared_s += cost_s
            at.plain_s += cost_s - overhead_s
            return
        if at.after.steps:
            if (pair := at.pair()) is not None:
                self._pairs = _with_pair(self._pairs, pair)
            at.before, at.drafted, at.after = at.after, _StepCosts(), _StepCosts()
        at.drafted.cost_s += cost_s
        at.drafted.steps += tokens / rows

    def figures(self) -> Mapping[str, float]:
        """Return `compared_s`, the cost of steps at numbers of rows for which a plain step was timed.

        And `as_plain_s`, the cost of plain decoding for their tokens, and `as_plain_error_s`, its standard
        error over the pairs of stretches. All are 0 before a plain step.
        """
        sums = self._pairs
        for at in self._by_rows.values():
            if (pair := at.pair()) is not None:
                sums = _with_pair(sums, pair)
        count, x, y, xx, xy, yy = sums
        ratio = y / x if x else 0.0
        squares = max(yy - 2 * ratio * xy + ratio**2 * xx, 0.0)
        return {
            "compared_s": x + sum(at.compared_s for at in self._by_rows.values()),
            "as_plain_s": y + sum(at.plain_s for at in self._by_rows.values()),
            "as_plain_error_s": (squares * count / (count - 1)) ** 0.5 if count > 1 else 0.0,
        }


def _with_pair(sums: list[float], pair: tuple[float, float]) -> list[float]:
    x, y = pair
    return [old + new for old, new in zip(sums, (1.0, x, y, x * x, x * y, y * y), strict=True)]


@dataclass(slots=True)
class Meters:
    """Counters of all steps. A pass is one sample going through the policy in one step."""

    num_steps: int = 0
    num_rows: int = 0
    """Rows of all steps."""
    num_passes: int = 0
    num_tokens: int = 0
    num_finished: int = 0
    total_s: float = 0.0
    cost_s: float = 0.0
    choosing_s: float = 0.0
    """The part of the cost that the chooser took."""
    draft_s: float = 0.0
    plain_s: float = 0.0
    plain_tokens: int = 0
    """Of steps without drafts."""
    drafted_tokens: int = 0
    drafted_passes: int = 0
    """Of steps with drafts."""
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
        self.num_rows += len(step.counts)
        self.num_passes += sum(step.passes) if step.passes else len(step.counts)
        self.num_tokens += sum(step.counts)
        self.num_finished += len(step.finished)
        self.total_s += step.total_s
        self.cost_s += step.cost_s
        self.draft_s += step.draft_s
        if step.arm.is_off:
            self.plain_s += step.total_s
            self.plain_tokens += sum(step.counts)
        else:
            self.drafted_tokens += sum(step.counts)
            self.drafted_passes += sum(step.passes) if step.passes else len(step.counts)
        self.arms[str(step.arm)] += 1
        self.speed_up.add(
            len(step.counts),
            sum(step.counts),
            step.cost_s,
            plain=step.arm.is_off,
            overhead_s=step.overhead_s,
        )
        if step.nodes:
            verified = step.verified or (step.nodes,) * len(step.accepted)
            self._add_draft([min(nodes, step.arm.depth) for nodes in verified], step.accepted)

    def _add_draft(self, depths: Sequence[int], accepted: Sequence[int]) -> None:
        missing = max(depths) - len(self._reached)
        if missing > 0:
            self._reached += [0] * missing
            self._accepted += [0] * missing
        for depth, count in zip(depths, accepted, strict=True):
            for i in range(depth):
                self._reached[i] += 1
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
        self.began_s = self.ended_s = clock()
        """Times of `clock`."""

    def stop(self) -> None:
        """Record the end."""
        self.ended_s = self._clock()
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Return the measured seconds. On CUDA it waits until the device has reached the end."""
        if self._events is None:
            return self.ended_s - self.began_s
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
