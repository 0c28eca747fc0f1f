"""Speed of each node as its pushes show it, the steps before its next push, and bounds on what a push claims.

Steps are bounded by the time that has passed, tokens by steps. A claim above that is lowered, and the push is
accepted: an honest node may be faster than any seen so far. Only what no node can do is refused. The journal
has what a push counts as.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from aedit.async_sgd.hub.members import Clocks, NodeReport, Ranking
from aedit.async_sgd.hub.state import HubState, Unit
from aedit.async_sgd.rules import (
    MOST_CLAIM,
    SLACK,
    TOP_STEPS_PER_S,
    HubPlan,
    Push,
    PushTimes,
    is_early,
    least_gap,
    made_until,
    possible_at_once,
    possible_speed,
    possible_steps,
)
from aedit.proto.rpc import lineage

_LONGEST = 4
"""Times hub.max_steps_ahead or the local phase: more steps than a push can hold."""

_MOST_STEPS_PER_S = 1e9
"""Largest speed that a node can report: products of a larger one would leave the range of numbers."""

_FASTEST = 64.0
"""Times the median speed: a node's own report cannot slow the others down further than this."""

_ABOVE = 1.25
"""Times the speed in accepted pushes that a node can report: times of pushes vary."""

MOST_TOKENS = 2**40
"""Most tokens of one push. Sums of more would not fit into the 64 bits of the messages, and stop the run."""


def bounded_push(
    state: HubState, push: Push, plan: HubPlan, clocks: Clocks, now_s: float
) -> tuple[Push, float, str]:
    """Return a push with the steps and tokens that it counts as: at most those that it claims.

    Args:
        state: Of the hub. The push is of a live member and of a unit of this hub.
        push: As its node describes it.
        plan: Of the hub.
        clocks: Of the hub.
        now_s: Age of the run at the arrival, without the time in which there was no hub: nodes train on then.

    Returns:
        The push, the steps that no honest push exceeds (one that claims more is refused), and why it comes
        too soon; empty if it does not.
    """
    unit = state.units[push.unit]
    times = unit.times.get(push.node, PushTimes.began(now_s))
    # More than an outage and refused pushes can bring together.
    if plan.pace == "seconds":
        most = _LONGEST * plan.hub.max_steps_ahead + TOP_STEPS_PER_S * max(0.0, now_s - times.before_s)
    else:
        most = _LONGEST * max(plan.hub.max_steps_ahead, plan.every)
    every = None if plan.pace == "seconds" else plan.every
    if unit.apart or push.steps <= possible_at_once(times, now_s, every):  # no look at the others is needed
        steps = most
    else:
        steps = min(most, _in_time(state, push, plan, clocks, now_s))
    # What was leased before the part was re-created is not known.
    leased = 0 if lineage(state.term) else state.members[push.node].leased
    if plan.leases and leased and not unit.apart:
        steps = min(steps, max(0, leased - times.total_steps))
    counted = min(push.steps, int(steps))
    tokens = 0 if not push.steps else push.tokens * counted // push.steps
    if plan.step_tokens and not unit.apart:
        tokens = min(tokens, int(MOST_CLAIM) * plan.step_tokens * counted)
    least_s = 0.0 if unit.apart else least_gap(unit.gaps.low_median_without(push.node))
    since_s = now_s - clocks.pushed_s.get((push.unit, push.node), times.at_s)
    early = ""
    if is_early(times, since_s, least_s):
        usual = f"one every {least_s:.3g} s is possible: push later"
        early = f"early: {since_s:.3g} s after the last push, and {usual}"
    return replace(push, steps=counted, tokens=tokens), most, early


def next_made_s(state: HubState, push: Push, plan: HubPlan, clocks: Clocks, now_s: float) -> float:
    """Return the age of the run before which the steps after those of an accepted push cannot have begun.

    Args: as of `bounded_push`; the push as it counts, before it is applied.
    """
    times = state.units[push.unit].times.get(push.node, PushTimes.began(now_s))
    after, every = times.pushed(now_s, push.steps), None if plan.pace == "seconds" else plan.every
    if _brings(state, times, clocks):  # its steps took time that the clock does not have: it seems faster
        share = min(1.0, times.speed_before / after.best_speed) if after.best_speed else 0.0
        return after.at_s - share * (after.at_s - after.before_s)
    if push.steps <= possible_at_once(times, now_s, every):  # no look at the others is needed
        speed = SLACK * times.best_speed
    else:
        speed = _possible_speed(state, push, plan, clocks, now_s)
    return made_until(after, _made_s(times, push, clocks), speed)


def _in_time(state: HubState, push: Push, plan: HubPlan, clocks: Clocks, now_s: float) -> float:
    """Return the steps that the node can have made since its last push of the unit."""
    times = state.units[push.unit].times.get(push.node, PushTimes.began(now_s))
    every = None if plan.pace == "seconds" else plan.every
    speed = _possible_speed(state, push, plan, clocks, now_s)
    steps = possible_steps(times, now_s, _made_s(times, push, clocks), speed, every)
    return steps + plan.hub.max_steps_ahead if _brings(state, times, clocks) else steps


def _brings(state: HubState, times: PushTimes, clocks: Clocks) -> bool:
    """Return whether a node's next push can hold steps that took time which the run's clock does not have.

    The first push after a restart of the hub may have been on its way, and the second one holds what was made
    meanwhile. A part that was founded again does not know what its nodes bring.
    """
    return times.before_s <= clocks.began_s or (lineage(state.term) > 0 and not times.num)


def _made_s(times: PushTimes, push: Push, clocks: Clocks) -> float:
    """Return the age of the run before which the steps of the push cannot have begun."""
    known_s = clocks.made_s.get((push.unit, push.node), times.before_s)
    return min(times.at_s, max(times.before_s, known_s))


def _possible_speed(state: HubState, push: Push, plan: HubPlan, clocks: Clocks, now_s: float) -> float:
    """Return the steps per second that the node can make at most, by its pushes of the unit and by others."""
    unit = state.units[push.unit]
    times = unit.times.get(push.node, PushTimes.began(now_s))
    speeds = (_speed(unit, node, clocks.reports, now_s) for node in state.live if node != push.node)
    every = None if plan.pace == "seconds" else plan.every
    return possible_speed(times.best_speed, [speed for speed in speeds if speed], every)


def _speed(unit: Unit, node: int, reports: Mapping[int, NodeReport], now_s: float) -> float:
    """Return the speed in the node's pushes of the unit, or its own report before the third; 0 if unknown."""
    times = unit.times.get(node)
    shown = (times.speed(now_s) if times else None) or 0.0
    return shown if times and times.is_regular else reported(reports, node) or shown


def reported(reports: Mapping[int, NodeReport], node: int) -> float:
    """Return the speed that the node reports; 0 without a report."""
    report = reports.get(node)
    speed = report.steps_per_s if report else 0.0
    return min(speed, _MOST_STEPS_PER_S) if math.isfinite(speed) and speed > 0 else 0.0


def pushed(state: HubState, node: int) -> float | None:
    """Return the node's steps per second in accepted pushes; None before there are enough."""
    unit = next((unit for unit in state.units.values() if not unit.apart), None)
    times = unit.times.get(node) if unit else None
    return times.speed(state.elapsed_s) if times else None


def speed(state: HubState, reports: Mapping[int, NodeReport], node: int) -> float:
    """Return the node's speed as it says, at most `_ABOVE` times what its pushes show; 0 if unknown."""
    said, shown = reported(reports, node), pushed(state, node)
    return said if shown is None else min(said, _ABOVE * shown)


def note(state: HubState, clocks: Clocks, node: int) -> None:
    """Note the speed of a node that has reported, pushed, joined or left.

    Only a node that has pushed counts as the fastest: before that its report is not checked.
    """
    is_shown = node in state.live and pushed(state, node) is not None
    clocks.speeds.put(node, (speed(state, clocks.reports, node) or None) if is_shown else None)


def fastest(speeds: Ranking) -> float | None:
    """Return the largest of the speeds, at most `_FASTEST` times their median; None if there is none."""
    return min(speeds.values[-1], _FASTEST * speeds.median) if len(speeds) else None


def pace_steps(state: HubState, clocks: Clocks, plan: HubPlan, nodes: Iterable[int]) -> dict[int, int]:
    """Return by node the steps that it should do before its next push; 0 with pace "seconds".

    With `dylu` the fastest node decides for all. The speed of each is that of its last report.
    """
    if plan.pace == "seconds":
        return dict.fromkeys(nodes, 0)
    every = int(plan.every)
    if plan.pace == "steps":
        return dict.fromkeys(nodes, every)
    most = fastest(clocks.speeds)
    return {node: dylu(every, speed(state, clocks.reports, node), most) for node in nodes}


def dylu(every: int, steps_per_s: float, fastest: float | None) -> int:
    """Return H_w = max(1, floor(H v_w / v_max)) (DyLU, arXiv:2401.09135): steps of a node before its push.

    steps_per_s: speed of the node. fastest: inner steps per second of the fastest node; None if no speed is
    known. A node that has not reported its speed does `every` steps.
    """
    if not steps_per_s or fastest is None:
        return every
    return max(1, min(every, math.floor(every * steps_per_s / fastest)))
