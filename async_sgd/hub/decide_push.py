"""Admission of pushes: judged on arrival, weighted when they are merged."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from aedit.async_sgd.hub.members import NORM, Member
from aedit.async_sgd.hub.state import Denied, HubState, Unit
from aedit.async_sgd.hub.step_bounds import MOST_TOKENS, Bounds
from aedit.async_sgd.rules import (
    MOST_CLAIM,
    Accepted,
    HubConfig,
    HubPlan,
    Left,
    MergePart,
    Push,
    PushFilterConfig,
    Record,
    Refused,
    UnitRule,
    judge_push,
    limited,
    merge_weights,
    outliers,
    push_norm,
    shortening,
    staleness_factor,
)


def skips(member: Member, unit: int, seq: int) -> bool:
    """Return whether there is a number between the member's last push of the unit and this one."""
    return seq > member.received.get(unit, 0) + 1


def is_next(member: Member, unit: int, seq: int) -> bool:
    """Return whether this is the number of the member's next push of the unit; False if it has been decided.

    Raises Denied if it skips one: nothing of it is written down, as there is no end of such numbers, and its
    node is told the right one when it joins again.
    """
    last = member.received.get(unit, 0)
    if skips(member, unit, seq):
        raise Denied("unknown", f"gap: push {seq} where {last + 1} was due; join again")
    return seq == last + 1


def judged(
    state: HubState, push: Push, config: HubConfig, bounds: Bounds, founder: int | None
) -> list[Record]:
    """Return Accepted, or Refused (with Left after too many violations); nothing for a push judged before.

    founder: the node that brings the first anchor of the unit; None: nobody yet. An accepted push has the
    steps and tokens that it counts as. Raises Denied for a push that skips a number: its node joins again,
    and is told the right one.
    """
    member = state.members[push.node]
    if not is_next(member, push.unit, push.seq):
        return []
    refused = _refused(state, member, push, config, bounds)
    if refused is None and push.base == 0:
        refused = _refused_founding(state.units[push.unit], push, founder)
    if refused is None:
        return [Accepted(_as_counted(push, bounds))]
    return (
        [refused, *exclusion(member, refused.reason, config.push_filter)] if refused.violation else [refused]
    )


def exclusion(member: Member, reason: str, config: PushFilterConfig) -> list[Record]:
    """Return Left if one more violation exceeds the limit, else nothing."""
    if member.violations + 1 < config.violations:
        return []
    text = f"excluded after {config.violations} violations, the last one {reason}"
    return [Left(member.node, text, excluded=True)]


def _as_counted(push: Push, bounds: Bounds) -> Push:
    if (push.steps, push.tokens) == (bounds.steps, bounds.tokens):
        return push
    return replace(push, steps=bounds.steps, tokens=bounds.tokens)


def _refused(
    state: HubState, member: Member, push: Push, config: HubConfig, bounds: Bounds
) -> Refused | None:
    """Return Refused for the first rule that the push breaks, or None; the founder is not looked at."""
    assert state.layout is not None
    unit = state.units[push.unit]
    tensors = state.layout.units[push.unit].tensors
    if len(push.norms) != len(tensors):
        return _violation(member, push, f"layout: {len(push.norms)} norms for {len(tensors)} parameters")
    if not all(math.isfinite(norm) for norm in push.norms):
        return _violation(member, push, "not finite: a parameter has a NaN or an infinity")
    if push.steps > bounds.most_steps:
        text = f"steps: {push.steps} in one push, and {bounds.most_steps:g} are possible"
        return _violation(member, push, text)
    if push.tokens > MOST_TOKENS:
        return _violation(member, push, f"tokens: {push.tokens} in one push, and {MOST_TOKENS} are possible")
    if any(node == push.node for node, _ in unit.pending):
        return _stale(push, "early: this node's last push of the unit is not merged yet")
    if push.base == 0:
        return None
    if push.base > unit.version:
        return _stale(push, f"future: version {push.base}, and {unit.version} is the newest")
    if staleness_factor(config.staleness, unit.version - push.base) == 0.0:
        return _stale(push, f"stale: measured {unit.version - push.base} versions ago")
    if bounds.early:
        return _stale(push, bounds.early)
    counted = _as_counted(push, bounds)
    doubt = None if unit.apart else judge_push(counted, unit.history, config.push_filter)
    return _violation(member, push, f"{NORM}: {doubt}") if doubt else None


def _refused_founding(unit: Unit, push: Push, founder: int | None) -> Refused | None:
    if unit.anchor is not None or unit.pending:
        return Refused(push.node, push.unit, push.seq, "founded: the unit has an anchor", True, False)
    if push.node != founder:
        return Refused(push.node, push.unit, push.seq, "founded: another node founds the run", True, False)
    return None


def _violation(member: Member, push: Push, reason: str) -> Refused:
    """Return Refused for a push that is not believed.

    One bad round is one violation, however many units it has.
    """
    return Refused(push.node, push.unit, push.seq, reason, True, push.seq > member.offended)


def _stale(push: Push, reason: str) -> Refused:
    """Return Refused without a violation: the node keeps its progress."""
    return Refused(push.node, push.unit, push.seq, reason, False, False)


def own_parts(pushes: Sequence[Push], unit: Unit, rule: UnitRule) -> tuple[MergePart, ...]:
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


def parts(pushes: Sequence[Push], unit: Unit, plan: HubPlan) -> tuple[MergePart, ...]:
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
    if config.push_filter.clip is not None:
        scales = _limited_scales(pushes, shares, scales)
    return tuple(
        MergePart(push.node, push.seq, weight, scale, s)
        for push, weight, scale, s in zip(pushes, shares, scales, late, strict=True)
    )


def _limited_scales(pushes: Sequence[Push], shares: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Return the scales, that of the push that moves the anchor most lowered to `MOST_SHARE` of the way."""
    way_N = np.array([w * s * push_norm(push) for w, s, push in zip(shares, scales, pushes, strict=True)])
    kept_N = np.where(way_N > 0, limited(way_N) / np.where(way_N > 0, way_N, 1.0), 1.0)
    return [scale * float(kept) for scale, kept in zip(scales, kept_N, strict=True)]
