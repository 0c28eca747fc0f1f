"""Figures that the views show, computed from a run's records by pure functions; NaN if unknown."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot, isfinite, nan
from statistics import fmean

from aedit.launch.records import (
    EvalEvent,
    HubRecords,
    HubSample,
    Metric,
    NodeRecords,
    RLMetric,
    RoundEvent,
    Run,
)
from aedit.launch.views import formatting as fmt

LAST_LINES = 10
WINDOW_S = 10.0
GENERATING = ("rollouts", "longest sample")
"""Causes of waits that are parts of `rollout_s`."""


def pace(node: NodeRecords) -> tuple[float, float, float]:
    """Return the node's tokens per second, those without waiting, and the share of its time spent waiting.

    They count from the first to the last metrics line of each attempt: the time before a first line includes
    start-up and compilation, and between two attempts no process of the node runs. Evaluation and checkpoints
    are left out too. NaN if no attempt has two lines.
    """
    starts_s = sorted(start.t for start in node.starts)
    attempts: dict[int, list[Metric]] = defaultdict(list)
    for metric in node.metrics:
        attempts[bisect_right(starts_s, metric.t)].append(metric)
    spans = [(lines[0], lines[-1]) for lines in attempts.values() if len(lines) > 1]
    tokens = sum(last.tokens - first.tokens for first, last in spans)
    wall_s = sum((last.t - first.t) - (last.other_s - first.other_s) for first, last in spans)
    busy_s = sum(last.busy_s - first.busy_s for first, last in spans)
    wait_s = sum(last.wait_s - first.wait_s for first, last in spans)
    return ratio(tokens, wall_s), ratio(tokens, busy_s), ratio(wait_s, wall_s)


def share_of_solo(nodes: Iterable[NodeRecords]) -> float:
    """Return (sum over nodes of tokens / wall) / (sum over nodes of tokens / busy): 1 without any waiting.

    Each node has its own wall time, see `pace`. Nodes with fewer than two lines are left out of both sums.
    """
    known = [(speed, solo) for speed, solo, _ in map(pace, nodes) if isfinite(speed) and isfinite(solo)]
    return ratio(sum(speed for speed, _ in known), sum(solo for _, solo in known))


def recent_tokens_per_s(metrics: Sequence[Metric], window_s: float = WINDOW_S) -> float:
    """Return the tokens per second over about the last `window_s` seconds, including waiting."""
    if len(metrics) < 2:
        return nan
    last = metrics[-1]
    first = metrics[-2]
    for metric in reversed(metrics[:-1]):
        if last.t - metric.t > window_s:
            break
        first = metric
    return ratio(last.tokens - first.tokens, last.t - first.t)


def held_out(run: Run) -> list[EvalEvent]:
    """Return the run's held-out losses in order of time, the mean over nodes if several evaluated a round."""
    same: dict[tuple[int, int, int], list[EvalEvent]] = defaultdict(list)
    for node in run.nodes:
        own = node.index if run.has_hub else 0  # with a hub each node has its own rounds
        seen: dict[int, int] = defaultdict(int)
        for evaluation in node.evaluations:  # a round may have several: average the k-th of each node
            same[own, evaluation.round, seen[evaluation.round]].append(evaluation)
            seen[evaluation.round] += 1
    merged = [
        EvalEvent(
            t=max(e.t for e in group),
            step=fmean(e.step for e in group),
            round=id,
            loss=fmean(e.loss for e in group),
        )
        for (_, id, _), group in same.items()
    ]
    return sorted(merged, key=lambda evaluation: evaluation.t)


def last_evaluation_step(run: Run) -> tuple[float, float] | None:
    """Return the step of the run's last evaluation, and the last step of the node that made it.

    None if that node has not trained since, or no node has evaluated.
    """
    ends = [
        (e.t, e.step, node.metrics[-1].step) for node in run.nodes for e in node.evaluations if node.metrics
    ]
    if not ends:
        return None
    _, step, last_step = max(ends)
    return (step, last_step) if step < last_step else None


def rounds(run: Run) -> dict[int, list[tuple[int, RoundEvent]]]:
    """Return the (node, record) pairs of each round, by round id in rising order."""
    by_id: dict[int, list[tuple[int, RoundEvent]]] = defaultdict(list)
    for node in run.nodes:
        for landed in node.rounds:
            by_id[landed.id].append((node.index, landed))
    return dict(sorted(by_id.items()))


def whole_rounds(run: Run) -> dict[int, list[tuple[int, RoundEvent]]]:
    """Return `rounds`, without those of which the record of a node is missing, as a sample was read.

    That is of a node whose first record is of an earlier or the same round, and whose last of a later one.
    """
    firsts = sorted(node.rounds[0].id for node in run.nodes if node.rounds)
    lasts = sorted(node.rounds[-1].id for node in run.nodes if node.rounds)

    def is_whole(id: int, rows: Sequence[tuple[int, RoundEvent]]) -> bool:
        here = bisect_right(firsts, id) - bisect_left(lasts, id)
        return len(rows) >= min(here, max(landed.num_nodes for _, landed in rows) or here)

    return {id: rows for id, rows in rounds(run).items() if is_whole(id, rows)}


def first_loss(node: NodeRecords) -> float:
    """Return the first training loss; NaN if there is none."""
    return next((metric.loss for metric in node.metrics if isfinite(metric.loss)), nan)


def last_loss(node: NodeRecords) -> float:
    """Return the mean loss of the last lines, about ten seconds; NaN if the very last one is not finite."""
    if not node.metrics or not isfinite(node.metrics[-1].loss):
        return nan
    return mean_known(metric.loss for metric in node.metrics[-LAST_LINES:])


def mean_known(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN if there is none."""
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else nan


def or_zero(value: float) -> float:
    """Return the value, 0 for one that is not finite."""
    return value if isfinite(value) else 0.0


def total_known(values: Iterable[float]) -> float:
    """Return the sum of the finite values."""
    return sum(map(or_zero, values))


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; NaN unless the denominator is positive."""
    return numerator / denominator if denominator > 0 else nan


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

    speed_up_error: float
    """Standard error of `speed_up`; NaN if it is unknown."""

    bound: float
    """Speed-up if every draft were accepted, of the node where it is largest; NaN if not measured."""

    accepted: float
    """Tokens per pass of a sample through the policy; 1 without drafts."""

    arms: Mapping[str, float]
    """Share of the engine's steps by arm, the most frequent first."""

    idle_s: Mapping[str, float]
    """Seconds by cause, the longest first."""

    used_s: Mapping[str, float]
    """Seconds of drafters' trainers by the cause of the wait."""

    worker_idle_s: float
    """Seconds of rollout workers without samples, summed over nodes; NaN without workers."""

    idle_used_s: float
    idle_usable_s: float
    """Seconds in which a drafter's trainer was let run; NaN where unknown."""

    gained_s: float
    """Seconds of rollouts that trained drafters have saved; NaN without one in use."""

    pool: Mapping[str, float]
    """Totals of `RLMetric.pool`; empty without a pool."""

    drafter_steps: float
    published: float
    adopted: float
    refused: float

    @property
    def waited_s(self) -> float:
        """Return the seconds of all causes."""
        return sum(self.idle_s.values())


def ledger(totals: RLTotals) -> str:
    """Return one line on what became of the waits; "" for records that do not say so."""
    helped_s, without_s = totals.pool.get("helped_s", 0.0), or_zero(totals.worker_idle_s)
    if not isfinite(totals.idle_usable_s) or totals.waited_s + helped_s + without_s < 0.05:
        return ""
    parts = [f"{fmt.seconds(totals.waited_s)} waited", f"{fmt.seconds(totals.idle_usable_s)} usable"]
    parts.append(f"{fmt.seconds(totals.idle_used_s)} used by the drafter")
    if isfinite(gained_s := totals.gained_s):
        parts.append(
            f"{fmt.seconds(abs(gained_s))} of rollouts {'gained' if gained_s >= 0 else 'lost'} by it"
        )
    if helped_s > 0:
        parts.append(f"{fmt.seconds(helped_s)} for other nodes")
    if without_s > 0:
        parts.append(f"{fmt.seconds(without_s)} of workers without samples")
    return ", ".join(parts)


def idle_by_cause(totals: RLTotals) -> str:
    """Return the waits by cause, each with the part that trained the drafter."""
    parts = []
    for cause, seconds in totals.idle_s.items():
        if seconds >= 0.05:
            used_s = totals.used_s.get(cause, 0.0)
            used = f" ({fmt.seconds(used_s)} used)" if used_s >= 0.05 else ""
            parts.append(f"{cause} {fmt.seconds(seconds)}{used}")
    return ", ".join(parts) or "none"


def newest(node: NodeRecords) -> RLMetric | None:
    """Return the newest state of the node's reinforcement learning."""
    return node.metrics[-1].rl if node.metrics else None


def rl_lines_of(node: NodeRecords) -> list[tuple[Metric, RLMetric]]:
    """Return the lines of metrics with reinforcement learning, each with its state."""
    return [(metric, metric.rl) for metric in node.metrics if metric.rl is not None]


def rl_totals(states: Iterable[RLMetric | None]) -> RLTotals:
    """Return the totals over nodes, given the newest state of each."""
    there = [state for state in states if state is not None]
    arms, idle_s, used_s, pool = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for state in there:
        arms.update(state.arms)
        idle_s.update(state.idle_s)
        used_s.update(state.used_s)
        pool.update(state.pool)

    def total(name: str) -> float:
        return total_known(getattr(state, name) for state in there)

    def of_drafters(name: str) -> float:
        return total_known(state.drafter.get(name, nan) for state in there)

    errors_s = [or_zero(state.as_plain_error_s) for state in there]
    gained_s = [state.as_plain_s - state.compared_s for state in there if state.drafter.get("adopted", 0) > 0]
    usable_s = [state.idle_usable_s for state in there]
    speeds = [ratio(state.rollout_tokens, state.generation_s) for state in there]
    return RLTotals(
        groups=total("groups"),
        rollouts=total("rollouts"),
        no_signal=ratio(total("no_signal"), total("groups")),
        retried=total("retried"),
        excluded=total("excluded"),
        tokens_per_s=total_known(speeds) if any(map(isfinite, speeds)) else nan,
        speed_up=ratio(total("as_plain_s"), total("compared_s")),
        speed_up_error=ratio(hypot(*errors_s) if any(errors_s) else nan, total("compared_s")),
        bound=max((state.drafting_bound for state in there if isfinite(state.drafting_bound)), default=nan),
        accepted=ratio(total("rollout_tokens"), total("passes")),
        arms={arm: steps / sum(arms.values()) for arm, steps in arms.most_common() if steps > 0},
        idle_s={cause: seconds for cause, seconds in idle_s.most_common() if seconds > 0},
        used_s=used_s,
        worker_idle_s=total("worker_idle_s") if any(state.worker_s > 0 for state in there) else nan,
        idle_used_s=total("idle_used_s"),
        idle_usable_s=total_known(usable_s) if any(map(isfinite, usable_s)) else nan,
        gained_s=total_known(gained_s) if gained_s else nan,
        pool=pool,
        drafter_steps=of_drafters("steps"),
        published=of_drafters("published"),
        adopted=of_drafters("adopted"),
        refused=of_drafters("refused"),
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
        known = [found for _, rl in rl_lines_of(node) if isfinite(found := value(rl))]
        first += known[:1]
        last.append(mean_known(known[-LAST_LINES:]))
    return mean_known(first), mean_known(last)


def rl_held_out(run: Run) -> list[EvalEvent]:
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


def after_warm_up(run: Run) -> list[EvalEvent]:
    """Return the evaluations from the end of the supervised warm-up on."""
    ends = {node.index: rl.supervised_steps for node in run.nodes if (rl := newest(node)) is not None}
    found = [e for node in run.nodes for e in node.rl_evaluations if not e.step < ends.get(node.index, 0.0)]
    return sorted(found, key=lambda e: (e.t, e.step))


def warm_up_end(node: NodeRecords) -> Metric | None:
    """Return the line at which the node's supervised warm-up had ended, with the warm-up's last step.

    Of a node without a warm-up its first line, with step 0. None while the warm-up goes on.
    """
    lines = rl_lines_of(node)
    if not lines or not lines[-1][1].groups > 0:
        return None
    steps = lines[-1][1].supervised_steps
    line = next((metric for metric, rl in lines if not rl.supervised_steps < steps), lines[-1][0])
    return replace(line, step=int(steps) if isfinite(steps) else 0)


def steps_of_layer(rl: RLMetric) -> float:
    """Return the steps of the engine in which the learned layer has drafted."""
    return sum(steps for arm, steps in rl.arms.items() if arm.partition(":")[0] == "layer")


Split = tuple[float, float, Mapping[str, float]]
"""Step of the later of two lines of metrics, steps between them, and seconds per step by use.

The uses are those of `seconds_by_use`, of which `waiting` is without `used`, and `other`.
"""


def splits(node: NodeRecords) -> list[Split]:
    """Return how each step of the node was spent; steps between two lines of metrics are averaged.

    Lines between which an attempt began are left out, as start-up belongs to no step.
    """
    starts_s = [start.t for start in node.starts]
    found: list[Split] = []
    for before, after in pairwise(node.metrics):
        if any(before.t < t <= after.t for t in starts_s) or after.step <= before.step:
            continue
        if before.rl is None or after.rl is None:
            continue
        steps = after.step - before.step
        earlier, later = seconds_by_use(before.rl), seconds_by_use(after.rl)
        spent = {use: max(later[use] - earlier[use], 0.0) / steps for use in later}
        rest = (after.t - before.t) / steps - sum(spent.values()) + spent["used"]
        used = min(spent["used"], spent["waiting"])
        spent |= {"waiting": spent["waiting"] - used, "used": used, "other": max(rest, 0.0)}
        found.append((after.step, steps, spent))
    return found


WAITING = "waiting: "
"""Begins the name of a wait in `uses_of`, before its cause."""


def uses_of(metric: Metric) -> dict[str, float]:
    """Return seconds so far by use: `training`, `rollouts`, `rewards`, waits by cause, `idle work`, `other`.

    `idle work` is the used part of the waits, which are without it. A run on text has neither rollouts nor
    rewards, and waits for `nodes`, as its records name no cause.
    """
    wait_s = or_zero(metric.wait_s)
    all_s = or_zero(metric.busy_s) + wait_s + or_zero(metric.other_s)
    if metric.rl is None:
        used_s = min(or_zero(metric.idle_used_s), wait_s)
        waits = {"nodes": wait_s}
        found = {"training": or_zero(metric.busy_s)}
    else:
        spent = seconds_by_use(metric.rl)
        used_s = min(spent["used"], spent["waiting"])
        waits = {cause: seconds for cause, seconds in metric.rl.idle_s.items() if cause != "rewards"}
        found = {name: spent[name] for name in ("training", "rollouts", "rewards")}
    waited_s = sum(waits.values())
    for cause, seconds in waits.items():
        found[WAITING + cause] = seconds * (1 - used_s / waited_s) if waited_s else 0.0
    found["idle work"] = used_s
    return found | {"other": max(all_s - sum(found.values()), 0.0)}


def sum_so_far(lines: Sequence[HubSample], field: str) -> list[float]:
    """Return the running total over all nodes at each line, including earlier processes of a node."""
    before: dict[int, float] = {}
    found, total = [], 0.0
    for line in lines:
        for node in line.nodes:
            if node.reports:
                count, last = getattr(node, field), before.get(node.node, 0.0)
                total += count - last if count >= last else count
                before[node.node] = count
        found.append(total)
    return found


def longest(hubs: Sequence[HubRecords]) -> tuple[HubSample, ...]:
    """Return the longest record: each hub has reports of all nodes, so that one suffices."""
    lines = max((hub.lines for hub in hubs), key=len, default=())
    return lines if any(line.nodes for line in lines) else ()


def seconds_by_use(rl: RLMetric) -> dict[str, float]:
    """Return seconds so far for `rollouts`, `rewards`, `training`, `waiting`, and those `used` of it.

    Waits for the last rollouts, a part of `rollout_s`, count as waiting; those for rewards do not. `waiting`
    is for nodes, the hub, other ranks or rollouts.
    """
    waited_s = sum(seconds for cause, seconds in rl.idle_s.items() if cause != "rewards")
    in_rollouts_s = sum(rl.idle_s.get(cause, 0.0) for cause in GENERATING)
    return {
        "rollouts": max(or_zero(rl.rollout_s) - in_rollouts_s, 0.0),
        "rewards": or_zero(rl.reward_s),
        "training": or_zero(rl.train_s),
        "waiting": waited_s,
        "used": min(or_zero(rl.idle_used_s), waited_s),
    }
