"""An engine of this process as the source of rollouts of a training loop."""

import sys
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Protocol

from torch import Tensor

from aedit.spec_rollout.choose import Goodput
from aedit.spec_rollout.engine.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Rollout


class OnlineDrafting(Protocol):
    """The parts of an `OnlineDrafter` that its engine's source uses."""

    def after_update(self) -> None:
        """Follow the policy, which has new weights."""

    def adopt(self) -> bool:
        """Use the newest drafter that is better."""

    can_gain: bool
    """Whether drafts could gain anything: training and collection of features are off while it is false."""


BOUND_STEPS = 256
"""Steps of the engine after which the bound of what drafts can gain is looked at again."""
LEAST_GAIN = 1.02
"""Speed-up with every draft accepted that drafting, and training for it, must promise."""


class EngineSource:
    """`RolloutSource` of an engine, which generates while `step` is called."""

    def __init__(self, engine: Engine, online: OnlineDrafting | None = None) -> None:
        """Make the source.

        Args:
            engine: The engine.
            online: Its learned drafter: replaced between two steps. It follows the policy here if it learns
                from the engine's steps, as `engine.sink`.
        """
        self.engine, self.online = engine, online
        self.bound = inf
        """Speed-up over plain decoding if every draft of any arm were accepted, at the numbers of rows that
        occur; infinite before it is measured."""
        self._num_steps = 0
        self._plain_s = 0.0
        self._plain_tokens = 0
        self._drafted_tokens = self._drafted_passes = 0.0

    @property
    def version(self) -> int:
        """Return the policy version of the engine."""
        return self.engine.version

    @property
    def running(self) -> int:
        """Return the number of samples that run or wait."""
        return len(self.engine.running) + len(self.engine.waiting)

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Hand the weights to the engine; see `Engine.update_weights`."""
        before = self.engine.version
        self.engine.update_weights(weights, version)
        if self.online is not None and version != before:
            if self.engine.sink is not None:
                self.online.after_update()
            self._drafted_tokens, self._drafted_passes = self._drafted_tokens / 2, self._drafted_passes / 2

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Queue one sample per prompt.

        Raises ValueError if the engine cannot serve one of them.
        """
        for prompt in prompts:
            self.engine.add(prompt)

    def step(self) -> list[Rollout]:
        """Run one pass of the policy over the running samples; return those that have finished."""
        if self.online is not None:
            self.online.adopt()
        step = self.engine.step()
        self._num_steps += 1
        if self._num_steps % BOUND_STEPS == 0 and isinstance(self.engine.chooser, Goodput):
            self._check_bound(self.engine.chooser)
        if step.arm.is_off:
            self._plain_s += step.total_s
            self._plain_tokens += sum(step.counts)
        elif step.arm.drafter == "layer":
            self._drafted_tokens += sum(step.counts)
            self._drafted_passes += len(step.counts)
        return list(step.finished)

    def _check_bound(self, chooser: Goodput) -> None:
        """Measure what drafts can gain, and let the learned drafter train only where that is enough."""
        before, bounds = self.bound, chooser.bounds()
        self.bound = max(bounds.values())
        if self.online is not None:
            self.online.can_gain = bounds.get("layer", inf) > LEAST_GAIN
        if (self.bound > LEAST_GAIN) == (before > LEAST_GAIN):
            return
        is_off = self.bound <= LEAST_GAIN
        print(
            f"aedit: drafting is {'off' if is_off else 'on again'}: with every draft accepted, decoding at "
            f"about {chooser.busiest_rows} rows would be {self.bound:.2f} times as fast as without drafts"
            f"{'; looked at again when rows or lengths change' if is_off else ''}",
            file=sys.stderr,
            flush=True,
        )

    def pending(self) -> list[Prompt]:
        """Return the samples that are not finished, as prompts that continue them."""
        return [rollout.to_prompt() for rollout in [*self.engine.running, *self.engine.waiting]]

    def cancel(self) -> None:
        """Remove all samples."""
        for rollout in [*self.engine.running, *self.engine.waiting]:
            self.engine.abort(rollout)

    def status(self) -> Mapping[str, Any]:
        """Return totals since the start.

        `drafting_bound` is the speed-up over plain decoding if every draft were accepted, None before it is
        measured. `as_plain_s / compared_s` is the speed-up over plain decoding, see `SpeedUp`.
        `rollout_tokens`, `passes` (samples times steps), `arms` (steps by arm), and `plain_s` and
        `plain_tokens` of the steps without speculation. `drafted_length` are tokens per pass in steps that
        the learned drafter drafted; with each policy version older ones weigh half. None without such steps.
        """
        meters = self.engine.meters
        return {
            **meters.speed_up.figures(),
            "drafting_bound": self.bound if self.bound < inf else None,
            "rollout_tokens": meters.num_tokens,
            "passes": meters.num_passes,
            "arms": dict(meters.arms),
            "plain_s": self._plain_s,
            "plain_tokens": self._plain_tokens,
            "drafted_length": self._drafted_tokens / self._drafted_passes if self._drafted_passes else None,
        }

    def close(self) -> None:
        """Remove all samples."""
        self.engine.close()
