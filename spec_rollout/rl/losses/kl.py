"""KL divergence to a reference policy."""

from torch import Tensor

from aedit.spec_rollout.rl.importance import k3_of, masked_difference


def k3(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return exp(d) - d - 1 per token, d = log ref - log p; 0 outside of the mask.

    Its mean over tokens drawn from p is KL(p || ref), and it is never negative (Schulman, "Approximating KL
    divergence", 2020). d is bounded to +-20 in the exponential.
    """
    return k3_of(masked_difference(reference_BT.detach(), logp_BT, mask_BT))


def kl_term(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, r_BT: Tensor) -> Tensor:
    """Return r * k3 per token.

    r = p / mu, with gradient, makes value and gradient those of the KL divergence of the trained policy,
    although the tokens are drawn from mu (DeepSeek-V3.2, arXiv:2512.02556).
    """
    return r_BT * k3(logp_BT, reference_BT, mask_BT)
