"""The share of a round that the pushes of a merge make up, from the state of the hub."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from aedit.async_sgd.hub.plan import HubPlan
from aedit.async_sgd.hub.state import Unit
from aedit.async_sgd.rules import Push, UnitRule, counted, shares


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
