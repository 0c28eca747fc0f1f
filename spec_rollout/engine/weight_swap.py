"""New weights of an engine: prepared beside those in use, and taken over between two steps."""

from collections.abc import Mapping

from torch import Tensor

from aedit.spec_rollout.engine.engine import Engine
from aedit.spec_rollout.engine.request_checks import EngineLimits
from aedit.spec_rollout.model import SpareWeights, make_target


class WeightSwap:
    """A second set of weights for `engine`, used again for each version.

    `fill` may be called by any thread while the engine generates; the other methods by the engine's thread,
    between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._spare = SpareWeights(engine.target.model)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the second set."""
        return self._spare.num_bytes

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy new weights into the second set. Raises ValueError if they do not fit.

        An engine that `finish` returned must have ended its samples: its weights are overwritten.
        """
        self._spare.fill(weights)

    def recompute(self, version: int) -> None:
        """Generate with the filled weights from the next step on; see `Engine.update_weights`, `in_steps`.

        Raises ValueError if `version` is not above the engine's, which goes on as it was.
        """
        self._check(version)
        if self._engine.target.device.type == "cuda":
            # Captured graphs stay valid, and the copy takes less than a step.
            self._engine.update_weights(self._spare.model.state_dict(), version, in_steps=True)
            return
        self._spare.exchange()
        self._engine.update_weights(None, version, in_steps=True)

    def finish(self, version: int) -> Engine | None:
        """Generate new samples with the filled weights; return an engine with those that have begun.

        It ends them with the weights that they began with, as plain decoding: the drafters stay here, the
        tokens are the same. Until then both sets of weights are in use, and keys and values of both engines.
        None: no sample had begun.

        Raises ValueError if `version` is not above the engine's, which goes on as it was.
        """
        self._check(version)
        engine, target = self._engine, self._engine.target
        before = engine.version
        unbegun = [rollout for rollout in engine.waiting if not rollout.tokens]
        prompts = [engine.remove(rollout) for rollout in unbegun]
        begun = [engine.remove(rollout, kv=True) for rollout in [*engine.running, *engine.waiting]]
        self._spare.exchange()
        engine.update_weights(None, version)
        for prompt in prompts:
            engine.add(prompt)
        if not begun:
            return None
        twin = make_target(
            self._spare.model,
            rows=target.rows,
            max_tokens=target.max_tokens,
            path="fast" if target.path == "fast" else "generic",
        )
        limits = EngineLimits(prefill_tokens=2**31, prefix_cache_bytes=0, packed_bytes=0)
        old = Engine(twin, tokenizer=engine.tokenizer, limits=limits)
        old.update_weights(None, before)
        for prompt in begun:
            old.add(prompt)
        return old

    def _check(self, version: int) -> None:
        if version <= self._engine.version:
            raise ValueError(
                f"version {version} is not above version {self._engine.version}, which the engine has"
            )
