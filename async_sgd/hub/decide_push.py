"""Admission of pushes: judged on arrival, weighted when they are merged."""

import math

from aedit.async_sgd.hub.members import NORM, Clocks, Member
from aedit.async_sgd.hub.state import Denied, HubState
from aedit.async_sgd.hub.step_bounds import MOST_TOKENS, bounded_push
from aedit.async_sgd.rules import (
    Accepted,
    HubConfig,
    HubPlan,
    Left,
    Push,
    PushFilterConfig,
    Record,
    Refused,
    judge_push,
    staleness_factor,
)


def skips(member: Member, unit: int, seq: int) -> bool:
    """Return whether there is a number between the member's last push of the unit and this one."""
    return seq > member.received.get(unit, 0) + 1


def is_next(member: Member, unit: int, seq: int) -> bool:
    """Return whether this is the number of the member's next push of the unit; False if it has been decided.

    Raises Denied if it skips one. That is not journaled: a client could send unboundedly many such numbers.
    The reply to the next join has the right one.
    """
    last = member.received.get(unit, 0)
    if skips(member, unit, seq):
        raise Denied("unknown", f"gap: push {seq} where {last + 1} was due; join again")
    return seq == last + 1


def judged(
    state: HubState, push: Push, plan: HubPlan, clocks: Clocks, now_s: float, founder: int | None
) -> list[Record]:
    """Return Accepted, or Refused (with Left after too many violations); nothing for a push judged before.

    An accepted push has the steps and tokens that it counts as. Raises Denied for a push that skips a number:
    its node joins again, and the reply has the right one.

    Args:
        state: Of the hub.
        push: Of a live member and of a unit of this hub.
        plan: Of the hub.
        clocks: Of the hub.
        now_s: Age of the run.
        founder: The node that brings the first anchor of the unit; None while undecided.
    """
    member, unit = state.members[push.node], state.units[push.unit]
    if not is_next(member, push.unit, push.seq):
        return []
    bounded, most_steps, early = bounded_push(state, push, plan, clocks, now_s)
    refused = _refused(state, push, bounded, plan.hub, most_steps, early)
    if refused is None and push.base == 0:
        if unit.anchor is not None or unit.pending:
            refused = Refused(push.node, push.unit, push.seq, "founded: the unit has an anchor", True, False)
        elif push.node != founder:
            reason = "founded: another node founds the run"
            refused = Refused(push.node, push.unit, push.seq, reason, True, False)
    if refused is None:
        return [Accepted(bounded)]
    if not refused.violation:
        return [refused]
    return [refused, *exclusion(member, refused.reason, plan.hub.push_filter)]


def exclusion(member: Member, reason: str, config: PushFilterConfig) -> list[Record]:
    """Return Left if one more violation exceeds the limit, else nothing."""
    if member.violations + 1 < config.violations:
        return []
    text = f"excluded after {config.violations} violations, the last one {reason}"
    return [Left(member.node, text, excluded=True)]


def _refused(
    state: HubState, push: Push, bounded: Push, config: HubConfig, most_steps: float, early: str
) -> Refused | None:
    """Return Refused for the first rule that the push breaks, or None; the founder is not looked at."""
    assert state.layout is not None
    member, unit = state.members[push.node], state.units[push.unit]
    tensors = state.layout.units[push.unit].tensors
    if len(push.norms) != len(tensors):
        return _violation(member, push, f"layout: {len(push.norms)} norms for {len(tensors)} parameters")
    if not all(math.isfinite(norm) for norm in push.norms):
        return _violation(member, push, "not finite: a parameter has a NaN or an infinity")
    if push.steps > most_steps:
        text = f"steps: {push.steps} in one push, and {most_steps:g} are possible"
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
    if early:
        return _stale(push, early)
    doubt = None if unit.apart else judge_push(bounded, unit.history, config.push_filter)
    return _violation(member, push, f"{NORM}: {doubt}") if doubt else None


def _violation(member: Member, push: Push, reason: str) -> Refused:
    """Return Refused with a violation, for a push that is distrusted.

    One bad round is one violation, however many units it has.
    """
    return Refused(push.node, push.unit, push.seq, reason, True, push.seq > member.offended)


def _stale(push: Push, reason: str) -> Refused:
    """Return Refused without a violation: the node keeps its progress."""
    return Refused(push.node, push.unit, push.seq, reason, False, False)
