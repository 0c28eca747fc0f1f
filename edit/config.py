"""Configuration of a node between rounds and at a round. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

from aedit.async_sgd.rules import PenaltyConfig  # read as [edit.penalty]
from aedit.types import NonNegativeInt, PositiveFloat, PositiveInt, check, checked


@checked("edit")
@dataclass(frozen=True, slots=True, kw_only=True)
class EditConfig:
    """Settings of a node: its rounds, its sync units, and the landing of units."""

    schedule: Literal["steps", "seconds", "dylu"] = "steps"
    """`steps` is EDiT: a round every so many inner steps; `seconds` is A-EDiT: each node at its own pace,
    and with a hub when the hub opens a round. `dylu` (arXiv:2401.09135) needs a hub: the fastest node does
    `every` steps, the others what they can in that time."""

    every: PositiveFloat = 128
    """Length of a local phase, in inner steps or seconds as `schedule` says."""

    warmup_steps: NonNegativeInt | Literal["all"] = 0
    """Inner steps of synchronous data parallelism (gradients averaged each step) before the first local
    phase; `all` never leaves it."""

    units: Literal["auto", "model"] | tuple[str, ...] = "auto"
    """`auto`: one unit per transformer block; `model`: the whole model; or module names, `*` allowed."""

    landing: Literal["forward", "arrival"] = "forward"
    """`forward` waits for a unit when its module runs next; `arrival` never waits and adds the difference."""

    prefetch: NonNegativeInt = 2
    """Units whose exchange is under way ahead of the one about to run (`forward` landing)."""

    fragments: PositiveInt = 1
    """Groups of units with staggered rounds: each round moves one group, each group moves every `every`."""

    offload: bool = False
    """Keep anchors and outer momentum in pinned host memory (CUDA only)."""

    timeout_s: PositiveFloat = 1800.0
    """Longest wait for other nodes before the run fails with the name of what it waited for."""

    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)

    def __post_init__(self) -> None:
        whole = self.schedule == "seconds" or float(self.every).is_integer()
        check(whole, "edit.every", "must be a whole number of steps", self.every)
        check(
            self.schedule == "seconds" or self.every % self.fragments == 0,
            "edit.fragments",
            f"must divide edit.every = {self.every:g}",
            self.fragments,
        )
        check(self.units != (), "edit.units", "must name at least one module", self.units)

    @property
    def round_s(self) -> float:
        """Return the interval of rounds in seconds; 0 if they are due by steps."""
        return float(self.every) if self.schedule == "seconds" else 0.0
