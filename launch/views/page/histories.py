"""Counters of each node over time, from its own files or from its hub, and the use of its time in bins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
from numpy.typing import NDArray

from aedit.launch.records import HubSample, Metric, NodeRecords, RLMetric, Run
from aedit.launch.views.figures import longest, or_zero, uses_of

Floats = NDArray[np.float64]
BINS = 120
"""Bins of a lane."""
GONE = ("gone", "excluded")
"""Begins the state of a node at its hub that is not a member any more."""


@dataclass(frozen=True, slots=True)
class History:
    """Counters of one node at times that rise; they never fall, and are constant while no process runs."""

    name: str
    times_s: Floats
    uses: Mapping[str, Floats]
    """Seconds by use, see `uses_of`."""
    tokens: Floats
    """Tokens, or inner steps where only the hub's records are known."""
    busy_s: Floats

    def tokens_at(self, t: float) -> float:
        """Return the tokens up to this time."""
        return float(np.interp(t, self.times_s, self.tokens))


def histories(run: Run) -> list[History]:
    """Return the history of each node that has one: from its files, else from the records of a hub."""
    found = [_of_records(node) for node in run.nodes if node.metrics]
    here = set(run.indices)
    lines = longest(run.hubs)
    names = {node.node: node.name for line in lines for node in line.nodes if node.node not in here}
    found += [made for index, name in sorted(names.items()) if (made := _of_hub(lines, index, name))]
    return found


def _of_records(node: NodeRecords) -> History:
    return _history(f"node {node.index}", node.metrics, sorted(start.t for start in node.starts))


def _of_hub(lines: Sequence[HubSample], index: int, name: str) -> History | None:
    metrics, starts_s, was_here = list[Metric](), list[float](), False
    for line in lines:
        known = [n for n in line.nodes if n.node == index and n.reports and not n.state.startswith(GONE)]
        if known:
            node = known[0]
            busy_s, wait_s = or_zero(node.busy_s), or_zero(node.wait_s)
            steps = or_zero(node.steps)
            if metrics and not was_here:
                starts_s.append(line.t)
            rl = None if node.rl is None else _with_training(node.rl, busy_s)
            metrics.append(
                Metric(t=line.t, step=int(steps), tokens=steps, busy_s=busy_s, wait_s=wait_s, rl=rl)
            )
        was_here = bool(known)
    return _history(f"{index} {name}", metrics, starts_s) if metrics else None


def _with_training(rl: RLMetric, busy_s: float) -> RLMetric:
    """Return the state with the seconds of training, which nodes do not report: those that are left."""
    return replace(rl, train_s=max(0.0, busy_s - or_zero(rl.rollout_s)))


def _history(name: str, metrics: Sequence[Metric], starts_s: Sequence[float]) -> History:
    """Return the history of these lines; between the end of an attempt and the next start no time is used."""
    rows = [(metric, uses_of(metric)) for metric in metrics]
    kinds = list(dict.fromkeys(use for _, uses in rows for use in uses))
    values = np.array(
        [
            [metric.tokens, or_zero(metric.busy_s), *(uses.get(use, 0.0) for use in kinds)]
            for metric, uses in rows
        ]
    )
    # A counter that falls has begun anew, with its process.
    steps = np.diff(values, axis=0, prepend=np.zeros((1, values.shape[1])))
    counts = np.cumsum(np.where(steps < 0, np.maximum(values, 0.0), steps), axis=0)
    times_s = np.maximum.accumulate(np.array([metric.t for metric in metrics]))
    for start_s in starts_s or times_s[:1]:
        place = int(np.searchsorted(times_s, start_s))
        if place < len(times_s):
            times_s = np.insert(times_s, place, start_s)
            before = counts[place - 1] if place else np.zeros(counts.shape[1])
            counts = np.insert(counts, place, before, axis=0)
    by_use = {use: counts[:, 2 + k] for k, use in enumerate(kinds)}
    return History(name, times_s, by_use, counts[:, 0], counts[:, 1])


def end_of(found: Sequence[History]) -> float:
    """Return the time of the newest record, in seconds; 0 without one."""
    return max((float(each.times_s[-1]) for each in found), default=0.0)


def _per_bin(history: History, counter: Floats, end_s: float) -> Floats:
    """Return how much a counter grows in each bin."""
    edges = np.linspace(0.0, end_s, BINS + 1)
    return np.diff(np.interp(edges, history.times_s, counter, left=0.0))


def lane_shares(history: History, uses: Sequence[str], end_s: float) -> tuple[tuple[int, ...], ...]:
    """Return percent of each bin by use, of which `away` is what is left; () for a use that never occurs."""
    length_s = end_s / BINS
    known = {use: np.clip(_per_bin(history, history.uses[use], end_s), 0.0, None) for use in history.uses}
    covered = np.sum(list(known.values()), axis=0)
    scale = np.where(covered > length_s, length_s / np.maximum(covered, 1e-12), 1.0)
    shares = {use: np.rint(100 * found * scale / length_s).astype(int) for use, found in known.items()}
    shares["away"] = np.maximum(0, 100 - np.sum(list(shares.values()), axis=0))
    return tuple(tuple(map(int, shares[use])) if use in shares and shares[use].any() else () for use in uses)


def totals_by_use(history: History, end_s: float) -> dict[str, float]:
    """Return the seconds of the whole history by use, with `away`."""
    found = {use: float(counter[-1]) for use, counter in history.uses.items()}
    return found | {"away": max(0.0, end_s - sum(found.values()))}


def rates(found: Sequence[History], end_s: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return tokens per second of all nodes in each bin, and those without their waits: the solo speeds."""
    speed, solo = np.zeros(BINS), np.zeros(BINS)
    for each in found:
        tokens, busy_s = _per_bin(each, each.tokens, end_s), _per_bin(each, each.busy_s, end_s)
        speed += tokens / (end_s / BINS)
        solo += np.divide(tokens, busy_s, out=np.zeros(BINS), where=busy_s > 1e-9)
    return tuple(map(float, speed)), tuple(float(value) if value > 0 else nan for value in solo)
