"""Inputs, settings and output of a policy loss.

Letters of the papers: p probability of a token under the trained policy, mu under the policy that generated
it (behaviour), r = p / mu, A advantage, B sequences, T tokens per sequence.
"""

from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import Tensor

from aedit.types import NonNegativeFloat, PositiveFloat, PositiveInt, check, checked

Importance = Literal["off", "token", "sequence"]


@checked()
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Log-probabilities and advantages of some sequences of a batch.

    The values of a loss over the parts of a batch (micro-batches, ranks) add up to that of the batch, because
    the numbers by which it divides are those of the whole batch.
    """

    logp_BT: Tensor
    """log p of each token under the trained policy, with gradient. Finite where the mask is true."""
    behaviour_BT: Tensor
    """log mu of each token under the policy version that drew it: `Rollout.logprobs`."""
    mask_BT: Tensor
    """bool: tokens that are trained. False for prompts, padding and rollouts without a reward."""
    advantages_B: Tensor
    reference_BT: Tensor | None = None
    """Log-probabilities under a fixed policy, for `LossSettings.kl`."""
    proximal_BT: Tensor | None = None
    """Log-probabilities under the trained policy before the first inner step on this batch, for
    `LossSettings.importance`. None: those of now, which is right at the first step on a batch."""
    num_tokens: PositiveInt
    """True mask elements of the whole batch, over ranks and micro-batches."""
    num_sequences: PositiveInt
    """Sequences of the whole batch that have a true mask element, over ranks and micro-batches."""
    max_tokens: PositiveInt
    """Largest number of new tokens of a rollout, whatever the lengths of this batch are."""

    def __post_init__(self) -> None:
        shape = tuple(self.logp_BT.shape)
        check(len(shape) == 2, "logp_BT", "must have two dimensions, sequences and tokens", shape)
        for name in ("behaviour_BT", "mask_BT", "reference_BT", "proximal_BT"):
            value = getattr(self, name)
            fits = value is None or tuple(value.shape) == shape
            check(fits, name, f"must have the shape of logp_BT, {shape}", value is None or tuple(value.shape))
        found = tuple(self.advantages_B.shape)
        check(found == shape[:1], "advantages_B", f"must have the shape {shape[:1]}", found)
        check(self.mask_BT.dtype == torch.bool, "mask_BT", "must be bool", self.mask_BT.dtype)


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of a policy loss: those of `[rl]` with the same names."""

    clip_low: PositiveFloat = 0.2
    """Clip range below: of the ratio below 1, of the difference of probabilities with `dppo-tv`."""
    clip_high: PositiveFloat = 0.2
    """Clip range above."""
    importance: Importance = "off"
    """Truncated importance weights per token or per sequence; see `aedit.spec_rollout.rl.importance`."""
    importance_cap: PositiveFloat = 2.0
    kl: NonNegativeFloat = 0.0
    """Weight of the divergence to the reference policy."""

    @classmethod
    def of(cls, rl: object) -> "LossSettings":
        """Return the settings of `[rl]`, which has fields of the same names."""
        return cls(**{field.name: getattr(rl, field.name) for field in fields(cls)})


@checked()
@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """A loss, and the tokens that its trust region has left alone."""

    loss: Tensor
    """Scalar, to be minimised: the sum over these sequences, divided by a number of the whole batch."""
    kept_BT: Tensor
    """bool: tokens of the mask whose term was neither clipped nor masked out."""


class PolicyLoss(Protocol):
    """A policy loss: a pure function of log-probabilities, advantages and settings."""

    def __call__(self, inputs: LossInputs, settings: LossSettings, /) -> LossOutput:
        """Return the loss of these sequences."""
