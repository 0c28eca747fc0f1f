"""Decide when the pushes of a unit become its next anchor."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from aedit.async_sgd.hub.member_timeouts import Expected
from aedit.async_sgd.hub.state import Unit
from aedit.async_sgd.rules import HubConfig, HubPlan, Push, UnitRule, counted, shares


def is_due(config: HubConfig, expected: Expected, leaving: Set[int], usual_s: float, now_s: float) -> bool:
    """Return whether to merge the pushes that have arrived; there is one at least.

    When all awaited pushes are here: at once. With a quorum: after a grace period of `grace` times the usual
    time (Decoupled DiLoCo, arXiv:2604.21428). Without one: after three times the usual time, but not before a
    silent node would be given up, so that a live node that brings nothing blocks nobody.

    Args:
        config: Where not every arrival is merged alone.
        expected: Pushes that are here, and members that may still bring one.
        leaving: Members that are awaited no more from now on.
        usual_s: Usual time between merges.
        now_s: The time.
    """
    if expected.are_all_here(leaving):
        return True
    times = expected.came_s.values
    if config.quorum != "all":
        wanted = min(config.quorum, max(1, expected.num_awaited(leaving)))
        if len(times) >= wanted:
            return now_s >= times[wanted - 1] + min(config.grace_cap_s, config.grace * usual_s)
    return now_s >= times[0] + max(3 * usual_s, config.expire_s)


@dataclass(frozen=True, slots=True)
class Moment:
    """Time and state of the run at which a merge is decided."""

    at_s: float
    """Age of the run in seconds."""
    nodes: int
    """Number of members."""


def round_share(
    unit: Unit,
    pushes: Sequence[Push],
    moment: Moment,
    awaited: Set[int],
    plan: HubPlan,
    own: UnitRule | None,
) -> float | None:
    """Return the share of a round, in [0, 1], that `pushes` make up; None if they are a whole round.

    Args:
        unit: The unit, before the merge.
        pushes: What is merged.
        moment: When it is merged.
        awaited: Members that may push.
        plan: The plan of the run.
        own: Rule of the unit, if it is trained apart from the model.
    """
    if plan.hub.quorum == "all" and own is None:
        return None
    version = unit.version + 1
    brought = unit.brought_with(pushes, version, moment.at_s, moment.nodes)
    if own:  # a node that has never trained it pushes nothing, and has no share
        brought = {node: one for node, one in brought.items() if one.interval}
    there = counted(brought, awaited | {push.node for push in pushes}, version, moment.at_s)
    every = None if own or plan.pace == "seconds" else plan.every
    rule = own.weights if own else plan.hub.weights
    found = shares(there, version, rule, plan.penalty, every)
    return min(1.0, sum(found[push.node] for push in pushes))
