"""Figures that the views show, computed from a run's records by pure functions; NaN if unknown."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean

from aedit.launch.records import EvalEvent, Metric, NodeRecords, RoundEvent, Run

LAST_LINES = 10


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens and seconds of one node while its processes trained.

    They count from the first to the last metrics line of each attempt: the time before a first line includes
    start-up and compilation, and between two attempts no process of the node runs.
    """

    tokens: float
    wall_s: float
    """Training time: evaluation, checkpoints and the time between two attempts are left out."""

    busy_s: float
    wait_s: float

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second, including waiting."""
        return ratio(self.tokens, self.wall_s)

    @property
    def solo_tokens_per_s(self) -> float:
        """Return the tokens per second without waiting."""
        return ratio(self.tokens, self.busy_s)

    @property
    def waited(self) -> float:
        """Return the share of the training time spent waiting for other nodes."""
        return ratio(self.wait_s, self.wall_s)


def pace(node: NodeRecords) -> Pace:
    """Return the node's tokens and seconds over all its attempts; NaN if none has two lines."""
    spans = [(lines[0], lines[-1]) for lines in _attempts(node) if len(lines) > 1]
    if not spans:
        return Pace(nan, nan, nan, nan)
    return Pace(
        tokens=sum(last.tokens - first.tokens for first, last in spans),
        wall_s=sum((last.t - first.t) - (last.other_s - first.other_s) for first, last in spans),
        busy_s=sum(last.busy_s - first.busy_s for first, last in spans),
        wait_s=sum(last.wait_s - first.wait_s for first, last in spans),
    )


def _attempts(node: NodeRecords) -> list[list[Metric]]:
    """Return the node's metrics lines by attempt: each begins with a `start` event."""
    starts_s = sorted(start.t for start in node.starts)
    found: dict[int, list[Metric]] = defaultdict(list)
    for metric in node.metrics:
        found[bisect_right(starts_s, metric.t)].append(metric)
    return list(found.values())


def share_of_solo(paces: Iterable[Pace]) -> float:
    """Return (sum over nodes of tokens / wall) / (sum over nodes of tokens / busy): 1 without any waiting.

    Each node has its own wall time, see `Pace`. Nodes with fewer than two lines are left out of both sums.
    """
    known = [pace for pace in paces if isfinite(pace.tokens_per_s) and isfinite(pace.solo_tokens_per_s)]
    return ratio(sum(p.tokens_per_s for p in known), sum(p.solo_tokens_per_s for p in known))


def recent_tokens_per_s(metrics: Sequence[Metric], window_s: float = 10.0) -> float:
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
        EvalEvent(max(e.t for e in group), fmean(e.step for e in group), id, fmean(e.loss for e in group))
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


def first_loss(node: NodeRecords) -> float:
    """Return the first training loss; NaN if there is none."""
    return next((metric.loss for metric in node.metrics if isfinite(metric.loss)), nan)


def last_loss(node: NodeRecords) -> float:
    """Return the mean loss of the last lines, about ten seconds; NaN if the very last one is not finite."""
    if not node.metrics or not isfinite(node.metrics[-1].loss):
        return nan
    return mean_known(metric.loss for metric in node.metrics[-LAST_LINES:])


def units_of(run: Run) -> tuple[str, ...]:
    """Return the names of the units, from the first node that has started."""
    return next((node.starts[-1].units for node in run.nodes if node.starts), ())


def mean_known(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN if there is none."""
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else nan


def total_known(values: Iterable[float]) -> float:
    """Return the sum of the finite values."""
    return sum(value for value in values if isfinite(value))


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; NaN unless the denominator is positive."""
    return numerator / denominator if denominator > 0 else nan
