"""Metrics of a policy loss, as sums and counts that can be added over micro-batches and ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from aedit.spec_rollout.rl.importance import k3_of, masked_difference
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput

MEANS = {
    "mismatch_kl": "tokens",
    "mismatch_kl_masked": "clipped",
    "mismatch_kl_unmasked": "kept",
    "clip_share": "tokens",
    "entropy": "tokens",
    "reference_kl": "reference_tokens",
}
"""Each metric, a sum, with the count that it is to be divided by."""


@torch.no_grad()
def loss_metrics(
    inputs: LossInputs, output: LossOutput, entropy_BT: Tensor | None = None
) -> dict[str, float]:
    """Return sums and counts; add those of all micro-batches and ranks, then call `mean_metrics`.

    Mismatch is r - log r - 1 with r = p / mu: an estimate of KL(mu || p), 0 on policy. It is
    summed over all tokens, over those that the trust region has removed (masked), and over the others.

    Args:
        inputs: Inputs of the loss.
        output: Output of the loss.
        entropy_BT: Entropy of the trained policy at each token. Without it, -log mu stands for it, whose mean
            is the entropy of the behaviour policy.
    """
    mask_BT = inputs.mask_BT
    log_BT = masked_difference(inputs.logp_BT, inputs.behaviour_BT, mask_BT)
    mismatch_BT = _divergence(log_BT)
    kept_BT, clipped_BT = output.kept_BT & mask_BT, ~output.kept_BT & mask_BT
    entropy_BT = -inputs.behaviour_BT if entropy_BT is None else entropy_BT
    found = {
        "tokens": mask_BT,
        "kept": kept_BT,
        "clipped": clipped_BT,
        "clip_share": clipped_BT,
        "mismatch_kl": mismatch_BT,
        "mismatch_kl_masked": mismatch_BT.where(clipped_BT, 0.0),
        "mismatch_kl_unmasked": mismatch_BT.where(kept_BT, 0.0),
        "entropy": entropy_BT.where(mask_BT, 0.0),
    }
    if inputs.reference_BT is not None:
        found["reference_tokens"] = mask_BT
        found["reference_kl"] = _divergence(masked_difference(inputs.reference_BT, inputs.logp_BT, mask_BT))
    return {name: float(value_BT.sum(dtype=torch.float64)) for name, value_BT in found.items()}


def _divergence(d_BT: Tensor) -> Tensor:
    """Return `k3_of` in float64, never below 0: the rounding of fp32 is larger than the value on policy."""
    return k3_of(d_BT.double()).clamp_min(0.0)


def mean_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the means of added-up `loss_metrics`; a metric that nothing was counted for is left out."""
    return {
        name: totals[name] / totals[count]
        for name, count in MEANS.items()
        if name in totals and totals.get(count, 0) > 0
    }
