"""Decide when the pushes of a unit become its next anchor, and how much each of them counts."""

from collections.abc import Sequence, Set
from dataclasses import replace
from statistics import median

import numpy as np

from aedit.async_sgd.hub.member_timeouts import AwaitedPushes, is_ready
from aedit.async_sgd.hub.members import Clocks
from aedit.async_sgd.hub.state import HubState, Unit
from aedit.async_sgd.rules import (
    MOST_CLAIM,
    HubConfig,
    HubPlan,
    Merged,
    MergePart,
    Push,
    UnitRule,
    counted,
    limited,
    merge_weights,
    outliers,
    push_norm,
    round_shares,
    shortening,
    staleness_factor,
)


def is_due(
    config: HubConfig, awaited: AwaitedPushes, leaving: Set[int], usual_s: float, now_s: float
) -> bool:
    """Return whether to merge the pushes that have arrived; there is one at least.

    When all awaited pushes are here: at once. With a quorum: after a grace period of `grace` times the usual
    time (Decoupled DiLoCo, arXiv:2604.21428). Without one: after three times the usual time, but not before a
    silent node would be given up, so that a live node that brings nothing does not block the others.

    Args:
        config: Where not every arrival is merged alone.
        awaited: Pushes that are here, and members that may still bring one.
        leaving: Members that are no longer awaited.
        usual_s: Usual time between merges.
        now_s: The time.
    """
    if awaited.are_all_here(leaving):
        return True
    times = awaited.came_s.values
    if config.quorum != "all":
        wanted = min(config.quorum, max(1, awaited.num_awaited(leaving)))
        if len(times) >= wanted:
            return now_s >= times[wanted - 1] + min(config.grace_cap_s, config.grace * usual_s)
    return now_s >= times[0] + max(3 * usual_s, config.expire_s)


def decide_merge(state: HubState, clocks: Clocks, plan: HubPlan, index: int, at_s: float) -> Merged:
    """Return the merge of a unit's pending pushes. at_s: age of the run."""
    unit = state.units[index]
    pushes = list(unit.pending.values())
    if unit.anchor is None:
        return Merged(index, 1, (MergePart(pushes[0].node, pushes[0].seq, 1.0),), at_s)
    own = plan.rules.get(state.unit_name(index))
    if own or plan.hub.each_alone:
        pushes = pushes[:1]
    parts = _own_parts(pushes, unit, own) if own else _parts(pushes, unit, plan)
    share = round_share(state, clocks, plan, index, pushes, at_s)
    return Merged(index, unit.version + 1, parts, at_s, share)


def round_share(
    state: HubState, clocks: Clocks, plan: HubPlan, index: int, pushes: Sequence[Push], at_s: float
) -> float | None:
    """Return the share of a round, in [0, 1], that `pushes` make up; None if they are a whole round."""
    unit, live, own = state.units[index], state.live, plan.rules.get(state.unit_name(index))
    if plan.hub.quorum == "all" and own is None:
        return None
    version = unit.version + 1
    brought = unit.brought_with(pushes, version, at_s, len(live))
    if own:  # a node that has never trained it pushes nothing, and has no share
        brought = {node: one for node, one in brought.items() if one.interval}
    awaited = {n for n in live if is_ready(clocks, n) and not live[n].is_distrusted(index)}
    there = counted(brought, awaited | {push.node for push in pushes}, version, at_s)
    every = None if own or plan.pace == "seconds" else plan.every
    found = round_shares(there, version, own.weights if own else plan.hub.weights, plan.penalty, every)
    return min(1.0, sum(found[push.node] for push in pushes))


def _own_parts(pushes: Sequence[Push], unit: Unit, rule: UnitRule) -> tuple[MergePart, ...]:
    """Return how much each push counts in the merge of a unit that is trained apart from the model.

    Size and staleness do not matter.
    """
    weights = merge_weights(pushes, rule.weights)
    return tuple(
        MergePart(push.node, push.seq, weight, 1.0, unit.version - push.base if push.base else 0)
        for push, weight in zip(pushes, weights, strict=True)
    )


def _of_usual_steps(push: Push, unit: Unit) -> Push:
    """Return the push with at most `MOST_CLAIM` times the steps of the other nodes' last ones.

    Its length is judged by them: even the push of a long silence moves the anchor no farther than that.
    """
    others = [one.steps for node, one in unit.brought.items() if node != push.node and one.steps]
    if len(others) < 2:
        return push
    return replace(push, steps=min(push.steps, int(MOST_CLAIM * median(others))))


def _parts(pushes: Sequence[Push], unit: Unit, plan: HubPlan) -> tuple[MergePart, ...]:
    """Return how much each push counts in the merge; 0 if it is far longer than the others.

    Staleness and excess length scale the push itself, so that they have an effect in a merge of one, too. No
    push makes up more than `weights.MOST_SHARE` of the way that three or more move the anchor.
    """
    config, penalty = plan.hub, plan.penalty
    crude = outliers(pushes, config.push_filter)
    kept = [push for push, is_crude in zip(pushes, crude, strict=True) if not is_crude]
    found = iter(merge_weights(kept, config.weights, penalty))
    shares = [0.0 if is_crude else next(found) for is_crude in crude]
    late = [unit.version - push.base if push.base else 0 for push in pushes]
    last = config.staleness.cutoff - 1  # what was accepted counts, if others were merged before it meanwhile
    scales = [
        staleness_factor(config.staleness, min(s, last))
        * shortening(_of_usual_steps(push, unit), unit.history, config.push_filter)
        for push, s in zip(pushes, late, strict=True)
    ]
    if config.push_filter.clip is not None:  # lower that of the push that moves the anchor most
        way_N = np.array([w * s * push_norm(push) for w, s, push in zip(shares, scales, pushes, strict=True)])
        kept_N = np.where(way_N > 0, limited(way_N) / np.where(way_N > 0, way_N, 1.0), 1.0)
        scales = [scale * float(kept) for scale, kept in zip(scales, kept_N, strict=True)]
    return tuple(
        MergePart(push.node, push.seq, weight, scale, s)
        for push, weight, scale, s in zip(pushes, shares, scales, late, strict=True)
    )
