"""Engines of a fixed pace: they draw real tokens, and each decode step lasts a fixed time.

So several of them fit on two cores, and what a run takes says nothing about this machine.
"""

import time
from collections.abc import Sequence

from torch import Tensor, nn

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.server import EngineSpec, make_engine

NODES = 1
"""Nothing is drafted."""


class PacedTarget(Target):
    """Target whose decode steps last `step_s` each, as long as the machine is fast enough.

    A step begins where the last one should have ended, so that the engine's own work is part of the time; one
    that was late makes the next one shorter, by a step at most.
    """

    def __init__(self, model: nn.Module, *, rows: int, max_tokens: int, step_s: float) -> None:
        super().__init__(model, rows, max_tokens, NODES, ())
        self.step_s = step_s
        self._ended_s = 0.0

    def step(
        self, tokens_Bq: Tensor, lengths_B: Sequence[int] | Tensor, parents_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        began_s = time.monotonic()
        follows = began_s - self._ended_s < self.step_s
        due_s = (self._ended_s if follows else began_s) + self.step_s
        made = super().step(tokens_Bq, lengths_B, parents_BN)
        time.sleep(max(0.0, due_s - time.monotonic()))
        self._ended_s = max(due_s, time.monotonic() - self.step_s)
        return made


def make_paced(spec: EngineSpec) -> Engine:
    """Return an engine with random weights whose decode steps last `spec.options["step_s"]`.

    0 is as fast as it can. The trainer's own worker makes its engine with it, as the servers do.
    """
    plain = make_engine(spec)
    step_s = float(spec.options["step_s"])
    if not step_s:
        return plain
    target = PacedTarget(plain.target.model, rows=spec.rows, max_tokens=spec.max_tokens, step_s=step_s)
    return Engine(target)
