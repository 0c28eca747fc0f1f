"""CISPO, arXiv:2506.13585 (MiniMax-M1)."""

from aedit.spec_rollout.rl.importance import ratios
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput, LossSettings
from aedit.spec_rollout.rl.losses.terms import per_token


def cispo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return sum_i sum_t -sg[min(r, 1 + e_high)] A log p / tokens of the batch; sg stops the gradient.

    The weight of a token is cut, never its gradient, so clip_low has no effect (nor has it in the paper). A
    cap of 5 (ScaleRL, arXiv:2510.13786) is clip_high = 4.
    """
    found, cap = ratios(inputs, settings), 1 + settings.clip_high
    weight_BT = found.r_BT.detach().clamp(max=cap)
    logp_BT = inputs.logp_BT.to(weight_BT.dtype).where(inputs.mask_BT, 0.0)
    terms_BT = -weight_BT * inputs.advantages_B[:, None] * logp_BT
    loss = per_token(terms_BT, found, inputs, settings).sum() / inputs.num_tokens
    return LossOutput(loss, (found.r_BT <= cap) & inputs.mask_BT)
