"""What one training step costs and yields, between two lines of metrics."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.edit.shards import Shards
from aedit.launch.data.order import Order


@dataclass(slots=True)
class StepMeter:
    """The step under way, and the steps since the last line of metrics."""

    grad_norm: Tensor | None = None
    loss: Tensor | None = None
    num_steps: int = 0
    began_at: float = 0.0
    waited_before_s: float = 0.0
    undo: tuple[dict[str, int], Tensor] | None = None
    """Sample order and random state before the step under way."""

    def begin_step(self, order: Order, waited_s: float) -> None:
        """Before the step draws its samples. waited_s, here and below: the node's waiting so far."""
        self.began_at, self.waited_before_s = time.monotonic(), waited_s
        self.undo = (order.state(), torch.get_rng_state())

    def add_loss(self, loss: Tensor) -> None:
        """Stays on its device: nothing waits for it until a line is written."""
        self.loss = loss if self.loss is None else self.loss + loss

    def stretch(self, waited_s: float, slowdown: float) -> None:
        """Make the step as long as on a machine `slowdown` times slower."""
        if slowdown > 1:
            time.sleep(self._busy_s(waited_s) * (slowdown - 1))

    def end_step(self, waited_s: float) -> float:
        """Seconds the step was busy, waiting for other nodes left out."""
        self.num_steps += 1
        self.undo = None
        return self._busy_s(waited_s)

    def _busy_s(self, waited_s: float) -> float:
        return time.monotonic() - self.began_at - (waited_s - self.waited_before_s)

    def undo_draw(self, order: Order) -> Order:
        """A step that was left in a wait has not happened: its samples come again after the resume."""
        if self.undo is None:
            return order
        state, rng = self.undo
        torch.set_rng_state(rng)
        return order.resume(state)

    def mean_loss(self, shards: Shards) -> float:
        """Nats per token since the last line, over all ranks of the node, which ask together."""
        if self.loss is None or not self.num_steps:
            return float("nan")
        mean = float(shards.sum(self.loss)) / self.num_steps / shards.size
        self.loss, self.num_steps = None, 0
        return mean

    def norm(self) -> float:
        """The newest gradient norm before clipping. All ranks together."""
        if self.grad_norm is None:
            return float("nan")
        whole = getattr(self.grad_norm, "full_tensor", None)
        return float(whole() if whole else self.grad_norm)
