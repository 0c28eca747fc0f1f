"""Figures of reinforcement learning that the views show, from a run's records; NaN if unknown."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, nan

from aedit.launch.records import Metric, NodeRecords, RLEvalEvent, RLMetric, Run
from aedit.launch.views.figures import LAST_LINES, mean_known, ratio, total_known

WINDOW_S = 10.0
GENERATING = ("rollouts", "longest sample")
"""Causes of waits that are parts of `rollout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLTotals:
    """Rollouts of one node or of several, over the whole run."""

    groups: float
    rollouts: float
    no_signal: float
    """Share of the groups whose rewards were all equal."""

    retried: float
    excluded: float
    tokens_per_s: float
    """Tokens of rollouts per second of generation."""

    speed_up: float
    """Speed-up of decoding over steps without drafts at as many rows; NaN where no such step was timed."""

    accepted: float
    """Tokens per pass of a sample through the policy; 1 without drafts."""

    arms: Mapping[str, float]
    """Share of the engine's steps by arm, the most frequent first."""

    idle_s: Mapping[str, float]
    """Seconds by cause, the longest first."""

    idle_used_s: float
    drafter_steps: float
    published: float
    adopted: float
    refused: float

    @property
    def waited_s(self) -> float:
        """Return the seconds of all causes."""
        return sum(self.idle_s.values())


def newest(node: NodeRecords) -> RLMetric | None:
    """Return the newest state of the node's reinforcement learning."""
    return node.metrics[-1].rl if node.metrics else None


def rl_totals(states: Iterable[RLMetric | None]) -> RLTotals:
    """Return the totals over nodes, given the newest state of each."""
    known = [state for state in states if state is not None]
    arms, idle_s = Counter[str](), Counter[str]()
    for state in known:
        arms.update(state.arms)
        idle_s.update(state.idle_s)
    num_steps = sum(arms.values())
    drafters = [state.drafter for state in known if state.drafter is not None]
    return RLTotals(
        groups=total_known(state.groups for state in known),
        rollouts=total_known(state.rollouts for state in known),
        no_signal=ratio(
            total_known(state.no_signal for state in known), total_known(state.groups for state in known)
        ),
        retried=total_known(state.retried for state in known),
        excluded=total_known(state.excluded for state in known),
        tokens_per_s=_sum_or_nan(ratio(state.rollout_tokens, state.generation_s) for state in known),
        speed_up=ratio(
            total_known(state.as_plain_s for state in known), total_known(state.compared_s for state in known)
        ),
        accepted=ratio(
            total_known(state.rollout_tokens for state in known), total_known(state.passes for state in known)
        ),
        arms={arm: steps / num_steps for arm, steps in arms.most_common() if steps > 0},
        idle_s={cause: seconds for cause, seconds in idle_s.most_common() if seconds > 0},
        idle_used_s=total_known(state.idle_used_s for state in known),
        drafter_steps=total_known(drafter.steps for drafter in drafters),
        published=total_known(drafter.published for drafter in drafters),
        adopted=total_known(drafter.adopted for drafter in drafters),
        refused=total_known(drafter.refused for drafter in drafters),
    )


def recent_rollout_tokens_per_s(metrics: Sequence[Metric], window_s: float = WINDOW_S) -> float:
    """Return the tokens of rollouts per second of generation over about the last `window_s` seconds.

    A longer time if no batch was generated in them.
    """
    last = metrics[-1].rl if metrics else None
    if last is None:
        return nan
    before = last
    for metric in reversed(metrics[:-1]):
        if metric.rl is None:
            break
        before = metric.rl
        if metrics[-1].t - metric.t >= window_s and before.generation_s < last.generation_s:
            break
    speed = ratio(last.rollout_tokens - before.rollout_tokens, last.generation_s - before.generation_s)
    # With one line, or after a restart of the totals, only the totals are known.
    return speed if isfinite(speed) else ratio(last.rollout_tokens, last.generation_s)


def first_and_last(run: Run, value: Callable[[RLMetric], float]) -> tuple[float, float]:
    """Return the first and the newest value, mean over nodes; the newest over the last lines of each."""
    first, last = [], []
    for node in run.nodes:
        known = [value(m.rl) for m in node.metrics if m.rl is not None and isfinite(value(m.rl))]
        first += known[:1]
        last.append(mean_known(known[-LAST_LINES:]))
    return mean_known(first), mean_known(last)


def rl_held_out(run: Run) -> list[RLEvalEvent]:
    """Return the evaluations of the run in order of time; one node evaluates at a time."""
    return sorted((e for node in run.nodes for e in node.rl_evaluations), key=lambda e: (e.t, e.step))


def mean_step(run: Run, t: float) -> float:
    """Return the nodes' mean inner step at this time, as each evaluation may be by another node."""
    steps = [
        node.metrics[bisect_right(node.metrics, t, key=lambda m: m.t) - 1]
        for node in run.nodes
        if node.metrics
    ]
    return mean_known(metric.step if metric.t <= t else 0 for metric in steps)


def after_warm_up(run: Run) -> list[RLEvalEvent]:
    """Return the evaluations from the end of the supervised warm-up on."""
    ends = {node.index: rl.supervised_steps for node in run.nodes if (rl := newest(node)) is not None}
    found = [e for node in run.nodes for e in node.rl_evaluations if not e.step < ends.get(node.index, 0.0)]
    return sorted(found, key=lambda e: (e.t, e.step))


def warm_up_end(node: NodeRecords) -> Metric | None:
    """Return the line at which the node's supervised warm-up had ended, with the warm-up's last step.

    Of a node without a warm-up its first line, with step 0. None while the warm-up goes on.
    """
    lines = [(metric, metric.rl) for metric in node.metrics if metric.rl is not None]
    if not lines or not lines[-1][1].groups > 0:
        return None
    steps = lines[-1][1].supervised_steps
    line = next((metric for metric, rl in lines if not rl.supervised_steps < steps), lines[-1][0])
    return replace(line, step=int(steps) if isfinite(steps) else 0)


def steps_of_layer(rl: RLMetric) -> float:
    """Return the steps of the engine in which the learned layer has drafted."""
    return sum(steps for arm, steps in rl.arms.items() if arm.partition(":")[0] == "layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Seconds per step of one node between two lines of metrics, by use."""

    step: float
    """Step of the later line."""

    steps: float
    """Between the lines."""

    rollouts: float
    rewards: float
    training: float
    waiting: float
    """For nodes, the hub, other ranks or rollouts, unused. Waiting for rewards is in `rewards`."""

    used: float
    """Waiting that idle work has used."""

    other: float


def splits(node: NodeRecords) -> list[Split]:
    """Return how each step of the node was spent; steps between two lines of metrics are averaged.

    Lines between which an attempt began are left out, as start-up belongs to no step.
    """
    starts_s = [start.t for start in node.starts]
    found = []
    for before, after in pairwise(node.metrics):
        if any(before.t < t <= after.t for t in starts_s) or after.step <= before.step:
            continue
        if (split := _split(before, after)) is not None:
            found.append(split)
    return found


def _split(before: Metric, after: Metric) -> Split | None:
    if before.rl is None or after.rl is None:
        return None
    steps = after.step - before.step
    earlier, later = seconds_by_use(before.rl), seconds_by_use(after.rl)
    spent = {use: max(later[use] - earlier[use], 0.0) / steps for use in later}
    used = min(spent["used"], spent["waiting"])
    rest = (after.t - before.t) / steps - sum(spent.values()) + spent["used"]
    return Split(
        step=after.step,
        steps=steps,
        rollouts=spent["rollouts"],
        rewards=spent["rewards"],
        training=spent["training"],
        waiting=spent["waiting"] - used,
        used=used,
        other=max(rest, 0.0),
    )


def seconds_by_use(rl: RLMetric) -> dict[str, float]:
    """Return seconds so far for `rollouts`, `rewards`, `training`, `waiting`, and those `used` of it.

    Waits for the last rollouts, a part of `rollout_s`, count as waiting; those for rewards do not.
    """
    waited_s = sum(seconds for cause, seconds in rl.idle_s.items() if cause != "rewards")
    in_rollouts_s = sum(rl.idle_s.get(cause, 0.0) for cause in GENERATING)
    return {
        "rollouts": max(_known(rl.rollout_s) - in_rollouts_s, 0.0),
        "rewards": _known(rl.reward_s),
        "training": _known(rl.train_s),
        "waiting": waited_s,
        "used": min(_known(rl.idle_used_s), waited_s),
    }


def _known(value: float) -> float:
    return value if isfinite(value) else 0.0


def _sum_or_nan(values: Iterable[float]) -> float:
    known = [value for value in values if isfinite(value)]
    return sum(known) if known else nan
