"""Ratios of probabilities, bounded so that they stay finite in fp32, and truncated importance weights.

A log-ratio is bounded to +-20 before it is exponentiated, so a ratio is at most 4.9e8 (as in verl's rollout
correction). The bound is on the value alone: the gradient of a bounded ratio is its value times the gradient
of the log-ratio, so that a token beyond the bound is still pulled back.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossSettings

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """Ratio of the trained to the proximal policy, and weights of the proximal over the behaviour policy."""

    r_BT: Tensor
    """Ratio, with gradient; 1 outside of the mask."""
    w_BT: Tensor
    """Importance weight, without gradient; 1 where `LossSettings.importance` is off."""


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x) with x bounded to +-20; the gradient is the value times that of x."""
    return x.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * (x - x.detach()).exp()


def k3_of(d: Tensor) -> Tensor:
    """Return exp(d) - d - 1, with d bounded to +-20 in the exponential as in `bounded_exp`.

    expm1 keeps what exp(d) - 1 rounds away: near the policy d is 1e-6, and the result 5e-13.
    """
    bounded = d.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded.expm1() + bounded.exp() * (d - d.detach()) - d


def masked_difference(a_BT: Tensor, b_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return a - b, at least in fp32; 0 outside of the mask, whatever is there, also in the gradient."""
    dtype = torch.promote_types(torch.promote_types(a_BT.dtype, b_BT.dtype), torch.float32)
    return (a_BT.to(dtype) - b_BT.to(dtype)).where(mask_BT, 0.0)


def proximal_of(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the log-probabilities that ratios are relative to, without gradient.

    Those of the behaviour policy without importance weights. With them, the ratio is relative to the policy
    before the first inner step on the batch, and the weight accounts for the rest (decoupled PPO,
    arXiv:2110.00641, as AReaL uses it, arXiv:2505.24298).
    """
    if settings.importance == "off":
        return inputs.behaviour_BT.detach()
    return (inputs.logp_BT if inputs.proximal_BT is None else inputs.proximal_BT).detach()


def weights(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return truncated importance weights w (B, T), without gradient.

    token: min(p_prox / mu, C); sequence: min(product over the tokens of p_prox / mu, C); C importance_cap.
    Truncated importance sampling, arXiv:1802.01561 and verl's rollout correction. A weight with gradient
    would change what is estimated.
    """
    prox_BT = proximal_of(inputs, settings)
    log_BT = masked_difference(prox_BT, inputs.behaviour_BT.detach(), inputs.mask_BT)
    if settings.importance == "sequence":
        log_BT = log_BT.sum(1, keepdim=True).expand_as(log_BT)
    return bounded_exp(log_BT).clamp(max=settings.importance_cap)


def ratios(inputs: LossInputs, settings: LossSettings) -> Ratios:
    """Return ratios and importance weights of each token."""
    log_BT = masked_difference(inputs.logp_BT, proximal_of(inputs, settings), inputs.mask_BT)
    r_BT = bounded_exp(log_BT)
    w_BT = torch.ones_like(r_BT).detach() if settings.importance == "off" else weights(inputs, settings)
    return Ratios(r_BT, w_BT)
