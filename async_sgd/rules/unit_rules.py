"""Rules of units that are trained apart from the model, such as the shared drafter of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from aedit.async_sgd.rules.config import OuterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRule:
    """Rule of a unit that is trained apart from the model, by name in `HubPlan.rules` and `MeanExchange`.

    Such a unit has training steps of its own, which are no steps of the run and weigh its pushes. A node that
    made none pushes nothing to a hub; where all nodes take part, it weighs 0, and where none made any nothing
    is sent. Its pseudo-gradients are neither screened nor clipped by size or
    direction, as their sizes say nothing beside those of other units: only values that are not finite are
    refused. A hub never waits for a quorum of them.
    """

    outer: OuterConfig = field(default_factory=lambda: OuterConfig(kind="average", lr=1.0))
    """Default: the average of those who trained."""

    weights: Literal["uniform", "steps"] = "steps"
    """Weight of a push in the average: its own training steps, or equal."""


DRAFTER = "drafter"
"""Name of the unit that holds the shared drafter."""

UnitRules = Mapping[str, UnitRule]
"""Rules by name of the unit; units without an entry follow the run's rules."""
