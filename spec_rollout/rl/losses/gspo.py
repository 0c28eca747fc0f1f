"""GSPO, arXiv:2507.18071."""

from aedit.spec_rollout.rl.importance import bounded_exp, masked_difference, proximal_of, ratios
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput, LossSettings
from aedit.spec_rollout.rl.losses.terms import clipped_surrogate, per_token, sum_of_means


def gspo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return 1/B sum_i -min(s A, clip(s, 1 - e_low, 1 + e_high) A), s_i = exp(1/T_i sum_t log r).

    A sequence is clipped as a whole. s is much closer to 1 than the ratio of a token: the paper clips at 3e-4
    below and 4e-4 above. The paper's advantage is `std`.
    """
    found = ratios(inputs, settings)
    log_BT = masked_difference(inputs.logp_BT, proximal_of(inputs, settings), inputs.mask_BT)
    s_B = bounded_exp(log_BT.sum(1) / inputs.mask_BT.sum(1).clamp(min=1))
    terms_B, kept_B = clipped_surrogate(s_B, inputs.advantages_B, settings)
    terms_BT = per_token(terms_B[:, None].expand_as(log_BT), found, inputs, settings)
    loss = sum_of_means(terms_BT, inputs.mask_BT) / inputs.num_sequences
    return LossOutput(loss, kept_B[:, None] & inputs.mask_BT)
