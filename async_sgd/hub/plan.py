"""The part of a run's configuration that decides what its hub does."""

from dataclasses import dataclass, field
from typing import Literal

from aedit.async_sgd.rules import HubConfig, OuterConfig, PenaltyConfig, UnitRules
from aedit.types import NonNegativeInt, PositiveFloat, PositiveInt, checked


@checked()
@dataclass(frozen=True, kw_only=True)
class HubPlan:
    """The part of the run's configuration that a hub needs."""

    hub: HubConfig
    outer: OuterConfig
    penalty: PenaltyConfig
    every: PositiveFloat
    """Length of a local phase, in steps or, with pace "seconds", in seconds."""
    pace: Literal["steps", "dylu", "seconds"] = "dylu"
    """Rule that decides when a node pushes: `edit.schedule` of the run."""
    steps: PositiveInt
    """The budget: inner steps per node, as the mean over those who are members."""
    seconds: PositiveFloat | None = None
    """The budget in time, if that is used up sooner."""
    part: tuple[NonNegativeInt, PositiveInt] = (0, 1)
    """(k, n): this hub owns the units i with i % n == k."""
    step_tokens: NonNegativeInt = 0
    """Tokens that an inner step of a node counts for, as the hub's own configuration has it; 0: not known."""
    leases: bool = False
    """True if every inner step takes at least one leased sample: leases then bound the steps of a node."""
    rules: UnitRules = field(default_factory=dict)
    """Units that are trained apart from the model, by name: the drafter that a run shares."""
