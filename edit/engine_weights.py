"""Update of the engine that generates rollouts with the weights of the trainer.

The policy version is a counter local to this process. It is incremented when the weights have changed since
the last update (inner step, landing or checkpoint load).
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from aedit.edit.shards import Shards, reshard
from aedit.weights import WeightWatch, sharded, take_part


class PolicyEngine(Protocol):
    """The parts of an engine that an update uses, such as those of `aedit.spec_rollout.Engine`."""

    @property
    def version(self) -> int:
        """Return the version of the weights that the engine has."""

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Take over `weights`, which may be sharded or the engine's own parameters, as `version`."""


class EngineWeights:
    """Number the weights of `model` and give them to engines. shards: the ranks of the node."""

    def __init__(self, model: nn.Module, shards: Shards) -> None:
        self.version = 0
        """Version of the weights at the last update; 0 before the first one."""
        self._model, self._shards = model, shards
        self._watch: WeightWatch | None = None
        self._steps = 0

    def update(self, engine: PolicyEngine | None, policy: nn.Module, steps: int) -> int:
        """Give the weights of `policy` to the engine and return their version.

        All ranks of the node call it together. An engine that has them already is left alone.

        Args:
            engine: The engine of this rank; None if only other ranks have one.
            policy: The trained model or the part of it that the engine runs.
            steps: Inner steps so far.

        Raises:
            ValueError: The weights do not fit an engine of the node; no engine has changed.
            RuntimeError: A rank was lost on the way.
        """
        reshard(self._model.modules())
        if self._watch is None:
            self._watch, changed = WeightWatch(self._model), True
        elif changed := steps != self._steps or self._watch.changed(thorough=True) is not None:
            self._watch.look()
        self._steps = steps
        has = -1 if engine is None else engine.version
        differs = engine is not None and has != self.version
        any_changed, newest, any_differs = self._shards.most([changed, has, differs])
        if any_changed or (any_differs and newest >= self.version):
            self.version = max(self.version, newest) + 1
        elif not any_differs:
            return self.version
        weights = policy.state_dict(keep_vars=True)
        if engine is not None:
            engine.update_weights(weights, self.version)
        elif sharded(weights):
            take_part(weights)
        return self.version
