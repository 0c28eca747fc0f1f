"""Speed of each node, as far as its pushes show it, and the steps it should do before its next push."""

import math
from collections.abc import Mapping

from aedit.async_sgd.hub.members import Report, dylu
from aedit.async_sgd.hub.plan import HubPlan
from aedit.async_sgd.hub.state import HubState

_MOST_STEPS_PER_S = 1e9
"""What a node can say of its speed: more would leave the range of numbers when it is multiplied."""

_ABOVE = 1.25
"""Times the speed in accepted pushes that a node can say of itself: times of pushes vary."""


def reported(reports: Mapping[int, Report], node: int) -> float:
    """Return the speed that the node says it has; 0 if it said none."""
    report = reports.get(node)
    speed = report.steps_per_s if report else 0.0
    return min(speed, _MOST_STEPS_PER_S) if math.isfinite(speed) and speed > 0 else 0.0


def pushed(state: HubState, node: int) -> float | None:
    """Return the node's steps per second in accepted pushes; None before there are enough."""
    unit = next((unit for unit in state.units.values() if not unit.apart), None)
    times = unit.times.get(node) if unit else None
    return times.speed(state.elapsed_s) if times else None


def speed(state: HubState, reports: Mapping[int, Report], node: int) -> float:
    """Return the node's speed as it says, at most `_ABOVE` times what its pushes show; 0 if unknown."""
    said, shown = reported(reports, node), pushed(state, node)
    return said if shown is None else min(said, _ABOVE * shown)


def pace_steps(
    state: HubState, reports: Mapping[int, Report], plan: HubPlan, nodes: Mapping[int, object] | None = None
) -> dict[int, int]:
    """Return by node the steps that it should do before its next push; 0 with pace "seconds".

    nodes: default all live ones. With `dylu` the fastest node decides for all, and only who has pushed counts
    as the fastest: until then its speed is its own word alone.
    """
    nodes = state.live if nodes is None else nodes
    if plan.pace == "seconds":
        return dict.fromkeys(nodes, 0)
    every = int(plan.every)
    if plan.pace == "steps":
        return dict.fromkeys(nodes, every)
    shown = {
        node: found
        for node in state.live
        if pushed(state, node) is not None and (found := speed(state, reports, node))
    }
    return {node: dylu(every, speed(state, reports, node), shown) for node in nodes}
