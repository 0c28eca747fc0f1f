"""Share of a round that a merge makes up, where a merge takes the pushes of only some of the nodes.

Merged at full weight one by one, the pushes of N nodes add up instead of averaging. So each counts as its
node's share of a round. The shares of all nodes add up to 1: in any stretch of time the anchor moves by the
weighted mean of the nodes' progress, as it would in rounds of all nodes, whatever the cadence of each node.

Intervals are counted in versions of the unit, so that the same records give the same shares. Who is silent
for too long is also decided by the age of the run as the journal has it: versions are made by those who push,
so that one node that pushes often could make all others silent.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import numpy as np

from aedit.async_sgd.rules.config import PenaltyConfig
from aedit.async_sgd.rules.push_weights import (
    MOST_CLAIM,
    WeightRule,
    limited,
    median_of_others,
    push_norm,
    raw_weights,
)
from aedit.async_sgd.rules.records import Array, Push

SMOOTHING = 0.25
"""Weight of the newest interval in a node's usual one."""

PATIENCE = 4
"""Usual intervals, or rounds of all nodes, for which a node may be silent before it no longer counts."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The last push of one unit by one node."""

    version: int
    """Version that the push made; before the first push the version at which the node joined."""
    interval: float = 0.0
    """Usual number of versions from one push to the next; 0 before the first push."""
    steps: int = 0
    tokens: int = 0
    norm: float = 0.0
    at_s: float = 0.0
    """Age of the run at `version`."""
    interval_s: float = 0.0
    """Usual time from one push to the next; 0 before the first push."""

    def joined(self, version: int, at_s: float = 0.0) -> "Contribution":
        """Return the contribution of a node that has joined again at `version`."""
        return replace(self, version=version, at_s=at_s)

    def pushed(self, push: Push, version: int, at_s: float, nodes: int) -> "Contribution":
        """Return the contribution with a push that made `version`.

        nodes: members now; the first interval is at least that, as nodes that start together push in turn.
        """
        gap = max(1, version - self.version)
        gap_s = max(0.0, at_s - self.at_s)
        usual, usual_s = max(float(gap), nodes), gap_s
        if self.interval:
            usual = self.interval + SMOOTHING * (gap - self.interval)
            usual_s = self.interval_s + SMOOTHING * (gap_s - self.interval_s)
        return Contribution(version, usual, push.steps, push.tokens, push_norm(push), at_s, usual_s)


def counted(
    brought: Mapping[int, Contribution], live: Set[int], version: int, now_s: float = 0.0
) -> dict[int, Contribution]:
    """Return the nodes that share a round at `version`: those that push the unit, or are about to.

    A live node counts from its join on, until it is silent for too long, in versions and in time. One that
    has left counts until it would have pushed again: the others measured what they push next while it was
    there.
    """
    slowest = max((one.interval for one in brought.values()), default=0.0)
    slowest_s = max((one.interval_s for one in brought.values()), default=0.0)

    def counts(node: int, one: Contribution) -> bool:
        silent = version - one.version
        if node not in live:
            return silent <= one.interval
        if silent <= PATIENCE * max(one.interval or slowest, len(live)):
            return True
        return now_s - one.at_s < PATIENCE * (one.interval_s or slowest_s)

    return {node: one for node, one in sorted(brought.items()) if counts(node, one)}


def round_shares(
    there: Mapping[int, Contribution],
    version: int,
    rule: WeightRule,
    penalty: PenaltyConfig,
    every: float | None = None,
) -> dict[int, float]:
    """Return the share s_m of each node in a round at `version`; they add up to 1, or less.

    With T_m the interval of node m, or its silence if that is longer, s_m is its weight among the last pushes
    of all nodes by `rule`, where steps and tokens count per interval: by steps, s_m is proportional to
    g_m / T_m. So of two nodes with equal pushes, one that pushes k times as often has k times the share by
    steps, and the same share if weights are uniform. Nodes that have not pushed yet count as the mean of the
    others.

    What a node claims is bounded: steps by what fits into its interval while the others did `every` in
    theirs; steps and tokens per interval, and the number of pushes, by `MOST_CLAIM` times the median of the
    others; its share by `limited`.

    Args:
        there: The nodes that count, as `counted` returns them.
        version: Version that is about to be made.
        rule: Weight of a push, `hub.weights`.
        penalty: Settings of the rule `penalty`.
        every: Steps in a local phase; None if local phases are not counted in steps.
    """
    equal = 1 / max(1, len(there))
    known = {node: one for node, one in there.items() if one.interval}
    if not known:
        return dict.fromkeys(there, equal)
    T_N = np.array([float(max(one.interval, version - one.version)) for one in known.values()])
    claimed_N = np.array([float(one.steps) for one in known.values()])
    steps_N = claimed_N if every is None else np.minimum(claimed_N, _possible(T_N, every))
    tokens_N = np.array([float(one.tokens) for one in known.values()])
    tokens_N = tokens_N * steps_N / np.maximum(claimed_N, 1.0)
    norms_N = np.array([one.norm for one in known.values()])
    w_N = limited(raw_weights(norms_N, steps_N / T_N, tokens_N / T_N, rule, penalty), steps_N > 0)
    total = float(w_N.sum())
    s_N = w_N / total * len(known) * equal if total > 0 else np.zeros(len(w_N))
    s_N *= np.minimum(1.0, MOST_CLAIM * T_N / median_of_others(T_N))
    found = dict(zip(known, s_N.tolist(), strict=True))
    return {node: found.get(node, equal) for node in there}


def _possible(T_N: Array, every: float) -> Array:
    """Return the most steps of each push: `every` of them per shortest interval of the other nodes."""
    shortest, second = np.partition(np.append(T_N, np.inf), 1)[:2]
    shortest_N = np.full(len(T_N), shortest)
    shortest_N[T_N.argmin()] = second
    possible_N: Array = every * np.maximum(1.0, T_N / shortest_N)
    return possible_N
