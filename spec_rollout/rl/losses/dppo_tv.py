"""DPPO with the total-variation mask, arXiv:2602.04879."""

from aedit.spec_rollout.rl.importance import ratios
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput, LossSettings
from aedit.spec_rollout.rl.losses.terms import per_token


def dppo_tv(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return sum_i sum_t -keep r A / tokens of the batch.

    keep is false where A > 0 and p - mu > clip_high, or A < 0 and p - mu < -clip_low: a token whose
    probability has already moved that far from the behaviour policy's, in the direction of the advantage, has
    no gradient. A ratio would clip rare tokens at once and likely ones hardly ever; a difference of
    probabilities bounds the total variation. r is never clipped.
    """
    found, mask_BT = ratios(inputs, settings), inputs.mask_BT
    A_B1 = inputs.advantages_B[:, None]
    p_BT, mu_BT = (x.detach().to(found.r_BT.dtype).exp() for x in (inputs.logp_BT, inputs.behaviour_BT))
    moved_BT = p_BT - mu_BT
    masked_BT = (A_B1 > 0) & (moved_BT > settings.clip_high) | (A_B1 < 0) & (moved_BT < -settings.clip_low)
    terms_BT = (-found.r_BT * A_B1).where(~masked_BT, 0.0)
    loss = per_token(terms_BT, found, inputs, settings).sum() / inputs.num_tokens
    return LossOutput(loss, ~masked_BT & mask_BT)
