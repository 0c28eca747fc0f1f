"""What one node does between rounds and at a round. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

from aedit.types import check


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyConfig:
    """Which pseudo-gradients are believed, and how far (EDiT, arXiv:2412.07210, section 3.2)."""

    weights: Literal["uniform", "scale-free", "paper"] = "scale-free"
    """`scale-free` is softmax(-(G_i / median_j G_j - 1) / temperature); `paper` is softmax(-G_i /
    temperature); `uniform` weighs every trusted node equally."""

    temperature: float = 1.0
    """Raising it moves the weights towards uniform."""

    step_weight: float = 0.0
    """Share of the weight given in proportion to inner steps since the last round (A-EDiT uses 0.5)."""

    detector: Literal["off", "robust", "ema"] = "robust"
    """`robust` judges log-norms against a drift-corrected median; `ema` is the paper's z-test on raw norms.
    Non-finite norms are distrusted whatever the detector, also when it is `off`."""

    threshold: float = 3.5
    """Standard deviations above its own history at which a unit's norm is distrusted; the paper uses 3."""

    warmup_rounds: int = 4
    """Rounds of history a unit needs before it can be distrusted for its size."""

    window: int = 16
    """Rounds of history the `robust` detector keeps."""

    ema: float = 0.02
    """Weight of the newest norm in the `ema` detector's running mean and variance."""

    patience: int = 3
    """Distrusted finite rounds in a row after which a unit's history starts anew from them, so that a lasting
    change (a new learning rate, new data) cannot lock a node out."""

    clip: float | None = 10.0
    """Largest norm of a unit's averaged pseudo-gradient; larger ones are scaled down. None: never."""

    def __post_init__(self) -> None:
        check(self.temperature > 0, "edit.penalty.temperature", "must be above 0", self.temperature)
        check(0 <= self.step_weight <= 1, "edit.penalty.step_weight", "must be in [0, 1]", self.step_weight)
        check(self.threshold > 0, "edit.penalty.threshold", "must be above 0", self.threshold)
        check(self.warmup_rounds >= 2, "edit.penalty.warmup_rounds", "must be at least 2", self.warmup_rounds)
        check(
            self.window >= self.warmup_rounds,
            "edit.penalty.window",
            "must be at least warmup_rounds",
            self.window,
        )
        check(0 < self.ema < 1, "edit.penalty.ema", "must be in (0, 1)", self.ema)
        check(self.patience >= 1, "edit.penalty.patience", "must be at least 1", self.patience)
        check(self.clip is None or self.clip > 0, "edit.penalty.clip", "must be above 0", self.clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class EditConfig:
    """When nodes exchange, what travels together, and when it lands."""

    schedule: Literal["steps", "seconds"] = "steps"
    """`steps` is EDiT: a round every so many inner steps; `seconds` is A-EDiT: each node at its own pace."""

    every: float = 128
    """Length of a local phase, in inner steps or seconds as `schedule` says."""

    warmup_steps: int | Literal["all"] = 0
    """Inner steps of synchronous data parallelism (gradients averaged each step) before the first local
    phase; `all` never leaves it."""

    units: Literal["auto", "model"] | tuple[str, ...] = "auto"
    """`auto`: one unit per transformer block; `model`: the whole model; or module names, `*` allowed."""

    landing: Literal["forward", "arrival"] = "forward"
    """`forward` waits for a unit when its module runs next; `arrival` never waits and adds the difference."""

    prefetch: int = 2
    """Units whose exchange is under way ahead of the one about to run (`forward` landing)."""

    fragments: int = 1
    """Groups of units with staggered rounds: each round moves one group, each group moves every `every`."""

    offload: bool = False
    """Keep anchors and outer momentum in pinned host memory (CUDA only)."""

    timeout_s: float = 1800.0
    """Longest wait for other nodes before the run fails with the name of what it waited for."""

    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)

    def __post_init__(self) -> None:
        check(self.every > 0, "edit.every", "must be above 0", self.every)
        whole = self.schedule == "seconds" or float(self.every).is_integer()
        check(whole, "edit.every", "must be a whole number of steps", self.every)
        check(
            self.schedule == "seconds" or self.every % self.fragments == 0,
            "edit.fragments",
            f"must divide edit.every = {self.every:g}",
            self.fragments,
        )
        negative = self.warmup_steps != "all" and self.warmup_steps < 0
        check(not negative, "edit.warmup_steps", "must not be negative", self.warmup_steps)
        check(self.units != (), "edit.units", "must name at least one module", self.units)
        check(self.prefetch >= 0, "edit.prefetch", "must not be negative", self.prefetch)
        check(self.fragments >= 1, "edit.fragments", "must be at least 1", self.fragments)
        check(self.timeout_s > 0, "edit.timeout_s", "must be above 0", self.timeout_s)
