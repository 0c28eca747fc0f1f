"""Parts that several losses have in common: the clipped surrogate, and the terms of each token."""

import torch
from torch import Tensor

from aedit.spec_rollout.rl.importance import Ratios
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossSettings
from aedit.spec_rollout.rl.losses.kl import kl_term


def clipped_surrogate(r: Tensor, A: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r, 1 - e_low, 1 + e_high) A), and where the clip has not removed the gradient.

    PPO, arXiv:1707.06347. r and A broadcast against each other.
    """
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    terms = -torch.min(r * A, r.clamp(low, high) * A)
    clipped = (A > 0) & (r > high) | (A < 0) & (r < low)
    return terms, ~clipped


def per_token(policy_BT: Tensor, found: Ratios, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return w * policy term + kl * KL term of each token, 0 outside of the mask."""
    terms_BT = found.w_BT * policy_BT
    if settings.kl > 0:
        if inputs.reference_BT is None:
            raise ValueError("kl is above 0, so reference_BT is needed: log-probabilities of the reference")
        r_BT = found.w_BT * found.r_BT
        terms_BT = terms_BT + settings.kl * kl_term(inputs.logp_BT, inputs.reference_BT, inputs.mask_BT, r_BT)
    return terms_BT.where(inputs.mask_BT, 0.0)


def sum_of_means(terms_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum over sequences of the mean over the tokens of each; 0 for one without tokens."""
    return (terms_BT.sum(1) / mask_BT.sum(1).clamp(min=1)).sum()
