"""The outer step. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from aedit.types import check


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """How an averaged pseudo-gradient becomes the next anchor."""

    kind: Literal["average", "nesterov"] = "nesterov"
    """`average` subtracts lr times the mean; `nesterov` is SGD with Nesterov momentum."""

    lr: float = 0.8
    """Outer learning rate; 1 with `average` is plain parameter averaging."""

    momentum: float = 0.85
    """Nesterov momentum; not used by `average`."""

    def __post_init__(self) -> None:
        check(self.lr > 0, "outer.lr", "must be above 0", self.lr)
        check(0 <= self.momentum < 1, "outer.momentum", "must be in [0, 1)", self.momentum)
