"""Outer optimizers: from an averaged pseudo-gradient and a state to the step to subtract, and the next state.

Pure functions of tensors. They own no parameters and talk to no network, so one instance serves every
unit, and a state can be checkpointed, offloaded or sent to a joining node as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aedit.async_sgd.config import OuterConfig


@dataclass(frozen=True, slots=True)
class OuterState:
    """What one unit's outer optimizer remembers."""

    momentum: Tensor
    """Same shape as the unit's anchor; empty for an optimizer without memory."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "OuterState":
        """The same state with every tensor changed, to move or to copy it."""
        return OuterState(change(self.momentum))


class OuterOptimizer(Protocol):
    """Pure, per unit, owns nothing."""

    def init(self, anchor: Tensor) -> OuterState: ...

    def update(self, gradient: Tensor, state: OuterState, *, staleness: int = 0) -> tuple[Tensor, OuterState]:
        """The step to subtract from the anchor, and the next state.

        `gradient` is the averaged pseudo-gradient (anchor minus local), `staleness` the anchor versions
        made since it was measured. The arguments are not changed.
        """


class Average:
    """x <- x - lr * g: plain parameter averaging when lr is 1."""

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = lr

    def init(self, anchor: Tensor) -> OuterState:
        return OuterState(anchor.new_zeros(0))

    def update(self, gradient: Tensor, state: OuterState, *, staleness: int = 0) -> tuple[Tensor, OuterState]:
        return self.lr * gradient, state


class Nesterov:
    """SGD with Nesterov momentum as `torch.optim.SGD(nesterov=True)`: u <- mu u + g; x <- x - lr (g + mu u).

    The paper's outer optimizer (EDiT, arXiv:2412.07210, section 3.1; DiLoCo, arXiv:2311.08105, algorithm 1).
    """

    def __init__(self, lr: float = 0.8, momentum: float = 0.85) -> None:
        self.lr, self.mu = lr, momentum

    def init(self, anchor: Tensor) -> OuterState:
        return OuterState(torch.zeros_like(anchor))

    def update(self, gradient: Tensor, state: OuterState, *, staleness: int = 0) -> tuple[Tensor, OuterState]:
        u = torch.add(gradient, state.momentum, alpha=self.mu)
        return torch.add(gradient, u, alpha=self.mu).mul_(self.lr), OuterState(u)


def make_outer(config: OuterConfig) -> OuterOptimizer:
    """The optimizer that `[outer]` names."""
    match config.kind:
        case "average":
            return Average(config.lr)
        case "nesterov":
            return Nesterov(config.lr, config.momentum)
