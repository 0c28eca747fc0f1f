"""Measure time, loss and gradient norm of training steps between two lines of metrics."""

import time
from dataclasses import dataclass

from torch import Tensor

from aedit.edit import Shards


@dataclass(slots=True)
class StepMeter:
    """Measurements of the current step and of the steps since the last line of metrics."""

    grad_norm: Tensor | None = None
    loss: Tensor | None = None
    num_steps: int = 0
    began_at: float | None = None
    """None: no step has begun."""
    waited_before_s: float = 0.0

    def begin_step(self, waited_s: float) -> None:
        """Start to measure, before the step draws its samples; do nothing if the step has begun already.

        waited_s: the node's waiting time so far, here and below.
        """
        if self.began_at is None:
            self.began_at, self.waited_before_s = time.monotonic(), waited_s

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch; it stays on its device, so that nothing waits for it."""
        self.loss = loss if self.loss is None else self.loss + loss

    def slow_down(self, waited_s: float, slowdown: float) -> None:
        """Sleep until the step has taken `slowdown` times its own duration."""
        if slowdown > 1:
            time.sleep(self._busy_s(waited_s) * (slowdown - 1))

    def end_step(self, waited_s: float) -> float:
        """Return the seconds of the step without waiting for other nodes."""
        busy_s = self._busy_s(waited_s)
        self.num_steps, self.began_at = self.num_steps + 1, None
        return busy_s

    def _busy_s(self, waited_s: float) -> float:
        assert self.began_at is not None
        return time.monotonic() - self.began_at - (waited_s - self.waited_before_s)

    def mean_loss(self, shards: Shards) -> float:
        """Return the mean loss since the last line, in nats per token. All ranks of the node together."""
        if self.loss is None or not self.num_steps:
            return float("nan")
        mean = float(shards.sum(self.loss)) / self.num_steps / shards.size
        self.loss, self.num_steps = None, 0
        return mean

    def norm(self) -> float:
        """Return the newest gradient norm before clipping. All ranks of the node together."""
        if self.grad_norm is None:
            return float("nan")
        whole = getattr(self.grad_norm, "full_tensor", None)
        return float(whole() if whole else self.grad_norm)
