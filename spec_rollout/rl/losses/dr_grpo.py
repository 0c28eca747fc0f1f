"""Dr. GRPO, arXiv:2503.20783."""

from aedit.spec_rollout.rl.importance import ratios
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput, LossSettings
from aedit.spec_rollout.rl.losses.terms import clipped_surrogate, per_token


def dr_grpo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return sum_i sum_t -min(r A, clip(r, 1 - e_low, 1 + e_high) A) / (B * max_tokens).

    Divided by a constant, so that the length of a sequence has no influence on the weight of its tokens. The
    paper's advantage is `mean`.
    """
    found = ratios(inputs, settings)
    terms_BT, kept_BT = clipped_surrogate(found.r_BT, inputs.advantages_B[:, None], settings)
    terms_BT = per_token(terms_BT, found, inputs, settings)
    loss = terms_BT.sum() / (inputs.num_sequences * inputs.max_tokens)
    return LossOutput(loss, kept_BT & inputs.mask_BT)
