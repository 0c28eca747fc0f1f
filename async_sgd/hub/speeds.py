"""Speed of each node, as far as its pushes show it, and the steps it should do before its next push."""

import math
from collections.abc import Iterable, Mapping

from aedit.async_sgd.hub.clocks import Clocks
from aedit.async_sgd.hub.members import Report, dylu
from aedit.async_sgd.hub.plan import HubPlan
from aedit.async_sgd.hub.ranking import Ranking
from aedit.async_sgd.hub.state import HubState

_MOST_STEPS_PER_S = 1e9
"""Largest speed that a node can report: products of a larger one would leave the range of numbers."""

_FASTEST = 64.0
"""Times the median speed: no node's own word makes the others do less than this would."""

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


def note(state: HubState, clocks: Clocks, node: int) -> None:
    """Note the speed of a node that has reported, pushed, joined or left.

    Only who has pushed counts as the fastest: until then its speed is its own word alone.
    """
    is_shown = node in state.live and pushed(state, node) is not None
    clocks.speeds.put(node, (speed(state, clocks.reports, node) or None) if is_shown else None)


def fastest(speeds: Ranking) -> float | None:
    """Return the largest of the speeds, at most `_FASTEST` times their median; None if there is none."""
    return min(speeds.values[-1], _FASTEST * speeds.median) if len(speeds) else None


def pace_steps(state: HubState, clocks: Clocks, plan: HubPlan, nodes: Iterable[int]) -> dict[int, int]:
    """Return by node the steps that it should do before its next push; 0 with pace "seconds".

    With `dylu` the fastest node decides for all. The speed of each is that at its last word.
    """
    if plan.pace == "seconds":
        return dict.fromkeys(nodes, 0)
    every = int(plan.every)
    if plan.pace == "steps":
        return dict.fromkeys(nodes, every)
    most = fastest(clocks.speeds)
    return {node: dylu(every, speed(state, clocks.reports, node), most) for node in nodes}
