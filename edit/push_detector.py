"""Detector of incredible pseudo-gradients on a node of a hub, whose pushes differ in their steps."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aedit.async_sgd.rules import PenaltyConfig
from aedit.edit.detector import NormHistory, judge, learned_only
from aedit.edit.named import history, named_history


class PushDetector:
    """Compare the norms of a node's pushes with its own earlier norms.

    The number of steps in a push varies with the pace, and after an outage. Correct norms grow with it, but
    no faster. So a unit is distrusted only if its norm is too large both as it is (fewer steps cannot explain
    it) and per step (more steps cannot).

    Args:
        num_units: Number of units of the model.
        config: Threshold and length of the history.
    """

    def __init__(self, num_units: int, config: PenaltyConfig) -> None:
        self.norms = self.norms_per_step = NormHistory.empty(num_units, config.window)
        self._num_units, self._config = num_units, config

    def distrusted(
        self, G_L: Tensor, steps_L: Tensor, units: Sequence[int], apart: Sequence[int] = ()
    ) -> frozenset[int]:
        """Return the units whose norm is not credible, and add the norms of the others to the history.

        Args:
            G_L: Norms of `units`, float64.
            steps_L: Inner steps in the next push of every unit of the model, float64.
            units: The units of the round.
            apart: Those of them that are distrusted only if their norm is not finite.
        """
        at = list(units)
        all_L = torch.zeros(self._num_units, dtype=torch.float64)
        all_L[at] = G_L
        believed_L, norms = judge(all_L, self.norms, self._config)
        per_step = judge(all_L / steps_L.clamp(min=1), self.norms_per_step, self._config)
        self.norms = learned_only(norms, self.norms, at)
        self.norms_per_step = learned_only(per_step[1], self.norms_per_step, at)
        suspect_L = believed_L.isinf() & per_step[0].isinf()
        suspect_L[list(apart)] &= ~all_L[list(apart)].isfinite()
        return frozenset(i for i in units if suspect_L[i])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the histories by name."""
        return named_history("history", self.norms) | named_history("history_per_step", self.norms_per_step)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.norms = history("history", state)
        self.norms_per_step = history("history_per_step", state)
